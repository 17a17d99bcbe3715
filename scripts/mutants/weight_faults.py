"""Faults in the rank files: what a loader, a sharder or a copy can do to weights. Digests are taken afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from gemma_neuron.geometry import AttentionKind
from scripts.mutants.base import weights

if TYPE_CHECKING:
    from gemma_neuron.port import Port

Tensors = dict[str, Tensor]
VICTIM = 1
"""The rank that a fault of one rank strikes."""


def edit(
    port: Port, change: Callable[[Tensors, int], None], ranks: list[int] | None = None
) -> None:
    """Rewrite rank files; `change` gets a rank's tensors and its number."""
    for rank in range(port.plan.tp) if ranks is None else ranks:
        file = port.rank_file(rank)
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        tensors = load_file(file)
        change(tensors, rank)
        beside = file.with_suffix(".edited")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, beside, metadata)
        beside.replace(file)


def _scalars(port: Port, new: Callable[[Tensor], Tensor], only: int | None = None) -> None:
    def change(tensors: Tensors, _: int) -> None:
        for name in tensors:
            if name.endswith("layer_scalar") and only in (None, int(name.split(".")[1])):
                tensors[name] = new(tensors[name])

    edit(port, change)


@weights("layer_scalar dropped: all one", "gemma4")
def scalars_dropped(port: Port) -> None:
    _scalars(port, torch.ones_like)


@weights("layer_scalar dropped in one layer", "gemma4")
def one_scalar_dropped(port: Port) -> None:
    _scalars(port, torch.ones_like, only=5)


@weights("layer_scalar cast through eight bits", "gemma4")
def scalars_cast(port: Port) -> None:
    _scalars(port, lambda x: x.to(torch.float8_e5m2).to(x.dtype))


def _rope(port: Port, kind: AttentionKind, new: Callable[[Tensor, int], Tensor]) -> None:
    layer = port.geometry.layer_of_kind(kind)
    assert layer is not None
    name = f"rope.{kind}.inv_freq"

    def change(tensors: Tensors, _: int) -> None:
        tensors[name] = new(tensors[name], layer.head_dim)

    edit(port, change)


def _frequencies(theta: float, real: int, over: int, half: int) -> Tensor:
    turning = theta ** -(torch.arange(0, 2 * real, 2, dtype=torch.float32) / over)
    return torch.cat([turning, torch.zeros(half - real)])


@weights("sliding layers turn with the global theta")
def other_theta(port: Port) -> None:
    theta = port.geometry.rope["global"].theta
    _rope(port, "sliding", lambda x, d: _frequencies(theta, d // 2, d, d // 2))


@weights("global layers turn with the sliding theta")
def small_theta(port: Port) -> None:
    theta, part = port.geometry.rope["sliding"].theta, port.geometry.rope["global"].rotated_fraction
    _rope(port, "global", lambda x, d: _frequencies(theta, int(part * d // 2), d, d // 2))


@weights("partial rotary factor ignored", "gemma4")
def whole_rotary(port: Port) -> None:
    theta = port.geometry.rope["global"].theta
    _rope(port, "global", lambda x, d: _frequencies(theta, d // 2, d, d // 2))


@weights("partial rotary: denominator is the rotated width", "gemma4")
def wrong_denominator(port: Port) -> None:
    rope = port.geometry.rope["global"]
    _rope(
        port,
        "global",
        lambda x, d: _frequencies(
            rope.theta, int(rope.rotated_fraction * d // 2), int(rope.rotated_fraction * d), d // 2
        ),
    )


def _exchanged(port: Port, names: list[str]) -> None:
    first, second = (load_file(port.rank_file(rank)) for rank in (0, VICTIM))
    assert not any(torch.equal(first[name], second[name]) for name in names)

    def change(tensors: Tensors, rank: int) -> None:
        for name in names:
            tensors[name] = (second if rank == 0 else first)[name]

    edit(port, change, [0, VICTIM])


@weights("KV heads of two ranks exchanged in one layer", "gemma4")
def exchanged_heads(port: Port) -> None:
    _exchanged(port, ["layers.0.self_attn.k_proj.weight"])


@weights("query heads of two ranks exchanged in one layer")
def exchanged_queries(port: Port) -> None:
    _exchanged(port, ["layers.0.self_attn.q_proj.weight"])


@weights("one rank's file of an earlier checkpoint")
def stale_rank(port: Port) -> None:
    def change(tensors: Tensors, _: int) -> None:
        for name, x in tensors.items():
            if x.is_floating_point() and x.dim() == 2:
                wave = torch.cos(torch.arange(x.numel(), dtype=torch.float32) * 78.233)
                tensors[name] = (x * (1 + 0.1 * wave.view(x.shape))).to(x.dtype)

    edit(port, change, [VICTIM])


@weights("files of two ranks exchanged")
def exchanged_ranks(port: Port) -> None:
    first, second = (load_file(port.rank_file(rank)) for rank in (0, VICTIM))

    def change(tensors: Tensors, rank: int) -> None:
        tensors |= second if rank == 0 else first
        tensors["rank"] = torch.tensor([rank], dtype=torch.int32)

    edit(port, change, [0, VICTIM])


@weights("one rank's file zeroed")
def zeroed_rank(port: Port) -> None:
    def change(tensors: Tensors, _: int) -> None:
        for name, x in tensors.items():
            if x.is_floating_point():
                tensors[name] = torch.zeros_like(x)

    edit(port, change, [VICTIM])


@weights("two layers exchanged")
def exchanged_layers(port: Port) -> None:
    def change(tensors: Tensors, _: int) -> None:
        for name in list(tensors):
            if name.startswith("layers.1."):
                other = name.replace("layers.1.", "layers.2.", 1)
                tensors[name], tensors[other] = tensors[other], tensors[name]

    edit(port, change)


@weights("gate and up projection exchanged")
def exchanged_gate(port: Port) -> None:
    def change(tensors: Tensors, _: int) -> None:
        for name in list(tensors):
            if ".mlp.gate_proj" in name:
                other = name.replace("gate_proj", "up_proj")
                tensors[name], tensors[other] = tensors[other], tensors[name]

    edit(port, change)


@weights("q_norm weights all one")
def plain_query_norm(port: Port) -> None:
    def change(tensors: Tensors, _: int) -> None:
        for name in tensors:
            if name.endswith("q_norm.weight"):
                tensors[name] = torch.ones_like(tensors[name])

    edit(port, change)


@weights("o_proj read as its transpose's rows")
def transposed_output(port: Port) -> None:
    def change(tensors: Tensors, _: int) -> None:
        name = "layers.1.self_attn.o_proj.weight"
        x = tensors[name]
        tensors[name] = x.t().contiguous().view(x.shape)

    edit(port, change)


@weights("last rows of the table zeroed on one rank")
def short_table(port: Port) -> None:
    def change(tensors: Tensors, _: int) -> None:
        rows = tensors["embed_tokens.weight"]
        rows[rows.shape[0] // 2 :] = 0

    edit(port, change, [0])
