"""moto's S3 as a process on loopback, and a proxy before it that counts what it passes on and cuts it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.loopback import passed_on, serving
from tests.sources.processes import clean_environment

KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIbPxRfiCYEXAMPLEKEY",
    "AWS_REGION": "us-east-1",
}


def variables(address: str, **more: str) -> dict[str, str]:
    """What has a process ask the store at `address`, and never an instance's metadata."""
    return {
        **KEYS,
        "AWS_ENDPOINT_URL_S3": address,
        "AWS_EC2_METADATA_DISABLED": "true",
        **more,
    }


@contextmanager
def moto() -> Iterator[str]:
    """The address of a running server."""
    code = "import sys; from moto.server import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, "-H", "127.0.0.1", "-p", "0"],
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        address = next(
            line.split("Running on ")[1].split()[0]
            for line in process.stderr
            if "Running on " in line
        )
        # its log of requests must not fill the pipe
        reader = threading.Thread(target=process.stderr.read)
        reader.start()
        yield address
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stderr.close()


@dataclass
class Passed:
    """One answer, counted while it goes out."""

    method: str
    path: str
    sent: int = 0


@dataclass
class Proxy:
    """What passed. `cuts`: for each of the next GETs of an object, bytes after which the connection is cut."""

    upstream: str
    address: str = ""
    cuts: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    """Answered instead, one a request."""
    seconds_a_piece: float = 0.0
    held: str = ""
    """Requests whose `METHOD path` has this (a regular expression) get no answer while it stands."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """(method, path) of each request."""
    passed: list[Passed] = field(default_factory=list)

    def sent(self, word: str) -> int:
        """Bytes of body that went out for GETs of paths with `word` in them."""
        return sum(p.sent for p in self.passed if word in p.path and p.method == "GET")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def log_message(self, *_: object) -> None:
        pass

    def _pass_on(self) -> None:
        self.proxy.asked.append((self.command, self.path))
        while self.proxy.held and re.search(self.proxy.held, f"{self.command} {self.path}"):
            time.sleep(0.05)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.proxy.statuses:
            self.send_response(self.proxy.statuses.pop(0))
            self.send_header("Content-Length", "0")
            return self.end_headers()
        answer = passed_on(self, self.proxy.upstream, body)
        self.send_response(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.send_header("Content-Length", answer.length)
        self.end_headers()
        return self._send(answer.data)

    def _send(self, data: bytes) -> None:
        is_object = self.command == "GET" and "list-type" not in self.path
        cut = self.proxy.cuts.pop(0) if is_object and self.proxy.cuts else len(data)
        passed = Passed(self.command, self.path)
        self.proxy.passed.append(passed)
        try:
            for start in range(0, min(cut, len(data)), 65536):
                piece = data[start : min(start + 65536, cut)]
                self.wfile.write(piece)
                passed.sent += len(piece)
                time.sleep(self.proxy.seconds_a_piece)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        if cut < len(data):
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on


@contextmanager
def proxied(upstream: str) -> Iterator[Proxy]:
    proxy = Proxy(upstream)
    with serving(_Handler, proxy=proxy) as port:
        proxy.address = f"http://127.0.0.1:{port}"
        yield proxy


def boto(address: str) -> Any:
    """A client of the test's own, to fill buckets with."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=address,
        region_name="us-east-1",
        aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
    )


@contextmanager
def own_bucket(address: str, name: str) -> Iterator[Any]:
    """An empty bucket, and a client of the test's own."""
    client = boto(address)
    client.create_bucket(Bucket=name)
    yield client
    for key in keys(client, name):
        client.delete_object(Bucket=name, Key=key)
    client.delete_bucket(Bucket=name)


def keys(client: Any, bucket: str) -> list[str]:
    """All keys of a bucket."""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return [found["Key"] for page in pages for found in page.get("Contents", [])]
