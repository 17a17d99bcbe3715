"""What a worker on another machine takes from the mirror, and what it refuses to compile; moto's server, no cluster."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from gemma_neuron.backends.base import Backend, Limits, PortPart, UnitSpec
from gemma_neuron.backends.cpu.backend import CpuBackend
from gemma_neuron.compilation.worker import Job
from gemma_neuron.elastic.engine import WorkerContext
from gemma_neuron.errors import EnvironmentProblem, IntegrityError
from gemma_neuron.mirror.folder import cache_folder
from gemma_neuron.mirror.layout import blob_key, port_id, port_location
from gemma_neuron.mirror.store import Store
from gemma_neuron.pipeline.away import compile_away, fetch_inputs
from gemma_neuron.port import Port
from tests.pipeline.test_mirror import environment
from tests.sources.processes import Commands
from tests.sources.s3_servers import moto, own_bucket

BUCKET, URI = "away", "s3://away/gemma"


class Dependent(CpuBackend):
    """Units that read the decode unit, as those of neuron do that take its layout."""

    def inputs(self, part: PortPart) -> tuple[UnitSpec, ...]:
        return (part.spec.decode_unit,)


class Quiet:
    """A worker's context that nobody listens to."""

    def phase(self, doing: str, deadline: float | None = None) -> None: ...


@pytest.fixture
def store(port: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The port's prefix, with all of the port in it."""
    with moto() as address, own_bucket(address, BUCKET):
        around = environment(address, tmp_path) | {"GEMMA_NEURON_CACHE": str(tmp_path / "cache")}
        for name, value in around.items():
            monkeypatch.setenv(name, value)
        Commands(around).done("mirror", "push", shutil.copytree(port, tmp_path / "own"), URI)
        yield Store(port_location(URI, port_id(Port(port).record.digest)))


def job(port: Path, out: Path, **shortcut_key: str) -> Job:
    """The prefill unit's, with nothing of the port but what describes it."""
    whole = Port(port)
    unit = next(unit for unit in whole.spec.units() if unit.phase == "prefill")
    part = PortPart(
        geometry=whole.geometry, plan=whole.plan, spec=whole.spec, unit=unit, port=Port(out)
    )
    own = CpuBackend().shortcut_key(part) | shortcut_key
    return Job(part=part, known_key="", threads=1, limits=Limits(), shortcut_key=own)


def test_units_that_one_reads_come_from_the_mirror_and_are_committed(
    port: Path, store: Store, tmp_path: Path
) -> None:
    asked = job(port, tmp_path / "away")
    fetch_inputs(store, cast(Backend, Dependent()), asked)
    decode = asked.part.spec.decode_unit
    assert asked.part.port.unit_set(decode).verify() == Port(port).unit_set(decode).verify()
    assert [path.name for path in (tmp_path / "away" / "graphs").iterdir()] == [decode.name]


def test_one_that_is_not_whole_in_the_mirror_is_named(
    port: Path, store: Store, tmp_path: Path
) -> None:
    asked = job(port, tmp_path / "away")
    manifest = Port(port).unit_set(asked.part.spec.decode_unit).verify()
    store.delete(blob_key(manifest.files[0].blake3))
    with pytest.raises(IntegrityError, match=f"{asked.name} needs graphs/decode.* cannot be had"):
        fetch_inputs(store, cast(Backend, Dependent()), asked)


def test_a_machine_that_would_compile_something_else_is_named_and_keeps_nothing(
    port: Path, store: Store, tmp_path: Path
) -> None:
    """Neither of its own nor of a worker that was killed here; what another machine's has there is left alone."""
    asked = job(port, tmp_path / "away", cxx="g++ of another age")
    units = cache_folder(store.location, store.client.meta.endpoint_url) / "units"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    theirs = units / f"decode.elsewhere.{gone.pid}"
    for left in (theirs, units / f"decode.{platform.node()}.{gone.pid}"):
        left.mkdir(parents=True)
    with pytest.raises(EnvironmentProblem, match=r"cxx .* here, g\+\+ of another age there"):
        compile_away(store.location, "", cast(WorkerContext, Quiet()), asked)
    assert list(units.iterdir()) == [theirs]
