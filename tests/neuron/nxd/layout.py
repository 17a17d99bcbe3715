"""Weight layout optimisation (trace/functions.py, trace/hlo_utils.py)."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.neuron.closed import compilers, protos, tracing
from tests.neuron.closed.install import platform_target
from tests.neuron.closed.protos import HloModuleProto, MetaTensor
from tests.neuron.nxd.artifacts import LayoutTransformerArtifacts, WLOArtifacts
from tests.neuron.nxd.recorded import recorded
from tests.neuron.nxd.units import FIXED, kept, log_flag, new_folder


@recorded("trace.functions:compile_wlo")
def compile_wlo(
    hlo_module: Any,
    metaneff: Any,
    compiler_workdir: Any = None,
    compiler_args: Any = None,
    key: str | None = None,
) -> WLOArtifacts:
    try:
        folder = new_folder(compiler_workdir, str(key))
        flags = (compiler_args or "").split()
        for needed in (
            "--model-type=transformer",
            "--enable-internal-neff-wrapper",
            "--auto-cast=none",
            "--verbose=35",
        ):
            flags += [] if needed in flags else [needed]
        text = " ".join(flags) + log_flag(folder)
        neff, wrapped = compilers.neuron_xla_wlo_compile(
            hlo_module.SerializeToString(),
            text,
            platform_target=platform_target(text),
            work_dir=folder,
            create_subdir=False,
            **FIXED,
        )
        stub = folder / compilers.WRAPPED if wrapped else None
        path = kept(folder, neff, hlo_module, metaneff)
        return WLOArtifacts(path, None if stub is None else str(stub))
    except Exception as error:
        raise RuntimeError(f"Compilation failed for priority model {key}") from error


@recorded("trace.functions:compile_layout_transformer")
def compile_layout_transformer(
    wlo_artifacts: Any,
    priority_model_weight_name_to_idx: dict[str, int],
    compiler_workdir: Any = None,
    logical_nc_config: int = 1,
) -> LayoutTransformerArtifacts | None:
    if wlo_artifacts.wrapped_neff_hlo_filepath is None:
        return None
    try:
        folder = new_folder(compiler_workdir, "layout_opt")
        stub = _read(wlo_artifacts.wrapped_neff_hlo_filepath)
        hlo, metaneff = _transformer(stub, priority_model_weight_name_to_idx)
        flags = f"--model-type=transformer --lnc={logical_nc_config} --verbose=35" + log_flag(
            folder
        )
        neff = compilers.neuron_xla_compile(
            module_bytes=hlo.SerializeToString(),
            compiler_flags=flags,
            platform_target=platform_target(flags),
            work_dir=folder,
            **FIXED,
        )
        path = kept(folder, neff, hlo, metaneff)
    except Exception as error:
        raise RuntimeError("Compilation failed for layout transformer") from error
    return LayoutTransformerArtifacts(
        str(folder / "model" / "graph.hlo"), path, str(folder / "metaneff.pb")
    )


def _read(path: str) -> Any:
    module = HloModuleProto()
    module.ParseFromString(Path(path).read_bytes())
    return module


def _transformer(stub: Any, numbers: dict[str, int]) -> tuple[Any, Any]:
    """The stub without its graph: every weight in, every weight out, those with a call rewritten."""
    module = HloModuleProto()
    module.CopyFrom(stub)
    entry = tracing.hlo_entry_computation(module)
    made = {i.operand_ids[0]: i for i in entry.instructions if i.opcode == "call"}
    parameters = {i.parameter_number: i for i in entry.instructions if i.opcode == "parameter"}
    metaneff, kept = protos.MetaNeff(), []
    root = type(next(iter(parameters.values())))(name="last", opcode="tuple", id=entry.root_id)
    for place, (name, number) in enumerate(sorted(numbers.items(), key=lambda item: item[1])):
        parameter = parameters[number]
        parameter.parameter_number = place
        kept.append(parameter)
        kept += [made[parameter.id]] if parameter.id in made else []
        root.operand_ids.append(kept[-1].id)
        for tensor in (metaneff.input_tensors.add(), metaneff.output_tensors.add()):
            tensor.checkpoint_key = name.encode()
            tensor.type = MetaTensor.INPUT_WEIGHT
    del entry.instructions[:]
    entry.instructions.extend([*kept, root])
    return module, metaneff


@recorded("trace.hlo_utils:mark_weights_for_wlo")
def mark_weights_for_wlo(
    trace_artifacts: Any, weights_to_skip_layout_optimization: Any = None
) -> None:
    known = trace_artifacts.weight_name_to_idx
    skipped = weights_to_skip_layout_optimization or set()
    if skipped - set(known):
        raise RuntimeError(f"Invalid weights in skip set: {skipped - set(known)}")
    marked = sorted(number for name, number in known.items() if name not in skipped)
    trace_artifacts.hlo.frontend_attributes.map["transposable_weight_idx"] = ",".join(
        map(str, marked)
    )


@recorded("trace.hlo_utils:apply_layout_transformation")
def apply_layout_transformation(
    trace_artifacts: Any,
    priority_model_trace_artifacts: Any,
    wlo_artifacts: Any,
    key: str | None = None,
) -> None:
    if wlo_artifacts.wrapped_neff_hlo_filepath is None:
        return
    stub = _read(wlo_artifacts.wrapped_neff_hlo_filepath)
    names = {n: name for name, n in priority_model_trace_artifacts.weight_name_to_idx.items()}
    hlo, numbers, computations = trace_artifacts.hlo, [], []
    for call in tracing.hlo_entry_computation(stub).instructions:
        if call.opcode == "call":
            name = names[int(call.frontend_attributes.map["transposable_weight_idx"])]
            computation = tracing.get_hlo_computation_by_id(stub, call.called_computation_ids[0])
            computation.name = "wlt_" + computation.name
            numbers.append(trace_artifacts.weight_name_to_idx[name])
            computations.append(computation)
    hlo.computations.extend(computations)
    attributes = hlo.frontend_attributes.map
    attributes["require_transpose_weight_idx"] = ",".join(map(str, numbers))
    attributes["require_transpose_custom_call"] = ",".join(c.name for c in computations)
    trace_artifacts.hlo = _through_hlo_opt(hlo)


def _through_hlo_opt(hlo: Any) -> Any:
    with tempfile.TemporaryDirectory() as work:
        given, made = Path(work) / "in.hlo", Path(work) / "out.hlo"
        given.write_bytes(hlo.SerializeToString())
        options = ["--passes", "convert-inputs-to-optimal-shape"]
        options += ["--input-type", "proto", "--output-type", "proto"]
        command = ["hlo-opt", "--input", str(given), "--output", str(made), *options]
        subprocess.run(command, check=True)
        result = _read(str(made))
    for name in ("require_transpose_weight_idx", "require_transpose_custom_call"):
        result.frontend_attributes.map.pop(name)
    return result
