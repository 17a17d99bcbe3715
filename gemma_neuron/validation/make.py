"""Making a golden: run the reference over the prompts, record what `golden.py` describes.

In: a checkpoint folder, GoldenPrompts, the identity it must have. Out: the committed Golden. All texts go through the
layers together, and so do all prompts: a checkpoint larger than the memory is read once per pass, not once per prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gemma_neuron.errors import CheckpointError, SourceChangedError
from gemma_neuron.unchanged import FilesBefore
from gemma_neuron.validation.compare import (
    TOP,
    TOP_STEPS,
    Distances,
    distances,
    likeliest,
    log_sum_exp,
)
from gemma_neuron.validation.golden import (
    Golden,
    GoldenIdentity,
    PromptRecord,
    Provenance,
    load_golden,
    save_golden,
    weight_digests,
)
from gemma_neuron.validation.golden_noise import Noise, beyond_belief
from gemma_neuron.validation.golden_tensors import GoldenText, largest_logit
from gemma_neuron.validation.prompts import FULL_LENGTH, GoldenPrompts, GreedyPrompt, TeacherText
from gemma_neuron.validation.reference import Reference, Slices, Step, open_reference

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Tensors = dict[str, NDArray[Any]]

KEPT_PER_STEP = 10
NOISE_POSITIONS = 512
"""Of each text: what the second pass costs, against where its largest noise lies."""
FollowUp = Callable[[GreedyPrompt, list[int]], GreedyPrompt | None]
"""The prompt after an answer (a tool's result given back), or None."""
Progress = Callable[[str], None]


def make_golden(
    source: Path,
    prompts: GoldenPrompts,
    identity: GoldenIdentity,
    out: Path,
    *,
    follow_up: FollowUp | None = None,
    memory: int | None = None,
    progress: Progress = lambda _: None,
) -> Golden:
    """Run stock transformers over `prompts` and commit the golden at `out` (its safetensors file).

    `memory`: bytes the reference may use; None: what is free. Raises DoesNotFitError when they hold no layer.
    """
    before = FilesBefore.of([source / "config.json", *sorted(source.glob("*.safetensors"))])
    reference = open_reference(source, identity.dtype, memory)
    if memory is not None:
        reference.require_room(memory)
    texts, losses = _teach_all(reference, prompts, progress)
    tensors: Tensors = {}
    records = []
    for item in texts.values():
        tensors |= _text_tensors(item)
        records.append(PromptRecord(name=item.name, kind="text", tokens=len(item.ids)))
    for prompt, steps in _continue_all(reference, prompts.greedy, follow_up, progress):
        tensors |= _greedy_tensors(prompt, steps)
        records.append(_record(prompt))
    producer = reference.producer
    del reference
    noise = _noise(source, identity.noise_dtype, texts, memory, progress)
    _require_judgeable(noise, texts, identity.experts)
    progress("digests of the weight files")
    provenance = Provenance(
        key=identity.key,
        producer=producer,
        checkpoint_digest=identity.checkpoint_digest,
        template_sha256=identity.template_sha256,
        files=identity.files or weight_digests(source),
        prompts_digest=prompts.digest,
        prompts=tuple(records),
        seed=prompts.seed,
        sanity_loss=losses[0],
        shuffled_loss=losses[1],
        sanity_tokens=len(prompts.sanity),
        noise=noise,
    )
    _refuse_changes(before)
    path = save_golden(out.parent, provenance, tensors, out.stem)
    made = load_golden(path, identity)
    return Golden(made.path, made.provenance, made.texts, made.greedy, reused=False)


def _teach_all(
    reference: Reference, prompts: GoldenPrompts, progress: Progress
) -> tuple[dict[str, GoldenText], tuple[float, float]]:
    """(texts by name, mean losses of the sanity text and of its shuffled tokens), in one pass."""
    sanity = (prompts.sanity, prompts.shuffled)
    read = reference.read(
        [*(text.ids for text in prompts.texts), *sanity],
        lambda line: progress(f"reference: {line}"),
    )
    texts = {}
    for text in prompts.texts:
        texts[text.name] = teach(next(read), text)
        progress(f"reference: logits of {text.name}, {len(text.ids)} tokens")
    first, second = (mean_loss(next(read), ids) for ids in sanity)
    return texts, (first, second)


def _continue_all(
    reference: Reference,
    prompts: Sequence[GreedyPrompt],
    follow_up: FollowUp | None,
    progress: Progress,
) -> list[tuple[GreedyPrompt, list[Step]]]:
    """Every prompt with its steps; then, together, the prompts that follow from their answers."""
    done: list[tuple[GreedyPrompt, list[Step]]] = []
    waiting = list(prompts)
    keep = min(KEPT_PER_STEP, reference.vocab)
    while waiting:
        found = reference.greedy(waiting, keep, lambda line: progress(f"reference: {line}"))
        now = list(zip(waiting, found, strict=True))
        after = [
            follow_up(prompt, [step.token for step in steps]) if follow_up else None
            for prompt, steps in now
        ]
        done += now
        waiting = [prompt for prompt in after if prompt is not None]
    return done


def teach(slices: Slices, text: TeacherText) -> GoldenText:
    """Every position's distribution of one text: in full when it is short, else the likeliest TOP."""
    full = len(text.ids) <= FULL_LENGTH
    targets = np.array([*text.ids[1:], text.ids[-1]])
    values, top_ids, sums, target_logprob = [], [], [], []
    for start, logits in slices:
        _require_numbers(logits, f"{text.name!r}, positions from {start} on")
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


def mean_loss(slices: Slices, ids: Sequence[int]) -> float:
    """Mean negative log-probability of each token given those before it, in nats."""
    targets = np.array([*ids[1:], ids[-1]])
    total = 0.0
    for start, logits in slices:
        _require_numbers(logits, f"the sanity text, positions from {start} on")
        aim = targets[start : start + len(logits), None]
        log_p = np.take_along_axis(logits, aim, -1)[:, 0] - log_sum_exp(logits)
        last = min(len(log_p), len(ids) - 1 - start)  # the text's last token has no target
        total -= float(log_p[:last].sum(dtype=np.float64))
    return total / max(len(ids) - 1, 1)


def _noise(
    source: Path,
    dtype: str | None,
    texts: dict[str, GoldenText],
    memory: int | None,
    progress: Progress,
) -> Noise | None:
    """Distances of stock transformers at `dtype` from the golden, over the same texts."""
    if dtype is None:
        return None
    ids = [text.ids[:NOISE_POSITIONS].tolist() for text in texts.values()]
    read = open_reference(source, dtype, memory).read(
        ids, lambda line: progress(f"noise of {dtype}: {line}")
    )
    found: list[tuple[float, Distances]] = []
    for text, slices in zip(texts.values(), read, strict=True):
        parts = []
        for start, logits in slices:
            _require_numbers(logits, f"{text.name!r} at {dtype}, positions from {start} on")
            parts.append(distances(text, start, logits))
        found.append((text.largest, Distances.join(parts)))
    return Noise(
        dtype=dtype,
        relative=max(float(d.all.max()) / largest for largest, d in found),
        top={k: max(float(d.top[k].max()) / largest for largest, d in found) for k in TOP_STEPS},
        kl=max(float(d.kl.max()) for _, d in found),
        pearson=min(float(d.pearson.min()) for _, d in found),
        gap=max(float(d.gap.max()) for _, d in found),
    )


def _require_numbers(logits: NDArray[np.float32], where: str) -> None:
    """Raise CheckpointError at a NaN or an infinity: what equals that, or stays within the noise of it, is anything."""
    if not np.isfinite(logits).all():
        raise CheckpointError(
            f"Stock transformers itself gives logits that are no numbers (NaN or infinite) on {where}.",
            "`gemma-neuron inspect SOURCE --values` names tensors that hold such values.",
        )


def _refuse_changes(before: FilesBefore) -> None:
    """Some layers of one checkpoint and some of another are neither's reference."""
    if (changed := before.changed()) is not None:
        raise SourceChangedError(
            f"{changed} No golden was written.",
            "Run the same command again when nothing else writes there.",
        )


def _require_judgeable(noise: Noise | None, texts: dict[str, GoldenText], experts: bool) -> None:
    found = noise and beyond_belief(noise, largest_logit(texts.values()), experts=experts)
    if noise and found:
        raise CheckpointError(
            f"The noise of stock transformers at {noise.dtype} against float32 is {found}: no {noise.dtype} port of "
            "this checkpoint could be told from a broken one.",
            "Compile with --dtype float32, or see what `gemma-neuron inspect SOURCE --values` says of the weights.",
        )


def _record(prompt: GreedyPrompt) -> PromptRecord:
    return PromptRecord(
        name=prompt.name,
        kind="greedy",
        tokens=len(prompt.ids),
        limit=prompt.limit,
        text=prompt.text,
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
