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
VECTOR_PROBES = (
    (
        "avx512f",
        "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma",
        "#include <immintrin.h>\n__m512 f(__m512 a) { return _mm512_fmadd_ps(a, a, a); }\n",
    ),
    (
        "avx2",
        "-mavx2 -mfma -mf16c",
        "#include <immintrin.h>\n__m256 f(__m256 a) { return _mm256_fmadd_ps(a, a, a); }\n",
    ),
)
"""A flag of /proc/cpuinfo, what torch's vector code for it is compiled with (torch/_inductor/cpu_vec_isa.py), a use."""


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
    tried = _compile(path, PROBE_SOURCE, "-fopenmp")
    if tried.returncode != 0:
        first = (tried.stderr.strip().splitlines() or ["no message"])[0]
        raise missing_compiler(f"{path} failed on a small program: {first}")
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return Compiler(path, (shown.splitlines() or ["unknown"])[0])


def _compile(path: str, source: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Try to compile a small program; its object is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "probe.cpp"
        file.write_text(source)
        command = [path, "-std=c++17", *flags, "-c", str(file), "-o", f"{folder}/probe.o"]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )


def compiles_vector_code() -> bool:
    """Whether the compiler knows this CPU's vector instructions by the flags that torch gives it (x86-64 only)."""
    has = set(cpu_capability().split("+"))
    programs = [(flags, source) for name, flags, source in VECTOR_PROBES if name in has]
    path = find_compiler().path
    return bool(programs) and all(
        _compile(path, source, *flags.split()).returncode == 0 for flags, source in programs
    )


def host_key() -> dict[str, str]:
    """Version and host facts that change a compiled graph."""
    return {
        "torch": importlib.metadata.version("torch"),
        "cxx": find_compiler().version,
        "capability": cpu_capability(),
    }
