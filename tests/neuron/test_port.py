"""A port for NeuronCores, made, run and broken by the product's own commands on the stand-in SDK."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from gemma_neuron.backends.neuron.packages import release
from gemma_neuron.port import Port
from tests.neuron.conftest import FLAGS
from tests.neuron.flow import Done, asked, compile_port, run, run_command, serving
from tests.neuron.machines import devices, install, report
from tests.tiny import read_safetensors, write_safetensors

Compiled = tuple[Path, Done]
Env = dict[str, str]


def against_stock(env: Env, port: Path, stock: Path) -> None:
    done = run(env, "tests.neuron.against_stock", port, stock)
    assert done.code == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert max(found["worst"].values()) < found["bar"], found


def test_eight_ranks_equal_stock(compiled: Compiled, sdk: Env, stock: Path) -> None:
    """Decode's layout was chosen by the compiler, so weights were rewritten at load and every graph expects them so."""
    port, done = compiled
    assert done.document["units"] == {"total": 4, "built": 4, "reused": 0}
    assert (port / "graphs" / "decode-b3-l1" / "layout.hlo").is_file()
    assert (port / "graphs" / "layout-b3-l1" / "graph.neff").is_file()
    against_stock(sdk, port, stock)


def test_a_folder_with_blanks_and_quotes_in_its_name(
    source: Path, sdk: Env, tmp_path: Path
) -> None:
    """NxD writes paths into flags that are taken apart at blanks."""
    done = compile_port(sdk, source, tmp_path / "it's my port", *FLAGS)
    assert done.code == 0, done.stderr
    assert done.document["units"] == {"total": 4, "built": 4, "reused": 0}


def test_a_second_run_builds_nothing(source: Path, compiled: Compiled, sdk: Env) -> None:
    port, done = compiled
    again = compile_port(sdk, source, port, *FLAGS)
    assert again.document["units"] == {"total": 4, "built": 0, "reused": 4}
    assert again.document["digest"] == done.document["digest"]


@pytest.mark.fault("cc-04-remote-cache")
def test_flags_per_phase_and_no_log_path_in_a_key(compiled: Compiled) -> None:
    port = Port(compiled[0])
    keys = {line["unit"]: line["fields"] for line in port.ledger()}
    assert keys["decode-b3-l1"]["flags"].startswith("-O2 ")
    assert keys["prefill-b1-l24"]["flags"].startswith("-O1 ")
    assert len({keys[u]["layout"] for u in keys if not u.startswith("decode")}) == 1
    assert "log" not in json.dumps([k["flags"] for k in keys.values()])


@pytest.mark.parametrize(
    ("given", "added"), [("--auto-cast none", "--auto-cast=none"), ("-O2", "-O1")]
)
def test_the_stand_in_compiler_refuses_what_nxd_would_double(
    tmp_path: Path, sdk: Env, given: str, added: str
) -> None:
    """NxD adds a flag it does not find in its own spelling: were ours another, no compile above would end well."""
    needed = "compile g.hlo --framework=XLA --target=inf2 --model-type=transformer --lnc=1"
    files = (f"--output={tmp_path}/g.neff", f"--logfile={tmp_path}/log")
    done = run_command(["neuronx-cc", *needed.split(), *files, *given.split(), added], sdk)
    assert done.code == 2 and "given twice" in done.stderr, done.stderr


@pytest.mark.fault("orig-14-failed-compile-cached")
def test_another_layout_rebuilds_all_that_follows_it_and_a_failed_compile_goes_on(
    source: Path, compiled: Compiled, sdk: Env, stock: Path, tmp_path: Path
) -> None:
    """A rebuilt decode beside a reused prefill would compute nonsense without an error."""
    out = tmp_path / "port"
    shutil.copytree(compiled[0], out)
    (out / "graphs" / "decode-b3-l1" / "graph.committed").unlink()
    other = sdk | {"STAND_IN_LAYOUT": "1"}
    killed = "fail:prefill:[F137] neuronx-cc was forcibly killed"
    failed = compile_port(other | {"STAND_IN_CC": killed}, source, out, *FLAGS)
    assert failed.code == 6
    error = failed.document["error"]
    assert "out of host memory" in error["message"] and "--host-memory" in error["hint"]
    done = compile_port(other, source, out, *FLAGS)
    assert done.code == 0, done.stderr
    assert "layout " in next(
        line for line in done.stderr.splitlines() if line.startswith("prefill-b1-l24")
    )
    built = [
        line["unit"]
        for line in Port(out).ledger()
        if line["outcome"] == "built" and line["life"] > 1
    ]
    assert sorted(built) == sorted(unit.name for unit in Port(out).spec.units())
    against_stock(other, out, stock)


