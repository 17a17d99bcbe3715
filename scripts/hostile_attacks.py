"""What hostile clients do to a server, each kind a function that goes on until it is told to stop.

`attack(address, stop)` runs in a process of its own, and at the pace of a few clients, not of all that a core can send:
what is to be seen is a server that a client can harm beyond the work it asks for. Whatever the server does to such
connections is its right, but a 500 is none. Raises AssertionError for one.
"""

from __future__ import annotations

import json
import random
import resource
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import count
from multiprocessing.synchronize import Event

Address = tuple[str, int]
Attack = Callable[[Address, Event], None]
BODY_BYTES = 4 * 2**20
"""What the server takes at most."""
PATHS = ("/v1/chat/completions", "/v1/completions")
CHAT = (
    b'{"messages": [{"role": "user", "content": "What is the capital of France?"}], "stream": true'
)
FILES_BESIDE = 512


def head(path: str, length: int, more: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n{more}\r\n"
    ).encode()


def post(path: str, body: bytes) -> bytes:
    return head(path, len(body)) + body


def connect(address: Address, window: int | None = None) -> socket.socket:
    """A connection; `window`: bytes it takes before it is read."""
    found = socket.socket()
    found.settimeout(10.0)
    if window is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    try:
        found.connect(address)
    except OSError:
        found.close()
        raise
    return found


def answer(one: socket.socket, body: bytes) -> None:
    """Wait for the first of what comes, or for the end. Raises AssertionError for a 500."""
    found = b""
    with suppress(OSError):
        found = one.recv(4096)
    if found.startswith(b"HTTP/1.1 500"):
        raise AssertionError(f"500 to {len(body)} bytes: {body[:200]!r}")


def hold(
    address: Address, stop: Event, most: int, say: Callable[[], bytes], window: int | None = None
) -> None:
    """Keep `most` connections that have said something and do nothing more; the oldest are made again, on and on."""
    held: deque[socket.socket] = deque()
    while not stop.is_set():
        with suppress(OSError):
            held.append(connect(address, window))
            held[-1].sendall(say())
        if len(held) > most:
            held.popleft().close()
            stop.wait(0.02)
    while held:
        held.popleft().close()


def half_open(address: Address, stop: Event) -> None:
    """Connections that send nothing, half a head, a head without its body, noise."""
    rng = random.Random(0)
    starts = (
        b"",
        b"POST /v1/chat",
        head(PATHS[0], 100) + b'{"mess',
        b"\x16\x03\x01\x02\x00",
        b"\r\n",
    )
    hold(address, stop, 500, lambda: rng.choice(starts))


def slow_readers(address: Address, stop: Event) -> None:
    """Connections that ask for the largest file, some for tokens with their alternatives, and read nothing."""
    numbers = count()
    page = b"GET /page/vendor/markdown-it.umd.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    stream = post(PATHS[0], CHAT + b', "max_tokens": 16, "logprobs": true, "top_logprobs": 20}')
    hold(address, stop, 200, lambda: stream if next(numbers) % 50 == 0 else page, window=4096)


def many_connections(most: int) -> Attack:
    """As many connections as that, held open; those that the server closes are made again."""

    def attack(address: Address, stop: Event) -> None:
        hold(address, stop, most, lambda: b"")

    return attack


def huge_bodies(address: Address, stop: Event) -> None:
    """Bodies of the permitted size that cost much to check, larger ones, endless ones; some four a second."""
    kinds = [post(path, body) for path in PATHS for body in huge()]
    kinds.append(head(PATHS[0], 2**40) + b" " * BODY_BYTES)
    endless = head(PATHS[0], 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    kinds.append(endless + b"100000\r\n" + b" " * 0x100000 + b"\r\n")

    def work(number: int) -> None:
        rng = random.Random(number)
        while not stop.wait(rng.uniform(0.5, 1.5)):
            body = rng.choice(kinds)
            with suppress(OSError), connect(address) as one:
                one.sendall(body)
                answer(one, body)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))


