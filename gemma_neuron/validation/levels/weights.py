"""Level 1: the rank files, put together again, are the checkpoint.

In: rank files, plan, and the checkpoint when it is at hand, else the digests recorded at sharding. Bars:
every file as its manifest says; every planned tensor there with its shape; parts that several ranks hold
equal; whole tensors equal byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gemma_neuron.errors import IntegrityError
from gemma_neuron.models.registry import read_parameter_table
from gemma_neuron.reassembly import (
    Bytes,
    TensorFile,
    Whole,
    WholeFile,
    recorded_digests,
    recorded_files,
    wholes,
)
from gemma_neuron.reports import LevelResult
from gemma_neuron.validation.context import LevelContext, from_problems, result

if TYPE_CHECKING:
    from gemma_neuron.geometry import ModelGeometry
    from gemma_neuron.plan import PlannedParameter

LEVEL = 1


def run(context: LevelContext) -> LevelResult:
    """Verify, reassemble, compare."""
    port, plan = context.port, context.port.plan
    try:
        for rank in range(plan.tp):
            port.rank_set(rank).verify()
        with ExitStack() as stack:
            files = [stack.enter_context(TensorFile(port.rank_file(r))) for r in range(plan.tp)]
            problems = list(_name_problems(files, plan.parameters))
            if problems:
                return from_problems(LEVEL, problems, "", {})
            known = _checkpoint(context.checkpoint, port.geometry, stack)
            judged = _Judged(files, known, recorded_digests(port), [], [])
            checked = sum(judged.compares(p, port.geometry) for p in plan.parameters)
            if not known:
                checked += judged.compares_files(recorded_files(port), plan.parameters)
    except IntegrityError as error:
        return from_problems(LEVEL, [error.message], "", {})
    return _report(context, judged.problems, checked, judged.buffers, bool(known))


def _report(
    context: LevelContext, problems: list[str], checked: int, buffers: list[float], compared: bool
) -> LevelResult:
    tp = context.port.plan.tp
    against = "the checkpoint" if compared else "the digests recorded at sharding"
    detail: dict[str, Any] = {"ranks": tp, "tensors_compared": checked, "against": against}
    if buffers:
        detail["buffers"] = {"count": len(buffers), "min": min(buffers), "max": max(buffers)}
    if not problems and checked == 0:
        return result(
            LEVEL,
            "not-run",
            "neither the checkpoint nor digests of its tensors are at hand",
            detail,
        )
    passed = f"{checked} tensors of {tp} rank files equal {against}"
    return from_problems(LEVEL, problems, passed, detail)


@dataclass(frozen=True, slots=True)
class _Known:
    """A text tensor of the checkpoint under our name."""

    file: TensorFile
    stored: str

    def __call__(self, offset: int, count: int) -> Bytes:
        return self.file.read(self.stored, offset, count)


def _checkpoint(
    folder: Path | None, geometry: ModelGeometry, stack: ExitStack
) -> dict[str, _Known]:
    """The tensors of a checkpoint folder by our names; none without one."""
    known = {}
    table = read_parameter_table(geometry)
    wanted = table.by_name()
    for path in sorted(folder.glob("*.safetensors")) if folder is not None else ():
        file = stack.enter_context(TensorFile(path))
        for name in file.tensors:
            own = name if name in wanted else table.local_name(name)
            if own in wanted:
                known[own] = _Known(file, name)
    return known


def _name_problems(
    files: Sequence[TensorFile], parameters: tuple[PlannedParameter, ...]
) -> Iterator[str]:
    """Names and local shapes that the plan (hence every compiled graph) asks for against what is there."""
    wanted = {p.name: p for p in parameters}
    for rank, file in enumerate(files):
        there = set(file.tensors)
        for name in sorted(set(wanted) - there):
            yield f"rank {rank}: {name} is missing"
        for name in sorted(there - set(wanted)):
            yield f"rank {rank}: {name} is in the file but not in the plan"
        for name in sorted(there & set(wanted)):
            shape = file.tensors[name].shape
            if shape != wanted[name].local_shape:
                yield f"rank {rank}: {name} has shape {shape}, planned {wanted[name].local_shape}"


@dataclass(frozen=True, slots=True)
class _Judged:
    """Tensor by tensor: what is wrong, and the first values of the buffers."""

    files: Sequence[TensorFile]
    known: dict[str, _Known]
    digests: dict[str, str]
    problems: list[str]
    buffers: list[float]

    def compares(self, parameter: PlannedParameter, geometry: ModelGeometry) -> bool:
        """Whether there was something to compare the tensor with; what differs goes to `problems`."""
        if parameter.derived:
            self.problems.extend(_derived_problems(parameter, self.files, geometry))
            return False
        if parameter.buffer:
            self.buffers.append(float(_tensor(self.files[0], parameter.name).reshape(-1)[0]))
        first, *others = wholes(parameter, self.files, len(self.files))
        for other in others:
            if difference := other.first_difference_from(first):
                self.problems.append(f"{difference}: another copy than rank {first.ranks[0]}'s")
                return False
        return self._compares_whole(parameter, first)

    def compares_files(
        self, recorded: Sequence[WholeFile], parameters: tuple[PlannedParameter, ...]
    ) -> int:
        """How many tensors the checkpoint's files, made up again and digested, were found to have."""
        planned = {p.name: p for p in parameters}
        for file in recorded:
            lacking = [name for name in file.names if name not in planned]
            mine = (next(wholes(planned[n], self.files, len(self.files))) for n in file.names)
            if lacking or not file.is_made_up_by(mine):
                self.problems.append(
                    f"{file.name}: the ranks' tensors are not those of the file that was sharded"
                )
        return sum(len(file.names) for file in recorded)

    def _compares_whole(self, parameter: PlannedParameter, whole: Whole) -> bool:
        name = parameter.name
        if name in self.known:
            expected = self.known[name]
            stored = expected.file.tensors[expected.stored]
            dtype = self.files[0].tensors[name].dtype
            if (stored.dtype, stored.shape) != (dtype, parameter.shape):
                self.problems.append(
                    f"{name}: {dtype} {parameter.shape}, checkpoint {stored.dtype} {stored.shape}"
                )
            elif difference := whole.first_difference(expected):
                self.problems.append(str(difference))
        elif self.known:
            self.problems.append(f"{name}: the checkpoint has no such tensor")
        elif name not in self.digests:
            return False
        elif whole.digest() != self.digests[name]:
            self.problems.append(f"{name}: not the tensor that was sharded")
        return True


