"""A golden without a port: made once, on any machine, from the checkpoint alone (`gemma-neuron golden`).

In: checkpoint folder and geometry. Out: a committed golden file. Its texts are chosen for a port with the default
buckets and `context`; `validate` compares whatever of them the port can reach.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gemma_neuron.chat import load_chat_assets
from gemma_neuron.errors import UsageError
from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.validation.context import follow_up
from gemma_neuron.validation.golden import Golden, GoldenIdentity, weight_digests
from gemma_neuron.validation.make import make_golden
from gemma_neuron.validation.prompts import Conversation, Reach, choose_prompts
from gemma_neuron.validation.questions import find_questions
from gemma_neuron.validation.verdict import scope

SUFFIX = ".safetensors"


def golden_of(
    folder: Path,
    geometry: ModelGeometry,
    checkpoint_digest: str,
    *,
    out: Path,
    dtype: str,
    questions: Path | None,
    reach: tuple[int, tuple[int, ...]],
    progress: Callable[[str], None],
) -> Golden:
    """Make and commit the golden `out` (`*.safetensors`). `reach`: context and buckets it is meant for."""
    if out.suffix != SUFFIX:
        raise UsageError(f"--out {out}: a golden is a {SUFFIX} file.", f"Use --out {out}{SUFFIX}.")
    assets = load_chat_assets(folder)
    template = assets.template
    talk = Conversation(assets=assets, template=template, scope=scope(template is not None, False))
    asked = find_questions(questions, (folder,))
    context, buckets = reach
    prompts = choose_prompts(
        talk,
        asked,
        Reach(window=geometry.window, max_context=context, buckets=buckets, vocab=geometry.vocab),
    )
    identity = GoldenIdentity(
        checkpoint_digest=checkpoint_digest,
        template_sha256=template.sha256 if template is not None else "",
        prompts_digest=prompts.digest,
        dtype=dtype,
        noise_dtype="bfloat16" if dtype == "float32" else None,
        files=weight_digests(folder),
    )
    by_name = dict(asked.for_scope(talk.scope))
    return make_golden(
        folder,
        prompts,
        identity,
        out,
        follow_up=lambda prompt, ids: follow_up(talk, by_name, prompt, ids),
        progress=progress,
    )
