"""The bundled checkpoint: where it lies, a copy of it, a question it was taught."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

from gemma_neuron.errors import UsageError


def demo_folder() -> Path:
    """The bundled checkpoint."""
    return Path(__file__).parent / "data" / "demo-model"


def export_demo(destination: Path) -> list[str]:
    """Copy the bundled checkpoint into a new folder; the names copied."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UsageError(f"--export {destination} is there already.", "Name a new folder.")
    shutil.copytree(demo_folder(), destination, dirs_exist_ok=True)
    return sorted(path.name for path in destination.iterdir())


def demo_question() -> str:
    """The first question the bundled model was taught."""
    taught = tomllib.loads((demo_folder() / "validation.toml").read_text(encoding="utf-8"))
    return str(taught["questions"][0]["prompt"])
