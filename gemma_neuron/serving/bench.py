"""Load on any OpenAI-shaped server, as a client sees it: closed loop (N at once) or open loop (N a second).

Times are of this process' monotonic clock. Time to first token: from sending to the first text; time per output token:
from there to the last text, over the tokens between, by the server's own count where it gives one.
"""

from __future__ import annotations

import json
import queue
import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gemma_neuron.errors import EnvironmentProblem
from gemma_neuron.serving.address import api_base, key_headers
from gemma_neuron.settings import KEY_VARIABLE

if TYPE_CHECKING:
    import httpx2

SILENCE_SECONDS = 600.0
ERROR_CHARACTERS = 400
"""Of what a server says about a failure."""
WORDS = (
    "the keeper wrote down wind and waves in a green notebook before stone towers were built by hand on every "
    "point along that coast where ships had passed for years without any light but stars"
).split()
PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One run. Either `concurrency` requests at once, or `rate` a second on average, whatever is under way."""

    requests: int
    concurrency: int | None = None
    rate: float | None = None
    input_words: int = 128
    output_tokens: int = 64
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} a second"


@dataclass(slots=True)
class Measured:
    """One request. `first` and `last`: seconds after it was sent."""

    first: float | None = None
    last: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""
    heard: bool = False
    """Whether an answer has begun."""


@dataclass(slots=True)
class Target:
    """A server: its URL up to /v1, and the model it is asked for."""

    url: str
    model: str
    ignore_eos: bool
    headers: dict[bytes, bytes] = field(default_factory=dict)


def find_target(url: str, model: str | None, ignore_eos: bool | None) -> Target:
    """Ask the server what it serves. `ignore_eos` None: unless the server refuses it, so that answers are of equal
    length wherever that can be had.

    Raises UsageError for no URL, EnvironmentProblem for a server that does not answer.
    """
    import httpx2

    base, headers = api_base(url), key_headers()
    try:
        reply = httpx2.get(f"{base}/models", headers=headers, timeout=10.0)
        reply.raise_for_status()
        found = str(reply.json()["data"][0]["id"])
    except (httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise EnvironmentProblem(
            f"{base}/models does not answer as an OpenAI-shaped server does: {error}.",
            f"Is it running? A key is taken from {KEY_VARIABLE}.",
        ) from error
    target = Target(base, model or found, ignore_eos is not False, headers)
    if ignore_eos is None:
        with httpx2.Client(timeout=SILENCE_SECONDS, headers=headers) as client:
            said = _ask(client, target, "the", 1).error
        target.ignore_eos = not (said.startswith("status 4") and "ignore_eos" in said)
    return target


def run_load(target: Target, load: Load) -> dict[str, Any]:
    """Run it, one warm-up request ahead; the run's figures as `bench --json` gives them."""
    import httpx2

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx2.Timeout(SILENCE_SECONDS, connect=10.0, pool=None)
    prompts = [prompt_of(load, i) for i in range(load.requests)]
    with httpx2.Client(limits=limits, timeout=timeout, headers=target.headers) as client:
        warm = _ask(client, target, prompt_of(load, -1), min(load.output_tokens, 4))
        if warm.error:
            raise EnvironmentProblem(
                f"The first request to {target.url} failed: {warm.error}", "Look at the server."
            )
        started = time.monotonic()
        run = _closed if load.rate is None else _open
        found = run(client, target, load, prompts)
        seconds = time.monotonic() - started
    return _figures(load, found, seconds)


def prompt_of(load: Load, index: int) -> str:
    """Text of a run's request: words in random order; each begins differently, so that no cache of beginnings helps."""
    rng = random.Random(f"{load.seed} {index}")
    return f"{index + 2}. " + " ".join(rng.choices(WORDS, k=load.input_words)) + " and"


