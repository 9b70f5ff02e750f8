"""The rollout role over engines that only count: many random runs on the virtual clock, failures, weights, quiet."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.batch.trajectory import TrajectoryEnd
from quartet.cluster.errors import WorkerDeath, WorkerDied
from quartet.config import UserError
from quartet.config.placement import InFlight
from quartet.envs.episode import FinishedEpisode
from quartet.envs.protocol import Observation
from quartet.envs.transcript import EpisodeLimits, ObservedState
from quartet.extras.simulation.simulation import Cost, TimedCodec, TimedEngine, TimedModel, logprob_of, run_virtual
from quartet.observe.spans import SpanRecorder
from quartet.rollout.protocol import (
    Completion,
    GenerationError,
    Request,
    SamplingParams,
    StepEngine,
)
from quartet.schedule.clock import await_uncancelled, loop_time
from quartet.schedule.groups import AdmissionRule, GroupStream, PromptGroup
from quartet.schedule.iteration import Chunk, IterationStages, run_iteration
from quartet.schedule.leases import Arbiter, LeaseContext, PoolSpec, RoleSpec
from quartet.schedule.role_group import RoleGroup
from quartet.schedule.rollout import RolloutDriver
from quartet.schedule.rollout_worker import PromptRequest, RolloutWorker, TurnRequest
from quartet.schedule.weight_sync import CanarySpec
from quartet.text.tokenizer import TextCodec

PROBE = CanarySpec("77", 2, 1e-6)
LONG = "0" * 9
"""A prompt that engines refuse."""


@dataclass(frozen=True)
class Asked:
    """A data set's item."""

    prompt: str


class Letters(TimedCodec):
    """A token per character, and answers without text."""

    eos_ids = ()

    def encode_prompt(self, prompt: str) -> list[int]:
        return [ord(letter) for letter in prompt]

    def decode_completion(self, prompt_ids: Sequence[int], token_ids: Sequence[int], *, whole: bool = False) -> str:
        return ""


def of_prompt(name: str, prompt: str, num_samples: int = 1) -> PromptRequest:
    sampling = SamplingParams(max_new_tokens=50)
    return PromptRequest(name, prompt, {f"{name}.{r}": sampling for r in range(num_samples)})


def first_turn(episode: str, state: str = "1") -> TurnRequest:
    seen, sampling = ObservedState(Observation(state, rewrites=True)), SamplingParams(max_new_tokens=50)
    return TurnRequest(f"{episode}.0", episode, seen, sampling, EpisodeLimits(1, 100))


def versions_of(group: PromptGroup) -> list[tuple[int, ...]]:
    """Of the tokens of each response."""
    return [versions for versions, _ in responses_of(group)]


def responses_of(group: PromptGroup) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Versions and log-probabilities of the tokens of each response."""
    batch, index = group.batch, group.batch.sequence_index()
    fields = batch.token["policy_version"], batch.token["rollout_logprobs"]
    members = [[values[index == s].tolist() for values in fields] for s in range(len(batch))]
    return [(tuple(versions), tuple(logprobs)) for versions, logprobs in members]


class CountingEngine(TimedEngine):
    """Gives each request the tokens that its id says; notes what it is told, and fails on what is poisoned."""

    def __init__(self, lengths: Callable[[str], int]) -> None:
        super().__init__(Cost(), max_running=4)
        self.lengths = lengths
        self.log: list[tuple[str, Any]] = []
        self.poisoned: set[str] = set()

    def submit(self, requests: Sequence[Request]) -> None:
        self.log.append(("submit", [r.request_id for r in requests]))
        for request in requests:
            if request.request_id in self.held or len(request.prompt_ids) > 8:
                raise UserError("refused", found=request.request_id, remedy="none")
        super().submit([self._of_its_length(request) for request in requests])

    def _of_its_length(self, request: Request) -> Request:
        length = min(self.lengths(request.request_id), request.sampling.max_new_tokens)
        return replace(request, sampling=replace(request.sampling, max_new_tokens=length))

    def step(self) -> list[Completion]:
        self.log.append(("step", len(self.held)))
        for request_id in self.poisoned.intersection(list(self.held)[: self.max_running]):
            del self.held[request_id]
            self._finished += super().step()
            raise GenerationError("not finite", [request_id])
        return super().step()

    def cancel(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        self.log.append(("cancel", ids)) if ids else None
        super().cancel(ids)

    def update_weights(self, source: None, version: int) -> None:
        self.log.append(("weights", version))
        self.num_updates = version
        super().update_weights(source, version)


async def _assembled(chunks: Any) -> Any:
    return list(chunks)


@dataclass
class Slow(RoleGroup[Any]):
    """A host's handle whose calls take time, as in another process."""

    host: Any
    seconds: Callable[[str], float]
    died: bool = False

    async def call(self, method: Any, *args: Any) -> Any:
        name = method.__name__
        await await_uncancelled(asyncio.sleep(self.seconds(name)))
        if self.died:
            raise WorkerDied(WorkerDeath("rollout", 0, 1, "here", name, "killed"))
        return getattr(self.host, name)(*args)


