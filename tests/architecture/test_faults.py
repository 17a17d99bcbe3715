"""Every reported fault in tests/data/faults.toml has a test that names it, or a reason why it has none."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
REGISTER = tomllib.loads((TESTS / "data" / "faults.toml").read_text(encoding="utf-8"))
ID = re.compile(r"[a-z]+-\d\d-[a-z0-9-]+")
SHORT = re.compile(r"_((?:orig|nxdi|load|cfg|attn|tok|cc|spot)_\d\d)(?=_)")


@cache
def functions(path: Path) -> dict[str, str]:
    """Test function → its source, decorators and docstring included."""
    text = path.read_text(encoding="utf-8")
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
            found[node.name] = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return found


def named_in(name: str, source: str) -> set[str]:
    """Short forms (`tok-06`) of the ids that a test names in marks, docstring or its own name."""
    marks = re.findall(r'mark\.fault\("([^"]+)"\)', source)
    words = ast.get_docstring(ast.parse(source).body[0]) or ""  # type: ignore[arg-type]
    shorts = [short.replace("_", "-") for short in SHORT.findall(name + "_")]
    return {"-".join(found.split("-")[:2]) for found in (*marks, *ID.findall(words), *shorts)}


@pytest.mark.parametrize("fault", REGISTER["tests"])
def test_a_registered_fault_has_tests_that_name_it(fault: str) -> None:
    assert ID.fullmatch(fault)
    assert fault not in REGISTER["left_out"]
    assert REGISTER["tests"][fault]
    for node in REGISTER["tests"][fault]:
        file, _, name = node.partition("::")
        source = functions(TESTS / file).get(name)
        assert source is not None, f"{node} does not exist"
        assert "-".join(fault.split("-")[:2]) in named_in(name, source), f"{node} does not name it"


def test_every_fault_that_a_test_names_is_registered_with_it() -> None:
    known = {"-".join(fault.split("-")[:2]): nodes for fault, nodes in REGISTER["tests"].items()}
    for path in sorted(TESTS.rglob("test_*.py")):
        for name, source in functions(path).items():
            node = f"{path.relative_to(TESTS).as_posix()}::{name}"
            for fault in named_in(name, source):
                assert node in known.get(fault, []), f"{node} names {fault}, faults.toml does not"


def test_what_is_left_out_has_a_reason() -> None:
    for fault, reason in REGISTER["left_out"].items():
        assert ID.fullmatch(fault)
        assert len(reason.split()) > 5
