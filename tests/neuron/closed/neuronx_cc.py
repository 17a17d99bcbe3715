"""The compiler's two executables: `neuronx-cc compile` and `hlo-opt` (hlo_utils.py `convert_inputs_to_optimal_shape`).

Flags are those of the compiler's reference page; others are refused. STAND_IN_CC in the environment makes it
misbehave in the graphs whose log file's path names a phase: `fail:<phase>:<text>`, `die:<phase>:<signal>`,
`stall:<phase>`, `flood:<phase>:<MB of output before it fails>`, `nothing:<phase>` and `torn:<phase>:<bytes>` (it ends
well, without a NEFF or with that much of one).
STAND_IN_LAYOUT chooses which weights it wants in another layout.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from tests.neuron.closed.neff import entry_of, executable, undo_layout
from tests.neuron.closed.protos import HloModuleProto

TRANSPOSABLE = "transposable_weight_idx"
NEEDED = "require_transpose_weight_idx"
CALLS = "require_transpose_custom_call"
FLOOD = f"{'ERROR: tile 17 of 4096 is spilled':<99}\n"
EVERY = 3
"""One matrix in three is wanted in another layout."""


def main(arguments: list[str]) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    if twice := _contradictions(arguments):
        parser.error(f"given twice, differently: {twice}")
    log = Path(given.logfile)
    log.write_text("stand-in compiler\n")
    misbehaved = _misbehave(log, Path(given.output))
    if misbehaved is not None:
        return misbehaved
    module = HloModuleProto()
    module.ParseFromString(Path(given.module).read_bytes())
    if given.enable_internal_neff_wrapper:
        _choose_layout(module, Path(given.output).parent)
    Path(given.output).write_bytes(executable(module.SerializeToString(deterministic=True)))
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="neuronx-cc", allow_abbrev=False)
    parser.add_argument("command", choices=["compile"])
    parser.add_argument("module")
    parser.add_argument("--framework", choices=["XLA"], required=True)
    parser.add_argument("--target", choices=["inf2", "trn1", "trn1n"], required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--logfile", required=True)
    parser.add_argument("--model-type", choices=["generic", "transformer"], required=True)
    parser.add_argument("--auto-cast", choices=["none", "matmult", "all"])
    parser.add_argument("-O", type=int, choices=[1, 2, 3])
    parser.add_argument("--lnc", type=int, choices=[1], required=True)
    parser.add_argument("--verbose", type=int)
    parser.add_argument("--enable-saturate-infinity", action="store_true")
    parser.add_argument("--enable-internal-neff-wrapper", action="store_true")
    parser.add_argument("--internal-hlo2tensorizer-options")
    return parser


def _contradictions(arguments: list[str]) -> list[str]:
    """Flags that stand there with two values: NxD adds those whose spelling it does not know (functions.py)."""
    seen: dict[str, set[str]] = {}
    for argument in arguments:
        name, _, value = argument.replace("-O", "-O=", 1).partition("=")
        if name.startswith("-"):
            seen.setdefault(name, set()).add(value)
    return [name for name, values in seen.items() if len(values) > 1]


def _misbehave(log: Path, neff: Path) -> int | None:
    kind, _, rest = os.environ.get("STAND_IN_CC", "").partition(":")
    phase, _, text = rest.partition(":")
    if not kind or f"/{phase}" not in str(log):
        return None
    if kind == "fail":
        log.write_text(text + "\n")
        sys.stderr.write(text + "\n")
        return 70
    if kind == "die":
        os.kill(os.getpid(), int(text))
    if kind == "flood":
        for _ in range(int(text) * 10_000):
            sys.stderr.write(FLOOD)
        return 70
    if kind == "torn":
        neff.write_bytes(executable(b"\x0a\xff" * 99)[: int(text)])
    while kind == "stall":
        time.sleep(1)
    return 0 if kind in ("nothing", "torn") else None


def _choose_layout(module: Any, folder: Path) -> None:
    """Write the stub that says which weights are wanted how, and let the graph itself expect them so."""
    marked = module.frontend_attributes.map[TRANSPOSABLE]
    offset = int(os.environ.get("STAND_IN_LAYOUT", "0"))
    wanted = {int(n) for n in marked.split(",") if n}
    entry = entry_of(module)
    parameters = [i for i in entry.instructions if i.opcode == "parameter"]
    matrices = [
        p for p in parameters if p.parameter_number in wanted and len(p.shape.dimensions) == 2
    ]
    chosen = [
        p for i, p in enumerate(matrices) if i % EVERY == offset and p.shape.dimensions[0] % 2 == 0
    ]
    if not chosen:
        return
    stub = HloModuleProto(name="stub", id=2, entry_computation_id=1, entry_computation_name="stub")
    stub_entry = stub.computations.add(name="stub", id=1, root_id=10_000)
    stub_entry.program_shape.CopyFrom(entry.program_shape)
    stub.host_program_shape.CopyFrom(entry.program_shape)
    computations = {}
    for parameter in parameters:
        stub_entry.instructions.add().CopyFrom(parameter)
    for n, parameter in enumerate(chosen):
        computation = _transformation(stub, 2 + n, parameter)
        computations[parameter.parameter_number] = computation
        call = stub_entry.instructions.add(name=f"call.{n}", opcode="call", id=5_000 + n)
        call.shape.CopyFrom(parameter.shape)
        call.operand_ids.append(parameter.id)
        call.called_computation_ids.append(computation.id)
        call.frontend_attributes.map[TRANSPOSABLE] = str(parameter.parameter_number)
    root = stub_entry.instructions.add(name="neff", opcode="custom-call", id=10_000)
    root.shape.CopyFrom(entry.program_shape.result)
    (folder / "wrapped_neff.hlo").write_bytes(stub.SerializeToString(deterministic=True))
    undo_layout(module, computations)


def _transformation(stub: Any, number: int, parameter: Any) -> Any:
    """Rows [2, n / 2] exchanged with their half: reshape, transpose, reshape to the shape it had."""
    rows, columns = parameter.shape.dimensions
    computation = stub.computations.add(name=f"transform.{number}", id=number, root_id=4)
    shapes = ([rows, columns], [2, rows // 2, columns], [rows // 2, 2, columns], [rows, columns])
    for i, (opcode, shape) in enumerate(
        zip(("parameter", "reshape", "transpose", "reshape"), shapes, strict=True)
    ):
        step = computation.instructions.add(name=f"{opcode}.{i}", opcode=opcode, id=i + 1)
        step.shape.element_type = parameter.shape.element_type
        step.shape.dimensions.extend(shape)
        if i:
            step.operand_ids.append(i)
        if opcode == "transpose":
            step.dimensions.extend((1, 0, 2))
    computation.program_shape.parameter_names.append("w")
    return computation


def optimise(arguments: list[str]) -> int:
    parser = ArgumentParser(prog="hlo-opt", allow_abbrev=False)
    for name in ("--input", "--output"):
        parser.add_argument(name, required=True)
    parser.add_argument("--passes", choices=["convert-inputs-to-optimal-shape"], required=True)
    for name in ("--input-type", "--output-type"):
        parser.add_argument(name, choices=["proto"], required=True)
    return _converted(parser.parse_args(arguments))


def _converted(given: Namespace) -> int:
    module = HloModuleProto()
    module.ParseFromString(Path(given.input).read_bytes())
    attributes = module.frontend_attributes.map
    numbers = [int(n) for n in attributes[NEEDED].split(",") if n]
    by_name = {c.name: c for c in module.computations}
    names = [n for n in attributes[CALLS].split(",") if n]
    undo_layout(module, {n: by_name[c] for n, c in zip(numbers, names, strict=True)})
    Path(given.output).write_bytes(module.SerializeToString(deterministic=True))
    return 0
