"""Models and an engine that only take time, behind the groups by which a run calls its workers.

Weights are a number here, that of their updates, and give every token the same log-probability, which says the number:
an engine with other weights than it should have shows in what it samples, and the canary finds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch
from quartet.extras.simulation.cost_model import Cost, CostModel
from quartet.observe.spans import SpanRecorder
from quartet.rollout.protocol import Completion, EngineStats, FinishReason, Request
from quartet.schedule.clock import drained
from quartet.schedule.leases import LeaseMode
from quartet.schedule.role_group import RoleGroup


def logprob_of(num_updates: int) -> float:
    """Of any token, in nats, under weights that were updated so often; exact in single precision."""
    return -1.0 - num_updates / 64


class TimedModel:
    """A model's worker: passes read its weights, updates count."""

    num_updates = 0

    def forward(self, batch: RaggedBatch, needs: Any) -> ColumnSet:
        logprobs = torch.full((batch.num_tokens,), logprob_of(self.num_updates))
        return ColumnSet(batch.ids, {"logprobs": logprobs})

    def update(self, experience: RaggedBatch, updates: Sequence[Any]) -> list[dict[str, float]]:
        """One step's updates make one version."""
        self.num_updates += 1
        return [{} for _ in updates]

    def train_drafter(self) -> dict[str, float]:
        """Heads change no log-probability."""
        return {}


@dataclass
class _Held:
    request: Request
    versions: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class TimedEngine:
    """As much of a ``StepEngine`` as its worker calls; an answer has as many tokens as its request allows.

    Args:
        step: cost of one decode step, by the requests that run.
        max_running: requests that run at a time.
    """

    def __init__(self, step: Cost, max_running: int) -> None:
        self.num_updates = 0
        self.max_running = max_running
        self.held: dict[str, _Held] = {}
        self._step = step
        self._finished: list[Completion] = []
        self._stats = EngineStats(policy_version=0)
        self._seconds = 0.0

    def take_seconds(self) -> float:
        """What the steps since the last call take."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def submit(self, requests: Sequence[Request]) -> None:
        self.held.update({request.request_id: _Held(request) for request in requests})

    @property
    def has_work(self) -> bool:
        return bool(self.held or self._finished)

    def step(self) -> list[Completion]:
        """One token for every request that runs. A canary alone takes no time: new weights have their own cost."""
        self._stats.num_steps += 1
        running = list(self.held.values())[: self.max_running]
        num_timed = sum(not held.request.sampling.greedy for held in running)
        self._seconds += self._step.seconds(num_timed) if num_timed else 0.0
        for held in running:
            held.versions.append(self._stats.policy_version)
            held.logprobs.append(logprob_of(self.num_updates))
            self._stats.generated_tokens += 1
            if len(held.versions) == held.request.sampling.max_new_tokens:
                self._end(held, FinishReason.LENGTH)
        finished, self._finished = self._finished, []
        return finished

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self.held:
                self._end(self.held[request_id], FinishReason.CANCELLED)

    def update_weights(self, source: None, version: int) -> None:
        """The weights that it computes with have become those of ``version``."""
        self._stats.policy_version = version

    def stats(self) -> EngineStats:
        return replace(self._stats)

    def _end(self, held: _Held, reason: FinishReason) -> None:
        request = held.request
        del self.held[request.request_id]
        tokens = tuple(range(len(held.versions)))
        columns = tokens, tuple(held.logprobs), tuple(held.versions)
        self._finished.append(Completion(request.request_id, request.group, *columns, reason))


class TimedCodec:
    """As much of a ``TextCodec`` as a rollout worker calls, for prompts and answers without text."""

    def encode_prompt(self, prompt: Any) -> list[int]:
        return [0]

    def decode_completion(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> str:
        return ""


@dataclass(eq=False)
class TimedGroup(RoleGroup[Any]):
    """A worker in this process; what a call gives comes when the call's seconds have passed.

    Args:
        seconds: of a call with these arguments, asked when it has computed.
        sleep: lets so many seconds pass.
    """

    worker: Any
    seconds: Callable[..., float]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    async def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = getattr(self.worker, method.__name__)(*args, **kwargs)
        seconds = self.seconds(*args)
        if seconds > 0:
            await drained(self.sleep(seconds))
        return found


class TimedOffloader:
    """Parts that take bytes ÷ speed to move; each movement is a span."""

    def __init__(self, costs: CostModel, recorder: SpanRecorder) -> None:
        self._costs = costs
        self._sizes = costs.sizes()
        self._recorder = recorder
        self._resident: dict[str, int] = {}

    async def onload(self, role: str, mode: LeaseMode) -> None:
        target = self._sizes[role][mode]
        await self._move("onload", role, target - self._resident.get(role, 0))
        self._resident[role] = target

    async def offload(self, role: str) -> None:
        await self._move("offload", role, self._resident.get(role, 0))
        self._resident[role] = 0

    async def _move(self, name: str, role: str, num_bytes: int) -> None:
        speed = self._costs.move_bytes_per_s.get(role)
        with self._recorder.span(name, role=role, nbytes=num_bytes):
            await asyncio.sleep(0.0 if speed is None else num_bytes / speed)
