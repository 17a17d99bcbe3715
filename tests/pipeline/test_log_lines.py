"""`compile --log-format json`: its progress is objects too, and its result one document."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.command import run
from tests.pipeline.conftest import FLAGS


def test_progress_is_objects_too_and_the_result_is_one_document(
    source: Path, port: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    shutil.copytree(port, own)
    (own / "graphs" / "decode-b3-l1" / "graph.committed").unlink()  # something to do
    done = run("--log-format", "json", "compile", source, "--out", own, *FLAGS)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == 1 and document["units"]["built"] == 1
    said = done.stderr.splitlines()
    assert said and all(json.loads(line)["event"] for line in said)
