"""Whole prompts and texts through a `Runner`: shared by validation, the engine and benchmarks.

Chunk borders are a function of the prompt's length and the buckets alone, so that what a request
computes never depends on what else is running.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemma_neuron.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gemma_neuron.backends.base import Runner, Scores


def chunk_spans(length: int, largest: int) -> list[tuple[int, int]]:
    """(start, end) of each chunk: full chunks of the largest bucket, then the rest."""
    return [(start, min(start + largest, length)) for start in range(0, length, largest)]


def prefill_prompt(runner: Runner, tokens: Sequence[int], slot: int = 0) -> NDArray[np.float32]:
    """Prefill a whole prompt into `slot` from position 0; the last token's logits, [vocab]."""
    check_room(runner, len(tokens))
    logits: NDArray[np.float32] | None = None
    for start, end in chunk_spans(len(tokens), runner.prefill_buckets[-1]):
        logits = runner.prefill(tokens[start:end], slot=slot, start=start)
    assert logits is not None
    return logits


def check_room(runner: Runner, length: int) -> None:
    """Raise UsageError unless `length` tokens are at least one and fit the port's context."""
    if length == 0:
        raise UsageError("The prompt has no tokens.", "Give a prompt; a base prompt needs its BOS.")
    if length > runner.max_context:
        raise UsageError(
            f"The prompt has {length} tokens; the port was compiled for {runner.max_context}.",
            f"Compile with --max-context {length} or more.",
        )


def decode_one(runner: Runner, token: int, position: int, slot: int = 0) -> NDArray[np.float32]:
    """One decode step with only `slot` active; its logits, [vocab]."""
    rows = range(runner.slots)
    logits = runner.decode(
        [token if row == slot else 0 for row in rows],
        [position if row == slot else 0 for row in rows],
        [row == slot for row in rows],
    )
    row: NDArray[np.float32] = logits[slot]
    return row


def greedy_steps(
    runner: Runner, tokens: Sequence[int], slot: int = 0
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield (argmax token, its logits [vocab]) without end, until the context is full."""
    logits = prefill_prompt(runner, tokens, slot)
    position = len(tokens)
    while True:
        token = int(logits.argmax())
        yield token, logits
        if position >= runner.max_context:
            return
        logits = decode_one(runner, token, position, slot)
        position += 1


def greedy(
    runner: Runner,
    tokens: Sequence[int],
    limit: int,
    stop_ids: Collection[int] = (),
    slot: int = 0,
) -> list[int]:
    """At most `limit` greedy tokens; a stop id ends the list and is its last item."""
    out: list[int] = []
    for token, _ in greedy_steps(runner, tokens, slot):
        out.append(token)
        if token in stop_ids or len(out) >= limit:
            break
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt to go on with: at most `limit` tokens, a stop id is the last."""

    ids: Sequence[int]
    limit: int
    stop_ids: Collection[int] = ()


def greedy_together(runner: Runner, prompts: Sequence[Asked]) -> list[list[int]]:
    """What `greedy` says to each prompt, as many at once as the port has slots."""
    found: list[list[int]] = [[] for _ in prompts]
    waiting, rows = iter(range(len(prompts))), dict[int, int]()

    def took(index: int, logits: NDArray[np.float32]) -> bool:
        """Keep the likeliest token; whether the prompt goes on."""
        asked, out = prompts[index], found[index]
        out.append(int(logits.argmax()))
        room = len(asked.ids) + len(out) <= runner.max_context
        return room and len(out) < asked.limit and out[-1] not in asked.stop_ids

    while True:
        for slot in range(runner.slots):
            while slot not in rows and (index := next(waiting, None)) is not None:
                if took(index, prefill_prompt(runner, prompts[index].ids, slot)):
                    rows[slot] = index
        if not rows:
            return found
        logits = _decode_rows(runner, {s: (prompts[i].ids, found[i]) for s, i in rows.items()})
        rows = {slot: index for slot, index in rows.items() if took(index, logits[slot])}


def _decode_rows(
    runner: Runner, rows: dict[int, tuple[Sequence[int], list[int]]]
) -> NDArray[np.float32]:
    """One step of every slot in `rows`, slot → (prompt, its tokens so far); [slots, vocab]."""
    slots = range(runner.slots)
    return runner.decode(
        [rows[slot][1][-1] if slot in rows else 0 for slot in slots],
        [len(rows[slot][0]) + len(rows[slot][1]) - 1 if slot in rows else 0 for slot in slots],
        [slot in rows for slot in slots],
    )


def score_text(
    runner: Runner, tokens: Sequence[int], slot: int = 0
) -> Iterator[tuple[int, Scores]]:
    """Score a text chunk by chunk over one slot's state: (start, scores of the chunk).

    Position i's target is token i + 1; the last position's target is the last token itself (its
    `target_logprob` means nothing).
    """
    check_room(runner, len(tokens))
    targets = [*tokens[1:], tokens[-1]]
    for start, end in chunk_spans(len(tokens), runner.score_length):
        yield start, runner.score(tokens[start:end], targets[start:end], slot=slot, start=start)