@pytest.mark.fault("orig-06-serial-compile-deadlock")
def test_a_stalled_compiler_is_ended_and_tried_once_more(
    source: Path, compiled: Compiled, sdk: Env, tmp_path: Path
) -> None:
    env = sdk | {"STAND_IN_CC": "stall:decode"}
    shutil.copytree(compiled[0], tmp_path / "port")
    (tmp_path / "port" / "graphs" / "decode-b3-l1" / "graph.committed").unlink()
    done = compile_port(env, source, tmp_path / "port", *FLAGS, "--stall-after", 3)
    assert done.code == 6
    assert "failed twice in the same way (stall)" in done.document["error"]["message"]
    events = [line["event"] for line in Port(tmp_path / "port").events()]
    assert events.count("compiler_failed") == 2 and events.count("poisoned") == 1
    assert not _still_running(tmp_path)


def test_a_compiler_that_ends_well_without_a_neff_has_failed(
    source: Path, compiled: Compiled, sdk: Env, tmp_path: Path
) -> None:
    """An empty file would be committed, and found out by the runtime on the device."""
    out = tmp_path / "port"
    shutil.copytree(compiled[0], out)
    (out / "graphs" / "prefill-b1-l24" / "graph.committed").unlink()
    done = compile_port(sdk | {"STAND_IN_CC": "torn:prefill:0"}, source, out, *FLAGS)
    assert done.code == 6, done.stderr
    assert "graph.neff is empty or missing" in done.document["error"]["message"]


def test_a_port_of_another_sdk_is_not_loaded(compiled: Compiled, sdk: Env, tmp_path: Path) -> None:
    """Its verdict was given with another runtime, and compiling again is all that is needed."""
    for name, version in release("2.28.1").packages.items():
        if name != "torch":
            info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            (info / "METADATA").write_text(text)
    env = sdk | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{sdk['PYTHONPATH']}"}
    done = run(env, "gemma_neuron", "validate", compiled[0], "--levels", "0", "--json")
    assert done.code == 5, done.stderr
    message = done.document["error"]["message"]
    assert "neuronx-cc '2.26.6360.0', here '2.23.6484.0'" in message


