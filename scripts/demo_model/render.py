"""Render chats with the demo model's template, in the sandbox that every reader of it uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")
Message = dict[str, Any]


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def load_template(file: Path = TEMPLATE_FILE) -> Template:
    """Compile the template the way transformers does, without importing transformers."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(file.read_text(encoding="utf-8"))


def render(
    template: Template,
    messages: Sequence[Message],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
    thinking: bool = False,
    generation: bool = True,
) -> str:
    """One chat as text, BOS included."""
    return template.render(
        messages=messages,
        tools=tools,
        enable_thinking=thinking,
        add_generation_prompt=generation,
        bos_token="<bos>",
    )
