"""A checkpoint's own chat template, rendered in a sandboxed child process.

In: a checkpoint folder, then messages. Out: the prompt as text, equal to what transformers'
`apply_chat_template` gives. Failures are TemplateError with the template's own words.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gemma_neuron.errors import TemplateError, TemplateLateError

TEMPLATE_BYTES = 64 * 1024
RENDER_SECONDS = 10.0
"""By the clock, on a machine that is busy; what a template may work is far less: `template_child.CPU_SECONDS`."""
LOAD_SECONDS = 20.0
"""Starting Python on a loaded machine and compiling the template; rendering has its own, tighter limit."""
ANSWER_BYTES = 16 * 1024 * 1024
"""Rendered text as JSON: 1 MiB of text escapes to at most 6 MiB."""
SPECIAL_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
Origin = Literal["chat_template.jinja", "tokenizer_config.json"]


class ChatTemplate:
    """A template's text and the child that renders it; safe to use from several threads."""

    def __init__(self, source: str, origin: Origin, specials: Mapping[str, str] | None = None):
        size = len(source.encode("utf-8", "replace"))
        if size > TEMPLATE_BYTES:
            raise TemplateError(
                f"The chat template in {origin} has {size} bytes; at most {TEMPLATE_BYTES} are read.",
                "A template of this size is not one of Gemma's: take it from the model's own page.",
            )
        self.source = source
        self.origin: Origin = origin
        self.sha256 = hashlib.sha256(source.encode("utf-8", "replace")).hexdigest()
        self.specials = dict(specials or {})
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = False,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt as text. Raises TemplateError when the template refuses or exceeds a limit."""
        values = {
            **self.specials,
            "messages": [_with_reasoning_names(message) for message in messages],
            "tools": list(tools) if tools is not None else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            "enable_thinking": enable_thinking,
        }
        text = self._ask({"op": "render", "values": values})["text"]
        assert isinstance(text, str)
        return text

    @property
    def knows_tools(self) -> bool:
        """Whether the template reads `tools` at all: Gemma 3's does not."""
        return re.search(r"\btools\b", self.source) is not None

    def check(self) -> None:
        """Compile the template in its child. Raises TemplateError when it cannot be."""
        with self._lock:
            self._ready_child()

    def close(self) -> None:
        """End the child; the next render starts another."""
        with self._lock:
            self._drop_child()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            try:
                reply = self._ready_child().exchange(request, RENDER_SECONDS)
            except _ChildFailed as error:
                self._drop_child()
                if error.late:
                    raise TemplateLateError(
                        f"Rendering the chat template of {self.origin} {error}.",
                        "The machine is busy: ask again.",
                    ) from None
                raise TemplateError(
                    f"Rendering the chat template of {self.origin} {error}.",
                    "The template is at fault, or the conversation is far too long for it.",
                ) from None
        if "error" in reply:
            raise _template_error(reply, self.origin)
        return reply

    def _ready_child(self) -> _Child:
        """The living child with this template loaded."""
        if self._child is not None and self._child.alive():
            return self._child
        self._drop_child()
        child = _Child()
        try:
            reply = child.exchange({"op": "load", "source": self.source}, LOAD_SECONDS)
        except _ChildFailed as error:
            child.end()
            raise TemplateError(
                f"Loading the chat template of {self.origin} {error}.", "The template is at fault."
            ) from None
        if "error" in reply:
            child.end()
            raise _template_error(reply, self.origin)
        self._child = child
        return child

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


def load_template(folder: Path) -> ChatTemplate | None:
    """The folder's template, or None. `chat_template.jinja` wins, as in stock."""
    config = read_object(folder / CONFIG_FILE)
    specials = {}
    for name in SPECIAL_NAMES:
        piece = special_piece(config, name)
        if piece is not None:
            specials[name] = piece
    file = folder / TEMPLATE_FILE
    if file.is_file():
        if file.stat().st_size > TEMPLATE_BYTES:
            raise TemplateError(
                f"{file} has {file.stat().st_size} bytes; at most {TEMPLATE_BYTES} are read."
            )
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), "chat_template.jinja", specials)
        except UnicodeDecodeError as error:
            raise TemplateError(f"{file} is not UTF-8: {error}.") from error
    found = config.get("chat_template")
    if isinstance(found, list):  # several named templates; stock takes the one named `default`
        named = {e.get("name"): e.get("template") for e in found if isinstance(e, dict)}
        found = named.get("default")
    return (
        ChatTemplate(found, "tokenizer_config.json", specials) if isinstance(found, str) else None
    )


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file, empty when the file is not there. Raises TemplateError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TemplateError(f"{path} is not readable JSON: {error}.") from error
    if not isinstance(value, dict):
        raise TemplateError(f"{path} holds no JSON object.")
    return value


def special_piece(config: Mapping[str, Any], name: str) -> str | None:
    """A special token's text in tokenizer_config.json, written plain or as an added-token object."""
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _with_reasoning_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """Reasoning under each name templates read it by, as stock does."""
    found = next(
        (message[name] for name in REASONING_FIELDS if message.get(name) is not None), None
    )
    if found is None:
        return dict(message)
    return {"thinking": found, **message, "reasoning_content": found}


def _template_error(reply: Mapping[str, Any], origin: str) -> TemplateError:
    text = str(reply["error"])
    bare = text.rstrip(".")
    if reply.get("kind") == "raised":
        return TemplateError(text, "The model's chat template refuses this conversation.")
    if reply.get("kind") == "limit":
        return TemplateError(f"The chat template of {origin} was stopped: {bare}.")
    return TemplateError(f"The chat template of {origin} failed: {bare}.")


class _ChildFailed(Exception):
    """How the child failed, as the end of a sentence. `late`: by the clock alone."""

    def __init__(self, how: str, *, late: bool = False) -> None:
        super().__init__(how)
        self.late = late


class _Child:
    """One template process and its two pipes; answers one request at a time."""

    def __init__(self) -> None:
        # The child sees this process's module path and nothing else of its environment: no secrets.
        env = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONUTF8": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gemma_neuron.template_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            cwd="/",
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in = self._process.stdin.fileno()
        self._out = self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._finalizer = weakref.finalize(self, _end_process, self._process)

    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        self._finalizer()

    def exchange(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request, wait for its answer. Raises _ChildFailed on death, delay or excess."""
        deadline = time.monotonic() + seconds
        data = json.dumps(request).encode() + b"\n"
        received = bytearray()
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise _ChildFailed(f"took more than {seconds:g} s", late=True)
            readable, writable, _ = select.select([self._out], [self._in] if data else [], [], left)
            if writable:
                data = self._send(data)
            if readable:
                piece = os.read(self._out, 1 << 16)
                received += piece
                if not piece:
                    raise _ChildFailed("ended its process: it used too much memory or time")
                if len(received) > ANSWER_BYTES:
                    raise _ChildFailed("gave more output than is allowed")
                if received.endswith(b"\n"):
                    reply: dict[str, Any] = json.loads(received)
                    return reply

    def _send(self, data: bytes) -> bytes:
        try:
            return data[os.write(self._in, data) :]
        except BlockingIOError:
            return data
        except BrokenPipeError:
            raise _ChildFailed("ended its process: it used too much memory or time") from None


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
