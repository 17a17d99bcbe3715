"""What a mirror holds: its owner, its sets, and whether every byte is what the manifests say.

In: a store. Out: counts, and the names of what is wrong. Nothing is written, neither here nor there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from blake3 import blake3

from gemma_neuron.artifacts import FileEntry
from gemma_neuron.errors import IntegrityError, UsageError
from gemma_neuron.mirror.client import worth_retrying
from gemma_neuron.mirror.layout import LOOSE_STEM, MARKER_SUFFIX, blob_key, port_id, read_set
from gemma_neuron.mirror.location import S3Location
from gemma_neuron.mirror.owner import OWNER_KEY, OwnerRecord, read_record
from gemma_neuron.mirror.pull import sets_in_bucket
from gemma_neuron.mirror.store import Store
from gemma_neuron.port import Port
from gemma_neuron.transfer import CutShortError, Progress, retrying


@dataclass
class Checked:
    """`sets`: name → files. `bad`: object or set → what is wrong with it. `bytes`: of all files named."""

    total: int = 0
    verified: int = 0
    bytes: int = 0
    owner: OwnerRecord | None = None
    owner_age_seconds: float = 0.0
    sets: dict[str, int] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)


def check(store: Store, *, contents: bool, progress: Progress = lambda _: None) -> Checked:
    """Look at every set: marker, manifest, and each file's size; with `contents` each file's digest too."""
    found = Checked()
    held = store.read(OWNER_KEY)
    if held is not None:
        found.owner, found.owner_age_seconds = read_record(held), held.age_seconds
    sizes = dict(store.listing())
    for name in sets_in_bucket(store):
        try:
            manifest = read_set(store, name).manifest
        except IntegrityError as error:
            found.bad[name.key] = error.message
            continue
        found.sets[name.key] = len(manifest.files)
        for entry in manifest.files:
            found.total += 1
            found.bytes += entry.bytes
            problem = _problem(store, entry, sizes, progress if contents else None)
            if problem:
                found.bad[f"{name.key}: {entry.name}"] = problem
            elif contents:
                found.verified += 1
    return found


def _problem(
    store: Store, entry: FileEntry, sizes: dict[str, int], progress: Progress | None
) -> str:
    key = blob_key(entry.blake3)
    if sizes.get(key) != entry.bytes:
        return f"{sizes.get(key, 'no')} bytes under {key}, not {entry.bytes}"
    if progress is None:
        return ""
    digest = digest_of(store, key, entry.bytes, progress)
    return "" if digest == entry.blake3 else f"{key} holds bytes with blake3 {digest[:16]}…"


def digest_of(store: Store, key: str, size: int, progress: Progress) -> str:
    """blake3 of an object's bytes, streamed; a cut connection goes on where it was cut."""
    hasher, done = blake3(), 0
    with store.errors():
        for attempt in retrying(worth_retrying):
            with attempt:
                for piece in store.stream(key, done, size - done) if done < size else ():
                    hasher.update(piece)
                    done += len(piece)
                    progress(len(piece))
                if done < size:
                    raise CutShortError(f"{done:,} of {size:,} bytes came")
    return hasher.hexdigest()


def port_ids(base: Store) -> list[str]:
    """The ids of the ports under a prefix."""
    marker = f"/{LOOSE_STEM}{MARKER_SUFFIX}"
    found = {key.removesuffix(marker) for key, _ in base.listing() if key.endswith(marker)}
    return sorted(name for name in found if "/" not in name)


def find_port(
    base: S3Location, port: Port | None, wanted: str, make: Callable[[S3Location], Store]
) -> Store:
    """The store of one port: `wanted` by its id, else the folder's own, else the only one under the prefix.

    Raises UsageError naming the ids there are.
    """
    own = make(base)
    if not wanted and port is not None:
        wanted = port_id(port.record.digest)
    if not wanted:
        ids = port_ids(own)
        if len(ids) != 1:
            raise UsageError(
                f"{base} holds {len(ids)} ports{': ' if ids else ''}{', '.join(ids[:10])}.",
                "Name one: --port-id ID." if ids else "Check the prefix.",
            )
        wanted = ids[0]
    return make(S3Location(base.bucket, base.key(wanted)))
