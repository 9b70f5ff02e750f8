"""A run whose models and engine only take time: everything that schedules is what a real run has.

The iteration, the group stream, the rollout with its engine clients, weights and canary, scorers, learners and
leases are the product's own; timed workers stand behind them. On a virtual clock this plans a run in no time; on
the real clock it shows what scheduling itself costs, and with workers that sleep in other processes what reaching them
costs.

Models and an engine that only take time, behind the groups by which a run calls its workers.

Weights are a number here, that of their updates, and give every token the same log-probability, which says the number:
an engine with other weights than it should have shows in what it samples, and the canary finds it.

What an iteration costs: seconds of every stage, bytes of every role. The numbers a planner puts in place of models.

Seconds are those on the pool where a role stands; nothing here knows how they change with more devices.

The virtual clock: the same asyncio program, run in no time and always in the same order. `VirtualLoop` is an event loop
whose selector never sleeps. When nothing is runnable it jumps `time()` to the next timer; when there is no timer
either, nothing can ever happen again, and it raises `Deadlock`. Times are whole microseconds, so that 0.1 + 0.2 and 0.3
are one moment and not two. Nothing that happens outside the loop (threads, sockets, processes) moves this clock.
"""

from __future__ import annotations

import asyncio
import selectors
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import count, groupby
from typing import Any, TypeVar, cast

import torch

from quartet.batch.ragged import ColumnSet, RaggedBatch, join_columns
from quartet.config.placement import HEADS, ResolvedPlacement
from quartet.observe.spans import Span, SpanRecorder
from quartet.rollout.protocol import Completion, EngineStats, FinishReason, Request, SamplingParams, StepEngine
from quartet.schedule.clock import await_uncancelled, loop_time
from quartet.schedule.groups import NO_VERSION, AdmissionRule, GroupStream, PromptGroup
from quartet.schedule.iteration import (
    Chunk,
    DrafterLearner,
    IterationStages,
    ModelLearner,
    ModelScorer,
    StepLearner,
    UpdatePlan,
    run_iteration,
)
from quartet.schedule.leases import LeaseContext, LeaseMode, Offloader, arbiter_for_placement
from quartet.schedule.role_group import RoleGroup
from quartet.schedule.rollout import RolloutDriver
from quartet.schedule.rollout_worker import PromptRequest, RolloutWorker
from quartet.schedule.weight_sync import CanarySpec
from quartet.text.tokenizer import TextCodec
from quartet.train.forward import ForwardNeeds


@dataclass(frozen=True)
class Cost:
    """Seconds of one call: ``fixed_s + each_s · number``, of groups in a pass, of running requests in a decode step."""

    fixed_s: float = 0.0
    each_s: float = 0.0

    def seconds(self, number: int) -> float:
        return self.fixed_s + self.each_s * number


@dataclass(frozen=True)
class StageCost:
    """A scoring pass (one call per chunk) or all updates of a role (one call per step, ``train_<role>``).

    Of the role ``heads``, which learns from as many positions in every step, only ``fixed_s`` counts.

    ``reads_own`` marks a scoring pass of a trained role: it needs the weights of its own step.
    """

    stage: str
    role: str
    cost: Cost
    reads_own: bool = False


@dataclass(frozen=True)
class GenerationCost:
    """One decode step gives every running request a token.

    Args:
        step: of a decode step, by the requests that run.
        tokens: ``(group index, response) → tokens`` of that answer, at least 1.
        max_running: requests that decode together; further ones wait in the engine.
    """

    step: Cost
    tokens: Callable[[int, int], int] = lambda index, response: 1
    responses: int = 1
    steps_per_lease: int = 1
    max_running: int = 1_000_000_000


@dataclass(frozen=True)
class CostModel:
    """All of an iteration.

    Args:
        scoring, learning: in the order in which they ask for their leases.
        publish_s: handing new weights to the engine; comparing both with the canary takes no more time.
        resident_bytes: role → mode → bytes on its pool; also says which modes a role has.
        vary: ``(stage, number) → factor`` on the seconds of that stage's call of this number, counted from 0. Beside
            those of ``scoring`` and ``learning`` the stages are ``generate``, ``publish`` and ``canary``.
    """

    generation: GenerationCost
    scoring: tuple[StageCost, ...]
    learning: tuple[StageCost, ...]
    publish_s: float
    resident_bytes: Mapping[str, Mapping[LeaseMode, int]] = field(default_factory=dict)
    vary: Callable[[str, int], float] = lambda stage, number: 1.0

    def sizes(self) -> dict[str, dict[LeaseMode, int]]:
        """Returns the bytes of every role in every mode that this iteration uses; 0 where nothing is said."""
        modes: list[tuple[str, LeaseMode]] = [
            ("rollout", "generate"),
            ("actor", "forward"),
        ]
        modes += [(stage.role, "forward") for stage in self.scoring]
        modes += [(stage.role, "train") for stage in self.learning if stage.role != HEADS]  # works with the actor's
        found: dict[str, dict[LeaseMode, int]] = {}
        for role, mode in modes:
            found.setdefault(role, {})[mode] = self.resident_bytes.get(role, {}).get(mode, 0)
        return found


