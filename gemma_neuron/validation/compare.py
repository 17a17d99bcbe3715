"""Distances between two sets of logits over the same positions. numpy, and torch for the largest of a row.

In: the reference's logits (all, or its likeliest 1000 with ids and log-sum-exp) and the port's, [n, vocab]
float32. Out: `Distances`, arrays of one figure per position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gemma_neuron.validation.golden_tensors import GoldenText

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOP = 1000
TOP_STEPS = (5, 50, TOP)


@dataclass(frozen=True, slots=True)
class Distances:
    """Per position [n]: `top[k]` largest difference among the reference's k likeliest, `all` among every
    logit the reference has, `kl` of the port from the reference in nats (over what it has), `pearson`,
    `reference_token` and `port_token` the argmaxes, `margin` the reference's lead of its own argmax over the
    port's (0 where equal), `gap` the change of the lead of the first over the second."""

    top: dict[int, NDArray[np.float32]]
    all: NDArray[np.float32]
    kl: NDArray[np.float32]
    pearson: NDArray[np.float32]
    reference_token: NDArray[np.int64]
    port_token: NDArray[np.int64]
    margin: NDArray[np.float32]
    gap: NDArray[np.float32]

    @staticmethod
    def join(parts: list[Distances]) -> Distances:
        """Distances of consecutive chunks as one."""
        return Distances(
            {k: np.concatenate([p.top[k] for p in parts]) for k in parts[0].top},
            *(
                np.concatenate([getattr(p, name) for p in parts])
                for name in (
                    "all", "kl", "pearson", "reference_token", "port_token", "margin", "gap"
                )
            ),
        )  # fmt: skip


def likeliest(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest of each row [n, vocab], best first, equal ones by id: [n, count]."""
    import torch

    # numpy's argpartition takes 0.3 s for one row of 262,144; topk takes milliseconds.
    values, ids = torch.from_numpy(np.ascontiguousarray(logits)).topk(
        min(count, logits.shape[-1]), dim=-1
    )
    found: NDArray[np.int64] = ids.numpy()
    order = np.lexsort((found, -values.numpy()), axis=-1)
    return np.take_along_axis(found, order, -1)


def log_sum_exp(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of each row, in float32 around its maximum: [n]."""
    out: NDArray[np.float32] = _log_sum_exp(logits).astype(np.float32)
    return out


def _log_sum_exp(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    top = logits.max(axis=-1, keepdims=True)
    total = np.exp(logits - top).sum(axis=-1, dtype=np.float64)
    out: NDArray[np.float64] = top[..., 0] + np.log(total)
    return out


def distances(text: GoldenText, start: int, port: NDArray[np.float32]) -> Distances:
    """The port's logits [n, vocab] at positions start… of a golden text."""
    rows = slice(start, start + len(port))
    values = text.values[rows]
    if text.top_ids is None:
        top_ids = likeliest(values, TOP)
        top_values = np.take_along_axis(values, top_ids, -1)
        full: NDArray[np.float32] | None = values
    else:
        top_ids, top_values, full = text.top_ids[rows].astype(np.int64), values, None
    return _measure(top_ids, top_values, text.logsumexp[rows], full, port)


def _measure(
    top_ids: NDArray[np.int64],
    top_values: NDArray[np.float32],
    reference_lse: NDArray[np.float32],
    full: NDArray[np.float32] | None,
    port: NDArray[np.float32],
) -> Distances:
    port = np.nan_to_num(port, nan=-1e30, posinf=1e30, neginf=-1e30)
    mine = np.take_along_axis(port, top_ids, -1)
    difference = np.abs(mine - top_values)
    within = difference.max(axis=-1)
    every = np.abs(port - full).max(axis=-1) if full is not None else within
    log_p = top_values.astype(np.float64) - reference_lse[:, None]
    log_q = mine.astype(np.float64) - _log_sum_exp(port)[:, None]
    first, choice = top_ids[:, 0], port.argmax(axis=-1)
    return Distances(
        {k: difference[:, :k].max(axis=-1) for k in TOP_STEPS},
        every,
        _divergence(log_p, log_q),
        _pearson(top_values, mine),
        first,
        choice,
        _margins(top_ids, top_values, choice),
        np.abs((top_values[:, 0] - top_values[:, 1]) - (mine[:, 0] - mine[:, 1])),
    )


def _divergence(log_p: NDArray[np.float64], log_q: NDArray[np.float64]) -> NDArray[np.float32]:
    """KL in nats of q from p over what the rows [n, k] have of each, with the terms that cancel over all of it.

    Without them the rounding of a log-sum-exp in float32, 1e-6 at 16, would come out as that much KL: more than the
    bar of two float32 runs. With them it counts with its square.
    """
    terms = np.exp(log_p) * (log_p - log_q) - np.exp(log_p) + np.exp(log_q)
    out: NDArray[np.float32] = terms.sum(axis=-1).astype(np.float32)
    return out


def _pearson(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    a = a.astype(np.float64) - a.mean(axis=-1, keepdims=True, dtype=np.float64)
    b = b.astype(np.float64) - b.mean(axis=-1, keepdims=True, dtype=np.float64)
    norm = np.sqrt((a * a).sum(axis=-1) * (b * b).sum(axis=-1))
    out: NDArray[np.float32] = ((a * b).sum(axis=-1) / np.maximum(norm, 1e-30)).astype(np.float32)
    return out


def _margins(
    top_ids: NDArray[np.int64], top_values: NDArray[np.float32], choice: NDArray[np.int64]
) -> NDArray[np.float32]:
    """The reference's lead over the port's choice; over its last recorded token where that is not there."""
    found = top_ids == choice[:, None]
    at = np.where(found.any(axis=-1), found.argmax(axis=-1), top_ids.shape[-1] - 1)
    theirs = np.take_along_axis(top_values, at[:, None], -1)[:, 0]
    out: NDArray[np.float32] = top_values[:, 0] - theirs
    return out
