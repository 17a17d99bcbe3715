"""examples/ for serving call the commands that there are, by flags that they have."""

from __future__ import annotations

import configparser
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from gemma_neuron.cli import app

EXAMPLES = Path(__file__).parents[2] / "examples"


def check(arguments: list[str]) -> None:
    """Parse a command line as the program would, without running it."""
    group: Any = typer.main.get_command(app)
    name, *rest = arguments
    command = group.commands[name]
    if hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    with command.make_context(name, rest):
        pass


def test_the_systemd_unit() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(EXAMPLES / "gemma-neuron.service")
    program, *arguments = unit["Service"]["ExecStart"].split()
    assert program.endswith("/gemma-neuron")
    check(arguments)
    assert unit["Service"]["KillMode"] == "mixed"


def test_the_dockerfile() -> None:
    text = (EXAMPLES / "Dockerfile").read_text(encoding="utf-8")
    found = re.search(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    assert found is not None
    check(json.loads(found[1])[1:])
    root = EXAMPLES.parent
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        assert all((root / name).exists() for name in line.split()[:-1]), line


@pytest.mark.parametrize("name", ["kubernetes-serve", "kubernetes-replicas"])
def test_the_deployments(name: str) -> None:
    text = (EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8")
    deployment, *budgets, service = yaml.safe_load_all(text)
    pod = deployment["spec"]["template"]["spec"]
    for container in [*pod["initContainers"], *pod["containers"]]:
        check(container["command"][1:])
    labels = deployment["spec"]["selector"]["matchLabels"]
    assert service["spec"]["selector"] == labels
    assert all(budget["spec"]["selector"]["matchLabels"] == labels for budget in budgets)
    (server,) = pod["containers"]
    assert server["livenessProbe"]["httpGet"]["path"] == "/health/live"
    for probe in (server["startupProbe"], server["readinessProbe"]):
        said = probe["exec"]["command"][2].split('"', 1)[1][:-1].replace('\\"', '"')
        compile(said, "probe", "exec")
        waits = float(re.findall(r"timeout=(\d+)", said)[0])
        assert probe["timeoutSeconds"] > waits, (
            "a second is the default, and starting Python takes more"
        )
