"""Faults reported in public against other stacks, by our list's id: attention, rotary embedding, experts, tables.

Each is driven where it would arise, on one module with random weights; that whole models equal stock is
tests/equality's matter.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gemma_neuron.backends.base import CompileSpec
from gemma_neuron.backends.cpu.kernels import CpuKernels
from gemma_neuron.collectives import Alone
from gemma_neuron.geometry import AttentionKind, ExpertGeometry, LayerGeometry
from gemma_neuron.models.blocks import (
    Attention,
    Step,
    VocabParallelEmbedding,
    held_position,
    normalised,
    rounded,
)
from gemma_neuron.models.gemma4.experts import Experts, Router
from gemma_neuron.models.registry import read_geometry, read_parameter_table
from gemma_neuron.models.rotary import inverse_frequencies, rotary_tables, rotate
from gemma_neuron.models.view import RankLayer, rank_view, state_length
from gemma_neuron.sharding.planner import layout
from tests.real_configs import real_config, stock_model

HIDDEN, HEAD_DIM = 32, 16
SPEC = CompileSpec(backend="cpu", dtype="float32", slots=1, max_context=64, buckets=(64,))


def attention(kind: AttentionKind = "sliding", *, window: int = 8, rows: int = 8) -> Attention:
    """One layer's attention, random weights, KV state of `rows` rows."""
    torch.manual_seed(0)
    geometry = LayerGeometry(
        index=0, kind=kind, head_dim=HEAD_DIM, query_heads=4, kv_heads=2, value_is_key=False, intermediate=1
    )  # fmt: skip
    layer = RankLayer(
        geometry=geometry, query_heads=4, kv_heads=2, replicated=False, intermediate=1, state_length=rows
    )  # fmt: skip
    module = Attention(
        HIDDEN, layer, window=window, scale=1.0, norm_eps=1e-6, norm_offset=0.0, value_norm=True,
        collectives=Alone(), kernels=CpuKernels(),
    )  # fmt: skip
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def run(module: Attention, x: Tensor, chunks: list[int]) -> Tensor:
    """Outputs [1, L, E] of x [1, L, E], taken in chunks of these lengths; a chunk of 1 is a decode step."""
    rows = module.layer.state_length
    states = {
        name: torch.full((1, 2, rows, HEAD_DIM), 7.0) for name in ("state.0.key", "state.0.value")
    }
    inverse = 1.0 / (1e4 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    outputs, start = [], 0
    for length in chunks:
        positions = torch.arange(start, start + length, dtype=torch.int32)[None]
        tables = rotary_tables(positions, inverse, torch.float32)
        step = Step(
            positions, torch.tensor([0]), torch.tensor([length]), {"sliding": tables, "global": tables}
        )  # fmt: skip
        output, states = module(x[:, start : start + length], step, states, {})
        outputs.append(output)
        start += length
    return torch.cat(outputs, 1)


def seen_by(module: Attention, chunks: list[int], position: int) -> list[int]:
    """Which positions' inputs change the output at `position`."""
    torch.manual_seed(1)
    x = torch.randn(1, sum(chunks), HIDDEN)
    before = run(module, x, chunks)[0, position]
    found = []
    for other in range(sum(chunks)):
        changed = x.clone()
        changed[0, other] += 1.0
        if not torch.equal(run(module, changed, chunks)[0, position], before):
            found.append(other)
    return found


WAYS = {
    "token by token": [1] * 21,
    "prefill, then decode": [20, 1],
    "a chunk longer than the window": [21],
    "chunks across the window": [7, 7, 7],
    "chunks and decode": [13, 1, 1, 5, 1],
}


@pytest.mark.fault("nxdi-02-swa-decode-mask")
@pytest.mark.fault("attn-07-prefill-gt-window")
@pytest.mark.parametrize("way", WAYS)
def test_a_sliding_layer_sees_the_newest_window_and_nothing_older(way: str) -> None:
    assert seen_by(attention(window=8), WAYS[way], 20) == [*range(13, 21)]


@pytest.mark.fault("attn-05-window-off-by-one")
@pytest.mark.parametrize("chunks", [[11], [10, 1], [1] * 11])
def test_the_window_counts_the_current_token(chunks: list[int]) -> None:
    assert seen_by(attention(window=4, rows=4), chunks, 10) == [7, 8, 9, 10]


@pytest.mark.fault("attn-08-mlx-window")
@pytest.mark.parametrize("position", [7, 8, 9, 16])
def test_masks_stay_aligned_around_the_window(position: int) -> None:
    chunks = [position, 1]
    want = [*range(max(0, position - 7), position + 1)]
    assert seen_by(attention(window=8), chunks, position) == want
    everything = [*range(position + 1)]
    assert seen_by(attention("global", rows=32), chunks, position) == everything


@pytest.mark.fault("orig-15-swa-position-modulo")
def test_a_ring_is_as_long_as_its_cache_not_as_the_window() -> None:
    geometry = read_geometry(real_config("gemma-4-31B"))
    rows = state_length(geometry, geometry.layers[0], max_context=256)
    assert rows == 256
    held = held_position(torch.tensor([[300]]), torch.arange(rows)[None], rows)
    assert held[0, 44] == 300
    assert int(held.max()) == 300 and int(held.min()) == 300 - rows + 1
    assert seen_by(attention(window=8, rows=5), [4, 1], 4) == [0, 1, 2, 3, 4]


@pytest.mark.fault("nxdi-07-window-bucket-gather")
def test_a_context_shorter_than_the_window_is_planned_with_short_rings() -> None:
    geometry = read_geometry(real_config("gemma-4-31B"))
    plan = layout(geometry, read_parameter_table(geometry), 8, "auto", "bfloat16")
    view = rank_view(geometry, plan, replace(SPEC, max_context=256))
    assert {shape[2] for shape in view.state_shapes().values()} == {256}
    view = rank_view(geometry, plan, replace(SPEC, max_context=4096))
    assert {shape[2] for shape in view.state_shapes().values()} == {1024, 4096}


@pytest.mark.fault("load-09-ple-plain-attr")
def test_layers_that_borrow_kv_have_no_cache_to_overwrite() -> None:
    geometry = read_geometry(real_config("gemma-4-E2B"))
    plan = layout(geometry, read_parameter_table(geometry), 1, "auto", "bfloat16")
    states = rank_view(geometry, plan, SPEC).state_shapes()
    assert {int(name.split(".")[1]) for name in states} == set(range(15))
    assert "embed_tokens_per_layer.weight" in {p.name for p in plan.parameters}


@pytest.mark.fault("nxdi-08-pad-position-ids")
@pytest.mark.parametrize("pad_positions", ["running on", "zero"])
def test_padding_changes_nothing(pad_positions: str) -> None:
    """Columns past `lengths` hold anything at any position: output and state are those of 5 tokens."""
    module = attention(window=8)
    torch.manual_seed(2)
    x = torch.randn(1, 16, HIDDEN)
    x[0, 5:] = 1e3
    positions = torch.arange(16, dtype=torch.int32)[None]
    if pad_positions == "zero":
        positions[0, 5:] = 0
    states = {name: torch.zeros(1, 2, 8, HEAD_DIM) for name in ("state.0.key", "state.0.value")}

    def through(columns: int) -> tuple[Tensor, dict[str, Tensor]]:
        tables = rotary_tables(positions[:, :columns], torch.ones(HEAD_DIM // 2), torch.float32)
        step = Step(
            positions[:, :columns], torch.tensor([0]), torch.tensor([5]), {"sliding": tables}
        )
        output, new = module(x[:, :columns], step, states, {})
        return output[:, :5], new

    padded, exact = through(16), through(5)
    assert torch.allclose(padded[0], exact[0], atol=1e-6)
    assert all(torch.allclose(padded[1][name], exact[1][name]) for name in states)


def step_of(positions: Tensor, slots: list[int], lengths: list[int]) -> Step:
    tables = rotary_tables(positions, torch.ones(HEAD_DIM // 2), torch.float32)
    return Step(positions, torch.tensor(slots), torch.tensor(lengths), {"sliding": tables})


@pytest.mark.fault("orig-16-ring-attends-padding")
@pytest.mark.parametrize("length", [3, 5, 15, 16])
def test_decode_after_a_part_filled_bucket(length: int) -> None:
    """Prompts of a bucket of 16, then tokens one by one: equal to the same prompt without padding."""
    module = attention(window=8)
    torch.manual_seed(6)
    x = torch.randn(1, 24, HIDDEN)
    want = run(module, x, [length, 1, 1, 1, 1])
    states = {name: torch.zeros(1, 2, 8, HEAD_DIM) for name in ("state.0.key", "state.0.value")}
    prompt = torch.cat([x[:, :length], torch.full((1, 16 - length, HIDDEN), 50.0)], 1)
    inverse = 1.0 / (1e4 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    got, start = [], 0
    for piece in (prompt, *(x[:, i : i + 1] for i in range(length, length + 4))):
        positions = torch.arange(start, start + piece.shape[1], dtype=torch.int32)[None]
        real = length if start == 0 else 1
        tables = rotary_tables(positions, inverse, torch.float32)
        step = Step(positions, torch.tensor([0]), torch.tensor([real]), {"sliding": tables})
        output, states = module(piece, step, states, {})
        got.append(output[:, :real])
        start += real
    assert torch.allclose(torch.cat(got, 1), want, atol=1e-5)


@pytest.mark.fault("attn-17-padding-side")
@pytest.mark.fault("attn-18-bridge-pad")
def test_rows_of_a_batch_are_what_each_is_alone() -> None:
    """Lengths 3 and 9 in one batch, prefill (padded on the right) and a decode step at their own positions."""
    module = attention(window=8)
    torch.manual_seed(7)
    x, lengths = torch.randn(2, 10, HIDDEN), [3, 9]
    fresh = {name: torch.zeros(2, 2, 8, HEAD_DIM) for name in ("state.0.key", "state.0.value")}
    positions = torch.arange(9, dtype=torch.int32).expand(2, 9)
    together, states = module(x[:, :9], step_of(positions, [0, 1], lengths), fresh, {})
    ends = torch.tensor([[3], [9]], dtype=torch.int32)
    token = torch.stack([x[row, n : n + 1] for row, n in enumerate(lengths)])
    decoded, _ = module(token, step_of(ends, [0, 1], [1, 1]), states, {})
    for row, n in enumerate(lengths):
        alone, own = module(x[row : row + 1, :n], step_of(positions[:1, :n], [row], [n]), fresh, {})
        assert torch.allclose(together[row, :n], alone[0], atol=1e-5)
        # A decode step always has a row a slot; the other one is inactive.
        active = [int(other == row) for other in (0, 1)]
        last, _ = module(token, step_of(ends, [0, 1], active), own, {})
        assert torch.allclose(decoded[row], last[row], atol=1e-5)


@pytest.mark.fault("nxdi-05-scaling-one")
def test_the_scale_is_one_and_only_q_norm_can_change_it() -> None:
    module, x = attention("global", rows=16), torch.randn(1, 9, HIDDEN)
    before = run(module, x, [9])
    module.q_proj.weight.data *= 4.0
    assert torch.allclose(run(module, x, [9]), before, atol=1e-5)
    module.q_norm.weight.data *= math.sqrt(HEAD_DIM)
    module.scale = HEAD_DIM**-0.5
    assert torch.allclose(run(module, x, [9]), before, atol=1e-5)
    module.scale = 1.0
    assert not torch.allclose(run(module, x, [9]), before, atol=1e-2)
    assert read_geometry(real_config("gemma-4-31B")).attention_scale == 1.0


@pytest.mark.fault("attn-12-bf16-qk-overflow")
def test_the_softmax_is_in_float32() -> None:
    """Scores over 100 with neighbours a fraction apart: in bfloat16 they round to one another."""
    torch.manual_seed(3)
    query, key = torch.randn(2, 1, 4, 12, 64).bfloat16()
    query[..., 0], key[..., 0] = 12.0, 10.0
    value = torch.randn(1, 4, 12, 64).bfloat16()
    visible = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    got = CpuKernels().attention(query, key, value, visible, 1.0).double()
    exact = torch.softmax(query.double() @ key.double().mT, -1) @ value.double()
    narrow = torch.softmax(query @ key.mT, -1) @ value
    error, narrow_error = ((found.double() - exact).abs().max() for found in (got, narrow))
    assert error < 0.02
    assert narrow_error > 5 * error


@pytest.mark.fault("attn-02-rope-pairing")
def test_dimension_i_turns_with_i_plus_half() -> None:
    frequencies = inverse_frequencies(read_geometry(real_config("gemma-4-31B")).rope["global"], 512)
    tables = rotary_tables(torch.tensor([[3]]), frequencies, torch.float32)
    one_hot = torch.zeros(1, 1, 1, 512)
    one_hot[..., 0] = 1.0
    turned = rotate(one_hot, tables)[0, 0, 0]
    assert turned.nonzero().flatten().tolist() == [0, 256]
    assert turned[256] == pytest.approx(math.sin(3.0))


@pytest.mark.fault("nxdi-01-proportional-rope")
@pytest.mark.fault("attn-03-rope-wrong-fix")
def test_global_angles_of_the_31b_are_stocks() -> None:
    """A public "fix" narrows the rotary width; stock transformers is the arbiter."""
    frequencies = inverse_frequencies(read_geometry(real_config("gemma-4-31B")).rope["global"], 512)
    assert len(frequencies) == 256
    assert frequencies[0] == 1.0
    assert frequencies[1] == pytest.approx(1e6 ** (-2 / 512))
    assert int((frequencies[:64] > 0).sum()) == 64 and not frequencies[64:].any()
    text = stock_model("gemma-4-31B").model.language_model
    rotary = type(text.rotary_emb)(text.config)
    positions = torch.tensor([[0, 1, 511, 4096, 100_000]])
    theirs = rotary(torch.zeros(1), positions, layer_type="full_attention")
    ours = rotary_tables(positions, frequencies, torch.float32)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine[:, 0], other)


def stock_router(dtype: torch.dtype) -> tuple[Any, Router]:
    """Stock's router of four experts and ours with the same weights, far from their initial values."""
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter

    torch.manual_seed(4)
    config = Gemma4TextConfig(
        hidden_size=HIDDEN, num_experts=4, top_k_experts=2, moe_intermediate_size=8, num_hidden_layers=6
    )  # fmt: skip
    theirs = Gemma4TextRouter(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.5)
    ours = Router(HIDDEN, ExpertGeometry(experts=4, top_k=2, intermediate=8), 1e-6)
    ours.load_state_dict(theirs.state_dict())
    return theirs.to(dtype), ours.to(dtype)


@pytest.mark.fault("nxdi-15-moe-router")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_router_chooses_stocks_experts(dtype: torch.dtype) -> None:
    theirs, ours = stock_router(dtype)
    x = (3.0 * torch.randn(100, HIDDEN)).to(dtype)
    _, weights, chosen = theirs(x)
    dense = ours(x[None])[0]
    assert torch.equal(dense.nonzero()[:, 1].reshape(100, 2), chosen.sort(-1).values)
    assert torch.allclose(dense.gather(1, chosen).float(), weights.float(), rtol=1e-2)


@pytest.mark.fault("attn-16-moe-accum")
def test_experts_sum_wide() -> None:
    """Large activations of changing sign, where a narrow accumulator loses what is left over."""
    torch.manual_seed(5)
    experts = Experts(HIDDEN, 4, 512, Alone())
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    experts.bfloat16()
    x = (60.0 * torch.randn(1, 7, HIDDEN)).bfloat16()
    weights = torch.rand(1, 7, 4)
    got = experts(x, weights).double()
    exact = Experts(HIDDEN, 4, 512, Alone())
    exact.load_state_dict(experts.state_dict())
    want = exact.double()(x.double(), weights.double())
    assert bool(torch.isfinite(got).all())
    assert float((got - want).abs().max() / want.abs().max()) < 2**-6


@pytest.mark.fault("orig-12-unscaled-host-embedding")
@pytest.mark.fault("load-16-tied-embed-scale")
def test_only_the_look_up_is_scaled() -> None:
    geometry = read_geometry(real_config("gemma-4-31B"))
    assert geometry.embed_scale == pytest.approx(73.32, abs=0.01)
    assert rounded(geometry.embed_scale, torch.bfloat16) == 73.5
    assert rounded(math.sqrt(1536), torch.bfloat16) == 39.25
    table = VocabParallelEmbedding(10, 4, Alone())
    torch.nn.init.normal_(table.weight)
    found = table(torch.tensor([[3]]), torch.tensor([0]))
    assert torch.equal(found[0, 0], table.weight[3])


@pytest.mark.fault("orig-11-baked-rank-scatter")
def test_a_rank_is_data_of_the_graph_not_part_of_it() -> None:
    """The graph exported on rank 0 finds rank 1's rows when it is told so."""
    table = VocabParallelEmbedding(4, 3, Alone())
    torch.nn.init.normal_(table.weight)
    tokens = torch.tensor([[1, 6]])
    exported = torch.export.export(table, (tokens, torch.tensor([0]))).module()
    for rank, at in ((0, 0), (1, 1)):
        found = exported(tokens, torch.tensor([rank]))[0]
        assert torch.equal(found[at], table.weight[tokens[0, at] - 4 * rank])
        assert not found[1 - at].any()


@pytest.mark.fault("nxdi-06-k-eq-v")
def test_v_is_the_raw_k_projection_then_normed_without_a_weight() -> None:
    module = attention("global", rows=16)
    module.v_proj = None
    x = torch.randn(1, 1, HIDDEN)
    output = run(module, x, [1])  # one token attends to itself alone: the output is its V
    raw = module.k_proj(x).unflatten(-1, (2, HEAD_DIM))
    value = normalised(raw, 1e-6).repeat_interleave(2, dim=2).flatten(2)
    assert torch.allclose(output, module.o_proj(value), atol=1e-5)
    assert not np.allclose(normalised(raw, 1e-6).detach(), raw.detach(), atol=1e-2)
