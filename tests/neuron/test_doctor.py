"""`doctor --json` on machines in several states: the tools are real processes, the packages real metadata."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from gemma_neuron.backends.neuron import cores
from gemma_neuron.backends.neuron.checks import (
    device_check,
    driver_check,
    health_check,
    python_check,
)
from gemma_neuron.backends.neuron.devices import Devices, parse_devices, parse_health
from gemma_neuron.backends.neuron.packages import refusal, release, releases
from tests.neuron.flow import HERE, ROOT, run
from tests.neuron.machines import devices, install, report

Env = dict[str, str]
PRIMARY = {**release("2.31.1").packages, "torch": "2.9.0"}


def checks(env: Env) -> dict[str, dict[str, str]]:
    done = run(env, "gemma_neuron", "doctor", "--json")
    return {check["name"]: check for check in done.document["checks"]}


def test_a_healthy_machine(sdk: Env, tmp_path: Path) -> None:
    found = checks(install(tmp_path / "tools", devices(), report(), sdk))
    assert found["back end neuron"]["status"] == "ok", found["back end neuron"]
    assert found["neuron devices"]["found"] == "6 devices, 12 NeuronCores"
    assert found["neuron health"] == found["neuron health"] | {
        "status": "ok",
        "found": "no errors on inf2.24xlarge",
    }


def test_a_busy_machine_names_the_process(sdk: Env, tmp_path: Path) -> None:
    process = {"pid": 4242, "command": "python serve.py", "neuron_runtime_version": "2.33"}
    busy = devices(neuron_processes=[process])
    found = checks(install(tmp_path / "tools", busy, report(timed_out=2), sdk))
    assert found["neuron devices"]["status"] == "warn"
    assert "4242 (python serve.py)" in found["neuron devices"]["remedy"]
    assert found["neuron health"]["found"] == "2 executions timed out"


def test_a_process_that_neuron_ls_does_not_list_is_found_by_the_monitor(
    sdk: Env, tmp_path: Path
) -> None:
    """Older neuron-ls say nothing of processes."""
    rows = [{k: v for k, v in row.items() if k != "neuron_processes"} for row in devices()]
    found = checks(install(tmp_path / "tools", rows, report(in_use=range(8)), sdk))
    assert found["neuron devices"]["status"] == "warn"
    assert "4242 (gemma-neuron)" in found["neuron devices"]["remedy"]
    assert found["neuron health"]["status"] == "ok"


def test_a_spoiled_machine_is_a_failure_with_what_to_do(sdk: Env, tmp_path: Path) -> None:
    spoiled = install(tmp_path / "tools", devices()[1:], report(uncorrected=1, hardware=4), sdk)
    found = checks(spoiled)
    assert found["neuron health"]["status"] == "fail"
    assert "Replace the instance" in found["neuron health"]["remedy"]
    assert found["neuron devices"]["status"] == "fail"
    assert (
        "gap" in found["neuron devices"]["found"] and "eboot" in found["neuron devices"]["remedy"]
    )


def test_tools_that_answer_nonsense_are_reported_as_they_are(sdk: Env, tmp_path: Path) -> None:
    found = checks(install(tmp_path / "tools", "no devices found", "{", sdk))
    assert "no devices found" in found["neuron devices"]["found"]
    assert "neuron health" not in found


def test_no_device_and_no_sdk_is_no_problem() -> None:
    plain = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert shutil.which("neuron-ls") is None
    found = checks(plain)["back end neuron"]
    assert found["status"] == "ok" and "no Neuron SDK" in found["found"]


def test_a_host_that_compiles_for_neuron_needs_neither_device_nor_cxx(sdk: Env) -> None:
    path = os.pathsep.join((str(HERE / "bin"), str(Path(sys.executable).parent)))
    env = {k: v for k, v in sdk.items() if k != "CXX"} | {"PATH": path}
    done = run(env, "gemma_neuron", "doctor", "--json")
    found = {check["name"]: check["status"] for check in done.document["checks"]}
    assert done.code == 0 and found["back end neuron"] == "ok"
    assert found["back end cpu"] == "warn" and "neuron devices" not in found


def test_credentials_are_named_and_never_shown(tmp_path: Path) -> None:
    secret = "wJalrXUtnFEMI"
    none = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "HF_"))}
    none |= {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    assert checks(none)["credentials"]["found"] == "hub token not set, AWS none"
    both = none | {"HF_TOKEN": f"hf_{secret}", "AWS_ACCESS_KEY_ID": "AKID"}
    found = checks(both | {"AWS_SECRET_ACCESS_KEY": secret})
    assert found["credentials"]["found"] == "hub token set, AWS env"
    assert secret not in str(found)


@pytest.mark.parametrize(
    ("packages", "said"),
    [
        ({"torch_neuronx": "1.0", "neuronx_distributed": "0.1"}, "placeholder"),
        ({"libneuronxla": "3.0.5356.0"}, "libneuronxla 3"),
        ({"torch": "2.13.0"}, "Trainium2"),
        ({"neuronx_cc": "2.24.8799.0"}, "position 512"),
    ],
    ids=["placeholders", "native torch's", "torch 2.13", "2.29"],
)
def test_wrong_packages_are_recognised_on_disk(
    tmp_path: Path, sdk: Env, packages: dict[str, str], said: str
) -> None:
    for name, version in packages.items():
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    env = sdk | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{sdk['PYTHONPATH']}"}
    found = checks(env)["back end neuron"]
    assert found["status"] == "fail" and said in found["found"]
    assert "bootstrap-inf2" in found["remedy"]
    done = run(
        env, "gemma_neuron", "compile", tmp_path, "--out", tmp_path / "p", "--backend", "neuron"
    )
    assert done.code == 8 and said in done.stderr


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"torch": "2.13.0"}, "Trainium2"),
        ({"libneuronxla": "3.0.5356.0"}, "libneuronxla 3"),
        ({"neuronx-distributed": "0.1.0"}, "placeholder"),
        ({"neuronx-cc": "1.0.post1"}, "placeholder"),
        ({"libneuronxla": "1.0"}, "placeholder"),
        ({"torch-neuronx": "none"}, "not installed"),
        ({"neuronx-distributed-inference": "0.10.18399"}, "Trainium2"),
        ({"neuronx-cc": "2.27.5334.0"}, "no release known here"),
        ({"neuronx-distributed": "0.18.27753"}, "0.19.28492, found 0.18.27753"),
        ({"neuronx-cc": "2.26.6360.0+4fd0a5b1"}, None),
    ],
)
def test_which_package_sets_are_refused(changed: dict[str, str], said: str | None) -> None:
    found = refusal(PRIMARY | changed)
    assert found is None if said is None else said in (found or ""), found


def test_each_release_of_the_matrix_is_judged_by_its_role() -> None:
    for known in releases():
        found = refusal(known.packages)
        assert (found is None) == (known.role != "refused"), (known.name, found)
    assert "position 512" in (refusal(release("2.29.1").packages) or "")


def test_all_of_a_refused_minor_release_is_refused_for_its_reason() -> None:
    """2.29.0 had another compiler than 2.29.1."""
    assert "position 512" in (refusal(PRIMARY | {"neuronx-cc": "2.24.5133.0"}) or "")


def test_the_extra_pins_the_primary_release() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(
        pin.split("==") for pin in project["optional-dependencies"]["neuron"] if "==" in pin
    )
    primary = release("2.31.1")
    assert pins == primary.packages | {"torch": primary.packages["torch"] + ".*"}


@pytest.mark.parametrize(
    ("driver", "runtime", "sdk", "bad"),
    [
        ("2.30.2.0", "2.33.10.0", "2.31.1", ""),
        ("2.26.10.0", "2.33.10.0", "2.31.1", "2.29.0.0"),
        ("2.26.10.0", "2.33.10.0-abc", "2.28.1", "2.29.0.0"),  # what the runtime came with counts
        ("2.29.0.0", "2.30.51.0", "2.31.1", "runtime 2.33.10.0"),
        ("2.29.0.0", "", "2.31.1", "runtime 2.33.10.0"),
        ("", "2.33.10.0", "2.31.1", "2.29.0.0"),
    ],
)
def test_a_driver_or_runtime_that_is_older_than_wanted(
    driver: str, runtime: str, sdk: str, bad: str
) -> None:
    found = driver_check(driver, runtime, release(sdk))
    assert found.status == ("fail" if bad else "ok") and bad in found.needed
    assert bool(found.remedy) == bool(bad)


def test_a_python_that_the_release_has_no_packages_for() -> None:
    (found,) = python_check(release("2.31.1"), (3, 13))
    assert found.status == "warn" and found.needed == "3.11 or 3.12 for SDK 2.31.1"
    assert python_check(release("2.31.1"), (3, 12)) == python_check(None, (3, 13)) == []


@pytest.mark.parametrize("line", ["[]", "3", "null", "{", "", '{"neuron_runtime_data": 3}'])
def test_a_report_of_another_form_is_told_and_no_traceback(line: str) -> None:
    health = parse_health(line)
    assert bool(health.problems) == (line[:2] != '{"')


def test_a_group_of_the_report_that_failed_is_no_clean_bill_of_health() -> None:
    """Its counters are not there: nothing wrong was counted, and nothing was looked at."""
    text = json.loads(json.dumps(report()))
    text["system_data"]["neuron_hw_counters"] = {"error": "cannot read sysfs"}
    found = health_check(parse_health(json.dumps(text)))
    assert found.status == "warn" and found.found == "neuron_hw_counters: cannot read sysfs"


DEEP = "[" * 200_000


@pytest.mark.parametrize("line", [DEEP, '{"error": ' * 200_000])
def test_a_report_nested_too_deep_is_told(line: str) -> None:
    (problem,) = parse_health(line).problems
    assert "wrote no report" in problem and len(problem) < 300


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        (DEEP, "fail", "wrote no JSON: [[["),
        ("7", "fail", "lists no device"),
        ('{"neuron_devices": 7}', "fail", "lists no device"),
        ('[{"neuron_device": 0, "nc_count": "2"}]', "fail", "no core count"),
        ('[{"neuron_device": 0, "nc_count": -5}]', "fail", "no core count"),
        ('[{"neuron_device": 0, "nc_count": true}]', "fail", "no core count"),
        ('[{"neuron_device": 0, "nc_count": 2, "neuron_processes": 5}]', "ok", "2 NeuronCores"),
    ],
)
def test_a_device_list_of_another_form_is_told_and_no_traceback(
    text: str, status: str, said: str
) -> None:
    """No count at all is not a machine without cores: `serve-local` would refuse a port for want of them."""
    found = device_check(parse_devices(text))
    assert found.status == status and said in found.found and len(found.found) < 300


@pytest.mark.parametrize(
    ("ls", "monitor", "name", "said"),
    [
        ("printf '\\377\\376'", "", "neuron devices", "wrote no JSON"),
        ("yes no device | head -c 100000 >&2; exit 3", "", "neuron devices", "failed (exit 3): no"),
        ('cat "$0.json"', "printf '{partial'; exec sleep 600", "neuron health", "{partial"),
    ],
    ids=["no UTF-8", "a long complaint", "a monitor that stops within a line"],
)
def test_tools_that_break_off_or_write_rubbish(
    sdk: Env, tmp_path: Path, ls: str, monitor: str, name: str, said: str
) -> None:
    env = install(tmp_path, devices(), report(), sdk)
    (tmp_path / "neuron-ls.json").write_text(json.dumps(devices()))
    for tool, text in (("neuron-ls", ls), ("neuron-monitor", monitor)):
        (tmp_path / tool).write_text(f"#!/bin/sh\n{text}\n")
    found = checks(env)[name]
    assert said in found["found"] and len(found["found"]) < 300


def test_a_note_of_cores_that_is_none_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    notes = cores.notes_folder()
    notes.mkdir(parents=True)
    cores.CoreNote(range(8, 16))
    good = json.loads(next(notes.iterdir()).read_text())
    for i, bad in enumerate(("{", "[]", DEEP, json.dumps(good | {"first": "8"}))):
        (notes / f"{cores.NOTE_PREFIX}{10**6 + i}.json").write_text(bad)
    assert [note.cores for note in cores.held()] == [range(8, 16)]
    assert len(list(notes.iterdir())) == 1


def test_a_missing_tool_is_installed_and_no_reason_to_reboot() -> None:
    missing = Devices(problem="neuron-ls is not installed", installed=False)
    assert "bootstrap-inf2" in device_check(missing).remedy
