"""A run that follows the journal of another one trains on the same bits, whatever takes how long in it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.config.algorithms import GRPO
from quartet.config.common import OptimConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.placement import InFlight
from quartet.config.recipe import ActorConfig, RLRecipe, RolloutConfig, SamplingConfig
from quartet.observe.spans import SpanRecorder
from quartet.rollout.engine import NativeEngine, own_copy
from quartet.schedule.clock import now, run_virtual
from quartet.schedule.group_stream import GroupStream
from quartet.schedule.groups import Group, chunk_of, staleness_metrics
from quartet.schedule.iteration import Chunk, IterationStages, ModelScorer, run_iteration
from quartet.schedule.journal import Diverged, Event, Journal
from quartet.schedule.learners import ModelLearner, UpdatePlan
from quartet.schedule.leases import Arbiter, LeaseContext, PoolSpec, RoleSpec
from quartet.schedule.role_group import LocalGroup, RoleGroup
from quartet.schedule.rollout import Rollout
from quartet.schedule.rollout_worker import RolloutWorker
from quartet.schedule.staleness import AdmissionRule
from quartet.train.forward import Needs
from quartet.train.objectives import PolicyObjective
from quartet.trainers.experience import Assembler, Experience
from quartet.trainers.model_loader import UserObjects
from quartet.trainers.roles import RLRoles

STEPS, ALGORITHM = 4, GRPO()
RECIPE = RLRecipe(
    algorithm=ALGORITHM,
    actor=ActorConfig(train=TrainConfig(optim=OptimConfig(lr=2e-2))),
    rollout=RolloutConfig(
        sampling=SamplingConfig(max_new_tokens=14), engine=NativeEngineConfig(max_running=8, steps_per_lease=1)
    ),
    steps=4,
    prompts_per_step=4,
    responses_per_prompt=2,
    minibatches=2,
    threads=1,
)  # fmt: skip


class Delays:
    """Seconds of each call, drawn from (seed, what, number); updates take ``slower`` times as long."""

    def __init__(self, seed: int, slower: int) -> None:
        self.seed = seed
        self.slower = slower
        self.num_calls = 0

    async def pass_by(self, what: str) -> None:
        self.num_calls += 1
        draw = random.Random(f"{self.seed} {what} {self.num_calls}")
        seconds = draw.choice({"run_steps": (0.5, 2.0), "score": (0.0, 3.0)}.get(what, (1.0, 6.0)))
        await asyncio.sleep(seconds * (self.slower if what == "update" else 1))


@dataclass(frozen=True)
class Slow(RoleGroup[Any]):
    """A group whose calls take time before they compute."""

    handle: RoleGroup[Any]
    delays: Delays

    async def call(self, method: Any, *args: Any) -> Any:
        await self.delays.pass_by(method.__name__)
        return await self.handle.call(method, *args)


@dataclass(frozen=True)
class Parity:
    """A reward: how many tokens are even."""

    worker: LeaseContext
    delays: Delays

    async def score(self, chunk: Chunk) -> ColumnSet:
        async with self.worker.turn("reward", "forward", "reward", step=chunk.step, chunk=chunk.index):
            await self.delays.pass_by("score")
        batch = chunk.data
        even = [float(sum(t % 2 == 0 for t in batch.token_ids(s))) for s in range(len(batch))]
        return ColumnSet(batch.ids, sequence={"reward/even": torch.tensor(even)})


@dataclass
class Found:
    groups: list[Group] = field(default_factory=list)
    answers: list[Group] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def versions(self) -> list[tuple[int, ...]]:
        """Of each response's tokens."""
        return [
            tuple(group.batch.token["policy_version"][group.batch.sequence_index() == s].tolist())
            for group in self.groups
            for s in range(len(group.batch))
        ]


def plain(groups: Sequence[Group]) -> list[Any]:
    """All that the groups' batches say, to be compared."""
    return [
        (
            (batch.ids, batch.segment_lengths, batch.parents, batch.input_ids.tolist()),
            {name: values.tolist() for name, values in {**batch.token, **batch.sequence}.items()},
            batch.objects["completion"],
            batch.objects["finish_reason"],
        )
        for batch in (group.batch for group in groups)
    ]


@pytest.fixture
def play(causal_lm: Any, tokenizer: Any, prompts: Any, digits: Any) -> Callable[..., Found]:
    def run(seed: int, in_flight: InFlight, journal: Journal, slower: int = 1) -> Found:
        run_roles = RLRoles(RECIPE, UserObjects(causal_lm(), tokenizer, rewards=(digits,), prompts=prompts))
        try:
            return run_virtual(trained(run_roles, Delays(seed, slower), in_flight, journal))
        finally:
            for model in run_roles.models():
                model.release()

    return run


