"""Which slot a request gets, and how much of its prompt that slot holds already.

A prompt's whole chunks are a function of its first tokens alone, so a slot that was left by another request with the
same beginning can be continued at a chunk's border: the bits are those of reading it again. Layers of a sliding
window keep a ring that later tokens overwrite; it is put back from a copy made at the border where the runner can
make one, and otherwise reuse ends with the ring's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemma_neuron.backends.base import KeepsPrefix, Runner


@dataclass(slots=True)
class Slot:
    """One row of KV state. `prefix`: the tokens of the whole chunks read from position 0 on."""

    index: int
    free: bool = True
    prefix: tuple[int, ...] = ()
    used: int = 0
    """Positions written since the prefix began, stale ones counted."""
    saved: Any = None
    """The rings as they were at the prefix's end."""
    left: int = 0
    """When it was given back, as a count: the one left longest ago is taken first."""


class Slots:
    """The slots of one runner; used by the engine's thread only."""

    def __init__(self, runner: Runner, *, reuse: bool = True) -> None:
        self._keeper = runner if reuse and isinstance(runner, KeepsPrefix) else None
        self._chunk = runner.prefill_buckets[-1]
        self._all = [Slot(index) for index in range(runner.slots)]
        self._clock = 0

    def take(self, prompt: Sequence[int], *, fresh: bool) -> tuple[Slot, int] | None:
        """A free slot and how many of the prompt's tokens it holds; None while all are taken.

        `fresh`: the prompt is read whole, and leaves nothing to reuse (scoring rounds differently).
        """
        free = [slot for slot in self._all if slot.free]
        if not free:
            return None
        held = {slot.index: 0 if fresh else self._held(slot, prompt) for slot in free}
        slot = min(free, key=lambda s: (-held[s.index], bool(s.prefix), s.left, s.index))
        slot.free = False
        count = held[slot.index]
        if count < len(slot.prefix):
            slot.saved = None
        elif self._keeper is not None and slot.saved is not None:
            self._keeper.restore(slot.index, slot.saved)
        slot.prefix, slot.used = slot.prefix[:count], count
        return slot, count

    def _held(self, slot: Slot, prompt: Sequence[int]) -> int:
        """Tokens up to the last border that both share; at least one token is left to read."""
        if self._keeper is None or not slot.prefix:
            return 0
        border = (len(prompt) - 1) // self._chunk * self._chunk
        border = min(border, len(slot.prefix))
        whole = self._keeper.ring is None or slot.used <= self._keeper.ring
        while border > 0 and tuple(prompt[:border]) != slot.prefix[:border]:
            border -= self._chunk
        if whole or (slot.saved is not None and border == len(slot.prefix)):
            return max(border, 0)
        return 0

    def read(self, index: int, prompt: Sequence[int], end: int, *, last_whole: bool) -> None:
        """A chunk was read up to `end`. `last_whole`: it is whole, and no whole one follows in this prompt."""
        slot = self._all[index]
        slot.used = max(slot.used, end)
        if self._keeper is None or end % self._chunk or end != len(slot.prefix) + self._chunk:
            return
        slot.prefix = tuple(prompt[:end])
        slot.saved = None
        if last_whole and self._keeper.ring is not None:
            slot.saved = self._keeper.save(index)

    def wrote(self, index: int, position: int) -> None:
        """A token was decoded at `position`."""
        slot = self._all[index]
        slot.used = max(slot.used, position + 1)

    def give_back(self, index: int) -> None:
        self._clock += 1
        self._all[index].free = True
        self._all[index].left = self._clock
