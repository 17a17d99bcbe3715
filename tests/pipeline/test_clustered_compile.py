"""`compile --cluster`: two machines, which are two raylets of this one, and moto's server between them and us."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from gemma_neuron.artifacts import remove
from gemma_neuron.pipeline import runner_factory
from gemma_neuron.port import Port
from tests.elastic import clusters
from tests.pipeline.test_mirrored_compile import UNITS, arguments, built, running
from tests.sources.processes import Commands, clean_environment
from tests.sources.s3_servers import boto, moto, variables

# Eight units are compiled in all, at most two at once.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
NODE_BOUND, COMPILE_SECONDS = 30.0, 1200.0
PROMPT = [2, 9, 7, 5, 11, 3, 8]


@pytest.fixture(scope="module")
def away(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the machines keep what they cache: nothing of the command's."""
    return tmp_path_factory.mktemp("machines")


@pytest.fixture(scope="module")
def server(away: Path) -> Iterator[str]:
    """A store that this process and all it starts from now on know: the cluster's daemons too."""
    with moto() as address, pytest.MonkeyPatch.context() as patch:
        boto(address).create_bucket(Bucket="cluster")
        for name, value in variables(address, GEMMA_NEURON_CACHE=str(away)).items():
            patch.setenv(name, value)
        yield address


@pytest.fixture
def machines(server: str) -> Iterator[Any]:
    """Room for one unit on each; the head has none, and is what the command itself joins."""
    with clusters.two_machines(places=1, beside_head=True) as made:
        yield made


@pytest.fixture
def commands(server: str, tmp_path: Path) -> Commands:
    own = variables(server, HOME=str(tmp_path), TMPDIR=str(tmp_path))
    return Commands(clean_environment() | own)


def keys(port: Path) -> dict[str, Any]:
    return {line["unit"]: line["fields"] for line in Port(port).ledger() if "fields" in line}


def logits(port: Path) -> np.ndarray[Any, Any]:
    runner = runner_factory(Port(port))()
    try:
        first = runner.prefill(PROMPT, slot=0, start=0)
        later = runner.decode([4, 0, 0], [len(PROMPT), 0, 0], [True, False, False])[0]
        return np.stack([first, later])
    finally:
        runner.close()


def workers(port: Path) -> list[dict[str, Any]]:
    events = Port(port).events() if (port / "events.jsonl").is_file() else []
    return [line for line in events if line["event"] == "worker_started"]


def raylet_of(pid: int) -> int:
    """The daemon of the machine a worker runs on."""
    return next(parent.pid for parent in psutil.Process(pid).parents() if parent.name() == "raylet")


def raylet(machine: Any) -> Any:
    """A machine's daemon, as a process."""
    kinds = machine.all_processes.items()
    return next(info.process for kind, infos in kinds if "raylet" in kind for info in infos)


def eventually(holds: Callable[[], Any], process: Any) -> Any:
    end = time.monotonic() + 600
    while not (found := holds()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


@clusters.NEEDS_RAY
def test_units_of_two_machines_are_those_of_one(
    source: Path, port: Path, machines: Any, commands: Commands, away: Path, tmp_path: Path
) -> None:
    """Same keys, same logits; the command's own machine compiles nothing, the others keep nothing."""
    out, uri = tmp_path / "port", "s3://cluster/equal"
    cluster = ("--mirror", uri, "--cluster", machines.address)
    with running(commands.start(*arguments(source, out), *cluster, "--json")) as process:
        found, said = process.communicate(timeout=COMPILE_SECONDS)
    assert process.returncode == 0, said
    assert json.loads(found)["units"] == {"total": UNITS, "built": UNITS, "reused": 0}
    assert sorted(built(out)) == sorted(keys(port)) == sorted(keys(out))
    assert keys(out) == keys(port)
    assert np.array_equal(logits(out), logits(port))
    assert [path for path in away.rglob("*") if path.is_file()] == []
    assert commands.document("mirror", "verify", out, uri)["objects"]["bad"] == 0
    shutil.rmtree(out)
    again = commands.document(*arguments(source, out), *cluster)
    assert again["units"] == {"total": UNITS, "built": 0, "reused": UNITS}


@clusters.NEEDS_RAY
def test_a_unit_whose_machine_is_lost_is_built_on_another(
    source: Path, port: Path, machines: Any, commands: Commands, tmp_path: Path
) -> None:
    """One unit of a port is left to build; the daemon of the machine that builds it is killed."""
    out = tmp_path / "port"
    shutil.copytree(port, out)
    whole = Port(out)
    unit = next(unit for unit in whole.spec.units() if unit.phase == "prefill")
    remove(whole.unit_folder(unit))
    (out / "ledger.jsonl").unlink()
    asked = (*arguments(source, out), "--mirror", "s3://cluster/lost", "--cluster")
    raylets = [raylet(node) for node in machines.list_all_nodes()]

    def builder() -> Any:
        found = [
            line["worker_pid"] for line in workers(out) if psutil.pid_exists(line["worker_pid"])
        ]
        return next((r for r in raylets if found and r.pid == raylet_of(found[-1])), None)

    before = len(workers(out))
    with running(commands.start(*asked, machines.address)) as process:
        eventually(lambda: len(workers(out)) > before, process)
        builder().kill()
        killed = time.time()
        _, said = process.communicate(timeout=COMPILE_SECONDS)
    assert process.returncode == 0, said
    (death,) = [line for line in whole.events() if line["event"] == "worker_died"]
    assert (death["unit"], death["signature"]) == (unit.name, "NodeLost")
    assert death["time"] - killed < NODE_BOUND
    assert built(out).count(unit.name) == 1
    assert keys(out) == keys(port)
    assert np.array_equal(logits(out), logits(port))


@clusters.NEEDS_RAY
def test_machines_that_are_not_there_or_too_small_are_said_first(
    source: Path, machines: Any, commands: Commands, tmp_path: Path
) -> None:
    out = tmp_path / "port"
    asked = (*arguments(source, out), "--mirror", "s3://cluster/none")
    assert "cannot be joined" in commands.refused(8, *asked, "--cluster", "127.0.0.1:9")
    away = commands.having(AWS_ENDPOINT_URL_S3="http://127.0.0.1:9", AWS_MAX_ATTEMPTS="1")
    assert "could not be read" in away.refused(8, *asked, "--cluster", machines.address)
    assert not out.exists()


def test_a_cluster_needs_a_mirror(source: Path, commands: Commands, tmp_path: Path) -> None:
    said = commands.refused(2, *arguments(source, tmp_path / "port"), "--cluster", "auto")
    assert "--cluster without --mirror" in said


@pytest.mark.skipif(not clusters.NEEDS_RAY.args[0], reason="Ray is installed")
def test_without_ray_it_is_said_how_to_get_it(
    source: Path, commands: Commands, tmp_path: Path
) -> None:
    asked = (*arguments(source, tmp_path / "port"), "--mirror", "s3://cluster/none")
    assert "gemma-neuron[cluster]" in commands.refused(8, *asked, "--cluster", "auto")
