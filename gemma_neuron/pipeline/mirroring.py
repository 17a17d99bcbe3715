"""A port and its mirror: pulled before the work, followed while it is made, and moved by hand.

Work that nobody can reach the store for still gets done; that it is not mirrored is the error at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gemma_neuron.elastic.notice import Notices
from gemma_neuron.errors import (
    GemmaNeuronError,
    NetworkError,
    NotMirroredError,
    OwnerLostError,
    PortIncompleteError,
)
from gemma_neuron.pipeline.flushing import ASKED, flushed
from gemma_neuron.pipeline.link import Link
from gemma_neuron.port import RECORD_NAME, UNIT_STEM, Port

if TYPE_CHECKING:
    from gemma_neuron.mirror.background import Mirror, MirrorOptions
    from gemma_neuron.mirror.check import Checked
    from gemma_neuron.mirror.pull import Pulled
    from gemma_neuron.mirror.push import Counts
    from gemma_neuron.mirror.store import Store

Notice = Callable[[str], None]
Progress = Callable[[int], None]
TakeMore = Callable[[], None]
START_SECONDS = 120.0
"""How long the work waits for a store that is away before it makes everything anew: a graph takes far longer."""
TAKEN_LOOSE = ("ledger.jsonl", "events.jsonl", "validation.json", "source.json")
"""Loose files a new machine goes on with; the others it has written itself by then, from the same inputs."""


@contextmanager
def mirrored(
    port: Port, options: MirrorOptions | None, notice: Notice, notices: Notices | None = None
) -> Iterator[TakeMore]:
    """Within it the port's parts are uploaded as they are committed; at its end, all of them are.

    First takes from the mirror what this machine lacks; with nothing built here yet a store that is away is waited
    for, START_SECONDS. What it yields takes it from one that came later, once, and is to be called where no part is
    being made. Raises MirrorInUseError or AccessError at once, NotMirroredError or OwnerLostError at the end; an
    error of the work itself comes first. `notices`: what may ask for an earlier end.
    """
    if options is None:
        yield lambda: None
        return
    from gemma_neuron.mirror.background import Mirror

    patience = START_SECONDS if not _has_graphs(port) else 0.0
    link = Link(lambda: Mirror(port, options, notice), options.uri, notice, patience)
    taken = link.mirror is not None
    if link.mirror is not None:
        try:
            _take_from(link.mirror, port, notice)
        except BaseException:
            link.mirror.owner.release()
            raise

    def take_more() -> None:
        nonlocal taken
        if not taken and link.mirror is not None:
            taken = True
            _take_from(link.mirror, port, notice)

    link.start(Mirror.start)
    with flushed(link.finish, options.grace, notices or Notices(), notice):
        yield take_more


def _has_graphs(port: Port) -> bool:
    return any((port.path / "graphs").glob(f"*/{UNIT_STEM}.committed"))


def _take_from(mirror: Mirror, port: Port, notice: Notice) -> None:
    """What this machine lacks, as far as the store can be reached."""
    try:
        take_parts(mirror.store, port, notice)
    except NetworkError as error:
        notice(f"warning: nothing more is taken from the mirror: {error.message}")


def take_parts(store: Store, port: Port, notice: Notice) -> Pulled:
    """What the mirror has of a port that this folder lacks: rank files, graphs, references, ledger."""
    from gemma_neuron.mirror.pull import Puller, sets_in_bucket
    from gemma_neuron.port import remove_transfers

    names = [
        name
        for name in sets_in_bucket(store)
        if name.folder not in ("", "source") and not name.on_disk(port.path).marker_path.is_file()
    ]
    puller = Puller(store, port.path)
    pulled = puller.pull(names, notice)
    remove_transfers(port.path)  # of what the mirror has no more
    puller.pull_loose([name for name in TAKEN_LOOSE if not (port.path / name).is_file()], notice)
    if pulled.sets:
        notice(
            f"mirror: took {', '.join(name.key for name in pulled.sets)} from {store.location} "
            f"({pulled.bytes:,} bytes)"
        )
    return pulled


def push(path: Path, options: MirrorOptions, notice: Notice) -> tuple[Counts, str]:
    """All of a port into the bucket; what was sent, and the owner that wrote it."""
    from gemma_neuron.mirror.background import Mirror

    mirror = Mirror(Port(path), options, notice)
    mirror.start()
    owner = str(mirror.owner.record)
    try:
        mirror.finish()
    except (NotMirroredError, OwnerLostError):
        raise
    except ASKED:
        with suppress(GemmaNeuronError):  # that something is left is no news to who stopped it
            mirror.finish(0.0)
        raise
    return mirror.counts(), owner


def pull(
    path: Path, store: Store, notice: Notice, progress: Progress, expect_digest: str = ""
) -> Pulled:
    """A whole port out of the bucket; goes on where an earlier pull was stopped.

    Raises PortIncompleteError when the bucket holds none, IntegrityError when it is not the one expected.
    """
    from gemma_neuron.mirror.pull import Puller, require_port, sets_in_bucket
    from gemma_neuron.port import remove_leftovers

    names = sets_in_bucket(store)
    require_port(store, names)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()) and not (path / RECORD_NAME).is_file():
        raise PortIncompleteError(
            f"{path} holds files but no {RECORD_NAME}: it is no port.", "Name a new folder."
        )
    pulled = Puller(store, path, progress).pull(names, notice)
    remove_leftovers(path)
    if not pulled.bad:
        Port(path).require_digest(expect_digest)
    return pulled


def checked(store: Store, progress: Progress, *, contents: bool) -> Checked:
    from gemma_neuron.mirror.check import check

    return check(store, contents=contents, progress=progress)


def store_of(uri: str, path: Path, port_id: str, bucket_owner: str) -> Store:
    """Where a port lies under `uri`: the folder's own, the one named, or the only one."""
    from gemma_neuron.mirror.check import find_port
    from gemma_neuron.mirror.location import S3Location
    from gemma_neuron.mirror.store import Store

    port = Port(path) if (path / RECORD_NAME).is_file() else None
    return find_port(
        S3Location.parse(uri), port, port_id, lambda location: Store(location, bucket_owner)
    )
