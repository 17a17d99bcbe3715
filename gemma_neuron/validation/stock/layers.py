"""Weights for stock modules: a decoder layer's for as long as it runs, table rows for the ids that are asked for.

A tensor that the file holds in the asked dtype is used where it is mapped; another is converted into memory, which
the next layer takes over. Experts are converted one at a time, inside the stock loop over them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gemma_neuron.validation.stock.skeleton import HEAD, LAYERS, Skeleton

TABLES = ("embed_tokens", "embed_tokens_per_layer")
Spare = list[Tensor]


class LayerWeights:
    """The decoder layers of a skeleton, one with weights at a time; all of them when `keep` is set."""

    def __init__(self, skeleton: Skeleton, dtype: torch.dtype, keep: bool) -> None:
        self.stored, self.dtype, self.keep = skeleton.stored, dtype, keep
        self.layers: list[nn.Module] = list(skeleton.model.model.layers)
        self._names = [_of_layer(skeleton.names, index) for index in range(len(self.layers))]
        self._filled: set[int] = set()
        if not keep:
            for layer, names in zip(self.layers, self._names, strict=True):
                self._stream_experts(layer, names)

    @property
    def bytes_per_token(self) -> int:
        """KV cache of a token over all layers, and what its widest MLP holds while it runs."""
        layers: list[Any] = list(self.layers)
        own = [layer.self_attn.k_proj for layer in layers if hasattr(layer.self_attn, "k_proj")]
        values: int = 2 * sum(projection.out_features for projection in own)
        width: int = max(layer.mlp.gate_proj.out_features for layer in layers)
        return self.dtype.itemsize * (values + 4 * width)

    @property
    def largest_bytes(self) -> int:
        """What the largest layer's own tensors take; experts are taken one at a time."""
        values = (
            sum(self.stored.view(name).numel() for name in names.values()) for names in self._names
        )
        return self.dtype.itemsize * max(values)

    def each(self) -> Iterator[nn.Module]:
        """The layers in order, each with its weights while it is the current one."""
        spare: Spare = []
        for index, layer in enumerate(self.layers):
            if index not in self._filled:
                spare = self._fill(layer, self._names[index], spare)
            if self.keep:
                self._filled.add(index)
            yield layer
            if not self.keep:
                layer.to_empty(device="meta")

    def _fill(self, layer: nn.Module, names: dict[str, str], spare: Spare) -> Spare:
        """Give a layer its tensors; what had to be converted, for the next layer to overwrite."""
        views = {own: self.stored.view(name) for own, name in names.items()}
        other = [view for view in views.values() if view.dtype != self.dtype]
        memory = _reused(spare, Counter(view.shape for view in other))
        used: Spare = []
        for own, view in views.items():
            if view.dtype != self.dtype:
                free = memory[view.shape]
                used.append(free.pop() if free else torch.empty(view.shape, dtype=self.dtype))
                views[own] = used[-1].copy_(view)
        layer.load_state_dict(views, strict=False, assign=True)
        held = [*layer.parameters(), *layer.buffers()]
        assert not any(tensor.is_meta for tensor in held), "a stock tensor without a value"
        return [] if self.keep else used

    def _stream_experts(self, layer: nn.Module, names: dict[str, str]) -> None:
        experts: Any = getattr(layer, "experts", None)
        for own, _ in list(experts.named_parameters()) if experts is not None else ():
            # Behind nn.Module's back: stock indexes the attribute by expert and asks nothing else of it.
            del experts._parameters[own]
            view = self.stored.view(names.pop(f"experts.{own}"))
            experts.__dict__[own] = _OneAtATime(view, self.dtype)


class _OneAtATime:
    """Stands for experts' weights [experts, …]: an item is converted when it is taken."""

    def __init__(self, view: Tensor, dtype: torch.dtype) -> None:
        self._view, self._dtype = view, dtype

    def __getitem__(self, expert: Tensor) -> Tensor:
        return self._view[int(expert)].to(self._dtype)


class TableRows(nn.Module):
    """A stock scaled embedding over the rows that one call asks for."""

    def __init__(self, stock: Any, table: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self._table, self._dtype = table, dtype
        self._rows = type(stock)(1, stock.embedding_dim, None, embed_scale=stock.scalar_embed_scale)

    def forward(self, ids: Tensor) -> Tensor:
        asked, place = ids.unique(return_inverse=True)
        rows = self._table[asked].to(self._dtype)
        self._rows.weight = nn.Parameter(rows, requires_grad=False)
        found: Tensor = self._rows(place)
        return found


def fill_rest(skeleton: Skeleton, dtype: torch.dtype) -> None:
    """Everything of the stock model that is no decoder layer: norms and projections whole, tables by rows."""
    text, names = skeleton.model.model, skeleton.names
    tables = {f"model.{name}.weight": name for name in TABLES}
    for own, name in tables.items():
        if own in names:
            rows = TableRows(getattr(text, name), skeleton.stored.view(names[own]), dtype)
            setattr(text, name, rows)
    small = {
        own: skeleton.stored.view(name).to(dtype)
        for own, name in names.items()
        if own not in tables and own != HEAD and not own.startswith(LAYERS)
    }
    skeleton.model.load_state_dict(small, strict=False, assign=True)
    text.rotary_emb = type(text.rotary_emb)(
        skeleton.model.config
    )  # derived values, not stored ones


def _of_layer(names: dict[str, str], index: int) -> dict[str, str]:
    prefix = f"{LAYERS}{index}."
    return {own.removeprefix(prefix): name for own, name in names.items() if own.startswith(prefix)}


def _reused(spare: Spare, needed: Counter[torch.Size]) -> dict[torch.Size, Spare]:
    """Spare tensors by shape, as many as are needed; the others are given up before anything is allocated."""
    kept: dict[torch.Size, Spare] = {shape: [] for shape in needed}
    while spare:
        tensor = spare.pop()
        if len(kept.get(tensor.shape, ())) < needed[tensor.shape]:
            kept[tensor.shape].append(tensor)
    return kept