class Actor(TimedModel):
    """Notes with which weights it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[int] = []

    def forward(self, batch: RaggedBatch, needs: Any) -> ColumnSet:
        self.heard.append(self.num_updates)
        return super().forward(batch, needs)


ROLES = ("rollout", "actor", "critic", "reward")
Steps = list[list[PromptGroup]]


@dataclass
class World:
    """A run of counting engines.

    Args:
        seconds: ``(role, call) → seconds``.
        pools: role → pool; each with one slot.
        lengths: request id → tokens.
        rejects, refused: groups that the stream's filter does not keep, and that the engine does not take.
    """

    num_engines: int = 1
    in_flight: InFlight = "pick_up"
    shares_actor: bool = False
    max_running: int | None = None
    max_staleness: int | None = None
    prompts_per_step: int = 2
    responses: int = 2
    chunk_size: int = 1
    steps_per_lease: int = 2
    pools: Mapping[str, str] = field(default_factory=lambda: dict(zip(ROLES, ROLES, strict=True)))
    seconds: Callable[[str, str], float] = lambda role, call: 1.0
    lengths: Callable[[str], int] = lambda request_id: 3
    rejects: frozenset[int] = frozenset()
    refused: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.actor = Actor()
        self.engines = [CountingEngine(self.lengths) for _ in range(self.num_engines)]
        self.handles = [
            Slow(
                RolloutWorker(cast(StepEngine, engine), cast(TextCodec, Letters())),
                lambda call: self.seconds("rollout", call),
            )
            for engine in self.engines
        ]
        self.recorder = SpanRecorder(clock=loop_time)
        modes: dict[str, Any] = {"rollout": {"generate": 0}, "reward": {"forward": 0}}
        trained = {"forward": 0, "train": 0}
        self.arbiter = Arbiter(
            [PoolSpec(name) for name in dict.fromkeys(self.pools.values())],
            [RoleSpec(role, self.pools[role], modes.get(role, trained)) for role in ROLES],
            versions={"actor": 0, "critic": 0, "rollout": 0},
        )
        self.worker = LeaseContext(self.arbiter, self.recorder)
        self.rollout = RolloutDriver(
            self.worker,
            self.handles,
            self.requests,
            steps_per_lease=self.steps_per_lease,
            version=0,
            canary=PROBE,
            trainer=Slow(self.actor, lambda call: self.seconds("actor", call)),
            update_engine_weights=self.update_engine_weights,
            shares_actor=self.shares_actor,
            in_flight=self.in_flight,
            max_running=self.max_running,
        )
        self.stream: GroupStream = GroupStream(
            self.rollout.generate,
            AdmissionRule(self.prompts_per_step, self.max_staleness),
            chunk_size=self.chunk_size,
            accept=lambda group: group.index not in self.rejects,
        )
        self.steps: Steps = []

    def requests(self, index: int) -> tuple[Asked, PromptRequest]:
        prompt = LONG if index in self.refused else f"{index % 5}1"
        return Asked(prompt), of_prompt(str(index), prompt, self.responses)

    def kept(self) -> set[str]:
        """Names of all that the workers keep of what was sampled."""
        kept = [vars(handle.host._requests) for handle in self.handles]
        return {name for of in kept for held in of.values() if isinstance(held, dict) for name in held}

    async def update_engine_weights(self, version: int) -> int:
        await asyncio.sleep(self.seconds("rollout", "deliver"))
        assert self.actor.num_updates == version, "weights of another version would be taken"
        for engine in self.engines:
            engine.update_weights(None, version)
        return 10

    async def collected(self, num_steps: int, after: Callable[[int], Any] | None = None) -> Steps:
        """So many iterations; ``after(step)`` is awaited behind each."""
        roles: IterationStages = IterationStages(
            stream=self.stream,
            collect=self._collect,
            scorers=[_Scorer(self, "reward", False), _Scorer(self, "actor", True)],
            assemble=_assembled,
            learners=[_Learner(self, "critic"), _Learner(self, "actor")],
            publish=self.rollout.publish,
        )
        try:
            async with self.stream:
                for step in range(num_steps):
                    _, metrics = await run_iteration(step, roles)
                    assert metrics == {"agreement/canary_diff": 0.0, "policy_version": step + 1.0}
                    if after is not None:
                        await after(step + 1)
        finally:
            await self.rollout.close()
        return self.steps

    def _collect(self, step: int, index: int, groups: Sequence[PromptGroup]) -> Chunk:
        if index == 0:
            self.steps.append([])
        self.steps[-1] += groups
        return Chunk(step, index, list(groups))


@dataclass
class _Scorer:
    world: World
    role: str
    of_step: bool

    async def score(self, chunk: Chunk) -> float:
        reads = {self.role: chunk.step} if self.of_step else {}
        async with self.world.worker.turn(
            self.role, "forward", "score", step=chunk.step, chunk=chunk.index, reads=reads
        ):
            await asyncio.sleep(self.world.seconds(self.role, "score"))
        return 0.0


@dataclass
class _Learner:
    world: World
    role: str

    async def train(self, experience: Any, step: int) -> dict[str, float]:
        world = self.world
        async with world.worker.turn(self.role, "train", f"train_{self.role}", step=step, writes=self.role):
            if self.role == "actor":
                world.actor.num_updates = -1  # neither the old ones nor the new ones
            await asyncio.sleep(world.seconds(self.role, "train"))
            if self.role == "actor":
                world.actor.num_updates = step + 1
        return {}


# Many random runs ----------------------------------------------------------------------------------------


def random_world(seed: int) -> World:
    draw = random.Random(seed)
    shares = draw.random() < 0.2
    named = {role: draw.choice(("a", "b", role)) for role in ROLES}
    return World(
        num_engines=draw.randint(1, 3),
        in_flight="pick_up" if shares else draw.choice(("pick_up", "finish_old")),
        shares_actor=shares,
        max_running=draw.choice((None, None, 4, 9)),
        max_staleness=draw.choice((None, 0, 1, 1, 2, 3)),
        prompts_per_step=draw.randint(1, 4),
        responses=draw.randint(1, 3),
        chunk_size=draw.randint(1, 4),
        steps_per_lease=draw.randint(1, 4),
        pools=named,
        seconds=lambda role, call: draw.choice((0.0, 0.0, 0.5, 1.0, 1.0, 4.0)),
        lengths=lambda request_id: random.Random(f"{seed} {request_id}").choice((1, 2, 3, 5, 17)),
        rejects=frozenset(i for i in range(60) if draw.random() < 0.2) if draw.random() < 0.3 else frozenset(),
    )


def check(world: World, steps: Steps, num_steps: int) -> None:
    kept = [i for i in range(200) if i not in world.rejects]
    size = world.prompts_per_step
    assert [[g.index for g in groups] for groups in steps] == [
        kept[s * size : (s + 1) * size] for s in range(num_steps)
    ]
    for step, groups in enumerate(steps):
        for group in groups:
            assert len(group.batch) == world.responses
            for r, (versions, logprobs) in enumerate(responses_of(group)):
                assert len(versions) == world.lengths(f"{group.index}.{r}")
                assert list(versions) == sorted(versions) and step - (world.max_staleness or 0) <= versions[0]
                assert versions[-1] <= step and logprobs == tuple(map(logprob_of, versions))
                assert world.in_flight == "pick_up" or versions[0] == versions[-1]
    assert world.arbiter.is_idle
    assert asyncio.all_tasks() == {asyncio.current_task()}
    ended = {str(index) for index in range(max(g.index for groups in steps for g in groups) + 1)}
    assert not {name for name in world.kept() if name.split(".")[0] in ended | {"eval", "-1"}}, "made and still kept"


@pytest.mark.parametrize("block", range(4))
def test_every_random_run_ends_within_its_bounds(block: int) -> None:
    """No deadlock, every group once and in order, the staleness bound, one version per response where asked for, and
    evaluations at exactly the present version."""

    async def main(seed: int) -> int:
        world, num_steps = random_world(seed), 4
        every = random.Random(seed + 1).choice((1, 2, 9))

        async def evaluate(step: int) -> None:
            if step % every:
                return
            requests = [(Asked(f"1{i}"), of_prompt(f"eval.{i}", f"1{i}", 2)) for i in range(3)]
            async with world.rollout.quiet():
                found = await world.rollout.evaluate(requests, step)
                turn = await world.rollout.act(-1, first_turn("-1.0"))
                played = await world.rollout.episodes(
                    -1, Asked("1"), [FinishedEpisode("-1.0", TrajectoryEnd.DONE, 2.0, 2.0)]
                )
            assert turn.text == "" and [(g.index, g.prompt) for g in found] == list(enumerate(i for i, _ in requests))
            for i, group in enumerate(found):
                assert [len(of) for of in versions_of(group)] == [world.lengths(f"eval.{i}.{k}") for k in (0, 1)]
                assert group.batch.token_ids(0)[:2] == [ord(letter) for letter in f"1{i}"]
            assert {v for group in (*found, played) for of in versions_of(group) for v in of} == {step}

        steps = await world.collected(num_steps, evaluate)
        check(world, steps, num_steps)
        made = [versions for groups in steps for g in groups for versions in versions_of(g)]
        return sum(versions[0] < versions[-1] for versions in made)

    mixed = sum(run_virtual(main(seed)) for seed in range(block * 12, block * 12 + 12))
    assert mixed > 5, "new weights come into running responses often enough to be tested"


def test_a_dead_engine_fails_all_who_wait_and_leaves_nothing() -> None:
    async def main(seed: int) -> bool:
        world = random_world(seed)
        asyncio.get_running_loop().call_later(
            random.Random(seed).uniform(0, 30), setattr, world.handles[0], "died", True
        )
        with pytest.raises(WorkerDied, match="killed"):
            await world.collected(200)
        assert world.arbiter.is_idle and asyncio.all_tasks() == {asyncio.current_task()}
        return True

    for seed in range(20):
        assert run_virtual(main(seed))


# One thing each ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_engines", [1, 2, 3])
def test_engines_work_side_by_side_and_a_group_stays_together(num_engines: int) -> None:
    async def main() -> tuple[float, list[set[int]]]:
        world = World(
            num_engines=num_engines,
            prompts_per_step=6,
            lengths=lambda i: 8,
            steps_per_lease=1,
            seconds=lambda role, call: float(call == "run_steps"),
        )
        for engine in world.engines:
            engine.max_running = 4
        await asyncio.gather(*(world.rollout.generate(index) for index in range(6)))
        of = [{int(i.split(".")[0]) for kind, ids in e.log if kind == "submit" for i in ids} for e in world.engines]
        return loop_time(), of

    seconds, of = run_virtual(main())
    assert of == [set(range(e, 6, num_engines)) for e in range(num_engines)]
    assert seconds == 8.0 * {1: 3, 2: 2, 3: 1}[num_engines], "12 requests, 4 at a time on each"


def test_what_an_engine_refuses_or_computes_wrongly_reaches_those_who_asked() -> None:
    async def main() -> None:
        world = World(refused=frozenset({9}))
        world.engines[0].poisoned = {"3.1"}
        found = await asyncio.gather(
            world.rollout.generate(2),
            world.rollout.generate(9),
            world.rollout.act(9, first_turn("x", LONG)),
            world.rollout.generate(3),
            return_exceptions=True,
        )
        group, refused, refused_turn, failed = found
        assert isinstance(group, PromptGroup) and len(group.batch) == 2
        assert isinstance(refused, UserError) and refused.found == "9.0"
        assert isinstance(refused_turn, UserError) and refused_turn.found == "x.0"
        assert isinstance(failed, GenerationError) and failed.request_ids == ("3.1",)
        assert [ids for kind, ids in world.engines[0].log if kind == "cancel"] == []
        await world.rollout.generate(4)
        (cancelled,) = [ids for kind, ids in world.engines[0].log if kind == "cancel"]
        assert "3.0" in cancelled, "the engine hears of it with the next burst"
        assert not world.kept()

    run_virtual(main())


@pytest.mark.parametrize("max_running", [None, 5])
def test_finishing_on_old_weights_waits_for_no_more_than_what_runs(max_running: int | None) -> None:
    async def main() -> list[set[int]]:
        world = World(in_flight="finish_old", max_running=max_running, lengths=lambda i: 6)
        groups = [asyncio.create_task(world.rollout.generate(index)) for index in range(4)]
        await asyncio.sleep(1.5)
        await _Learner(world, "actor").train(None, 0)
        await world.rollout.publish(1)
        done = await asyncio.gather(*groups)
        return [{v for versions in versions_of(g) for v in versions} for g in done]

    versions = run_virtual(main())
    assert versions == ([{0}] * 4 if max_running is None else [{0}, {0}, {1}, {1}])


def test_groups_go_to_the_engine_with_the_fewest_tokens_to_make() -> None:
    async def main() -> list[list[str]]:
        world = World(num_engines=2)
        world.rollout.balances = True
        lengths = {0: 9, 1: 2, 2: 2, 3: 2, 4: 2, 5: 2}

        def requests(index: int) -> tuple[Asked, PromptRequest]:
            prompt, request = world.requests(index)
            new = lengths[index]
            samples = {name: replace(sampling, max_new_tokens=new) for name, sampling in request.samples.items()}
            return prompt, replace(request, samples=samples)

        world.rollout.requests = requests
        await asyncio.gather(*(world.rollout.generate(index) for index in lengths))
        return [[i for what, ids in e.log if what == "submit" for i in ids if i.endswith("0")] for e in world.engines]

    assert run_virtual(main()) == [["0.0"], ["1.0", "2.0", "3.0", "4.0", "5.0"]]


def test_a_canary_that_sings_otherwise_stops_the_run() -> None:
    async def main() -> None:
        world = World(num_engines=2)

        async def half(version: int) -> int:
            world.engines[0].update_weights(None, version)
            return 5

        world.rollout.update_engine_weights = half
        with pytest.raises(UserError, match="computes with other weights") as caught:
            await world.collected(1)
        assert "0.0156" in caught.value.found
        assert [s.nbytes for s in world.recorder.spans() if s.name == "publish"] == [5]

    run_virtual(main())


def test_the_actor_trains_on_no_sooner_than_its_weights_were_compared() -> None:
    """Also when somebody asks for the next update as soon as the one before has ended."""

    async def main() -> tuple[list[int], float]:
        world = World(max_staleness=3, seconds=lambda role, call: 20.0 if call == "deliver" else 1.0)

        async def trained() -> None:
            for step in range(2):
                await _Learner(world, "actor").train(None, step)

        training = asyncio.create_task(trained())
        for version in (1, 2):
            await world.rollout.publish(version)
        await training
        return world.actor.heard, loop_time()

    heard, _ = run_virtual(main())
    assert heard == [1, 2]


def test_groups_that_are_no_longer_asked_for_are_not_waited_for() -> None:
    async def main() -> float:
        world = World(lengths=lambda i: 30)
        group = asyncio.create_task(world.rollout.generate(0))
        await asyncio.sleep(1.5)
        group.cancel()
        async with world.rollout.quiet():
            asked = PromptRequest("eval", "1", {"eval.0": SamplingParams(max_new_tokens=2)})
            await world.rollout.evaluate([(Asked("1"), asked)], 0)
            assert not world.kept()
            assert world.engines[0].log[-4:] == [
                ("cancel", ["0.0", "0.1"]),
                ("submit", ["eval.0"]),
                ("step", 1),
                ("step", 1),
            ]
        return loop_time()

    assert run_virtual(main()) < 6.0
