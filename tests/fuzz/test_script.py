"""`scripts/fuzz-headers` counts, stops at its count, goes on from its result file, and fails where a slice did."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz_headers.py"


def fuzz(results: Path, count: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "--engine", "hypothesis", "--target", "index",
               "--minutes", "5", "--count", str(count), "--results", results]  # fmt: skip
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


def test_counts_resumes_and_fails(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    done = fuzz(results, 120)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(line["target"], line["outcome"]) for line in lines] == [("index", "ok")]
    assert lines[0]["cases"] == 120 == sum(lines[0]["outcomes"].values())
    assert "total: 120 cases" in done.stdout and "0 broken" in done.stdout
    assert fuzz(results, 120).returncode == 0
    assert len(results.read_text().splitlines()) == 1
    broken = lines[0] | {"outcome": "broken", "error": "Broken: index: 9 bytes", "input": "00"}
    results.write_text(json.dumps(broken) + "\n")
    done = fuzz(results, 120)
    assert (done.returncode, "BROKEN index: broken: Broken: index" in done.stdout) == (1, True)
