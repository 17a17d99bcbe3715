"""The host's memory: what was seen elsewhere is reproduced, what we do is measured, what is too much is refused."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gemma_neuron.backends.base import CompileSpec, PortPart
from gemma_neuron.backends.registry import backend
from gemma_neuron.elastic.memory import tree
from gemma_neuron.errors import DoesNotFitError
from gemma_neuron.instances import instance
from gemma_neuron.machine import (
    GIB,
    budget_of,
    control_groups,
    free_memory,
    how_many_fit,
    instance_type,
    memory_limit,
    oom_kills,
)
from gemma_neuron.models.registry import read_geometry, read_parameter_table
from gemma_neuron.port import Port
from gemma_neuron.sharding.host_memory import require_compilers, streamed_bytes
from gemma_neuron.sharding.placement import place
from tests.command import run
from tests.sharding.test_published_sizes import planned
from tests.sizes import size_config
from tests.tiny import (
    Tensor,
    gemma4_config,
    random_tensors,
    write_json,
    write_safetensors,
    write_tiny_gemma4,
)

SEEN_ALL_RANKS = 300e9
SEEN_ONE_RANK = 182e9
"""The original port of the 31B at tp 8: "over 300 GB" with eight ranks at once, 182 GB with one."""


def test_orig_05_the_two_usual_ways_take_what_was_seen() -> None:
    """orig-05-loader-oom-8-ranks, and the 182 GB of the way that worked."""
    host = planned("31B", 8).host
    assert host.all_ranks_float32 == pytest.approx(SEEN_ALL_RANKS, rel=0.15)
    assert host.all_ranks_float32 > SEEN_ALL_RANKS
    assert host.one_rank_float32 == pytest.approx(SEEN_ONE_RANK, rel=0.15)
    assert host.streamed < 2**30


def test_streaming_takes_what_is_predicted(tmp_path: Path) -> None:
    """A real `shard` of 200 MB and its child: their anonymous memory follows no model and stays as predicted."""
    source = write_tiny_gemma4(tmp_path / "source", layers=2)
    config = gemma4_config(2, hidden_size=2048, intermediate_size=8192)
    write_json(source / "config.json", config)
    write_safetensors(source / "model.safetensors", _constant_tensors(config))
    assert (source / "model.safetensors").stat().st_size > 200e6
    command = [sys.executable, "-m", "gemma_neuron", "shard", str(source)]
    log, peak = tmp_path / "log", 0
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--out", str(tmp_path / "port"), "--tp", "4"], stdout=output, stderr=output
        )
        while process.poll() is None:
            peak = max(peak, sum(map(_anonymous_bytes, tree([process.pid]))))
            time.sleep(0.005)
    assert process.returncode == 0, log.read_text()
    assert streamed_bytes() / 4 < peak <= streamed_bytes()


def _constant_tensors(config: dict[str, object]) -> dict[str, Tensor]:
    """Every tensor of the model with 0.25 in it: what is read, cut and written is bytes, whatever they say."""
    geometry = read_geometry(config)
    small = random_tensors(gemma4_config(2), "model.language_model.")
    tensors: dict[str, Tensor] = {}
    for spec in read_parameter_table(geometry):
        if spec.origin == "checkpoint":
            count = 1
            for length in spec.shape:
                count *= length
            name = "model.language_model." + spec.name
            tensors[name] = (
                small[name] if spec.buffer else ("BF16", spec.shape, b"\x80\x3e" * count)
            )
    return tensors


def _anonymous_bytes(pid: int) -> int:
    """Resident anonymous bytes of one process now; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith("RssAnon:")), 0)


def test_nxdi_04_a_long_bucket_on_a_128_gib_host() -> None:
    """nxdi-04-cte-host-oom: 16,384 tokens ran a 128 GiB host out of memory at tp 4, 8,192 did not."""
    geometry = read_geometry(size_config("31B"))
    plan = place(geometry, read_parameter_table(geometry), 4, "replicate-kv")
    budget = budget_of(instance("trn2.3xlarge").host_bytes)
    facts: dict[str, Any] = {"dtype": "bfloat16", "slots": 1, "max_context": 16384}
    spec = CompileSpec(backend="neuron", buckets=(512, 8192, 16384), **facts)
    peaks = {
        unit.name: backend("neuron").host_bytes(
            PortPart(geometry=geometry, plan=plan, spec=spec, unit=unit, port=Port(Path()))
        )
        for unit in spec.units()
    }
    units = [unit for unit in spec.units() if unit.length != 16384]
    fitting = [(unit.name, peaks[unit.name]) for unit in units]
    require_compilers(fitting, units, budget, "a test", spare_host=True)
    with pytest.raises(DoesNotFitError) as refused:
        require_compilers(list(peaks.items()), spec.units(), budget, "a test", spare_host=True)
    assert refused.value.exit_code == 4
    assert "prefill-b1-l16384" in refused.value.message
    assert f"{budget:,}" in refused.value.message
    assert "8192 fits" in refused.value.hint


