"""What a compiler's or the runtime's message means, by `data/neuron/messages.json`: a class, an exit code, a remedy.

An unknown message is never given a class: it is shown as it is.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from gemma_neuron.errors import (
    CompileError,
    DoesNotFitError,
    EnvironmentProblem,
    GemmaNeuronError,
    IntegrityError,
)

LONGEST_SHOWN = 2000
LONGEST_READ = 100_000
"""Characters of either end of an output in which its meaning is looked for: 100 MB of it would take minutes, in
which its process does not even give a sign of life."""
OUT_OF_HOST_MEMORY = "out of host memory"  # a kind of messages.json
ERRORS: dict[int, type[GemmaNeuronError]] = {
    4: DoesNotFitError,
    5: IntegrityError,
    6: CompileError,
    8: EnvironmentProblem,
}


CHATTER = re.compile(r"\b(?:TRACE|DEBUG|INFO|USER|WARN|WARNING)\b")
SERIOUS = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b")
LEVEL_WITHIN = 80
"""Characters of a log's line among which its level stands, behind date, process and component."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A recognised message. `retry`: worth one more try. `shown`: the line that was recognised."""

    kind: str
    exit_code: int
    hint: str
    retry: bool
    shown: str


@dataclass(frozen=True, slots=True)
class _Rule:
    kind: str
    pattern: re.Pattern[str]
    exit_code: int
    hint: str
    retry: bool


@cache
def _rules() -> tuple[_Rule, ...]:
    text = resources.files("gemma_neuron.data").joinpath("neuron", "messages.json").read_text()
    return tuple(
        _Rule(
            kind=row["kind"],
            pattern=re.compile(row["pattern"], re.IGNORECASE),
            exit_code=row["exit"],
            hint=row["hint"],
            retry=row.get("retry", False),
        )
        for row in json.loads(text)["rules"]
    )


def diagnose(text: str) -> Diagnosis | None:
    """The first rule that any line matches (the file's order is from specific to general), or None.

    What a log says at a level below error is not looked at: a compiler tells of much that it copes with.
    """
    text = "\n".join(line for line in _ends(text).splitlines() if not _is_chatter(line))
    for rule in _rules():
        found = rule.pattern.search(text)
        if found is not None:
            start = text.rfind("\n", 0, found.start()) + 1
            end = text.find("\n", found.end())
            line = text[start : end if end >= 0 else len(text)].strip()
            return Diagnosis(rule.kind, rule.exit_code, rule.hint, rule.retry, line[:LONGEST_SHOWN])
    return None


def _ends(text: str) -> str:
    if len(text) <= 2 * LONGEST_READ:
        return text
    return f"{text[:LONGEST_READ]}\n{text[-LONGEST_READ:]}"


def _is_chatter(line: str) -> bool:
    head = line[:LEVEL_WITHIN]
    return CHATTER.search(head) is not None and SERIOUS.search(head) is None


def explained(what: str, text: str, unknown: type[GemmaNeuronError], log: str) -> GemmaNeuronError:
    """The error to raise for a message: its class's, or `unknown` with the message verbatim."""
    found = diagnose(text)
    if found is None:
        shown = text.strip()[-LONGEST_SHOWN:] or "no message"
        return unknown(f"{what}: {shown}", log)
    kind = ERRORS[found.exit_code]
    return kind(f"{what}: {found.kind}: {found.shown}", f"{found.hint} {log}".strip())


def chain(error: BaseException) -> str:
    """An exception and all it was raised from, one line each: NxD nests what the compiler said three deep."""
    lines, current = [], error
    while True:
        lines.append(f"{type(current).__name__}: {current}")
        following = current.__cause__ or current.__context__
        if following is None:
            return "\n".join(lines)
        current = following
