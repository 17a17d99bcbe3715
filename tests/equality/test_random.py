"""Random configurations of every family, uncompiled; `scripts/equality` compiles fifty of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.eager import eager_port
from tests.equality.cases import draw_case, run_case
from tests.families import FAMILIES

CASES = [
    (family, number) for family in FAMILIES for number in range(5 if family == "gemma3" else 2)
]


@pytest.mark.parametrize(("family", "number"), CASES)
def test_random_configuration(family: str, number: int, tmp_path: Path) -> None:
    found = run_case(draw_case(family, number), tmp_path, eager_port)
    assert found["outcome"] in ("equal", "refused"), found