def logprob_of(num_updates: int) -> float:
    """Returns the log-probability of any token, in nats, under weights that were updated so often; exact in single
    precision.
    """
    return -1.0 - num_updates / 64


class TimedModel:
    """A model's worker: passes read its weights, updates count."""

    num_updates = 0

    def forward(self, batch: RaggedBatch, needs: Any) -> ColumnSet:
        logprobs = torch.full((batch.num_tokens,), logprob_of(self.num_updates))
        return ColumnSet(batch.ids, {"logprobs": logprobs})

    def update(self, experience: RaggedBatch, updates: Sequence[Any]) -> list[dict[str, float]]:
        """Makes one version of one step's updates."""
        self.num_updates += 1
        return [{} for _ in updates]

    def train_drafter(self) -> dict[str, float]:
        """Does nothing: heads change no log-probability."""
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
        """Returns what the steps since the last call take."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def submit(self, requests: Sequence[Request]) -> None:
        self.held.update({request.request_id: _Held(request) for request in requests})

    @property
    def has_work(self) -> bool:
        return bool(self.held or self._finished)

    def step(self) -> list[Completion]:
        """Makes one token for every request that runs. A canary alone takes no time: new weights have their
        own cost.
        """
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
        """Notes that the weights that it computes with have become those of ``version``."""
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
            await await_uncancelled(self.sleep(seconds))
        return found


Sleep = Callable[[str, float], Awaitable[None]]
"""``(role, seconds)``: the role's workers sleep so long."""

_PROBE = CanarySpec(prompt="", num_tokens=1, tolerance=0.0)
_LOGPROBS = ForwardNeeds(logprobs=True)


async def sleep_here(role: str, seconds: float) -> None:
    await asyncio.sleep(seconds)


Consumed = tuple[int, tuple[tuple[int, int], ...]]
"""A group: its index, and runs ``(version, tokens)`` of the weights that made it, in order."""


def consumed(group: PromptGroup) -> Consumed:
    """Tells which weights made the group, trajectory after trajectory."""
    sampled = [version for version in group.batch.token["policy_version"].tolist() if version != NO_VERSION]
    return group.index, tuple((version, len(list(run))) for version, run in groupby(sampled))


@dataclass(frozen=True)
class SimulationResult:
    """What a simulated run was.

    Args:
        ended_s: when each step ended, since the run's beginning.
        steps: the groups that each step consumed, with the versions of their tokens.
        peak_bytes: most that was resident at a time, by pool.
    """

    ended_s: Sequence[float]
    steps: Sequence[Sequence[Consumed]]
    spans: Sequence[Span]
    peak_bytes: Mapping[str, int]


