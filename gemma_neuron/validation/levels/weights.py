"""Level 1: the rank files, put together again, are the checkpoint.

In: rank files, plan, and the checkpoint when it is at hand, else the digests recorded at sharding. Bars:
every file as its manifest says; every planned tensor there with its shape; parts that several ranks hold
equal; whole tensors equal byte for byte (after the cast to the port's dtype).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gemma_neuron.artifacts import digest_bytes
from gemma_neuron.errors import IntegrityError
from gemma_neuron.models.registry import read_parameter_table
from gemma_neuron.reports import LevelResult
from gemma_neuron.validation.context import LevelContext, from_problems, result

if TYPE_CHECKING:
    from gemma_neuron.geometry import ModelGeometry
    from gemma_neuron.plan import PlannedParameter

LEVEL = 1
JOINED_AXIS = {"rows": 0, "repeated-rows": 0, "columns": 1, "expert-gate-up": 1, "expert-down": 2}
DIGESTS = "tensor_digests"
"""Fact of rank 0's manifest: tensor → blake3 of the whole tensor's bytes, written at sharding."""


def run(context: LevelContext) -> LevelResult:
    """Verify, reassemble, compare."""
    plan = context.port.plan
    try:
        manifests = [context.port.rank_set(rank).verify() for rank in range(plan.tp)]
    except IntegrityError as error:
        return from_problems(LEVEL, [error.message], "", {})
    digests: dict[str, str] = manifests[0].facts.get(DIGESTS, {})
    with ExitStack() as stack:
        files = [stack.enter_context(_open(context.port.rank_file(r))) for r in range(plan.tp)]
        problems = list(_name_problems(files, plan.parameters))
        if problems:
            return from_problems(LEVEL, problems, "", {})
        source = _Checkpoint(context.checkpoint, context.port.geometry, stack)
        checked, buffers = 0, []
        for parameter in plan.parameters:
            whole, found = _reassemble(files, parameter, plan.tp)
            problems += found
            if whole is None:
                continue
            if parameter.derived:
                problems += _derived_problems(parameter, files, context.port.geometry)
                continue
            verdict = _differs(parameter.name, whole, source, digests)
            if verdict is not None:
                checked += 1
                problems += [verdict] if verdict else []
            if parameter.buffer:
                buffers.append(float(whole.float().reshape(-1)[0]))
    return _report(context, problems, checked, buffers, bool(source.known))


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


class _Checkpoint:
    """Text tensors of a checkpoint folder under our names; empty without one."""

    def __init__(self, folder: Path | None, geometry: ModelGeometry, stack: ExitStack) -> None:
        self.known: dict[str, tuple[Any, str]] = {}
        table = read_parameter_table(geometry)
        wanted = table.by_name()
        for path in sorted(folder.glob("*.safetensors")) if folder is not None else ():
            file = stack.enter_context(_open(path))
            for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                own = name if name in wanted else table.local_name(name)
                if own in wanted:
                    self.known[own] = (file, name)

    def tensor(self, name: str) -> Any:
        file, stored = self.known[name]
        return file.get_tensor(stored)


def _open(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(str(path), framework="pt")


def _name_problems(files: list[Any], parameters: tuple[PlannedParameter, ...]) -> Iterator[str]:
    """Names and local shapes that the plan (hence every compiled graph) asks for against what is there."""
    wanted = {p.name: p for p in parameters}
    for rank, file in enumerate(files):
        there = set(file.keys())
        for name in sorted(set(wanted) - there):
            yield f"rank {rank}: {name} is missing"
        for name in sorted(there - set(wanted)):
            yield f"rank {rank}: {name} is in the file but not in the plan"
        for name in sorted(there & set(wanted)):
            shape = tuple(file.get_slice(name).get_shape())
            if shape != wanted[name].local_shape:
                yield f"rank {rank}: {name} has shape {shape}, planned {wanted[name].local_shape}"


def _reassemble(
    files: list[Any], parameter: PlannedParameter, tp: int
) -> tuple[Any | None, list[str]]:
    """(whole tensor, problems): parts joined along the cut axis; copies on several ranks compared."""
    import torch

    placement, parts, problems = parameter.placement, {}, []
    if placement.kind == "rank":
        return files[0].get_tensor(parameter.name), []
    for rank, file in enumerate(files):
        part, tensor = placement.part_of_rank(rank, tp), file.get_tensor(parameter.name)
        if part not in parts:
            parts[part] = tensor
        elif not _same_bytes(parts[part], tensor):
            problems.append(
                f"{parameter.name}: rank {rank} holds another copy than the ranks before"
            )
    if problems:
        return None, problems
    ordered = [parts[index] for index in sorted(parts)]
    if len(ordered) == 1:
        return ordered[0], []
    if placement.kind == "expert-gate-up":
        halves = [tensor.chunk(2, dim=1) for tensor in ordered]
        ordered = [half[i] for i in (0, 1) for half in halves]
    whole = torch.cat(ordered, dim=JOINED_AXIS[placement.kind])
    if tuple(whole.shape) != parameter.shape:
        return None, [
            f"{parameter.name}: parts make {tuple(whole.shape)}, planned {parameter.shape}"
        ]
    return whole, []


def _differs(name: str, whole: Any, source: _Checkpoint, digests: dict[str, str]) -> str | None:
    """None: nothing to compare with; "": equal; else what differs."""
    if name in source.known:
        expected = source.tensor(name).to(whole.dtype)
        if _same_bytes(expected, whole):
            return ""
        if expected.shape != whole.shape:
            return f"{name}: shape {tuple(whole.shape)}, checkpoint {tuple(expected.shape)}"
        off = int((expected != whole).sum())
        return f"{name}: {off} of {whole.numel()} values are not the checkpoint's"
    if source.known:
        return f"{name}: the checkpoint has no such tensor"
    if name not in digests:
        return None
    return "" if _digest(whole) == digests[name] else f"{name}: not the tensor that was sharded"


def _derived_problems(
    parameter: PlannedParameter, files: list[Any], geometry: ModelGeometry
) -> list[str]:
    """The rank's own number, and rotary frequencies by their textbook formula."""
    if parameter.placement.kind == "rank":
        found = [int(file.get_tensor(parameter.name).reshape(-1)[0]) for file in files]
        return [] if found == list(range(len(files))) else [f"{parameter.name}: ranks say {found}"]
    kind = next((k for k in geometry.rope if f".{k}." in parameter.name), None)
    if kind is None:
        return []
    rope, pairs = geometry.rope[kind], parameter.shape[0]
    exponent = np.arange(pairs, dtype=np.float64) / pairs
    expected = rope.theta**-exponent / rope.factor
    if rope.kind == "proportional":
        expected[round(rope.rotated_fraction * pairs) :] = 0.0
    found_values = files[0].get_tensor(parameter.name).double().numpy()
    if np.allclose(found_values, expected, rtol=1e-5, atol=0.0):
        return []
    at = int(np.argmax(~np.isclose(found_values, expected, rtol=1e-5, atol=0.0)))
    return [
        f"{parameter.name}[{at}] is {found_values[at]:.6g}; the {rope.kind} form has {expected[at]:.6g}"
    ]


def _same_bytes(a: Any, b: Any) -> bool:
    return bool(a.dtype == b.dtype and a.shape == b.shape and (_bytes(a) == _bytes(b)).all())


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _digest(tensor: Any) -> str:
    return digest_bytes(_bytes(tensor).numpy().tobytes())
