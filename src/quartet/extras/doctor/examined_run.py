"""The run that is examined: its engines asked, its actor's passes, each inside of its lease."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch
from quartet.rollout.protocol import SamplingParams
from quartet.schedule.model_worker import ModelWorker
from quartet.schedule.rollout_worker import PromptRequest, RolloutWorker
from quartet.text.examples import PromptText
from quartet.train.forward import Needs
from quartet.trainers.attempt import RunAttempt
from quartet.trainers.roles import RLRoles, limits_of
from quartet.trainers.workers import RunWorkers


@dataclass(frozen=True)
class ExaminedRun:
    """
    Args:
        max_new_tokens: most that a check samples per answer.
    """

    roles: RLRoles
    workers: RunWorkers
    attempt: RunAttempt
    max_new_tokens: int

    @property
    def tolerance(self) -> float:
        """Nats by which engine and trainer may differ about a token."""
        return self.attempt.rollout.canary.tolerance

    @property
    def temperature(self) -> float:
        return self.roles.recipe.rollout.sampling.temperature

    async def answers(self, prompt: PromptText, params: Sequence[SamplingParams], name: str) -> dict[str, RaggedBatch]:
        """What each engine answers, with token ids, by each of ``params``; by the engines' names."""
        rollout, found = self.attempt.rollout, dict[str, RaggedBatch]()
        asked = PromptRequest(name, prompt, {f"{name}.{n}": one for n, one in enumerate(params)})
        async with rollout.leases.turn("rollout", "generate", name, step=0, reads=rollout.reads()):
            for n, worker in enumerate(self.workers.engines):
                of_worker = await worker.call(RolloutWorker.answers_by_engine, asked)
                several = len(self.workers.engines) > 1
                found |= {f"{n}/{engine}" if several else engine: batch for engine, batch in of_worker.items()}
        return found

    async def canaries(self) -> list[RaggedBatch]:
        """Each engine's answer to the canary prompt."""
        rollout, found = self.attempt.rollout, list[RaggedBatch]()
        async with rollout.leases.turn("rollout", "generate", "canary", step=0, reads=rollout.reads()):
            for engine in self.workers.engines:
                await engine.call(RolloutWorker.run_canary, rollout.canary, "canary")
                answers = await engine.call(RolloutWorker.canary)
                found += [answers.select([s]) for s in range(len(answers))]  # of each engine that a worker has
        return found

    def needs(self, *, temperature: float | None = None) -> Needs:
        """Log-probabilities of what was sampled, at the recipe's temperature if no other is given."""
        limits = limits_of(self.roles.recipe)
        return Needs(logprobs=True, mask="action_mask", temperature=temperature or self.temperature, limits=limits)

    async def logprobs(self, batch: RaggedBatch, needs: Needs) -> Tensor:
        """``[T]`` the actor's."""
        async with self.attempt.leases.turn("actor", "forward", "doctor", step=0, reads={"actor": None}):
            found = await self.roles.groups["actor"].call(ModelWorker.forward, batch.without_objects(), needs)
        return found.token["logprobs"]

    def largest(self, difference: Tensor) -> float:
        """The largest difference; with bf16, whose tails are long, what 99 of 100 stay below."""
        if not difference.numel():
            return 0.0
        if self.roles.actor.packed.precision == "fp32":
            return float(difference.max())
        return float(torch.quantile(difference.float(), 0.99))
