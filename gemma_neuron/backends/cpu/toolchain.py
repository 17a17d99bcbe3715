"""What of this host decides a compiled graph: the C++ compiler and the CPU's vector capability."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gemma_neuron.errors import CompilerMissingError
from gemma_neuron.machine import cpu_capability

CANDIDATES = ("g++", "clang++", "c++")
PROBE_SECONDS = 60
PROBE_SOURCE = (
    "#include <vector>\n#include <omp.h>\nint main() { return std::vector<int>(1)[0]; }\n"
)


@dataclass(frozen=True, slots=True)
class Compiler:
    path: str
    version: str


def missing_compiler(found: str) -> CompilerMissingError:
    return CompilerMissingError(
        f"The cpu back end compiles graphs with a C++ compiler with OpenMP; {found}.",
        "Install one: `apt-get install g++`, `dnf install gcc-c++` or `xcode-select --install`; "
        "or set CXX.",
    )


@cache
def find_compiler() -> Compiler:
    """The compiler torch will call: $CXX or the first of g++, clang++, c++ that compiles OpenMP C++17.

    Raises CompilerMissingError naming the package to install.
    """
    named = os.environ.get("CXX")
    paths = [shutil.which(name) for name in ([named] if named else CANDIDATES)]
    path = next((p for p in paths if p), None)
    if path is None:
        raise missing_compiler(f"found none of {named or ', '.join(CANDIDATES)} on PATH")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(PROBE_SOURCE)
        command = [path, "-std=c++17", "-fopenmp", "-c", str(source), "-o", f"{folder}/probe.o"]
        tried = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
        if tried.returncode != 0:
            first = (tried.stderr.strip().splitlines() or ["no message"])[0]
            raise missing_compiler(f"{path} failed on a small program: {first}")
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return Compiler(path, (shown.splitlines() or ["unknown"])[0])


def host_key() -> dict[str, str]:
    """Version and host facts that change a compiled graph."""
    return {
        "torch": importlib.metadata.version("torch"),
        "cxx": find_compiler().version,
        "capability": cpu_capability(),
    }
