"""Lists files and functions that are long, and fails on those that are too long.

In: the Python files of the package, of tests/ and scripts/, and the launcher. Out: a listing.
Fails: a file over 400 lines, a function over 80. Over 300 and 50 they are named: time to split.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LISTED, FILE_REFUSED = 300, 400
FUNCTION_LISTED, FUNCTION_REFUSED = 50, 80
ROOT = Path(__file__).resolve().parent.parent


def functions(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Name, first line and length of every function, nested ones too; decorators are not counted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def measure(path: Path) -> Iterator[tuple[int, int, str]]:
    """Length, refused length and description of what is long in one file."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT)
    lines = len(text.splitlines())
    if lines > FILE_LISTED:
        yield lines, FILE_REFUSED, f"{name}: file of {lines} lines"
    for function, line, length in functions(ast.parse(text, filename=str(path))):
        if length > FUNCTION_LISTED:
            yield length, FUNCTION_REFUSED, f"{name}:{line}: {function} of {length} lines"


def main() -> int:
    paths = [ROOT / "cli.py"]
    for folder in ("gemma_neuron", "tests", "scripts"):
        paths += sorted((ROOT / folder).rglob("*.py"))
    refused = 0
    for path in paths:
        for length, limit, description in measure(path):
            too_long = length > limit
            refused += too_long
            print(f"   {'TOO LONG' if too_long else 'long'} {description} (at most {limit})")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
