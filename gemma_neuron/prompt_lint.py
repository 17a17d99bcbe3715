"""What is wrong with a prompt, in words, before a model sees it.

A port that repeats its reference token for token proves nothing when both were fed a prompt the model
was never trained on: this looks at the prompt alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemma_neuron.markers import FAMILIES, FamilyMarkers

if TYPE_CHECKING:
    from gemma_neuron.chat import ChatAssets


def lint_prompt(
    ids: Sequence[int], text: str, assets: ChatAssets, *, plain: bool = False
) -> list[str]:
    """Problems of a prompt given as ids and as the text it was made from; empty when it is sound.

    For a model with a template the prompt must be a conversation that ends with the model's turn open, unless it is
    meant as `plain` text to go on with.
    Ids and text are judged apart: 105 and 106 are other text in the other family's vocabulary.
    """
    if not ids:
        return ["the prompt has no tokens"]
    problems = [*_bos_problems(ids, assets), *_unknown_problems(ids, assets)]
    texts = (text, assets.tokenizer.decode(ids, skip_special=False))
    if assets.markers is not None:
        problems += _foreign_problems(texts, assets.markers)
    if assets.template is not None and not plain:
        if assets.markers is not None:
            problems += _marker_problems(ids, assets, assets.markers)
        problems += _ending_problems(texts[1], assets)
    return problems


def _bos_problems(ids: Sequence[int], assets: ChatAssets) -> list[str]:
    bos = assets.tokenizer.bos_id
    name = f"BOS {assets.tokenizer.piece_of(bos)!r} (id {bos})"
    count = list(ids).count(bos)
    if count == 0:
        return [f"{name} is missing: it must be the first token"]
    if ids[0] != bos:
        return [f"{name} is not the first token: it stands at index {list(ids).index(bos)}"]
    if count > 1:
        second = list(ids).index(bos, 1)
        return [f"{name} occurs {count} times, again at index {second}; it must occur once"]
    return []


def _unknown_problems(ids: Sequence[int], assets: ChatAssets) -> list[str]:
    unk = assets.tokenizer.unk_id
    out = []
    if unk is not None and unk in ids:
        out.append(
            f"{list(ids).count(unk)} tokens are {assets.tokenizer.piece_of(unk)!r} (id {unk}): "
            "the text has characters the vocabulary lacks"
        )
    beyond = [i for i in ids if i < 0 or i >= assets.tokenizer.vocab_size]
    if beyond:
        out.append(f"id {beyond[0]} is not in the vocabulary of {assets.tokenizer.vocab_size}")
    return out


def _foreign_problems(texts: tuple[str, ...], own: FamilyMarkers) -> list[str]:
    out = []
    for family in FAMILIES:
        if family.family == own.family:
            continue
        for marker, right in ((family.turn_open, own.turn_open), (family.turn_end, own.turn_end)):
            if any(marker in text for text in texts):
                out.append(
                    f"{marker!r} is {family.family}'s turn marker; this model's is {right!r} ({own.family})"
                )
    return out


def _marker_problems(ids: Sequence[int], assets: ChatAssets, own: FamilyMarkers) -> list[str]:
    out = []
    for marker in (own.turn_open, own.turn_end):
        token = assets.tokenizer.id_of(marker)
        if token is None:
            pieces = len(assets.tokenizer.encode(marker))
            out.append(
                f"the template's turn marker {marker!r} is not one token of the vocabulary "
                f"(it becomes {pieces} pieces)"
            )
        elif token not in ids:
            out.append(f"the turn marker {marker!r} (id {token}) does not occur")
    return out


def _ending_problems(decoded: str, assets: ChatAssets) -> list[str]:
    suffixes = assets.generation_suffixes
    own = assets.markers
    if own is not None and own.reply_close is not None and decoded.endswith(own.reply_close):
        return []  # after a tool's answer the model goes on in the turn it had
    if not any(suffixes.values()):
        return ["the template opens no turn for the model (add_generation_prompt changes nothing)"]
    allowed, mode = _allowed_suffixes(decoded, assets)
    if any(decoded.endswith(suffix) for suffix in allowed):
        return []
    wanted = " or ".join(repr(suffix) for suffix in allowed)
    if _turn_is_open(decoded, allowed, own):
        return [f"the model's turn is open, but{mode} this template ends with {wanted}"]
    return [f"no open turn for the model at the end: this template ends with {wanted}"]


def _allowed_suffixes(decoded: str, assets: ChatAssets) -> tuple[list[str], str]:
    """The endings the template can give this prompt, and the thinking mode that decided it."""
    suffixes = assets.generation_suffixes
    think = assets.markers.think if assets.markers is not None else None
    if think is None or think not in assets.need_template().source:
        return sorted({suffix for suffix in suffixes.values() if suffix}), ""
    asked = think in decoded
    return [suffixes[asked]], f" with thinking {'on' if asked else 'off'}"


def _turn_is_open(decoded: str, allowed: list[str], own: FamilyMarkers | None) -> bool:
    """Whether the last turn is the model's and not closed, whatever follows its first line."""
    if own is None or own.turn_open not in decoded:
        return False
    last = decoded[decoded.rindex(own.turn_open) :]
    first_lines = {suffix.split("\n", 1)[0] for suffix in allowed}
    return own.turn_end not in last and any(last.startswith(line + "\n") for line in first_lines)
