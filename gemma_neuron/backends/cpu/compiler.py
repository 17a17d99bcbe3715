"""One unit: all ranks traced by torch.export, compiled by AOTInductor into a package without weights.

Two things keep weights out. `always_keep_tensor_constants`: inductor otherwise writes constants of up to eight
elements (`layer_scalar`, `rank`) into the code. `joint_graph_constant_folding` off: it replaces tensors that
happen to be uniform at trace time by their value. After compiling, the package must ask for every weight
and state by name, or the unit fails.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemma_neuron.artifacts import digest_bytes, digest_json, sync_folder
from gemma_neuron.backends.base import BuiltUnit, CompileSpec, UnitSpec
from gemma_neuron.backends.cpu.ranks import AllRanks, rank_axes, stacked_shape
from gemma_neuron.backends.cpu.toolchain import compiles_vector_code, host_key
from gemma_neuron.backends.plain import is_plain, plainly_named
from gemma_neuron.backends.tensors import TORCH_DTYPES, example_inputs, flat, weight_dtype
from gemma_neuron.errors import CompileError, CompilerFaultError
from gemma_neuron.geometry import ModelGeometry
from gemma_neuron.models.view import RankView, rank_view
from gemma_neuron.plan import ShardPlan

PACKAGE_NAME = "package.pt2"
LOG_NAME = "compile.log"
INDUCTOR_FLAGS: dict[str, Any] = {
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,
    "joint_graph_constant_folding": False,
}


def host_flags() -> dict[str, Any]:
    """What speeds up compiling here and changes nothing in the result: no part of a unit's key.

    torch names a precompiled header by a digest that it asks the program `openssl` for, and breaks where there is
    none, or where the folder for temporary files, in which it lies, has no plain name (see `plain`); compiling then
    reads the headers each time. It also builds a program against its own headers for each
    vector instruction set, in each process, which takes as long as a small graph's code: one small program tells
    the same of a released torch. Where that one does not build, torch looks for itself (None).
    """
    from torch._inductor.config import decide_compile_threads

    return {
        "compile_threads": decide_compile_threads(),  # what the environment says now, not when torch was loaded
        "aot_inductor.precompile_headers": shutil.which("openssl") is not None
        and is_plain(tempfile.gettempdir()),
        "cpp.vec_isa_ok": True if compiles_vector_code() else None,
    }


@dataclass(frozen=True, slots=True)
class Traced:
    """A unit's exported program and the key of what compiling it will give."""

    unit: UnitSpec
    program: torch.export.ExportedProgram
    inputs: tuple[torch.Tensor, ...]
    tensors: frozenset[str]
    """Flat names of every weight and state the package must ask for."""
    key: dict[str, str]

    def dry_files(self) -> dict[str, bytes]:
        flags = json.dumps(INDUCTOR_FLAGS, indent=1)
        return {"graph.txt": f"{self.program.graph}\n".encode(), "flags.json": flags.encode()}


def blank_weights(plan: ShardPlan, view: RankView, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Uninitialised tensors of the weights' shapes, all ranks: untouched pages cost no memory."""
    axes = rank_axes(plan, view)
    return {
        p.name: torch.empty(
            stacked_shape(p.local_shape, axes[p.name], plan.tp),
            dtype=weight_dtype(plan, p.name, dtype),
        )
        for p in plan.parameters
    }


def trace(geometry: ModelGeometry, plan: ShardPlan, spec: CompileSpec, unit: UnitSpec) -> Traced:
    """Export one unit. It is left undecomposed: torch's default table would take attention apart, and the
    compiler calls its fused kernel only for the whole operator."""
    view, dtype = rank_view(geometry, plan, spec), TORCH_DTYPES[spec.dtype]
    axes = rank_axes(plan, view)
    state = {
        name: torch.empty(stacked_shape(shape, axes[name], plan.tp), dtype=dtype)
        for name, shape in view.state_shapes().items()
    }
    weights = blank_weights(plan, view, dtype)
    module = AllRanks(plan, view, weights, state)
    inputs = example_inputs(unit)
    with torch.no_grad(), _quiet():
        program = torch.export.export(module, inputs)
    return Traced(
        unit=unit,
        program=program,
        inputs=inputs,
        tensors=frozenset(flat(name) for name in (*weights, *state)),
        key=_key(plan, spec, unit, program),
    )


def _key(
    plan: ShardPlan, spec: CompileSpec, unit: UnitSpec, program: torch.export.ExportedProgram
) -> dict[str, str]:
    return {
        "graph": graph_digest(program),
        "flags": digest_json(INDUCTOR_FLAGS),
        "target": "cpu",
        "tp": str(plan.tp),
        "shape": unit.name,
        "dtype": spec.dtype,
        **host_key(),
    }


def graph_digest(program: torch.export.ExportedProgram) -> str:
    """Digest of the operators, their literal arguments and every input's shape and dtype."""
    lines = [str(program.graph)]
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            lines.append(f"{node.name} {tuple(value.shape)} {value.dtype}")
    for name, constant in sorted(program.constants.items()):
        if isinstance(constant, torch.Tensor) and name not in program.state_dict:
            lines.append(f"{name} {constant.tolist()}")
    return digest_bytes("\n".join(lines).encode())


def compile_traced(traced: Traced, folder: Path) -> BuiltUnit:
    """Compile into `folder`/package.pt2 with its log. Raises CompileError naming unit and log."""
    from torch._inductor import aoti_compile_and_package

    package, log = folder / PACKAGE_NAME, folder / LOG_NAME
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix="work-") as work,
        plainly_named(Path(work)) as named,
        _quiet(),
    ):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = named
        try:
            aoti_compile_and_package(
                traced.program,
                package_path=str(package),
                inductor_configs=INDUCTOR_FLAGS | host_flags(),
            )
        except Exception as error:
            log.write_text(f"{type(error).__name__}: {error}\n", encoding="utf-8")
            first = str(error).strip().partition("\n")[0][:300]
            # The code it compiles is torch's own: what fails is more often the machine than the graph.
            raise CompilerFaultError(
                f"The compiler failed on {traced.unit.name}: {type(error).__name__}: {first}.",
                f"The whole message is in {log}.",
                signature=type(error).__name__,
            ) from error
    _check_nothing_baked(traced, package)
    peak = _peak_bytes()
    nodes = len(traced.program.graph.nodes)
    log.write_text(
        f"{traced.unit.name}: {nodes} nodes, {time.monotonic() - started:.1f} s, peak {peak:,} bytes\n"
        + "".join(f"{name}: {value}\n" for name, value in traced.key.items()),
        encoding="utf-8",
    )
    for path in (package, log):
        _sync_file(path)
    sync_folder(folder)
    return BuiltUnit(key=traced.key, files=(PACKAGE_NAME, LOG_NAME), host_peak_bytes=peak)


def _check_nothing_baked(traced: Traced, package: Path) -> None:
    from torch._inductor import aoti_load_package

    asked = set(aoti_load_package(str(package)).get_constant_fqns())
    if lost := traced.tensors - asked:
        raise CompileError(
            f"{traced.unit.name}: the compiled graph does not ask for {', '.join(sorted(lost)[:4])} "
            f"({len(lost)} in all): a weight or state was written into the code.",
            "This torch version is not usable for the cpu back end; install the pinned one.",
        )


def _peak_bytes() -> int:
    """Peak resident bytes of this process plus its largest child (the C++ compiler)."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return (own + child) * 1024


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _quiet() -> Iterator[None]:
    """torch 2.13 warns of its own deprecated internals while exporting; users cannot act on that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield
