"""Run the product's own commands where the Neuron SDK is stand-ins, or NxD's real source on closed stand-ins.

Only the environment of the processes differs: PATH finds the stand-in compiler, PYTHONPATH the packages.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def environment(nxd_source: Path | None, state: Path, **more: str) -> dict[str, str]:
    """A process's variables on a machine with this SDK. `state`: for core notes; `nxd_source`: its `src` folder."""
    nxd = HERE / "packages" / "nxd" if nxd_source is None else nxd_source
    paths = (HERE / "packages" / "closed", nxd, ROOT)
    ours = {
        "PATH": os.pathsep.join(
            (str(HERE / "bin"), str(Path(sys.executable).parent), os.environ.get("PATH", ""))
        ),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "XDG_STATE_HOME": str(state),
        "OMP_NUM_THREADS": "1",  # models this small are slower on more
    }
    return {**os.environ, **ours, **more}


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.stdout)
        return found


def run(env: dict[str, str], *arguments: object) -> Done:
    """`python -m ARGUMENTS` with that environment, to its end."""
    return run_command([sys.executable, "-m", *arguments], env)


def run_command(command: Iterable[object], env: dict[str, str]) -> Done:
    """Any command with that environment, to its end."""
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, env=env, cwd=ROOT
    )
    return Done(done.returncode, done.stdout, done.stderr)


def compile_port(env: dict[str, str], source: Path, out: Path, *flags: object) -> Done:
    command = ("gemma_neuron", "compile", source, "--out", out, "--backend", "neuron", "--tp", 8)
    return run(env, *command, "--json", *flags)


@contextmanager
def serving(env: dict[str, str], port: Path, *flags: object) -> Iterator[dict[str, Any]]:
    """`serve-local` on a free TCP port: what it says when it is ready. Ended by TERM, unless it has ended.

    Raises RuntimeError with its stderr when it does not get ready.
    """
    command = [sys.executable, "-m", "gemma_neuron", "serve-local", str(port), "--port", "0"]
    command += map(str, flags)
    with subprocess.Popen(
        command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None and server.stderr is not None
        try:
            ready = server.stdout.readline()
            if not ready:
                raise RuntimeError(server.stderr.read())
            yield json.loads(ready)
        finally:
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
            server.communicate(timeout=120)


def asked(url: str, body: dict[str, Any], timeout: float = 120) -> dict[str, Any]:
    """The answer to a JSON body posted to `url`."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found
