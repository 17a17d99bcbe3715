"""A checkpoint's tokenizer: text to ids and back, without any token added on its own.

In: a folder with `tokenizer.json`. The BOS that a post-processor would add is left out here: prompts
get theirs from the chat template or from `ChatAssets.completion_ids`, exactly once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_neuron.errors import TokenizerError
from gemma_neuron.template import read_object, special_piece

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """`tokenizer.json` with the ids the rest of the toolkit asks for."""

    def __init__(self, inner: tokenizers.Tokenizer, bos_id: int, unk_id: int | None = None) -> None:
        self._inner = inner
        self.bos_id = bos_id
        self.unk_id = unk_id

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Raises TokenizerError when tokenizer.json is missing or unreadable, or no BOS is named."""
        import tokenizers

        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise TokenizerError(
                f"{folder} has no {TOKENIZER_FILE}.",
                "Download the tokenizer files of the same model into the folder.",
            )
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every kind of bad file
            raise TokenizerError(
                f"{path} cannot be read: {error}.",
                "Download it again; it may be a Git LFS pointer or cut short.",
            ) from error
        config = read_object(folder / "tokenizer_config.json")
        unk = special_piece(config, "unk_token")
        return cls(
            inner,
            _bos_id(inner, config, folder),
            inner.token_to_id(unk) if unk is not None else None,
        )

    @cached_property
    def vocab_size(self) -> int:
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """Added tokens flagged special: never part of visible text."""
        added = self._inner.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone; a control token spelled in it becomes its one id, as in stock."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least, told without encoding it, which takes seconds and hundreds of
        megabytes for a text of megabytes; 0 where this tokenizer has no bound."""
        return -(-len(text) // self._longest) if self._longest else 0

    @cached_property
    def _longest(self) -> int:
        """Characters that one token stands for at most; 0 where nothing bounds it."""
        inner, added = self._inner, self._inner.get_added_tokens_decoder().values()
        model: Any = inner.model
        dropped = any(token.lstrip or token.rstrip for token in added)
        fused = getattr(model, "fuse_unk", True) and not getattr(model, "byte_fallback", False)
        if dropped or fused or not (_keeps(inner.normalizer) and _keeps(inner.pre_tokenizer)):
            return 0
        return max(map(len, inner.get_vocab(with_added_tokens=True)))

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self._inner.decode(list(ids), skip_special_tokens=skip_special))

    def id_of(self, piece: str) -> int | None:
        found = self._inner.token_to_id(piece)
        return None if found is None else int(found)

    def piece_of(self, token: int) -> str:
        """The vocabulary's entry, empty for an id it does not have."""
        return self._inner.id_to_token(token) or ""


def _keeps(step: Any) -> bool:
    """Whether a step before the model leaves at least as many characters as it is given, as far as is known."""
    if step is None:
        return True
    state = json.loads(step.__getstate__())
    if state["type"] == "Sequence":
        parts = state.get("normalizers") or state.get("pretokenizers") or [{}]
        return all(map(_keeps_state, parts))
    return _keeps_state(state)


def _keeps_state(state: dict[str, Any]) -> bool:
    kind, pattern = state.get("type"), state.get("pattern")
    if kind == "Replace" and isinstance(pattern, dict) and "String" in pattern:
        return len(state["content"]) >= len(pattern["String"])
    return kind == "Prepend" or (kind == "Split" and state.get("behavior") != "Removed")


def _bos_id(inner: tokenizers.Tokenizer, config: dict[str, Any], folder: Path) -> int:
    piece = special_piece(config, "bos_token")
    if piece is not None:
        found = inner.token_to_id(piece)
        if found is None:
            raise TokenizerError(
                f"{folder}: tokenizer_config.json's BOS {piece!r} is not in {TOKENIZER_FILE}.",
                "The two files are not of the same model.",
            )
        return int(found)
    model = read_object(folder / "config.json")
    text = model.get("text_config")
    for holder in (model, text if isinstance(text, dict) else {}):
        value = holder.get("bos_token_id")
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    raise TokenizerError(
        f"{folder} names no BOS token: neither tokenizer_config.json nor config.json does.",
        'Add "bos_token" to tokenizer_config.json, as the model\'s publisher has it.',
    )
