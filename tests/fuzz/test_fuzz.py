"""Property-based fuzz of what is read before a checkpoint is trusted; `scripts/fuzz-headers` runs it longer."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.strategies import BYTES
from tests.fuzz.targets import TARGETS, Broken, Target, seeds, watched

CASES = {
    "raw": 500,
    "header": 600,
    "index": 400,
    "config": 300,
    "edits": 400,
    "prompt": 100,
    "weights": 150,
}
LEAST = {"raw": 3, "header": 5, "index": 5, "config": 2, "edits": 2, "prompt": 2, "weights": 4}
"""Outcomes that so many cases must reach: a fuzz that always stops at the first byte tests that byte."""


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_crashes_hangs_or_takes_memory_beyond_its_input(name: str, tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    for data in seeds(name, tmp_path):
        outcomes[watched(name, tmp_path, data).outcome] += 1

    @settings(
        max_examples=CASES[name],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(BYTES[name])
    def fuzz(data: bytes) -> None:
        outcomes[watched(name, tmp_path, data).outcome] += 1

    fuzz()
    assert len(outcomes) >= LEAST[name], outcomes
    assert "sound" in outcomes, outcomes


def test_a_seed_is_sound(tmp_path: Path) -> None:
    for name in ("raw", "header", "index", "config"):
        assert (
            watched(name, tmp_path, seeds(name, tmp_path)[-1 if name == "header" else 0]).outcome
            == "sound"
        )


@pytest.mark.parametrize("claimed", [2**20, 100_000_000, 2**40, 2**63])
def test_what_a_header_claims_is_not_allocated(tmp_path: Path, claimed: int) -> None:
    """A length, a shape and offsets of terabytes in a file of bytes."""
    header = b'{"a":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (claimed // 4, claimed)
    for data in (
        struct.pack("<Q", min(claimed, 2**64 - 1)) + b"{",
        struct.pack("<Q", len(header)) + header,
    ):
        seen = watched("raw", tmp_path, data)
        assert seen.outcome in ("truncated-file", "bad-header", "offset-out-of-range")
        assert seen.allocated < 100_000


def test_the_watch_sees_what_it_is_there_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TARGETS, "greedy", Target(lambda _, data: str(len(bytes(20_000_000)))))
    with pytest.raises(Broken, match="bytes were allocated for 3 bytes"):
        watched("greedy", tmp_path, b"abc")
    monkeypatch.setattr("tests.fuzz.targets.SECONDS", 0.01)
    monkeypatch.setitem(TARGETS, "slow", Target(lambda _, data: str(sum(range(3_000_000)))))
    with pytest.raises(Broken, match="s for 3 bytes"):
        watched("slow", tmp_path, b"abc")


@given(st.sampled_from([*TARGETS]))
def test_every_target_has_inputs(name: str) -> None:
    assert name in BYTES and name in CASES and name in LEAST
