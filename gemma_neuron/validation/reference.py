"""The independent reference: stock transformers on cpu, never this project's model code.

In: a checkpoint folder. Out: logits of texts, greedy continuations, hidden states. Stock's own forward prepares
masks, rotary tables and embeddings; its decoder layers then run one after another, each over everything that is
asked in one pass, so that a pass reads every layer once. Small models keep their layers in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from gemma_neuron.errors import DoesNotFitError
from gemma_neuron.machine import free_memory
from gemma_neuron.validation.stock.layers import LayerWeights, fill_rest
from gemma_neuron.validation.stock.skeleton import IMPLEMENTATION, Skeleton, open_skeleton

if TYPE_CHECKING:
    from numpy.typing import NDArray

POSITIONS = 128
"""Of one vocabulary product: 128 rows of 262,144 float32 logits are 128 MiB."""
TABLE_ROWS = 8192
"""Of the table in one product: 168 MiB in float32 at the 31B's width of 5376."""
RESIDENT_SHARE = 0.5
"""Of the allowed memory that weights may take and stay; the rest is activations, KV cache and logits."""
LEAST_MEMORY = 1 << 30
"""What a streamed generation may always use for its KV cache, however little is free."""
SCORES_AT_ONCE, FLOAT32_BYTES = 3, 4
"""Stock's eager attention holds its scores, the masked ones and their softmax, which is float32."""
SMALL_WORK = 2_000_000_000
"""Parameters times rows of a step that one thread does sooner than two."""

Progress = Callable[[str], None]
Slices = Iterator[tuple[int, "NDArray[np.float32]"]]
"""(start, float32 logits [n, vocab]) of one text, positions from 0."""
_Given = tuple[tuple[Any, ...], dict[str, Any]]


class Continuation(Protocol):
    """A prompt to go on with for `limit` tokens, or until one of `stop_ids`."""

    @property
    def ids(self) -> tuple[int, ...]: ...
    @property
    def limit(self) -> int: ...
    @property
    def stop_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Step:
    """One greedy step: the likeliest tokens [k] and their float32 logits [k], best first."""

    top_ids: NDArray[np.int32]
    top_values: NDArray[np.float32]

    @property
    def token(self) -> int:
        return int(self.top_ids[0])


@dataclass(slots=True)
class _Call:
    """One stock forward between its layers: hidden state [B, L, E], and what stock gives each layer beside it."""

    hidden: Tensor
    given: list[_Given]


class _Recorder(nn.Module):
    """In a decoder layer's place while stock prepares a forward: notes its arguments and changes nothing."""

    def __init__(self, notes: list[tuple[Tensor, _Given]]) -> None:
        super().__init__()
        self._notes = notes

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._notes.append((hidden, (args, kwargs)))
        return hidden


