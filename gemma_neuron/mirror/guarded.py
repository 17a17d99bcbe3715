"""Writes that only the lease's holder may do: over nothing, or over what an earlier owner wrote; the marker last."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError

from gemma_neuron.artifacts import digest_bytes
from gemma_neuron.errors import IntegrityError, OwnerLostError
from gemma_neuron.mirror.layout import (
    MARKER_SUFFIX,
    OLD_MANIFEST_SUFFIX,
    MirroredManifest,
    MirroredMarker,
    SetName,
    read_set,
)
from gemma_neuron.mirror.owner import Owner
from gemma_neuron.mirror.store import MovedError, Store, Stored

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
        """Make a set count whose files are there. `local`: the text of its manifest on disk.

        At any moment the bucket has the set as it was or as it is, for whoever reads it.
        """
        marker = name.key + MARKER_SUFFIX
        before = self.store.read(marker)
        if before is not None and self._is_committed(name, local):
            return
        self._require_mine(marker, before)
        generation = self.owner.generation
        manifest = MirroredManifest(generation=generation, local=local).data()
        digest = digest_bytes(manifest)
        self.may_write()
        self.store.put(name.manifest_key(digest), manifest)
        self.put(marker, MirroredMarker(generation=generation, manifest=digest).data())
        if before is not None:
            self._drop_manifest(name, before.data, digest)

    def _drop_manifest(self, name: SetName, marker: bytes, digest: str) -> None:
        """Of the set as it was before; of an earlier version's mirror, by the name it had there."""
        try:
            before = MirroredMarker.model_validate_json(marker).manifest
        except ValidationError:
            return
        self.may_write()
        if before != digest:
            self.store.delete(name.manifest_key(before))
        self.store.delete(name.key + OLD_MANIFEST_SUFFIX)

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
            self._require_mine(key, found)
            try:
                self.store.put_if(key, data, None if found is None else found.etag)
                return
            except MovedError:
                continue
        raise self._later(key)

    def _require_mine(self, key: str, found: Stored | None) -> None:
        """Raise OwnerLostError unless an owner of this or an earlier generation wrote what is there."""
        if found is not None and _generation(found.data) > self.owner.generation:
            raise self._later(key)

    def _later(self, key: str) -> OwnerLostError:
        return OwnerLostError(
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
