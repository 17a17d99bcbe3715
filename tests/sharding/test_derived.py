"""Frequencies that a child works out are those worked out here, whatever becomes of the child."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.real_configs import real_config

ASK = """
import json, multiprocessing, os, signal, sys
from gemma_neuron.models.registry import read_geometry
from gemma_neuron.sharding.derived import Frequencies

geometry = read_geometry(json.loads(sys.argv[1]))
begun = Frequencies().begin()
(child,) = multiprocessing.active_children()
if sys.argv[2] == "killed":
    os.kill(child.pid, signal.SIGKILL)
found = begun.of(geometry)
assert ("torch" in sys.modules) is (sys.argv[2] == "killed"), "the child computed them, or this process"
assert found == Frequencies().of(geometry)
assert {kind: len(data) for kind, data in found.items()} == {"sliding": 4 * 128, "global": 4 * 256}
child.join(10)
assert not multiprocessing.active_children()
"""


@pytest.mark.parametrize("child", ["well", "killed"])
def test_the_child_and_this_process_find_the_same(child: str) -> None:
    config = json.dumps(real_config("gemma-4-31B"))
    subprocess.run([sys.executable, "-c", ASK, config, child], check=True, timeout=60)
