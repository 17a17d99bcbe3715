"""Tiny checkpoints of every family cut into rank files, and what may be done to them meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemma_neuron.pipeline import CompileRequest, PortResult, shard
from gemma_neuron.port import Port
from tests.tiny import layer_types, write_tiny_gemma3, write_tiny_gemma4

FAMILIES: dict[str, dict[str, Any]] = {
    "31B": {"num_attention_heads": 8},
    "gemma3": {"num_attention_heads": 8},
    "untied": {"num_attention_heads": 8, "tie_word_embeddings": False},
    "26B-A4B": {
        "num_attention_heads": 8,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "E2B": {
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 8,
        "layer_types": layer_types(10, 5),
        "num_kv_shared_layers": 5,
        "use_double_wide_mlp": True,
    },
}


def write_family(folder: Path, family: str, **more: Any) -> Path:
    """A tiny checkpoint of one family."""
    overrides = FAMILIES[family] | more
    if family == "gemma3":
        return write_tiny_gemma3(folder, **overrides)
    return write_tiny_gemma4(folder, layers=10 if family == "E2B" else 6, **overrides)


def cut(source: Path, out: Path, tp: int, progress: Any = None, **more: Any) -> PortResult:
    verify = more.pop("verify", False)
    request = CompileRequest(out=out, backend="", tp=tp, **more)
    return shard(str(source), request, progress, verify=verify)


def cut_port(source: Path, out: Path, tp: int, **more: Any) -> Port:
    cut(source, out, tp, **more)
    return Port(out)


class WhenRank:
    """Looks on, and does something as soon as the first byte of a rank is on its way."""

    def __init__(self, rank: int, act: Callable[[], object]) -> None:
        self.rank, self.act, self.done = rank, act, False

    def begin(self, label: str, total: int) -> None: ...

    def __call__(self, count: int, of: int | str) -> None:
        if of == self.rank and not self.done:
            self.done = True
            self.act()
