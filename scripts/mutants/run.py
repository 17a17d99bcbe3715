"""One mutant: a copy of the port, one fault in it, committed, run uncompiled and judged by every level."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest import MonkeyPatch

from gemma_neuron.backends.cpu.runner import CpuRunner
from gemma_neuron.backends.decode import greedy
from gemma_neuron.chat import load_chat_assets
from gemma_neuron.checkpoint.source import prompt_digest
from gemma_neuron.port import Port
from gemma_neuron.reports import ValidationReport
from gemma_neuron.validation.golden import load_golden
from gemma_neuron.validation.golden_tensors import GoldenGreedy
from gemma_neuron.validation.validator import Options, validate
from scripts.mutants.base import Fault
from tests.eager import EagerRunner

MATCHED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Subject:
    """What is mutated: the sound port, its checkpoint, and a folder of goldens that all its mutants share."""

    port: Path
    checkpoint: Path
    goldens: Path
    questions: Path | None
    """A question set; None: the model's own."""


def judged(subject: Subject, work: Path, fault: Fault | None) -> dict[str, Any]:
    """What each level says of a copy of the port at `work` with `fault` in it, as fields of a result line."""
    started = time.monotonic()
    port = _copy(subject, work)
    if fault is not None and fault.kind != "graph":
        fault.apply(port)  # type: ignore[call-arg, arg-type]
        commit_again(port)
    options = Options(checkpoint=subject.checkpoint, questions=subject.questions)
    with MonkeyPatch.context() as patch:
        built_from = Port(work)
        if fault is not None and fault.kind == "graph":
            fault.apply(patch, built_from)  # type: ignore[call-arg, arg-type]
        with closing(_runner(built_from)) as runner:
            report = validate(Port(work), runner, options)
        _keep_goldens(port, subject.goldens)
        with closing(_runner(built_from)) as fresh:
            matched = _token_match(port, fresh, report)
    return {
        "verdict": report.verdict,
        "levels": {str(level.level): level.status for level in report.levels},
        "reasons": {str(x.level): x.reason[:200] for x in report.levels if x.status == "fail"},
        "level_seconds": {str(x.level): round(x.seconds, 1) for x in report.levels},
        "token_match": matched,
        "seconds": round(time.monotonic() - started, 1),
    }


def _runner(port: Port) -> CpuRunner:
    """Compiled graphs where the port has them: what is wrong with weights or prompts needs no others."""
    return CpuRunner(port) if (port.path / "graphs").is_dir() else EagerRunner(port)


def _copy(subject: Subject, work: Path) -> Port:
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(subject.port, work, copy_function=_link_or_copy)
    shutil.copytree(
        subject.goldens, work / "golden", copy_function=_link_or_copy, dirs_exist_ok=True
    )
    return Port(work)


def _link_or_copy(source: str, to: str) -> None:
    """Large files are linked: whoever changes one puts a new one in its place."""
    if not Path(to).exists():
        (os.link if source.endswith(".safetensors") else shutil.copy2)(source, to)


def _keep_goldens(port: Port, goldens: Path) -> None:
    """The reference is run once over the same prompts."""
    shutil.copytree(port.golden_folder, goldens, copy_function=_link_or_copy, dirs_exist_ok=True)


def commit_again(port: Port) -> None:
    """Digests as if the fault had been there from the start; the record too knows the changed prompt."""
    for rank in range(port.plan.tp):
        manifest = port.rank_set(rank).manifest()
        assert manifest is not None
        port.rank_set(rank).commit([entry.name for entry in manifest.files], manifest.facts)
    files = [p for p in sorted(port.source_folder.iterdir()) if not p.name.startswith("source.")]
    port.source_set.commit([p.name for p in files])
    template = load_chat_assets(port.source_folder).template
    prints = port.record.fingerprints.model_copy(
        update={
            "template": "" if template is None else template.sha256,
            "prompt": prompt_digest({p.name: p.read_bytes() for p in files}),
        }
    )
    port.write_record(port.record.model_copy(update={"fingerprints": prints}))


def _token_match(port: Port, runner: CpuRunner, report: ValidationReport) -> bool:
    """Whether the usual test passes: a runner just loaded, greedy tokens of one short prompt equal the reference's."""
    asked = _shortest(port, report.provenance["golden"]["digest"])
    expected: list[int] = asked.tokens.tolist()[:MATCHED_TOKENS]
    return greedy(runner, asked.prompt.tolist(), len(expected)) == expected


def _shortest(port: Port, digest: str) -> GoldenGreedy:
    goldens = map(load_golden, port.golden_folder.glob("*.safetensors"))
    golden = next(golden for golden in goldens if golden.digest == digest)
    return min(golden.greedy.values(), key=lambda item: len(item.prompt))
