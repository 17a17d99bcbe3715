"""`validate --tasks`: the port served by a process of its own, and lm-eval asking it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gemma_neuron.artifacts import write_json_atomic
from gemma_neuron.backends.registry import backend
from gemma_neuron.errors import EnvironmentProblem
from gemma_neuron.port import VERDICT_NAME, Port
from gemma_neuron.settings import KEY_VARIABLE

if TYPE_CHECKING:
    from gemma_neuron.reports import LevelResult, Scope, ValidationReport

END_SECONDS = 60.0
"""A server gets so long to end before it is killed; nothing of ours is running in it then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """`names`: tasks of the package or of lm-eval. `limit`: the first so many questions of each."""

    names: tuple[str, ...]
    limit: int | None = None


def with_tasks(
    judge: Callable[[], ValidationReport],
    path: Path,
    options: TaskOptions,
    *,
    base: bool,
    progress: Callable[[str], None],
) -> ValidationReport:
    """What `judge` reports, with level 7 behind the others, also in the port's `validation.json`; the verdict stays.

    `judge` loads the port in this process. Where a process keeps its devices until it ends, the server comes first.
    """
    port = Port(path)
    before = backend(port.spec.backend).keeps_devices
    level = _asked(port, _own_scope(port, base), options, progress) if before else None
    report = judge()
    level = level or _asked(port, report.scope, options, progress)
    report = replace(report, levels=(*report.levels, level))
    write_json_atomic(path / VERDICT_NAME, {"schema": 1, **report.to_json()})
    return report


def _own_scope(port: Port, base: bool) -> Scope:
    """What the server will be asked as, by the port's own template."""
    from gemma_neuron.chat import load_chat_assets
    from gemma_neuron.validation.verdict import scope

    template = load_chat_assets(port.source_folder).template
    if template is not None:
        template.close()
    return scope(template is not None, base)


def _asked(
    port: Port, scope: Scope, options: TaskOptions, progress: Callable[[str], None]
) -> LevelResult:
    from gemma_neuron.validation.levels.task import task_level
    from gemma_neuron.validation.tasks import run_tasks

    started = time.monotonic()
    progress("level 7")
    with served(port.path) as url:
        found = run_tasks(
            url,
            port.source_folder,
            options.names,
            chat=scope == "chat",
            max_context=port.spec.max_context,
            limit=options.limit,
            progress=progress,
        )
    return replace(task_level(found), seconds=round(time.monotonic() - started, 3))


@contextmanager
def served(path: Path) -> Iterator[str]:
    """`serve-local` on a free port of loopback, whatever the verdict: its URL. Raises EnvironmentProblem."""
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    command: Sequence[str] = (
        *(sys.executable, "-m", "gemma_neuron", "serve-local", str(path)),
        *("--port", "0", "--unvalidated"),
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line:
                raise EnvironmentProblem(
                    f"serve-local ended with exit code {server.wait()} before it was ready.",
                    f"gemma-neuron serve-local {path} --unvalidated says why.",
                )
            yield json.loads(line)["url"]
        finally:
            server.terminate()
            try:
                server.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                server.kill()
