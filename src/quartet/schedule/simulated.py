"""Roles that only take time: the real iteration, stream, leases and barriers, with sleeping in place of models.

On a virtual clock this is the planner's iteration; on the real clock it shows what the scheduling itself costs, and
with workers that sleep in other processes what reaching them costs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from quartet.config.placement import InFlight, ResolvedPlacement
from quartet.observe.spans import Span, SpanRecorder
from quartet.schedule.barriers import Barriers
from quartet.schedule.clock import Waiting, now
from quartet.schedule.cost_model import CostModel, StageCost
from quartet.schedule.iteration import Chunk, Roles, run_iteration
from quartet.schedule.journal import Consumed, Diverged, Event, Journal
from quartet.schedule.leases import ArbiterStats, HandOver, Mode, Mover
from quartet.schedule.placement import admission_rule, placed_arbiter
from quartet.schedule.stream import GroupStream
from quartet.schedule.worker import Worker, drained


@dataclass
class SimulatedGroup:
    """``versions``: runs (version, bursts) of the weights that made it."""

    index: int
    remaining: int
    versions: list[tuple[int, int]] = field(default_factory=list)

    def move_on(self, version: int) -> None:
        self.remaining -= 1
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1] = (version, self.versions[-1][1] + 1)
        else:
            self.versions.append((version, 1))

    def consumed(self) -> Consumed:
        return self.index, tuple(self.versions)


Sleep = Callable[[str, float], Awaitable[None]]
"""``(role, seconds)``: the role's workers sleep so long."""


async def sleep_here(role: str, seconds: float) -> None:
    await asyncio.sleep(seconds)


@dataclass(frozen=True)
class Stand:
    """What every simulated role has."""

    worker: Worker
    costs: CostModel
    sleep: Sleep = sleep_here

    async def work(self, role: str, stage: str, step: int, part: int, seconds: float) -> None:
        """One call's time; under the role's lease."""
        await drained(self.sleep(role, seconds * self.costs.vary(stage, step, part)))


