"""`compile --cluster`: units compiled by workers on other machines, which share no disk with this one.

What crosses goes through the mirror. A worker takes the units that its own reads, compiles in a folder of its own and
puts the files it made into the bucket by their content; this process fetches them, checked against the digests that
the worker told, and commits: markers and ledger have one writer, who holds the lease. Each machine finds store and
credentials by boto3's own conventions: none are sent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gemma_neuron.artifacts import remove
from gemma_neuron.backends.base import Backend, PortPart, UnitSpec
from gemma_neuron.compilation.conditions import Elsewhere, Memory
from gemma_neuron.compilation.prediction import Prediction
from gemma_neuron.compilation.worker import UnitResult, partial_folder
from gemma_neuron.compilation.workshop import Work
from gemma_neuron.elastic.cluster import RayEngine
from gemma_neuron.errors import DoesNotFitError, IntegrityError, NotMirroredError, UsageError
from gemma_neuron.mirror.layout import SetName, port_id, port_location, read_set
from gemma_neuron.mirror.owner import OWNER_KEY
from gemma_neuron.mirror.pull import Puller
from gemma_neuron.mirror.store import Store
from gemma_neuron.pipeline import away
from gemma_neuron.pipeline.host import predicted
from gemma_neuron.pipeline.prepare import Prepared
from gemma_neuron.pipeline.request import CompileRequest
from gemma_neuron.port import Port

if TYPE_CHECKING:
    from gemma_neuron.elastic.engine import Engine

LOOK_SECONDS = 0.5
"""Between two looks whether a unit has come to the bucket."""


class Cluster:
    """`compilation.workshop.Workshop` on the machines of a Ray cluster."""

    def __init__(self, request: CompileRequest, backend: Backend) -> None:
        """Join the cluster. Raises UsageError without a mirror, and what `RayEngine` raises."""
        assert request.cluster is not None
        if request.mirror is None:
            raise UsageError(
                "--cluster without --mirror: machines of a cluster share no disk, and hand over what they made through "
                "a bucket.",
                "Add --mirror s3://bucket/prefix, which every machine can write to.",
            )
        self._mirror, self._backend = request.mirror, backend
        self._ray = RayEngine(request.cluster, backend.compile_preload, calls=[away.__name__])

    def opened(self, prepared: Prepared) -> Cluster:
        """Look that store and machines are there for this port before anything long starts. Returns itself.

        Raises AccessError, NetworkError, or DoesNotFitError where no machine has room for the largest unit.
        """
        location = port_location(self._mirror.uri, port_id(prepared.record.digest))
        self._store = Store(location, self._mirror.bucket_owner)
        self._store.size(OWNER_KEY)
        self.work: Work = partial(away.compile_away, location, self._mirror.bucket_owner)
        self._require_room(list(predicted(prepared, self._backend).values()))
        return self

    def _require_room(self, expected: Sequence[Prediction]) -> None:
        self._ray.memory = max((found.host_bytes for found in expected), default=0)
        if not self._ray.places():
            raise DoesNotFitError(
                f"No machine of the cluster has {self._ray.cpus:g} CPU and {self._ray.memory:,} bytes of memory, which "
                "is what the largest unit is expected to take.",
                "`ray status` shows what they have; `ray start --memory BYTES` says what one has.",
            )

    def engine(self) -> Engine:
        return self._ray

    def close(self) -> None:
        self._ray.close()

    def begin(self, parts: Sequence[PortPart], expected: Sequence[Prediction]) -> None:
        """Wait until the units that these read are in the bucket, as long as the end would wait for uploads."""
        self._require_room(expected)
        end = time.monotonic() + self._mirror.grace
        port = parts[0].port
        for unit in dict.fromkeys(unit for part in parts for unit in self._backend.inputs(part)):
            while not self._is_there(port, unit):
                if time.monotonic() > end:
                    raise NotMirroredError(
                        f"{unit.name}, which other units read, is not in {self._store.location} after "
                        f"{self._mirror.grace:g} s.",
                        "Run the same command again: it goes on.",
                    )
                time.sleep(LOOK_SECONDS)

    def _is_there(self, port: Port, unit: UnitSpec) -> bool:
        local = port.unit_set(unit).manifest_path.read_text(encoding="utf-8")
        try:
            return read_set(self._store, SetName.of_unit(unit)).local == local
        except IntegrityError:
            return False

    def memory(self, expected: dict[str, Prediction]) -> Memory:
        return Elsewhere(self._ray.places, self._ray.memory)

    def at_once(self, expected: Sequence[Prediction]) -> int:
        return max(1, min(len(expected), self._ray.capacity()))

    def threads(self, at_once: int) -> int:
        return max(1, int(self._ray.cpus))

    def received(self, part: PortPart, answer: Any) -> UnitResult:
        """Fetch what the worker put into the bucket, each file checked."""
        made: away.Made = answer
        folder = partial_folder(part)
        remove(folder)
        if made.entries:
            folder.mkdir(parents=True)
        puller = Puller(self._store, folder)
        for entry in made.entries:
            puller.fetch(entry, folder / entry.name)
        return replace(made.result, partial=folder)
