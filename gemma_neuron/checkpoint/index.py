"""Every tensor of a checkpoint and where its bytes lie, from the headers alone.

In: a `Source`. Out: `CheckpointIndex`: entries by name, and findings about files, index and headers.
Nothing is raised for what a file says; findings are collected so that one run shows them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_neuron.checkpoint.findings import FindingList
from gemma_neuron.checkpoint.header import FileHeader, TensorEntry, read_header
from gemma_neuron.checkpoint.selection import (
    INDEX_LIMIT,
    INDEX_NAME,
    SINGLE_NAME,
    is_plain_weights_name,
    is_weights,
)
from gemma_neuron.checkpoint.source import Source
from gemma_neuron.checkpoint.storage import OpenFile, read_json_object
from gemma_neuron.errors import CheckpointError
from gemma_neuron.regular_files import VANISHED, FileState, RefusedFileError, changed, require_same
from gemma_neuron.reports import Finding, FindingKind
from gemma_neuron.strict_json import BadJsonError
from gemma_neuron.transfer import all_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SAMPLE_BYTES = 4096
"""Read from the start of each tensor for the digest: two checkpoints of one geometry have equal headers."""
READERS = 8
"""Small ranges asked for at once from a remote source."""

__all__ = ["CheckpointIndex", "TensorEntry"]


@dataclass(frozen=True)
class CheckpointIndex:
    """Tensors by name. `headers` are of the files in use, `findings` of everything that is wrong."""

    source: Source
    headers: tuple[FileHeader, ...]
    tensors: dict[str, TensorEntry]
    findings: tuple[Finding, ...]

    @classmethod
    def open(cls, source: Source) -> CheckpointIndex:
        """Read the index and all headers of a folder. Raises nothing about their content."""
        return _Builder(source).build()

    @cached_property
    def digest(self) -> str:
        """Names the checkpoint: blake3 over file names, sizes, headers and the first bytes of each tensor.

        Not a proof of integrity (the sharder digests whole files); it tells checkpoints apart. Empty for a
        remote source: a request for each tensor would take longer than the audit.
        """
        from blake3 import blake3

        if self.source.files.remote:
            return ""

        hasher = blake3()
        for header in sorted(self.headers, key=lambda h: h.file.name):
            hasher.update(f"{header.file.name}\n{header.size}\n{len(header.raw)}\n".encode())
            hasher.update(header.raw)
            with self.opened(header.file.name) as file:
                for entry in header.tensors:
                    hasher.update(file.read(min(entry.bytes, SAMPLE_BYTES), entry.start))
        return hasher.hexdigest()

    @cached_property
    def states(self) -> dict[Path, FileState]:
        """Each file as it was when its header was read; without those that are not on this machine."""
        return {h.file: h.state for h in self.headers if h.state is not None}

    @contextmanager
    def opened(self, name: str) -> Iterator[OpenFile]:
        """A file whose header was read. Raises SourceChangedError when it is no longer that file."""
        path = self.source.folder / name
        with ExitStack() as stack:
            try:
                file = stack.enter_context(self.source.files.opened(name))
            except FileNotFoundError as error:
                raise changed(path, VANISHED) from error
            except RefusedFileError as error:
                raise changed(path, error.message.rstrip(".")) from error
            now = file.state
            if now is not None and path in self.states:
                require_same(path, self.states[path], now)
            yield file

    def read_bytes(self, entry: TensorEntry, offset: int = 0, count: int | None = None) -> bytes:
        """A tensor's bytes, or `count` of them from `offset`."""
        count = entry.bytes - offset if count is None else min(count, entry.bytes - offset)
        with self.opened(entry.file.name) as file:
            return exactly(file, count, entry, offset)

    def read_values(self, entry: TensorEntry) -> NDArray[np.float32] | NDArray[np.float64]:
        """A tensor's values: float64 for F64, else float32 (bfloat16 by shifting its bits)."""
        from gemma_neuron.checkpoint.values import to_float

        return to_float(self.read_bytes(entry), entry.dtype).reshape(entry.shape)

    def read_all_values(
        self, entries: Sequence[TensorEntry]
    ) -> list[NDArray[np.float32] | NDArray[np.float64]]:
        """As `read_values`, in the same order; from a remote source several at a time."""
        if not self.source.files.remote:
            return [self.read_values(entry) for entry in entries]
        return all_of(self.read_values, entries, READERS)


def exactly(file: OpenFile, count: int, entry: TensorEntry, offset: int) -> bytes:
    """`count` bytes of a tensor; CheckpointError where the file has become shorter than its header."""
    data = file.read(count, entry.start + offset)
    if len(data) < count:
        raise CheckpointError(
            f"{entry.file.name} ended inside {entry.name}: it became shorter while it was read.",
            "Wait until the download is done, then run the same command again.",
        )
    return data


