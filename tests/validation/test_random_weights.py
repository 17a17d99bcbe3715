"""Random weights: a port of them is its reference, and neither says anything. Every family, model code included."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from gemma_neuron.validation.validator import Options, validate
from tests.eager import EagerRunner, eager_port
from tests.families import FAMILIES, write_family

SMALL = Path(__file__).parent / "small.toml"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_port_of_random_weights_matches_but_is_broken(family: str, tmp_path: Path) -> None:
    source = write_family(tmp_path / "source", family)
    port = eager_port(
        source, tmp_path / "port", tp=2, slots=2, max_context=64, buckets=(8, 24), score_length=32
    )
    with closing(EagerRunner(port)) as runner:
        report = validate(port, runner, Options(checkpoint=source, questions=SMALL))
    statuses = {item.level: item.status for item in report.levels}
    assert [statuses[level] for level in (0, 1, 3, 4)] == ["pass"] * 4, report.levels
    assert statuses[2] == "fail"
    assert report.verdict == "matches-but-broken"
    assert report.token_match["compared"] == report.token_match["equal"] > 0
