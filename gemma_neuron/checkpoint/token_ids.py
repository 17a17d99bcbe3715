"""Do config, generation config and tokenizer mean the same ids, and has the table a row for each?

In: the parsed files. Out: `token-id-contradiction` findings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gemma_neuron.reports import Finding, Severity

TOKENIZER_NAME = "tokenizer.json"
GENERATION_NAME = "generation_config.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"


@dataclass(frozen=True)
class TokenFiles:
    """Parsed files, empty where one is absent; `ids` is piece → id of tokenizer.json."""

    config: dict[str, Any]
    generation: dict[str, Any]
    tokenizer_config: dict[str, Any]
    tokenizer: dict[str, Any]
    ids: dict[str, int]

    def declared(self, key: str) -> list[tuple[str, set[int]]]:
        """(file, ids) of each file that names `key` (bos, eos, pad)."""
        found = [(name, as_ids(holder.get(f"{key}_token_id"))) for name, holder in self._holders()]
        piece = self.special_piece(key)
        if piece in self.ids:
            found.append((TOKENIZER_CONFIG_NAME, {self.ids[piece]}))
        return [(name, ids) for name, ids in found if ids]

    def no_ids(self, key: str) -> Iterator[tuple[str, object]]:
        """(file, value) where a file gives `key` something that is neither an id, nor a list of ids, nor null."""
        for name, holder in self._holders():
            value = holder.get(f"{key}_token_id")
            several = value if isinstance(value, list) else [value]
            if value is not None and len(as_ids(value)) < len(set(map(repr, several))):
                yield name, value

    def _holders(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        text = self.config.get("text_config")
        return (
            ("config.json", self.config),
            ("config.json's text_config", text if isinstance(text, dict) else {}),
            (GENERATION_NAME, self.generation),
        )

    def special_piece(self, key: str) -> str:
        """A special token's text in tokenizer_config.json, written plain or as an object; or empty."""
        piece = self.tokenizer_config.get(f"{key}_token")
        piece = piece.get("content") if isinstance(piece, dict) else piece
        return piece if isinstance(piece, str) else ""

    def eos_of_generate(self) -> set[int]:
        """The ids stock `generate` stops at: the generation config's, else the config's."""
        text = self.config.get("text_config")
        for part in (self.generation, self.config, text if isinstance(text, dict) else {}):
            if part.get("eos_token_id") is not None:
                return as_ids(part["eos_token_id"])
        return set()


def contradictions(files: TokenFiles, vocab: int, turn_ends: set[int]) -> Iterator[Finding]:
    """Every disagreement about bos, eos and pad, and every id past the vocabulary."""
    for key in ("bos", "eos", "pad"):
        yield from _no_ids(files, key)
        yield from _outside(files, key, vocab)
        yield from _unknown_piece(files, key)
    yield from _unequal(files, "bos", "error")
    yield from _unequal(files, "pad", "warning")
    yield from _eos(files, turn_ends)
    yield from _vocabulary(files, vocab)


def _contradiction(severity: Severity, message: str, file: str) -> Finding:
    return Finding(
        kind="token-id-contradiction",
        severity=severity,
        message=message,
        file=file.partition("'")[0],
    )


def _no_ids(files: TokenFiles, key: str) -> Iterator[Finding]:
    for file, value in files.no_ids(key):
        shown = repr(value)[:60]
        yield _contradiction(
            "error", f"{file} gives {key}_token_id {shown}, which is no token id.", file
        )


def _outside(files: TokenFiles, key: str, vocab: int) -> Iterator[Finding]:
    for file, ids in files.declared(key):
        for token in sorted(ids):
            if not 0 <= token < vocab:
                message = f"{file} gives {key}_token_id {token}; the vocabulary has {vocab}."
                yield _contradiction("error", message, file)


def _unknown_piece(files: TokenFiles, key: str) -> Iterator[Finding]:
    piece = files.special_piece(key)
    if piece and files.ids and piece not in files.ids:
        yield _contradiction(
            "error",
            f"{TOKENIZER_CONFIG_NAME} names {key}_token {piece[:40]!r}, which {TOKENIZER_NAME} does not "
            "have; transformers would add it past the table.",
            TOKENIZER_CONFIG_NAME,
        )


def _unequal(files: TokenFiles, key: str, severity: Severity) -> Iterator[Finding]:
    """Bos and pad are one id everywhere; a wrong bos is silent nonsense."""
    declared = files.declared(key)
    counts = Counter(frozenset(ids) for _, ids in declared)
    if len(counts) > 1:
        said = ", ".join(f"{file} {sorted(ids)}" for file, ids in declared)
        odd = min(declared, key=lambda one: counts[frozenset(one[1])])[0]
        yield _contradiction(severity, f"{key}_token_id differs: {said}.", odd)


def _eos(files: TokenFiles, turn_ends: set[int]) -> Iterator[Finding]:
    """Several ids may end a text, and tunes make the turn end the tokenizer's eos; one must be common."""
    declared = dict(files.declared("eos"))
    own = declared.pop(TOKENIZER_CONFIG_NAME, set())
    others = set().union(*declared.values())
    if own and others and not own & (others | turn_ends):
        yield _contradiction(
            "error",
            f"{TOKENIZER_CONFIG_NAME} ends a text with {sorted(own)}, the configs with {sorted(others)}: "
            "no id is common.",
            TOKENIZER_CONFIG_NAME,
        )


def _vocabulary(files: TokenFiles, vocab: int) -> Iterator[Finding]:
    beyond = {piece: token for piece, token in files.ids.items() if not 0 <= token < vocab}
    if not beyond:
        return
    # Gemma 3 1B and 270M ship <image_soft_token> one past their table; text never holds it.
    added = {token["content"] for token in added_tokens(files.tokenizer)}
    first = sorted(beyond, key=lambda piece: beyond[piece])[:3]
    yield _contradiction(
        "warning" if beyond.keys() <= added else "error",
        f"{TOKENIZER_NAME} has {len(beyond)} ids past the vocabulary of {vocab}: "
        f"{', '.join(f'{piece[:40]!r} {beyond[piece]}' for piece in first)}. A prompt with one of them has "
        "no row in the table.",
        TOKENIZER_NAME,
    )


def as_ids(value: object) -> set[int]:
    """One id or a list of them; anything else is left out."""
    return {item for item in (value if isinstance(value, list) else [value]) if type(item) is int}


def added_tokens(tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    """The added tokens of a parsed tokenizer.json that have a text and an id."""
    added = tokenizer.get("added_tokens")
    return [
        token
        for token in (added if isinstance(added, list) else [])
        if isinstance(token, dict)
        and isinstance(token.get("content"), str)
        and type(token.get("id")) is int
    ]


def ids_of_pieces(tokenizer: dict[str, Any]) -> dict[str, int]:
    """piece → id of a parsed tokenizer.json, added tokens over the model's vocabulary."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str, int] = {}
    if isinstance(vocab, dict):
        ids = {piece: token for piece, token in vocab.items() if type(token) is int}
    elif isinstance(vocab, list):  # unigram: pairs of piece and score
        ids = {str(pair[0]): i for i, pair in enumerate(vocab) if isinstance(pair, list) and pair}
    return ids | {token["content"]: token["id"] for token in added_tokens(tokenizer)}
