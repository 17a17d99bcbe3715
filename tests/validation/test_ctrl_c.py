"""Ctrl-C while a reference is made: its exit code, its word, and nothing left that counts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gemma_neuron import pipeline
from gemma_neuron.artifacts import CommittedSet
from tests.cli_process import run_main
from tests.tiny import write_tiny_gemma4

QUESTIONS = Path(__file__).parent / "small.toml"
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test's parent may have it ignored
from gemma_neuron.cli import main
main()
"""


@pytest.mark.parametrize("as_json", [False, True])
def test_golden_stopped_by_ctrl_c(tmp_path: Path, as_json: bool) -> None:
    source = write_tiny_gemma4(tmp_path / "source", layers=2)
    out = tmp_path / "goldens" / "g"
    asked = ["golden", str(source), "--out", str(out), "--prompts", str(QUESTIONS)]
    command = [sys.executable, "-c", PROGRAM, *asked, *(["--json"] if as_json else [])]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as running:
        assert running.stderr is not None
        seen = [running.stderr.readline()]
        while not seen[-1].startswith("reference:"):
            assert seen[-1], seen
            seen.append(running.stderr.readline())
        os.kill(running.pid, signal.SIGINT)
        said, told = running.communicate(timeout=120)
    assert running.returncode == 130, told
    assert "error: Stopped by Ctrl-C." in told and "hint: Run the same command" in told
    assert "Traceback" not in told
    if as_json:
        assert json.loads(said)["error"]["exit_code"] == 130
    else:
        assert said == ""
    assert CommittedSet(out.parent, "g").manifest() is None
    assert not [path.name for path in out.parent.iterdir()]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)], ids=["ctrl-c", "term"]
)
def test_a_signal_whose_exception_c_code_replaced(
    number: int, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch does where it asks a storage for its length: a ValueError of its own, without a trace of the signal."""

    def inspected(*args: object, **options: object) -> None:
        with contextlib.suppress(BaseException):
            signal.raise_signal(number)
        raise ValueError("could not determine the shape")

    monkeypatch.setattr(pipeline, "inspected", inspected)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ended = run_main(capsys, "inspect", "x", "--json")
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.code == code and json.loads(ended.out)["error"]["exit_code"] == code
    assert "error: Stopped by" in ended.err
