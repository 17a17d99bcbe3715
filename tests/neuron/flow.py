"""Run the product's own commands where the Neuron SDK is stand-ins, or NxD's real source on closed stand-ins.

Only the environment of the processes differs: PATH finds the stand-in compiler, PYTHONPATH the packages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        cwd=ROOT,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def compile_port(env: dict[str, str], source: Path, out: Path, *flags: object) -> Done:
    command = ("gemma_neuron", "compile", source, "--out", out, "--backend", "neuron", "--tp", 8)
    return run(env, *command, "--json", *flags)
