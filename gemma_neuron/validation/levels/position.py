"""Level 4: positions. Everything that is right on short prompts and wrong on long ones.

In: the golden's long text, teacher-forced; one pass of the reference over it judges every way of getting to a
position. Cases: prefills of lengths around the window, 512, every bucket, and past twice the window, each
with decode across the edge; the text in uneven chunks; the same text token by token; two slots interleaved;
a slot used again. Bars: `Tolerance`, at every position looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gemma_neuron.backends.decode import prefill_prompt
from gemma_neuron.reports import Figure, LevelResult
from gemma_neuron.validation.compare import distances
from gemma_neuron.validation.context import LevelContext, from_problems, result
from gemma_neuron.validation.golden_tensors import GoldenText
from gemma_neuron.validation.prompts import LONG

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEVEL = 4
STEPS = 4
"""Decode steps after each prefill: across the edge from one below it."""
WRAP_STEPS = 24
TOKEN_BY_TOKEN = 160
"""Longest window whose edge is also crossed one token at a time from the start."""


def run(context: LevelContext) -> LevelResult:
    """Every case, and what the port's shape kept from being looked at."""
    text = context.reference.texts.get(LONG)
    if text is None:
        return result(LEVEL, "not-run", "the golden holds no long text")
    walk = _Walk(context, text)
    reach = min(len(text.ids), context.runner.max_context)
    lengths = edge_lengths(context.port.geometry.window, context.runner.prefill_buckets, reach)
    for length in lengths:
        walk.prefill_then_decode(length, STEPS)
    _wrap(walk, context.port.geometry.window, reach)
    _uneven_chunks(walk, reach)
    _token_by_token(walk, context.port.geometry.window, reach)
    _slots(walk, context, reach)
    detail: dict[str, Any] = {
        "lengths": lengths,
        "cases": walk.cases,
        "positions": walk.looked,
        "max_relative": float(f"{walk.worst:.4g}"),
        "by_position": walk.points,
        "slots": "one slot: nothing to leak into" if context.runner.slots == 1 else "interleaved",
    }
    passed = (
        f"{walk.looked} positions in {walk.cases} cases, up to {max(lengths, default=0)} tokens"
    )
    missing = not_covered(context, reach)
    figures = [
        Figure(
            name="distance over the largest logit",
            value=detail["max_relative"],
            bar=context.tolerance.relative,
        )
    ]
    if missing and not walk.problems:
        return result(LEVEL, "not-run", missing, detail, figures)
    return from_problems(LEVEL, walk.problems, passed, detail, figures)


def edge_lengths(window: int, buckets: Sequence[int], reach: int) -> list[int]:
    """Prompt lengths to prefill: around window, 512 and buckets, past twice the window, and a short one."""
    edges = {5, window - 1, window, window + 1, 511, 512, 513, 2 * window + 9, 3 * window + 1}
    edges |= {bucket + off for bucket in buckets for off in (-1, 0, 1)}
    return sorted(n for n in edges if 1 <= n <= reach - STEPS)


def not_covered(context: LevelContext, reach: int) -> str | None:
    """What this port's context or buckets keep from being looked at, or None."""
    window, longest = context.port.geometry.window, context.runner.prefill_buckets[-1]
    if not any(layer.kind == "sliding" for layer in context.port.geometry.layers):
        return None
    if reach < window + 1 + STEPS:
        return f"{reach} positions do not reach past the window of {window}: compile with more --max-context"
    if longest < window:
        return f"the longest prefill bucket ({longest}) is shorter than the window ({window})"
    edge = longest + 1 + STEPS
    if reach < edge <= context.runner.max_context:
        return (
            f"the golden's long text ({reach} tokens) ends before the edge of the longest bucket ({longest}): leave "
            "--golden out, and one that reaches it is made from the checkpoint"
        )
    return None


