"""Five random configurations a family; `scripts/equality` runs fifty."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.equality.cases import FAMILIES, draw_case, run_case


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_configuration(family: str, number: int, tmp_path: Path) -> None:
    found = run_case(draw_case(family, number), tmp_path)
    assert found["outcome"] in ("equal", "refused"), found