def _still_running(folder: Path) -> list[str]:
    """Command lines of processes that name a folder: compilers that outlived their watch."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in text and "neuronx-cc" in text:
            found.append(text)
    return found


def test_a_dry_run_writes_graphs_and_flags_only(source: Path, sdk: Env, tmp_path: Path) -> None:
    out = tmp_path / "dry"
    done = compile_port(sdk | {"STAND_IN_CC": "fail::never"}, source, out, *FLAGS, "--dry-run")
    assert done.code == 0, done.stderr
    written = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
    assert written == done.document["files"]
    assert written == [
        f"{unit}/{name}"
        for unit in ("decode-b3-l1", "prefill-b1-l24", "score-b1-l48")
        for name in ("command.txt", "graph.hlo")
    ]


@pytest.mark.fault("orig-09-sigkill-bad-cores")
def test_serves_and_leaves_its_cores_in_order_or_suspect(
    compiled: Compiled, sdk: Env, tmp_path: Path
) -> None:
    port, _ = compiled
    with_tools = install(tmp_path / "tools", devices(), report(), sdk)
    for ended_by, left in ((signal.SIGTERM, "none"), (signal.SIGKILL, "cores 0-7")):
        with serving(sdk, port, "--unvalidated") as ready:
            body = {"model": "m", "prompt": "a b", "max_tokens": 3}
            answer = asked(f"{ready['url']}/v1/completions", body)
            assert answer["usage"]["completion_tokens"] >= 1
            runners = [psutil.Process(replica["pid"]) for replica in ready["replicas"]]
            os.kill(ready["pid"], ended_by)
            assert not psutil.wait_procs(runners, timeout=60)[1]
        checked = run(with_tools, "gemma_neuron", "doctor", "--json").document["checks"]
        checks = {check["name"]: check for check in checked}
        assert checks["suspect cores"]["found"].startswith(left), checks["suspect cores"]


@pytest.mark.parametrize(
    ("chips", "replicas", "said", "hint"),
    [
        (6, 2, "NeuronCores 8 to 15; this machine has 12", "--replicas 1"),
        (1, 1, "NeuronCores 0 to 7; this machine has 2", "smaller --tp"),
    ],
)
def test_more_replicas_than_the_machine_holds_are_refused_before_any_is_loaded(
    compiled: Compiled,
    sdk: Env,
    tmp_path: Path,
    chips: int,
    replicas: int,
    said: str,
    hint: str,
) -> None:
    env = install(tmp_path / "tools", devices()[:chips], report(), sdk)
    command = ("gemma_neuron", "serve-local", compiled[0], "--unvalidated", "--port", 0, "--json")
    done = run(env, *command, "--replicas", replicas)
    assert done.code == 4, done.stderr
    error = done.document["error"]
    assert said in error["message"] and hint in error["hint"]
    assert "warmed up" not in done.stderr


def test_what_a_runner_sets_is_logged_and_it_leaves_its_cores(
    compiled: Compiled, sdk: Env, tmp_path: Path
) -> None:
    env = install(tmp_path / "tools", devices(), report(), sdk)
    env |= {"XDG_STATE_HOME": str(tmp_path), "NEURON_RT_VISIBLE_CORES": "4-11"}
    env |= {"NEURON_RT_NUM_CORES": "2", "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1"}
    done = run(env, "gemma_neuron", "validate", compiled[0], "--levels", "0", "--json")
    assert done.document["verdict"] == "insufficient", done.stderr
    logged = done.stderr
    assert "NEURON_RT_VISIBLE_CORES=0-7 NEURON_RT_EXEC_TIMEOUT=600" in logged
    assert "NEURON_RT_VISIBLE_CORES was 4-11; it is 0-7 from here on" in logged
    for name in ("NEURON_RT_NUM_CORES", "NEURON_RT_STOCHASTIC_ROUNDING_EN"):
        assert f"{name} was set; it is ignored" in logged
    assert all(f"warmed up {unit.name}" in logged for unit in Port(compiled[0]).spec.graphs())
    # One that ends by itself without closing, as after an error, has left its cores in order, too.
    code = "from gemma_neuron.backends.neuron.cores import CoreNote; CoreNote(range(0, 8)); 1 / 0"
    assert run(env, "timeit", "-n", 1, "-r", 1, code).code == 1
    checks = run(env, "gemma_neuron", "doctor", "--json").document["checks"]
    assert {c["name"]: c["found"] for c in checks}["suspect cores"] == "none"


def test_a_rank_file_that_lost_a_tensor_stops_the_port(
    compiled: Compiled, sdk: Env, stock: Path, tmp_path: Path
) -> None:
    """NxD itself would pass it on: nothing checks weights before the device."""
    from gemma_neuron.artifacts import CommittedSet

    out = tmp_path / "port"
    shutil.copytree(compiled[0], out)
    path = Port(out).rank_file(3)
    tensors = read_safetensors(path)
    del tensors["layers.1.layer_scalar"]
    write_safetensors(path, tensors)
    ranks: CommittedSet = Port(out).rank_set(3)
    manifest = ranks.manifest()
    assert manifest is not None
    ranks.commit([path.name], manifest.facts)
    done = run(sdk, "tests.neuron.against_stock", out, stock)
    assert done.code != 0
    assert "rank-03" in done.stderr and "layers.1.layer_scalar is missing" in done.stderr
