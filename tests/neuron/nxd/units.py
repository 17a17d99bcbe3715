"""NxD's fundamental units: trace and compile (trace/functions.py)."""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.neuron.closed import compilers, tracing
from tests.neuron.closed.install import platform_target
from tests.neuron.nxd.artifacts import (
    CompilationArtifacts,
    ModelParamInfo,
    ProvidedArgInfo,
    TraceArtifacts,
)
from tests.neuron.nxd.recorded import recorded

FIXED: dict[str, Any] = {
    "input_format": "hlo",
    "cache_key": None,
    "retry_failed_compilation": False,
    "lazy": True,
    "use_cache": False,
    "cache_dir": None,
}


@recorded("trace.functions:trace")
def trace(
    model: Any,
    args: Any = None,
    kwargs: Any = None,
    spmd: bool = True,
    preserve_parameters: bool = True,
    weights_to_skip_layout_optimization: Any = None,
) -> Any:
    parameters = inspect.signature(model.forward).parameters.values()
    for p in parameters:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise NotImplementedError("*args or **kwargs")
        if p.default not in (p.empty, None):
            raise ValueError(f"'{p.name}' has a default other than None")
    names = [p.name for p in parameters]
    if unknown := set(kwargs) - set(names):
        raise ValueError(f"unexpected keys {unknown}")
    if missing := [p.name for p in parameters if p.default is p.empty and p.name not in kwargs]:
        raise ValueError(f"missing {missing}")
    inputs = OrderedDict((name, kwargs[name]) for name in names if name in kwargs)
    try:
        made = tracing.generate_hlo(
            model,
            inputs,
            inline_weights_to_neff=False,
            return_weights=False,
            output_aliased_tensor=False,
            cpu_backend=True,
            preserve_parameters=preserve_parameters,
            enable_aliasing=True,
            treat_inputs_as_kwargs=True,
        )
    except Exception as error:
        raise RuntimeError(f"HLO generation failed: {error}") from error
    required = {p.name: p.default is p.empty for p in parameters}
    return TraceArtifacts(
        made.hlo_module,
        made.metaneff,
        made.flattener,
        made.packer,
        made.weight_name_to_idx,
        set(),
        [ProvidedArgInfo(name, required[name], tensor) for name, tensor in inputs.items()],
        [ModelParamInfo(name, needed) for name, needed in required.items()],
    )


def new_folder(workdir: Any, key: str) -> Path:
    made = Path(workdir) / key / datetime.now().isoformat().replace(":", "-")
    (made / "model").mkdir(parents=True)
    return made


def kept(folder: Path, neff: bytes, hlo: Any, metaneff: Any) -> str:
    (folder / "graph.neff").write_bytes(neff)
    (folder / "metaneff.pb").write_bytes(metaneff.SerializeToString())
    (folder / "model" / "graph.hlo").write_bytes(hlo.SerializeToString())
    return str(folder / "graph.neff")


@recorded("trace.functions:compile")
def compile_one(
    hlo_module: Any,
    metaneff: Any,
    compiler_workdir: Any = None,
    compiler_args: str | None = None,
    key: str | None = None,
) -> CompilationArtifacts:
    try:
        folder = new_folder(compiler_workdir, str(key))
        flags = compiler_args or "--enable-saturate-infinity --model-type=transformer"
        if "--auto-cast" not in flags:
            flags += " --auto-cast=none"
        if not re.search(r"-O\d+", flags):
            flags += " -O1"
        flags += ("" if "--verbose" in flags else " --verbose=35") + log_flag(folder)
        neff = compilers.neuron_xla_compile(
            module_bytes=hlo_module.SerializeToString(),
            compiler_flags=flags,
            platform_target=platform_target(flags),
            work_dir=folder,
            **FIXED,
        )
        return CompilationArtifacts(kept(folder, neff, hlo_module, metaneff))
    except Exception as error:
        raise RuntimeError(f"Compilation failed for {key}") from error


def log_flag(folder: Path) -> str:
    return f" --logfile={folder / 'log-neuron-cc.txt'}"
