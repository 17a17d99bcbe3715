"""Over a hundred broken checkpoints through the command line: each its own finding, exit 3, nothing written."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import get_args

import pytest

from gemma_neuron.reports import FindingKind
from tests.checkpoint.hostile_files import FILES, Hostile
from tests.checkpoint.hostile_models import MODELS
from tests.cli_process import run_main

CASES: dict[str, Hostile] = FILES | MODELS
WARNINGS_ONLY = {"all-one", "stop-ids-reduced"}
OF_PORTS = {"rank-differs"}


def test_there_are_at_least_sixty_and_every_kind_is_among_them() -> None:
    assert len(CASES) == len(FILES) + len(MODELS) >= 100
    kinds = set(get_args(FindingKind)) - WARNINGS_ONLY - OF_PORTS
    assert {case.kind for case in CASES.values()} == kinds


@pytest.mark.parametrize("name", CASES)
def test_a_broken_checkpoint_is_named_and_stops_the_port(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    case = CASES[name]
    source = Path(shutil.copytree(made / case.base, tmp_path / "source"))
    case.edit(source)
    started = time.process_time()
    more = ("--values",) if case.values else ()
    ended = run_main(capsys, "inspect", source, "--json", *more)
    report = json.loads(ended.out)
    assert (ended.code, report["verdict"]) == (3, "broken")
    errors = [f for f in report["findings"] if f["severity"] == "error"]
    first = next(f for f in errors if f["kind"] == case.kind)
    assert case.subject in (first["tensor"], first["file"]), first
    assert 10 < len(first["message"]) < 1500
    # What is left is a consequence: tensors that a damaged file would have held, or the other side of a swap.
    assert {f["kind"] for f in errors} <= {case.kind, "missing", "unexpected"}
    ended = run_main(capsys, "inspect", source, *more)
    assert ended.code == 3
    assert f"error: {case.kind}: " in ended.out
    assert "\x1b" not in ended.out + ended.err
    if not case.values:
        out = tmp_path / "port"
        ended = run_main(capsys, "shard", source, "--out", out, "--tp", 2)
        assert (ended.code, out.exists()) == (3, False)
        assert ended.err.count("error: ") == 1 and "hint: " in ended.err
    assert time.process_time() - started < 10
