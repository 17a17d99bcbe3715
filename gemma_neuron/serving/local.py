"""`serve-local`: the gate, the process, its signals.

In: a port and a way to make its runners. Blocks until told to stop; SIGTERM lets running answers finish.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn

from gemma_neuron.chat import load_chat_assets
from gemma_neuron.elastic.embedded import GOODBYE_SECONDS, EmbeddedEngine
from gemma_neuron.elastic.engine import DEADLINE_SECONDS
from gemma_neuron.elastic.events import EventLog, Sink
from gemma_neuron.errors import EnvironmentProblem, UnvalidatedPortError, UsageError
from gemma_neuron.serving import replica
from gemma_neuron.serving.access import LOOPBACK_NAMES, AccessRules
from gemma_neuron.serving.connections import BACKLOG, Connection, allow_descriptors
from gemma_neuron.serving.http import create_app, replicas
from gemma_neuron.serving.replica import LOAD_SECONDS, LoadRunner, ReplicaSetup
from gemma_neuron.serving.replicas import Replicas
from gemma_neuron.serving.service import (
    ServerInfo,
    Service,
    placeholder_ids,
    sampling_defaults,
)
from gemma_neuron.settings import KEY_VARIABLE
from gemma_neuron.tokenizer import TOKENIZER_FILE

if TYPE_CHECKING:
    from gemma_neuron.port import Port

CLOSE_SECONDS = 30.0
"""For replicas to end in order: a killed one can leave NeuronCores unusable."""
SHORT_GOODBYE_SECONDS = 1.0
"""For a failed replica that holds no device: until it has ended, no other fault is seen."""
log = logging.getLogger(__name__)
Announce = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Knobs of `serve` beyond address and gate."""

    no_auth: bool = False
    allow_hosts: tuple[str, ...] = ()
    """Names the server is also asked by, behind a proxy for one."""
    allow_control_text: bool = False
    drain_seconds: float = 60.0
    request_seconds: float = 600.0
    silence_seconds: float = DEADLINE_SECONDS
    """Without a sign of life, after which a replica counts as hung."""
    step_seconds: float | None = None
    load_seconds: float = LOAD_SECONDS
    """See `ReplicaSetup`."""
    preload: tuple[str, ...] = ()
    """Modules that every replica needs: loaded once, before replicas are forked."""
    keeps_devices: bool = False
    """See `Backend.keeps_devices`."""


def serve(
    port: Port,
    load: LoadRunner,
    *,
    replicas: int = 1,
    host: str = "127.0.0.1",
    http_port: int = 8000,
    unvalidated: bool = False,
    announce: Announce,
    options: ServeOptions | None = None,
) -> None:
    """Serve a port until SIGTERM (returns) or Ctrl-C (KeyboardInterrupt after the same drain).

    `load` is called with a replica's index in that replica's process, after the socket answers `/health/live`.
    `announce` gets {url, pid, replicas} when all are loaded. Raises UnvalidatedPortError unless the verdict is
    `works` or `unvalidated`; whatever `load` raises is raised here, and ElasticRuntimeError when no replica can be
    kept alive.
    """
    options = options or ServeOptions()
    verdict = port.verdict()
    if not unvalidated:
        check_gate(port, verdict)
    rules = access_rules(
        host,
        os.environ.get(KEY_VARIABLE) or None,
        no_auth=options.no_auth,
        allow_hosts=options.allow_hosts,
    )
    connection = allow_descriptors()
    listener = listen(host, http_port)
    try:
        service = make_service(port, load, replicas, verdict, options)
    except BaseException:
        listener.close()
        raise
    url = f"http://{_in_url(host)}:{listener.getsockname()[1]}"
    server = _Server(_config(service, rules, connection))
    try:
        signalled = asyncio.run(
            _Serving(server, service, listener).run(url, announce, options.drain_seconds)
        )
    finally:
        listener.close()
        service.engine.close(CLOSE_SECONDS)
        if service.assets.template is not None:
            service.assets.template.close()
    if signalled == signal.SIGINT:
        raise KeyboardInterrupt
    if service.engine.failure is not None and not signalled:
        raise service.engine.failure


def make_service(
    port: Port, load: LoadRunner, count: int, verdict: str | None, options: ServeOptions
) -> Service:
    """The port's text side, checked, and replicas not yet started."""
    folder = port.source_folder
    assets = load_chat_assets(folder)
    if assets.template is not None:
        assets.template.check()
    info = ServerInfo(
        model_id=model_id(port),
        validated=verdict == "works",
        verdict=verdict,
        allow_control_text=options.allow_control_text,
        request_seconds=options.request_seconds,
        defaults=sampling_defaults(folder),
        port=port,
    )
    setup = ReplicaSetup(
        load=load,
        banned_ids=placeholder_ids(folder),
        tokenizer_file=folder.resolve() / TOKENIZER_FILE,
        stop_ids=assets.stop_ids,
        silence_seconds=options.silence_seconds,
        step_seconds=options.step_seconds,
        load_seconds=options.load_seconds,
        keeps_devices=options.keeps_devices,
    )
    held = Replicas(count, setup, replica_engine(options), EventLog(_sink(port)))
    return Service(held, assets, info)


