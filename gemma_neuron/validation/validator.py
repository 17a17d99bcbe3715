"""The validator: prepare prompts, find or make the golden, run the levels in order, decide, write.

In: a port, its loaded runner, and a golden or the checkpoint. Out: ValidationReport, also written to the
port's `validation.json`. Refused: a reference that is none (golden.py says which).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_neuron.artifacts import write_json_atomic
from gemma_neuron.chat import load_chat_assets
from gemma_neuron.errors import IntegrityError, ReferenceUnavailableError
from gemma_neuron.port import VERDICT_NAME
from gemma_neuron.reports import LevelResult, ValidationReport
from gemma_neuron.unchanged import FilesBefore
from gemma_neuron.validation.bars import read_bars
from gemma_neuron.validation.context import LevelContext, follow_up, result
from gemma_neuron.validation.drift import measure_drift
from gemma_neuron.validation.find import (
    find_golden,
    import_golden,
    port_identity,
    refuse_other_weights,
    source_files,
)
from gemma_neuron.validation.golden import Golden, golden_path
from gemma_neuron.validation.levels import chat as level_chat
from gemma_neuron.validation.levels import generation, logits, position, prompt, reference, weights
from gemma_neuron.validation.prompts import (
    Conversation,
    Reach,
    choose_prompts,
    forced_template,
)
from gemma_neuron.validation.questions import find_questions, read_questions
from gemma_neuron.validation.verdict import scope, verdict

if TYPE_CHECKING:
    from gemma_neuron.backends.base import Runner
    from gemma_neuron.port import Port
    from gemma_neuron.validation.drift import Hidden

LEVELS: dict[int, Callable[[LevelContext], LevelResult]] = {
    0: prompt.run,
    1: weights.run,
    2: reference.run,
    3: logits.run,
    4: position.run,
    5: generation.run,
    6: level_chat.run,
}
NEED_GOLDEN = frozenset({2, 3, 4, 5})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a validation may use and is told to do.

    `checkpoint`: the source folder, for level 1 and for making a golden. `force_template`: a template file or
    a marker style (`gemma-3`, `gemma-4`, `none`) used instead of the model's own. `drift`: compare hidden states
    by layer too, which takes the checkpoint and a pass of stock over one text.
    """

    checkpoint: Path | None = None
    golden: Path | None = None
    levels: frozenset[int] | None = None
    questions: Path | None = None
    base: bool = False
    force_template: str | None = None
    drift: bool = False


def require_inputs(options: Options) -> None:
    """Raise what a file that the user names wrongly will raise, before a port of minutes is loaded."""
    if options.questions is not None:
        read_questions(options.questions)
    if options.golden is not None:
        golden_path(options.golden)
    if options.force_template is not None:
        forced_template(options.force_template, None).close()


