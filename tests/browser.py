"""Headless Chromium by its own driver: what a page shows, what it logs, what it asks the network for.

Plain WebDriver over HTTP on loopback; needs `chromium` and `chromedriver` in PATH, which `missing` looks for.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
START_SECONDS = 60
KEYS = {
    "Tab": "\ue004",
    "Enter": "\ue007",
    "Shift": "\ue008",
    "Alt": "\ue00a",
    "Escape": "\ue00c",
    "Space": "\ue00d",
    "Up": "\ue013",
    "Down": "\ue015",
}
"""WebDriver's code points of keys that are no letters."""


def missing() -> str | None:
    """Why no page can be opened on this machine, or None."""
    for names in (BROWSERS, ("chromedriver",)):
        if not any(shutil.which(name) for name in names):
            return f"no {' or '.join(names)} in PATH (apt-get install chromium chromium-driver)"
    return None


class Browser:
    """One window. Every method is a WebDriver call."""

    def __init__(self, http: httpx2.Client, session: str) -> None:
        self._http, self._session = http, session

    def open(self, url: str) -> None:
        self._post("url", {"url": url})

    def run(self, script: str) -> Any:
        """The value of a JavaScript function body in the page."""
        return self._post("execute/sync", {"script": script, "args": []})

    def click(self, selector: str) -> None:
        """As a pointer does: only what is in view and under nothing else."""
        found = self._post("element", {"using": "css selector", "value": selector})
        self._post(f"element/{next(iter(found.values()))}/click", {})

    def type(self, *keys: str) -> None:
        """Texts and keys one after the other, to what has the focus. `Alt+n` holds the first."""
        self._post(
            "actions", {"actions": [{"type": "key", "id": "keys", "actions": _strokes(keys)}]}
        )

    def wait(self, condition: str, seconds: float = 90.0) -> Any:
        """The first true value of a JavaScript expression."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(f"return ({condition})")):
            assert time.monotonic() < deadline, f"never true: {condition}"
            time.sleep(0.02)
        return value

    def resize(self, width: int, height: int) -> None:
        """The page's own size, whatever the window around it."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)

    def dark(self, on: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if on else "light"}
        self.devtools("Emulation.setEmulatedMedia", {"features": [scheme]})

    def screenshot(self, path: Path) -> None:
        """The whole page, beyond the window too."""
        taken = self.devtools("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(taken["data"]))

    def console(self) -> list[str]:
        """Everything logged since the last call: errors of scripts, styles, policies, loading."""
        return [entry["message"] for entry in self._post("se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Every address asked for since the last call, the page's own first."""
        found = []
        for entry in self._post("se/log", {"type": "performance"}):
            message = json.loads(entry["message"])["message"]
            if message["method"] != "Network.requestWillBeSent":
                continue
            # its own first tab, and what that embeds
            if not message["params"]["documentURL"].startswith(("chrome:", "chrome-untrusted:")):
                found.append(str(message["params"]["request"]["url"]))
        return found

    def devtools(self, command: str, params: dict[str, Any]) -> Any:
        return self._post("goog/cdp/execute", {"cmd": command, "params": params})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._http.post(f"/session/{self._session}/{path}", json=body).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer


def _strokes(keys: tuple[str, ...]) -> list[dict[str, str]]:
    out = []
    for key in keys:
        held, _, last = key.rpartition("+") if key.partition("+")[0] in KEYS else ("", "", key)
        pressed = [KEYS[held]] if held else []
        letters = [KEYS[last]] if last in KEYS else list(last)
        out += [{"type": "keyDown", "value": one} for one in pressed]
        for letter in letters:
            out += [{"type": kind, "value": letter} for kind in ("keyDown", "keyUp")]
        out += [{"type": "keyUp", "value": one} for one in pressed]
    return out


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A fresh profile in `folder`, a driver on a free port, both gone at the end."""
    port = _free_port()
    driver = subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
            _wait(http)
            asked = {"capabilities": {"alwaysMatch": _capabilities(folder)}}
            answer = http.post("/session", json=asked).json()["value"]
            assert "sessionId" in answer, answer
            yield Browser(http, answer["sessionId"])
            http.delete(f"/session/{answer['sessionId']}")
    finally:
        driver.terminate()
        driver.wait()


def _capabilities(folder: Path) -> dict[str, Any]:
    binary = next(path for path in map(shutil.which, BROWSERS) if path)
    # Chromium refuses its sandbox to root, which is who runs tests in a container
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    return {
        "browserName": "chrome",
        "goog:chromeOptions": {
            "binary": binary,
            "args": [*ARGUMENTS, *root, f"--user-data-dir={folder}"],
        },
        "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
    }


def _wait(http: httpx2.Client) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            if http.get("/status").json()["value"]["ready"]:
                return
        except httpx2.TransportError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
