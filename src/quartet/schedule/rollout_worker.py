"""The worker of the rollout role: drives an engine in its process and keeps the tokens that it makes.

It is asked in text, and what it says of ended requests is plain data, so that a worker can be anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.envs.episode import FinishedEpisode
from quartet.observe.memory import held_bytes
from quartet.rollout.drafter import Drafter
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import (
    Completion,
    EngineStats,
    FinishReason,
    GenerationError,
    Request,
    SamplingParams,
    StepEngine,
)
from quartet.rollout.router import Progress
from quartet.schedule.canary import CanaryProbe
from quartet.schedule.checkpointed import Checkpointed
from quartet.schedule.leases import LeaseMode
from quartet.schedule.model_worker import model_bytes
from quartet.schedule.offloadable import Offloadable
from quartet.schedule.request_store import AnyRequest, FinishedRequest, PromptRequest, RequestStore
from quartet.schedule.weight_sync import WeightReceiverMixin
from quartet.text.tokenizer import TextCodec
from quartet.train.offload import Moved, Offload, Store
from quartet.train.state import REST, Shape

CANARY = "canary"


@dataclass(frozen=True)
class EngineOutputs:
    """What came of some engine steps.

    Args:
        ended: requests in the order in which they ended; without cancelled ones.
        steps_left: of those asked for; 0 when they were made, or nothing is left to do.
        sampled: tokens.
        stats: as it ended.
        failed: requests that were not taken, or whose logits were not finite, which ends it early, and the error.
        progress: tokens of each of several engines.
    """

    ended: tuple[FinishedRequest, ...]
    sampled: int
    stats: EngineStats
    steps_left: int = 0
    failed: tuple[tuple[tuple[str, ...], UserError], ...] = ()
    progress: Progress | None = None


class RolloutWorker(WeightReceiverMixin):
    """Calls the engine for a driver that may be in another process, and keeps the tokens that it makes."""

    def __init__(self, engine: StepEngine, codec: TextCodec) -> None:
        self.engine = engine
        self._codec = codec
        self._requests = RequestStore(codec)
        self._running: dict[str, Request] = {}  # submitted, not ended, by their ids
        self._again: list[Request] = []  # stopped, to be begun anew
        self._stats = engine.stats()  # at the end of the last call

    def begin(self) -> EngineStats:
        """The counts so far, for a new driver; what a former one left is given up."""
        self.engine.cancel(tuple(self._running))
        self._running.clear()
        self._again.clear()
        self._requests = RequestStore(self._codec)
        return self.stats()

    def run_steps(self, submit: Sequence[AnyRequest], cancel: Sequence[str], num_steps: int) -> EngineOutputs:
        """Cancels, submits, then at most ``num_steps`` engine steps, as long as there is work.

        It returns early when the last request of a group has ended, so that the group is scored at once.

        Args:
            submit: what is taken or refused together.
            cancel: requests that are not waited for any more, or have ended and are not made a group of.
        """
        self.engine.cancel(cancel)
        self._drop(cancel)
        ended: list[FinishedRequest] = []
        failed: list[tuple[tuple[str, ...], UserError]] = []
        again, self._again = self._again, []
        self._begin(again)
        for asked in submit:
            try:
                ended += self._submit(asked)
            except UserError as error:
                self._drop(asked.request_ids)
                failed.append((asked.request_ids, error))
        before, steps_left = self._stats.generated_tokens, num_steps
        while steps_left and self._may_step():
            try:
                made = [one for one in self._ended(self.engine.step()) if one.request_id in self._running]
            except GenerationError as error:
                self._drop(error.request_ids)
                failed.append((error.request_ids, error))
                steps_left = 0
                break
            ended += [self._requests.ended(completion) for completion in made]
            steps_left -= 1
            if self._completes_a_group(made):
                break
        stats = self.stats()
        steps_left = steps_left if self.engine.has_work else 0
        return EngineOutputs(
            tuple(ended), stats.generated_tokens - before, stats, steps_left, tuple(failed), self.progress()
        )

    def _may_step(self) -> bool:
        return self.engine.has_work

    def _submit(self, asked: AnyRequest) -> list[FinishedRequest]:
        """Returns what has ended at once: an action that its episode leaves no room for."""
        requests = self._requests.engine_requests(asked)
        if isinstance(requests, FinishedRequest):
            return [requests]
        self._begin(requests)
        return []

    def _begin(self, requests: Sequence[Request]) -> None:
        if requests:
            self.engine.submit(requests)
            self._running.update((request.request_id, request) for request in requests)

    def stop_running(self) -> EngineOutputs:
        """Ends what runs, and returns what ended by itself meanwhile; ``run_steps`` begins the others anew."""
        stopped, ended = dict(self._running), list[FinishedRequest]()
        self.engine.cancel(tuple(stopped))
        while stopped:
            for made in self.engine.step():
                request = stopped.pop(made.request_id, None)
                self._running.pop(made.request_id, None)
                if made.finish_reason is not FinishReason.CANCELLED:
                    ended.append(self._requests.ended(made))
                elif request is not None:
                    self._again.append(request)
        before, after = self._stats.generated_tokens, self.stats()
        return EngineOutputs(tuple(ended), after.generated_tokens - before, after)

    def _ended(self, completions: Sequence[Completion]) -> list[Completion]:
        # A request that was cancelled may have been asked for again under its name.
        return [made for made in completions if made.finish_reason is not FinishReason.CANCELLED]

    def _completes_a_group(self, ended: Sequence[Completion]) -> bool:
        groups = {made.group for made in ended if self._running.pop(made.request_id, None) is not None}
        return bool(groups.difference(request.group for request in self._running.values()))

    def _drop(self, request_ids: Sequence[str]) -> None:
        self._requests.forget(request_ids)
        for request_id in request_ids:
            self._running.pop(request_id, None)
        self._again = [request for request in self._again if request.request_id not in request_ids]

    def responses(self, index: int, request_ids: Sequence[str], greedy: str | None = None) -> RaggedBatch:
        """The batch of a group whose requests have all ended: see ``group_batch``; ``greedy`` is the baseline's."""
        return self._requests.responses(index, request_ids, greedy)

    def episodes(self, index: int, endings: Sequence[FinishedEpisode]) -> RaggedBatch:
        """The batch of a group of episodes that have ended."""
        return self._requests.episodes(index, endings, self._stats.policy_version)

    def answers(self, requests: Sequence[PromptRequest], indices: Sequence[int]) -> RaggedBatch:
        """The groups of these requests under these indices, one after the other, by an engine that does nothing else.

        Raises:
            UserError: the engine refuses a request.
            GenerationError: logits that are not finite.
        """
        submitted: list[Request] = []
        try:
            for asked in requests:
                of_prompt = self._requests.engine_requests(asked)
                assert not isinstance(of_prompt, FinishedRequest), "only an episode's state may leave no room"
                submitted += of_prompt
            self.engine.submit(submitted)
            while self.engine.has_work:
                for completion in self._ended(self.engine.step()):
                    self._requests.ended(completion)
        except UserError:
            for asked in requests:
                self._requests.forget(asked.request_ids)
            raise
        pairs = zip(indices, requests, strict=True)
        return RaggedBatch.concat([self._requests.responses(index, asked.request_ids) for index, asked in pairs])

    def answers_by_engine(self, asked: PromptRequest) -> dict[str, RaggedBatch]:
        """The group of this request by each engine behind this one, by their names; errors as of ``answers``."""
        return {"engine": self.answers([asked], [0])}

    def progress(self) -> Progress | None:
        """Tokens of each of several engines; None of one whose requests say enough."""
        return None

    def share(self, version: int) -> None:
        """The trainer's tensors, which this engine computes with, have become those of ``version``."""
        self.engine.update_weights(None, version)

    def run_canary(self, probe: CanaryProbe, name: str) -> EngineOutputs:
        """Generates the greedy continuation of the probe, for ``canary``; returns what else ended meanwhile."""
        before = self._stats.generated_tokens
        ids = tuple(self._codec.encode_prompt(probe.prompt))
        sampling = SamplingParams(temperature=0.0, max_new_tokens=probe.num_tokens)
        answers, others = self._answers_of_engines(Request(CANARY, CANARY, ids, sampling), probe)
        names = [name, *(f"{name}.{number}" for number in range(1, len(answers)))]
        batch = RaggedBatch.from_groups([ids], [[answer.token_ids for answer in answers]], names)
        mask, logprobs = batch.sequence_index() >= 0, torch.zeros(batch.num_tokens, dtype=torch.float64)
        logprobs[mask] = torch.tensor([x for answer in answers for x in answer.logprobs], dtype=torch.float64)
        self._canary = batch.with_token(loss_mask=mask, rollout_logprobs=logprobs)
        stats = self.stats()
        return EngineOutputs(tuple(others), stats.generated_tokens - before, stats)

    def _answers_of_engines(
        self, request: Request, probe: CanaryProbe | None = None
    ) -> tuple[list[Completion], list[FinishedRequest]]:
        """What each engine behind this one answers, and what else ended meanwhile."""
        asked, answers, others = self._ask_engines(request), dict[str, Completion](), list[FinishedRequest]()
        while len(answers) < len(asked):
            for made in self._ended(self.engine.step()):
                if made.request_id in asked:
                    answers[made.request_id] = made
                else:
                    self._running.pop(made.request_id, None)
                    others.append(self._requests.ended(made))
        return [answers[request_id] for request_id in asked], others

    def _ask_engines(self, request: Request) -> Sequence[str]:
        """Submits the request to every engine behind this one; returns the ids of the answers."""
        self.engine.submit([request])
        return [request.request_id]

    def canary(self) -> RaggedBatch:
        """What ``run_canary`` made of its probe: ``loss_mask`` and ``rollout_logprobs`` (fp64) of its tokens."""
        return self._canary

    def stats(self) -> EngineStats:
        self._stats = self.engine.stats()
        return self._stats


