"""Ports whose own files were damaged, swapped or are in use: found before use, repaired or refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gemma_neuron.errors import IntegrityError, UsageError
from gemma_neuron.pipeline import CompileRequest, open_port, runner_factory, shard
from gemma_neuron.port import Port
from tests.pipeline.conftest import compile_tiny, tiny_source


@pytest.fixture
def copy(port: Path, tmp_path: Path) -> Path:
    out = tmp_path / "port"
    shutil.copytree(port, out)
    return out


@pytest.mark.parametrize("name", ["chat_template.jinja", "config.json", "generation_config.json"])
def test_an_edited_source_file_is_refused(copy: Path, name: str) -> None:
    """A port with another template is another model, whatever its verdict was."""
    (copy / "source" / name).write_text((copy / "source" / name).read_text() + " ")
    with pytest.raises(IntegrityError, match=name.replace(".", r"\.")):
        open_port(copy)


@pytest.mark.parametrize("text", ["garbage{", "{}", "[]"])
def test_a_damaged_plan_is_refused(copy: Path, text: str) -> None:
    (copy / "plan.json").write_text(text)
    with pytest.raises(IntegrityError, match=r"plan\.json"):
        open_port(copy)


@pytest.mark.parametrize("damage", ["flipped", "gone", "folder", "manifest", "marker"])
def test_a_damaged_rank_file_is_written_again(source: Path, copy: Path, damage: str) -> None:
    want = Port(copy).rank_file(1).read_bytes()
    file = Port(copy).rank_file(1)
    if damage == "flipped":
        file.write_bytes(want[:-1] + bytes([want[-1] ^ 1]))
    elif damage == "manifest":
        Port(copy).rank_set(1).manifest_path.write_text("{")
    elif damage == "marker":
        Port(copy).rank_set(1).marker_path.write_bytes(b"\xff\xfe")
    else:
        file.unlink()
        if damage == "folder":
            file.mkdir()
    result = shard(str(source), CompileRequest(out=copy, backend="", tp=2), None)
    assert (result.built, result.reused) == (1, 1)
    assert Port(copy).rank_file(1).read_bytes() == want


def test_a_unit_in_anothers_place_is_refused(copy: Path) -> None:
    graphs = copy / "graphs"
    shutil.rmtree(graphs / "prefill-b1-l24")
    shutil.copytree(graphs / "decode-b3-l1", graphs / "prefill-b1-l24")
    with pytest.raises(IntegrityError, match=r"holds decode-b3-l1, not prefill-b1-l24"):
        runner_factory(open_port(copy))()


def test_a_ledger_with_rubbish_and_stray_files_do_not_stop_a_compile(
    source: Path, copy: Path
) -> None:
    with (copy / "ledger.jsonl").open("ab") as file:
        file.write(b'[]\n5\n{"life": "x"}\n\xff\xfe\n{"torn": ')
    (copy / "graphs" / "note.txt").write_text("stray")
    assert compile_tiny(source, copy, []).built == 0


def test_out_that_is_no_port_keeps_its_files(source: Path, tmp_path: Path) -> None:
    """`*.partial` is our suffix, but not every file of that name is ours."""
    out = tmp_path / "mine"
    (out / "draft.partial").mkdir(parents=True)
    (out / "draft.partial" / "thesis.txt").write_text("mine")
    (out / "b.partial").write_text("mine")
    with pytest.raises(UsageError, match="no port"):
        compile_tiny(source, out, [])
    assert (out / "draft.partial" / "thesis.txt").exists() and (out / "b.partial").exists()


def test_a_folder_with_only_what_a_first_kill_leaves_is_gone_on_with(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "port"
    out.mkdir()
    (out / "port.json.partial").write_text('{"form')
    assert shard(str(source), CompileRequest(out=out, backend="", tp=2), None).built == 2
    assert not (out / "port.json.partial").exists()


def test_two_at_once_on_one_port(copy: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time; from filelock import FileLock;"
        "lock = FileLock(sys.argv[1]); lock.acquire(); print('held', flush=True); time.sleep(30)"
    )
    command = [sys.executable, "-c", code, str(copy / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        source = tiny_source(tmp_path / "source")
        started = time.monotonic()
        with pytest.raises(UsageError, match="Another process"):
            shard(str(source), CompileRequest(out=copy, backend="", tp=2), None)
        assert time.monotonic() - started < 5
        holder.kill()


def test_a_report_of_another_port_is_no_verdict(copy: Path) -> None:
    report = {"verdict": "works", "provenance": {"port_digest": "0" * 64}}
    (copy / "validation.json").write_text(json.dumps(report))
    assert Port(copy).verdict() is None
