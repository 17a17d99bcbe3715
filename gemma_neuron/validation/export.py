"""`golden`: a reference made from a checkpoint alone, on any machine, for a port elsewhere.

In: a checkpoint folder. Out: the golden's file and its figures. The prompts are those a port with room for the
whole long text would get.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_neuron.chat import load_chat_assets
from gemma_neuron.models.registry import read_geometry
from gemma_neuron.places import require_place
from gemma_neuron.validation.context import follow_up
from gemma_neuron.validation.golden import GoldenIdentity, weight_digests
from gemma_neuron.validation.make import make_golden
from gemma_neuron.validation.peak import AnonymousPeak
from gemma_neuron.validation.prompts import LEAST_LONG, Conversation, Reach, choose_prompts
from gemma_neuron.validation.questions import find_questions
from gemma_neuron.validation.verdict import scope

if TYPE_CHECKING:
    from gemma_neuron.geometry import ModelGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenReport:
    """The `golden` command's result, in the JSON contract's names."""

    file: str
    digest: str
    prompts: int
    dtype: str
    peak_bytes: int
    """Resident, with the pages of mapped weight files that are in memory."""
    peak_anonymous_bytes: int
    """Of which not backed by a file: what has to fit."""
    seconds: float
    warnings: tuple[str, ...] = ()
    """The audit's."""

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, **asdict(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenOptions:
    """What `golden` is asked for.

    `out`: where (`.safetensors` is added). `questions`: a file instead of the checkpoint's or the packaged set.
    `base`: plain completion, for `validate --base`, though the model has a template. `memory`: bytes the reference may
    use; None: what is free.
    """

    out: Path
    dtype: str = "float32"
    questions: Path | None = None
    base: bool = False
    memory: int | None = None


def export_golden(
    source: Path,
    options: GoldenOptions,
    *,
    checkpoint_digest: str,
    progress: Callable[[str], None] = lambda _: None,
) -> GoldenReport:
    """Make a golden. `checkpoint_digest` is the audit's: a port carries it as `fingerprints.checkpoint`."""
    started = time.monotonic()
    out, dtype = options.out, options.dtype
    out = out if out.suffix == ".safetensors" else out.with_name(out.name + ".safetensors")
    with suppress(OSError):  # said next, with its reason
        out.parent.mkdir(parents=True, exist_ok=True)
    require_place(out, "--out")
    assets = load_chat_assets(source)
    geometry = read_geometry(json.loads((source / "config.json").read_text(encoding="utf-8")))
    template = assets.template
    talk = Conversation(
        assets=assets, template=template, scope=scope(template is not None, options.base)
    )
    chosen = find_questions(options.questions, (source,))
    prompts = choose_prompts(talk, chosen, _reach(geometry))
    identity = GoldenIdentity(
        checkpoint_digest=checkpoint_digest,
        template_sha256=template.sha256 if template is not None else "",
        prompts_digest=prompts.digest,
        dtype=dtype,
        noise_dtype="bfloat16" if dtype == "float32" else None,
        files=weight_digests(source),
        experts=geometry.experts is not None,
    )
    by_name = dict(chosen.for_scope(talk.scope))
    with AnonymousPeak() as peak:
        made = make_golden(
            source,
            prompts,
            identity,
            out,
            follow_up=lambda asked, ids: follow_up(talk, by_name, asked, ids),
            memory=options.memory,
            progress=progress,
        )
    return GoldenReport(
        file=str(made.path),
        digest=made.provenance.key,
        prompts=len(made.greedy) + len(made.texts),
        dtype=dtype,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        peak_anonymous_bytes=peak.bytes,
        seconds=round(time.monotonic() - started, 3),
    )


def _reach(geometry: ModelGeometry) -> Reach:
    """Of a port with room for the whole long text."""
    wanted = max(2 * geometry.window + 40, LEAST_LONG)
    return Reach(
        window=geometry.window,
        max_context=min(geometry.max_context, wanted),
        buckets=(),
        vocab=geometry.vocab,
    )
