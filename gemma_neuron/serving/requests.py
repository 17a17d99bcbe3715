"""What the engine is asked and what it tells: token ids, never text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]
"""`tool_calls`: of a chat answer that stopped behind one; the engine itself never says it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. The same values, seed and choice give the same tokens, always."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    """Index among the `n` answers to one prompt; each has its own random stream."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Counts the prompt too, as in transformers; the other two count the answer only, as at OpenAI."""
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must be: `text` is a JSON schema or a Lark grammar in llguidance's dialect.

    `thought`: ids that open and close a thought; one may stand before the answer and is not held to it.
    `opening`: the token that what is held begins with, as often as it comes, other text being free. None: all is held.
    """

    kind: Literal["json_schema", "lark"]
    text: str
    thought: tuple[int, int] | None = None
    opening: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One answer to one prompt."""

    prompt_ids: tuple[int, ...]
    tag: int = 0
    """Stands in each of this request's events, to tell the answers of one call apart."""
    max_tokens: int
    """0 reads the prompt only (with `prompt_logprobs`)."""
    stop_ids: frozenset[int]
    sampling: Sampling = Sampling()
    logprobs: int | None = None
    """Alternatives per token whose log-probability is told; None tells none, 0 the chosen token's only."""
    prompt_logprobs: bool = False
    """Tell them for the prompt as well; it is then read through the scoring graph."""
    grammar: Grammar | None = None
    replay: tuple[int, ...] = ()
    """Tokens that were made and told before, by a replica that is gone: they go through the decode graph as they
    did then (prefilling them would round differently) and are not told again."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the model (before temperature and cuts) and the best others."""

    token: int
    logprob: float | None
    """None for a text's first token, which nothing predicts."""
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """One thing that happened to a request; the one with `finish` is its last."""

    tag: int
    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt: tuple[TokenLogprob, ...] | None = None
    """Scores of the prompt's tokens, told once before the first token when asked for."""
    finish: FinishReason | None = None
    error: str = ""
    replica: int = 0
    """Which replica it happened on."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded runner can do."""

    vocab: int
    slots: int
    max_context: int
    chunk: int = 0
    """Tokens of a prompt that are read at once."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a runner is. `kv_tokens` of `kv_capacity` positions of KV state hold running requests."""

    running: int = 0
    waiting: int = 0
    kv_tokens: int = 0
    kv_capacity: int = 0
    prefix_tokens: int = 0
    """Prompt tokens so far that were not read again because their slot still held them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """One replica as `/health/ready` and `/metrics` tell of it; `seconds`: since it has been in `phase`."""

    index: int
    pid: int
    phase: Literal["starting", "loading", "ready", "down"]
    seconds: float
    restarts: int = 0
    load: Load = Load()
