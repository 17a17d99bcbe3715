"""Random tiny configurations of each family, and what running one of them says.

Shared by the tests, which run the model code uncompiled, and `scripts/equality`, which compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from gemma_neuron.errors import IndivisibleError
from gemma_neuron.pipeline import CompileRequest, compile_port, open_port, runner_factory
from gemma_neuron.port import Port
from tests.eager import EagerRunner, eager_port
from tests.equality.compare import BAR, worst
from tests.families import GLOBAL, SLIDING, family_config, write_family
from tests.real_configs import text_of
from tests.stock import stock_logits

SEED = 20
BUCKET = 24
S, G = SLIDING, GLOBAL
KINDS = ([S, G], [S, S, G], [S, G, G], [G, S, G])
BORROWING = (([S, G, S, G], 2), ([S, G, S, S, G], 3), ([G, S, S, G], 2), ([S, S, G, G], 1))
"""Layer types, and how many of the last borrow K/V: of both kinds, several of one, one only."""
E_MODELS = ("E2B", "E4B")


@dataclass(frozen=True, slots=True)
class Case:
    """One draw: a family's config overrides, tp, strategy, and the lengths of texts and prompts."""

    family: str
    overrides: dict[str, Any]
    tp: int
    strategy: Any
    lengths: tuple[int, ...]
    prompts: tuple[int, ...]
    seed: int


@st.composite
def cases(draw: st.DrawFn, family: str) -> Case:
    kv = draw(st.sampled_from({"E2B": [1], "E4B": [2, 4]}.get(family, [1, 2, 4, 8])))
    heads = kv * draw(st.sampled_from([2, 4, 8] if family in E_MODELS else [1, 2, 3, 4]))
    window = draw(st.sampled_from([4, 7, 8, 16]))
    vocab = draw(st.sampled_from([512, 512, 512, 768]))
    kinds, borrowing = draw(
        st.sampled_from(BORROWING if family in E_MODELS else [(kinds, 0) for kinds in KINDS])
    )
    overrides: dict[str, Any] = {
        "layer_types": kinds,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "hidden_size": 8 * heads if family == "gemma3" else draw(st.sampled_from([32, 40, 64])),
        "intermediate_size": draw(st.sampled_from([32, 48, 64])),
        "sliding_window": window,
        "final_logit_softcapping": draw(st.sampled_from([None, 5.0, 30.0])),
        "tie_word_embeddings": draw(st.booleans()),
        "vocab_size": vocab,
    }
    if family == "gemma3":
        overrides["query_pre_attn_scalar"] = draw(st.sampled_from([16, 24, 64]))
    else:
        overrides["num_kv_shared_layers"] = borrowing
        overrides |= draw(of_gemma4(family, heads, vocab))
    # Three texts: a prompt longer than the window, one within it whose decoding crosses the edge, any other.
    lengths = tuple(draw(st.integers(2 * window + 2, 48)) for _ in range(3))
    first = draw(st.integers(window + 1, lengths[0] - 1))
    return Case(
        family=family,
        overrides=overrides,
        tp=draw(st.sampled_from([1, 2, 2, 4, 4, 4, 8, 8, 8, 3, 16])),
        strategy=draw(st.sampled_from(["auto", "replicate-kv", "replicate-global"])),
        lengths=lengths,
        prompts=(
            first - 1 if first == BUCKET else first,  # a bucket that is not filled
            draw(st.integers(1, window)),
            draw(st.integers(1, lengths[2] - 1)),
        ),
        seed=draw(st.integers(0, 999)),
    )


@st.composite
def of_gemma4(draw: st.DrawFn, family: str, heads: int, vocab: int) -> dict[str, Any]:
    """What only Gemma 4 has, and of it what only this family has."""
    found: dict[str, Any] = {
        "global_head_dim": draw(st.sampled_from([8, 16, 24])),
        "vocab_size_per_layer_input": vocab,
    }
    if family in E_MODELS:
        found["hidden_size_per_layer_input"] = draw(st.sampled_from([8, 16]))
        return found
    found["attention_k_eq_v"] = draw(st.sampled_from([True, True, False]))
    found["num_global_key_value_heads"] = (
        1 if family == "12B" else draw(st.sampled_from([k for k in (1, 2, 4) if heads % k == 0]))
    )
    if family == "26B-A4B":
        experts = draw(st.sampled_from([4, 8]))
        found |= {
            "num_experts": experts,
            "top_k_experts": draw(st.integers(1, experts)),
            "moe_intermediate_size": draw(st.sampled_from([16, 24, 32])),
        }
    return found


def draw_case(family: str, number: int) -> Case:
    """Case `number` of a family, always the same one, whatever others are drawn.

    A run of its own for each: within one run hypothesis varies what it drew before. The first example of a
    run is the simplest there is, so the second is taken.
    """
    found: list[Case] = []

    @seed(SEED + number)
    @settings(
        max_examples=2,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(family))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found[-1]


def divides(config: dict[str, Any], tp: int) -> bool:
    """Whether `tp` can be, by the plan's rule said once more: from config.json, not by the planner's code."""
    text = text_of(config)
    heads = text["num_attention_heads"]
    kv_heads = {text["num_key_value_heads"]}
    if text.get("attention_k_eq_v"):
        kv_heads |= {text["num_global_key_value_heads"]}
    whole = heads % tp != 0 and tp % heads == 0  # attention on every rank
    shared = heads % tp == 0 and all(tp % kv == 0 or kv % tp == 0 for kv in kv_heads)
    cut = [text["vocab_size"], text["intermediate_size"]]
    if text.get("enable_moe_block"):
        cut.append(text["moe_intermediate_size"])
    return (whole or shared) and all(width % tp == 0 for width in cut)


def run_case(case: Case, folder: Path, make: Callable[..., Port]) -> dict[str, Any]:
    """Run prefill, decode and scoring of a case's port, compare with stock; `outcome`: equal, refused or wrong.

    `make`: `compiled_port` or `eager_port`.
    """
    facts = {"tp": case.tp, "strategy": case.strategy, "overrides": case.overrides}
    valid = divides(family_config(case.family, **case.overrides), case.tp)
    source = write_family(folder / "source", case.family, seed=case.seed, **case.overrides)
    try:
        port = make(source, folder / "port", tp=case.tp, strategy=case.strategy)
    except IndivisibleError as error:
        return {"outcome": "wrong" if valid else "refused", "why": error.message, **facts}
    rng = np.random.default_rng(case.seed)
    texts = [rng.integers(5, port.geometry.vocab, n).tolist() for n in case.lengths]
    runner = EagerRunner(port) if make is eager_port else runner_factory(port)()
    found = worst(runner, texts, stock_logits(source, texts), case.prompts)
    runner.close()
    return {
        "outcome": "equal" if max(found.values()) < BAR and valid else "wrong",
        "worst": max(found.values()),
        "phases": found,
        "placements": sorted({layer.placement for layer in port.plan.layers}),
        **facts,
    }


def compiled_port(source: Path, out: Path, *, tp: int, strategy: Any = "auto") -> Port:
    """Ported and compiled in float32, as `gemma-neuron compile` does it, with one prompt bucket."""
    request = CompileRequest(
        out=out,
        backend="cpu",
        tp=tp,
        strategy=strategy,
        dtype="float32",
        max_context=64,
        slots=3,
        buckets=(BUCKET,),
    )
    compile_port(str(source), request, None, lambda _: None)
    return open_port(out)
