"""One controller over replicas that may die: steps, commits, recoveries, an end in order.

In: a site that has model and samples, a run's record and folder. Out: the adapter, committed. The whole of an attempt
is wrapped by `Manager.elastic_retry`; each begins from the newest checkpoint whose digests hold, listed anew.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemma_neuron.artifacts import digest_file, remove
from gemma_neuron.elastic.engine import WorkerHandle
from gemma_neuron.elastic.faults import ReplicaDownError, ScaleUpSignalError, WorkerHung
from gemma_neuron.elastic.manager import SURVIVOR_SECONDS
from gemma_neuron.elastic.notice import GO_ON
from gemma_neuron.elastic.retry import ElasticEventKind, ElasticRetryLimit, RetryPolicy
from gemma_neuron.errors import IntegrityError, Interrupted, UsageError
from gemma_neuron.tuning import worker
from gemma_neuron.tuning.adapter import WEIGHTS_NAME
from gemma_neuron.tuning.checkpoints import ADAPTER_FILE, Checkpoints, Recovered
from gemma_neuron.tuning.commits import Commits
from gemma_neuron.tuning.history import History
from gemma_neuron.tuning.numerics import Sameness, together
from gemma_neuron.tuning.patience import Patience
from gemma_neuron.tuning.plan import Progress, Supervision, Surroundings, Tuned
from gemma_neuron.tuning.published import publish
from gemma_neuron.tuning.record import CHECKPOINTS, SCRATCH, RunRecord
from gemma_neuron.tuning.site import Site

MONITOR_SECONDS = 0.5
"""Between two looks for the capacity of lost replicas."""
POLL_SECONDS = 0.25
"""Between two looks for a replica that is waited for."""


@dataclass(slots=True)
class _State:
    """Where the controller stands; all of it can be found again on disk."""

    step: int = 0
    reached: int = 0
    """The furthest step before the last fault, for what that fault cost."""
    lost_steps: int = 0
    peak_bytes: int = 0
    loaded: dict[WorkerHandle, dict[str, Any]] = field(default_factory=dict)


class Tuning:
    """A run in this process, in `out`."""

    def __init__(
        self, site: Site, out: Path, record: RunRecord, asked: Supervision, around: Surroundings
    ) -> None:
        self.site, self.threads = site, asked.threads
        self.out, self.record, self.asked, self.around = out, record, asked, around
        self.recipe, self.events, self.tell = record.recipe, around.events, around.tell
        checkpoints = Checkpoints(out / CHECKPOINTS, record.digest)
        self.commits = Commits(checkpoints, around.depot, around.events, around.tell, asked.keep)
        self.checkpoints, self.history = checkpoints, History(out)
        self.manager = site.opened(asked, around.events, self.commits.look)
        self.fleet = site.fleet
        self.sameness = Sameness(around.events, around.tell)
        self.patience = Patience(asked.max_failures, around.events)
        self.state = _State()

    def run(self) -> Tuned:
        """To the end. Raises Interrupted when it has to stop before, ElasticRuntimeError when it gives up."""
        attempt = self.manager.elastic_retry(
            minimum_replica_count=self.asked.minimum,
            poll_interval=POLL_SECONDS,
            timeout=self.asked.wait_seconds,
            retry_policy=RetryPolicy(failures=ElasticRetryLimit(None)),
            on_elastic_event_callback=self._counted,
            meanwhile=self._give_way,
            tells_resumed=True,
        )(self._attempt)
        try:
            self._take_up(self.commits.survey())
            if self.asked.minimum is not None:
                self.manager.start_monitoring(MONITOR_SECONDS)
            return attempt()
        except TimeoutError as error:
            raise Interrupted(f"The run stands still: {error}", GO_ON) from error
        finally:
            self.manager.close()
            self.site.close()
            remove(self.out / SCRATCH)

    def _take_up(self, found: Recovered) -> None:
        """Go on as the run began: with its threads, and saying where its machine is another one."""
        if not found.step:
            return
        threads = int(found.facts.get("threads", self.threads))
        if threads != self.threads:
            self.tell(f"threads: {threads} a replica, as the run began")
            self.threads = threads
        self.sameness.begin(found.step, found.facts.get("numerics", {}))
        self.sameness.look(self.site.numerics)

    def _attempt(self) -> Tuned:
        """From the newest commit as far as the replicas live."""
        state, workers = self.state, self.manager.workers
        try:
            self.site.settle(workers)
            restored = self._restore()
            self._begin(workers)
            while state.step < self.recipe.steps:
                self._give_way(workers)
                self._grow(workers)
                self._step(workers)
                if state.step == restored + 1:
                    self._resumed(restored, len(workers))
                if state.step % self.asked.save_every == 0 or state.step == self.recipe.steps:
                    self._save(workers, wait=state.step == self.recipe.steps)
            return self._finish(workers)
        except ReplicaDownError as fault:
            self.site.lost()
            self._note(fault)
            raise

    def _note(self, fault: ReplicaDownError) -> None:
        self.events.down()
        self.events.emit(
            "worker_hung" if isinstance(fault, WorkerHung) else "worker_died",
            **fault.facts(),
            step=self.state.step,
            committed=self.commits.acknowledged,
            why=fault.message,
        )
        self.tell(f"fault: {fault.message}")

    def _restore(self) -> int:
        """The step this attempt begins from."""
        state, found = self.state, self.commits.recover()
        state.reached = max(state.reached, state.step)
        state.step = found.step
        self.history.restore(self.checkpoints.at(found.step) if found.step else None)
        self.events.emit("restored", step=found.step, lost_steps=max(0, state.reached - found.step))
        return found.step

    def _begin(self, workers: list[WorkerHandle]) -> None:
        """Give every replica the model, and all of them the restored state and a group."""
        state = self.state
        fresh = [handle for handle in workers if handle not in state.loaded]
        facts = self.site.load(fresh, self.recipe, self.threads, self._give_way)
        state.loaded = {h: f for h, f in state.loaded.items() if h in workers}
        state.loaded |= dict(zip(fresh, facts, strict=True))
        self.sameness.look(self.site.numerics)
        checkpoint = self.checkpoints.at(state.step) if state.step else None
        self.site.begin(workers, checkpoint, self.asked.collective_seconds)

    def _step(self, workers: list[WorkerHandle]) -> None:
        state, started = self.state, time.monotonic()
        done = self.fleet.ask(workers, worker.step, lambda _: (state.step,))[0]
        if not (math.isfinite(done.loss) and done.finite):
            what = (
                "leaves no finite adapter" if math.isfinite(done.loss) else f"has loss {done.loss}"
            )
            raise UsageError(
                f"Step {state.step + 1} {what}: the training has diverged. Step "
                f"{self.commits.acknowledged} is committed.",
                f"A new --out with a lower --learning-rate than {self.recipe.learning_rate:g}.",
            )
        state.step += 1
        self.site.collect()
        self.commits.look()
        seconds = time.monotonic() - started
        # a survivor of a lost peer finishes its sample before it looks up
        patient = max(self.manager.survivor_seconds, SURVIVOR_SECONDS + seconds)
        self.manager.survivor_seconds = patient
        self.history.add(done, seconds, len(workers))
        self.around.progress(
            Progress(
                step=state.step,
                steps=self.recipe.steps,
                loss=done.loss,
                samples_per_second=self.history.rate,
                replicas=len(workers),
                committed=self.commits.acknowledged,
            )
        )

    def _resumed(self, restored: int, replicas: int) -> None:
        """The first step of an attempt is done: what the fault before it cost is known."""
        state = self.state
        lost, state.reached = max(0, state.reached - restored), 0
        state.lost_steps += lost
        seconds = self.events.resumed(
            step=state.step, restored_step=restored, lost_steps=lost, replicas=replicas
        )
        if seconds:
            self.tell(
                f"resumed from step {restored} with {replicas} replica{'s' * (replicas != 1)} after {seconds:.1f} s, "
                f"{lost} steps lost"
            )

    def _save(self, workers: list[WorkerHandle], *, wait: bool) -> None:
        """Commit the state of now. Raises IntegrityError when the replicas' adapters differ."""
        facts = {
            "step": self.state.step,
            "run": self.record.digest,
            "threads": self.threads,
            "numerics": together(self.site.numerics),
        }
        self.site.collect(wait=True)  # one at a time
        self.commits.look()
        folder = self.commits.begin(self.state.step)
        answers = self.site.save(workers, folder, facts, wait)
        self.state.peak_bytes = max(self.state.peak_bytes, *(peak for _, peak in answers))
        if len({digest for digest, _ in answers}) > 1:
            raise IntegrityError(
                f"The replicas' adapters differ after step {self.state.step}.",
                "That must not be; please report it with the machine's CPU and torch's version.",
            )
        self.commits.look()

    def _save_now(self, workers: list[WorkerHandle]) -> None:
        """Commit where the last commit is behind."""
        if self.state.step > self.commits.acknowledged:
            self._save(workers, wait=True)

    def _give_way(self, workers: list[WorkerHandle] | None = None) -> None:
        """When a notice or a signal wants this process to end: commit what there is, then raise it."""
        ending = self.around.notices.ending()
        if ending is None:
            return
        if workers is not None:
            self._save_now(workers)
        raise ending[0]

    def _grow(self, workers: list[WorkerHandle]) -> None:
        """Where a lost replica's place is free again: commit, and begin again with it."""
        back = self.manager.available_inactive_replicas
        if back:
            self._save_now(workers)
            raise ScaleUpSignalError(f"There is room for {len(back)} more replicas.")

    def _counted(self, kind: ElasticEventKind, error: Exception) -> None:
        if kind == "failure":
            self.patience.count(error, self.commits.acknowledged)

    def _finish(self, workers: list[WorkerHandle]) -> Tuned:
        """Publish the last checkpoint's adapter."""
        config = self.fleet.ask(workers[:1], worker.adapter_config)[0]
        config["base_model_name_or_path"] = self.record.model
        state, downtime = self.state, round(self.events.downtime_seconds, 4)
        parameters = int(next(iter(state.loaded.values()))["parameters"])
        loss = self.history.last
        data = (self.checkpoints.at(state.step) / ADAPTER_FILE).read_bytes()
        facts = {"run": self.record.digest, "steps": state.step, "loss": loss}
        publish(self.out, data, config, facts | {"parameters": parameters})
        self.events.emit(
            "done", steps=state.step, lost_steps=state.lost_steps, downtime_seconds=downtime
        )
        return Tuned(
            out=self.out,
            steps=state.step,
            samples_per_second=self.history.rate,
            final_loss=loss,
            restarts=self.events.counts.get("retry", 0),
            lost_steps=state.lost_steps,
            downtime_seconds=downtime,
            replicas=len(workers),
            parameters=parameters,
            peak_bytes=state.peak_bytes,
            digest=digest_file(self.out / WEIGHTS_NAME),
        )