class SimulatedRollout:
    """An engine that batches its groups and works in bursts, each under a lease of its own.

    ``in_flight``: new weights come between two bursts (``pick_up``), or once what runs has ended, with nothing new
    begun meanwhile (``finish_old``).
    """

    def __init__(self, stand: Stand, journal: Journal, in_flight: InFlight) -> None:
        self._stand = stand
        self._worker = stand.worker
        self._costs = stand.costs
        self._journal = journal
        self._in_flight = in_flight
        self._done: dict[int, Waiting[SimulatedGroup]] = {}
        self._pending: list[int] = []  # not admitted to the engine
        self._queue: list[SimulatedGroup] = []  # admitted, not begun
        self._running: list[SimulatedGroup] = []
        self._is_paused = False
        self._changed: list[Waiting[None]] = []
        self._pump: asyncio.Task[None] | None = None

    async def generate(self, index: int) -> SimulatedGroup:
        done: Waiting[SimulatedGroup] = Waiting(lambda: f"waits for the engine to end group {index}")
        self._done[index] = done
        self._pending.append(index)
        if self._pump is None or self._pump.done():
            self._pump = asyncio.get_running_loop().create_task(self._run(), name="engine")
            self._pump.add_done_callback(self._pump_ended)
        self._journal.tell()
        try:
            return await done
        finally:
            self._forget(index)

    async def publish(self, version: int) -> dict[str, float]:
        """The actor's weights of ``version`` into the engine, as soon as they exist."""
        await self._worker.arbiter.until("actor", version)
        if self._in_flight == "finish_old":
            await self._journal.turn("pause", version)
            self._is_paused = True
            self._journal.note("pause", version)
            while self._running:
                await self._change("the engine's groups to end")
        await self._journal.turn("swap", version)
        reads = {"actor": version}
        turn = self._worker.turn("rollout", "generate", "publish", step=version - 1, reads=reads, writes="rollout")
        async with turn:
            await self._stand.work("rollout", "publish", version - 1, 0, self._costs.publish_s)
            self._journal.note("swap", version)
        self._is_paused = False
        self._tell()
        return {"policy_version": float(version)}

    async def close(self) -> None:
        """Stops the engine and waits until it has stopped."""
        cancelled: asyncio.CancelledError | None = None
        while self._pump is not None and not self._pump.done():
            self._pump.cancel()
            try:
                await asyncio.wait({self._pump})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _run(self) -> None:
        while self._pending or self._queue or self._running:
            self._admit()
            if self._journal.is_due():
                await self._journal.news()
            elif self._running or (self._queue and not self._is_paused):
                await self._burst()
            elif self._is_paused:
                await self._change("new weights")
            else:
                raise Diverged(f"nothing runs at burst {self._journal.tick}, and the journal admits nothing")

    def _admit(self) -> None:
        for index in self._journal.admit(self._pending):
            self._pending.remove(index)
            self._queue.append(SimulatedGroup(index, self._costs.generation.bursts(index)))

    async def _burst(self) -> None:
        generation = self._costs.generation
        turn = self._worker.turn("rollout", "generate", "generate", step=None, reads={"rollout": None})
        async with turn as (lease, span):
            while self._queue and not self._is_paused and len(self._running) < generation.max_running:
                self._running.append(self._queue.pop(0))
            if not self._running:
                return
            version = span.step = lease.versions["rollout"]
            seconds = generation.burst.seconds(len(self._running))
            running = list(self._running)
            self._journal.burst_begins()
            await self._stand.work("rollout", "generate", version, self._journal.tick, seconds)
        for group in running:
            group.move_on(version)
            if group.remaining == 0 and group in self._running:
                self._running.remove(group)
                if not self._done[group.index].done():
                    self._done[group.index].set_result(group)
        self._tell()
        await asyncio.sleep(0)  # who waited for what has ended may ask for a lease, too

    def _forget(self, index: int) -> None:
        """Nobody waits for this group any more, be it done or not."""
        del self._done[index]
        self._pending = [other for other in self._pending if other != index]
        self._queue = [group for group in self._queue if group.index != index]
        self._running = [group for group in self._running if group.index != index]
        self._tell()
        self._journal.tell()

    def _pump_ended(self, pump: asyncio.Task[None]) -> None:
        error = asyncio.CancelledError() if pump.cancelled() else pump.exception()
        if error is None:
            return
        for done in self._done.values():
            if not done.done():
                done.set_exception(error)

    async def _change(self, reason: str) -> None:
        changed: Waiting[None] = Waiting(lambda: f"waits for {reason}")
        self._changed.append(changed)
        await changed

    def _tell(self) -> None:
        changed, self._changed = self._changed, []
        for waiting in changed:
            if not waiting.done():
                waiting.set_result(None)


Scored = tuple[str, int, int]
"""What a simulated scorer gives: stage, step, chunk."""
SimulatedChunk = Chunk[list[SimulatedGroup]]
SimulatedExperience = Sequence[tuple[SimulatedChunk, Sequence[Scored]]]


@dataclass(frozen=True)
class SimulatedScorer:
    stand: Stand
    stage: StageCost

    async def score(self, chunk: SimulatedChunk) -> Scored:
        stage, reads = self.stage, {self.stage.role: chunk.step} if self.stage.reads_own else {}
        turn = self.stand.worker.turn(
            stage.role, "forward", stage.stage, step=chunk.step, chunk=chunk.index, tokens=chunk.num_tokens, reads=reads
        )
        async with turn:
            seconds = stage.cost.seconds(len(chunk.data))
            await self.stand.work(stage.role, stage.stage, chunk.step, chunk.index, seconds)
        return stage.stage, chunk.step, chunk.index


@dataclass(frozen=True)
class SimulatedLearner:
    stand: Stand
    stage: StageCost

    async def train(self, experience: SimulatedExperience, step: int) -> Mapping[str, float]:
        stage, groups = self.stage, sum(len(chunk.data) for chunk, _ in experience)
        reads = {stage.role: step}
        async with self.stand.worker.turn(stage.role, "train", stage.stage, step=step, reads=reads, writes=stage.role):
            await self.stand.work(stage.role, stage.stage, step, 0, stage.cost.seconds(groups))
        return {}


