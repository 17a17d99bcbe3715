"""The questions a model is judged on, and its sanity text: `validation.toml`.

In: the file beside the checkpoint, one the user names, or the packaged general set. Out: QuestionSet.
Refused: a file that is not such a set (UsageError with the first problem).
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from gemma_neuron.artifacts import digest_bytes
from gemma_neuron.errors import UsageError

FILE_NAME = "validation.toml"
GENERAL = Path(__file__).parent.parent / "data" / "validation" / "general.toml"
Kind = Literal["fact", "multi-turn", "system", "thinking", "tool", "json", "completion"]
LIMIT = 48
"""New tokens a question may take unless it names its own limit."""
MOST_KEY_PARTS = 100
LEAST_OF_KIND = 2
MOST_BYTES = 4 * 1024 * 1024
"""Of a file: one comes with every checkpoint, and a TOML reader takes its time over a hostile one."""


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("is blank")
    return text


Words = Annotated[str, AfterValidator(_not_blank)]
"""Text that says something: an empty answer is contained in whatever a model says."""


class Turn(BaseModel):
    """One message of a conversation, in OpenAI's form. Further keys (`tool_calls`, `name`) are the template's."""

    model_config = ConfigDict(frozen=True, extra="allow")

    role: Words
    content: str = ""


class Question(BaseModel):
    """One question. Any of `answers`, contained in the generated text, is right.

    `kind` completion: `prompt` is plain text that the model goes on with (base models). `tool_call` is
    the function the first answer must call; `tool_result` is then given back and `answers` judge the
    final text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    answers: tuple[Words, ...] = Field(min_length=1)
    kind: Kind = "fact"
    thinking: bool = False
    tools: str = ""
    tool_call: str = ""
    tool_result: str = ""
    limit: int = Field(default=LIMIT, ge=1)

    @model_validator(mode="after")
    def _whole(self) -> Question:
        if bool(self.prompt) == bool(self.messages):
            raise ValueError("give either `prompt` or `messages`")
        if self.kind == "completion" and not self.prompt:
            raise ValueError("kind completion needs `prompt`")
        if self.kind == "tool" and not (self.tools and self.tool_call and self.tool_result):
            raise ValueError("kind tool needs `tools`, `tool_call` and `tool_result`")
        if self.tools and not _list_of_objects(self.tools):
            raise ValueError("`tools` must be a JSON list of objects")
        if self.prompt and not self.prompt.strip():
            raise ValueError("`prompt` is blank")
        for message in self.messages:
            turn = Turn.model_validate(message)
            if not turn.content.strip() and not message.get("tool_calls"):
                raise ValueError(f"a message of {turn.role} has no content")
            json.dumps(message, allow_nan=False)  # dates and NaN, which TOML has, are no text
        if self.messages and self.messages[-1]["role"] == "assistant":
            raise ValueError("`messages` must end with what the model is to answer")
        return self

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The conversation up to the answer."""
        return [*self.messages] if self.messages else [{"role": "user", "content": self.prompt}]

    @property
    def tool_list(self) -> list[dict[str, Any]] | None:
        return cast("list[dict[str, Any]]", json.loads(self.tools)) if self.tools else None


def _list_of_objects(text: str) -> bool:
    found = json.loads(text)
    return isinstance(found, list) and all(isinstance(item, dict) for item in found)


def spread(
    questions: tuple[tuple[str, Question], ...], count: int
) -> tuple[tuple[str, Question], ...]:
    """At most `count` of them, in the file's order: of each kind its share of the file and at least
    LEAST_OF_KIND, evenly over its questions."""
    if len(questions) <= count:
        return questions
    by_kind: dict[str, list[str]] = {}
    for name, question in questions:
        by_kind.setdefault(question.kind, []).append(name)
    share = {kind: min(LEAST_OF_KIND, len(names)) for kind, names in by_kind.items()}
    while sum(share.values()) < count:  # to the kind that is furthest below its share
        kind = min(share, key=lambda k: share[k] / len(by_kind[k]))
        share[kind] += 1
    chosen = {
        by_kind[kind][index * len(by_kind[kind]) // n]
        for kind, n in share.items()
        for index in range(n)
    }
    return tuple(item for item in questions if item[0] in chosen)


class Sanity(BaseModel):
    """Text a working model finds likelier than the same tokens shuffled."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: Words


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1]
    sanity: Sanity
    questions: tuple[Question, ...] = Field(min_length=1)


class QuestionSet(BaseModel):
    """A set with where it came from; `digest` is of the file's bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    origin: str
    digest: str
    sanity: str
    questions: tuple[Question, ...]

    def for_scope(self, scope: str) -> tuple[tuple[str, Question], ...]:
        """(name, question) of the scope's questions: completions for base, the rest for chat.

        A name is the question's place in the file, so it stays when others are left out.
        """
        named = ((f"q{index:02d}", q) for index, q in enumerate(self.questions))
        return tuple(
            (name, q) for name, q in named if (q.kind == "completion") == (scope == "base")
        )


def read_questions(path: Path, origin: str = "") -> QuestionSet:
    """Read one question file. Raises UsageError naming the file and the first problem."""
    try:
        data = _bytes(path)
        text = data.decode("utf-8-sig")  # editors on Windows put a mark in front
        _require_short_keys(text)
        content = tomllib.loads(text)
        content["schema_version"] = content.pop("schema", None)
        file = _File.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]).replace("schema_version", "schema")
        raise UsageError(
            f"{path} is no question set: {where}: {first['msg']}.",
            'It needs schema = 1, [sanity] text = "…" and [[questions]] with prompt and answers.',
        ) from error
    except RecursionError as error:
        raise UsageError(
            f"{path} cannot be read as a question set: it is nested too deeply.",
            "It must be UTF-8 TOML.",
        ) from error
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read as a question set: {error}.", "It must be UTF-8 TOML."
        ) from error
    return QuestionSet(
        origin=origin or str(path),
        digest=digest_bytes(data),
        sanity=file.sanity.text,
        questions=file.questions,
    )


def _require_short_keys(text: str) -> None:
    """tomllib's time grows with the square of a dotted key's parts: minutes for a file of a few dozen kilobytes."""
    for number, line in enumerate(text.splitlines(), 1):
        header, key = line.lstrip().startswith("["), line.partition("=")
        if (header or key[1]) and key[0].count(".") > MOST_KEY_PARTS:
            raise ValueError(f"line {number}: a key of more than {MOST_KEY_PARTS} parts")


def _bytes(path: Path) -> bytes:
    """The file's bytes. Raises OSError, ValueError when there are too many."""
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"more than {MOST_BYTES:,} bytes")
    return data


def find_questions(chosen: Path | None, folders: tuple[Path, ...]) -> QuestionSet:
    """The user's file, else the checkpoint's `validation.toml`, else the packaged general set."""
    if chosen is not None:
        return read_questions(chosen)
    for folder in folders:
        if (folder / FILE_NAME).is_file():
            return read_questions(folder / FILE_NAME, f"the checkpoint's {FILE_NAME}")
    return read_questions(GENERAL, "the packaged general set")
