"""Faults in what a prompt is made of: template, tokens around it, stop ids. Model and reference see the same prompt."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from scripts.mutants.base import prompt

if TYPE_CHECKING:
    from gemma_neuron.port import Port

TEMPLATE = "chat_template.jinja"
THOUGHT = "{%- if not thinking -%}{{- '<|channel>thought\\n<channel|>' -}}{%- endif -%}"
"""The suffix with which Gemma 4's template closes the thinking channel before an answer."""


def _replace(port: Port, old: str, new: str) -> None:
    path = port.source_folder / TEMPLATE
    text = path.read_text(encoding="utf-8")
    assert old in text, old
    path.write_text(text.replace(old, new), encoding="utf-8")


@prompt("BOS missing")
def no_bos(port: Port) -> None:
    _replace(port, "{{- bos_token -}}", "")


@prompt("BOS doubled")
def two_bos(port: Port) -> None:
    _replace(port, "{{- bos_token -}}", "{{- bos_token -}}{{- bos_token -}}")


@prompt("Gemma 3's turn markers")
def other_markers(port: Port) -> None:
    _replace(port, "<|turn>", "<start_of_turn>")
    _replace(port, "<turn|>", "<end_of_turn>")


@prompt("thinking suffix missing")
def no_suffix(port: Port) -> None:
    _replace(port, THOUGHT, "")


@prompt("the model's turn is not opened")
def no_generation_prompt(port: Port) -> None:
    _replace(port, "{{- '<|turn>model\\n' -}}\n    {%- if not thinking", "{%- if not thinking")


@prompt("roles exchanged")
def other_role(port: Port) -> None:
    _replace(
        port, "'user' if role == 'user' else 'system'", "'model' if role == 'user' else 'system'"
    )


@prompt("template absent")
def no_template(port: Port) -> None:
    (port.source_folder / TEMPLATE).unlink()


@prompt("stop list reduced to <eos>")
def fewer_stops(port: Port) -> None:
    for name in ("generation_config.json", "config.json"):
        path = port.source_folder / name
        found = json.loads(path.read_text())
        found["eos_token_id"] = 1
        path.write_text(json.dumps(found, indent=2))
