"""The ledger's third side: each way a rank file can differ from plan and checkpoint is a finding of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gemma_neuron.errors import IntegrityError, PortIncompleteError
from gemma_neuron.pipeline import CompileRequest, inspected, shard
from gemma_neuron.pipeline.inspecting import account_for_ranks
from gemma_neuron.port import Port
from gemma_neuron.reports import AuditReport
from tests.checkpoint.helpers import Tensors
from tests.pipeline.conftest import tiny_source
from tests.tiny import decode, encode, read_safetensors, write_safetensors

SCALAR = "layers.0.layer_scalar"
TABLE = "embed_tokens.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    source = tiny_source(folder / "source")
    shard(str(source), CompileRequest(out=folder / "port", backend="", tp=2), None)
    return folder / "port"


@pytest.fixture
def port(made: Path, tmp_path: Path) -> Port:
    return Port(Path(shutil.copytree(made, tmp_path / "port")))


def findings(port: Port, values: bool = False) -> list[tuple[str, str, str]]:
    report = inspected(str(port.path), values=values)
    return [(f.kind, f.tensor, f.file) for f in report.findings]


def recommit(port: Port, change: Callable[[Tensors], object], rank: int = 1) -> None:
    """A rank file with a tensor changed and a marker that vouches for it: only the ledger can tell."""
    tensors = read_safetensors(port.rank_file(rank))
    change(tensors)
    write_safetensors(port.rank_file(rank), tensors)
    port.rank_set(rank).commit([port.rank_file(rank).name])


def test_a_sharded_port_adds_up_on_all_three_sides(port: Port) -> None:
    report = inspected(str(port.path), values=True)
    assert (report.verdict, report.findings) == ("ok", ())
    assert report.ranks is not None
    assert (report.ranks.planned, report.ranks.committed) == (2, 2)
    parameters = port.plan.parameters
    assert report.ranks.tensors == len(parameters)
    assert report.ranks.bytes == sum(port.rank_file(r).stat().st_size for r in (0, 1))
    by_model = {row.model: row for row in report.ledger}
    assert by_model.keys() == {parameter.name for parameter in parameters}
    assert {row.ranks for row in report.ledger} == {2}
    assert (by_model[TABLE].placement, by_model[TABLE].rank_shape) == ("rows", (256, 64))
    assert by_model[SCALAR].rank_shape == (1,)
    kept = json.loads((port.path / "audit.json").read_text())
    assert kept["ranks"] == json.loads(json.dumps(report.to_json()))["ranks"]


CHANGES: dict[str, tuple[Callable[[Tensors], object], str, str]] = {
    "a lost buffer": (lambda t: t.pop(SCALAR), "missing", SCALAR),
    "a lost weight": (lambda t: t.pop(TABLE), "missing", TABLE),
    "a stray tensor": (lambda t: t.update(extra=t[SCALAR]), "unexpected", "extra"),
    "the whole table": (
        lambda t: t.update({TABLE: (t[TABLE][0], (512, 64), t[TABLE][2] * 2)}), "shape", TABLE),
    "another dtype": (
        lambda t: t.update({SCALAR: encode(decode(t[SCALAR]), "F32")}), "dtype", SCALAR),
    "a buffer at its initial value": (
        lambda t: t.update({SCALAR: encode(np.ones(1, np.float32))}), "rank-differs", SCALAR),
    "another rank's number": (
        lambda t: t.update(rank=("I32", (1,), b"\0" * 4)), "rank-differs", "rank"),
}  # fmt: skip


@pytest.mark.fault("orig-02-layer-scalar-buffer")
@pytest.mark.parametrize("case", CHANGES)
def test_a_rank_file_that_is_not_as_planned(port: Port, case: str) -> None:
    change, kind, tensor = CHANGES[case]
    recommit(port, change)
    assert findings(port) == [(kind, tensor, "rank-01.safetensors")]
    with pytest.raises(IntegrityError, match=f"{kind}: rank-01.safetensors .*{tensor}") as caught:
        account_for_ranks(port)
    assert caught.value.exit_code == 5


def test_a_lost_buffer_says_what_the_checkpoint_has(port: Port) -> None:
    recommit(port, CHANGES["a buffer at its initial value"][0])
    seen = next(b for b in inspected(str(port.path), values=False).buffers if SCALAR in b.tensor)
    [found] = inspected(str(port.path), values=False).findings
    assert f"from 1 to 1; the checkpoint has {seen.min:.6g}" in found.message


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        ("gone", "index-missing-file"),
        ("no marker", "index-missing-file"),
        ("cut", "truncated-file"),
        ("longer", "bad-header"),
        ("no safetensors", "bad-header"),
        ("manifest", "bad-header"),
        ("link", "unsafe-name"),
        ("folder", "unsafe-name"),
    ],
)
def test_a_damaged_rank_file_is_found_by_headers(port: Port, damage: str, kind: str) -> None:
    file = port.rank_file(1)
    data = file.read_bytes()
    if damage == "gone":
        file.unlink()
    elif damage == "no marker":
        port.rank_set(1).marker_path.unlink()
    elif damage == "manifest":
        port.rank_set(1).manifest_path.write_text("{}")
    elif damage in ("link", "folder"):
        file.unlink()
        if damage == "folder":
            file.mkdir()
        else:
            (port.path.parent / "elsewhere").write_bytes(data)
            file.symlink_to(port.path.parent / "elsewhere")
    else:
        changed = {"cut": data[:-2], "longer": data + b"\0\0", "no safetensors": b"\x80" * 64}
        file.write_bytes(changed[damage])
    found = findings(port)
    assert found[0][0] == kind
    assert {file for _, _, file in found} == {"rank-01.safetensors"}


def test_a_flipped_bit_is_found_with_values(port: Port) -> None:
    file = port.rank_file(0)
    data = bytearray(file.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1  # the first byte of the first tensor
    file.write_bytes(data)
    assert findings(port) == []
    assert findings(port, values=True) == [("rank-differs", "", "rank-00.safetensors")]


def test_values_of_rank_files_are_judged_too(port: Port) -> None:
    def spoil(tensors: Tensors) -> None:
        values = decode(tensors[TABLE])
        values[3, 3] = np.inf
        tensors[TABLE] = encode(values)

    recommit(port, spoil, rank=0)
    assert findings(port, values=True) == [("non-finite", TABLE, "rank-00.safetensors")]


def test_an_audit_of_another_model_is_found(port: Port) -> None:
    report = json.loads((port.path / "audit.json").read_text())
    report["ledger"][0]["model"] = "layers.0.other"
    (port.path / "audit.json").write_text(json.dumps(report))
    assert {(kind, tensor) for kind, tensor, _ in findings(port)} >= {
        ("unexpected", "layers.0.other")
    }


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"findings": 5}'])
def test_a_port_without_a_sound_audit_says_so(port: Port, text: str | None) -> None:
    if text is None:
        (port.path / "audit.json").unlink()
    else:
        (port.path / "audit.json").write_text(text)
    with pytest.raises(
        PortIncompleteError if text is None else IntegrityError, match=r"audit\.json"
    ):
        inspected(str(port.path), values=False)


def test_shard_cuts_a_committed_rank_that_is_not_as_planned_again(
    made: Path, tmp_path: Path
) -> None:
    """Its marker vouches for the bytes, so the ledger is what refuses it: once more, and all adds up."""
    port = Port(Path(shutil.copytree(made, tmp_path / "port")))
    recommit(port, CHANGES["a lost buffer"][0])
    source = tiny_source(tmp_path / "source")
    done = shard(str(source), CompileRequest(out=port.path, backend="", tp=2), None)
    assert (done.built, done.reused) == (1, 1)
    assert not inspected(str(port.path), values=True).errors


def test_inspect_of_a_port_on_the_command_line(port: Port) -> None:
    command = [sys.executable, "-m", "gemma_neuron", "inspect", str(port.path)]
    done = subprocess.run([*command, "--tensors"], capture_output=True, text=True, check=True)
    assert "rank files: 2 of 2 committed" in done.stdout
    line = next(
        text for text in done.stdout.splitlines() if text.endswith("ranks") and TABLE in text
    )
    assert (
        line.split()
        == (
            f"used model.language_model.{TABLE} BF16 512x64 -> {TABLE} | rows, 256x64 on 2 ranks"
        ).split()
    )
    recommit(port, CHANGES["a lost buffer"][0])
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False)
    document = json.loads(done.stdout)
    assert (done.returncode, document["verdict"]) == (3, "broken")
    assert [f["kind"] for f in document["findings"]] == ["missing"]
    assert document["ranks"]["tensors"] == len(port.plan.parameters) - 1


def test_the_report_survives_a_round_trip(port: Port) -> None:
    from gemma_neuron.checkpoint.rank_files import read_audit

    report: AuditReport = read_audit(port)
    assert json.loads(json.dumps(report.to_json())) == json.loads(
        (port.path / "audit.json").read_text()
    )
