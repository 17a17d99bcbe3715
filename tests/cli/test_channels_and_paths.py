"""Paths as shells hand them over, and output channels that are closed, full or left: never a traceback."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gemma_neuron.errors import SourceChangedError
from gemma_neuron.pipeline.prepare import only_worker, prepare
from gemma_neuron.pipeline.request import CompileRequest
from gemma_neuron.pipeline.sources import UNWATCHED
from gemma_neuron.port import Port
from tests.command import run
from tests.sharding.shards import cut
from tests.tiny import write_tiny_gemma4

COMMAND = f"{sys.executable} -m gemma_neuron"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_gemma4(tmp_path / "source", layers=2)


def said(code: int, *arguments: object) -> str:
    found = run(*arguments)
    assert found.returncode == code, (found.returncode, found.stdout, found.stderr)
    assert "Traceback" not in found.stderr
    return found.stderr


def test_an_empty_out_is_not_the_current_folder(source: Path) -> None:
    assert "empty path" in said(2, "shard", source, "--tp", 2, "--out", "")


def test_a_home_that_is_nobodys(source: Path, tmp_path: Path) -> None:
    assert "home folder" in said(2, "inspect", "~nobody-of-that-name/x")
    assert "home folder" in said(2, "shard", source, "--tp", 2, "--out", "~nobody-of-that-name/x")


def test_a_source_path_that_no_record_can_hold(source: Path, tmp_path: Path) -> None:
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/n\xff")
    source.rename(odd)
    assert "not UTF-8" in said(2, "shard", odd, "--tp", 2, "--out", tmp_path / "port")
    assert not (tmp_path / "port").exists()
    said(0, "inspect", odd)


@pytest.mark.parametrize("name", [b"LICENSE\xff.txt", b"LICENSE\x1b[31m.txt"])
def test_a_small_file_whose_name_no_port_can_carry(
    source: Path, tmp_path: Path, name: bytes
) -> None:
    Path(os.fsdecode(os.fsencode(source) + b"/" + name)).write_text("Apache")
    for arguments in (("inspect", source), ("shard", source, "--tp", 2, "--out", tmp_path / "p")):
        found = run(*arguments)
        assert found.returncode == 3 and "unsafe-name" in found.stdout + found.stderr
        assert "\x1b" not in found.stdout + found.stderr
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("line", "code", "wanted"),
    [
        ("inspect {source} >&-", 8, "Standard output is closed"),
        ("inspect {source} --json >/dev/full", 8, "Standard output: No space left"),
        ("plan {source} --tp 2 --json >/dev/full", 8, "Standard output: No space left"),
        ("plan {source} --tp 2 2>&- >/dev/null", 0, ""),
        ("inspect {source} --tensors | true; exit ${{PIPESTATUS[0]}}", None, ""),
    ],
)
def test_output_channels(source: Path, line: str, code: int | None, wanted: str) -> None:
    text = f"{COMMAND} {line.format(source=source)}"
    found = subprocess.run(["bash", "-c", text], check=False, capture_output=True, text=True)
    # a reader that is slow to leave may have taken everything
    assert found.returncode in ((0, 141) if code is None else (code,)), found
    assert wanted in found.stderr
    assert "Traceback" not in found.stderr and "Exception ignored" not in found.stderr


@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja", "tokenizer.json"])
def test_what_changes_while_it_is_audited_is_refused(
    source: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port carries the very bytes that were judged."""
    module = importlib.import_module("gemma_neuron.pipeline.prepare")
    own = module.examined

    def examined(found: object) -> object:
        audit = own(found)
        file = source / name
        file.write_text(file.read_text() + "\n")
        return audit

    monkeypatch.setattr(module, "examined", examined)
    with pytest.raises(SourceChangedError, match=name):
        cut(source, tmp_path / "port", 2)
    assert not (tmp_path / "port").exists()


def test_what_changes_after_the_audit_is_not_taken(source: Path, tmp_path: Path) -> None:
    request = CompileRequest(out=tmp_path / "port", backend="", tp=2)
    prepared = prepare(str(source), request, None, UNWATCHED)
    audited = (source / "config.json").read_bytes()
    (source / "config.json").write_text("{}")
    (source / "chat_template.jinja").unlink()
    with only_worker(prepared):
        assert (tmp_path / "port" / "source" / "config.json").read_bytes() == audited
    assert Port(tmp_path / "port").source_set.verify().files


def test_a_folder_that_became_another_port_before_the_lock_is_left_alone(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "port"
    late = prepare(str(source), CompileRequest(out=out, backend="", tp=4), None, UNWATCHED)
    cut(source, out, 2)
    before = (out / "port.json").read_bytes()
    with pytest.raises(Exception, match="another port"), only_worker(late):
        pass
    assert (out / "port.json").read_bytes() == before
    cut(source, out, 2)