async def trained(run_roles: RLRoles, delays: Delays, in_flight: InFlight, journal: Journal) -> Found:
    found = Found()
    modes: dict[str, Any] = {"rollout": {"generate": 0}, "actor": {"forward": 0, "train": 0}, "reward": {"forward": 0}}
    arbiter = Arbiter(
        [PoolSpec(name) for name in modes],
        [RoleSpec(name, name, of) for name, of in modes.items()],
        versions={"actor": 0, "rollout": 0},
    )
    worker = LeaseContext(arbiter, SpanRecorder(clock=now))
    engine = NativeEngine(
        own_copy(run_roles.actor.packed), owns_weights=True, max_running=8, decode=run_roles.codec.decode_completion
    )
    engine.update_weights(list(run_roles.actor.weights()), 0)
    actor = Slow(run_roles.train_group("actor"), delays)

    async def update_engine_weights(version: int) -> int:
        engine.update_weights(list(run_roles.actor.weights()), version)
        return 0

    rollout = Rollout(
        worker,
        [Slow(LocalGroup(RolloutWorker(engine, run_roles.codec)), delays)],
        run_roles.requests,
        steps_per_lease=RECIPE.rollout.engine.steps_per_lease,
        version=0,
        canary=run_roles.canary(),
        trainer=actor,
        update_engine_weights=update_engine_weights,
        shares_actor=False,
        in_flight=in_flight,
        max_running=6,
        journal=journal,
    )
    stream = GroupStream(rollout.generate, AdmissionRule(RECIPE.prompts_per_step, 1), chunk_size=1)

    def collect(step: int, index: int, groups: Sequence[Group]) -> Chunk:
        journal.consume(step, index, [group.consumed() for group in groups])
        found.groups += groups
        return chunk_of(step, index, groups)

    def policy(is_first: bool) -> PolicyObjective:
        found.staleness.append(staleness_metrics(experiences[step].batch, step)["staleness/max"])
        return PolicyObjective(ALGORITHM, 8, 1.0, 0.0, is_first, 14)

    experiences: list[Experience] = []
    assembler = Assembler(ALGORITHM, {"even": 1.0}, lambda: 0.0, None, max_new_tokens=14)

    async def assemble(chunks: Any) -> RaggedBatch:
        experiences.append(assembler(chunks))
        return experiences[-1].batch

    needs = Needs(logprobs=True, mask="action_mask")
    roles: IterationStages = IterationStages(
        stream=stream,
        collect=collect,
        scorers=[Parity(worker, delays), ModelScorer(worker, "actor", actor, needs, "old_logprobs", trains=True)],
        assemble=assemble,
        learners=[ModelLearner(worker, "actor", actor, UpdatePlan(2, 1, seed=0), policy, "policy")],
        publish=rollout.publish,
    )
    try:
        async with stream:
            for step in range(STEPS):
                await run_iteration(step, roles)
                if step == 1:
                    async with rollout.quiet():
                        found.answers = await rollout.evaluate([run_roles.requests(100)], step)
    finally:
        await rollout.close()
    found.weights = {name: tensor.clone() for name, tensor in run_roles.actor.packed.model.state_dict().items()}
    return found


def decided(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.kind != "consume"]


@pytest.mark.parametrize("in_flight", ["pick_up", "finish_old", "start_over"])
def test_a_followed_journal_gives_the_same_bits(play: Callable[..., Found], in_flight: InFlight) -> None:
    journal = Journal()
    first = play(1, in_flight, journal)
    assert {v for g in first.answers for v, _ in g.consumed()[1]} == {2}
    assert max(first.staleness) == 1.0, "generation ran ahead"
    mixed = [versions for versions in first.versions() if len(set(versions)) > 1]
    assert bool(mixed) == (in_flight == "pick_up")
    again = Journal(journal.events)
    second = play(2, in_flight, again, 20)
    num = min(len(again.events), len(journal.events))
    assert decided(again.events)[: num // 2] == decided(journal.events)[: num // 2]
    assert plain(second.groups) == plain(first.groups) and plain(second.answers) == plain(first.answers)
    assert all(torch.equal(tensor, second.weights[name]) for name, tensor in first.weights.items())
    free = play(2, in_flight, Journal(), 20)
    assert free.versions() != first.versions(), "the journal decided, not the data"
    assert not all(torch.equal(tensor, free.weights[name]) for name, tensor in first.weights.items())


def test_a_journal_of_other_data_is_noticed(play: Callable[..., Found]) -> None:
    journal = Journal()
    play(1, "pick_up", journal)
    other = [
        Event(**{**vars(event), "groups": tuple((i, ((0, 3),)) for i, _ in event.groups)}) for event in journal.events
    ]
    with pytest.raises(Diverged, match="step 0, chunk 0"):
        play(1, "pick_up", Journal(other))
