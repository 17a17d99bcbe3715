"""Which graphs a port gets: prefill buckets and the defaults of slots and context."""

from __future__ import annotations

from gemma_neuron.errors import DoesNotFitError, UsageError
from gemma_neuron.geometry import ModelGeometry

DEFAULT_CONTEXT = 4096
DEFAULT_SLOTS = 4
DEFAULT_BUCKETS = (128, 512)
"""A short one, so that a chat turn does not pay for 512 columns, and a long one for documents."""


def choose_context(geometry: ModelGeometry, asked: int | None) -> int:
    """The context to compile for. Raises DoesNotFitError beyond the model's own."""
    if asked is None:
        return min(DEFAULT_CONTEXT, geometry.max_context)
    if asked < 2:
        raise UsageError(
            f"--max-context {asked}: a prompt and an answer need at least 2 positions.",
            f"Leave it out for {min(DEFAULT_CONTEXT, geometry.max_context)}.",
        )
    if asked > geometry.max_context:
        raise DoesNotFitError(
            f"--max-context {asked} is beyond the {geometry.max_context} positions the model was "
            "made for (max_position_embeddings).",
            f"Use --max-context {geometry.max_context} or less.",
        )
    return asked


def choose_buckets(asked: tuple[int, ...] | None, context: int) -> tuple[int, ...]:
    """Prefill lengths, ascending. Raises UsageError for one that cannot be."""
    if asked is None:
        return tuple(sorted({min(n, context) for n in DEFAULT_BUCKETS}))
    wrong = [n for n in asked if not 2 <= n <= context]
    if wrong or not asked:
        raise UsageError(
            f"--buckets {','.join(map(str, asked))}: each must lie between 2 and the context of "
            f"{context}.",
            f"For example --buckets {','.join(map(str, choose_buckets(None, context)))}.",
        )
    return tuple(sorted(set(asked)))


def choose_slots(asked: int | None, default: int = DEFAULT_SLOTS) -> int:
    """Sequences decoded at once. Raises UsageError below one."""
    if asked is not None and asked < 1:
        raise UsageError(
            f"--slots {asked}: at least one sequence must fit.", "Use --slots 1 or more."
        )
    return default if asked is None else asked