class Reference:
    """Stock Gemma at float32 or bfloat16. `memory`: bytes it may use; None: what is free now."""

    def __init__(self, folder: Path, dtype: str, memory: int | None = None) -> None:
        import transformers

        self._dtype: torch.dtype = getattr(torch, dtype)
        skeleton = open_skeleton(folder)
        self._memory = free_memory() if memory is None else memory
        self._parameters = _stored_values(skeleton)
        self.resident = self._parameters * self._dtype.itemsize < RESIDENT_SHARE * self._memory
        self._layers = LayerWeights(skeleton, self._dtype, keep=self.resident)
        fill_rest(skeleton, self._dtype)
        self._notes: list[tuple[Tensor, _Given]] = []
        self._stock = skeleton.model.model
        self._stock.layers = nn.ModuleList(_Recorder(self._notes) for _ in self._layers.layers)
        self._config = skeleton.model.config
        table = skeleton.stored.view(skeleton.names[skeleton.head])
        self._table = table.to(self._dtype) if self.resident else table
        self.vocab = int(self._config.vocab_size)
        self.producer = {
            "producer": f"transformers {transformers.__version__}",
            "torch": torch.__version__,
            "class": type(skeleton.model).__name__,
            "attention": IMPLEMENTATION,
            "experts": IMPLEMENTATION,
            "dtype": dtype,
            "device": "cpu",
            "layers_in_memory": "all" if self.resident else "one",
        }

    def require_room(self, memory: int) -> None:
        """Raise DoesNotFitError when so many bytes do not hold a layer and what always comes beside it."""
        least = self._layers.largest_bytes + LEAST_MEMORY
        if memory < least:
            raise DoesNotFitError(
                f"The reference takes {least:,} bytes at least, one layer's weights and {LEAST_MEMORY:,} for what it "
                f"computes; --host-memory allows {memory:,}.",
                f"--host-memory {math.ceil(least / 10**9)}GB",
            )

    def read(
        self, texts: Sequence[Sequence[int]], progress: Progress = lambda _: None
    ) -> Iterator[Slices]:
        """Run texts teacher-forced in one pass; each text's logits in slices, to be taken in order."""
        calls = [self._prepare(torch.tensor([list(ids)]), use_cache=False) for ids in texts]
        for layer in self._run(calls):
            progress(f"{len(texts)} texts, layer {layer + 1} of {len(self._layers.layers)}")
        while calls:
            yield self._slices(calls.pop(0).hidden[0])

    def hidden_states(self, ids: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Each decoder layer's output over one text, float32 [n, E], in the layers' order."""
        call = self._prepare(torch.tensor([list(ids)]), use_cache=False)
        for _ in self._run([call], norm=False):
            yield call.hidden[0].float().numpy().copy()

    def greedy(
        self, prompts: Sequence[Continuation], keep: int, progress: Progress = lambda _: None
    ) -> list[list[Step]]:
        """Greedy steps of every prompt, `keep` likeliest tokens of each; a stop id is a prompt's last."""
        found: list[list[Step]] = [[] for _ in prompts]
        groups = self._groups(prompts)
        for number, group in enumerate(groups, 1):
            here = f"group {number} of {len(groups)}, " if len(groups) > 1 else ""
            self._together(
                [prompts[index] for index in group],
                [found[index] for index in group],
                keep,
                partial(_prefixed, progress, here),
            )
        return found

    def _together(
        self,
        prompts: list[Continuation],
        found: list[list[Step]],
        keep: int,
        progress: Progress,
    ) -> None:
        """Steps of a group in one batch, left-padded as stock's own generation pads."""
        from transformers import DynamicCache

        tokens, mask = _left_padded([prompt.ids for prompt in prompts])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache, live = DynamicCache(config=self._config), list(range(len(prompts)))
        count = 0
        while live:
            count += 1
            with self._threads_for(tokens.numel()):
                call = self._prepare(
                    tokens, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True
                )
                for layer in self._run([call]):
                    progress(f"{len(live)} prompts, token {count}, layer {layer + 1}")
                logits = self._logits(call.hidden[:, -1])
            for index, step in zip(live, _steps(logits, keep), strict=True):
                found[index].append(step)
            rows = [row for row, i in enumerate(live) if _goes_on(prompts[i], found[i])]
            if len(rows) < len(live):
                live = [live[row] for row in rows]
                if live:
                    cache.batch_select_indices(torch.tensor(rows))
                mask, positions = mask[rows], positions[rows]
            tokens = torch.tensor([[found[index][-1].token] for index in live])
            mask = torch.cat([mask, mask.new_ones(len(live), 1)], dim=1)
            positions = positions[:, -1:] + 1

    def _prepare(self, tokens: Tensor, **arguments: Any) -> _Call:
        """Stock's forward up to its first layer; the last norm it ends with is run for nothing here."""
        self._notes.clear()
        self._stock(input_ids=tokens, **arguments)
        return _Call(self._notes[0][0], [given for _, given in self._notes])

    def _run(self, calls: list[_Call], norm: bool = True) -> Iterator[int]:
        """Every layer over every call, then stock's last norm; yields a layer's number when it is done."""
        for index, layer in enumerate(self._layers.each()):
            for call in calls:
                args, kwargs = call.given[index]
                call.hidden = layer(call.hidden, *args, **kwargs)
                call.given[index] = ((), {})
            yield index
        for call in calls if norm else ():
            call.hidden = self._stock.norm(call.hidden)

    def _slices(self, hidden: Tensor) -> Slices:
        for start in range(0, len(hidden), POSITIONS):
            yield start, self._logits(hidden[start : start + POSITIONS]).numpy()

    def _logits(self, hidden: Tensor) -> Tensor:
        """[n, E] → float32 [n, vocab]: the table in slices, then the soft-cap as stock has it, in its dtype."""
        rows = torch.empty(len(hidden), self.vocab, dtype=self._dtype)
        for start in range(0, self.vocab, TABLE_ROWS):
            part = self._table[start : start + TABLE_ROWS].to(self._dtype)
            rows[:, start : start + TABLE_ROWS] = nn.functional.linear(hidden, part)
        cap = self._config.final_logit_softcapping
        if cap is not None:
            rows.div_(cap).tanh_().mul_(cap)
        return rows.float()

    def _groups(self, prompts: Sequence[Continuation]) -> list[list[int]]:
        """Prompts that generate together: all, or as many as the memory has room for, like lengths together."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].ids))
        room = max(LEAST_MEMORY, int((1 - RESIDENT_SHARE) * self._memory / 2))
        groups: list[list[int]] = []
        for index in order:
            together = [*groups[-1], index] if groups else [index]
            if groups and self._group_bytes([prompts[i] for i in together]) <= room:
                groups[-1].append(index)
            else:
                groups.append([index])
        return groups

    def _group_bytes(self, prompts: Sequence[Continuation]) -> int:
        """What a batch holds at its fullest: KV cache and MLP, and the scores of one layer over the prompts."""
        width = max(len(prompt.ids) for prompt in prompts)
        tokens = width + max(prompt.limit for prompt in prompts)
        heads = int(self._config.num_attention_heads)
        scores = SCORES_AT_ONCE * heads * width**2 * FLOAT32_BYTES
        return len(prompts) * (tokens * self._layers.bytes_per_token + scores)

    @contextmanager
    def _threads_for(self, rows: int) -> Iterator[None]:
        """One thread for a small step: two wait for one another at every product. On a busy two-core machine a
        token of 270M took 0.80 s with two threads and 0.15 s with one."""
        before = torch.get_num_threads()
        if rows * self._parameters < SMALL_WORK:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def open_reference(folder: Path, dtype: str, memory: int | None = None) -> Reference:
    """The stock model of a checkpoint folder at `dtype` (float32 or bfloat16)."""
    return Reference(folder, dtype, memory)


def _prefixed(progress: Progress, prefix: str, line: str) -> None:
    progress(prefix + line)


def _goes_on(prompt: Continuation, steps: list[Step]) -> bool:
    return len(steps) < prompt.limit and steps[-1].token not in prompt.stop_ids


def _steps(logits: Tensor, keep: int) -> Iterator[Step]:
    """The likeliest of each row [n, vocab]; of two equal logits the lower id first, as argmax takes it."""
    for values, ids in zip(*(part.numpy() for part in logits.topk(keep)), strict=True):
        order = np.lexsort((ids, -values))
        yield Step(ids[order].astype(np.int32), values[order])


def _left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """(tokens, mask) int64 [n, longest]; a padded column holds token 0 and a mask of 0."""
    width = max(map(len, prompts))
    tokens, mask = torch.zeros((2, len(prompts), width), dtype=torch.int64)
    for row, ids in enumerate(prompts):
        tokens[row, width - len(ids) :] = torch.tensor(ids)
        mask[row, width - len(ids) :] = 1
    return tokens, mask


def _stored_values(skeleton: Skeleton) -> int:
    """Values of every stock tensor of the text model that has one."""
    from math import prod

    return sum(prod(skeleton.stored.shape(name)) for name in skeleton.names.values())
