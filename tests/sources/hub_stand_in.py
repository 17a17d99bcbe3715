"""The hub's API on loopback: model info, tree, resolve with redirects to a storage host, ranges, gates, faults.

The hub is `127.0.0.1:A`, its storage `localhost:B`: another origin, as on the real one, so that a token sent there is
seen. LFS files (weights and what is larger than a megabyte) are redirected, others served at once.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests import loopback

TOKEN = "hf_right"
PIECE = 64 * 1024


def commit_of(number: int) -> str:
    return f"{number:040x}"


@dataclass
class Request:
    """One request, and how many bytes of body were sent for it."""

    method: str
    path: str
    range: str
    authorization: str
    sent: int = 0


@dataclass
class HubStandIn:
    """What it serves and how it fails. `commits`: commit → name → content."""

    repo: str = "google/gemma-tiny"
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gate: str = "open"
    """open, gated (401 without the right token, 403 with another), or private (401 unless the right token)."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes to claim instead of the true ones."""
    statuses: list[int] = field(default_factory=list)
    """Answered instead, one a request, before anything else is."""
    cuts: list[int] = field(default_factory=list)
    """For each of the next storage requests: bytes after which the connection is cut."""
    stale_after: int | None = None
    """Uses after which a signed link is refused with 403."""
    ignore_ranges: bool = False
    flip: int | None = None
    """Offset of a byte that the storage serves wrong."""
    seconds_a_piece: float = 0.0
    requests: list[Request] = field(default_factory=list)
    links: dict[str, int] = field(default_factory=dict)
    endpoint: str = ""
    storage: str = ""

    def sent(self, word: str = "") -> int:
        """Bytes of body sent for paths with `word` in them."""
        return sum(request.sent for request in self.requests if word in request.path)

    def asked(self, word: str) -> list[Request]:
        return [request for request in self.requests if word in request.path]

    def add(self, commit: str, files: dict[str, bytes], ref: str = "main") -> None:
        self.commits[commit] = files
        self.refs[ref] = commit

    def commit(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


def is_lfs(name: str, data: bytes) -> bool:
    return name.endswith(".safetensors") or len(data) > 1024 * 1024


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubStandIn

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._handle()

    def do_GET(self) -> None:
        self._handle()

    def _handle(self) -> None:
        self.request_record = Request(
            self.command,
            unquote(self.path),
            self.headers.get("Range", ""),
            self.headers.get("Authorization", ""),
        )
        self.hub.requests.append(self.request_record)
        try:
            self._route()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _route(self) -> None:
        if self.hub.statuses:
            return self._answer(self.hub.statuses.pop(0), b"")
        url = urlsplit(unquote(self.path))
        if url.path.startswith("/storage/"):
            return self._storage(url.path.rpartition("/")[2], parse_qs(url.query)["link"][0])
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", url.path)
        resolve = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", url.path)
        if found is None and resolve is None:
            return self._answer(404, b"")
        repo, revision = (
            (found[1], found[3] or "main") if found else (resolve[1], resolve[2])  # type: ignore[index]
        )
        if repo != self.hub.repo:
            return self._refuse(404, "RepoNotFound", "Repository not found")
        if self._shut(repo, "private" if found else "gated"):
            return None
        commit = self.hub.commit(revision.rstrip("/"))
        if commit is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = self.hub.commits[commit]
        if found is not None:
            return self._json(
                _tree(files, self.hub)
                if found[2] == "tree"
                else _info(repo, commit, files, self.hub)
            )
        assert resolve is not None
        return self._resolve(commit, files, resolve[3])

    def _shut(self, repo: str, kind: str) -> bool:
        """Refuse who may not come in: what is private at all, what is gated at its files."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if (
            token == TOKEN
            or self.hub.gate == "open"
            or (self.hub.gate, kind) == ("gated", "private")
        ):
            return False
        if self.hub.gate == "private":
            self._refuse(401, "", "Invalid username or password.")
        else:
            message = f"Access to model {repo} is restricted."
            self._refuse(403 if token else 401, "GatedRepo", message)
        return True

    def _resolve(self, commit: str, files: dict[str, bytes], name: str) -> None:
        if name not in files:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        data = files[name]
        size = self.hub.sizes.get(name, len(data))
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not is_lfs(name, data):
            return self._body(data, headers | {"ETag": f'"{git_sha1(data)}"'})
        link = f"{len(self.hub.links)}"
        self.hub.links[link] = 0
        headers |= {
            "Location": f"{self.hub.storage}/storage/{name}?link={link}",
            "X-Linked-Etag": f'"{sha256(data)}"',
            "X-Linked-Size": str(size),
        }
        return self._answer(302, b"", headers)

    def _storage(self, name: str, link: str) -> None:
        self.hub.links[link] += 1
        if self.hub.stale_after is not None and self.hub.links[link] > self.hub.stale_after:
            return self._answer(403, b"<Error>AccessDenied</Error>")
        newest = next(files for files in reversed(self.hub.commits.values()) if name in files)
        data = newest[name]
        if self.hub.flip is not None and self.hub.flip < len(data):
            at = self.hub.flip
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        return self._body(data, {}, self.hub.sizes.get(name), may_cut=True)

    def _body(
        self,
        data: bytes,
        headers: dict[str, str],
        claimed: int | None = None,
        may_cut: bool = False,
    ) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        status, part = 200, data
        if found is not None and not self.hub.ignore_ranges:
            first, last = int(found[1]), min(int(found[2] or len(data) - 1), len(data) - 1)
            status, part = 206, data[first : last + 1]
            headers = headers | {"Content-Range": f"bytes {first}-{last}/{claimed or len(data)}"}
        cut = self.hub.cuts.pop(0) if may_cut and self.hub.cuts and self.command == "GET" else None
        self._answer(status, part, headers, cut)

    def _json(self, value: Any) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._answer(status, json.dumps({"error": message}).encode(), headers)

    def _answer(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        for start in range(0, len(body), PIECE):
            piece = body[start : min(start + PIECE, len(body))]
            if cut is not None and start + len(piece) > cut:
                self.close_connection = True
                return
            self.wfile.write(piece)
            self.request_record.sent += len(piece)
            if self.hub.seconds_a_piece:
                time.sleep(self.hub.seconds_a_piece)


def _info(repo: str, commit: str, files: dict[str, bytes], hub: HubStandIn) -> dict[str, Any]:
    siblings = []
    for name, data in files.items():
        size = hub.sizes.get(name, len(data))
        sibling: dict[str, Any] = {"rfilename": name, "size": size, "blobId": git_sha1(data)}
        if is_lfs(name, data):
            sibling["lfs"] = {"size": size, "sha256": sha256(data), "pointerSize": 134}
        siblings.append(sibling)
    return {
        "id": repo,
        "modelId": repo,
        "sha": commit,
        "siblings": siblings,
        "private": False,
        "gated": hub.gate == "gated",
    }


def _tree(files: dict[str, bytes], hub: HubStandIn) -> list[dict[str, Any]]:
    rows = []
    for name, data in files.items():
        size = hub.sizes.get(name, len(data))
        row: dict[str, Any] = {"type": "file", "path": name, "size": size, "oid": git_sha1(data)}
        if is_lfs(name, data):
            row["lfs"] = {"size": size, "oid": sha256(data), "pointerSize": 134}
        rows.append(row)
    return rows


@contextmanager
def serving(hub: HubStandIn) -> Iterator[HubStandIn]:
    """Serve on two loopback ports until the block ends."""
    with (
        loopback.serving(_Handler, hub=hub) as first,
        loopback.serving(_Handler, hub=hub) as second,
    ):
        hub.endpoint = f"http://127.0.0.1:{first}"
        hub.storage = f"http://localhost:{second}"
        yield hub
