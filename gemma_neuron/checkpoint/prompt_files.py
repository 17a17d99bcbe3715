"""What a model is talked to with: tokenizer, chat template, stop ids, special token ids.

In: a source and its geometry. Out: `PromptFacts` with findings. The files are read as JSON and text only;
nothing is rendered or tokenised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gemma_neuron.chat import FAMILIES, stop_token_ids
from gemma_neuron.checkpoint.reading import (
    BadJsonError,
    RefusedFileError,
    opened,
    read_json_object,
)
from gemma_neuron.checkpoint.source import (
    SMALL_FILE_LIMIT,
    Source,
    read_optional_json,
    small_file_names,
)
from gemma_neuron.errors import GemmaNeuronError
from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.reports import Finding, FindingKind, Severity
from gemma_neuron.template import ChatTemplate, load_template

TOKENIZER_NAME = "tokenizer.json"
GENERATION_NAME = "generation_config.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
TEMPLATE_NAME = "chat_template.jinja"


@dataclass(frozen=True)
class PromptFacts:
    """`template` as in the JSON contract: present, source, sha256."""

    template: dict[str, Any]
    stop_ids: tuple[int, ...]
    findings: tuple[Finding, ...]


def prompt_facts(
    source: Source,
    config: dict[str, Any],
    geometry: ModelGeometry,
    need_template: bool | None = None,
) -> PromptFacts:
    """Read and cross-check the files around the weights.

    `need_template`: a missing template is an error (True), a warning (False), or by the model's own
    files (None): an -it model stops at its turn end, so its generation config names that id.
    """
    return _Reader(source, config, geometry, need_template).read()


@dataclass
class _Reader:
    source: Source
    config: dict[str, Any]
    geometry: ModelGeometry
    need_template: bool | None
    findings: list[Finding] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    """piece → id of the tokenizer; empty when it cannot be read."""

    def read(self) -> PromptFacts:
        if not self._files_are_safe():
            empty = {"present": False, "source": "", "sha256": ""}
            return PromptFacts(empty, (), tuple(self.findings))
        self.tokenizer = self._tokenizer()
        self.generation = self._optional(GENERATION_NAME)
        self.tokenizer_config = self._optional(TOKENIZER_CONFIG_NAME)
        template = self._template()
        self._check_stop_ids(template)
        self._check_special_ids()
        self._check_vocabulary()
        return PromptFacts(
            {
                "present": template is not None,
                "source": template.origin if template else "",
                "sha256": template.sha256 if template else "",
            },
            self._stop_ids(),
            tuple(self.findings),
        )

    def _add(self, kind: FindingKind, severity: Severity, message: str, file: str) -> None:
        self.findings.append(Finding(kind=kind, severity=severity, message=message, file=file))

    def _files_are_safe(self) -> bool:
        """Every small file is a regular one inside the folder, before anything else opens it."""
        safe = True
        for name in small_file_names(self.source):
            try:
                with opened(self.source.folder / name, self.source.folder):
                    pass
            except FileNotFoundError:
                self._add("unsafe-name", "error", f"{name} is a link to nothing.", name)
                safe = False
            except RefusedFileError as error:
                self._add("unsafe-name", "error", f"{error.message} {error.hint}".strip(), name)
                safe = False
        return safe

    def _tokenizer(self) -> dict[str, Any]:
        """The parsed tokenizer.json, empty (with a finding) when there is none that can be read."""
        try:
            found = read_json_object(
                self.source.folder / TOKENIZER_NAME, self.source.folder, SMALL_FILE_LIMIT
            )
            self.ids = _token_ids(found)
            if self.ids:
                return found
            problem = f"{TOKENIZER_NAME} has no vocabulary."
        except FileNotFoundError:
            other = (self.source.folder / "tokenizer.model").is_file()
            problem = f"{TOKENIZER_NAME} is missing" + (
                "; tokenizer.model alone is not enough: save it with transformers' fast tokenizer."
                if other
                else ": without it every prompt becomes <unk>. Fetch it from the model's page."
            )
        except (BadJsonError, RefusedFileError) as error:
            problem = f"{TOKENIZER_NAME}: {error}. Fetch it again."
        self._add("tokenizer-missing", "error", problem, TOKENIZER_NAME)
        return {}

    def _optional(self, name: str) -> dict[str, Any]:
        try:
            return read_optional_json(self.source, name) or {}
        except GemmaNeuronError as error:
            kind: FindingKind = (
                "token-id-contradiction" if name == GENERATION_NAME else "tokenizer-missing"
            )
            self._add(kind, "error", error.message, name)
            return {}

    def _template(self) -> ChatTemplate | None:
        try:
            template = load_template(self.source.folder)
        except GemmaNeuronError as error:
            self._add("template-unsafe", "error", error.message, TEMPLATE_NAME)
            return None
        if template is None:
            self._report_no_template()
            return None
        inside = self.tokenizer_config.get("chat_template")
        beside = inside if isinstance(inside, str) and template.origin == TEMPLATE_NAME else None
        if beside is not None and beside.strip() != template.source.strip():
            self._add(
                "template-unsafe",
                "warning",
                f"{TEMPLATE_NAME} and the chat_template in {TOKENIZER_CONFIG_NAME} differ; "
                f"{TEMPLATE_NAME} is used, as in transformers, but other tools may take the other.",
                TEMPLATE_NAME,
            )
        return template

    def _report_no_template(self) -> None:
        needed = self.need_template
        if needed is None:
            needed = bool(self._turn_end_ids() & _as_ids(self._declared_eos()))
        legacy = (self.source.folder / "chat_template.json").is_file()
        self._add(
            "template-missing",
            "error" if needed else "warning",
            f"There is no chat template, neither {TEMPLATE_NAME} nor a chat_template in "
            f"{TOKENIZER_CONFIG_NAME}"
            + ("; chat_template.json is the older form: save it as .jinja." if legacy else ".")
            + (
                " The model is tuned for chat (its stop ids hold the turn end) and answers nonsense to "
                "bare text. Fetch the file from the model's page."
                if needed
                else " That is right for a base model; chat needs one."
            ),
            TEMPLATE_NAME,
        )

    def _declared_eos(self) -> object:
        """eos_token_id as stock `generate` takes it: generation config first."""
        for part in (self.generation, self.config, self.config.get("text_config")):
            if isinstance(part, dict) and part.get("eos_token_id") is not None:
                return part["eos_token_id"]
        return None

    def _turn_end_ids(self) -> set[int]:
        return {self.ids[f.turn_end] for f in FAMILIES if f.turn_end in self.ids} or {106}

    def _check_stop_ids(self, template: ChatTemplate | None) -> None:
        declared = _as_ids(self._declared_eos())
        for family in FAMILIES:
            if template is None or family.turn_end not in template.source:
                continue
            token = self.ids.get(family.turn_end)
            if token is None and self.ids:
                self._add(
                    "token-id-contradiction",
                    "error",
                    f"The chat template writes {family.turn_end}, which is no token of {TOKENIZER_NAME}: "
                    "template and tokenizer are of different models.",
                    TEMPLATE_NAME,
                )
            elif token is not None and token not in declared:
                self._add(
                    "stop-ids-reduced",
                    "warning",
                    f"{GENERATION_NAME} stops at {sorted(declared)} and leaves out {family.turn_end} "
                    f"({token}), which the chat template ends every turn with; it is added here, but "
                    "stock generation runs on past the answer.",
                    GENERATION_NAME,
                )
            return

    def _stop_ids(self) -> tuple[int, ...]:
        try:
            return tuple(stop_token_ids(self.source.folder))
        except GemmaNeuronError:
            return ()  # the file it failed on is a finding

    def _declared(self, key: str) -> Iterator[tuple[str, set[int]]]:
        """(file, ids) of each file that names `key` (bos, eos, pad)."""
        text = self.config.get("text_config")
        holders = (
            ("config.json", self.config),
            ("config.json's text_config", text if isinstance(text, dict) else {}),
            (GENERATION_NAME, self.generation),
        )
        for name, holder in holders:
            ids = _as_ids(holder.get(f"{key}_token_id"))
            if ids:
                yield name, ids
        piece = self.tokenizer_config.get(f"{key}_token")
        piece = piece.get("content") if isinstance(piece, dict) else piece
        if isinstance(piece, str) and piece in self.ids:
            yield TOKENIZER_CONFIG_NAME, {self.ids[piece]}

    def _check_special_ids(self) -> None:
        for key in ("bos", "eos", "pad"):
            declared = list(self._declared(key))
            outside = [(f, i) for f, ids in declared for i in ids if i >= self.geometry.vocab]
            for file, token in outside:
                self._add(
                    "token-id-contradiction",
                    "error",
                    f"{file} gives {key}_token_id {token}; the vocabulary has {self.geometry.vocab}.",
                    file.partition("'")[0],
                )
            # Several ids may end a text, and tunes make the turn end the tokenizer's eos: only bos and pad
            # must be one id everywhere.
            if key != "eos" and len({frozenset(ids) for _, ids in declared}) > 1:
                said = ", ".join(f"{file} {sorted(ids)}" for file, ids in declared)
                self._add(
                    "token-id-contradiction",
                    "error" if key == "bos" else "warning",
                    f"{key}_token_id differs: {said}.",
                    declared[-1][0].partition("'")[0],
                )
        self._check_eos()

    def _check_eos(self) -> None:
        declared = dict(self._declared("eos"))
        own = declared.pop(TOKENIZER_CONFIG_NAME, set())
        others = set().union(*declared.values()) if declared else set()
        if own and others and not own & (others | self._turn_end_ids()):
            self._add(
                "token-id-contradiction",
                "error",
                f"{TOKENIZER_CONFIG_NAME} ends a text with {sorted(own)}, the configs with "
                f"{sorted(others)}: no id is common.",
                TOKENIZER_CONFIG_NAME,
            )

    def _check_vocabulary(self) -> None:
        beyond = {piece: i for piece, i in self.ids.items() if i >= self.geometry.vocab}
        if not beyond:
            return
        # Gemma 3 1B and 270M ship <image_soft_token> one past their table; text never holds it.
        added = {token["content"] for token in _added_tokens(self.tokenizer)}
        severity: Severity = "warning" if beyond.keys() <= added else "error"
        first = sorted(beyond, key=lambda piece: beyond[piece])[:3]
        self._add(
            "token-id-contradiction",
            severity,
            f"{TOKENIZER_NAME} has {len(beyond)} ids past the vocabulary of {self.geometry.vocab}: "
            f"{', '.join(f'{piece[:40]!r} {beyond[piece]}' for piece in first)}. A prompt with one of them "
            "has no row in the table.",
            TOKENIZER_NAME,
        )


def _as_ids(value: object) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {item for item in values if type(item) is int and item >= 0}


def _added_tokens(tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    added = tokenizer.get("added_tokens")
    return [
        token
        for token in (added if isinstance(added, list) else [])
        if isinstance(token, dict)
        and isinstance(token.get("content"), str)
        and type(token.get("id")) is int
    ]


def _token_ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """piece → id of a parsed tokenizer.json, added tokens over the model's vocabulary."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str, int] = {}
    if isinstance(vocab, dict):
        ids = {piece: token for piece, token in vocab.items() if type(token) is int}
    elif isinstance(vocab, list):  # unigram: pairs of piece and score
        ids = {str(pair[0]): i for i, pair in enumerate(vocab) if isinstance(pair, list) and pair}
    return ids | {token["content"]: token["id"] for token in _added_tokens(tokenizer)}
