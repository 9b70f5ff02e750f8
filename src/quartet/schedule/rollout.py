"""The rollout role: engines that answer the group stream's prompts, and that the actor's weights are handed to.

Generation pauses every ``steps_per_lease`` decode steps, so that finished chunks are scored between them where both
share devices, in an order given by step counts; elsewhere it goes on beside everything else. New weights come between
two such leases.

The client of one rollout engine: collects requests, runs some decode steps under each lease, and hands out
the completions.

Requests go to the engine with the next call, completions come back with it, so that nothing else is exchanged
between the driver and an engine in another process.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from quartet.batch.ragged import RaggedBatch
from quartet.config.placement import InFlight
from quartet.envs.episode import FinishedEpisode
from quartet.rollout.protocol import EngineStats
from quartet.schedule.clock import Condition, await_uncancelled, gather_all
from quartet.schedule.groups import PromptGroup, split_by_group
from quartet.schedule.leases import LeaseContext, StaleVersion
from quartet.schedule.model_worker import ModelWorker
from quartet.schedule.role_group import RoleGroup
from quartet.schedule.rollout_worker import (
    AnyRequest,
    EngineOutputs,
    FinishedRequest,
    PromptRequest,
    RolloutWorker,
    TurnRequest,
)
from quartet.schedule.weight_sync import CanarySpec, canary_difference
from quartet.train.forward import ForwardNeeds


class EngineClient:
    """
    Args:
        rollout: what the clients of a run's engines share: versions and pauses.
    """

    def __init__(self, engine: RoleGroup[RolloutWorker], rollout: RolloutDriver) -> None:
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

    @property
    def is_running(self) -> bool:
        """Tells whether requests were admitted that have not ended."""
        return bool(self._running)

    @property
    def outstanding_tokens(self) -> int:
        """The number of tokens that may still be made for what is waited for; those that are made already are not
        known."""
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
        """Returns the answers, made all at once by an engine that does nothing else; inside a lease."""
        await self._forget_cancelled()
        batch = await self.engine.leave(RolloutWorker.answers, requests, indices)
        self.stats = await self.engine.call(RolloutWorker.stats)
        return batch

    async def canary(self, probe: CanarySpec, name: str) -> RaggedBatch:
        """Returns the engine's log-probabilities of the canary prompt; inside a lease."""
        await self._forget_cancelled()
        self._take(await self.engine.call(RolloutWorker.run_canary, probe, name))
        return await self.engine.leave(RolloutWorker.canary)

    async def close(self) -> None:
        """Stops and waits until the engine has stopped; waits for completions are cancelled."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await await_uncancelled(asyncio.wait({self._task}))

    async def _run(self) -> None:
        while self._waiting:
            self._admit()
            if self._running:
                await self._run_steps()
            else:
                await self._rollout.change()  # a pause

    def _admit(self) -> None:
        """Admits requests in the order asked for."""
        most = self._rollout.max_running
        for ids, (asked, index) in list(self._queue.items()):
            if self._rollout.num_pauses and index >= 0:
                continue
            if most is not None and self._running and len(self._running) + len(ids) >= most:
                break  # nor may smaller ones go before it, again and again
            del self._queue[ids]
            self._to_send[ids] = asked
            self._running.update(ids)

    async def _run_steps(self) -> None:
        """Runs the steps of one lease, with what is to be submitted and cancelled.

        Completed groups are handed out as soon as they are there. What is asked for meanwhile waits for the last step:
        which requests decode together is a matter of step counts, never of time.
        """
        rollout = self._rollout
        turn = rollout.leases.turn("rollout", "generate", "generate", step=None, reads=rollout.reads())
        try:
            async with turn as (lease, span):
                self._admit()
                if not self._running:
                    return
                span.step = lease.versions["rollout"]
                submit, self._to_send = list(self._to_send.values()), {}
                cancel, self._cancelled = self._cancelled, []
                steps_left, sampled = rollout.steps_per_lease, 0
                while steps_left:
                    outputs = await self.engine.call(RolloutWorker.run_steps, submit, cancel, steps_left)
                    sampled += outputs.sampled
                    self._take(outputs)
                    if outputs.ended:
                        await _settled()
                    steps_left, submit, cancel = outputs.steps_left, [], []
                span.tokens = sampled
        except StaleVersion:
            # The engine's tensors are the actor's and have been trained; their publication is under way.
            if not rollout.num_publishing:
                raise
            await rollout.change()

    def _take(self, outputs: EngineOutputs) -> None:
        self.stats = outputs.stats
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
        """Returns what waits for the request, which has ended."""
        self._running.discard(request_id)
        self._lengths.pop(request_id, None)
        future = self._waiting.pop(request_id, None)
        return None if future is None or future.done() else future

    def _abandon(self, ids: tuple[str, ...]) -> None:
        """Gives up requests that are not waited for any more."""
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
        """Raises what ended the task early in every ``complete`` that waits."""
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


@dataclass(eq=False)
class RolloutDriver:
    """Drives the engines for the group stream.

    Args:
        engines: one worker each.
        requests: ``(stream index) → (prompt item, request)``; the same index gives the same request. Responses that are
            trained on are sampled, so a greedy one among them is the group's baseline.
        steps_per_lease: decode steps per lease.
        version: of the weights in the engines.
        trainer: the actor, which the canary is compared with.
        update_engine_weights: brings the actor's weights of a version into all engines; returns the bytes moved. Called
            inside the lease that writes the engines' weights and reads the actor's.
        sends: the states that it brings, whose version is awaited: the actor's, and that of heads that learn along.
        shares_actor: the engines use the actor's weights directly, without a copy.
        in_flight: new weights come between two leases (``pick_up``), or once what runs has ended, with nothing new
            begun meanwhile (``finish_old``): each response has one version then.
        max_running: requests that an engine is given at a time, less one that is left for the canary; None for all at
            once, of which those that wait in it go before the canary, and with ``finish_old`` are waited for.
        balances: a group goes to the engine with the fewest tokens to make; else to that of its index modulo their
            number, which no clock decides.
        on_finished: called with the number of responses that each engine call ended.

    Attributes:
        num_pauses: while above 0 nothing is admitted.
        num_publishing: calls that bring weights, waiting ones included.
    """

    leases: LeaseContext
    engines: Sequence[RoleGroup[RolloutWorker]]
    requests: Callable[[int], tuple[Any, PromptRequest]]
    _: KW_ONLY
    steps_per_lease: int
    version: int
    canary: CanarySpec
    trainer: RoleGroup[ModelWorker]
    update_engine_weights: Callable[[int], Awaitable[int]]
    shares_actor: bool
    sends: Sequence[str] = ("actor",)
    in_flight: InFlight = "pick_up"
    max_running: int | None = None
    balances: bool = False
    on_finished: Callable[[int], None] | None = None
    num_pauses: int = field(default=0, init=False)
    num_publishing: int = field(default=0, init=False)
    _beside: EngineStats = field(default_factory=EngineStats, init=False)
    """Less than nothing: what was sampled for evaluations and canaries, which is no step's."""

    def __post_init__(self) -> None:
        self._changed = Condition()
        self._clients = [EngineClient(engine, self) for engine in self.engines]
        self._homes: dict[int, EngineClient] = {}  # of groups that are being made
        self._weights_stay = asyncio.Lock()

    def reads(self) -> dict[str, int | None]:
        """Returns what a lease reads: whatever weights the engines have; where they are the actor's own tensors, those
        of the same version."""
        return {"rollout": None, **({"actor": self.version} if self.shares_actor else {})}

    async def change(self) -> None:
        """Waits until something was told."""
        await self._changed.wait()

    def tell(self) -> None:
        """Wakes clients and pauses that wait for a change."""
        self._changed.notify_all()

    def stats(self) -> EngineStats:
        """Sums over the engines, after their last calls; without evaluations and the tokens of canaries."""
        total = EngineStats.total([*(client.stats for client in self._clients), self._beside])
        total.policy_version = self.version
        return total

    async def begin(self) -> None:
        """Takes the engines over, which may have worked for another driver before."""
        for client in self._clients:
            await client.begin()

    # Generation ------------------------------------------------------------------------------------------

    async def generate(self, index: int) -> PromptGroup:
        """Generates the group at ``index`` of the stream."""
        prompt, request = self.requests(index)
        client = self._client_of(index)
        await client.complete(request, index)
        sampled = [name for name, sampling in request.samples.items() if not sampling.greedy]
        greedy = next((name for name, sampling in request.samples.items() if sampling.greedy), None)
        batch = await client.engine.leave(RolloutWorker.responses, index, sampled, greedy)
        self._homes.pop(index, None)
        return PromptGroup.of(index, prompt, batch)

    async def act(self, index: int, request: TurnRequest) -> FinishedRequest:
        """Returns the next action of an episode of the group ``index``.

        Evaluations have negative indices, which no group of the stream has: theirs go on inside of ``quiet``.
        """
        (ended,) = await self._client_of(index).complete(request, index)
        return ended

    async def episodes(self, index: int, prompt: Any, endings: Sequence[FinishedEpisode]) -> PromptGroup:
        """Makes the group ``index`` of episodes that have ended."""
        batch = await self._client_of(index).engine.leave(RolloutWorker.episodes, index, endings)
        self._homes.pop(index, None)
        return PromptGroup.of(index, prompt, batch)

    def _client_of(self, index: int) -> EngineClient:
        if not self.balances:
            return self._clients[index % len(self._clients)]
        if index not in self._homes:
            self._homes[index] = min(self._clients, key=lambda client: client.outstanding_tokens)
        return self._homes[index]

    async def close(self) -> None:
        """Stops generation and waits until it has stopped."""
        await gather_all([client.close() for client in self._clients])

    # Evaluation ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Lets nothing be generated inside the block but for evaluations: for figures of the present weights.

        Groups that ask to be generated wait, and so do new weights.
        """
        async with self._weights_stay, self._paused():
            before = self.stats()
            try:
                yield
            finally:
                self._beside = EngineStats.total([self._beside, before.sampling_less(self.stats())])

    async def evaluate(self, prompts: Sequence[tuple[Any, PromptRequest]], step: int) -> list[PromptGroup]:
        """Makes, inside of ``quiet``, groups of all responses to the prompts, by their places; an engine's in one
        lease."""
        num = len(self._clients)
        shares = [{i: prompts[i][1] for i in range(p, len(prompts), num)} for p in range(num)]
        pairs = zip(self._clients, shares, strict=True)
        made = await gather_all([self._evaluate_on(client, share, step) for client, share in pairs if share])
        batches = {i: one for batch in made for i, one in split_by_group(batch).items()}
        return [PromptGroup.of(i, item, batches[i]) for i, (item, _) in enumerate(prompts)]

    async def _evaluate_on(self, client: EngineClient, share: Mapping[int, PromptRequest], step: int) -> RaggedBatch:
        async with self.leases.turn("rollout", "generate", "evaluate", step=step, reads=self.reads()):
            return await client.answers(list(share.values()), list(share))

    # Weights ---------------------------------------------------------------------------------------------

    async def publish(self, version: int) -> dict[str, float]:
        """Hands the actor's weights of ``version`` to the engines as soon as they exist, then asks the canary.

        Raises:
            UserError: an engine's log-probabilities are not the trainer's.
        """
        arbiter = self.leases.arbiter
        self.num_publishing += 1
        try:
            # The actor trains on no sooner than its weights were handed over and compared.
            with arbiter.reserve("actor", version, "rollout"), arbiter.reserve("actor", version, "actor"):
                for state in self.sends:
                    await arbiter.until(state, version)
                pause: AbstractAsyncContextManager[None] = nullcontext()
                if self.in_flight == "finish_old":
                    pause = self._paused()
                async with self._weights_stay, pause:
                    probed = await self._swap(version)
                difference = await self._difference(probed, version)
        finally:
            self.num_publishing -= 1
        self.canary.check(difference, version)
        return {"agreement/canary_diff": difference, "policy_version": float(version)}

    async def _swap(self, version: int) -> list[RaggedBatch]:
        """Updates the weights between two leases; returns each engine's log-probabilities of the canary prompt."""
        reads: dict[str, int | None] = dict.fromkeys(self.sends, version)
        turn = self.leases.turn("rollout", "generate", "publish", step=version - 1, reads=reads, writes="rollout")
        async with turn as (_, span):
            span.nbytes = await self.update_engine_weights(version)
            works = [client.canary(self.canary, f"canary.{i}") for i, client in enumerate(self._clients)]
            probed = await gather_all(works)
            tokens = sum(int(batch.token["loss_mask"].sum()) for batch in probed)
            self._beside = EngineStats.total([self._beside, EngineStats(generated_tokens=-tokens)])
            self.version = version
        self.tell()
        return probed

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Admits nothing meanwhile, and begins when what runs has ended."""
        self.num_pauses += 1
        try:
            while any(client.is_running for client in self._clients):
                await self.change()
            yield
        finally:
            self.num_pauses -= 1
            self.tell()

    async def _difference(self, probed: Sequence[RaggedBatch], version: int) -> float:
        """Returns the largest difference between the engines' log-probabilities of the canary's tokens and the
        trainer's."""
        batch = RaggedBatch.concat(probed)
        turn = self.leases.turn("actor", "forward", "canary", step=version - 1, reads={"actor": version})
        async with turn:
            columns = await self.trainer.call(ModelWorker.forward, batch, ForwardNeeds(logprobs=True))
        return canary_difference(batch, columns)
