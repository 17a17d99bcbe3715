"""`doctor --json` on machines in several states: the tools are real processes, the packages real metadata."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from gemma_neuron.backends.neuron.checks import driver_check
from gemma_neuron.backends.neuron.packages import refusal, release, releases
from tests.neuron.flow import ROOT, run
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


def test_placeholders_of_the_public_index_are_recognised_on_disk(tmp_path: Path, sdk: Env) -> None:
    for name, version in (("torch_neuronx", "1.0"), ("neuronx_distributed", "0.1")):
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    env = sdk | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{sdk['PYTHONPATH']}"}
    found = checks(env)["back end neuron"]
    assert found["status"] == "fail" and "placeholder" in found["found"]
    assert "bootstrap-inf2" in found["remedy"]
    done = run(
        env, "gemma_neuron", "compile", tmp_path, "--out", tmp_path / "p", "--backend", "neuron"
    )
    assert done.code == 8 and "placeholder" in done.stderr
    assert sys.executable


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"torch": "2.13.0"}, "Trainium2"),
        ({"libneuronxla": "3.0.5356.0"}, "libneuronxla 3"),
        ({"neuronx-distributed": "0.1.0"}, "placeholder"),
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


def test_a_driver_older_than_the_runtime_wants() -> None:
    old = driver_check("2.26.10.0", "2.33.10.0", release("2.31.1"))
    assert old.status == "fail" and "2.29.0.0" in old.needed
    assert driver_check("2.30.2.0", "2.33.10.0", release("2.31.1")).status == "ok"
