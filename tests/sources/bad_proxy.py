"""A proxy before an S3 server that does what bad networks and busy stores do, drawn by a seed.

Each request meets at most one fault: refused with 500 or 503, delayed, its connection cut before or after the store
acted, its answer cut short, shortened as if that were all, or with one byte flipped. Uploads are not flipped: their
checksum is the store's to compare, which no test server does.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from tests.loopback import passed_on, serving

FAULTS = ("500", "503", "delay", "cut-before", "cut-after", "cut-answer", "shorten", "flip")
OWN = {"date", "server"}
"""Headers that the answer gets from this proxy."""
SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code>"
    b"<Message>Please reduce your request rate.</Message></Error>"
)


class BadProxy:
    """`share`: of requests that meet a fault; `met`: fault → how often, of those that could be done."""

    def __init__(self, upstream: str, share: float, seed: str) -> None:
        self.upstream, self.share = upstream, share
        self.met: Counter[str] = Counter()
        self.requests = 0
        self.address = ""
        self._chance, self._lock = random.Random(seed), threading.Lock()

    def draw(self) -> tuple[str, float]:
        """A fault or none, and a number in [0, 1) that says where or how long."""
        with self._lock:
            self.requests += 1
            bad = self._chance.random() < self.share
            return (self._chance.choice(FAULTS) if bad else ""), self._chance.random()

    def note(self, fault: str) -> None:
        with self._lock:
            self.met[fault] += 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: BadProxy

    def log_message(self, *_: object) -> None:
        pass

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault, where = self.proxy.draw()
        if fault in ("500", "503"):
            self.proxy.note(fault)
            return self._answer(int(fault), SLOW_DOWN if fault == "503" else b"", {})
        if fault == "delay":
            self.proxy.note(fault)
            time.sleep(where)
        if fault == "cut-before":
            self.proxy.note(fault)
            self.close_connection = True
            return None
        answer = passed_on(self, self.proxy.upstream, body)
        if fault == "cut-after":
            self.proxy.note(fault)
            self.close_connection = True
            return None
        headers = {k: v for k, v in answer.headers if k.lower() not in OWN}
        if self.command == "HEAD":
            headers["Content-Length"] = answer.length
        return self._answer(answer.status, answer.data, headers, fault, where)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on

    def _answer(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str],
        fault: str = "",
        where: float = 0.0,
    ) -> None:
        """Objects alone are shortened or flipped: a listing or an error document has nothing to be checked by."""
        is_object = self.command == "GET" and status in (200, 206) and "list-type" not in self.path
        at = int(where * len(data))
        if fault in ("cut-answer", "shorten", "flip") and is_object and data:
            self.proxy.note(fault)
            if fault == "flip":
                data = data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :]
        else:
            fault = ""
        length = at if fault == "shorten" else len(data)
        sent = data[:at] if fault in ("shorten", "cut-answer") else data
        self.send_response(status)  # with a Date of its own
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(sent)
        if fault == "cut-answer":
            self.close_connection = True


@contextmanager
def bad_proxy(upstream: str, share: float, seed: str) -> Iterator[BadProxy]:
    proxy = BadProxy(upstream, share, seed)
    with serving(_Handler, proxy=proxy) as port:
        proxy.address = f"http://127.0.0.1:{port}"
        yield proxy