class NativeRolloutWorker(RolloutWorker, Offloadable, Checkpointed):
    """An engine under a placement: it takes weights of its own, and gives up cache and weights while others work.

    Its share of a checkpoint is what its drafts are made from; an engine that drafts nothing has none.
    """

    def __init__(self, engine: NativeEngine, codec: TextCodec) -> None:
        super().__init__(engine, codec)
        self.engine: NativeEngine = engine

    def sizes(self) -> dict[LeaseMode, int]:
        """Bytes that must be on the device to generate: its own weights; the cache grows with the requests."""
        return {"generate": model_bytes(self.engine.packed) if self.engine.owns_weights else 0}

    def offload(self) -> Moved:
        """The cache is destroyed, the weights leave. Requests are kept: their keys and values are computed again."""
        before, device = held_bytes(self.engine.packed.device), self.engine.packed.device
        cached = self.engine.release_cache()
        moved = super().offload()
        return replace(moved, num_bytes=moved.num_bytes + cached, freed_bytes=before - held_bytes(device))

    def _offload(self, store: Store) -> Offload:
        return Offload(self.engine.packed, store)

    # Checkpoints -----------------------------------------------------------------------------------------

    @property
    def _drafter(self) -> Drafter:
        assert self.engine.drafter is not None, "an engine that drafts"
        return self.engine.drafter

    def mark(self) -> dict[str, Any]:
        """What is saved from now on is the state of this moment, which is returned."""
        return self._drafter.mark()

    def rewind(self, marked: Mapping[str, Any]) -> None:
        """Drafts are made from the state of a ``mark`` again, which may be of an engine before this one."""
        self._drafter.load(marked)

    def checkpoint_state(self) -> dict[str, Any]:
        return self._drafter.state()

    @contextmanager
    def loading(self, saved: Mapping[str, Shape], rest: Mapping[str, Any]) -> Iterator[Mapping[str, Tensor]]:
        tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in saved.items()}
        yield tensors
        self._drafter.load({**tensors, REST: rest})
