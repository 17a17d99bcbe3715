"""Tensors of a checkpoint folder by name: views of the mapped weight files, read when they are used.

In: a folder with `model.safetensors`, or an index that names its files. Refused: an index with names that are no
plain file names, and a folder without weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_neuron.errors import ReferenceUnavailableError

if TYPE_CHECKING:
    from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class StoredTensors:
    """Name → tensor on the mapped file. Pages are the file's own: they are no anonymous memory."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._file_of: dict[str, Any] = {}
        for path in weight_files(folder):
            file: Any = safe_open(str(path), framework="pt")
            self._file_of |= dict.fromkeys(file.keys(), file)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def view(self, name: str) -> Tensor:
        """The tensor in the file's dtype. Must not be written to."""
        view: Tensor = self._file_of[name].get_tensor(name)
        return view


def weight_files(folder: Path) -> list[Path]:
    """The files stock transformers would load, in its order of preference."""
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return [single]
    if index.is_file():
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        odd = next((name for name in names if Path(name).name != name), None)
        if odd is None:
            return [folder / name for name in names]
        raise ReferenceUnavailableError(
            f"{index} names the file {odd!r}, which is not a plain name.",
            "Run `gemma-neuron inspect` on the checkpoint.",
        )
    raise ReferenceUnavailableError(
        f"{folder} holds neither {SINGLE} nor {INDEX}.", "Give a checkpoint's folder."
    )
