"""What scripts for a machine without, or with, a NeuronCore do around their checks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gemma_neuron.backends.neuron.packages import release
from scripts.checks import Check, Failed, alone, run_rest
from tests.neuron.flow import ROOT, Done, environment, run_command

Env = dict[str, str]
USAGES = sorted(
    path
    for path in (ROOT / "scripts").iterdir()
    if path.is_file() and "lib/setup.sh" in path.read_text() and path.stat().st_mode & 0o100
)
"""Every script that sets itself up."""
DEVELOPMENT = ("hypothesis", "importlinter", "moto", "mypy", "openai", "pytest", "xdist")
"""Packages of the extra `dev`, which no instance has."""


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


@pytest.mark.parametrize(
    ("script", "flags", "results"),
    [
        ("neuron_contract.py", ("--results", "{}/r.jsonl"), "r.jsonl"),
        ("first_hour.py", ("--work", "{}"), "first-hour.jsonl"),
        ("lowering/main.py", ("--python", "python", "--results", "{}/r.jsonl"), "r.jsonl"),
    ],
)
def test_two_runs_never_share_a_result_file(
    tmp_path: Path, script: str, flags: Sequence[str], results: str
) -> None:
    """They would share a work folder, which the first to end removes."""
    command = [sys.executable, ROOT / "scripts" / script, *(f.format(tmp_path) for f in flags)]
    with alone(tmp_path / results, "--results"):
        done = run_command(command, {**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.code == 2 and f"Another run writes {tmp_path / results}." in done.stderr
    assert done.stderr.splitlines()[-1].startswith("hint: ")
    with alone(tmp_path / results, "--results"):  # free again
        pass


def test_the_first_hour_needs_no_package_that_an_instance_lacks(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    for name in DEVELOPMENT:
        (blocked / name).mkdir(parents=True)
        (blocked / name / "__init__.py").write_text(f"raise ModuleNotFoundError({name!r})\n")
    env = environment(None, tmp_path / "state")
    env |= {"PYTHONPATH": os.pathsep.join((str(blocked), env["PYTHONPATH"]))}
    command = [sys.executable, ROOT / "scripts" / "first_hour.py", "--work", tmp_path / "hour"]
    done = run_command([*command, "--only", "signatures of the installed NxD"], env)
    assert done.code == 0, done.stdout + done.stderr
    assert "pass  signatures of the installed NxD" in done.stdout
    slice_ = "import scripts.make_slice, scripts.first_hour_positions, tests.stock"
    assert run_command([sys.executable, "-c", slice_], env).code == 0


@pytest.mark.parametrize("script", USAGES, ids=[path.name for path in USAGES])
def test_help_of_a_script_is_its_head_and_sets_nothing_up(script: Path, tmp_path: Path) -> None:
    """In a checkout without `.venv`: setting one up, or asking for it, is no answer."""
    copy = shutil.copytree(ROOT / "scripts", tmp_path / "scripts") / script.name
    env = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run([copy, "--help"], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert f"scripts/{script.name}" in done.stdout and "shellcheck" not in done.stdout
    flags = re.findall(r'add_argument\(\s*"(--[a-z-]+)"(?!.*SUPPRESS)', _program(script))
    assert not [flag for flag in flags if flag not in done.stdout]
    assert not done.stderr and not (tmp_path / ".venv").exists()


def _program(script: Path) -> str:
    """What a script starts, if that is a Python file of its name."""
    path = script.with_name(f"{script.name.replace('-', '_')}.py")
    return path.read_text() if path.is_file() else ""


def bootstrap(*arguments: str, **env: str) -> Done:
    return run_command([ROOT / "scripts" / "bootstrap-inf2", *arguments], {**os.environ, **env})


@pytest.mark.parametrize("sdk", ["2.31.1", "2.28.1"])
def test_bootstrap_installs_exactly_the_matrix(sdk: str, tmp_path: Path) -> None:
    (tmp_path / "os-release").write_text("ID=ubuntu\nVERSION_CODENAME=noble\n")
    done = bootstrap("--print", "--sdk", sdk, GEMMA_NEURON_OS_RELEASE=str(tmp_path / "os-release"))
    assert done.code == 0, done.stderr
    found = release(sdk)
    pins = {f"{n}=={v}{'.*' if n == 'torch' else ''}" for n, v in found.packages.items()}
    assert set(done.stderr.partition("+ constraints:")[2].split()) == pins
    packages = " ".join(f"{name}={version}*" for name, version in found.system.items())
    assert packages in done.stderr and " noble main" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--sdk", "2.29.1"), 2, "position 512"),
        (("--sdk", "2.29"), 2, "position 512"),
        (("--sdk", "9.9"), 2, "Usable are 2.31.1, 2.28.1"),
        (("--sdk",), 2, "needs a release"),
        (("--fast",), 2, "--fast"),
        (("--print",), 8, "Ubuntu"),
    ],
)
def test_bootstrap_refuses_what_it_cannot_do(
    arguments: Sequence[str], code: int, said: str
) -> None:
    done = bootstrap(*arguments, GEMMA_NEURON_OS_RELEASE="/nowhere")
    assert done.code == code and said in done.stderr