def huge() -> Iterator[bytes]:
    """JSON of the permitted size in which everything is wrong, or is much."""

    def filled(start: bytes, part: bytes, end: bytes) -> bytes:
        return start + part * ((BODY_BYTES - len(start) - len(end)) // len(part)) + end

    message = b'{"messages": [{"role": "user", "content": '
    yield b" " * BODY_BYTES
    yield filled(b'{"prompt": [', b"{},", b"{}]}")
    yield filled(b'{"prompt": [', b"[1],", b"[1]]}")
    yield filled(b'{"prompt": [', b"1,", b"1]}")
    yield filled(message + b"[", b"{},", b"{}]}]}")
    yield filled(message + b'"', b"hello ", b'"}]}')
    yield filled(b'{"messages": [', b"{},", b"{}]}")
    yield filled(b'{"messages": ', b"[", b"")
    yield filled(b'{"logit_bias": {"0": 0', b', "x": 0', b"}}")
    names = b",".join(b'"a%d":0' % i for i in range(300_000))[: BODY_BYTES - 100].rpartition(b",")[
        0
    ]
    yield b"{" + names + b"}"
    schema = {"type": "object", "properties": {f"a{i}": {"type": "string"} for i in range(60_000)}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages = [{"role": "user", "content": "x"}]
    yield json.dumps({"messages": messages, "response_format": form}).encode()[:BODY_BYTES]


def bad_text(address: Address, stop: Event) -> None:
    """Bytes that are no UTF-8, halves of surrogate pairs, control characters and control tokens, wherever they fit."""
    said = (
        b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\\ud800", b"\\u0000", b"\x00",
        b"<start_of_turn>", b"<eos>", "\u202e\ufeff".encode(), b"\\ud83d\\ude00", b"\xf0\x9f",
    )  # fmt: skip
    places = (
        b'{"messages": [{"role": "user", "content": "%s"}], "max_tokens": 1}',
        b'{"messages": [{"role": "%s", "content": "x"}], "max_tokens": 1}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stop": "%s"}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "%s": 1}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tools": [{"type": "function", '
        b'"function": {"name": "f", "parameters": {"%s": "%s"}}}]}',
        b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", '
        b'"arguments": "{\\"a\\": \\"%s\\"}"}}]}], "max_tokens": 1}',
    )  # fmt: skip
    rng = random.Random(0)
    while not stop.wait(0.05):
        body = post(PATHS[0], rng.choice(places).replace(b"%s", rng.choice(said)))
        with suppress(OSError), connect(address) as one:
            one.sendall(body)
            answer(one, body)


def disconnects(address: Address, stop: Event) -> None:
    """Streams that are left after a few tokens, now by a close, now by a reset."""
    rng, body = random.Random(0), post(PATHS[0], CHAT + b', "max_tokens": 100}')
    while not stop.wait(0.1):
        with suppress(OSError), connect(address) as one:
            one.sendall(body)
            for _ in range(rng.randrange(4)):
                answer(one, body)
            if rng.random() < 0.5:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def cancel_storms(address: Address, stop: Event) -> None:
    """A hundred requests for four answers each at a time, and all of them left before they are answered."""
    body = post(PATHS[0], CHAT + b', "max_tokens": 100, "n": 4}')
    while not stop.wait(2.0):
        with ExitStack() as opened:
            for _ in range(100):
                with suppress(OSError):
                    opened.enter_context(connect(address)).sendall(body)


def attacks(connections: int) -> dict[str, Attack]:
    """Every kind by its name."""
    return {
        "half-open": half_open,
        "slow-readers": slow_readers,
        "connections": many_connections(connections),
        "huge-bodies": huge_bodies,
        "bad-text": bad_text,
        "disconnects": disconnects,
        "cancel-storms": cancel_storms,
    }


def allow_files(wanted: int) -> None:
    """Raise this process's limit of open files. Raises SystemExit where that cannot be."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + FILES_BESIDE
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SystemExit(
            f"error: {wanted} connections need {needed} open files, and {hard} are allowed.\n"
            f"hint: Raise the hard limit (ulimit -Hn), or give --connections {hard - FILES_BESIDE}."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
