"""Where an OpenAI-shaped server is asked, and with which key."""

from __future__ import annotations

import os

from gemma_neuron.errors import UsageError
from gemma_neuron.settings import KEY_VARIABLE


def api_base(url: str) -> str:
    """The URL that ends in `/v1`. Raises UsageError for what is no http(s) URL."""
    import httpx2

    try:
        good = httpx2.URL(url).scheme in ("http", "https") and bool(httpx2.URL(url).host)
    except (httpx2.InvalidURL, ValueError):
        good = False
    if not good:
        raise UsageError(f"{url!r} is no http(s) URL.", "Give a port's folder or a server's URL.")
    base = url.rstrip("/")
    return base if base.endswith("/v1") else base + "/v1"


def key_headers() -> dict[bytes, bytes]:
    """Of a request, with the environment's key in whatever bytes it has."""
    key = os.environ.get(KEY_VARIABLE)
    return {b"authorization": b"Bearer " + os.fsencode(key)} if key else {}
