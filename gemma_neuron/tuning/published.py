"""The finished adapter: peft's two files in the run's folder, one committed set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gemma_neuron.artifacts import CommittedSet, write_atomic
from gemma_neuron.errors import IntegrityError
from gemma_neuron.tuning.adapter import CONFIG_NAME, WEIGHTS_NAME
from gemma_neuron.tuning.record import RunRecord

STEM = "adapter"


def publish(out: Path, adapter: bytes, config: dict[str, Any], facts: dict[str, Any]) -> None:
    """Commit an adapter in `out`. `config`: peft's own record of it."""
    committed = CommittedSet(out, STEM)
    committed.withdraw()
    write_atomic(out / WEIGHTS_NAME, adapter)
    text = json.dumps(config, indent=1, sort_keys=True, default=str) + "\n"
    write_atomic(out / CONFIG_NAME, text.encode())
    committed.commit([WEIGHTS_NAME, CONFIG_NAME], facts)


def published(out: Path, record: RunRecord) -> dict[str, Any] | None:
    """The facts of this run's adapter when `out` holds it whole; else None."""
    try:
        facts = CommittedSet(out, STEM).verify().facts
    except IntegrityError:
        return None
    return facts if facts.get("run") == record.digest else None
