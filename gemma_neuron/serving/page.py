"""The page at `/`: its files, from the package alone, under a policy that lets nothing else run or load.

A model's text ends up in this page, and with it whatever the model was given to read. The page's own code cleans that
text; the headers here hold even where it should fail to: no script but the files below, no address but this server's.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import FastAPI, Request
from fastapi.responses import Response

from gemma_neuron.artifacts import digest_bytes
from gemma_neuron.serving.errors import ApiError

PREFIX = "/page/"
INDEX = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".json": "application/json",
}
"""What is served; other files of the folder are templates of `--report`."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Text becomes markup through the sanitiser's own policy or not at all.
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # an upgrade is seen at once: unchanged files are answered by their tag
}


@dataclass(frozen=True, slots=True)
class PageFile:
    content: bytes
    kind: str
    tag: str
    """The entity tag: the content's digest."""


def page_files() -> dict[str, PageFile]:
    """Every file of the page by its path in the package's page folder."""
    return dict(_found(resources.files("gemma_neuron.data").joinpath("page"), ""))


def _found(folder: Traversable, path: str) -> list[tuple[str, PageFile]]:
    out: list[tuple[str, PageFile]] = []
    for entry in folder.iterdir():
        name = path + entry.name
        kind = KINDS.get("." + name.rpartition(".")[2])
        if entry.is_dir():
            out += _found(entry, f"{name}/")
        elif kind is not None:
            content = entry.read_bytes()
            out.append((name, PageFile(content, kind, f'"{digest_bytes(content)[:32]}"')))
    return out


def add_page(app: FastAPI) -> None:
    """The routes `/` and `/page/…`. They hold nothing of the port, and need no key (`access.open_to_all`)."""
    files = page_files()

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return _answer(files[INDEX], request)

    @app.get(PREFIX + "{name:path}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        if name not in files:
            raise ApiError(404, f"The page has no file {name[:200]!r}.")
        return _answer(files[name], request)


def _answer(file: PageFile, request: Request) -> Response:
    headers = HEADERS | {"etag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.kind)
