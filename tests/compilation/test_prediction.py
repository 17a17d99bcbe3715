"""What a ledger teaches: peaks that were seen, failures that bar nothing, and lines from a bucket that say nonsense."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gemma_neuron.artifacts import CommittedSet
from gemma_neuron.backends.base import Backend, PortPart, UnitSpec
from gemma_neuron.compilation import ledger
from gemma_neuron.compilation.prediction import MARGIN, Prediction, predict
from gemma_neuron.port import Port

MODEL = 10**9
UNIT = UnitSpec(phase="decode", batch=3, length=1)
LINE: dict[str, Any] = {
    "unit": UNIT.name,
    "outcome": "built",
    "host_peak_bytes": 2 * MODEL,
    "host_model_bytes": MODEL,
    "seconds": 5,
}
NONSENSE: list[dict[str, Any]] = [
    {"seconds": None},
    {"seconds": "long"},
    {"seconds": -1.0},
    {"seconds": float("nan")},
    {"host_peak_bytes": "much"},
    {"host_peak_bytes": -5},
    {"host_peak_bytes": True},
    {"host_model_bytes": 0},
    {"unit": ["decode"]},
    {"outcome": {}},
]


class Model:
    """A back end as far as a prediction asks one."""

    def host_bytes(self, part: PortPart) -> int:
        return MODEL


def predicted(folder: Path, *lines: dict[str, Any]) -> Prediction:
    folder.mkdir(exist_ok=True)
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    part = cast(PortPart, SimpleNamespace(unit=UNIT, port=Port(folder)))
    return predict([part], cast(Backend, Model()))[UNIT.name]


def test_what_a_unit_took_is_what_it_will_take(tmp_path: Path) -> None:
    found = predicted(tmp_path / "port", LINE)
    assert (found.host_bytes, found.seconds) == (MARGIN * 2 * MODEL, 5)


def test_a_unit_that_failed_is_not_expected_to_take_less_than_the_model_says(
    tmp_path: Path,
) -> None:
    failed = LINE | {"outcome": "failed", "host_peak_bytes": MODEL // 4, "seconds": 0.0}
    found = predicted(tmp_path / "port", failed)
    assert (found.host_bytes, found.seconds) == (MODEL, None)
    stopped = failed | {"host_peak_bytes": 3 * MODEL}  # which was measured
    assert predicted(tmp_path / "port", stopped).host_bytes == int(MARGIN * 3 * MODEL)


@pytest.mark.parametrize("nonsense", NONSENSE, ids=str)
def test_lines_that_say_nonsense_are_passed_over(tmp_path: Path, nonsense: dict[str, Any]) -> None:
    found = predicted(tmp_path / "port", LINE | nonsense, {"unit": UNIT.name, "outcome": "built"})
    assert (found.host_bytes, found.seconds) == (MODEL, None)
    assert predicted(tmp_path / "port", LINE, LINE | nonsense).seconds == 5


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"shortcut": 1},
        {"key": ["decode"]},
        {"key": {"shape": 5}},
        {"built": None},
        {"built": {"life": 1, "seconds": "x"}},
        {"built": {"seconds": 1.0}},
    ],
    ids=str,
)
def test_a_manifest_that_says_nonsense_has_its_unit_built_again(
    tmp_path: Path, facts: dict[str, Any]
) -> None:
    port = Port(tmp_path)
    good = {"shortcut": "s", "key_digest": "k", "key": {"shape": UNIT.name}, "built": {"life": 1}}
    unit_set: CommittedSet = port.unit_set(UNIT)
    unit_set.folder.mkdir(parents=True)
    (unit_set.folder / "package").write_bytes(b"code")
    unit_set.commit(["package"], good)
    found = ledger.committed(port, UNIT)
    assert found is not None and not found.problem
    unit_set.commit(["package"], good | facts if facts else {})
    found = ledger.committed(port, UNIT)
    assert found is not None and "does not say what it was built from" in found.problem
    (tmp_path / "ledger.jsonl").write_text('{"outcome": "built", "digest": ["x"]}\n')
    ledger.settle(port, [UNIT])
    assert [line.get("unit") for line in port.ledger()] == [None]
    assert ledger.why_missed(port, UNIT, {"shape": UNIT.name}, None) == "no entry yet"
    (tmp_path / "ledger.jsonl").write_text(
        json.dumps({"outcome": "built", "unit": UNIT.name, "fields": {"shape": 5}}) + "\n"
    )
    assert ledger.why_missed(port, UNIT, {"shape": UNIT.name}, None) == "no entry yet"
