"""The same faults through pathwaysutils' Manager and through `gemma_neuron.elastic`: attempts, ends, callbacks.

Where both are meant to do the same they must; where this toolkit means to differ, the reason is written here, and they
must differ. Anything else is a failure.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from gemma_neuron.elastic.embedded import EmbeddedEngine
from gemma_neuron.elastic.engine import WorkerSpec
from gemma_neuron.elastic.faults import ScaleUpSignalError, WorkerDied
from gemma_neuron.elastic.manager import Manager
from gemma_neuron.elastic.retry import ElasticRetryLimit, RetryPolicy

DOWN, UP = "replica down", "scale up"
SCENARIOS: tuple[dict[str, Any], ...] = (
    {"name": "no fault", "faults": []},
    {"name": "one fault, no limit", "faults": [DOWN]},
    {"name": "one fault, limit 1", "faults": [DOWN], "limit": 1},
    {"name": "two faults, limit 3", "faults": [DOWN] * 2, "limit": 3},
    {"name": "three faults, limit 3", "faults": [DOWN] * 3, "limit": 3},
    {"name": "an ordinary error", "faults": ["ValueError"], "limit": 3},
    {"name": "an ordinary error after a fault", "faults": [DOWN, "ValueError"], "limit": 3},
    {"name": "a scale-up", "faults": [UP], "limit": 3},
    {"name": "one of two, one is enough", "faults": [DOWN], "available": 1, "minimum": 1},
    {"name": "one of two, all are wanted", "faults": [], "available": 1, "timeout": 0.3},
    {
        "name": "three scale-ups, limit 3", "faults": [UP] * 3, "limit": 3,
        "differs": "a scale-up is good news and spends a budget of its own, not the failures'",
    },
    {
        "name": "fault, scale-up, fault, limit 3", "faults": [DOWN, UP, DOWN], "limit": 3,
        "differs": "a scale-up is good news and spends a budget of its own, not the failures'",
    },
    {
        "name": "eleven faults, no limit", "faults": [DOWN] * 11,
        "differs": "without a policy failures end after 10 attempts here; there they never do",
    },
    {
        "name": "text that only mentions a status",
        "faults": ["INVALID_ARGUMENT: INTERNAL name"],
        "differs": "faults are known by type, never by the text of an error",
    },
    {
        "name": "a status that may be a lost slice",
        "faults": ["INTERNAL: something broke"],
        "differs": "faults are known by type, never by the text of an error",
    },
    {"name": "a status that is none", "faults": ["UNAVAILABLE: try again"]},
)  # fmt: skip


def ours(scenario: dict[str, Any]) -> dict[str, Any]:
    """A scenario through this toolkit's manager, with real workers that are ended when they are said to be lost."""
    engine = EmbeddedEngine(limit=scenario.get("available", 2))
    made = Manager(engine, [WorkerSpec(rank=rank, name="replica") for rank in range(2)])
    faults, calls, callbacks = list(scenario["faults"]), 0, []

    def function() -> str:
        nonlocal calls
        calls += 1
        if faults:
            raise error(faults.pop(0), made)
        return "done"

    policy = None
    if "limit" in scenario:
        policy = RetryPolicy(failures=ElasticRetryLimit(scenario["limit"]))
    decorated = made.elastic_retry(
        minimum_replica_count=scenario.get("minimum"),
        poll_interval=0.05,
        timeout=scenario.get("timeout", 5.0),
        retry_policy=policy,
        on_elastic_event_callback=lambda kind, error: callbacks.append(kind),
    )(function)
    try:
        ended = decorated()
    except Exception as raised:
        ended = type(raised).__name__
    finally:
        made.close()
    return {"calls": calls, "ended": ended, "callbacks": len(callbacks)}


def error(fault: str, made: Manager) -> Exception:
    if fault == UP:
        return ScaleUpSignalError("room again")
    if fault == "ValueError":
        return ValueError("ordinary")
    if fault == DOWN:
        last = made.workers[-1]
        return WorkerDied(rank=last.spec.rank, pid=last.pid, code=-9)
    return RuntimeError(fault)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="with pathwaysutils and jax")
    parser.add_argument("--results", type=Path, default=Path("compare-pathways-results.jsonl"))
    asked = parser.parse_args()
    side = Path(__file__).with_name("pathways_side.py")
    done = subprocess.run(
        [asked.python, side],
        input="".join(json.dumps(scenario) + "\n" for scenario in SCENARIOS),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    theirs = [json.loads(line) for line in done.stdout.splitlines()]
    lines = [judged(*pair) for pair in zip(SCENARIOS, theirs, strict=True)]
    asked.results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in lines:
        print(
            f"{line['outcome']:8} {line['name']}: pathwaysutils {shown(line['theirs'])}; here {shown(line['ours'])}"
        )
        if line["outcome"] == "differs":
            print(f"         {line['why']}")
    counts = {
        how: sum(line["outcome"] == how for line in lines) for how in ("same", "differs", "WRONG")
    }
    print(json.dumps(counts))
    return 1 if counts["WRONG"] else 0


def judged(scenario: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    mine = ours(scenario)
    # JaxRuntimeError is what theirs passes on; here it is whatever the function raised
    same = {**mine, "ended": mine["ended"].replace("RuntimeError", "")} == {
        **theirs,
        "ended": theirs["ended"].replace("JaxRuntimeError", "").replace("RuntimeError", ""),
    }
    meant = "differs" in scenario
    outcome = "same" if same and not meant else "differs" if meant and not same else "WRONG"
    return {
        "name": scenario["name"],
        "outcome": outcome,
        "theirs": theirs,
        "ours": mine,
        "why": scenario.get("differs", ""),
    }


def shown(side: dict[str, Any]) -> str:
    return f"{side['calls']} calls, {side['callbacks']} callbacks, {side['ended']}"


if __name__ == "__main__":
    sys.exit(main())
