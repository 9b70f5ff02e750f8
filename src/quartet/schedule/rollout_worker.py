"""The worker of the rollout role: drives an engine in its process.

Everything that goes in and comes out is plain data, so that a worker can be anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quartet.config import UserError
from quartet.observe.memory import held_bytes
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import (
    Completion,
    EngineStats,
    FinishReason,
    GenerationError,
    Request,
    RolloutEngine,
    SamplingParams,
)
from quartet.rollout.weights import num_bytes_of
from quartet.schedule.leases import Mode
from quartet.schedule.movable import Movable
from quartet.schedule.weight_sync import TakesWeights
from quartet.train.offload import Moved, Offload, Store

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
        steps_left: of those asked for; 0 when they were made, or nothing is left to do.
        sampled: tokens.
        stats: as it ended.
        refused: what was to be submitted and was not.
        failure: ``(found, request ids)`` of the ``GenerationError`` that ended it early.
    """

    completions: tuple[Completion, ...]
    sampled: int
    stats: EngineStats
    steps_left: int = 0
    refused: tuple[Refusal, ...] = ()
    failure: tuple[str, tuple[str, ...]] | None = None


class RolloutWorker(TakesWeights):
    """Calls the engine for a driver that may be in another process."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self._asked: dict[str, str] = {}  # submitted, not ended: request id → group

    def begin(self) -> EngineStats:
        """The counts so far, for a new driver; what a former one left unfinished is given up."""
        self.engine.cancel(tuple(self._asked))
        self._asked.clear()
        return self.engine.stats()

    def burst(self, submit: Sequence[Sequence[Request]], cancel: Sequence[str], num_steps: int) -> Burst:
        """Cancels, submits, then at most ``num_steps`` engine steps, as long as there is work.

        It returns early when the last request of a group has ended, so that the group is scored at once.

        Args:
            submit: requests that are taken or refused together.
        """
        self.engine.cancel(cancel)
        for request_id in cancel:
            self._asked.pop(request_id, None)
        refused = tuple(refusal for requests in submit if (refusal := self._submit(requests)) is not None)
        before = self.engine.stats().generated_tokens
        completions: list[Completion] = []
        failure: tuple[str, tuple[str, ...]] | None = None
        steps_left = num_steps
        while steps_left and self.engine.has_work and failure is None:
            try:
                ended = self.engine.step()
            except GenerationError as error:
                failure = error.found, error.request_ids
                break
            completions += ended
            steps_left -= 1
            if self._completes_a_group(ended):
                break
        burst = self._burst(completions, before, refused, failure)
        return replace(burst, steps_left=steps_left if self.engine.has_work and failure is None else 0)

    def _completes_a_group(self, ended: Sequence[Completion]) -> bool:
        # A request that was cancelled may have been asked for again under its name.
        own = [c for c in ended if c.finish_reason is not FinishReason.CANCELLED]
        groups = {group for c in own if (group := self._asked.pop(c.request_id, None)) is not None}
        return bool(groups.difference(self._asked.values()))

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
        self._asked.update((request.request_id, request.group) for request in requests)
        return None

    def _burst(
        self,
        completions: Sequence[Completion],
        generated_before: int,
        refused: tuple[Refusal, ...] = (),
        failure: tuple[str, tuple[str, ...]] | None = None,
    ) -> Burst:
        stats = self.engine.stats()
        ended = tuple(c for c in completions if c.finish_reason is not FinishReason.CANCELLED)
        for request_id in (*(c.request_id for c in ended), *(failure[1] if failure is not None else ())):
            self._asked.pop(request_id, None)
        return Burst(ended, stats.generated_tokens - generated_before, stats, 0, refused, failure)


class NativeRolloutWorker(RolloutWorker, Movable):
    """An engine under a placement: it takes weights of its own, and gives up cache and weights while others work."""

    def __init__(self, engine: NativeEngine) -> None:
        super().__init__(engine)
        self.engine: NativeEngine = engine

    def sizes(self) -> dict[Mode, int]:
        """Bytes that must be on the device to generate: its own weights; the cache grows with the requests."""
        return {"generate": num_bytes_of(self.engine.packed.model) if self.engine.owns_weights else 0}

    def offload(self) -> Moved:
        """The cache is destroyed, the weights leave. Requests are kept: their keys and values are computed again."""
        before, device = held_bytes(self.engine.packed.device), self.engine.packed.device
        cached = self.engine.resident_bytes() - self.sizes()["generate"]
        self.engine.release_cache()
        moved = super().offload()
        return replace(moved, num_bytes=moved.num_bytes + cached, freed_bytes=before - held_bytes(device))

    def _offload(self, store: Store) -> Offload:
        return Offload(self.engine.packed, store)