@dataclass(eq=False)
class Simulation:
    """An RL run of a cost model under a placement.

    Args:
        accept: group index → whether the stream's filter keeps it.
        offloader: moves the models' parts; None: they are moved in no time.
        sleep: in place of sleeping in this process.
    """

    costs: CostModel
    placement: ResolvedPlacement
    _: KW_ONLY
    prompts_per_step: int
    chunk_size: int
    patience: int = 4
    accept: Callable[[int], bool] | None = None
    offloader: Offloader | None = None
    recorder: SpanRecorder = field(default_factory=lambda: SpanRecorder(clock=loop_time))
    sleep: Sleep = sleep_here

    def __post_init__(self) -> None:
        costs, placement, accept = self.costs, self.placement, self.accept
        self.arbiter = arbiter_for_placement(placement, costs.sizes(), offloader=self.offloader, patience=self.patience)
        self.leases = LeaseContext(self.arbiter, self.recorder)
        self._models: defaultdict[str, TimedModel] = defaultdict(TimedModel)
        self._publish_s = self._varied("publish", lambda: costs.publish_s)
        self._runs_ahead = placement.max_staleness is not None
        self.rollout = self._rollout()
        self.stream: GroupStream = GroupStream(
            self.rollout.generate,
            AdmissionRule(self.prompts_per_step, placement.max_staleness),
            chunk_size=self.chunk_size,
            accept=None if accept is None else lambda group: accept(group.index),
        )
        self.steps: list[list[Consumed]] = []
        self.stages = self._stages()

    async def run(self, num_steps: int) -> SimulationResult:
        """Runs so many iterations, on whatever clock the loop has."""
        ended_s: list[float] = []
        started_s = loop_time()
        if self.stages.prefetch is not None:
            self.stages.prefetch.num_steps = num_steps
        try:
            async with self.stream:
                for step in range(num_steps):
                    await run_iteration(step, self.stages)
                    ended_s.append(loop_time() - started_s)
        finally:
            if self.stages.prefetch is not None:
                await self.stages.prefetch.close()
            await self.rollout.close()
        return SimulationResult(
            ended_s=ended_s,
            steps=self.steps,
            spans=self.recorder.spans(),
            peak_bytes=self.arbiter.peak_bytes(),
        )

    # Generation ------------------------------------------------------------------------------------------

    def _rollout(self) -> RolloutDriver:
        generation, runs_ahead = self.costs.generation, self._runs_ahead
        # What runs ahead leaves the canary a place.
        max_running = generation.max_running + 1 if runs_ahead else generation.max_running
        self.engine = TimedEngine(generation.step, max_running)
        host = RolloutWorker(cast(StepEngine, self.engine), cast(TextCodec, TimedCodec()))
        return RolloutDriver(
            self.leases,
            [self._timed("rollout", "generate", host, lambda *args: self.engine.take_seconds())],
            self._requests,
            steps_per_lease=generation.steps_per_lease,
            version=0,
            canary=_PROBE,
            trainer=self._timed("actor", "canary", self._models["actor"], lambda *args: 0.0),
            update_engine_weights=self._update_engine_weights,
            shares_actor=False,
            sends=("actor", HEADS) if any(stage.role == HEADS for stage in self.costs.learning) else ("actor",),
            in_flight=self.placement.in_flight,
            max_running=max_running if runs_ahead else None,
        )

    def _requests(self, index: int) -> tuple[None, PromptRequest]:
        generation = self.costs.generation
        lengths = {f"{index}.{r}": generation.tokens(index, r) for r in range(generation.responses)}
        samples = {name: SamplingParams(max_new_tokens=length) for name, length in lengths.items()}
        return None, PromptRequest(str(index), "", samples)

    async def _update_engine_weights(self, version: int) -> int:
        """Gives the engine the weights that the actor has when they have come over."""
        await await_uncancelled(self.sleep("rollout", self._publish_s()))
        self.engine.num_updates = self._models["actor"].num_updates
        self.engine.update_weights(None, version)
        return 0

    # The iteration's roles -------------------------------------------------------------------------------

    def _stages(self) -> IterationStages:
        costs = self.costs
        return IterationStages.wired(
            self.rollout,
            self.stream,
            [(self._scorer(stage), not stage.reads_own) for stage in costs.scoring],
            assemble,
            [self._learner(stage) for stage in costs.learning],
            placement=self.placement,
            on_chunk=self._consumed,
        )

    def _consumed(self, step: int, groups: Sequence[PromptGroup]) -> None:
        self.steps += [[] for _ in range(step + 1 - len(self.steps))]
        self.steps[step] += [consumed(group) for group in groups]

    def _scorer(self, stage: StageCost) -> ModelScorer:
        model = self._timed(stage.role, stage.stage, self._models[stage.role], partial(_seconds, stage))
        return ModelScorer(self.leases, stage.role, model, _LOGPROBS, stage.stage, trains=stage.reads_own)

    def _learner(self, stage: StageCost) -> StepLearner:
        if stage.role == HEADS:
            return DrafterLearner(
                self.leases, self._timed(HEADS, stage.stage, self._models[HEADS], lambda: stage.cost.fixed_s)
            )
        model = self._timed(stage.role, stage.stage, self._models[stage.role], partial(_seconds, stage))
        return ModelLearner(
            self.leases, stage.role, model, UpdatePlan(1, 1, seed=0), cast(Any, lambda is_first: None), stage.role
        )

    def _timed(self, role: str, stage: str, worker: Any, seconds: Callable[..., float]) -> TimedGroup:
        return TimedGroup(worker, self._varied(stage, seconds), partial(self.sleep, role))

    def _varied(self, stage: str, seconds: Callable[..., float]) -> Callable[..., float]:
        numbers = count()
        return lambda *args: seconds(*args) * self.costs.vary(stage, next(numbers))


def _seconds(stage: StageCost, batch: RaggedBatch, *_: Any) -> float:
    """Returns the seconds of a call; a batch has a prompt for every group."""
    return stage.cost.seconds(batch.parents.count(-1))


async def assemble(chunks: Sequence[tuple[Chunk, Sequence[ColumnSet]]]) -> RaggedBatch:
    """Joins a step's chunks with their columns."""
    return RaggedBatch.concat([join_columns(chunk.data, *columns) for chunk, columns in chunks])


# The virtual clock --------------------------------------------------------------------------------------

T = TypeVar("T")
TICKS_PER_S = 1_000_000


class Deadlock(RuntimeError):
    """Nothing is runnable and no timer is set: the tasks wait for each other, or for nothing."""


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end on a fresh virtual clock that starts at 0; tasks it leaves behind are cancelled.

    Raises whatever `main` raises, and `Deadlock` when it can never end.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class _JumpingSelector(selectors.DefaultSelector):
    """Advances a tick counter where an ordinary selector would block."""

    ticks = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events:
            return events
        if timeout is None:
            raise Deadlock(f"nothing can run at {self.ticks / TICKS_PER_S} s")
        self.ticks += round(max(timeout, 0.0) * TICKS_PER_S)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on virtual time, counted in whole microseconds from 0."""

    # A handle is due when it lies less than this beyond `time()`: half a tick lets exactly the current tick
    # run.
    _clock_resolution: float

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 0.5 / TICKS_PER_S

    def time(self) -> float:
        return self._jumping.ticks / TICKS_PER_S

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        quantised = round(when * TICKS_PER_S) / TICKS_PER_S
        return super().call_at(quantised, callback, *args, context=context)
