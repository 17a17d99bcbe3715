"""One mutant: a copy of the port, one fault in it, committed, run uncompiled and judged by every level."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from pytest import MonkeyPatch

from gemma_neuron.backends.decode import greedy
from gemma_neuron.chat import load_chat_assets
from gemma_neuron.port import Port
from gemma_neuron.validation.golden import load_golden
from gemma_neuron.validation.validator import Options, prepare, validate
from scripts.mutants.base import Fault
from tests.eager import EagerRunner

MATCHED_TOKENS = 16


def judged(base: Path, work: Path, fault: Fault | None, checkpoint: Path) -> dict[str, Any]:
    """What each level says of the port at `base` with `fault` in it (None: as it is), as fields of a result line."""
    started = time.monotonic()
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(base, work)
    port = Port(work)
    if fault is not None and fault.kind != "graph":
        fault.apply(port)  # type: ignore[call-arg, arg-type]
        _commit_again(port)
    with MonkeyPatch.context() as patch:
        built_from = Port(work)
        if fault is not None and fault.kind == "graph":
            fault.apply(patch, built_from)  # type: ignore[call-arg, arg-type]
        runner = EagerRunner(built_from)
        base_model = load_chat_assets(port.source_folder).template is None
        options = Options(checkpoint=checkpoint, base=base_model)
        try:
            report = validate(Port(work), runner, options)
            golden = report.provenance["golden"]["digest"]
            matched = _token_match(Port(work), runner, options, golden)
        finally:
            runner.close()
    return {
        "verdict": report.verdict,
        "levels": {str(level.level): level.status for level in report.levels},
        "reasons": {str(x.level): x.reason[:200] for x in report.levels if x.status == "fail"},
        "token_match": matched,
        "seconds": round(time.monotonic() - started, 1),
    }


def _commit_again(port: Port) -> None:
    """Digests as if the fault had been there from the start; the record too knows the changed prompt."""
    from gemma_neuron.checkpoint.source import open_source, prompt_digest

    for rank in range(port.plan.tp):
        manifest = port.rank_set(rank).manifest()
        assert manifest is not None
        port.rank_set(rank).commit([entry.name for entry in manifest.files], manifest.facts)
    port.source_set.commit(
        sorted(p.name for p in port.source_folder.iterdir() if not p.name.startswith("source."))
    )
    template = load_chat_assets(port.source_folder).template
    prints = port.record.fingerprints.model_copy(
        update={
            "template": "" if template is None else template.sha256,
            "prompt": prompt_digest(open_source(str(port.source_folder))),
        }
    )
    port.write_record(port.record.model_copy(update={"fingerprints": prints}))


def _token_match(port: Port, runner: EagerRunner, options: Options, golden: str) -> bool:
    """Whether the usual test passes: greedy tokens of one short prompt equal the reference's."""
    found = next(
        g
        for f in port.golden_folder.glob("*.safetensors")
        if (g := load_golden(f)).digest == golden
    )
    context = prepare(port, runner, options)
    prompt = min(context.prompts.greedy, key=lambda p: len(p.ids))
    expected = found.greedy[prompt.name].tokens.tolist()[:MATCHED_TOKENS]
    limit = min(prompt.limit, MATCHED_TOKENS)
    return greedy(runner, prompt.ids, limit, prompt.stop_ids)[:MATCHED_TOKENS] == expected
