"""SOURCE as any command takes it: a folder, a hub id or an s3:// URI; and a port's own, found again.

`open_any` reads the small files; `fetch` downloads the weights, once nothing is left that could be refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gemma_neuron.errors import GemmaNeuronError

if TYPE_CHECKING:
    from gemma_neuron.checkpoint.audit import Audit
    from gemma_neuron.checkpoint.source import Source
    from gemma_neuron.port import SourceRecord


class Watch(Protocol):
    """Who looks on: lines for the user, and the bytes of a download as they arrive."""

    def tell(self, line: str) -> None: ...

    def progress(self, count: int) -> None: ...


class Unwatched:
    """Nobody looks on."""

    def tell(self, line: str) -> None: ...

    def progress(self, count: int) -> None: ...


UNWATCHED = Unwatched()


def open_any(text: str, watch: Watch, *, config_only: bool = False) -> Source:
    """The checkpoint named by `text`, its weights where they are.

    Raises UsageError, SourceNotFoundError, AccessError, NetworkError or DiskFullError.
    """
    from gemma_neuron.checkpoint.source import open_source

    if text.startswith("s3://"):
        from gemma_neuron.checkpoint.remote import open_remote
        from gemma_neuron.mirror.folder import S3Folder

        return open_remote(S3Folder(text, watch.tell), config_only=config_only)
    return open_source(text, watch.tell, config_only=config_only)


def fetch(source: Source, watch: Watch) -> bool:
    """Download what is missing of the source; whether anything was. A folder has all it has."""
    from gemma_neuron.checkpoint.remote import fetch_weights

    return fetch_weights(source, watch.tell, watch.progress)


def examined(source: Source) -> Audit:
    """The audit of a source, passed. Raises AuditFailed with the first errors."""
    from gemma_neuron.checkpoint.audit import examine, require_ok

    # A missing template is refused by `prepare`, with the flag that allows it.
    found = examine(source, need_template=False)
    require_ok(found.report)
    return found


def fetched(text: str, watch: Watch) -> tuple[Source, Audit]:
    """A source with all its files at hand. What is broken is refused before anything large is downloaded."""
    source = open_any(text, watch)
    audit = examined(source)
    return source, examined(source) if fetch(source, watch) else audit


def folder_of(record: SourceRecord, watch: Watch) -> Path | None:
    """Where a port's own checkpoint lies whole on this machine; None when it does not. Downloads nothing."""
    if record.kind == "folder":
        folder = Path(record.uri)
        return folder if (folder / "config.json").is_file() else None
    if record.kind == "hub":
        from gemma_neuron.checkpoint.hub.opening import whole_snapshot

        return whole_snapshot(record.uri, record.revision)
    from gemma_neuron.checkpoint.remote import is_whole
    from gemma_neuron.mirror.folder import S3Folder

    try:
        origin = S3Folder(record.uri, watch.tell)
    except GemmaNeuronError as error:
        watch.tell(f"warning: {record.uri} is not looked at: {error.message}")
        return None
    return origin.folder if is_whole(origin) else None
