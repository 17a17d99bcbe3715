"""The released Gemma 4 sizes as `plan` sees them: anchors, counts, every instance, every degree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.backends.registry import backend
from gemma_neuron.errors import DoesNotFitError, PlanError
from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.instances import instance, instances
from gemma_neuron.models.registry import read_geometry, read_parameter_table
from gemma_neuron.models.sizes import size_geometry, size_of
from gemma_neuron.models.weights import PER_LAYER_TABLE, TABLE
from gemma_neuron.plan import Strategy
from gemma_neuron.sharding.candidates import Planned, PlanRequest, StrategyChoice
from gemma_neuron.sharding.memory import kv_bytes_per_rank, parameter_count
from gemma_neuron.sharding.placement import obstacles, place
from gemma_neuron.sharding.planner import make_plan
from tests.command import run
from tests.sizes import SIZES, size_config

PLENTY = 10**15


def geometry_of(size: str) -> ModelGeometry:
    return read_geometry(size_config(size))


def planned(
    size: str,
    tp: int = 8,
    where: str = "inf2.24xlarge",
    *,
    context: int = 4096,
    slots: int = 1,
    buckets: tuple[int, ...] = (128, 512),
    strategy: StrategyChoice = "auto",
    host: int = PLENTY,
) -> Planned:
    geometry = geometry_of(size)
    asked = PlanRequest(
        instance=instance(where),
        tp=tp,
        context=context,
        slots=slots,
        buckets=buckets,
        strategy=strategy,
        host_budget=host,
        host_origin="the test",
    )
    table = read_parameter_table(geometry)
    return make_plan(geometry, table, asked, backend("neuron").host_bytes)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(size_config("31B")), encoding="utf-8")
    return tmp_path


def test_31b_as_a_user_asks_for_it(config: Path) -> None:
    """The contract's fields with the anchors: weights, KV cache, totals, heads, idle cores."""
    command = ("plan", config, "--tp", "8", "--instance", "inf2.24xlarge", "--max-context", "32768")
    done = run(*command, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    by_name = {c["strategy"]: c for c in plan["candidates"]}
    for name, gigabytes, kv_gib in (
        ("replicate-global", 10.95, 2.60),
        ("replicate-kv", 7.70, 0.72),
    ):
        found = by_name[name]
        assert found["weight_bytes_per_rank"] / 1e9 == pytest.approx(gigabytes, rel=0.005)
        assert found["kv_bytes_per_rank"] / 2**30 == pytest.approx(kv_gib, abs=0.005)
        assert found["fits"] and found["reasons"]
        parts = ("weight", "kv", "scratch")
        assert found["total_bytes_per_rank"] == sum(found[f"{p}_bytes_per_rank"] for p in parts)
    assert plan["chosen"] == "replicate-kv"
    assert "auto takes replicate-kv" in plan["decision"]
    assert plan["parameters"] == 30_697_345_280
    assert plan["kv_bytes_total"] == 3_523_215_360
    assert plan["idle_cores"] == 4
    assert {"shard", "compile"} <= set(plan["host_peak_bytes"])
    kinds = {
        (
            x["kind"],
            x["placement"],
            x["query_heads_per_rank"],
            x["kv_heads_per_rank"],
            x["head_dim"],
        )
        for x in plan["layers"]
    }
    assert kinds == {("sliding", "sharded", 4, 2, 256), ("global", "replicate-kv", 4, 1, 512)}


def test_what_a_user_reads_fits_80_columns(config: Path) -> None:
    done = run("plan", config, "--tp", "8", "--max-context", "32k", "--slots", "4")
    assert done.returncode == 0, done.stderr
    assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= 80
    first = done.stdout.splitlines()[0]
    assert first.startswith("replicate-kv at tp 8 on inf2.24xlarge: ")
    for text in (
        "No Inferentia2 run at tp 8 has been published",
        "4 of 12 cores stay idle at tp 8",
        "all ranks at once in float32",
        "39 min for this model",
        "CPU host",
    ):
        assert text in " ".join(done.stdout.split()), text


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts_are_stock_transformers(size: str) -> None:
    """On the meta device: every parameter of stock's text model, the tied table once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    text: dict[str, Any] = size_config(size)["text_config"]
    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(AutoConfig.for_model(**text))
    geometry = geometry_of(size)
    plan = place(geometry, read_parameter_table(geometry), 1, "replicate-kv")
    assert parameter_count(plan) == sum(p.numel() for p in stock.parameters())


def test_sizes_are_found_by_their_shape() -> None:
    for size in SIZES:
        assert size_of(geometry_of(size)) == size
        assert size_geometry(size) == geometry_of(size)
    assert size_of(read_geometry(size_config("31B", 6))) is None


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("strategy", ["replicate-kv", "replicate-global"])
def test_tables_are_never_whole_on_a_rank(size: str, tp: int, strategy: Strategy) -> None:
    """A 4.7 GB gather has returned zeros on a device: per-layer tables are split over the vocabulary, too."""
    geometry = geometry_of(size)
    plan = place(geometry, read_parameter_table(geometry), tp, strategy)
    tables = [p for p in plan.parameters if p.name in (TABLE, PER_LAYER_TABLE)]
    assert len(tables) == (2 if size.startswith("E") else 1)
    for table in tables:
        assert table.local_shape == (262144 // tp, table.shape[1])


def test_every_size_on_every_instance_and_degree() -> None:
    """Each listed degree that the geometry allows is planned, or refused for bytes with a way out."""
    fits = 0
    for where in instances().values():
        for size in SIZES:
            for tp in where.tp_possible:
                if obstacles(geometry_of(size), tp):
                    continue
                try:
                    found = planned(size, tp, where.name)
                except DoesNotFitError as refused:
                    assert "bytes a core" in refused.message and refused.hint
                    continue
                fits += 1
                assert found.idle_cores == where.cores - tp
                assert 0 < found.chosen.speed.low <= found.chosen.speed.expected
                assert found.chosen.speed.expected <= found.chosen.speed.high
                assert found.chosen.speed.high <= found.chosen.speed.bound
                assert found.host.streamed < 2**30
    assert fits > 100


def test_31b_at_tp_16_with_4_kv_heads() -> None:
    found = planned("31B", 16, "inf2.48xlarge", context=32768)
    kinds = {(p.kind, p.placement, p.kv_heads_per_rank) for p in found.chosen.plan.layers}
    assert kinds == {("sliding", "sharded", 1), ("global", "replicate-kv", 1)}
    assert found.chosen.fits
    assert any("tp 16" in note for note in found.notes)


def test_31b_at_tp_12_says_what_is_wrong_and_what_works() -> None:
    with pytest.raises(PlanError) as refused:
        planned("31B", 12)
    assert refused.value.exit_code == 4
    for text in ("32 query heads", "16 KV heads", "262,144 tokens", "sliding layers (first: 0)"):
        assert text in refused.value.message
    assert refused.value.hint == (
        "The nearest: --tp 8 or --tp 16 on an instance with 16 cores or more."
    )


@pytest.mark.parametrize(
    ("size", "tp", "context", "hint"),
    [
        ("31B", 4, 32768, "--tp 8"),
        ("31B", 2, 4096, "--tp 8"),
        ("31B", 8, 262144, None),
        ("31B", 16, 4096, "--tp 8"),
        ("12B", 1, 4096, "--tp 2 or --tp 4"),
    ],
)
def test_what_does_not_fit_names_what_does(
    size: str, tp: int, context: int, hint: str | None
) -> None:
    if hint is None:
        assert planned(size, tp, context=context).chosen.fits
        return
    with pytest.raises(DoesNotFitError) as refused:
        planned(size, tp, context=context)
    assert hint in refused.value.hint
    named = [int(word) for word in refused.value.hint.replace(".", " ").split() if word.isdigit()]
    assert planned(size, named[0], context=context).chosen.fits


def test_a_context_that_is_named_fits() -> None:
    with pytest.raises(DoesNotFitError) as refused:
        planned("31B", 8, context=262144, slots=4, strategy="replicate-global")
    most = int(refused.value.hint.split("--max-context ")[1].split()[0].rstrip("."))
    assert planned("31B", 8, context=most, slots=4, strategy="replicate-global").chosen.fits


def test_auto_passes_over_what_does_not_fit() -> None:
    """At 64k the layers replicated whole need more than a core has; the other way fits."""
    found = planned("31B", 8, context=65536)
    by_name = {c.plan.strategy: c for c in found.candidates}
    assert not by_name["replicate-global"].fits
    assert "does not fit" in found.decision
    assert any("GB a core too much" in reason for reason in by_name["replicate-global"].reasons)
    with pytest.raises(DoesNotFitError):
        planned("31B", 8, context=65536, strategy="replicate-global")


def test_e2b_shares_states_with_its_donors() -> None:
    """15 of 35 layers keep K/V: 12 sliding of 512 positions, 3 global, one head on every rank."""
    geometry = geometry_of("E2B")
    plan = place(geometry, read_parameter_table(geometry), 2, "replicate-kv")
    expected = 2 * 2 * (12 * 512 * 256 + 3 * 8192 * 512)
    assert kv_bytes_per_rank(geometry, plan, 8192, 1, "bfloat16") == expected
