"""`libneuronxla`'s two calls as trace/functions.py makes them: each starts `neuronx-cc`."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

WRAPPED = "wrapped_neff.hlo"


def neuron_xla_compile(
    *,
    module_bytes: bytes,
    compiler_flags: str,
    input_format: str,
    platform_target: str,
    cache_key: None,
    retry_failed_compilation: bool,
    lazy: bool,
    use_cache: bool,
    cache_dir: None,
    work_dir: Path,
) -> bytes:
    assert not use_cache and input_format == "hlo" and lazy and not retry_failed_compilation
    return _run(module_bytes, compiler_flags, platform_target, work_dir)


def neuron_xla_wlo_compile(
    module_bytes: bytes,
    compiler_flags: str,
    *,
    input_format: str,
    platform_target: str,
    cache_key: None,
    retry_failed_compilation: bool,
    lazy: bool,
    use_cache: bool,
    cache_dir: None,
    work_dir: Path,
    create_subdir: bool,
) -> tuple[bytes, bytes | None]:
    assert not use_cache and not create_subdir and input_format == "hlo" and lazy
    assert not retry_failed_compilation
    neff = _run(module_bytes, compiler_flags, platform_target, work_dir)
    wrapped = work_dir / WRAPPED
    return neff, wrapped.read_bytes() if wrapped.is_file() else None


def _run(module_bytes: bytes, flags: str, target: str, work: Path) -> bytes:
    source, made = work / "module.hlo", work / "module.neff"
    source.write_bytes(module_bytes)
    command = ["neuronx-cc", "compile", str(source), "--framework=XLA", f"--output={made}"]
    ended = subprocess.run(
        [*command, f"--target={target}", *shlex.split(flags)],
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        raise RuntimeError(
            f"neuronx-cc compile returned non-zero exit status {ended.returncode}: {ended.stderr}"
        )
    return made.read_bytes()
