"""`source.json`: every weight file a port was cut from, with its size and digest."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemma_neuron.artifacts import digest_file, write_json_atomic
from gemma_neuron.errors import PortMismatchError
from gemma_neuron.port import Port


def write_source_record(port: Port, files: Iterable[Path], seen_at: str) -> None:
    """Digest the files and write `source.json`, once for each state of their sizes and times.

    Raises PortMismatchError when a file's bytes are no longer those the port was begun with.
    """
    paths = sorted(set(files))
    known = {
        entry["name"]: entry for entry in (port.read_json("source.json") or {"files": []})["files"]
    }
    entries = [_entry(path, known.get(path.name), seen_at) for path in paths]
    for entry in entries:
        before = known.get(entry["name"])
        if before is not None and before["blake3"] != entry["blake3"]:
            raise PortMismatchError(
                f"{entry['name']} has other bytes than when {port.path} was begun: blake3 "
                f"{entry['blake3'][:16]}, then {before['blake3'][:16]}.",
                "Compile the changed checkpoint into a new folder.",
            )
    if entries != list(known.values()):
        write_json_atomic(port.path / "source.json", {"files": entries})


def _entry(path: Path, known: dict[str, Any] | None, seen_at: str) -> dict[str, Any]:
    """Size, time and digest; the digest is kept while size and time are as they were."""
    found = path.stat()
    state = {"name": path.name, "bytes": found.st_size, "mtime_ns": found.st_mtime_ns}
    if known is not None and all(known.get(key) == value for key, value in state.items()):
        return known
    return {**state, "blake3": digest_file(path), "seen_at": seen_at}
