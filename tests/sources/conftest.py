"""A hub on loopback with a tiny checkpoint, and commands as real processes against it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.sources.hub_stand_in import HubStandIn, commit_of, serving
from tests.sources.processes import Commands, clean_environment
from tests.tiny import read_safetensors, write_safetensors, write_tiny_gemma4

PAPERS = {
    "LICENSE": b"Apache",
    "NOTICE.txt": b"notice",
    "GEMMA_TERMS.md": b"terms",
    "README.md": b"# card",
}
OTHERS = {
    ".gitattributes": b"*.safetensors filter=lfs",
    "pytorch_model.bin": b"pickle" * 1000,
    "model.onnx": b"onnx" * 1000,
    "gemma-q4.gguf": b"gguf" * 1000,
    "original/consolidated.safetensors": b"other" * 1000,
}
"""What a repository has besides: never fetched."""


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as a folder, with its papers."""
    folder = write_tiny_gemma4(tmp_path_factory.mktemp("tiny") / "gemma", layers=6)
    for name, data in PAPERS.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a vision tensor that a text port skips: 40 MB in one file, three parts of a download."""
    folder = write_tiny_gemma4(tmp_path_factory.mktemp("large") / "gemma", layers=6)
    tensors = read_safetensors(folder / "model.safetensors")
    noise = np.random.default_rng(7).bytes(40_000_000)
    tensors["model.vision_tower.patches"] = ("F32", (10_000_000,), noise)
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@pytest.fixture
def hub(tiny: Path) -> Iterator[HubStandIn]:
    stand_in = HubStandIn()
    stand_in.add(commit_of(1), files_of(tiny) | OTHERS)
    with serving(stand_in):
        yield stand_in


@pytest.fixture
def commands(hub: HubStandIn, tmp_path: Path) -> Commands:
    """Commands that know the stand-in, an empty cache and no token."""
    return Commands(
        clean_environment() | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf")}
    )
