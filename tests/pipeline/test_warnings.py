"""What the audit warned of is said again at every later stage, on stderr, and in the verdict's first lines."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gemma_neuron.pipeline import CompileRequest, shard
from gemma_neuron.reports import LevelResult, ValidationReport
from gemma_neuron.validation.text import lines
from tests.checkpoint.helpers import TEXT4, edit_tensors
from tests.cli_process import run_main
from tests.pipeline.conftest import compile_tiny, tiny_source
from tests.tiny import encode

CLI = [sys.executable, "-m", "gemma_neuron"]
SAID = "warning: all-one: All 2 layer_scalar values are exactly one (1.0, 1.0)"


@pytest.fixture
def suspicious(tmp_path: Path) -> Path:
    """A checkpoint that looks as if its buffers had been lost."""
    source = tiny_source(tmp_path / "source")
    one = encode(np.ones(1, np.float32))
    edit_tensors(
        source, lambda t: t.update({f"{TEXT4}layers.{i}.layer_scalar": one for i in (0, 1)})
    )
    return source


@pytest.fixture
def warned(port: Path, tmp_path: Path) -> Path:
    """A compiled port whose record carries that warning."""
    out = Path(shutil.copytree(port, tmp_path / "port"))
    record = json.loads((out / "port.json").read_text())
    record["warnings"] = [SAID.removeprefix("warning: ")]
    (out / "port.json").write_text(json.dumps(record))
    return out


def test_inspect_and_shard(suspicious: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [*CLI, "inspect", str(suspicious)], capture_output=True, text=True, check=True
    )
    assert SAID in done.stdout
    command = [
        *CLI,
        "shard",
        str(suspicious),
        "--out",
        str(tmp_path / "port"),
        "--tp",
        "2",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert SAID in done.stderr
    [warning] = json.loads(done.stdout)["warnings"]
    assert SAID in f"warning: {warning}"


def test_compile(port: Path, suspicious: Path, tmp_path: Path) -> None:
    out = tmp_path / "port"
    shard(str(suspicious), CompileRequest(out=out, backend="", tp=2), None)
    shutil.copytree(port / "graphs", out / "graphs")  # they hold no weights
    notes: list[str] = []
    assert compile_tiny(suspicious, out, notes).reused == 3
    assert any(note.startswith(SAID) for note in notes)


def test_golden(suspicious: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = Path(__file__).parents[1] / "validation" / "small.toml"
    ended = run_main(
        capsys, "golden", suspicious, "--out", tmp_path / "golden", "--prompts", prompts, "--json"
    )
    assert ended.code == 0 and SAID in ended.err, ended.err
    [warning] = json.loads(ended.out)["warnings"]
    assert SAID in f"warning: {warning}"


def test_chat_and_serve(warned: Path) -> None:
    command = [*CLI, "chat", str(warned), "--once", "hello", "--max-tokens", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert SAID in done.stderr
    command = [*CLI, "serve-local", str(warned), "--unvalidated", "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None and server.stderr is not None
        assert "url" in json.loads(server.stdout.readline())
        server.send_signal(signal.SIGTERM)
        assert SAID in server.stderr.read()


def test_the_verdict() -> None:
    report = ValidationReport(
        verdict="insufficient",
        scope="chat",
        levels=(LevelResult(level=1, name="weights", status="not-run", reason="no checkpoint"),),
        token_match={"compared": 0, "equal": 0},
        first_divergence=None,
        warnings=(SAID.removeprefix("warning: "),),
    )
    assert lines(report)[:2] == ["insufficient: level 1 (weights): no checkpoint", SAID]
