"""Where this user had capacity, where not, and which request was under way: on this machine's disk.

Lines of JSON in the user's state folder. `had` and `lost` of a pool guide the next search; the record of a request
that was under way when the process ended keeps the next process from asking twice.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import filelock
import platformdirs
from pydantic import BaseModel, ConfigDict, ValidationError

from gemma_neuron.artifacts import write_atomic
from gemma_neuron.errors import EnvironmentProblem
from gemma_neuron.spot.offers import Lifecycle, Pool

Outcome = Literal["had", "none", "lost"]
RECENT = timedelta(days=7)
MOST_LINES = 20_000
"""Kept; older ones are dropped when the file is twice as long."""


class Seen(BaseModel):
    """One line: what came of asking a pool. `lost`: a box there was taken back after `minutes`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    time: datetime
    region: str
    zone: str
    type: str
    lifecycle: Lifecycle
    outcome: Outcome
    instance: str = ""
    minutes: float | None = None


class Intent(BaseModel):
    """A request that was sent and whose answer is not known."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    job: str
    region: str
    token: str
    sent: float
    """Unix time."""


class History:
    """Reads and appends; a file that cannot be read is as good as none."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or platformdirs.user_state_path("gemma-neuron") / "spot"
        self._file = self.folder / "history.jsonl"
        self._seen = list(self._read())
        self._last = {(self._pool(s), s.lifecycle): s.outcome for s in self._seen}

    def add(
        self,
        pool: Pool,
        outcome: Outcome,
        lifecycle: Lifecycle = "spot",
        *,
        instance: str = "",
        minutes: float | None = None,
    ) -> None:
        """One more line; `none` again where the last was `none` is not written down."""
        key = pool, lifecycle
        if outcome == "none" and self._last.get(key) == "none":
            return
        if outcome == "lost" and any(
            s.instance == instance and s.outcome == "lost" for s in self._seen
        ):
            return
        seen = Seen(
            time=datetime.now(UTC),
            region=pool.region,
            zone=pool.zone,
            type=pool.type,
            lifecycle=lifecycle,
            outcome=outcome,
            instance=instance,
            minutes=minutes,
        )
        self._last[key] = outcome
        self._seen.append(seen)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(seen.model_dump_json() + "\n")

    def had(self, pool: Pool) -> tuple[int, str]:
        """How often a spot box was had there in the last week, and when last (ISO 8601), or empty."""
        since = datetime.now(UTC) - RECENT
        times = [
            s.time
            for s in self._seen
            if s.outcome == "had"
            and s.lifecycle == "spot"
            and s.time > since
            and self._pool(s) == pool
        ]
        return len(times), max(times).isoformat(timespec="seconds") if times else ""

    def kept(self, pool: Pool) -> float | None:
        """Minutes for which boxes taken back there were kept, the median; None without any."""
        minutes = [s.minutes for s in self._seen if s.minutes is not None and self._pool(s) == pool]
        return statistics.median(minutes) if minutes else None

    def regions_of_boxes(self) -> set[str]:
        """Regions where a box of ours may still be running."""
        since = datetime.now(UTC) - RECENT
        return {s.region for s in self._seen if s.outcome == "had" and s.time > since}

    def begin(self, intent: Intent) -> None:
        """Before a request is sent: on disk first, whatever happens then."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self._intent_file(intent.job), intent.model_dump_json().encode())

    def done(self, job: str) -> None:
        """What became of the request is known."""
        self._intent_file(job).unlink(missing_ok=True)

    def under_way(self, job: str) -> Intent | None:
        try:
            return Intent.model_validate_json(self._intent_file(job).read_bytes())
        except (OSError, ValidationError):
            return None

    @contextmanager
    def only_launcher(self, job: str) -> Iterator[None]:
        """One process of this machine launches a job. Raises EnvironmentProblem when another does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(self.folder / f"{job}.lock", timeout=0)
        try:
            lock.acquire()
        except filelock.Timeout as error:
            raise EnvironmentProblem(
                f"Another process on this machine is launching job {job}.",
                "Wait for it, or stop it.",
            ) from error
        try:
            yield
        finally:
            lock.release()

    def _intent_file(self, job: str) -> Path:
        return self.folder / f"{job}.under-way.json"

    @staticmethod
    def _pool(seen: Seen) -> Pool:
        return Pool(seen.region, seen.zone, seen.type)

    def _read(self) -> Iterator[Seen]:
        try:
            lines = self._file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return
        if len(lines) > 2 * MOST_LINES:
            lines = lines[-MOST_LINES:]
            write_atomic(self._file, ("\n".join(lines) + "\n").encode())
        for line in lines:
            try:
                yield Seen.model_validate_json(line)
            except ValidationError:
                continue  # half a line, from a killed process


def now() -> str:
    """ISO 8601, UTC, as in every line of JSON here."""
    return datetime.now(UTC).isoformat(timespec="seconds")
