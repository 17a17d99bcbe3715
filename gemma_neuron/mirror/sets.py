"""Folders that are each one committed set, mirrored as they are committed: a run's checkpoints.

In: the folder they lie in, a location. Out: the newest of them in the bucket, as `<folder>/<blake3>` for the files,
then manifest, then marker. Only the newest counts: one that is overtaken while the store is slow is left out, and
those beyond `keep` are dropped, marker first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from gemma_neuron.artifacts import CommittedSet, digest_bytes, remove, write_atomic
from gemma_neuron.errors import GemmaNeuronError, IntegrityError, OwnerLostError
from gemma_neuron.mirror.background import MirrorOptions
from gemma_neuron.mirror.guarded import Guarded
from gemma_neuron.mirror.layout import (
    MARKER_SUFFIX,
    SetName,
    port_location,
    read_set,
)
from gemma_neuron.mirror.owner import acquire
from gemma_neuron.mirror.parts import send
from gemma_neuron.mirror.pull import fetch_checked
from gemma_neuron.mirror.store import Store
from gemma_neuron.mirror.uploads import Uploads
from gemma_neuron.transfer import disk_errors, require_room


class SetMirror:
    """Sets named `stem`, one a folder of `root`, under `<uri>/<identity>`. Folder names sort by age.

    `tell`: lines for people; `done`: called, by the uploading thread, with the name of each folder that is there whole.
    """

    def __init__(
        self,
        root: Path,
        stem: str,
        identity: str,
        options: MirrorOptions,
        *,
        keep: int,
        tell: Callable[[str], None],
        done: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Take the lease. Raises what `acquire` raises."""
        self.root, self.stem, self.options, self.keep = root, stem, options, keep
        self.tell, self.done = tell, done
        self.store = Store(port_location(options.uri, identity), options.bucket_owner)
        owner = acquire(self.store, tell, stale=options.stale, only_writer=options.only_writer)
        self._uploads = Uploads(owner, tell)
        self._guarded = Guarded(self.store, owner, self._uploads.check)
        self._wanted, self._lock = "", threading.Lock()
        self._uploads.add(self._push_newest, "mirror", None)
        self._uploads.start()

    def names(self) -> list[str]:
        """Folders with a marker in the bucket, newest first; listed anew."""
        ending = f"/{self.stem}{MARKER_SUFFIX}"
        keys = (key for key, _ in self.store.listing())
        found = (key.removesuffix(ending) for key in keys if key.endswith(ending))
        return sorted((name for name in found if "/" not in name), reverse=True)

    def pull(self, name: str, folder: Path) -> None:
        """Fetch one set and commit it as `folder`. Raises IntegrityError when it is not whole in the bucket."""
        found = read_set(self.store, SetName(name, self.stem))
        entries = found.manifest.files
        remove(folder)
        with disk_errors(folder.parent, f"Fetching {self.store.location}/{name}"):
            folder.mkdir(parents=True)
            require_room(folder, sum(entry.bytes for entry in entries), "The checkpoint")
            for entry in entries:
                key = f"{name}/{entry.blake3}"
                fetch_checked(self.store, key, entry, folder / entry.name, lambda _: None)
            committed = CommittedSet(folder, self.stem)
            text = found.local.encode()
            write_atomic(committed.manifest_path, text)
            write_atomic(committed.marker_path, (digest_bytes(text) + "\n").encode())

    def drop(self, name: str) -> None:
        """Remove a set, its marker first."""
        self._guarded.may_write()
        self.store.delete(SetName(name, self.stem).key + MARKER_SUFFIX)
        for key, _ in list(self.store.listing()):
            if key.startswith(f"{name}/"):
                self._guarded.may_write()
                self.store.delete(key)

    def put(self, name: str) -> None:
        """Send a set that is committed on disk, in the background."""
        with self._lock:
            self._wanted = name
        self._uploads.wake()

    def finish(self, grace: float | None = None) -> None:
        """Wait for the newest set, at most `grace` seconds, and give the lease back.

        Raises NotMirroredError when it is not there by then, OwnerLostError when another has taken over.
        """
        seconds = self.options.grace if grace is None else grace
        self._uploads.finish(seconds, lambda: self._wanted, str(self.store.location))

    def _push_newest(self) -> bool:
        """See `uploads.Push`. A set that is overtaken while the store is slow may be gone from the disk by now."""
        name = self._wanted
        if not name:
            return True
        try:
            self._push(name)
            self.done(name)
            self._prune()
        except OwnerLostError:
            raise
        except (GemmaNeuronError, OSError):
            if self._wanted == name:
                raise
            return False
        return self._is_newest(name)

    def _is_newest(self, name: str) -> bool:
        """Whether nothing newer is wanted than the set that is there now; then nothing is."""
        with self._lock:
            if self._wanted != name:
                return False
            self._wanted = ""
            return True

    def _push(self, name: str) -> None:
        committed = CommittedSet(self.root / name, self.stem)
        manifest = committed.manifest()
        if manifest is None:
            raise IntegrityError(f"{committed.folder} is not committed any more.")
        for entry in manifest.files:
            key, path = f"{name}/{entry.blake3}", committed.folder / entry.name
            if not self.store.has(key, entry.bytes):
                send(self.store, key, path, entry, check=self._guarded.may_write)
        local = committed.manifest_path.read_text(encoding="utf-8")
        self._guarded.commit(SetName(name, self.stem), local)

    def _prune(self) -> None:
        """Drop the sets beyond `keep`, and what earlier lives left of sets without a marker."""
        for name in self.names()[self.keep :]:
            self.drop(name)
        kept = self.names()
        for key, _ in list(self.store.listing()):
            folder, slash, _ = key.partition("/")
            if slash and folder not in kept and folder < max(kept, default=""):
                self._guarded.may_write()
                self.store.delete(key)
