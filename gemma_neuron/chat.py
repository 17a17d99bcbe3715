"""What turns messages into token ids and back: tokenizer, template, stop ids, family markers.

In: a checkpoint folder (or a port's `source/`). Out: `ChatAssets`. No torch, no transformers. Rendering
equals transformers' `apply_chat_template`; BOS stands exactly once, at index 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gemma_neuron.control_text import control_text, rendered_control_text
from gemma_neuron.errors import ConfigError, TemplateError, TokenizerError
from gemma_neuron.markers import FAMILIES, FamilyMarkers
from gemma_neuron.prompt_lint import lint_prompt
from gemma_neuron.stream_text import StopStrings, StreamDecoder
from gemma_neuron.template import ChatTemplate, load_template
from gemma_neuron.tokenizer import TOKENIZER_FILE, Tokenizer

__all__ = [
    "FAMILIES",
    "ChatAssets",
    "ChatTemplate",
    "FamilyMarkers",
    "StopStrings",
    "StreamDecoder",
    "Tokenizer",
    "control_text",
    "lint_prompt",
    "load_chat_assets",
    "rendered_control_text",
    "stop_token_ids",
]


@dataclass(frozen=True)
class ChatAssets:
    """Everything about text that a port serves with. `template` is None for a base model."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    stop_ids: frozenset[int]
    turn_end: str | None
    """The template's own turn end when it is one token, else None."""
    markers: FamilyMarkers | None
    """The family the template writes (without a template: the one the vocabulary has), if known."""

    def prompt_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = False,
    ) -> str:
        """The rendered prompt. Raises TemplateError without a template, or when it refuses."""
        return self.need_template().render(messages, tools=tools, enable_thinking=enable_thinking)

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = False,
    ) -> list[int]:
        """The rendered prompt's ids, BOS exactly once in front."""
        return self.completion_ids(
            self.prompt_text(messages, tools=tools, enable_thinking=enable_thinking)
        )

    def completion_ids(self, text: str) -> list[int]:
        """Ids of a text as it stands, with BOS in front unless the text begins with it."""
        ids = self.tokenizer.encode(text)
        bos = self.tokenizer.bos_id
        return ids if ids[:1] == [bos] else [bos, *ids]

    def need_template(self) -> ChatTemplate:
        if self.template is None:
            raise TemplateError(
                "The model has no chat template, in chat_template.jinja or in tokenizer_config.json.",
                "Use plain completion for a base model, or add the chat_template.jinja of the -it model.",
            )
        return self.template

    @cached_property
    def generation_suffixes(self) -> dict[bool, str]:
        """What the template appends to open the model's turn, by `enable_thinking`."""
        probe = [{"role": "user", "content": "x"}]
        out = {}
        for thinking in (False, True):
            template = self.need_template()
            closed = template.render(probe, enable_thinking=thinking, add_generation_prompt=False)
            opened = template.render(probe, enable_thinking=thinking)
            out[thinking] = opened[len(closed) :] if opened.startswith(closed) else ""
        return out

    @cached_property
    def guarded_ids(self) -> frozenset[int]:
        """Ids that user text must not become: control tokens and the family's turn markers."""
        found = set(self.tokenizer.control_ids)
        if self.markers is not None:
            for piece in (self.markers.turn_open, self.markers.turn_end):
                token = self.tokenizer.id_of(piece)
                if token is not None:
                    found.add(token)
        return frozenset(found)


def load_chat_assets(folder: Path) -> ChatAssets:
    """Read a folder's tokenizer, template and stop ids.

    Raises TokenizerError, TemplateError or ConfigError, each naming the file.
    """
    tokenizer = Tokenizer.from_folder(folder)
    template = load_template(folder)
    return ChatAssets(
        tokenizer=tokenizer,
        template=template,
        stop_ids=frozenset(stop_token_ids(folder)),
        turn_end=_turn_end(template, tokenizer),
        markers=_markers(template, tokenizer),
    )


def _turn_end(template: ChatTemplate | None, tokenizer: Tokenizer) -> str | None:
    for family in FAMILIES:
        if template is not None and family.turn_end in template.source:
            return family.turn_end if tokenizer.id_of(family.turn_end) is not None else None
    return None


def _markers(template: ChatTemplate | None, tokenizer: Tokenizer) -> FamilyMarkers | None:
    for family in FAMILIES:
        if template is None:
            if tokenizer.id_of(family.turn_open) is not None:
                return family
        elif family.turn_open in template.source:
            return family
    return None


def stop_token_ids(folder: Path, ids: Mapping[str, int] | None = None) -> tuple[int, ...]:
    """Ids that end an answer, sorted: generation_config.json's (else config.json's, else its
    text_config's) united with the template's turn end where the vocabulary has it as one token.

    `ids`: piece → id, where tokenizer.json was parsed already. Reads JSON only. Raises ConfigError
    or TokenizerError on files that are no JSON objects.
    """
    config = _json_object(folder / "config.json")
    text = config.get("text_config")
    found: set[int] = set()
    for holder in (_json_object(folder / "generation_config.json"), config, text):
        found = _ids(holder.get("eos_token_id")) if isinstance(holder, dict) else set()
        if found:
            break
    template = load_template(folder)
    if template is not None:
        for family in FAMILIES:
            if family.turn_end in template.source:
                piece = family.turn_end
                token = _vocabulary_id(folder, piece) if ids is None else ids.get(piece)
                found |= {token} if token is not None else set()
                break
    return tuple(sorted(found))


def _ids(value: object) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0}


def _vocabulary_id(folder: Path, piece: str) -> int | None:
    data = _json_object(folder / TOKENIZER_FILE, TokenizerError)
    added = data.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and token.get("content") == piece:
            found = token.get("id")
            return found if isinstance(found, int) else None
    model = data.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    found = vocab.get(piece) if isinstance(vocab, dict) else None
    return found if isinstance(found, int) else None


def _json_object(
    path: Path, error: type[ConfigError | TokenizerError] = ConfigError
) -> dict[str, Any]:
    """A JSON object, empty when the file is not there."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{path} is not readable JSON: {cause}.") from cause
    if not isinstance(value, dict):
        raise error(f"{path} holds no JSON object.")
    return value
