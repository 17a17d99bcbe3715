"""Answers held to a JSON schema or a grammar, by llguidance: which tokens may come next, [vocab] bool.

Limits: of a schema's size, of the work to compile it and of the work a step may take; what passes them is refused
or ends its request, and never slows the others.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gemma_neuron.serving.call_schema import parameters_of
from gemma_neuron.serving.requests import Grammar
from gemma_neuron.serving.sampling import Allowed

if TYPE_CHECKING:
    import llguidance

log = logging.getLogger(__name__)
SCHEMA_BYTES = 64 * 1024
KEPT = 32
"""Compiled grammars kept for the next request with the same one."""
LIMITS: dict[str, Any] = {
    # llguidance's own units, at its stated speeds (some 50,000 a millisecond to build, 14,000 to 20,000 in a step):
    # at most about 100 ms to build a grammar and 10 ms a token.
    "initial_lexer_fuel": 5_000_000,
    "step_lexer_fuel": 150_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,  # 1 to 2 kB each
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


class GrammarError(Exception):
    """A schema or grammar that cannot be, or that passed its limits; the text is for the client."""


class Grammars:
    """Compiles grammars for one tokenizer. `vocab`: the logits' width; `stop_ids` may end a finished answer."""

    def __init__(self, tokenizer_file: Path, vocab: int, stop_ids: Iterable[int]) -> None:
        self._file, self._vocab, self._stop_ids = tokenizer_file, vocab, sorted(stop_ids)
        self._lock = threading.Lock()
        self._made: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()
        self._tokenizer: llguidance.LLTokenizer | None = None

    def compile(self, grammar: Grammar) -> GrammarState | CallsState:
        """A state at the answer's begin. Raises GrammarError."""
        with self._lock:
            matcher = self._made.get(grammar)
        if matcher is None:
            matcher = self._compiled(grammar)
            with self._lock:
                self._made[grammar] = matcher
                while len(self._made) > KEPT:
                    self._made.popitem(last=False)
        if grammar.opening is not None:
            return CallsState(matcher, self._vocab, grammar.opening)
        return GrammarState(matcher.deep_copy(), self._vocab, grammar.thought)

    def prepare(self) -> None:
        """Make what every grammar needs, while loading: no other thread of the process runs meanwhile, for a second or
        more with a large vocabulary. A tokenizer that cannot be used is told of by `compile`."""
        if find_spec("llguidance") is None:
            return
        try:
            self._known_tokenizer()
        except Exception as error:
            log.warning("no answer can be held to a schema: %s: %s", type(error).__name__, error)

    def _compiled(self, grammar: Grammar) -> llguidance.LLMatcher:
        import llguidance

        text = grammar.text
        if len(text.encode()) > SCHEMA_BYTES:
            raise GrammarError(f"The schema is larger than {SCHEMA_BYTES} bytes.")
        if grammar.kind == "json_schema" and parameters_of(json.loads(text)).endless():
            raise GrammarError("No answer can fit the schema: it needs itself without end.")
        try:
            if grammar.kind == "json_schema":
                # Blanks are the model's choice up to one space or line: a model that only pads would never end.
                options: Any = {"whitespace_pattern": r"[ \n]?"}
                text = llguidance.LLMatcher.grammar_from_json_schema(text, options)
            else:
                text = llguidance.LLMatcher.grammar_from_lark(text)
        except ValueError as error:
            raise GrammarError(f"The schema cannot be used: {error}.") from None
        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(self._known_tokenizer(), text, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(f"The schema cannot be used: {_first_line(matcher.get_error())}")
        first = GrammarState(matcher.deep_copy(), self._vocab, None)
        first.allowed()  # raises for what allows no first token
        return matcher

    def _known_tokenizer(self) -> llguidance.LLTokenizer:
        import llguidance

        with self._lock:
            if self._tokenizer is None:
                text = json.dumps(_plain(json.loads(self._file.read_bytes())))
                self._tokenizer = llguidance.LLTokenizer(
                    text, n_vocab=self._vocab, eos_token=self._stop_ids or None
                )
            return self._tokenizer


class GrammarState:
    """`Constraint` of one answer."""

    def __init__(
        self, matcher: llguidance.LLMatcher, vocab: int, thought: tuple[int, int] | None
    ) -> None:
        self._matcher, self._vocab, self._thought = matcher, vocab, thought
        self._began = self._thinking = False
        self._bits = np.zeros((vocab + 31) // 32, dtype=np.int32)

    def allowed(self) -> Allowed | None:
        """See `Constraint.allowed`. Raises GrammarError past the limits of a step."""
        if self._thinking:
            return None
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        found: Allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little").view(bool)
        found = found[: self._vocab]
        if not self._began and self._thought is not None:
            found[self._thought[0]] = True
        if not found.any():
            raise GrammarError("The answer cannot go on within the schema.")
        return found

    def accept(self, token: int) -> None:
        if self._thinking:
            self._thinking = self._thought is None or token != self._thought[1]
            return
        if not self._began and self._thought is not None and token == self._thought[0]:
            self._began = self._thinking = True
            return
        self._began = True
        self._matcher.consume_token(token)
        self._check()

    def finished(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._matcher.is_accepting())

    def _check(self) -> None:
        if self._matcher.is_error():
            text = _first_line(self._matcher.get_error())
            raise GrammarError(f"The answer could not be held to the schema: {text}")


class CallsState:
    """`Constraint` of an answer that is free but for what stands from each `opening` on, to the grammar's end."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab: int, opening: int) -> None:
        self._fresh, self._vocab, self._opening = matcher, vocab, opening
        self._call: GrammarState | None = None

    def allowed(self) -> Allowed | None:
        """See `Constraint.allowed`. Raises GrammarError past the limits of a step."""
        return None if self._call is None else self._call.allowed()

    def accept(self, token: int) -> None:
        if self._call is None and token == self._opening:
            self._call = GrammarState(self._fresh.deep_copy(), self._vocab, None)
        if self._call is not None:
            self._call.accept(token)
            if self._call.finished():
                self._call = None


def _plain(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json without what a saved pipeline may add to its inputs."""
    return {**tokenizer, "truncation": None, "padding": None}


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else "unknown error"
    return line[:300] + ("" if line.endswith(".") else ".")
