"""Learners: all updates of one step on the step's experience, in one lease.

A drafter that learns along has a learner of their own, which follows the actor's while the critic may still train.

Mini-batches are unions of whole groups. The first epoch takes the groups in prompt order, later ones in an order drawn
from (seed, step, epoch).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quartet.batch.ragged import RaggedBatch
from quartet.config.placement import HEADS
from quartet.schedule.groups import group_members
from quartet.schedule.leases import LeaseContext
from quartet.schedule.model_worker import TrainWorker, Update
from quartet.schedule.role_group import RoleGroup
from quartet.train.engine import Objective

_MAXIMA = {"policy/ratio_max", "agreement/logprob_diff_max"}


@dataclass(frozen=True)
class UpdatePlan:
    """How a step's experience is gone through."""

    minibatches: int
    epochs: int
    seed: int

    def first_update(self, step: int) -> int:
        """Number of the step's first update: a step has ``minibatches × epochs``, whether or not each has a token to
        train."""
        return step * self.minibatches * self.epochs

    def selections(self, experience: RaggedBatch, step: int) -> list[tuple[int, ...]]:
        """Sequences of each mini-batch, in the order of the updates; those without a trained token are left out."""
        groups = list(group_members(experience).values())
        size = -(-len(groups) // self.minibatches)
        found: list[tuple[int, ...]] = []
        for epoch in range(self.epochs):
            order = list(range(len(groups)))
            if epoch:
                generator = torch.Generator().manual_seed((self.seed * 1_000_003 + step) * 1_009 + epoch)
                order = torch.randperm(len(groups), generator=generator).tolist()
            for start in range(0, len(order), size):
                found.append(tuple(s for g in order[start : start + size] for s in groups[g]))
        trained = set(experience.sequence_index()[experience.token["loss_mask"]].tolist())
        return [picked for picked in found if trained.intersection(picked)]


def _whole(experience: RaggedBatch) -> RaggedBatch:
    return experience


@dataclass(frozen=True)
class ModelLearner:
    """Trains one role.

    Args:
        objective: ``is_first → Objective``, of a mini-batch that is the first of its step, or is not.
        prefix: names this role's gradient norm, ``<prefix>/grad_norm``.
        warmup_steps: critic warm-up: first steps in which this role is not updated; its version advances all the same.
        learned: the batch to learn from, of the step's experience.
    """

    leases: LeaseContext
    role: str
    model: RoleGroup[TrainWorker]
    plan: UpdatePlan
    objective: Callable[[bool], Objective]
    prefix: str
    warmup_steps: int = 0
    learned: Callable[[Any], RaggedBatch] = _whole

    async def train(self, experience: Any, step: int) -> Mapping[str, float]:
        batch = self.learned(experience)
        rests = step < self.warmup_steps
        updates = [] if rests else self._updates(batch, step)
        tokens = 0 if rests else batch.num_tokens * self.plan.epochs
        read = batch.without_objects()
        turn = self.leases.turn(self.role, "train", f"train_{self.role}", step=step, tokens=tokens, writes=self.role)
        async with turn:
            rows = [] if rests else await self.model.call(TrainWorker.update, read, updates)
        return self._merge(rows)

    def _updates(self, experience: RaggedBatch, step: int) -> list[Update]:
        first = self.plan.first_update(step)
        picks = enumerate(self.plan.selections(experience, step))
        return [Update(picked, self.objective(i == 0), first + i) for i, picked in picks]

    def _merge(self, rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Means over the updates, maxima where the metric is one; the learning rate is the last update's."""
        merged: dict[str, float] = {}
        for name in sorted({name for row in rows for name in row}):
            values = [row[name] for row in rows if name in row]
            merged[name] = max(values) if name in _MAXIMA else sum(values) / len(values)
        grad_norm, lr = merged.pop("grad_norm", None), merged.pop("lr", None)
        merged.pop("skipped", None)
        if grad_norm is not None:
            merged[f"{self.prefix}/grad_norm"] = grad_norm
        if lr is not None and self.prefix == "policy":
            merged["optim/lr"] = rows[-1]["lr"]
        return merged


@dataclass(frozen=True)
class DrafterLearner:
    """Trains the drafter's model that learns along with the actor, from what updates of the step left behind.

    It works in the actor's processes, beside its LM head, and therefore under its leases, in mode ``forward``.
    """

    leases: LeaseContext
    model: RoleGroup[TrainWorker]

    async def train(self, experience: Any, step: int) -> Mapping[str, float]:
        await self.leases.arbiter.until("actor", step + 1)
        # Whatever version is current: to name it would use up what is reserved for the canary.
        turn = self.leases.turn(
            "actor", "forward", "train_heads", step=step, reads={"actor": None}, writes=HEADS, works_for=HEADS
        )
        async with turn:
            return await self.model.call(TrainWorker.train_drafter)