def _closed(
    client: httpx2.Client, target: Target, load: Load, prompts: Sequence[str]
) -> list[Measured]:
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for prompt in prompts:
        waiting.put(prompt)
    found: list[Measured] = []

    def work() -> None:
        while True:
            try:
                prompt = waiting.get_nowait()
            except queue.Empty:
                return
            found.append(_ask(client, target, prompt, load.output_tokens))

    _all([threading.Thread(target=work) for _ in range(load.concurrency or 1)])
    return found


def _open(
    client: httpx2.Client, target: Target, load: Load, prompts: Sequence[str]
) -> list[Measured]:
    assert load.rate is not None
    rng, found, threads = random.Random(load.seed), [], []
    due = time.monotonic()
    for prompt in prompts:
        time.sleep(max(due - time.monotonic(), 0.0))
        thread = threading.Thread(
            target=lambda p=prompt: found.append(_ask(client, target, p, load.output_tokens))
        )
        thread.start()
        threads.append(thread)
        due += rng.expovariate(load.rate)
    for thread in threads:
        thread.join()
    return found


def _all(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _ask(client: httpx2.Client, target: Target, prompt: str, tokens: int) -> Measured:
    """One streamed completion.

    A server may close a connection that it kept just when the next request comes on it: what was not answered with a
    byte is asked once more, as clients do, and the time of both counts.
    """
    import httpx2

    body: dict[str, Any] = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    found, sent = Measured(), time.monotonic()
    try:
        try:
            _hear(client, target, body, found, sent)
        except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError):
            if found.heard:
                raise
            _hear(client, target, body, found, sent)
    except Exception as error:  # what is no answer fails its request, not the run
        found.error = f"{type(error).__name__}: {error}"
    if not found.error and found.first is None:
        found.error = "an answer without text"
    return found


def _hear(
    client: httpx2.Client, target: Target, body: dict[str, Any], found: Measured, sent: float
) -> None:
    """Ask, and note what comes and when."""
    with client.stream("POST", f"{target.url}/completions", json=body) as reply:
        found.heard = True
        if reply.status_code != 200:
            said = reply.read()[:ERROR_CHARACTERS].decode(errors="replace")
            found.error = f"status {reply.status_code}: {said}"
            return
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                _take(found, json.loads(line[6:]), time.monotonic() - sent)


def _take(found: Measured, chunk: Any, now: float) -> None:
    """One event of the stream; some servers count tokens in each, some in one of its own at the end."""
    if "error" in chunk:
        found.error = str(chunk["error"])[:ERROR_CHARACTERS]
        return
    if any(choice.get("text") for choice in chunk["choices"]):
        found.first, found.last = now if found.first is None else found.first, now
        found.tokens += 1
    if usage := chunk.get("usage"):
        found.tokens = usage["completion_tokens"]
        found.prompt_tokens = usage["prompt_tokens"]


def _figures(load: Load, found: Sequence[Measured], seconds: float) -> dict[str, Any]:
    good = [one for one in found if not one.error]
    first = [one.first for one in good if one.first is not None]
    each = [
        (one.last - one.first) / (one.tokens - 1)
        for one in good
        if one.first is not None and one.tokens > 1
    ]
    tokens = sum(one.tokens for one in good)
    return {
        "concurrency": load.concurrency,
        "rate": load.rate,
        "requests": len(found),
        "errors": len(found) - len(good),
        "error": next((one.error for one in found if one.error), None),
        "ttft_ms": percentiles(first),
        "tpot_ms": percentiles(each),
        "tokens_per_second": round(tokens / seconds, 2),
        "prompt_tokens": sum(one.prompt_tokens for one in good),
        "output_tokens": tokens,
        "output_tokens_a_request": round(tokens / len(good), 2) if good else None,
        "seconds": round(seconds, 3),
    }


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p90, p99 in milliseconds, interpolated; None of nothing."""
    if not values:
        return {f"p{p}": None for p in PERCENTS}
    if len(values) == 1:
        return {f"p{p}": round(values[0] * 1000, 3) for p in PERCENTS}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"p{p}": round(cuts[p - 1] * 1000, 3) for p in PERCENTS}
