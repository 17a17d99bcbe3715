"""What `/metrics` tells, in Prometheus' text format: counts and times of requests, and the state of each replica."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gemma_neuron.serving.source import TokenSource

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "gemma_neuron_"
FIRST_TOKEN_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
REQUEST_SECONDS = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)


class Meter:
    """Counts what requests do. Called on the event loop."""

    def __init__(self, source: TokenSource) -> None:
        self._registry = CollectorRegistry()
        by = ["replica"]

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, text, by, registry=self._registry, buckets=buckets)

        def counter(name: str, text: str, labels: list[str]) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self._registry)

        self._first = histogram(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            FIRST_TOKEN_SECONDS,
        )
        self._between = histogram(
            "inter_token_seconds", "Between two tokens of one answer.", TOKEN_SECONDS
        )
        self._whole = histogram(
            "request_seconds", "From a request's arrival to its answer's end.", REQUEST_SECONDS
        )
        self._made = counter("generated_tokens", "Tokens made.", by)
        self._prompt = counter("prompt_tokens", "Tokens of prompts that were accepted.", [])
        self._ended = counter("requests", "Answers by how they ended.", ["end"])
        self._refused = counter("refused_requests", "Requests that were refused.", ["status"])
        self._registry.register(_Replicas(source))

    def accepted(self, prompt_tokens: int) -> None:
        self._prompt.inc(prompt_tokens)

    def token(self, replica: int, seconds: float, *, first: bool) -> None:
        """A token of an answer, `seconds` after the request or after the token before it."""
        (self._first if first else self._between).labels(replica).observe(seconds)
        self._made.labels(replica).inc()

    def ended(self, replica: int, seconds: float, end: str) -> None:
        self._whole.labels(replica).observe(seconds)
        self._ended.labels(end).inc()

    def refused(self, status: int) -> None:
        self._refused.labels(status).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Replicas(Collector):
    """The replicas as they are when asked."""

    def __init__(self, source: TokenSource) -> None:
        self._source = source

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return ()

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        states = self._source.states()
        queue = self._source.waiting() + sum(state.load.waiting for state in states)
        yield GaugeMetricFamily(
            PREFIX + "queue_requests", "Requests that wait for a slot.", value=queue
        )
        gauges = (
            ("replica_ready", "1 while the replica serves.", lambda s: float(s.phase == "ready")),
            ("batch_requests", "Requests in slots.", lambda s: float(s.load.running)),
            (
                "kv_used_ratio",
                "Positions of KV state that hold running requests, of all.",
                lambda s: s.load.kv_tokens / max(s.load.kv_capacity, 1),
            ),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["replica"])
            for state in states:
                gauge.add_metric([str(state.index)], value(state))
            yield gauge
        restarts = CounterMetricFamily(
            PREFIX + "replica_restarts", "Times it was replaced.", labels=["replica"]
        )
        reused = GaugeMetricFamily(
            PREFIX + "prefix_tokens",
            "Prompt tokens not read again since the replica started.",
            labels=["replica"],
        )
        for state in states:
            restarts.add_metric([str(state.index)], state.restarts)
            reused.add_metric([str(state.index)], state.load.prefix_tokens)
        yield restarts
        yield reused