class _Walk:
    """Runs tokens of golden texts through the port and compares each position on the way."""

    def __init__(self, context: LevelContext, text: GoldenText) -> None:
        self.runner, self._tolerance, self.text = context.runner, context.tolerance, text
        self.problems: list[str] = []
        self.cases = self.looked = 0
        self.worst = 0.0
        self.points: list[dict[str, Any]] = []
        """case, position and distance over the largest logit, of every position looked at."""

    def check(
        self, case: str, text: GoldenText, position: int, logits: NDArray[np.float32]
    ) -> None:
        """Compare the logits [vocab] at one position of a text; one problem per case is kept."""
        found = distances(text, position, logits[None])
        self.looked += 1
        relative = float(found.all[0]) / max(text.largest, 1e-30)
        self.worst = max(self.worst, relative)
        self.points.append(
            {"case": case, "position": position, "relative": float(f"{relative:.4g}")}
        )
        problem = self._tolerance.problem(found, text.largest, position)
        if problem is not None and not any(p.startswith(case + ":") for p in self.problems):
            self.problems.append(f"{case}: {problem.split(';')[0]}")

    def prefill(self, case: str, text: GoldenText, length: int, slot: int = 0) -> None:
        logits = prefill_prompt(self.runner, _ids(text)[:length], slot)
        self.check(case, text, length - 1, logits)

    def decode(self, case: str, rows: dict[int, tuple[GoldenText, int]]) -> None:
        """One decode step with slot → (text, position of the token fed) active."""
        slots = range(self.runner.slots)
        logits = self.runner.decode(
            [int(rows[s][0].ids[rows[s][1]]) if s in rows else 0 for s in slots],
            [rows[s][1] if s in rows else 0 for s in slots],
            [s in rows for s in slots],
        )
        for slot, (text, position) in rows.items():
            self.check(case, text, position, logits[slot])

    def prefill_then_decode(self, length: int, steps: int) -> None:
        self.cases += 1
        self.prefill(f"prefill of {length}", self.text, length)
        for position in range(length, length + steps):
            self.decode(f"decode after a prefill of {length}", {0: (self.text, position)})


def _wrap(walk: _Walk, window: int, reach: int) -> None:
    """A longer decode that carries a ring over its edge."""
    start = max(1, window - WRAP_STEPS // 2)
    if start + WRAP_STEPS <= reach:
        walk.prefill_then_decode(start, WRAP_STEPS)


def _uneven_chunks(walk: _Walk, reach: int) -> None:
    """The text in chunks whose borders are no multiple of anything: positions may start anywhere."""
    walk.cases += 1
    largest, start, sizes = walk.runner.prefill_buckets[-1], 0, (7, 1, 13, 3)
    ids = _ids(walk.text)
    for index in range(64):
        size = sizes[index] if index < len(sizes) else max(1, largest - 3 * (index % 2))
        end = min(start + min(size, largest), reach)
        logits = walk.runner.prefill(ids[start:end], slot=0, start=start)
        walk.check(f"chunk [{start}, {end})", walk.text, end - 1, logits)
        start = end
        if start >= reach:
            return


def _token_by_token(walk: _Walk, window: int, reach: int) -> None:
    """From one token on, each of the rest by a decode step: must say what one prefill says."""
    walk.cases += 1
    length = window + 8 if window <= TOKEN_BY_TOKEN - 8 else 64
    walk.prefill("token by token", walk.text, 1)
    for position in range(1, min(length, reach)):
        walk.decode("token by token", {0: (walk.text, position)})


def _slots(walk: _Walk, context: LevelContext, reach: int) -> None:
    """Two sequences in two slots, together and in turn; then a used slot taken by another sequence."""
    others = [t for t in context.reference.texts.values() if t.name != LONG and len(t.ids) > 3]
    other = max(others, key=lambda t: len(t.ids), default=None)
    if other is None:
        return
    a, b = walk.text, other
    last = walk.runner.slots - 1
    at_a, at_b = min(context.port.geometry.window + 3, reach - 8), max(1, len(b.ids) - 6)
    if last > 0 and at_a >= 1:
        walk.cases += 1
        walk.prefill("slots: first of two", a, at_a, 0)
        walk.prefill("slots: second of two", b, at_b, last)
        for step in range(6):
            rows = {} if step in (4, 5) else {0: (a, at_a)}
            if step not in (2, 3) and at_b < len(b.ids):
                rows[last] = (b, at_b)
            walk.decode(f"slots {'0 and ' + str(last) if len(rows) > 1 else 'in turn'}", rows)
            at_a, at_b = at_a + (0 in rows), at_b + (last in rows)
    walk.cases += 1
    walk.prefill("a used slot", a, min(reach - 1, context.port.geometry.window + 5), 0)
    walk.prefill("a used slot", b, max(1, len(b.ids) - 3), 0)
    for position in range(max(1, len(b.ids) - 3), len(b.ids)):
        walk.decode("a used slot", {0: (b, position)})


def _ids(text: GoldenText) -> list[int]:
    return [int(token) for token in text.ids]
