"""A checkpoint that lies elsewhere, over a local folder: small files downloaded, weights by ranges until needed.

In: a `RemoteFolder` (a hub repository at one commit, an S3 prefix). Out: a `Source` that lists exactly the files
of a text port; `fetch_weights` downloads the rest. What a port does not take is not listed: it cannot be mixed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from gemma_neuron.checkpoint.selection import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    INDEX_LIMIT,
    INDEX_NAME,
    is_plain_weights_name,
    is_small_file,
    is_weights,
    weights_in_use,
)
from gemma_neuron.checkpoint.source import SMALL_FILE_LIMIT, Source
from gemma_neuron.checkpoint.storage import LocalFiles, OpenFile, read_json_object
from gemma_neuron.errors import CheckpointError, IntegrityError, SourceNotFoundError
from gemma_neuron.names import is_plain_file_name
from gemma_neuron.regular_files import RefusedFileError
from gemma_neuron.strict_json import BadJsonError
from gemma_neuron.transfer import Progress, require_room

Tell = Callable[[str], None]
"""Called with one line for the user."""


class RemoteFolder(Protocol):
    """A flat folder of files somewhere else, in one fixed state."""

    @property
    def kind(self) -> Literal["hub", "s3"]: ...

    @property
    def uri(self) -> str:
        """As given."""

    @property
    def revision(self) -> str:
        """The commit, where there is such a thing; else empty."""

    @property
    def folder(self) -> Path:
        """Where fetched files are, whole ones only."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Name → bytes of everything there."""

    def missing_bytes(self, name: str) -> int:
        """What of a file is still to be downloaded, at least 1 until it lies in `folder` in this state."""

    def fetch(self, names: Sequence[str], progress: Progress) -> None:
        """Download into `folder`, going on where an earlier run stopped."""

    def opened(self, name: str) -> AbstractContextManager[OpenFile]:
        """Read a file by ranges."""


@dataclass(frozen=True, slots=True)
class RemoteFiles:
    """A remote folder's files: local where they were fetched, by ranges where not.

    `wanted` are those a port takes. `listed` are also others, but for weights that are not in use: the audit
    names what it refuses by them.
    """

    origin: RemoteFolder
    wanted: tuple[str, ...]
    listed: tuple[str, ...]

    @property
    def remote(self) -> bool:
        return bool(self.missing())

    def names(self) -> tuple[str, ...]:
        return self.listed

    def missing(self) -> list[str]:
        """Names of a port's files that are not in the local folder yet."""
        return [name for name in self.wanted if self.origin.missing_bytes(name)]

    @contextmanager
    def opened(self, name: str) -> Iterator[OpenFile]:
        if name not in self.origin.sizes:
            raise FileNotFoundError(name)
        if not self.origin.missing_bytes(name):
            with LocalFiles(self.origin.folder).opened(name) as file:
                yield file
        else:
            with self.origin.opened(name) as file:
                yield file


def open_remote(origin: RemoteFolder, *, config_only: bool = False) -> Source:
    """Download the small files (or config.json alone) and choose the weights in use.

    Raises SourceNotFoundError for what is no checkpoint, CheckpointError for names and sizes that are not
    those of one, DiskFullError, and what `origin` raises.
    """
    names = _safe_names(origin)
    if CONFIG_NAME not in names and not _known_refusal(names):
        shown = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
        raise SourceNotFoundError(
            f"{origin.uri} has no {CONFIG_NAME}: it is no Hugging Face checkpoint (found "
            f"{shown or 'nothing'}).",
            "Name what holds config.json, tokenizer.json and *.safetensors.",
        )
    small = [n for n in names if (n == CONFIG_NAME if config_only else _is_small(n))]
    _fetch(origin, small, lambda _: None)
    used = set() if config_only else set(weights_in_use(names, _weight_map(origin)))
    files = RemoteFiles(
        origin,
        wanted=tuple(name for name in names if name in used or name in small),
        listed=tuple(name for name in names if name in used or not is_weights(name)),
    )
    return Source(
        kind=origin.kind,
        uri=origin.uri,
        folder=origin.folder,
        files=files,
        revision=origin.revision,
    )


def is_whole(origin: RemoteFolder) -> bool:
    """Whether everything a port takes of it is in its local folder, so that no network is needed."""
    names = [name for name in origin.sizes if is_plain_file_name(name)]
    used = set(weights_in_use(names, _weight_map(origin)))
    wanted = {name for name in names if _is_small(name)} | used
    return CONFIG_NAME in wanted and all(
        name in origin.sizes and not origin.missing_bytes(name) for name in wanted
    )


def fetch_weights(source: Source, tell: Tell, progress: Progress) -> bool:
    """Download what is missing of a source, whether anything was; afterwards its files are local."""
    files = source.files
    if not isinstance(files, RemoteFiles) or not files.remote:
        return False
    missing = files.missing()
    count = sum(files.origin.missing_bytes(name) for name in missing)
    tell(
        f"fetching {count:,} bytes in {len(missing)} files of {source.uri}"
        + (f" at {source.revision}" if source.revision else "")
        + f" into {source.folder}"
    )
    _fetch(files.origin, missing, progress)
    return True


def _fetch(origin: RemoteFolder, names: Sequence[str], progress: Progress) -> None:
    missing = {name: origin.missing_bytes(name) for name in names}
    missing = {name: count for name, count in missing.items() if count}
    for name in missing:
        if origin.sizes[name] > SMALL_FILE_LIMIT and not is_weights(name):
            raise CheckpointError(
                f"{origin.uri}: {name} has {origin.sizes[name]:,} bytes; at most {SMALL_FILE_LIMIT:,} are "
                "fetched.",
                "Use the checkpoint of the model's own page.",
            )
    if not missing:
        return
    require_room(origin.folder, sum(missing.values()), f"Fetching {origin.uri}")
    origin.fetch(list(missing), progress)
    for name in missing:
        if origin.missing_bytes(name):
            raise IntegrityError(
                f"{origin.folder / name} does not have the {origin.sizes[name]:,} bytes it has at "
                f"{origin.uri}.",
                "Remove it and run the same command again.",
            )


def _safe_names(origin: RemoteFolder) -> list[str]:
    """Everything in the folder itself; a file of a port whose name is no plain one is refused."""
    names = []
    for name in sorted(origin.sizes):
        if is_plain_file_name(name):
            names.append(name)
        elif "/" not in name and (is_small_file(name) or is_weights(name)) and name[:1] != ".":
            raise CheckpointError(
                f"{origin.uri} holds a file named {name[:120]!r}; only plain names are fetched.",
                "Rename it there, or remove it.",
            )
    return names


def _is_small(name: str) -> bool:
    return is_small_file(name) or name == INDEX_NAME


def _known_refusal(names: Sequence[str]) -> bool:
    """An adapter or GGUF folder may lack config.json: it is let in so that the audit can say what it is."""
    return any(name == ADAPTER_CONFIG_NAME or name.endswith(".gguf") for name in names)


def _weight_map(origin: RemoteFolder) -> dict[str, str] | None:
    """The fetched index's tensor → file, of entries that could be; None without a readable index."""
    try:
        found = read_json_object(LocalFiles(origin.folder), INDEX_NAME, INDEX_LIMIT)
    except (FileNotFoundError, BadJsonError, RefusedFileError):
        return None
    mapped = found.get("weight_map")
    return (
        {
            tensor: file
            for tensor, file in mapped.items()
            if isinstance(file, str) and is_plain_weights_name(file)
        }
        if isinstance(mapped, dict)
        else None
    )
