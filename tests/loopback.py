"""Servers on loopback for stand-ins and proxies: run while a block lasts, and a request passed on to another server."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}
"""Headers of one connection, which a proxy does not pass on."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], **facts: object) -> Iterator[int]:
    """A thread a request, on the port it yields. `facts`: attributes of the handler's class for this server."""
    made = type("Handler", (handler,), facts)
    server = ThreadingHTTPServer(("127.0.0.1", 0), made)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server behind said, without the headers of its connection."""

    status: int
    headers: tuple[tuple[str, str], ...]
    data: bytes
    length: str
    """Content-Length: of a HEAD's answer as declared, else of `data`."""


def passed_on(request: BaseHTTPRequestHandler, upstream: str, body: bytes) -> Answer:
    """Ask `upstream` (http://host:port) what `request` asked, with `body`."""
    connection = http.client.HTTPConnection(upstream.removeprefix("http://"), timeout=60)
    headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP}
    connection.request(request.command, request.path, body, headers)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    kept = tuple((k, v) for k, v in answer.getheaders() if k.lower() not in HOP)
    declared = answer.getheader("Content-Length") or "0"
    length = declared if request.command == "HEAD" else str(len(data))
    return Answer(answer.status, kept, data, length)