def validate(
    port: Port,
    runner: Runner,
    options: Options | None = None,
    *,
    hidden: Hidden | None = None,
    before: FilesBefore | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> ValidationReport:
    """Run the levels and write `validation.json`. `hidden`: the port's hidden states, for `drift`. `before`: the port's
    files, taken before the runner read them. Raises ReferenceUnavailableError or IntegrityError."""
    options = options or Options()
    _require_drift(options)
    started = time.monotonic()
    context = prepare(port, runner, options)
    done: list[LevelResult] = []
    for level, run in LEVELS.items():
        if options.levels is not None and level not in options.levels:
            done.append(result(level, "not-run", "left out by --levels"))
            continue
        progress(f"level {level}")
        begun = time.monotonic()
        if level in NEED_GOLDEN and context.golden is None:
            context.golden = _golden(context, options, progress)
        found = run(context)
        if level == weights.LEVEL and found.status == "fail" and options.checkpoint is not None:
            # another checkpoint is no fault of the port, whether or not a golden is at hand
            refuse_other_weights(options.checkpoint, source_files(port))
        _refuse_changes(before)
        done.append(replace(found, seconds=round(time.monotonic() - begun, 3)))
    drift = None
    if options.drift and hidden is not None and options.checkpoint is not None:
        context.golden = context.golden or _golden(context, options, progress)
        drift = measure_drift(context, options.checkpoint, hidden, done[3], progress)
    report = ValidationReport(
        verdict=verdict(done),
        scope=scope(context.talk.template is not None, options.base),
        levels=tuple(done),
        token_match=context.facts.get("token_match", {"compared": 0, "equal": 0}),
        first_divergence=context.facts.get("first_divergence"),
        warnings=port.record.warnings,
        provenance=_provenance(context, options, time.monotonic() - started),
        drift=drift,
    )
    _refuse_changes(before)
    write_json_atomic(port.path / VERDICT_NAME, {"schema": 1, **report.to_json()})
    return report


def _require_drift(options: Options) -> None:
    if options.drift and options.checkpoint is None:
        raise ReferenceUnavailableError(
            "--drift runs stock transformers' layers, and the checkpoint is not at hand.",
            "Give --checkpoint SOURCE.",
        )


def _refuse_changes(before: FilesBefore | None) -> None:
    """A verdict about files that were changed meanwhile would be about neither the old nor the new."""
    changed = before.changed() if before is not None else None
    if changed is not None:
        raise IntegrityError(
            f"{changed} There is no verdict.",
            "Run validate again when nothing else writes to the port.",
        )


def prepare(port: Port, runner: Runner, options: Options) -> LevelContext:
    """Assets, questions and prompts of one validation; nothing has run yet."""
    folder = port.source_folder
    assets = load_chat_assets(folder)
    template = assets.template
    if options.force_template is not None:
        template = forced_template(options.force_template, template)
    talk = Conversation(
        assets=assets, template=template, scope=scope(template is not None, options.base)
    )
    folders = (folder, options.checkpoint) if options.checkpoint is not None else (folder,)
    questions = find_questions(options.questions, folders)
    reach = Reach(
        window=port.geometry.window,
        max_context=runner.max_context,
        buckets=runner.prefill_buckets,
        vocab=runner.vocab,
    )
    return LevelContext(
        port=port,
        runner=runner,
        talk=talk,
        questions=questions,
        prompts=choose_prompts(talk, questions, reach),
        bars=read_bars(),
        forced=options.force_template,
        checkpoint=options.checkpoint,
        base_asked=options.base,
    )


def _golden(context: LevelContext, options: Options, progress: Callable[[str], None]) -> Golden:
    template = context.talk.template
    identity = port_identity(
        context.port, context.prompts.digest, template.sha256 if template is not None else ""
    )
    folder, vocab = context.port.golden_folder, context.runner.vocab
    if options.golden is not None:
        return import_golden(options.golden, folder, identity, vocab)
    found = find_golden(
        folder,
        identity,
        checkpoint=options.checkpoint,
        config=context.port.source_folder / "config.json",
        prompts=context.prompts,
        follow_up=lambda asked, ids: follow_up(context.talk, context.by_name, asked, ids),
        progress=progress,
    )
    if found is None:
        raise ReferenceUnavailableError(
            f"{context.port.path} holds no golden for these prompts, and the checkpoint is not at hand.",
            "Give --checkpoint SOURCE, or --golden FILE made by `gemma-neuron golden`.",
        )
    found.require_vocabulary(vocab)
    return found


def _provenance(context: LevelContext, options: Options, seconds: float) -> dict[str, Any]:
    template, golden = context.talk.template, context.golden
    out: dict[str, Any] = {
        "port_digest": context.port.record.digest,
        "dtype": context.port.spec.dtype,
        "port": _port_facts(context.port),
        "questions": {"origin": context.questions.origin, "digest": context.questions.digest},
        "template_sha256": template.sha256 if template is not None else "",
        "forced_template": context.forced,
        "base_asked": options.base,
        "seconds": round(seconds, 3),
    }
    if golden is not None:
        made = golden.provenance
        out["golden"] = {
            "digest": golden.digest,
            "reused": golden.reused,
            "producer": made.producer["producer"],
            "dtype": made.producer.get("dtype", ""),
            "torch": made.producer.get("torch", ""),
            "checkpoint_digest": made.checkpoint_digest,
            "noise": made.noise.model_dump() if made.noise is not None else None,
        }
    return out


def _port_facts(port: Port) -> dict[str, Any]:
    record, spec, plan = port.record, port.spec, port.plan
    return {
        "source": record.source.uri,
        "checkpoint_digest": record.fingerprints.checkpoint,
        "backend": spec.backend,
        "tp": plan.tp,
        "strategy": plan.strategy,
        "max_context": spec.max_context,
        "buckets": list(spec.buckets),
        "slots": spec.slots,
        "window": port.geometry.window,
        "versions": record.versions,
    }
