"""Compile one traced unit by NxD's own units into a folder: NEFF, metaneff, interface, graph, command and log.

NxD neither caches nor resumes: it makes a new folder for each try, so a try that failed leaves nothing that could
be found again. Each try is a process of its own, and the schedule decides whether there is another. With layout
optimisation the decode unit also leaves `layout.hlo`, what the compiler wants weights rewritten to; every other graph
is compiled for it, and the layout unit rewrites weights at load.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gemma_neuron.artifacts import sync_folder
from gemma_neuron.backends.base import BuiltUnit, Limits
from gemma_neuron.backends.neuron import environment, sdk
from gemma_neuron.backends.neuron.diagnose import OUT_OF_HOST_MEMORY, chain, diagnose, explained
from gemma_neuron.backends.neuron.flags import LOGICAL_CORES, flags
from gemma_neuron.backends.neuron.interface import (
    INTERFACE_NAME,
    METANEFF_NAME,
    read_interface,
    trace_artifacts,
)
from gemma_neuron.backends.neuron.keys import LAYOUT_NAME
from gemma_neuron.backends.neuron.tracer import Traced
from gemma_neuron.backends.neuron.watch import CompilerStalledError, Watch
from gemma_neuron.backends.plain import plainly_named
from gemma_neuron.errors import CompileError, CompilerFaultError, GemmaNeuronError

NEFF_NAME, GRAPH_NAME, LOG_NAME, COMMAND_NAME = (
    "graph.neff",
    "graph.hlo",
    "compile.log",
    "command.txt",
)
WORK_NAME = "work"
LONGEST_LOG = 200_000


def compile_traced(traced: Traced, folder: Path, limits: Limits) -> BuiltUnit:
    """Compile into `folder`. Raises CompileError (or what the message means) with the log's path."""
    environment.for_compiling()
    work = folder / WORK_NAME
    work.mkdir()
    watch: Watch[dict[str, Path]] = Watch(work, limits.stall_seconds)
    # NxD adds the log file's path to the flags, which are taken apart at blanks.
    with plainly_named(work) as named:
        compile_once = _action(traced, Path(named))
        try:
            made = watch.run(compile_once)
        except (CompilerStalledError, RuntimeError) as error:
            raise _failure(traced, folder, error) from error
        files = _gather(traced, folder, made)
    shutil.rmtree(work)
    sync_folder(folder)
    return BuiltUnit(key=traced.key, files=files, host_peak_bytes=watch.peak_bytes)


def _action(traced: Traced, work: Path) -> Callable[[], dict[str, Path]]:
    """What makes the unit: name in its folder → file made below `work`."""
    kit = sdk.load()
    part, unit = traced.part, traced.unit
    if unit.phase == "layout":
        return lambda: _layout(kit, traced, work)
    args = flags(unit.phase)
    if not part.spec.layout:
        return lambda: _plain(kit, traced, work, args)
    if unit == part.spec.decode_unit:
        kit.hlo_utils.mark_weights_for_wlo(traced.trace, traced.trace.weight_names_to_skip)
        return lambda: _choosing(kit, traced, work, args)
    kit.hlo_utils.apply_layout_transformation(
        traced.trace,
        trace_artifacts(kit, traced.priority, read_interface(traced.priority)),
        _chosen(kit, traced.priority),
        unit.name,
    )
    return lambda: _plain(kit, traced, work, args)


def _plain(kit: sdk.Sdk, traced: Traced, work: Path, args: str) -> dict[str, Path]:
    made = kit.functions.compile(
        traced.trace.hlo, traced.trace.metaneff, work, args, traced.unit.name
    )
    return _beside(Path(made.neff_filepath))


def _choosing(kit: sdk.Sdk, traced: Traced, work: Path, args: str) -> dict[str, Path]:
    """The decode graph: the compiler also says which layout it wants weights in, if another."""
    made = kit.functions.compile_wlo(
        traced.trace.hlo, traced.trace.metaneff, work, args, traced.unit.name
    )
    stub = made.wrapped_neff_hlo_filepath
    return _beside(Path(made.neff_filepath)) | ({LAYOUT_NAME: Path(stub)} if stub else {})


def _layout(kit: sdk.Sdk, traced: Traced, work: Path) -> dict[str, Path]:
    made = kit.functions.compile_layout_transformer(
        _chosen(kit, traced.priority), traced.interface.weights, work, LOGICAL_CORES
    )
    return {} if made is None else _beside(Path(made.neff_filepath))


def _chosen(kit: sdk.Sdk, priority: Path) -> Any:
    """The decode unit's choice as NxD hands it on."""
    stub = priority / LAYOUT_NAME
    return kit.artifacts.WLOArtifacts(
        str(priority / NEFF_NAME), str(stub) if stub.is_file() else None
    )


def _beside(neff: Path) -> dict[str, Path]:
    return {
        NEFF_NAME: neff,
        METANEFF_NAME: neff.with_name(METANEFF_NAME),
        GRAPH_NAME: neff.parent / "model" / GRAPH_NAME,
    }


def _failure(traced: Traced, folder: Path, error: Exception) -> GemmaNeuronError:
    """Keep what the compiler said, and say what it means: a fault of the moment, or one of the graph."""
    text = chain(error) + "\n" + _logs(folder / WORK_NAME)
    log = folder / LOG_NAME
    log.write_text(text + "\n", encoding="utf-8")
    where = f"The whole output is in {log}."
    if isinstance(error, CompilerStalledError):
        return CompilerFaultError(
            f"{traced.unit.name}: the compiler stalled: {error}.",
            f"Run the same command with fewer units at once or a longer --stall-after. {where}",
            signature="stall",
        )
    meant = explained(f"The compiler failed on {traced.unit.name}", text, CompileError, where)
    found = diagnose(text)
    if found is None or not found.retry:
        return meant
    of_memory = found.kind == OUT_OF_HOST_MEMORY
    return CompilerFaultError(meant.message, meant.hint, signature=found.kind, of_memory=of_memory)


def _logs(work: Path) -> str:
    """The compiler's own log files of a try."""
    return "\n".join(_tail(path) for path in sorted(work.rglob("log-neuron-cc.txt")))


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LONGEST_LOG))
        return file.read().decode(errors="replace")


def _gather(traced: Traced, folder: Path, made: dict[str, Path]) -> tuple[str, ...]:
    """Move what was made to its names; everything fsynced."""
    with (folder / LOG_NAME).open("a", encoding="utf-8") as file:
        file.write(_logs(folder / WORK_NAME))
        file.writelines(f"\n{name}: {value}" for name, value in traced.key.items())
        file.write("\n")
    for name, path in made.items():
        if not (path.is_file() and path.stat().st_size):
            raise CompilerFaultError(
                f"{traced.unit.name}: the compiler ended well, and its {name} is empty or missing.",
                f"The whole output is in {folder / LOG_NAME}.",
                signature=f"no {name}",
            )
        path.replace(folder / name)
    (folder / INTERFACE_NAME).write_text(traced.interface.model_dump_json(indent=1))
    (folder / COMMAND_NAME).write_text(traced.key["flags"] + "\n", encoding="utf-8")
    names = (*made, INTERFACE_NAME, COMMAND_NAME, LOG_NAME)
    for name in names:
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())
    return names
