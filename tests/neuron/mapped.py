"""`python -m tests.neuron.mapped PORT`: the memory of its own that a process takes to have one rank's weights ready for
the runtime, and their bytes, as one JSON line. Pages of mapped files are the kernel's."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from gemma_neuron.backends.neuron.runner import _rank_weights
from gemma_neuron.port import Port


def main(port: Port) -> None:
    before = own_bytes()
    with ExitStack() as files:
        weights = _rank_weights(files, port, 0)
        total = sum(w.nbytes for w in weights.values())
        read = sum(float(w.view(torch.uint8).sum()) for w in weights.values())  # every page
        added = own_bytes() - before
    sys.stdout.write(json.dumps({"weight_bytes": total, "own_bytes": added, "sum": read}) + "\n")


def own_bytes() -> int:
    """Resident anonymous bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


if __name__ == "__main__":
    main(Port(Path(sys.argv[1])))
