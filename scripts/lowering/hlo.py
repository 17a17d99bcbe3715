"""What a graph's HLO text says: opcodes, types, constants, groups. Facts only; `main` judges them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from math import prod

INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\(", re.MULTILINE
)
SHAPE = re.compile(r"([a-z]+[0-9]*)\[([0-9,<=]*)\]")
GROUPS = re.compile(r"replica_groups=(\{\{.*?\}\}|\{\})")


@dataclass(frozen=True)
class Facts:
    opcodes: Counter[str]
    types: Counter[str]
    largest_constant: int
    """Elements of the largest literal."""
    groups: frozenset[str]
    dynamic: bool


def facts(text: str) -> Facts:
    opcodes: Counter[str] = Counter()
    types: Counter[str] = Counter()
    largest, dynamic = 0, False
    for _, shape, opcode in INSTRUCTION.findall(text):
        opcodes[opcode] += 1
        for kind, dimensions in SHAPE.findall(shape):
            types[kind] += 1
            dynamic |= "<=" in dimensions
            if opcode == "constant":
                largest = max(largest, prod(int(n) for n in dimensions.split(",") if n.isdigit()))
    return Facts(opcodes, types, largest, frozenset(GROUPS.findall(text)), dynamic)