class SimulatedMover:
    """Parts that take bytes ÷ speed to move; each movement is a span."""

    def __init__(self, costs: CostModel, recorder: SpanRecorder) -> None:
        self._costs = costs
        self._sizes = costs.sizes()
        self._recorder = recorder
        self._resident: dict[str, int] = {}

    async def onload(self, role: str, mode: Mode) -> None:
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


@dataclass(frozen=True)
class Outcome:
    """What a simulated run was; times are seconds of its clock since its beginning.

    Args:
        ended_s: when each step ended.
        steps: the groups that each step consumed.
    """

    ended_s: Sequence[float]
    steps: Sequence[Sequence[Consumed]]
    spans: Sequence[Span]
    hand_overs: Sequence[HandOver]
    stats: ArbiterStats
    events: Sequence[Event]

    @property
    def step_s(self) -> list[float]:
        return [end - start for start, end in zip([0.0, *self.ended_s], self.ended_s, strict=False)]


class Simulation:
    """An RL run of a cost model under a placement.

    Args:
        script: a journal to follow.
        accept: group index → whether the stream's filter keeps it.
        mover: in place of the one that takes the cost model's time.
        sleep: in place of sleeping in this process.
    """

    def __init__(
        self,
        costs: CostModel,
        placement: ResolvedPlacement,
        *,
        prompts_per_step: int,
        chunk_size: int,
        patience: int = 4,
        ranks: Mapping[tuple[str, Mode], float] | None = None,
        script: Sequence[Event] = (),
        accept: Callable[[int], bool] | None = None,
        mover: Mover | None = None,
        sleep: Sleep = sleep_here,
    ) -> None:
        self.recorder = SpanRecorder(clock=now)
        self.journal = Journal(script)
        self.arbiter = placed_arbiter(
            placement,
            costs.sizes(),
            mover=SimulatedMover(costs, self.recorder) if mover is None else mover,
            ranks=ranks,
            patience=patience,
        )
        stand = Stand(Worker(self.arbiter, self.recorder), costs, sleep)
        self.rollout = SimulatedRollout(stand, self.journal, placement.in_flight)
        self.stream: GroupStream[SimulatedGroup] = GroupStream(
            self.rollout.generate,
            admission_rule(placement, prompts_per_step),
            chunk_size=chunk_size,
            accept=None if accept is None else lambda group: accept(group.index),
        )
        barriers = Barriers(placement.after, num_chunks=-(-prompts_per_step // chunk_size))
        self.steps: list[list[Consumed]] = []
        self.roles: Roles[SimulatedGroup, list[SimulatedGroup], Scored, SimulatedExperience] = Roles(
            stream=self.stream,
            collect=barriers.collect(self._collect),
            scorers=[barriers.scorer(s.stage, SimulatedScorer(stand, s)) for s in costs.scoring],
            assemble=list,
            learners=[barriers.learner(s.stage, SimulatedLearner(stand, s)) for s in costs.learning],
            publish=self.rollout.publish,
        )

    async def run(self, num_steps: int) -> Outcome:
        """So many iterations, on whatever clock the loop has."""
        ended_s: list[float] = []
        started_s = now()
        try:
            async with self.stream:
                for step in range(num_steps):
                    await run_iteration(step, self.roles)
                    ended_s.append(now() - started_s)
        finally:
            await self.rollout.close()
        return Outcome(
            ended_s=ended_s,
            steps=self.steps,
            spans=[_since(span, started_s) for span in self.recorder.spans()],
            hand_overs=self.arbiter.take_hand_overs(),
            stats=self.arbiter.stats(),
            events=self.journal.events,
        )

    def _collect(self, step: int, index: int, groups: Sequence[SimulatedGroup]) -> SimulatedChunk:
        consumed = [group.consumed() for group in groups]
        self.journal.consume(step, index, consumed)
        if index == 0:
            self.steps.append([])
        self.steps[-1] += consumed
        return Chunk(step, index, len(groups), list(groups))


def _since(span: Span, started_s: float) -> Span:
    return replace(span, start_s=span.start_s - started_s, end_s=span.end_s - started_s)
