"""A port belongs to the files its prompts are made with: another tokenizer, other stops, another port."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.errors import PortMismatchError
from gemma_neuron.pipeline import CompileRequest, shard
from gemma_neuron.port import Port
from tests.checkpoint.helpers import edit_json
from tests.pipeline.conftest import tiny_source


def into(source: Path, out: Path) -> Port:
    shard(str(source), CompileRequest(out=out, backend="", tp=2), None)
    return Port(out)


def stop_earlier(generation: dict[str, Any]) -> None:
    generation["eos_token_id"] = [1, 106]


def swap_two_pieces(tokenizer: dict[str, Any]) -> None:
    vocab = tokenizer["model"]["vocab"]
    first, second = [piece for piece, token in vocab.items() if token in (200, 201)]
    vocab[first], vocab[second] = vocab[second], vocab[first]


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "generation_config.json": stop_earlier,
    "tokenizer.json": swap_two_pieces,
    "tokenizer_config.json": lambda c: c.update(add_bos_token=True),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_prompt_file_is_another_port(tmp_path: Path, name: str) -> None:
    source, out = tiny_source(tmp_path / "source"), tmp_path / "port"
    port = into(source, out)
    report = {"verdict": "works", "provenance": {"port_digest": port.record.digest}}
    (out / "validation.json").write_text(json.dumps(report))
    assert port.verdict() == "works"
    before = sorted((p, p.stat().st_mtime_ns) for p in out.rglob("*") if p.name != ".lock")
    edit_json(source, name, EDITS[name])
    with pytest.raises(PortMismatchError, match="tokenizer and generation config"):
        into(source, out)
    assert before == sorted((p, p.stat().st_mtime_ns) for p in out.rglob("*") if p.name != ".lock")
    other = into(source, tmp_path / "other")
    assert other.record.digest != port.record.digest
    (tmp_path / "other" / "validation.json").write_text(json.dumps(report))
    assert other.verdict() is None


def test_a_readme_is_no_part_of_the_prompt(tmp_path: Path) -> None:
    source, out = tiny_source(tmp_path / "source"), tmp_path / "port"
    digest = into(source, out).record.digest
    (source / "README.md").write_text("a new sentence")
    assert into(source, out).record.digest == digest
