"""Levels on a right port and on ports with one fault each; the port is stock transformers itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemma_neuron.port import Port
from gemma_neuron.reports import LevelResult, ValidationReport
from gemma_neuron.validation.validator import Options, validate
from tests.families import write_family
from tests.tiny import write_tiny_gemma3, write_tiny_gemma4
from tests.validation.ports import make_port
from tests.validation.stock_runner import Faults, StockRunner

CONTEXT = 160
BUCKETS = (24, 48)
SMALL = Path(__file__).parent / "small.toml"


def level(report: ValidationReport, number: int) -> LevelResult:
    return report.levels[number]


@pytest.fixture(scope="module")
def source4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gemma4(tmp_path_factory.mktemp("gemma4"), layers=3, dtype="float32")


@pytest.fixture(scope="module")
def source3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gemma3(tmp_path_factory.mktemp("gemma3"), layers=6, dtype="float32")


@pytest.fixture(scope="module")
def port4(source4: Path, tmp_path_factory: pytest.TempPathFactory) -> Port:
    """A port with its golden made."""
    path = tmp_path_factory.mktemp("ports") / "port4"
    port = make_port(source4, path, max_context=CONTEXT, buckets=BUCKETS)
    runner = StockRunner(source4, max_context=CONTEXT, buckets=BUCKETS)
    validate(port, runner, Options(checkpoint=source4, questions=SMALL))
    return port


def run(
    port: Port, source: Path, faults: Faults | None = None, **options: object
) -> ValidationReport:
    runner = StockRunner(source, faults=faults, max_context=CONTEXT, buckets=BUCKETS)
    return validate(port, runner, Options(questions=SMALL, **options))  # type: ignore[arg-type]


def test_right_port_of_random_weights_matches_but_is_broken(port4: Port, source4: Path) -> None:
    report = run(port4, source4)
    for number in (0, 1, 3, 4, 5):
        assert level(report, number).status == "pass", level(report, number)
    assert level(report, 2).status == "fail"
    assert report.verdict == "matches-but-broken"
    assert report.token_match["compared"] == report.token_match["equal"] > 0
    assert report.provenance["golden"]["reused"]
    assert port4.verdict() == report.verdict


def test_a_golden_of_other_questions_judges_none(
    port4: Port, source4: Path, tmp_path: Path
) -> None:
    """Its q00 answers another question than ours: nobody looked, so it is no fault of the reference."""
    other = tmp_path / "other.toml"
    other.write_text(SMALL.read_text().replace('"Hi"', '"One"'))
    golden = next(port4.golden_folder.glob("*.safetensors"))
    runner = StockRunner(source4, max_context=CONTEXT, buckets=BUCKETS)
    found = validate(
        port4, runner, Options(golden=golden, questions=other, levels=frozenset({0, 2}))
    )
    assert level(found, 2).status == "not-run" and found.verdict == "insufficient"
    assert level(found, 2).reason.startswith(
        f"the golden has no answer to 1 of the 2 questions of {other}"
    )


def test_gemma3_passes_the_comparing_levels(source3: Path, tmp_path: Path) -> None:
    port = make_port(source3, tmp_path / "port", max_context=CONTEXT, buckets=BUCKETS)
    report = run(port, source3, checkpoint=source3)
    for number in (0, 1, 3, 4, 5):
        assert level(report, number).status == "pass", level(report, number)
    assert level(report, 1).detail["against"] == "the checkpoint"


@pytest.mark.parametrize(
    ("faults", "caught_by"),
    [
        (Faults(shift_positions=1), {3, 4}),
        (Faults(window=1), {3, 4}),
        (Faults(window=-1), {3, 4}),
        (Faults(no_softcap=True), {3, 4}),
        (Faults(layer_scalar=1.0), {3, 4, 5}),
        (Faults(leak=True), {4}),
        (Faults(swap_slots=True), {4}),
        (Faults(corrupt_from=140), {3, 4}),
        (Faults(decode_sees=20), {4}),
    ],
    ids=lambda value: str(value) if isinstance(value, Faults) else "",
)
def test_fault_is_caught(port4: Port, source4: Path, faults: Faults, caught_by: set[int]) -> None:
    report = run(port4, source4, faults, levels=frozenset(caught_by))
    failed = {item.level for item in report.levels if item.status == "fail"}
    assert caught_by <= failed, [item.reason for item in report.levels]
    assert report.verdict == "differs"


def test_orig_19_per_layer_embeddings_that_come_back_as_zeros(tmp_path: Path) -> None:
    """orig-19-gather-silent-zero: no error anywhere, and the answers are wrong; such a port is not served."""
    source = write_family(tmp_path / "source", "E2B", dtype="float32")
    port = make_port(source, tmp_path / "port", max_context=CONTEXT, buckets=BUCKETS)
    compared = frozenset({3, 4})
    right = run(port, source, checkpoint=source, levels=compared)
    assert [level(right, number).status for number in compared] == ["pass", "pass"]
    wrong = run(port, source, Faults(no_per_layer=True), levels=compared)
    assert [level(wrong, number).status for number in compared] == ["fail", "fail"]
    assert wrong.verdict == port.verdict() == "differs"
