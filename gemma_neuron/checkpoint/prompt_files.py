"""What a model is talked to with: tokenizer, chat template, stop ids, special token ids.

In: a source and its geometry. Out: `PromptFacts` with findings. The files are read as JSON and text only; the
template is tried on one message, in its sandbox.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from gemma_neuron.chat import FAMILIES, stop_token_ids
from gemma_neuron.checkpoint.source import (
    SMALL_FILE_LIMIT,
    Source,
    read_optional_json,
    small_file_names,
)
from gemma_neuron.checkpoint.storage import read_json_object
from gemma_neuron.checkpoint.token_ids import (
    GENERATION_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    TokenFiles,
    contradictions,
    ids_of_pieces,
)
from gemma_neuron.errors import GemmaNeuronError, TemplateError
from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.names import is_plain_file_name
from gemma_neuron.regular_files import RefusedFileError
from gemma_neuron.reports import Finding, FindingKind, Severity
from gemma_neuron.strict_json import BadJsonError
from gemma_neuron.template import ChatTemplate, Origin, load_template

TEMPLATE_NAME = "chat_template.jinja"
TRIAL_TEXT = "What is the capital of France?"


@dataclass(frozen=True)
class PromptFacts:
    """`template` as in the JSON contract: present, source, sha256."""

    template: dict[str, Any]
    stop_ids: tuple[int, ...]
    findings: tuple[Finding, ...]


@cache
def _trial(source: str, origin: Origin, specials: tuple[tuple[str, str], ...]) -> str:
    """Compile and render once, in the sandbox's child, before a port is built on it; what is wrong, or ''."""
    template = ChatTemplate(source, origin, dict(specials))
    try:
        text = template.render([{"role": "user", "content": TRIAL_TEXT}])
    except TemplateError as error:
        return error.message
    finally:
        template.close()
    if TRIAL_TEXT not in text:
        return f"The chat template of {origin} leaves out what the user says."
    return ""


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

    def read(self) -> PromptFacts:
        if not self._files_are_safe():
            empty = {"present": False, "source": "", "sha256": ""}
            return PromptFacts(empty, (), tuple(self.findings))
        tokenizer, ids = self._tokenizer()
        self.files = TokenFiles(
            config=self.config,
            generation=self._optional(GENERATION_NAME),
            tokenizer_config=self._optional(TOKENIZER_CONFIG_NAME),
            tokenizer=tokenizer,
            ids=ids,
        )
        template = self._template()
        self._check_stop_ids(template)
        self.findings += contradictions(self.files, self.geometry.vocab, self._turn_end_ids())
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
            if not is_plain_file_name(name):
                self._add("unsafe-name", "error", f"{name!r} is no plain file name.", name)
                safe = False
                continue
            try:
                with self.source.files.opened(name) as file:
                    if file.size > SMALL_FILE_LIMIT:
                        self._add(
                            "unsafe-name",
                            "error",
                            f"{name} has {file.size:,} bytes; a port carries files of its kind of at most "
                            f"{SMALL_FILE_LIMIT:,}.",
                            name,
                        )
                        safe = False
            except FileNotFoundError:
                self._add("unsafe-name", "error", f"{name} is a link to nothing.", name)
                safe = False
            except RefusedFileError as error:
                self._add("unsafe-name", "error", f"{error.message} {error.hint}".strip(), name)
                safe = False
        return safe

    def _tokenizer(self) -> tuple[dict[str, Any], dict[str, int]]:
        """The parsed tokenizer.json and its ids; both empty (with a finding) when it cannot be read."""
        try:
            found = read_json_object(self.source.files, TOKENIZER_NAME, SMALL_FILE_LIMIT)
            ids = ids_of_pieces(found)
            if ids:
                return found, ids
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
        return {}, {}

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
        if any(finding.file == TOKENIZER_CONFIG_NAME for finding in self.findings):
            return None  # where the template may stand, and not readable: already said
        try:
            template = load_template(self.source.folder)
        except GemmaNeuronError as error:
            self._add("template-unsafe", "error", error.message, TEMPLATE_NAME)
            return None
        if template is None:
            self._report_no_template()
            return None
        problem = _trial(template.source, template.origin, tuple(template.specials.items()))
        if problem:
            self._add("template-unsafe", "error", problem, template.origin)
        inside = self.files.tokenizer_config.get("chat_template")
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
            needed = bool(self._turn_end_ids() & self.files.eos_of_generate())
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

    def _turn_end_ids(self) -> set[int]:
        """Ids of the turn ends that the vocabulary has; both families put theirs at 106."""
        ids = self.files.ids
        return {ids[f.turn_end] for f in FAMILIES if f.turn_end in ids} or {106}

    def _check_stop_ids(self, template: ChatTemplate | None) -> None:
        declared = self.files.eos_of_generate()
        for family in FAMILIES:
            if template is None or family.turn_end not in template.source:
                continue
            token = self.files.ids.get(family.turn_end)
            if token is None and self.files.ids:
                self._add(
                    "token-id-contradiction",
                    "error",
                    f"The chat template writes {family.turn_end}, which is no token of {TOKENIZER_NAME}: "
                    "template and tokenizer are of different models.",
                    TEMPLATE_NAME,
                )
            elif token is not None and token not in declared:
                self._stop_left_out(
                    declared,
                    f"{family.turn_end} ({token}), which the chat template ends every turn with; it is "
                    "added here, but stock generation runs on past the answer",
                )
            reply = family.reply_begin(template.source)
            waits = None if reply is None else self.files.ids.get(reply)
            if waits is not None and waits not in declared:
                self._stop_left_out(
                    declared,
                    f"{reply} ({waits}), with which the model waits for a tool's answer; it would go on "
                    "and invent the answer",
                )
            return

    def _stop_left_out(self, declared: set[int], what: str) -> None:
        text = f"{GENERATION_NAME} stops at {sorted(declared)} and leaves out {what}."
        self._add("stop-ids-reduced", "warning", text, GENERATION_NAME)

    def _stop_ids(self) -> tuple[int, ...]:
        try:
            return tuple(stop_token_ids(self.source.folder, self.files.ids))
        except GemmaNeuronError:
            return ()  # the file it failed on is a finding
