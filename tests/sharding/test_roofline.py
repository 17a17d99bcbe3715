"""Decode speed: the bound counts what a step must read and no more; the expectation is what published runs say."""

from __future__ import annotations

import statistics
from math import prod

import pytest

from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.instances import instance
from gemma_neuron.models.registry import read_geometry, read_parameter_table
from gemma_neuron.models.weights import PER_LAYER_TABLE, TABLE
from gemma_neuron.plan import ShardPlan
from gemma_neuron.sharding.memory import kv_bytes_per_rank, weight_bytes
from gemma_neuron.sharding.placement import place
from gemma_neuron.sharding.roofline import (
    basis,
    constants,
    decode_speed,
    published,
    step_bytes,
)
from scripts.check_roofline import (
    MEDIAN_BAR,
    fit,
    left_out,
    read_runs,
    same,
    speed_errors,
    spread,
)
from tests.sizes import size_config
from tests.tiny import gemma3_config


def laid_out(size: str, tp: int = 8) -> tuple[ModelGeometry, ShardPlan]:
    geometry = read_geometry(size_config(size))
    return geometry, place(geometry, read_parameter_table(geometry), tp, "replicate-kv")


def test_a_dense_step_reads_every_weight_and_every_slots_state() -> None:
    geometry, plan = laid_out("31B")
    for slots in (1, 4):
        read = step_bytes(geometry, plan, 32768, slots, "bfloat16")
        kv = kv_bytes_per_rank(geometry, plan, 32768, slots, "bfloat16")
        assert read.must == read.graph == weight_bytes(plan, "bfloat16") + kv


def test_a_longer_context_reads_more_and_only_in_global_layers() -> None:
    geometry, plan = laid_out("31B")
    short, long = (
        step_bytes(geometry, plan, n, 1, "bfloat16").must for n in (geometry.window, 32768)
    )
    assert long - short == 10 * 2 * 2 * 512 * (32768 - geometry.window)


def test_experts_count_as_routed_in_the_bound_and_whole_in_our_graph() -> None:
    geometry, plan = laid_out("26B-A4B")
    read = step_bytes(geometry, plan, 4096, 1, "bfloat16")
    experts = sum(2 * prod(p.local_shape) for p in plan.parameters if ".experts." in p.name)
    assert read.graph - read.must == experts * (128 - 8) // 128
    assert "All 128 experts" in basis(geometry)


def test_tables_are_read_by_the_row_unless_they_are_the_head() -> None:
    geometry, plan = laid_out("E2B", 2)
    per_layer = plan.parameter(PER_LAYER_TABLE)
    read = step_bytes(geometry, plan, 4096, 1, "bfloat16")
    whole = weight_bytes(plan, "bfloat16") + kv_bytes_per_rank(geometry, plan, 4096, 1, "bfloat16")
    assert whole - read.must == 2 * (prod(per_layer.local_shape) - per_layer.shape[1])
    # 20 layers read the state of their donors, which keep it once
    donors = {layer.kv_donor for layer in geometry.layers} - {None}
    assert len(donors) == 2
    assert read.graph - read.must == 2 * 2 * (16 * 512 * 256 + 4 * 4096 * 512)

    untied = read_geometry(gemma3_config(tie_word_embeddings=False))
    plan = place(untied, read_parameter_table(untied), 2, "replicate-kv")
    read = step_bytes(untied, plan, 64, 3, "bfloat16")
    kv = kv_bytes_per_rank(untied, plan, 64, 3, "bfloat16")
    table = plan.parameter(TABLE)
    rows = 2 * (prod(table.local_shape) - 3 * untied.hidden)
    assert read.must == weight_bytes(plan, "bfloat16") + kv - rows


def test_speed_of_slots_is_a_sequences_and_the_totals_are_named() -> None:
    geometry, plan = laid_out("31B")
    where = instance("inf2.24xlarge")
    one, four = (decode_speed(geometry, plan, where, 4096, n, "bfloat16") for n in (1, 4))
    assert four.bound < one.bound < 4 * four.bound
    assert one.low < one.expected < one.high <= one.bound
    shown = four.to_json()
    assert shown["total_bound"] == pytest.approx(4 * shown["bound"], abs=0.2)
    assert shown["total_expected"] == pytest.approx(4 * shown["expected"], abs=0.2)
    assert "No Inferentia2 run at tp 8 has been published" in basis(geometry)


def test_the_table_names_where_each_run_comes_from() -> None:
    table = published()
    assert len(table["runs"]) >= 8
    for run in table["runs"]:
        assert run["source"] and run["published"] and run["batch"] >= 1 and run["context"] >= 1
        assert run["tp"] <= instance(run["instance"]).cores
    gemma4 = [r for r in table["runs"] if r["model"].startswith("gemma-4")]
    assert len(gemma4) >= 8
    # What `basis` says: none of them is Inferentia2 at tp 8.
    assert not [r for r in gemma4 if r["tp"] == 8 and r["instance"].startswith("inf2")]
    assert all(row["reason"] for row in table["excluded"])


def test_bytes_in_the_table_are_those_of_the_shapes() -> None:
    for run in read_runs():
        assert run.facts["weight_bytes"] == run.weight_bytes, run.name
        assert run.facts["kv_bytes"] == run.kv_bytes, run.name
        assert run.facts["layers"] == run.layers, run.name


def test_the_stored_constants_are_the_fit_and_its_errors_are_within_the_bar() -> None:
    """Three constants; each run is predicted by a fit without any run of its model on its chip."""
    runs, stored = read_runs(), constants()
    assert len(stored.efficiency) + 1 <= 3
    whole = fit(runs, stored)
    predicted = left_out(runs, whole)
    assert same(whole, spread(runs, predicted), stored)
    errors = [abs(error) for error in speed_errors(runs, predicted)]
    assert statistics.median(errors) <= MEDIAN_BAR
    gemma = [e for run, e in zip(runs, errors, strict=True) if "gemma" in run.facts["model"]]
    assert statistics.median(gemma) <= MEDIAN_BAR
    within = [
        e for run, e in zip(runs, predicted, strict=True) if _within(e / run.seconds, stored.spread)
    ]
    assert len(within) >= 0.9 * len(runs)


def _within(ratio: float, factor: float) -> bool:
    return 1 / factor - 1e-3 <= ratio <= factor + 1e-3


def test_no_run_is_faster_than_its_bound() -> None:
    """A published rate above the bound would mean that bytes or bandwidth are counted wrongly."""
    for run in read_runs():
        assert run.seconds > run.bound_seconds, run.name