@dataclass
class _Builder:
    """Gathers files, then headers, then compares both with the index."""

    source: Source
    findings: FindingList = field(default_factory=FindingList)
    misplaced: set[str] = field(default_factory=set)
    """Tensors whose file in the index was refused: named there all the same."""

    def build(self) -> CheckpointIndex:
        present = [name for name in self.source.files.names() if is_weights(name)]
        weight_map = self._weight_map()
        names = self._files_in_use(present, weight_map)
        headers = [header for name in names if (header := self._header(name, weight_map))]
        tensors: dict[str, TensorEntry] = {}
        for header in headers:
            self.findings.extend(header.findings)
            for entry in header.tensors:
                if entry.name in tensors:
                    self._add(
                        "duplicate-tensor",
                        f"{entry.name} stands in {tensors[entry.name].file.name} and in {header.file.name}; "
                        "which one counts is not said.",
                        tensor=entry.name,
                        file=header.file.name,
                    )
                else:
                    tensors[entry.name] = entry
        if weight_map is not None:
            self._compare(weight_map, headers)
        return CheckpointIndex(self.source, tuple(headers), tensors, self.findings.done())

    def _add(self, kind: FindingKind, message: str, *, tensor: str = "", file: str = "") -> None:
        self.findings.add(kind, message, tensor=tensor, file=file)

    def _weight_map(self) -> dict[str, str] | None:
        """tensor → file of a sound index; None without an index."""
        try:
            index = read_json_object(self.source.files, INDEX_NAME, INDEX_LIMIT)
        except FileNotFoundError:
            return None
        except BadJsonError as error:
            self._add("bad-header", f"{INDEX_NAME}: {error}.", file=INDEX_NAME)
            return None
        except RefusedFileError as error:
            self._add("unsafe-name", error.message, file=INDEX_NAME)
            return None
        return self._checked_map(index.get("weight_map"))

    def _checked_map(self, found: Any) -> dict[str, str] | None:
        if not isinstance(found, dict) or not found:
            self._add(
                "bad-header", f"{INDEX_NAME} has no weight_map with tensors in it.", file=INDEX_NAME
            )
            return None
        result, refused = {}, set()
        for tensor, file in found.items():
            if not isinstance(file, str) or not is_plain_weights_name(file):
                self.misplaced.add(tensor)
            if not isinstance(file, str):
                self._add(
                    "bad-header",
                    f"{INDEX_NAME} gives {tensor[:80]!r} {type(file).__name__} for a file name.",
                    tensor=tensor[:80],
                    file=INDEX_NAME,
                )
            elif not is_plain_weights_name(file):
                if file not in refused:
                    self._add(
                        "unsafe-name",
                        f"{INDEX_NAME} names the file {file[:120]!r}; only plain names of *.safetensors "
                        "in the same folder are opened.",
                        tensor=tensor[:80],
                        file=file[:120],
                    )
                refused.add(file)
            else:
                result[tensor] = file
        return result

    def _files_in_use(self, present: list[str], weight_map: dict[str, str] | None) -> list[str]:
        """Which files count, as stock transformers chooses; others are findings."""
        if weight_map is not None:
            used = sorted(set(weight_map.values()))
        elif SINGLE_NAME in present:
            used = [SINGLE_NAME]
        elif any(finding.file == INDEX_NAME for finding in self.findings):
            return present  # the index is there and broken: already said
        elif present:
            self._add(
                "index-missing-file",
                f"There is neither {SINGLE_NAME} nor {INDEX_NAME}; found {', '.join(present[:4])}. "
                "Fetch the index; without it nobody can tell whether a file is missing.",
                file=INDEX_NAME,
            )
            return present
        else:
            return []
        for name in present:
            if name not in used:
                self._add(
                    "stray-file",
                    f"{name} is beside the checkpoint but not part of it ({len(used)} files are); loaders "
                    "that read every *.safetensors would mix it in. Move it away.",
                    file=name,
                )
        return used

    def _header(self, name: str, weight_map: dict[str, str] | None) -> FileHeader | None:
        try:
            with self.source.files.opened(name) as file:
                return read_header(file, self.source.folder / name)
        except FileNotFoundError:
            lost = sorted(t for t, file in (weight_map or {}).items() if file == name)
            self._add(
                "index-missing-file",
                f"{name} is missing: {len(lost)} tensors are in it, {', '.join(lost[:3])} first. "
                "Fetch it again.",
                tensor=lost[0] if lost else "",
                file=name,
            )
        except RefusedFileError as error:
            self._add("unsafe-name", f"{error.message} {error.hint}".strip(), file=name)
        except OSError as error:
            self._add("truncated-file", f"{name} cannot be read: {error.strerror}.", file=name)
        return None

    def _compare(self, weight_map: dict[str, str], headers: list[FileHeader]) -> None:
        """Index against headers, both ways; damaged files have findings of their own."""
        sound = {h.file.name for h in headers if not h.findings}
        held = {h.file.name: {entry.name for entry in h.tensors} for h in headers}
        where = {entry.name: h.file.name for h in headers for entry in h.tensors}
        for tensor, file in weight_map.items():
            if file in sound and tensor not in held[file]:
                other = f"; {where[tensor]} has it" if tensor in where else ""
                self._add(
                    "index-missing-tensor",
                    f"{INDEX_NAME} says that {tensor} is in {file}, which does not have it{other}.",
                    tensor=tensor,
                    file=file,
                )
        for file in sorted(sound):
            for tensor in sorted(held[file] - weight_map.keys() - self.misplaced):
                self._add(
                    "not-in-index",
                    f"{file} holds {tensor}, which {INDEX_NAME} does not name: the index is of another "
                    "checkpoint, or the file is.",
                    tensor=tensor,
                    file=file,
                )
