"""What drives a rollout engine, beside the engine: in the driver's process or in a worker's.

Everything that goes in and comes out is plain data, so that a host can be anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quartet.config import UserError
from quartet.rollout.protocol import (
    Completion,
    EngineStats,
    FinishReason,
    GenerationError,
    Request,
    RolloutEngine,
    SamplingParams,
)

CANARY = "canary"


@dataclass(frozen=True)
class CanaryProbe:
    """A fixed prompt whose log-probabilities engine and trainer must agree on after every weight update."""

    prompt_ids: tuple[int, ...]
    num_tokens: int
    tolerance: float


@dataclass(frozen=True)
class Refusal:
    """Requests that the engine did not take, and the three parts of its ``UserError``."""

    request_ids: tuple[str, ...]
    problem: str
    found: str
    remedy: str

    def error(self) -> UserError:
        return UserError(self.problem, found=self.found, remedy=self.remedy)


@dataclass(frozen=True)
class Burst:
    """What came of some engine steps.

    Args:
        completions: in the order in which they ended; without cancelled ones.
        sampled: tokens.
        stats: as it ended.
        refused: what was to be submitted and was not.
        failure: ``(found, request ids)`` of the ``GenerationError`` that ended it early.
    """

    completions: tuple[Completion, ...]
    sampled: int
    stats: EngineStats
    refused: tuple[Refusal, ...] = ()
    failure: tuple[str, tuple[str, ...]] | None = None


class EngineHost:
    """Calls the engine for a driver that may be in another process."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self._asked: set[str] = set()  # submitted, not ended

    def begin(self) -> EngineStats:
        """The counts so far, for a new driver; what a former one left unfinished is given up."""
        self.engine.cancel(tuple(self._asked))
        self._asked.clear()
        return self.engine.stats()

    def burst(self, submit: Sequence[Sequence[Request]], cancel: Sequence[str], num_steps: int) -> Burst:
        """Cancels, submits, then at most ``num_steps`` engine steps, as long as there is work.

        Args:
            submit: requests that are taken or refused together.
        """
        self.engine.cancel(cancel)
        refused = tuple(refusal for requests in submit if (refusal := self._submit(requests)) is not None)
        before = self.engine.stats().generated_tokens
        completions: list[Completion] = []
        failure: tuple[str, tuple[str, ...]] | None = None
        for _ in range(num_steps):
            if not self.engine.has_work:
                break
            try:
                completions += self.engine.step()
            except GenerationError as error:
                failure = error.found, error.request_ids
                break
        return self._burst(completions, before, refused, failure)

    def run_to_end(self, requests: Sequence[Request]) -> Burst:
        """The completions of ``requests`` in their order, while nobody else uses the engine.

        Raises:
            UserError: the engine refuses a request.
            GenerationError: logits that are not finite.
        """
        before = self.engine.stats().generated_tokens
        self.engine.submit(requests)
        found: dict[str, Completion] = {}
        while self.engine.has_work:
            found.update({completion.request_id: completion for completion in self.engine.step()})
        return self._burst([found[request.request_id] for request in requests], before)

    def share(self, version: int) -> None:
        """The trainer's tensors, which this engine computes with, have become those of ``version``."""
        self.engine.update_weights(None, version)

    def sing(self, probe: CanaryProbe) -> tuple[Completion, Burst]:
        """The greedy continuation of the probe, and what else ended while it was computed."""
        before = self.engine.stats().generated_tokens
        sampling = SamplingParams(temperature=0.0, max_new_tokens=probe.num_tokens)
        self.engine.submit([Request(CANARY, CANARY, probe.prompt_ids, sampling)])
        others: list[Completion] = []
        heard: Completion | None = None
        while heard is None:
            for completion in self.engine.step():
                if completion.request_id == CANARY:
                    heard = completion
                else:
                    others.append(completion)
        return heard, self._burst(others, before)

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    def _submit(self, requests: Sequence[Request]) -> Refusal | None:
        try:
            self.engine.submit(requests)
        except UserError as error:
            ids = tuple(request.request_id for request in requests)
            return Refusal(ids, error.problem, error.found, error.remedy)
        self._asked.update(request.request_id for request in requests)
        return None

    def _burst(
        self,
        completions: Sequence[Completion],
        generated_before: int,
        refused: tuple[Refusal, ...] = (),
        failure: tuple[str, tuple[str, ...]] | None = None,
    ) -> Burst:
        stats = self.engine.stats()
        self._asked.difference_update(completion.request_id for completion in completions)
        self._asked.difference_update(failure[1] if failure is not None else ())
        ended = tuple(c for c in completions if c.finish_reason is not FinishReason.CANCELLED)
        return Burst(ended, stats.generated_tokens - generated_before, stats, refused, failure)
