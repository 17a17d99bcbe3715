"""Every element of every parameter lands on exactly the ranks the placement says, and nowhere else."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemma_neuron.errors import IndivisibleError
from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.models.registry import read_geometry, read_parameter_table
from gemma_neuron.plan import ShardPlan, Strategy
from gemma_neuron.sharding.memory import kv_bytes_total
from gemma_neuron.sharding.placement import nearest_degrees, obstacles, place
from gemma_neuron.sharding.planner import layout
from tests.sizes import size_config
from tests.tiny import gemma3_config, gemma4_config


def gemma_4_31b() -> ModelGeometry:
    return read_geometry(size_config("31B"))


def plan_of(geometry: ModelGeometry, tp: int, strategy: Strategy) -> ShardPlan:
    return place(geometry, read_parameter_table(geometry), tp, strategy)


@pytest.mark.parametrize(
    ("context", "total"),
    [(32768, 3_523_215_360), (131072, 11_576_279_040), (262144, 22_313_697_280)],
)
def test_31b_windowed_kv(context: int, total: int) -> None:
    assert kv_bytes_total(gemma_4_31b(), context, 1, "bfloat16") == total


def test_orig_08_global_layers_of_31b_at_tp_8() -> None:
    """orig-08-global-kv4-tp8: 4 KV heads on 8 ranks are replicated, 16 are split, tp 4 splits both."""
    plan = plan_of(gemma_4_31b(), 8, "replicate-kv")
    kinds = {(layer.kind, layer.placement, layer.kv_heads_per_rank) for layer in plan.layers}
    assert kinds == {("sliding", "sharded", 2), ("global", "replicate-kv", 1)}
    assert {layer.placement for layer in plan_of(gemma_4_31b(), 4, "replicate-kv").layers} == {
        "sharded"
    }


def test_31b_at_tp_12_names_heads_and_vocabulary() -> None:
    with pytest.raises(IndivisibleError) as refused:
        plan_of(gemma_4_31b(), 12, "replicate-kv")
    for number in ("32 query heads", "16 KV heads", "262,144 tokens"):
        assert number in refused.value.message
    assert refused.value.hint == "The nearest: --tp 8 or --tp 16."


def test_cfg_07_one_kv_head_is_one_on_every_rank() -> None:
    """cfg-07-zero-kv-heads."""
    geometry = read_geometry(gemma3_config(num_attention_heads=8, num_key_value_heads=1))
    plan = plan_of(geometry, 8, "replicate-kv")
    assert {layer.kv_heads_per_rank for layer in plan.layers} == {1}


@pytest.mark.parametrize("width", [0, 16])
def test_a_per_layer_table_hinders_only_where_there_is_one(width: int) -> None:
    """Its rows are a key of every Gemma 4 config, with a default, also where the model has no such table."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "num_global_key_value_heads": 3}
    sizes = {"intermediate_size": 96, "vocab_size": 768, "vocab_size_per_layer_input": 512}
    config = gemma4_config(2, **heads, **sizes, hidden_size_per_layer_input=width)
    found = obstacles(read_geometry(config), 3)
    said = "512 tokens (vocab_size_per_layer_input 512) do not divide by 3"
    assert found == ([said] if width else [])


@pytest.mark.fault("load-23-untied-after-merge")
def test_an_untied_head_is_split_beside_the_table() -> None:
    config = gemma4_config(6, tie_word_embeddings=False)
    geometry = read_geometry(config)
    plan = place(geometry, read_parameter_table(geometry), 4, "replicate-kv")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        parameter = plan.parameter(name)
        assert parameter.placement.kind == "rows"
        assert parameter.local_shape == (geometry.vocab // 4, geometry.hidden)


@pytest.mark.parametrize("tp", [2, 8])
def test_orig_19_no_rank_looks_up_in_a_whole_per_layer_table(tp: int) -> None:
    """orig-19-gather-silent-zero: E2B's is 4.7 GB, from which a device read zeros; each rank holds some rows."""
    geometry = read_geometry(size_config("E2B"))
    table = plan_of(geometry, tp, "replicate-kv").parameter("embed_tokens_per_layer.weight")
    assert 2 * prod(table.shape) == 4_697_620_480
    assert table.placement.kind == "rows"
    assert table.local_shape == (geometry.per_layer_vocab // tp, table.shape[1])


def test_auto_takes_fewer_bytes_and_says_why() -> None:
    geometry = gemma_4_31b()
    plan = layout(geometry, read_parameter_table(geometry), 8, "auto", "bfloat16")
    assert plan.strategy == "replicate-kv"
    assert "4 KV heads over 8 ranks" in plan.reasons[0]


@settings(max_examples=60, deadline=None)
@given(
    groups=st.integers(1, 3),
    kv=st.sampled_from([1, 2, 4, 8]),
    global_kv=st.sampled_from([1, 2, 4]),
    width=st.sampled_from([32, 40, 48, 64]),
    tp=st.integers(1, 16),
    strategy=st.sampled_from(["replicate-kv", "replicate-global"]),
)
def test_each_part_is_held_and_bytes_add_up(
    groups: int, kv: int, global_kv: int, width: int, tp: int, strategy: Strategy
) -> None:
    heads = kv * global_kv * groups
    geometry = read_geometry(
        gemma4_config(
            num_attention_heads=heads,
            num_key_value_heads=kv,
            num_global_key_value_heads=global_kv,
            intermediate_size=width,
        )
    )
    if obstacles(geometry, tp):
        near = nearest_degrees(geometry, tp)
        assert near and not any(obstacles(geometry, n) for n in near)
        return
    plan = plan_of(geometry, tp, strategy)
    for p in plan.parameters:
        parts = [p.placement.part_of_rank(rank, tp) for rank in range(tp)]
        assert set(parts) == set(range(p.placement.parts)), p.name
        if p.placement.kind not in ("whole", "rank"):
            assert prod(p.local_shape) * p.placement.parts == prod(p.shape), p.name
    for layer, planned in zip(geometry.layers, plan.layers, strict=True):
        query, own = planned.query_heads_per_rank, planned.kv_heads_per_rank
        assert query % own == 0
        if planned.placement == "replicate-kv":
            # the KV head a rank holds is the one its query heads ask
            for rank in range(tp):
                asked = {
                    h * layer.kv_heads // layer.query_heads
                    for h in range(rank * query, (rank + 1) * query)
                }
                assert asked == {rank * layer.kv_heads // tp}


def test_no_torch_for_a_plan(tmp_path: Path) -> None:
    """See tests/architecture for the commands; here the modules alone."""
    import subprocess
    import sys

    code = "import gemma_neuron.sharding.planner, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
