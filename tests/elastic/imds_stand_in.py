"""EC2's instance metadata on loopback, version 2 only: what it says is set by the test, what it was asked is kept."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ACTION, REBALANCE = "spot/instance-action", "events/recommendations/rebalance"


class Metadata:
    """`failing`: answers 500 to everything; `token`: the one that is good now."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.failing, self.token = False, "token-1"
        self.asked: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def take_away(self, seconds: float) -> None:
        when = datetime.now(UTC) + timedelta(seconds=seconds)
        text = {"action": "terminate", "time": when.strftime("%Y-%m-%dT%H:%M:%SZ")}
        self.texts[ACTION] = json.dumps(text)

    def recommend(self) -> None:
        self.texts[REBALANCE] = json.dumps({"noticeTime": "2026-01-31T12:00:00Z"})

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def handler(metadata: Metadata) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            metadata.asked.append(f"PUT {self.path}")
            lifetime = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
            good = self.path == "/latest/api/token" and lifetime is not None
            self._answer(200 if good else 400, metadata.token)

        def do_GET(self) -> None:
            metadata.asked.append(f"GET {self.path}")
            if self.headers.get("X-aws-ec2-metadata-token") != metadata.token:
                self._answer(401, "")
                return
            text = metadata.texts.get(self.path.removeprefix("/latest/meta-data/"))
            self._answer(404 if text is None else 200, text or "")

        def _answer(self, status: int, text: str) -> None:
            data = text.encode()
            self.send_response(500 if metadata.failing else status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
