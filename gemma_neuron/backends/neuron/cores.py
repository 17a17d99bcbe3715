"""Which NeuronCores a replica takes, and which ones a killed process may have spoiled.

A core belongs to one process until it ends in order; after a SIGKILL the next run can fail or hang until the machine
is rebooted. So a runner notes the cores it takes, with the boot it lives in, and removes the note when it
closes: a note of this boot whose process is gone marks suspect cores.
"""

from __future__ import annotations

import atexit
import json
import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import psutil

from gemma_neuron.artifacts import write_json_atomic
from gemma_neuron.errors import DoesNotFitError

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NOTE_PREFIX = "cores-"


@dataclass(frozen=True, slots=True)
class Held:
    """A note of this boot. `alive`: its process still runs."""

    pid: int
    cores: range
    alive: bool


def cores_of(replica: int, tp: int, present: int | None) -> range:
    """The contiguous range of replica `replica`; `present`: the machine's cores, None when unknown.

    Raises DoesNotFitError for a replica beyond what there is.
    """
    cores = range(replica * tp, (replica + 1) * tp)
    if present is not None and cores.stop > present:
        room = present // tp
        raise DoesNotFitError(
            f"Replica {replica} at tp {tp} needs NeuronCores {cores.start} to {cores.stop - 1}; this machine "
            f"has {present}.",
            f"It holds {room} replica{'' if room == 1 else 's'} of this port"
            + (f": use --replicas {room}." if room else "; use a smaller --tp."),
        )
    return cores


def require_room(replicas: int, tp: int, present: int | None) -> None:
    """Raises DoesNotFitError for more replicas than the machine's cores hold."""
    cores_of(replicas - 1, tp, present)


def notes_folder() -> Path:
    return Path(platformdirs.user_state_dir("gemma-neuron"))


class CoreNote:
    """Says, until it is removed or the process ends in order, that this process holds cores."""

    def __init__(self, cores: range) -> None:
        folder = notes_folder()
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{NOTE_PREFIX}{os.getpid()}.json"
        started = psutil.Process().create_time()
        write_json_atomic(
            self._path,
            {"boot": _boot(), "started": started, "first": cores.start, "count": len(cores)},
        )
        atexit.register(self.remove)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
        atexit.unregister(self.remove)


def held() -> list[Held]:
    """All notes of this boot; those of an earlier one are removed: a reboot repairs cores."""
    found = []
    for path in sorted(notes_folder().glob(f"{NOTE_PREFIX}*.json")):
        try:
            note = json.loads(path.read_bytes())
            pid = int(path.stem.removeprefix(NOTE_PREFIX))
            taken = range(note["first"], note["first"] + note["count"])
            started, boot = float(note["started"]), note["boot"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            path.unlink(missing_ok=True)
            continue
        if boot != _boot():
            path.unlink(missing_ok=True)
            continue
        found.append(Held(pid, taken, _runs(pid, started)))
    return found


def _runs(pid: int, started: float) -> bool:
    try:
        return psutil.Process(pid).create_time() == started
    except psutil.Error:
        return False


def _boot() -> str:
    return BOOT_ID.read_text().strip() if BOOT_ID.is_file() else ""
