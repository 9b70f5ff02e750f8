"""The client of one rollout engine: collects requests, runs some decode steps under each lease, and hands out
the completions.

Requests go to the engine with the next call, completions come back with it, so that nothing else is exchanged
between the driver and an engine in another process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from quartet.batch.ragged import RaggedBatch
from quartet.rollout.protocol import EngineStats
from quartet.rollout.router import Progress
from quartet.schedule.canary import CanaryProbe
from quartet.schedule.clock import drained
from quartet.schedule.journal import Diverged
from quartet.schedule.leases import MissedVersion
from quartet.schedule.request_store import AnyRequest, FinishedRequest, PromptRequest
from quartet.schedule.role_group import RoleGroup
from quartet.schedule.rollout_worker import EngineOutputs, RolloutWorker

if TYPE_CHECKING:
    from quartet.schedule.rollout import Rollout


class EngineClient:
    """
    Args:
        rollout: what the clients of a run's engines share: versions, pauses, the journal.
    """

    def __init__(self, engine: RoleGroup[RolloutWorker], rollout: Rollout) -> None:
        self.engine = engine
        self._rollout = rollout
        self._waiting: dict[str, asyncio.Future[FinishedRequest]] = {}
        self._queue: dict[tuple[str, ...], tuple[AnyRequest, int]] = {}  # not admitted, with group index
        self._to_send: dict[tuple[str, ...], AnyRequest] = {}  # admitted, not sent; both by request ids
        self._running: set[str] = set()  # admitted, not ended
        self._cancelled: list[str] = []  # sent, not waited for any more: the engine does not know yet
        self._lengths: dict[str, int] = {}  # of those waited for, the most tokens that each may get
        self._task: asyncio.Task[None] | None = None
        self.stats = EngineStats(policy_version=rollout.version)
        self.progress: Progress | None = None

    @property
    def is_running(self) -> bool:
        """Whether requests were admitted that have not ended."""
        return bool(self._running)

    @property
    def outstanding_tokens(self) -> int:
        """That may still be made for what is waited for; those that are made already are not known."""
        return sum(self._lengths.values())

    async def begin(self) -> None:
        """Takes the engine over, which may have worked for another driver before."""
        self.stats = await self.engine.call(RolloutWorker.begin)

    async def complete(self, asked: AnyRequest, index: int) -> list[FinishedRequest]:
        """Returns when all of the requests have ended, in their order.

        Args:
            index: of the requests' group; a negative one, an evaluation's, is admitted during a pause, too.

        Raises:
            UserError: the engine refuses them, or computes what is not finite.
            ClusterError: the engine's process is gone, or failed.
        """
        loop = asyncio.get_running_loop()
        ids = asked.request_ids
        if len(set(ids)) < len(ids) or not self._waiting.keys().isdisjoint(ids):
            raise ValueError(f"requests {ids} are waited for already, or named alike")
        futures: list[asyncio.Future[FinishedRequest]] = [loop.create_future() for _ in ids]
        self._waiting.update(zip(ids, futures, strict=True))
        self._lengths.update(asked.lengths)
        self._queue[ids] = asked, index
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run(), name="engine")
            self._task.add_done_callback(self._task_ended)
        self._rollout.tell()
        try:
            # Not one after the other: what failed behind the first failure would be reported as never retrieved.
            return await asyncio.gather(*futures)
        except BaseException:
            self._abandon(ids)
            raise

    async def answers(self, requests: Sequence[PromptRequest], indices: Sequence[int]) -> RaggedBatch:
        """All at once, by an engine that does nothing else; inside a lease."""
        await self._forget_cancelled()
        batch = await self.engine.leave(RolloutWorker.answers, requests, indices)
        self.stats = await self.engine.call(RolloutWorker.stats)
        return batch

    async def canary(self, probe: CanaryProbe, name: str) -> RaggedBatch:
        """The engine's log-probabilities of the canary prompt; inside a lease."""
        await self._forget_cancelled()
        self._take(await self.engine.call(RolloutWorker.run_canary, probe, name))
        return await self.engine.leave(RolloutWorker.canary)

    async def stop_running(self) -> int:
        """What runs begins anew with the next steps; inside a lease. Returns how many requests did."""
        await self._forget_cancelled()
        self._take(await self.engine.call(RolloutWorker.stop_running))
        return len(self._running) - sum(map(len, self._to_send))

    async def close(self) -> None:
        """Stops and waits until the engine has stopped; waits for completions are cancelled."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await drained(asyncio.wait({self._task}))

    async def _run(self) -> None:
        journal = self._rollout.journal
        while self._waiting:
            self._admit()
            if journal is not None and journal.is_due():
                await journal.news()
            elif self._running:
                await self._run_steps()
            elif self._rollout.num_pauses:
                await self._rollout.change("admission")
            else:
                assert journal is not None, "without a journal the first that asks is admitted"
                raise Diverged(f"nothing runs at tick {journal.tick}, and the journal admits nothing")

    def _admit(self) -> None:
        """In the order asked for, or in that of the journal that is followed."""
        rollout, journal = self._rollout, self._rollout.journal
        goes_on = True
        while goes_on:
            goes_on = False
            for ids, (asked, index) in list(self._queue.items()):
                if rollout.num_pauses and index >= 0:
                    continue
                if not self._has_room(len(ids)):
                    break  # nor may smaller ones go before it, again and again
                if journal is None or journal.admit(index):
                    del self._queue[ids]
                    self._to_send[ids] = asked
                    self._running.update(ids)
                    goes_on = True

    def _has_room(self, num: int) -> bool:
        most = self._rollout.max_running
        return most is None or not self._running or len(self._running) + num < most

    async def _run_steps(self) -> None:
        rollout = self._rollout
        turn = rollout.leases.turn("rollout", "generate", "generate", step=None, reads=rollout.reads())
        try:
            async with turn as (lease, span):
                self._admit()
                if not self._running:
                    return
                span.step = lease.versions["rollout"]
                if rollout.journal is not None:
                    rollout.journal.begin_tick()
                span.tokens = await self._engine_steps(rollout.steps_per_lease)
        except MissedVersion:
            # The engine's tensors are the actor's and have been trained; their publication is under way.
            if not rollout.num_publishing:
                raise
            await rollout.change("the actor's new weights")

    async def _engine_steps(self, steps_left: int) -> int:
        """So many steps with what is to be submitted and cancelled; returns the number of sampled tokens.

        Completed groups are handed out as soon as they are there. What is asked for meanwhile waits for the last step:
        which requests decode together is a matter of step counts, never of time.
        """
        submit, self._to_send = list(self._to_send.values()), {}
        cancel, self._cancelled = self._cancelled, []
        sampled = 0
        while True:
            outputs = await self.engine.call(RolloutWorker.run_steps, submit, cancel, steps_left)
            sampled += outputs.sampled
            self._take(outputs)
            if outputs.ended:
                await _settled()
            steps_left, submit, cancel = outputs.steps_left, [], []
            if not steps_left:
                return sampled

    def _take(self, outputs: EngineOutputs) -> None:
        self.stats, self.progress = outputs.stats, outputs.progress or self.progress
        for ended in outputs.ended:
            future = self._pop(ended.request_id)
            if future is not None:
                future.set_result(ended)
        for request_ids, error in outputs.failed:
            self._fail(error, request_ids)
        if self._rollout.on_finished is not None:
            self._rollout.on_finished(len(outputs.ended))
        self._rollout.tell()

    def _fail(self, error: BaseException, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            future = self._pop(request_id)
            if future is not None:
                future.set_exception(error)

    def _pop(self, request_id: str) -> asyncio.Future[FinishedRequest] | None:
        """What waits for the request, which has ended."""
        self._running.discard(request_id)
        self._lengths.pop(request_id, None)
        future = self._waiting.pop(request_id, None)
        return None if future is None or future.done() else future

    def _abandon(self, ids: tuple[str, ...]) -> None:
        """These are not waited for any more."""
        for request_id in ids:
            self._waiting.pop(request_id, None)
            self._lengths.pop(request_id, None)
            self._running.discard(request_id)
        if self._queue.pop(ids, None) is None and self._to_send.pop(ids, None) is None:
            self._cancelled += ids
        self._rollout.tell()

    async def _forget_cancelled(self) -> None:
        if self._cancelled:
            cancel, self._cancelled = self._cancelled, []
            await self.engine.call(RolloutWorker.run_steps, (), cancel, 0)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """What ended the task early is raised in every ``complete`` that waits."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return
        unsent = {request_id for ids in self._to_send for request_id in ids}
        self._cancelled += sorted(self._running - unsent)
        self._queue.clear()
        self._to_send.clear()
        self._fail(error, list(self._waiting))
        self._rollout.tell()


_LOOP_TURNS = 16
"""Turns of the event loop from an ended request to what follows from it: the scoring of a chunk or the next turn of an
episode has asked for its lease, or its tokens, within about eight."""


async def _settled() -> None:
    """Lets what waits for ended requests go on until it waits for something else.

    Otherwise the number of turns decided how many engine steps late an episode's next turn begins, and with another
    process's load which turns decode together.
    """
    for _ in range(_LOOP_TURNS):
        await asyncio.sleep(0)
