"""Making a golden: run the reference over the prompts, record what `golden.py` describes.

In: a checkpoint folder, GoldenPrompts, the identity it must have. Out: the committed Golden. One model is in
memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gemma_neuron.validation.compare import TOP, Distances, distances, likeliest, log_sum_exp
from gemma_neuron.validation.golden import (
    Golden,
    GoldenIdentity,
    GoldenText,
    Noise,
    Provenance,
    load_golden,
    save_golden,
    weight_digests,
)
from gemma_neuron.validation.prompts import FULL_LENGTH, GoldenPrompts, GreedyPrompt, TeacherText
from gemma_neuron.validation.reference import Reference, Step, open_reference

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Tensors = dict[str, NDArray[Any]]

KEPT_PER_STEP = 10
NOISE_POSITIONS = 512
"""Of each text: what the second pass costs, against where its largest noise lies."""
FollowUp = Callable[[GreedyPrompt, list[int]], GreedyPrompt | None]
"""The prompt after an answer (a tool's result given back), or None."""


def make_golden(
    source: Path,
    prompts: GoldenPrompts,
    identity: GoldenIdentity,
    out: Path,
    *,
    follow_up: FollowUp | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Golden:
    """Run stock transformers over `prompts` and commit the golden at `out` (its safetensors file)."""
    reference = open_reference(source, identity.dtype)
    texts: dict[str, GoldenText] = {}
    for text in prompts.texts:
        progress(f"reference: text {text.name}, {len(text.ids)} tokens")
        texts[text.name] = teach(reference, text)
    tensors: Tensors = {}
    for item in texts.values():
        tensors |= _text_tensors(item)
    waiting = list(prompts.greedy)
    while waiting:
        prompt = waiting.pop(0)
        progress(f"reference: generation {prompt.name}")
        steps = continue_greedily(reference, prompt)
        tensors |= _greedy_tensors(prompt, steps)
        after = follow_up(prompt, [step.token for step in steps]) if follow_up else None
        waiting += [after] if after is not None else []
    progress("reference: sanity text")
    losses = [mean_loss(reference, ids) for ids in (prompts.sanity, prompts.shuffled)]
    producer = reference.producer
    del reference
    provenance = Provenance(
        key=identity.key,
        producer=producer,
        checkpoint_digest=identity.checkpoint_digest,
        template_sha256=identity.template_sha256,
        files=weight_digests(source),
        prompts_digest=prompts.digest,
        seed=prompts.seed,
        sanity_loss=losses[0],
        shuffled_loss=losses[1],
        sanity_tokens=len(prompts.sanity),
        noise=_noise(source, identity.noise_dtype, texts, progress),
    )
    path = save_golden(out.parent, provenance, tensors, out.stem)
    made = load_golden(path, identity)
    return Golden(made.path, made.provenance, made.texts, made.greedy, reused=False)


def teach(reference: Reference, text: TeacherText) -> GoldenText:
    """Every position's distribution of one text: in full when short, else the likeliest TOP."""
    full = len(text.ids) <= FULL_LENGTH
    targets = np.array([*text.ids[1:], text.ids[-1]])
    values, top_ids, sums, target_logprob = [], [], [], []
    for start, logits in reference.logits(text.ids):
        lse = log_sum_exp(logits)
        aim = targets[start : start + len(logits), None]
        target_logprob.append(np.take_along_axis(logits, aim, -1)[:, 0] - lse)
        sums.append(lse)
        if not full:
            top = likeliest(logits, TOP)
            top_ids.append(top.astype(np.int32))
        values.append(logits if full else np.take_along_axis(logits, top, -1))
    return GoldenText(
        text.name,
        np.array(text.ids, np.int32),
        np.concatenate(values),
        None if full else np.concatenate(top_ids),
        np.concatenate(sums),
        np.concatenate(target_logprob).astype(np.float32),
    )


def continue_greedily(reference: Reference, prompt: GreedyPrompt) -> list[Step]:
    """Greedy steps up to the prompt's limit; a stop id is the last."""
    steps = []
    for step in reference.greedy(prompt.ids, min(KEPT_PER_STEP, reference.vocab)):
        steps.append(step)
        if step.token in prompt.stop_ids or len(steps) >= prompt.limit:
            break
    return steps


def mean_loss(reference: Reference, ids: Sequence[int]) -> float:
    """Mean negative log-probability of each token given those before it, in nats."""
    targets = np.array([*ids[1:], ids[-1]])
    total = 0.0
    for start, logits in reference.logits(ids):
        aim = targets[start : start + len(logits), None]
        log_p = np.take_along_axis(logits, aim, -1)[:, 0] - log_sum_exp(logits)
        last = min(len(log_p), len(ids) - 1 - start)  # the text's last token has no target
        total -= float(log_p[:last].sum(dtype=np.float64))
    return total / max(len(ids) - 1, 1)


def _noise(
    source: Path,
    dtype: str | None,
    texts: dict[str, GoldenText],
    progress: Callable[[str], None],
) -> Noise | None:
    """Distances of stock transformers at `dtype` from the golden, over the same texts."""
    if dtype is None:
        return None
    reference = open_reference(source, dtype)
    found: list[tuple[float, Distances]] = []
    for text in texts.values():
        progress(f"reference: noise of {dtype} on {text.name}")
        ids = [int(token) for token in text.ids[:NOISE_POSITIONS]]
        parts = [distances(text, start, logits) for start, logits in reference.logits(ids)]
        found.append((text.largest, Distances.join(parts)))
    return Noise(
        dtype=dtype,
        relative=max(float(d.all.max()) / largest for largest, d in found),
        kl=max(float(d.kl.max()) for _, d in found),
        pearson=min(float(d.pearson.min()) for _, d in found),
        gap=max(float(d.gap.max()) for _, d in found),
    )


def _text_tensors(text: GoldenText) -> Tensors:
    base = f"text.{text.name}"
    out: Tensors = {
        f"{base}.ids": text.ids,
        f"{base}.logsumexp": text.logsumexp,
        f"{base}.target_logprob": text.target_logprob,
    }
    if text.top_ids is None:
        return out | {f"{base}.logits": text.values}
    return out | {f"{base}.top_ids": text.top_ids, f"{base}.top_values": text.values}


def _greedy_tensors(prompt: GreedyPrompt, steps: list[Step]) -> Tensors:
    base = f"greedy.{prompt.name}"
    return {
        f"{base}.prompt": np.array(prompt.ids, np.int32),
        f"{base}.tokens": np.array([step.token for step in steps], np.int32),
        f"{base}.top_ids": np.stack([step.top_ids for step in steps]),
        f"{base}.top_values": np.stack([step.top_values for step in steps]),
    }
