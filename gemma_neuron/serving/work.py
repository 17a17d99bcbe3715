"""One step of the engine: schedule, run, postprocess. Used by the thread that owns the runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gemma_neuron.serving.grammar import GrammarError
from gemma_neuron.serving.requests import FinishReason, Load, TokenEvent, TokenLogprob
from gemma_neuron.serving.sampling import Ints, choose, scored_logprob, token_logprob
from gemma_neuron.serving.scheduler import Scheduler, Sequence
from gemma_neuron.serving.slots import Slots

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gemma_neuron.backends.base import Runner


class Work:
    """A runner, its scheduler, and what turns logits into events."""

    def __init__(self, runner: Runner, banned: Ints, *, index: int, reuse_prefixes: bool) -> None:
        self._runner = runner
        self._banned = banned
        self._index = index
        self.scheduler = Scheduler(
            Slots(runner, reuse=reuse_prefixes),
            prefill_length=runner.prefill_buckets[-1],
            score_length=runner.score_length,
        )

    def load(self) -> Load:
        running = self.scheduler.running
        held = sum(len(s.request.prompt_ids) + len(s.made) for s in running)
        return Load(
            len(running),
            self.scheduler.waiting,
            held,
            self._runner.slots * self._runner.max_context,
            self.scheduler.prefix_tokens,
        )

    def step(self) -> None:
        for sequence in self.scheduler.all():
            if sequence.cancelled:
                self.finish(sequence, "cancelled")
        self.scheduler.admit()
        decoding = self.scheduler.decoding()
        reading = self.scheduler.reading()
        if reading is not None:
            self._read_chunk(reading)
        if decoding:
            self._decode(decoding)

    def finish(self, sequence: Sequence, reason: FinishReason, error: str = "") -> None:
        self.scheduler.release(sequence)
        self._tell(sequence, finish=reason, error=error)

    def _tell(
        self,
        sequence: Sequence,
        *,
        token: int | None = None,
        logprob: TokenLogprob | None = None,
        prompt: tuple[TokenLogprob, ...] | None = None,
        finish: FinishReason | None = None,
        error: str = "",
    ) -> None:
        tag = sequence.request.tag
        sequence.deliver(
            TokenEvent(
                tag=tag,
                token=token,
                logprob=logprob,
                prompt=prompt,
                finish=finish,
                error=error,
                replica=self._index,
            )
        )

    def _read_chunk(self, sequence: Sequence) -> None:
        request = sequence.request
        start, end = sequence.chunks.popleft()
        if request.prompt_logprobs:
            logits = self._score_chunk(sequence, start, end)
        else:
            tokens = request.prompt_ids[start:end]
            logits = self._runner.prefill(tokens, slot=sequence.slot, start=start)
            last = not sequence.chunks or sequence.chunks[0][1] - end < end - start
            self.scheduler.slots.read(sequence.slot, request.prompt_ids, end, last_whole=last)
        if sequence.chunks:
            return
        if request.prompt_logprobs and not request.replay:
            self._tell(sequence, prompt=tuple(sequence.prompt_scores))
        if request.max_tokens == 0:
            self.finish(sequence, "length")
        else:
            self._postprocess(sequence, logits)

    def _score_chunk(self, sequence: Sequence, start: int, end: int) -> NDArray[np.float32]:
        """As a prefill chunk, and the log-probability of each token that follows in the prompt."""
        ids = sequence.request.prompt_ids
        targets = [*ids[start + 1 : end + 1]]
        targets += [ids[-1]] * (end - start - len(targets))
        scores = self._runner.score(ids[start:end], targets, slot=sequence.slot, start=start)
        if start == 0:
            sequence.prompt_scores.append(TokenLogprob(ids[0], None))
        wanted = sequence.request.logprobs or 0
        for row in range(min(end, len(ids) - 1) - start):
            found = scored_logprob(
                scores.logits[row],
                targets[row],
                float(scores.target_logprob[row]),
                float(scores.logsumexp[row]),
                wanted,
            )
            sequence.prompt_scores.append(found)
        last: NDArray[np.float32] = scores.logits[end - start - 1]
        return last

    def _decode(self, sequences: list[Sequence]) -> None:
        slots = self._runner.slots
        tokens, positions, active = [0] * slots, [0] * slots, [False] * slots
        for sequence in sequences:
            tokens[sequence.slot] = sequence.made[-1]
            positions[sequence.slot] = sequence.position
            active[sequence.slot] = True
            self.scheduler.slots.wrote(sequence.slot, sequence.position)
        logits = self._runner.decode(tokens, positions, active)
        for sequence in sequences:
            self._postprocess(sequence, logits[sequence.slot])

    def _postprocess(self, sequence: Sequence, logits: NDArray[np.float32]) -> None:
        """Choose a token, tell it, and end the request when it is the last."""
        request = sequence.request
        if not np.isfinite(logits[int(logits.argmax())]):  # argmax stops at the first NaN
            self.finish(sequence, "error", "The model computed logits that are not finite.")
            return
        try:
            told_before = sequence.replaying
            token = self._choose(sequence, logits) if told_before is None else told_before
            if sequence.constraint is not None:
                sequence.constraint.accept(token)
        except GrammarError as error:
            self.finish(sequence, "error", str(error))
            return
        sequence.append(token)
        if told_before is not None:
            return
        logprob = None
        if request.logprobs is not None:
            logprob = token_logprob(logits, token, request.logprobs)
        reason = self._finish_reason(sequence, token)
        if reason is not None:
            self.scheduler.release(sequence)
        self._tell(sequence, token=token, logprob=logprob, finish=reason)

    def _choose(self, sequence: Sequence, logits: NDArray[np.float32]) -> int:
        request, constraint = sequence.request, sequence.constraint
        return choose(
            logits,
            request.sampling,
            place=len(sequence.made),
            prompt=request.prompt_ids,
            counts=sequence.counts,
            banned=self._banned,
            allowed=None if constraint is None else constraint.allowed(),
        )

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        request = sequence.request
        if token in request.stop_ids:
            return "stop"
        total = len(request.prompt_ids) + len(sequence.made)
        if len(sequence.made) >= request.max_tokens or total >= self._runner.max_context:
            return "length"
        return None
