"""Writes that only the lease's holder may do: over nothing, or over what an earlier owner wrote; the marker last."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from gemma_neuron.artifacts import digest_bytes
from gemma_neuron.errors import IntegrityError, OwnerLostError
from gemma_neuron.mirror.layout import (
    MANIFEST_SUFFIX,
    MARKER_SUFFIX,
    MirroredManifest,
    MirroredMarker,
    SetName,
    read_set,
)
from gemma_neuron.mirror.owner import Owner
from gemma_neuron.mirror.store import MovedError, Store

TRIES = 3
"""Of a conditional write that finds the object changed by an earlier life of this very lease."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """A store written under a lease. `check`: raises when nothing more is to be sent."""

    store: Store
    owner: Owner
    check: Callable[[], None] = lambda: None

    def may_write(self) -> None:
        """Raises OwnerLostError, and what `check` raises."""
        self.check()
        self.owner.check()

    def commit(self, name: SetName, local: str) -> None:
        """Make a set count whose files are there. `local`: the text of its manifest on disk."""
        if self._is_committed(name, local):
            return
        manifest = MirroredManifest(generation=self.owner.generation, local=local).data()
        marker = MirroredMarker(
            generation=self.owner.generation, manifest=digest_bytes(manifest)
        ).data()
        self.put(name.key + MANIFEST_SUFFIX, manifest)
        self.put(name.key + MARKER_SUFFIX, marker)

    def _is_committed(self, name: SetName, local: str) -> bool:
        """Whether the bucket has this very set, whoever wrote it."""
        try:
            return read_set(self.store, name).local == local
        except IntegrityError:
            return False

    def put(self, key: str, data: bytes) -> None:
        """Write over nothing, or over what an owner of this or an earlier generation wrote."""
        for _ in range(TRIES):
            self.may_write()
            found = self.store.read(key)
            if found is not None and _generation(found.data) > self.owner.generation:
                break
            try:
                self.store.put_if(key, data, None if found is None else found.etag)
                return
            except MovedError:
                continue
        raise OwnerLostError(
            f"{self.store.location}/{key} was written by a later owner of the mirror. Nothing more is written there.",
            "Run the same command again: it goes on from both.",
        )


def _generation(data: bytes) -> int:
    """Of a manifest or marker in the bucket; 0 when it is none."""
    try:
        found = json.loads(data)
        return int(found["generation"])
    except (ValueError, KeyError, TypeError):
        return 0
