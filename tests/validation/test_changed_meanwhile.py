"""Files that another process writes while a reference or a verdict is made of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gemma_neuron.errors import IntegrityError, SourceChangedError
from gemma_neuron.port import VERDICT_NAME, Port
from gemma_neuron.unchanged import FilesBefore
from gemma_neuron.validation.export import GoldenOptions, export_golden
from gemma_neuron.validation.validator import Options, validate
from tests.tiny import write_tiny_gemma4
from tests.validation.ports import make_port
from tests.validation.stock_runner import StockRunner

QUESTIONS = Path(__file__).parent / "small.toml"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gemma4(tmp_path_factory.mktemp("source"), layers=2, dtype="float32")


@pytest.fixture
def port(source: Path, tmp_path: Path) -> Port:
    return make_port(source, tmp_path / "port", tp=2, max_context=96)


def replaced(path: Path, data: bytes) -> None:
    beside = path.with_name("beside")
    beside.write_bytes(data)
    beside.replace(path)


def written(path: Path, data: bytes) -> None:
    with path.open("r+b") as file:
        file.write(data)


def flipped(path: Path) -> bytes:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    return bytes(data)


def other_rank(port: Port) -> None:
    """Sound in itself: another rank file, committed."""
    written(port.rank_file(0), flipped(port.rank_file(0)))
    port.rank_set(0).commit([port.rank_file(0).name])


CHANGES: dict[str, Callable[[Port], None]] = {
    "another file": lambda port: replaced(port.rank_file(1), port.rank_file(1).read_bytes() + b"x"),
    "in place": lambda port: written(port.rank_file(1), flipped(port.rank_file(1))),
    "committed anew": other_rank,
    "gone": lambda port: port.rank_file(0).unlink(),
    "tokenizer": lambda port: written(port.source_folder / "tokenizer.json", b" "),
    "plan": lambda port: written(port.path / "plan.json", b" "),
}


@pytest.mark.parametrize("when", ["level 1", "level 6"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_port_that_is_changed_gets_no_verdict(
    port: Port, source: Path, change: str, when: str
) -> None:
    runner = StockRunner(source, max_context=96)

    def progress(line: str) -> None:
        if line == when:
            CHANGES[change](port)

    options = Options(questions=QUESTIONS, levels=frozenset({0, 1, 6}))
    before = FilesBefore.of(port.files())
    with pytest.raises(IntegrityError, match=r"changed while this ran: .*There is no verdict"):
        validate(port, runner, options, before=before, progress=progress)
    assert not (port.path / VERDICT_NAME).exists()


def test_the_same_record_written_anew_and_new_logs_are_no_change(port: Port, source: Path) -> None:
    def progress(line: str) -> None:
        port.write_record(port.record)
        port.append("events.jsonl", {"event": line})

    options = Options(questions=QUESTIONS, levels=frozenset({0, 1}))
    before = FilesBefore.of(port.files())
    runner = StockRunner(source, max_context=96)
    report = validate(port, runner, options, before=before, progress=progress)
    assert [item.status for item in report.levels[:2]] == ["pass", "pass"]


def test_what_counts_as_changed(tmp_path: Path) -> None:
    small, large, absent = tmp_path / "a.json", tmp_path / "a.safetensors", tmp_path / "absent"
    small.write_bytes(b"1")
    large.write_bytes(b"22")
    before = FilesBefore.of([small, large, absent])
    assert before.changed() is None
    replaced(small, b"1")
    assert before.changed() is None
    state = large.stat()
    written(large, b"1")
    os.utime(large, ns=(state.st_atime_ns, state.st_mtime_ns))
    found = before.changed()
    assert found is not None and found.startswith(f"{large} changed while this ran: ")
    before = FilesBefore.of([small, absent])
    absent.write_bytes(b"")
    assert "it was not there before" in (before.changed() or "")
    small.unlink()
    assert f"{small} changed while this ran: it cannot be found any more" in (
        before.changed() or ""
    )


def test_a_checkpoint_that_is_changed_makes_no_golden(source: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(source, tmp_path / "mine")
    weights = next(mine.glob("*.safetensors"))

    def progress(line: str) -> None:
        if line.startswith("noise"):
            replaced(weights, flipped(weights))

    options = GoldenOptions(out=tmp_path / "g", questions=QUESTIONS)
    with pytest.raises(SourceChangedError, match="another file has taken its place"):
        export_golden(mine, options, checkpoint_digest="c", progress=progress)
    assert not list(tmp_path.glob("g.*"))
