"""Random requests for scripts that compare answers: each as the engine takes it and as a body of /v1/completions."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemma_neuron.chat import ChatAssets
from gemma_neuron.serving.answers import Answer, Reading
from gemma_neuron.serving.requests import (
    GenerationRequest,
    Grammar,
    Sampling,
    TokenEvent,
    TokenLogprob,
)

CONVERSATIONS, TURNS = 5, 5
LONGEST_ANSWER = 50
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer"}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Case:
    """A request: one for each of its `n` choices, and the body that asks for the same."""

    requests: tuple[GenerationRequest, ...]
    body: dict[str, Any]


@dataclass(frozen=True)
class Made:
    """What was made for one choice. `scores`: log-probabilities of the prompt's tokens, where asked for, and of the
    answer's."""

    tokens: tuple[int, ...]
    finish: str
    scores: tuple[TokenLogprob, ...] = ()


def draw_cases(rng: random.Random, assets: ChatAssets, context: int, vocab: int) -> list[Case]:
    """Turns of five conversations, so that beginnings can be reused."""
    out: list[Case] = []
    for _ in range(CONVERSATIONS):
        history = [assets.tokenizer.bos_id]
        for _ in range(TURNS):
            new = rng.randrange(2, context // 4)
            history += [rng.randrange(110, vocab) for _ in range(new)]
            history = history[: context * 7 // 8]
            out.append(draw_case(rng, assets, history, vocab))
    return out


def draw_case(
    rng: random.Random, assets: ChatAssets, ids: Sequence[int], vocab: int, most_choices: int = 3
) -> Case:
    """One request behind `ids`; about half of them greedy."""
    values: dict[str, Any] = {"temperature": 0.0}
    if rng.random() < 0.5:
        values = {
            "temperature": rng.choice([0.7, 1.0, 1.5]),
            "top_p": rng.choice([1.0, 0.9]),
            "top_k": rng.choice([0, 40]),
            "min_p": rng.choice([0.0, 0.0, 0.05]),
        }
    values |= {
        "frequency_penalty": rng.choice([0.0, 0.5]),
        "presence_penalty": rng.choice([0.0, 0.0, 0.7]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.2]),
    }
    biased = rng.random() < 0.2
    bias = {rng.randrange(110, vocab): rng.choice([-100.0, 2.0, 6.0]) for _ in range(8 * biased)}
    seed, length = rng.randrange(2**31), rng.randrange(2, LONGEST_ANSWER)
    body = {"model": "any", "prompt": list(ids), "max_tokens": length, "seed": seed, **values}
    logprobs = rng.choice([None, None, 0, 5])
    told: dict[str, Any] = {
        "logit_bias": {str(token): value for token, value in bias.items()},
        "logprobs": logprobs,
        "echo": logprobs is not None and rng.random() < 0.3,
        "n": min(rng.choice([1, 1, 1, 2, 3]), most_choices),
        "stop": rng.choice([[], [], [], ["e"], [" the", "ing"]]),
    }
    grammar = None
    if rng.random() < 0.15:
        form = {"name": "x", "schema": SCHEMA}
        told["response_format"] = {"type": "json_schema", "json_schema": form}
        grammar = Grammar("json_schema", json.dumps(SCHEMA))
    requests = tuple(
        GenerationRequest(
            prompt_ids=tuple(ids),
            max_tokens=length,
            stop_ids=assets.stop_ids,
            sampling=Sampling(
                seed=seed, choice=choice, logit_bias=tuple(sorted(bias.items())), **values
            ),
            logprobs=logprobs,
            prompt_logprobs=told["echo"],
            grammar=grammar,
        )
        for choice in range(told["n"])
    )
    return Case(requests, body | {key: value for key, value in told.items() if value})


def says(assets: ChatAssets, case: Case, choice: int, made: Made) -> tuple[str, str]:
    """Text and finish reason that a server has to give for these tokens."""
    request = case.requests[choice]
    answer = Answer(assets, tuple(case.body.get("stop", ())), Reading())
    for i, token in enumerate(made.tokens):
        finish: Any = made.finish if i == len(made.tokens) - 1 else None
        if answer.finish is None:
            answer.feed(TokenEvent(tag=0, token=token, finish=finish))
    echo = assets.tokenizer.decode(request.prompt_ids) if "echo" in case.body else ""
    return echo + answer.text, str(answer.finish)