def _derived_problems(
    parameter: PlannedParameter, files: Sequence[TensorFile], geometry: ModelGeometry
) -> list[str]:
    """The rank's own number, and rotary frequencies by their textbook formula."""
    if parameter.placement.kind == "rank":
        found = [int(_tensor(file, parameter.name).reshape(-1)[0]) for file in files]
        return [] if found == list(range(len(files))) else [f"{parameter.name}: ranks say {found}"]
    kind = next((k for k in geometry.rope if f".{k}." in parameter.name), None)
    if kind is None:
        return []
    rope, pairs = geometry.rope[kind], parameter.shape[0]
    exponent = np.arange(pairs, dtype=np.float64) / pairs
    expected = rope.theta**-exponent / rope.factor
    if rope.kind == "proportional":
        expected[round(rope.rotated_fraction * pairs) :] = 0.0
    found_values = _tensor(files[0], parameter.name).double().numpy()
    if np.allclose(found_values, expected, rtol=1e-5, atol=0.0):
        return []
    at = int(np.argmax(~np.isclose(found_values, expected, rtol=1e-5, atol=0.0)))
    return [
        f"{parameter.name}[{at}] is {found_values[at]:.6g}; the {rope.kind} form has {expected[at]:.6g}"
    ]


def _tensor(file: TensorFile, name: str) -> Any:
    """A small tensor's values."""
    from safetensors import safe_open

    with safe_open(str(file.path), framework="pt") as opened:
        return opened.get_tensor(name)
