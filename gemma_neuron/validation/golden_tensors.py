"""The tensors of a golden, read with their shapes, types and values checked.

In: a safetensors file. Out: GoldenText and GoldenGreedy by name. Refused: IntegrityError for anything a reference
cannot have said. A NaN above all: no comparison with it ever exceeds a bar.

Names: `text.<name>.ids` int32 [n], `.logsumexp` and `.target_logprob` float32 [n], `.logits` float32
[n, vocab] (texts up to 128 tokens) or `.top_ids` int32 and `.top_values` float32 [n, 1000], best first;
`greedy.<name>.prompt` and `.tokens` int32, `.top_ids` and `.top_values` [tokens, 10].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_neuron.errors import IntegrityError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Tensors = dict[str, NDArray[Any]]

LONG_ROWS = {"ids": 1, "logsumexp": 1, "target_logprob": 1}
PARTS = {
    "text": ({**LONG_ROWS, "logits": 2}, {**LONG_ROWS, "top_ids": 2, "top_values": 2}),
    "greedy": ({"tokens": 1, "top_ids": 2, "top_values": 2, "prompt": 1},),
}
"""Kind → the sets of parts it may have, with their dimensions; all but `prompt` have the first one's length."""
WHOLE = frozenset({"ids", "prompt", "tokens", "top_ids"})
"""Parts that are token ids, int32; the others are float32."""


@dataclass(frozen=True, slots=True)
class GoldenText:
    """One teacher-forced text. `top_ids` None: `values` are all logits [n, vocab], else [n, k]."""

    name: str
    ids: NDArray[np.int32]
    values: NDArray[np.float32]
    top_ids: NDArray[np.int32] | None
    logsumexp: NDArray[np.float32]
    target_logprob: NDArray[np.float32]

    @property
    def largest(self) -> float:
        """The largest logit by magnitude: what distances are measured against."""
        return float(abs(self.values).max())


@dataclass(frozen=True, slots=True)
class GoldenGreedy:
    """One greedy continuation; row i of `top_ids`, `top_values` [tokens, 10] is where token i was chosen."""

    name: str
    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32]
    top_ids: NDArray[np.int32]
    top_values: NDArray[np.float32]

    def margin(self, step: int, token: int) -> float:
        """The reference's lead, in logits, of its own choice over `token` (at least the tenth's)."""
        row = {
            int(i): float(v) for i, v in zip(self.top_ids[step], self.top_values[step], strict=True)
        }
        best = float(self.top_values[step][0])
        return best - row.get(token, float(self.top_values[step][-1]))


def read_tensors(path: Path) -> tuple[dict[str, GoldenText], dict[str, GoldenGreedy]]:
    """(texts, continuations) by name. Raises IntegrityError naming the first tensor that is wrong."""
    texts, greedy = {}, {}
    for (kind, name), mine in _grouped(path).items():
        problem = _problem(kind, mine)
        if problem is not None:
            raise _refused(path, f"{kind}.{name}{problem}")
        if kind == "text":
            values = mine["logits"] if "logits" in mine else mine["top_values"]
            sums = mine["logsumexp"], mine["target_logprob"]
            texts[name] = GoldenText(name, mine["ids"], values, mine.get("top_ids"), *sums)
        else:
            greedy[name] = GoldenGreedy(
                name, mine["prompt"], mine["tokens"], mine["top_ids"], mine["top_values"]
            )
    return texts, greedy


def largest_id(texts: dict[str, GoldenText], greedy: dict[str, GoldenGreedy]) -> int:
    """The largest token id anywhere: a port with a smaller vocabulary cannot be asked."""
    found = [int(text.ids.max()) for text in texts.values()]
    found += [int(text.top_ids.max()) for text in texts.values() if text.top_ids is not None]
    for item in greedy.values():
        found += [int(part.max()) for part in (item.prompt, item.tokens, item.top_ids)]
    return max(found, default=0)


def largest_logit(texts: Iterable[GoldenText]) -> float:
    """By magnitude, of all texts; 1 without any."""
    return max((text.largest for text in texts), default=1.0)


def _grouped(path: Path) -> dict[tuple[str, str], Tensors]:
    """(kind, name) → part → tensor. Raises IntegrityError."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        tensors = load_file(path)
    except (SafetensorError, KeyError, OSError, TypeError, ValueError) as error:
        raise _refused(path, f"it cannot be read as safetensors: {error}") from error
    groups: dict[tuple[str, str], Tensors] = {}
    for key in sorted(tensors):
        kind, _, rest = key.partition(".")
        name, _, part = rest.rpartition(".")
        if kind not in PARTS or not name:
            raise _refused(path, f"{key!r} is no tensor of a golden")
        groups.setdefault((kind, name), {})[part] = tensors[key]
    return groups


def _problem(kind: str, mine: Tensors) -> str | None:
    """What is wrong with the parts of one text or continuation, or None."""
    import numpy as np

    wanted = next((parts for parts in PARTS[kind] if parts.keys() == mine.keys()), None)
    if wanted is None:
        return f" has the parts {', '.join(sorted(mine))}"
    rows = mine[next(iter(wanted))].shape[:1]
    for part, dimensions in wanted.items():
        tensor, dtype = mine[part], "int32" if part in WHOLE else "float32"
        if str(tensor.dtype) != dtype or tensor.ndim != dimensions or not tensor.size:
            return f".{part} is {tensor.dtype} {list(tensor.shape)}"
        if part != "prompt" and tensor.shape[:1] != rows:
            return f".{part} has {len(tensor)} rows, not {rows[0]}"
        if part in WHOLE and tensor.min() < 0:
            return f".{part} holds negative token ids"
        if part not in WHOLE and not np.isfinite(tensor).all():
            return f".{part} holds values that are no numbers (NaN or infinite)"
    if "top_ids" in mine and mine["top_ids"].shape != mine["top_values"].shape:
        return ".top_ids and .top_values have different shapes"
    return None


def _refused(path: Path, what: str) -> IntegrityError:
    return IntegrityError(f"{path} is no golden: {what}.", "Make the golden again.")