def replica_engine(options: ServeOptions) -> EmbeddedEngine:
    """What replicas are processes of."""
    goodbye = GOODBYE_SECONDS if options.keeps_devices else SHORT_GOODBYE_SECONDS
    return EmbeddedEngine(preload=[*options.preload, replica.__name__], goodbye_seconds=goodbye)


def _sink(port: Port) -> Sink:
    """Events of replicas go to the port's events.jsonl, where that can be written."""

    def write(event: str, facts: dict[str, Any]) -> None:
        try:
            port.append("events.jsonl", {"event": event} | facts)
        except OSError:
            log.info("%s %s", event, facts)

    return write


def _config(service: Service, rules: AccessRules, connection: type[Connection]) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(service, rules),
        log_config=None,
        log_level="error",  # a warning for each connection that sends no HTTP would fill a log
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=10,
        lifespan="off",
        http=connection,
        backlog=connection.backlog,
    )


def check_gate(port: Port, verdict: str | None) -> None:
    """Raise UnvalidatedPortError unless the verdict is `works`."""
    if verdict == "works":
        return
    found = "has not been validated" if verdict is None else f"has the verdict {verdict!r}"
    raise UnvalidatedPortError(
        f"{port.path} {found}; only a port with the verdict 'works' is served.",
        f"Run `gemma-neuron validate {port.path}`, or serve it anyway with --unvalidated.",
    )


def model_id(port: Port) -> str:
    """The source's own name: the hub id, or the last part of the path or URI."""
    source = port.record.source
    return source.uri if source.kind == "hub" else source.uri.rstrip("/").rpartition("/")[2]


def access_rules(
    host: str, key: str | None, *, no_auth: bool, allow_hosts: Sequence[str] = ()
) -> AccessRules:
    """Whom to let in. Raises UsageError for an address beyond loopback without a key."""
    if not is_loopback(host) and key is None and not no_auth:
        raise UsageError(
            f"--host {host} can be reached from other machines and no API key is set.",
            f"Set {KEY_VARIABLE}, or pass --no-auth to serve everyone who can reach the address.",
        )
    key = None if no_auth else key
    names = LOOPBACK_NAMES | {name.lower() for name in (host, *allow_hosts) if name}
    if host not in ("0.0.0.0", "::", ""):
        return AccessRules(hosts=names, api_key=key)
    if key is not None:
        return AccessRules(hosts=None, api_key=key)
    own = {socket.gethostname().lower(), socket.getfqdn().lower()}
    return AccessRules(hosts=names | own, addresses=True)


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket; port 0 takes a free one. Raises EnvironmentProblem."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise EnvironmentProblem(
            f"Cannot listen on {host} port {port}: {error}.",
            "Choose another --port (0 takes any free one) or --host.",
        ) from error


def _in_url(host: str) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, which ends the process by the signal it caught."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Serving:
    """One run of the server: start, announce, wait for a signal, drain."""

    def __init__(self, server: _Server, service: Service, listener: socket.socket) -> None:
        self._server = server
        self._service = service
        self._engine = service.engine
        self._listener = listener
        self._signals: list[signal.Signals] = []
        self._signalled = asyncio.Event()

    async def run(self, url: str, announce: Announce, drain_seconds: float) -> int:
        """Returns the signal that ended it, or 0 when the model could not be loaded."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.01)
        self._engine.start()
        if await self._loaded():
            announce({"url": url, "pid": os.getpid(), "replicas": replicas(self._service)})
            while not self._signalled.is_set() and self._engine.phase != "failed":
                await asyncio.sleep(0.1)
            if not await self._drain(drain_seconds) and len(self._signals) < 2:
                # Everyone is told before uvicorn cuts off what still runs.
                await asyncio.to_thread(self._engine.close, CLOSE_SECONDS)
        self._server.should_exit = True
        await serving
        return int(self._signals[0]) if self._signals else 0

    async def _loaded(self) -> bool:
        """Wait for all replicas without holding up a signal; False when none can be or it was told to end.

        One that went down meanwhile is not waited for: the others serve, and it comes back as it can.
        """
        while self._engine.phase != "failed" and not self._signalled.is_set():
            states = self._engine.states()
            settled = all(state.phase == "ready" or state.restarts > 0 for state in states)
            if settled and self._engine.phase == "ready":
                return True
            await asyncio.sleep(0.02)
        return False

    async def _drain(self, seconds: float) -> bool:
        """Let running answers end; the listener stays open, so that readiness is seen to be gone. Whether all did."""
        deadline = asyncio.get_running_loop().time() + seconds
        self._engine.drain(0.0)
        while len(self._signals) < 2 and asyncio.get_running_loop().time() < deadline:
            if await asyncio.to_thread(self._engine.drain, 0.2):
                return True
        return False

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals.append(number)
        self._signalled.set()
        if len(self._signals) > 1:
            self._server.force_exit = True
            if number == signal.SIGINT:
                log.warning("stopping at once")
