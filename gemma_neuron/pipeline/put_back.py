"""A checkpoint whose folder is gone, put back where it was: its machine was taken away, its bytes are in the mirror.

In: the folder's path, a mirror that holds a port made of it. Out: the folder with the files a port takes, each checked
against its digest; config.json last, so that a folder without it is not taken for a checkpoint, and is gone on with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from gemma_neuron.artifacts import (
    PARTIAL_SUFFIXES,
    FileEntry,
    digest_bytes,
    writing_failed,
)
from gemma_neuron.checkpoint.selection import CONFIG_NAME, is_plain_weights_name, is_small_file
from gemma_neuron.errors import IntegrityError, SourceNotFoundError
from gemma_neuron.mirror.check import port_ids
from gemma_neuron.mirror.layout import (
    LOOSE_STEM,
    PUSH_AGAIN,
    SetName,
    blob_key,
    port_location,
    raw_location,
    read_set,
)
from gemma_neuron.mirror.location import S3Location
from gemma_neuron.mirror.pull import fetch_checked, is_there
from gemma_neuron.mirror.store import Store
from gemma_neuron.port import RECORD_NAME, PortRecord
from gemma_neuron.source_entries import SOURCE_RECORD, entries_of
from gemma_neuron.transfer import Progress, disk_errors, require_room

Tell = Callable[[str], None]
SOURCE_SET = SetName("source", "source")


@dataclass(frozen=True, slots=True)
class _Held:
    """A port of this checkpoint. `small`: what its `source/` has; `weights`: files that lie under `raw/`."""

    store: Store
    checkpoint: str
    small: tuple[FileEntry, ...]
    weights: tuple[FileEntry, ...]


def put_back(
    folder: Path, uri: str, bucket_owner: str, tell: Tell, progress: Progress = lambda _: None
) -> bool:
    """Whether the folder is there now. False where the mirror has no such checkpoint whole, or the folder holds files
    that are not this one's.

    Raises SourceNotFoundError where several checkpoints lay at this path, IntegrityError, DiskFullError,
    EnvironmentProblem, AccessError or NetworkError.
    """
    raw = Store(raw_location(uri), bucket_owner)
    found = _holding(folder, uri, bucket_owner, raw, tell)
    if not found:
        return False
    if len({held.checkpoint for held in found}) > 1:
        raise SourceNotFoundError(
            f"{folder} is gone, and {uri} has ports of several checkpoints that lay there.",
            "Put the right one back by hand.",
        )
    held = found[0]
    names = {entry.name for entry in (*held.small, *held.weights)}
    if folder.exists() and not all(_is_of(path.name, names) for path in folder.iterdir()):
        return False
    count = sum(entry.bytes for entry in (*held.small, *held.weights))
    tell(f"mirror: {folder} is gone; putting it back from {uri} ({count:,} bytes)")
    with disk_errors(folder, f"Putting {folder} back"):
        _fetch(folder, held, raw, progress)
    return True


def _holding(folder: Path, uri: str, bucket_owner: str, raw: Store, tell: Tell) -> list[_Held]:
    found = []
    for identity in port_ids(Store(S3Location.parse(uri), bucket_owner)):
        store = Store(port_location(uri, identity), bucket_owner)
        try:
            held = _held(folder, store)
        except (IntegrityError, ValidationError) as error:
            tell(f"warning: {store.location} is passed over: {error}")
            continue
        if held is not None and all(raw.has(e.blake3, e.bytes) for e in held.weights):
            found.append(held)
    return found


def _held(folder: Path, store: Store) -> _Held | None:
    """What a port says of this folder; None when it is of another, or its weights were not all digested."""
    loose = {entry.name: entry for entry in read_set(store, SetName("", LOOSE_STEM)).manifest.files}
    if not {RECORD_NAME, SOURCE_RECORD} <= loose.keys():
        return None
    record = PortRecord.model_validate_json(_bytes(store, loose[RECORD_NAME]))
    if record.source.kind != "folder" or record.source.uri != str(folder.resolve()):
        return None
    entries = entries_of(_bytes(store, loose[SOURCE_RECORD]))
    weights = tuple(
        FileEntry(name=entry.name, bytes=entry.bytes, blake3=entry.blake3)
        for entry in entries
        if entry.blake3 is not None
    )
    if not weights or len(weights) < len(entries):
        return None
    small = read_set(store, SOURCE_SET).manifest.files
    plain = all(is_plain_weights_name(entry.name) for entry in weights)
    if not plain or not all(is_small_file(entry.name) for entry in small):
        raise IntegrityError(f"{store.location} names files no checkpoint has.", PUSH_AGAIN)
    return _Held(store, record.fingerprints.checkpoint, small, weights)


def _bytes(store: Store, entry: FileEntry) -> bytes:
    found = store.read(blob_key(entry.blake3))
    if found is None or digest_bytes(found.data) != entry.blake3:
        raise IntegrityError(
            f"{store.location}: {entry.name} is not what was mirrored.", PUSH_AGAIN
        )
    return found.data


def _fetch(folder: Path, held: _Held, raw: Store, progress: Progress) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise writing_failed(folder, error) from error
    last = sorted(held.small, key=lambda entry: entry.name == CONFIG_NAME)
    wanted = [(raw, entry.blake3, entry) for entry in held.weights]
    wanted += [(held.store, blob_key(entry.blake3), entry) for entry in last]
    missing = [one for one in wanted if not is_there(folder / one[2].name, one[2])]
    require_room(folder, sum(entry.bytes for _, _, entry in missing), "The checkpoint")
    for store, key, entry in missing:
        fetch_checked(store, key, entry, folder / entry.name, progress)


def _is_of(name: str, names: set[str]) -> bool:
    """Whether a file is one of these, or the beginning of one."""
    return name in names or (
        name.endswith(PARTIAL_SUFFIXES) and any(name.startswith(f"{whole}.") for whole in names)
    )