def test_plan_refuses_a_host_that_is_too_small(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", size_config("31B"))
    done = run("plan", tmp_path, "--tp", "8", "--host-memory", "8GB")
    assert done.returncode == 4
    assert "8,000,000,000 may be used (--host-memory)" in done.stderr
    assert "hint: " in done.stderr and "CPU" not in done.stdout
    assert run("plan", tmp_path, "--tp", "8", "--host-memory", "48GB").returncode == 0


@pytest.mark.fault("cc-03-f137c")
def test_compile_refuses_before_it_writes(tmp_path: Path) -> None:
    source = write_tiny_gemma4(tmp_path / "source")
    done = run(
        "compile", source, "--out", tmp_path / "port", "--backend", "cpu", "--host-memory", "64MB"
    )
    assert done.returncode == 4, done.stderr
    assert "64,000,000 may be used (--host-memory)" in done.stderr
    assert not (tmp_path / "port").exists()


def test_compilers_are_limited_to_what_fits() -> None:
    assert how_many_fit([5, 3, 3], 11) == 3
    assert how_many_fit([3, 5, 3], 8) == 2
    assert how_many_fit([5, 3, 3], 7) == 1


@pytest.mark.parametrize("given", ["0", "lots", "GB", "-1GB", "8iB", "1.5.2GB"])
def test_sizes_that_cannot_be(tmp_path: Path, given: str) -> None:
    write_json(tmp_path / "config.json", gemma4_config())
    assert run("plan", tmp_path, "--tp", "2", f"--host-memory={given}").returncode == 2


def root_with(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


MEMINFO = {"proc/meminfo": "MemTotal:       67108864 kB\nMemFree: 1 kB\n"}


@pytest.mark.parametrize(
    ("files", "gib", "origin"),
    [
        ({}, 64, "machine"),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/memory.max": f"{16 * GIB}\n",
                "sys/fs/cgroup/memory.max": "max\n",
            },
            16,
            "container",
        ),
        (
            {
                "proc/self/cgroup": "12:cpu:/\n9:memory:/docker/x\n1:name=systemd:/docker/x\n",
                "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": f"{32 * GIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            32,
            "container",
        ),
        # A container that sees its own mount but the host's path.
        (
            {
                "proc/self/cgroup": "4:memory:/docker/abc\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
            },
            8,
            "container",
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{512 * GIB}\n",
            },
            64,
            "machine",
        ),
    ],
)
def test_the_smaller_of_machine_and_container(
    tmp_path: Path, files: dict[str, str], gib: int, origin: str
) -> None:
    found = memory_limit(root_with(tmp_path, MEMINFO | files))
    assert (found.total, found.origin) == (gib * GIB, origin)
    assert found.budget == budget_of(gib * GIB)


@pytest.mark.parametrize(("gib", "left"), [(384, 368.64), (128, 120), (24, 16), (16, 8), (6, 3)])
def test_the_reserve(gib: int, left: float) -> None:
    """The larger of 8 GiB and 4 %, and half of a machine that has less than twice that."""
    assert budget_of(gib * GIB) == pytest.approx(left * GIB)


def test_the_instances_own_name(tmp_path: Path) -> None:
    assert instance_type(tmp_path) == ""
    named = root_with(tmp_path, {"sys/devices/virtual/dmi/id/product_name": "inf2.24xlarge\n"})
    assert instance_type(named) == "inf2.24xlarge"


@pytest.mark.parametrize(
    ("files", "free", "killed"),
    [
        ({}, 48 * GIB, 7),
        (  # version 2: an ancestor's limit is nearer than the group's own
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": f"{32 * GIB}\n",
                "sys/fs/cgroup/a/b/memory.current": f"{2 * GIB}\n",
                "sys/fs/cgroup/a/b/memory.events": "low 0\nmax 12\noom 3\noom_kill 2\n",
                "sys/fs/cgroup/a/memory.max": f"{16 * GIB}\n",
                "sys/fs/cgroup/a/memory.current": f"{12 * GIB}\n",
                "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
            },
            6 * GIB,
            2,
        ),
        (
            {
                "proc/self/cgroup": "9:memory:/docker/x\n",
                "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": f"{8 * GIB}\n",
                "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": f"{7 * GIB}\n",
                "sys/fs/cgroup/memory/docker/x/memory.stat": f"total_inactive_file {GIB}\n",
                "sys/fs/cgroup/memory/docker/x/memory.oom_control": "under_oom 0\noom_kill 1\n",
            },
            2 * GIB,
            1,
        ),
    ],
)
def test_what_is_free_and_what_was_killed(
    tmp_path: Path, files: dict[str, str], free: int, killed: int
) -> None:
    machine = {
        "proc/meminfo": f"{MEMINFO['proc/meminfo']}MemAvailable: {48 * 2**20} kB\n",
        "proc/vmstat": "pgfault 1\noom_kill 7\n",
    }
    root = root_with(tmp_path, machine | files)
    assert (free_memory(root), oom_kills(root)) == (free, killed)
    assert bool(control_groups(root)) == bool(files)
