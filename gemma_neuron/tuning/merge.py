"""Merge an adapter into its base: the folder copied verbatim, and only the touched tensors rewritten in place.

In: where each tensor lies, an adapter, a new folder. Out: a checkpoint with the same files, headers and bytes but
for those tensors. Never through `save_pretrained`, which writes a Gemma 4 config in another schema and
holds the model. The sum is taken in float32 and rounded once to the tensor's dtype.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gemma_neuron.artifacts import PARTIAL_SUFFIX, remove, sync_folder, writing_failed
from gemma_neuron.errors import UsageError
from gemma_neuron.tuning.adapter import Adapter, AdapterError, Factors

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = 64 * 1024 * 1024
"""Rows are merged in blocks of about so many bytes in float32."""
TORCH_DTYPES = {"BF16": "bfloat16", "F32": "float32"}
Progress = Callable[[str], None]


class Tensor(Protocol):
    """Where a checkpoint's tensor lies: `bytes` from absolute offset `start` of `file`, [out, in]."""

    @property
    def name(self) -> str: ...
    @property
    def file(self) -> Path: ...
    @property
    def start(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What `merge` answers (JSON contract): tensors `changed` and `copied` as they were."""

    out: Path
    changed: int
    copied: int

    def to_json(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "tensors": {"changed": self.changed, "copied": self.copied},
        }


def merge_adapter(
    source: Path,
    tensors: Mapping[str, Tensor],
    adapter: Adapter,
    out: Path,
    *,
    value_is_key: Iterable[int],
    progress: Progress,
) -> Merged:
    """`tensors`: our name → where it lies. `value_is_key`: layers whose V is their K.

    Raises AdapterError for a factor that fits no tensor or makes it overflow, UsageError when `out` is taken,
    DiskFullError or EnvironmentProblem when it cannot be written; then nothing is left of it.
    """
    pairs = [_target(tensors, each, frozenset(value_is_key)) for each in adapter.factors.values()]
    _require_new(out, source)
    partial = out.with_name(out.name + PARTIAL_SUFFIX)
    remove(partial)
    try:
        partial.mkdir(parents=True)
        _copy(source, partial, progress)
        for number, (tensor, factors) in enumerate(pairs):
            progress(f"merge: {number + 1} of {len(pairs)}, {tensor.name}")
            _rewrite(partial / tensor.file.name, tensor, factors)
        _sync(partial)
        if out.is_dir():
            out.rmdir()
        partial.replace(out)
    except OSError as error:
        remove(partial)
        raise writing_failed(out, error) from error
    except BaseException:
        remove(partial)
        raise
    sync_folder(out.parent)
    return Merged(out=out, changed=len(pairs), copied=len(tensors) - len(pairs))


def _require_new(out: Path, source: Path) -> None:
    """Raise UsageError unless `out` is not there, or an empty folder of its own outside the source."""
    taken = out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir())))
    if taken or not out.name:
        raise UsageError(f"--out {out} is there already.", "Name a new folder.")
    if out.resolve().is_relative_to(source.resolve()):
        raise UsageError(
            f"--out {out} lies inside the source {source}, which stays as it is.",
            "Name a folder outside it.",
        )


def _target(
    tensors: Mapping[str, Tensor], factors: Factors, value_is_key: frozenset[int]
) -> tuple[Tensor, Factors]:
    """The tensor a pair of factors changes. Raises AdapterError, by name, where there is none."""
    parts = factors.name.split(".")
    if "v_proj" in parts and parts[0] == "layers" and int(parts[1]) in value_is_key:
        raise AdapterError(
            f"The adapter changes {factors.name}, which this checkpoint has not: with attention_k_eq_v the "
            "layer's V is its K.",
            "Leave v_proj of the global layers out of the target modules.",
        )
    tensor = tensors.get(factors.name)
    if tensor is None:
        raise AdapterError(
            f"The adapter changes {factors.name}, which is no tensor of this checkpoint.",
            "Name the checkpoint the adapter was trained on.",
        )
    shape = (factors.b.shape[0], factors.a.shape[1])
    if tensor.shape != shape:
        raise AdapterError(
            f"The adapter's {factors.name} is {list(shape)}; the checkpoint's is {list(tensor.shape)}.",
            "Name the checkpoint the adapter was trained on.",
        )
    return tensor, factors


def _copy(source: Path, partial: Path, progress: Progress) -> None:
    """Every file of the folder, links as what they point to: a hub snapshot becomes a plain folder."""
    for path in sorted(source.iterdir()):
        if path.is_file():
            progress(f"copy: {path.name}")
            shutil.copyfile(path, partial / path.name)


def _rewrite(path: Path, tensor: Tensor, factors: Factors) -> None:
    import torch

    dtype = getattr(torch, TORCH_DTYPES[tensor.dtype])
    rows, columns = tensor.shape
    item = tensor.bytes // (rows * columns)
    a, b = factors.a, factors.b
    block = max(1, BLOCK_BYTES // (4 * columns))
    with path.open("r+b") as file:
        for first in range(0, rows, block):
            count = min(block, rows - first)
            offset = tensor.start + first * columns * item
            data = bytearray(os.pread(file.fileno(), count * columns * item, offset))
            weight = torch.frombuffer(data, dtype=dtype).view(count, columns).to(torch.float32)
            merged = (weight + factors.scale * (b[first : first + count] @ a)).to(dtype)
            if not bool((torch.isfinite(merged) | ~torch.isfinite(weight)).all()):
                raise AdapterError(
                    f"The adapter's {tensor.name} makes values that {tensor.dtype} does not hold: its scale is "
                    f"{factors.scale:g}.",
                    "Is its lora_alpha what it was trained with?",
                )
            os.pwrite(file.fileno(), _bytes(merged), offset)


def _bytes(value: torch.Tensor) -> bytes:
    import torch

    return value.contiguous().view(torch.uint8).numpy().tobytes()


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)
