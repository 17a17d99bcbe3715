"""A controller of its own for units that allocate as told: one JSON document of what came of them.

python -m tests.compilation.memory_run FOLDER '{"budget": MIB, "blind": false, "units": {NAME: [MIB, STEPS]}}'
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from gemma_neuron.compilation.conditions import Conditions, HostMemory
from gemma_neuron.compilation.schedule import Schedule
from gemma_neuron.elastic.embedded import EmbeddedEngine
from gemma_neuron.elastic.events import EventLog
from gemma_neuron.elastic.notice import Notices
from gemma_neuron.errors import GemmaNeuronError
from gemma_neuron.machine import HostBudget
from tests.compilation.units import Unit, build

PATIENCE_SECONDS = 60.0
"""Nothing here is meant to hang, however loaded the machine is."""


def main(folder: Path, told: dict[str, Any]) -> dict[str, Any]:
    """`blind`: control groups are not looked at, so that the kernel acts first."""
    units = [
        Unit(folder, name, tuple(tries), silence=PATIENCE_SECONDS)
        for name, (_, *tries) in told["units"].items()
    ]
    predicted = {name: mib << 20 for name, (mib, *_) in told["units"].items()}
    budget = HostBudget(told["budget"] << 20, "the test")
    memory = HostMemory(budget, predicted, groups=() if told["blind"] else None)
    events: list[str] = []
    found: dict[str, Any] = {"peaks": {}, "events": events, "error": None}
    with closing(EmbeddedEngine(preload=["tests.compilation.units"])) as engine:
        log = EventLog(lambda what, facts: events.append(f"{what} {facts.get('unit')}"))
        conditions = Conditions(memory, Notices())
        schedule: Schedule[Unit, str] = Schedule(engine, log, build, conditions, len(units))
        try:
            for end in schedule.run(units):
                found["peaks"][end.job.name] = end.host_peak_bytes
        except GemmaNeuronError as error:
            found["error"] = error.to_json()
    return found | {"starts": {unit.name: unit.starts for unit in units}}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), json.loads(sys.argv[2]))))
