"""The rollout role: drives engines for the group stream, and hands them the actor's weights.

Generation gives its lease back every few decode steps, so scoring of finished chunks runs between them, in an order
given by step counts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.models.packed import PackedCausalLM
from quartet.rollout.protocol import (
    Completion,
    GenerationError,
    Request,
    RolloutEngine,
    SamplingParams,
)
from quartet.schedule.groups import PromptGroup
from quartet.schedule.worker import Worker
from quartet.train.engine import Needs, TrainEngine


@dataclass(frozen=True)
class CanaryProbe:
    """A fixed prompt whose log-probabilities engine and trainer must agree on after every weight update."""

    prompt_ids: tuple[int, ...]
    num_tokens: int
    tolerance: float


class LocalRollout:
    """Drives an in-process engine for the group stream.

    Args:
        requests: ``(stream index) → (prompt item, prompt ids, requests)``; the same index gives the same requests.
            Rollouts that are trained on are sampled, so a greedy request among them is the group's baseline.
        steps_per_lease: decode steps per lease.
        source: ``() → (name, tensor)`` pairs for an engine with its own weights, or None for one that shares them.
    """

    def __init__(
        self,
        worker: Worker,
        engine: RolloutEngine,
        requests: Callable[[int], tuple[Any, tuple[int, ...], Sequence[Request]]],
        *,
        steps_per_lease: int,
        version: int,
        canary: CanaryProbe,
        trainer: TrainEngine[PackedCausalLM],
        source: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
        on_finished: Callable[[int], None] | None = None,
    ) -> None:
        self.engine = engine
        self.version = version
        self._worker = worker
        self._requests = requests
        self._steps_per_lease = steps_per_lease
        self._canary = canary
        self._trainer = trainer
        self._source = source
        self._on_finished = on_finished
        self._span: tuple[str, int] | None = None
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._pump: asyncio.Task[None] | None = None

    async def generate(self, index: int) -> PromptGroup:
        """The group at ``index`` of the stream."""
        prompt, prompt_ids, requests = self._requests(index)
        completions = await self.complete(requests)
        pairs = list(zip(requests, completions, strict=True))
        sampled = tuple(completion for request, completion in pairs if not request.sampling.greedy)
        greedy = next((completion for request, completion in pairs if request.sampling.greedy), None)
        return PromptGroup(index, prompt, prompt_ids, sampled, greedy)

    @contextlib.contextmanager
    def spans_of(self, name: str, step: int) -> Iterator[None]:
        """What is generated meanwhile counts under another name and step: an evaluation, with no group in flight."""
        self._span = (name, step)
        try:
            yield
        finally:
            self._span = None

    async def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Completions of the requests, in their order."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in requests]
        self.engine.submit(requests)
        self._waiting.update({r.request_id: f for r, f in zip(requests, futures, strict=True)})
        if self._pump is None or self._pump.done():
            self._pump = loop.create_task(self._run())
            self._pump.add_done_callback(self._pump_ended)
        try:
            # Not one after the other: what failed behind the first failure would be reported as never retrieved.
            return await asyncio.gather(*futures)
        except BaseException:
            abandoned = [r.request_id for r in requests if self._waiting.pop(r.request_id, None) is not None]
            self.engine.cancel(abandoned)
            raise

    async def _run(self) -> None:
        while self._waiting:
            name, step = self._span or ("generate", self.version)
            try:
                await self._worker.run(
                    "rollout",
                    "generate",
                    name,
                    self._burst,
                    step=step,
                    reads=self._reads(),
                    tokens_of=lambda sampled: sampled,
                )
            except GenerationError as error:
                self._fail(error, error.request_ids)
            await asyncio.sleep(0)

    def _reads(self) -> dict[str, int]:
        """The engine's weights; where they are the actor's own tensors, nobody may train those meanwhile."""
        shared = {"actor": self.version} if self._source is None else {}
        return {"rollout": self.version, **shared}

    def _pump_ended(self, pump: asyncio.Task[None]) -> None:
        """Whatever ended the pump early reaches everyone who waits for it."""
        error = asyncio.CancelledError() if pump.cancelled() else pump.exception()
        if error is not None:
            self._fail(error, list(self._waiting))

    def _burst(self) -> int:
        """A few engine steps; returns the tokens they sampled."""
        finished, before = 0, self.engine.stats().generated_tokens
        for _ in range(self._steps_per_lease):
            if not self.engine.has_work:
                break
            completions = self.engine.step()
            finished += len(completions)
            for completion in completions:
                self._deliver(completion)
        if self._on_finished is not None:
            self._on_finished(finished)
        return self.engine.stats().generated_tokens - before

    def _deliver(self, completion: Completion) -> None:
        future = self._waiting.pop(completion.request_id, None)
        if future is not None and not future.done():
            future.set_result(completion)

    def _fail(self, error: BaseException, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            future = self._waiting.pop(request_id, None)
            if future is not None and not future.done():
                future.set_exception(error)

    async def publish(self, version: int) -> dict[str, float]:
        """Hands the actor's weights of ``version`` to the engine, then asks the canary.

        Raises:
            UserError: the engine's log-probabilities are not the trainer's.
        """

        def update() -> Completion:
            self.engine.update_weights(self._source() if self._source is not None else None, version)
            return self._sing()

        heard = await self._worker.run(
            "rollout",
            "generate",
            "publish",
            update,
            step=version - 1,
            nbytes=sum(t.nbytes for _, t in self._trainer.weights()) if self._source is not None else 0,
            reads={"actor": version},
            writes="rollout",
        )
        self.version = version
        expected = await self._worker.run(
            "actor",
            "forward",
            "canary",
            lambda: self._expected(heard),
            step=version - 1,
            reads={"actor": version},
        )
        difference = float((torch.tensor(heard.logprobs, dtype=torch.float64) - expected.double()).abs().max())
        if not difference <= self._canary.tolerance:
            raise UserError(
                f"after weight update {version} the rollout engine computes with other weights than the trainer",
                found=f"log-probabilities of the canary prompt differ by {difference:.3g}, "
                f"more than {self._canary.tolerance:.3g}",
                remedy="if both are meant to differ by that much (another precision), raise canary_tolerance; "
                "otherwise the engine kept old or other weights",
            )
        return {"agreement/canary_diff": difference, "policy_version": float(version)}

    def _sing(self) -> Completion:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=self._canary.num_tokens)
        self.engine.submit([Request("canary", "canary", self._canary.prompt_ids, sampling)])
        heard: Completion | None = None
        while heard is None:
            for completion in self.engine.step():
                if completion.request_id == "canary":
                    heard = completion
                else:
                    self._deliver(completion)
        return heard

    def _expected(self, heard: Completion) -> Tensor:
        batch = RaggedBatch.from_groups([self._canary.prompt_ids], [[heard.token_ids]], ["canary"])
        mask = batch.sequence_index() >= 0
        columns = self._trainer.forward(batch.with_token(loss_mask=mask), Needs(logprobs=True))
        return columns.token["logprobs"][mask]
