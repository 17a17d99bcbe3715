"""A checkout of NxD, given on the command line."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def source_folder(given: str | None) -> Path | None:
    """The folder to import NxD from, and a refusal of one that holds none."""
    if given is None:
        return None
    found = [p for p in (Path(given) / "src", Path(given)) if (p / "neuronx_distributed").is_dir()]
    if not found:
        print(f"error: {given} holds no neuronx_distributed.", file=sys.stderr)
        print("hint: Give a checkout of NxD's source, or its src folder.", file=sys.stderr)
        sys.exit(2)
    return found[0].resolve()


def version_of(source: Path | None) -> str:
    if source is None:
        return "stand-in"
    text = (source / "neuronx_distributed" / "_version.py").read_text()
    found = re.search(r'__version__ = "([^"]+)"', text)
    return found[1] if found else "unknown"
