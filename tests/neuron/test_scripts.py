"""What scripts for a machine without, or with, a NeuronCore do around their checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.checks import Check, Failed, run_rest


def test_a_check_that_passed_is_not_run_again_until_the_facts_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def checks(broken: bool) -> list[Check]:
        def first() -> str:
            ran.append("first")
            return "whole"

        def second() -> str:
            ran.append("second")
            if broken:
                raise Failed("broken")
            return "whole"

        return [("first", first), ("second", second)]

    results = tmp_path / "results.jsonl"
    assert run_rest(checks(True), results, {"nxd": "0.18"}) == 1
    assert run_rest(checks(False), results, {"nxd": "0.18"}) == 0
    assert ran == ["first", "second", "second"]
    assert capsys.readouterr().out.splitlines()[-1] == "1 had passed before"
    assert run_rest(checks(False), results, {"nxd": "0.19"}) == 0
    assert ran[3:] == ["first", "second"]
