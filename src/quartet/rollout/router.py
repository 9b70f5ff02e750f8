"""Several rollout engines as one: spreads requests, and takes them elsewhere when an engine fails.

    submit ─► queue ─► choose ─► engine's ledger ─► completed
                ▲                     │
                └──── engine failed ──┘

Requests of one group wait and travel together. Every request has one place at a time, in the queue or in the ledger of
one engine, so none is lost, and none is answered twice.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Literal

from quartet.config import UserError
from quartet.rollout.protocol import (
    Completion,
    EngineFailed,
    EngineStats,
    FinishReason,
    GenerationError,
    PartialCompletion,
    Request,
    RequestLedger,
    RequestsRefused,
    RolloutEngine,
    check_request_ids,
)

if TYPE_CHECKING:
    from quartet.weights.sink import TensorSink

_MAX_HOMES = 1 << 16
State = Literal["up", "starting", "asleep", "out"]
_HEALTHY_S = 600.0
"""After so long without a failure an engine is as good as new."""
_LOOK_S = 0.5
"""Between two looks at engines that say nothing."""
_SLICE_S = 0.005
"""For each engine that cannot be waited for together with others."""


class Router:
    """
    Args:
        engines: with ``restart()`` and ``is_ready()`` a failed one is started anew, else it is out; with ``fileno()``
            it is waited for without polling; with ``has_weights()`` it gets nothing before it has some.
        max_outstanding: requests at one engine, which the last group may exceed; what is over waits here, in order.
        max_restarts: of each engine, until it was up for ten minutes.

    Attributes:
        restarts: of all engines so far.
        rerouted: requests that were begun anew because their engine failed or left.

    Raises:
        UserError: an engine cannot be made; all are closed.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        *,
        max_outstanding: int = 128,
        max_restarts: int = 3,
    ) -> None:
        self.restarts = self.rerouted = 0
        self._max_outstanding = max_outstanding
        self._pins: dict[str, RoutedEngine] = {}  # where requests go whatever there is, by their ids
        self._homes: OrderedDict[str, RoutedEngine] = OrderedDict()  # by session
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="router")
        names = (getattr(engine, "name", None) or f"engine {number}" for number, engine in enumerate(engines))
        self._members = [RoutedEngine(*each, max_restarts) for each in zip(engines, names, strict=True)]
        self._queue: deque[list[Request]] = deque()
        self._ledger = RequestLedger("router")  # all of them, wherever they are
        self._done: list[Completion] = []
        self._errors: deque[GenerationError] = deque()
        self._muted: Counter[str] = Counter()  # cancelled requests of a submission that failed
        self._is_paused = self._is_asleep = False
        try:
            for error in self._asked(self._members, lambda m: getattr(m.engine, "wait_ready", bool)()).values():
                raise error
            self._look_at_starting()
        except BaseException:
            self.close()
            raise

    # Engines ---------------------------------------------------------------------------------------------

    def _take_back(self, member: RoutedEngine) -> None:
        """Puts what an engine holds at the head of the queue."""
        held, cancelled = member.ledger.clear()
        self.rerouted += len(held)
        self._queue.extendleft(reversed(group_requests(held)))
        for request in cancelled:
            self._hand_over(cancelled_completion(request))

    def _fail(self, member: RoutedEngine, error: UserError) -> None:
        """Handles the failure of an engine: its requests go elsewhere; it is started anew, where it can be and has not
        been too often."""
        member.reason = error.found
        self._take_back(member)
        has_more = member.note_failure()
        if not hasattr(member.engine, "restart") or not has_more:
            member.state = "out"
            member.engine.close()
        elif self._is_asleep:  # others have the memory now
            member.state = "asleep"
        else:
            self._restart(member)

    def _restart(self, member: RoutedEngine) -> None:
        member.state = "starting"
        self.restarts += 1
        engine: Any = member.engine
        try:
            engine.restart()
        except UserError as error:
            self._fail(member, error)

    def _look_at_starting(self) -> None:
        for member in self._in_state("starting"):
            engine: Any = member.engine
            try:
                if engine.is_ready():
                    if self._is_paused:
                        engine.pause()
                    member.state = "up"
                    member.up_s = time.monotonic()
            except UserError as error:  # as it may say when it is made anew: no memory, a file that is gone
                self._fail(member, error)

    def _in_state(self, *states: State) -> list[RoutedEngine]:
        return [member for member in self._members if member.state in states]

    def _each(
        self, members: Sequence[RoutedEngine], do: Callable[[RoutedEngine], object]
    ) -> dict[RoutedEngine, UserError]:
        """Asks several engines side by side; those that fail are taken care of, other errors are returned."""
        errors = self._asked(members, do)
        for member, error in errors.items():
            if isinstance(error, EngineFailed):
                self._fail(member, error)
        return {member: error for member, error in errors.items() if not isinstance(error, EngineFailed)}

    def _asked(
        self, members: Sequence[RoutedEngine], do: Callable[[RoutedEngine], object]
    ) -> dict[RoutedEngine, UserError]:
        def attempt(member: RoutedEngine) -> UserError | None:
            try:
                do(member)
            except UserError as error:
                return error
            return None

        errors = map(attempt, members) if len(members) < 2 else self._threads.map(attempt, members)
        return {member: error for member, error in zip(members, list(errors), strict=True) if error is not None}

    def _require_engines(self) -> None:
        if not self._in_state("up", "starting", "asleep"):
            raise EngineFailed(
                "no rollout engine is left",
                found="; ".join(f"{member.name}: {member.reason}" for member in self._members) or "no engine at all",
                remedy="mend what these say, or raise max_restarts if they fail seldom",
            )

    # Requests --------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        self._require_engines()
        check_request_ids(requests, self._ledger.held)
        self._ledger.add(requests)
        self._queue.extend(group_requests(requests))
        self._dispatch()
        ids = {request.request_id for request in requests}
        for error in self._errors:
            if isinstance(error, RequestsRefused) and ids.issuperset(error.request_ids):
                self._withdraw(ids)
                raise error.error

    def probe(self, request: Request) -> list[str]:
        """Asks every engine that is there the same, before all that waits; returns the ids of the answers, which
        ``completed`` gives. Where one fails, another answers in its place."""
        members = self._usable()
        copies = [
            replace(request, request_id=f"{request.request_id}@{n}", group=f"{request.group}@{n}")
            for n in range(max(1, len(members)))
        ]
        self._require_engines()
        check_request_ids(copies, self._ledger.held)
        self._ledger.add(copies)
        self._pins.update((copy.request_id, member) for copy, member in zip(copies, members, strict=False))
        self._queue.extendleft([copy] for copy in reversed(copies))
        self._dispatch()
        return [copy.request_id for copy in copies]

    def _withdraw(self, ids: set[str]) -> None:
        """Withdraws these requests: nothing more is heard of them."""
        self._errors = deque(error for error in self._errors if ids.isdisjoint(error.request_ids))
        taken = [i for i in ids if i in self._ledger.held]
        self._muted.update(taken)
        self.cancel(taken)

    def _dispatch(self) -> None:
        """Sends what waits to engines that have room for it."""
        if not self._queue:
            return
        loads = {member: sum(map(max_request_tokens, member.ledger.held.values())) for member in self._usable()}
        sent: dict[RoutedEngine, list[list[Request]]] = {}
        while self._queue and (member := self._choose(self._queue[0], loads)) is not None:
            unit = self._queue.popleft()
            member.ledger.add(unit)
            loads[member] += sum(map(max_request_tokens, unit))
            sent.setdefault(member, []).append(unit)
        errors = self._each([*sent], lambda member: member.engine.submit([r for unit in sent[member] for r in unit]))
        for member, error in errors.items():
            self._send_singly(member, sent[member], error)

    def _choose(self, unit: Sequence[Request], loads: Mapping[RoutedEngine, int]) -> RoutedEngine | None:
        """Chooses where a unit goes: to the engine that had its session, if there is room, else where the fewest tokens
        are outstanding.

        Args:
            loads: of all engines that can be asked, in the order in which they joined: their outstanding tokens.

        Returns:
            None: there is no room anywhere.
        """
        if (pinned := self._pins.pop(unit[0].request_id, None)) in loads:
            return pinned
        free = [member for member in loads if len(member.ledger) < self._max_outstanding]
        if not free:
            return None
        chosen = min(free, key=lambda member: loads[member])  # of equals the first
        if (session := unit[0].session) is not None:
            chosen = home if (home := self._homes.get(session)) in free else chosen
            self._homes[session] = chosen
            self._homes.move_to_end(session)
            if len(self._homes) > _MAX_HOMES:
                self._homes.popitem(last=False)
        return chosen

    def _usable(self) -> list[RoutedEngine]:
        usable = []
        for member in self._in_state("up"):
            try:
                if member.has_weights:
                    usable.append(member)
            except EngineFailed as error:
                self._fail(member, error)
        return usable

    def _send_singly(self, member: RoutedEngine, units: list[list[Request]], error: UserError) -> None:
        """Sends each unit by itself: an engine takes all or none, so whom ``error`` means is not known yet."""
        for unit in units:
            try:
                if len(units) == 1:
                    raise error
                member.engine.submit(unit)
            except EngineFailed as failed:
                self._fail(member, failed)
                return
            except UserError as refused:
                self._refuse(member, [request.request_id for request in unit], refused)

    def _refuse(self, member: RoutedEngine, ids: list[str], error: UserError) -> None:
        member.ledger.drop(ids)
        self._forget(ids)
        self._errors.append(RequestsRefused(error, ids))

    def _forget(self, ids: Sequence[str]) -> None:
        """Forgets requests that have ended by an error."""
        self._ledger.drop(ids)
        for request_id in ids:
            del self._muted[request_id]

    def completed(self, timeout_s: float) -> list[Completion]:
        end = time.monotonic() + timeout_s
        while True:
            self._require_engines()
            self._look_at_starting()
            for member in self._in_state("up"):
                self._collect(member)
            self._dispatch()
            if self._done:
                done, self._done = self._done, []
                return done
            if self._errors:
                raise self._errors.popleft()
            left = end - time.monotonic()
            if left <= 0:
                return []
            self._wait(min(left, _LOOK_S))

    def _wait(self, seconds: float) -> None:
        """Waits until an engine has something to say, at most ``seconds``."""
        up = self._in_state("up")
        if self._queue and up and not self._in_state("starting") and not self._usable():
            self.weight_sink().require()
        polled = [member for member in up if not hasattr(member.engine, "fileno") and len(member.ledger)]
        watched: list[Any] = [m.engine for m in self._in_state("up", "starting") if hasattr(m.engine, "fileno")]
        for member in polled:
            self._collect(member, min(seconds, _SLICE_S))
        if watched and not polled:
            wait(watched, seconds)
        elif not polled:
            time.sleep(min(seconds, _SLICE_S))

    def _collect(self, member: RoutedEngine, timeout_s: float = 0.0, cancelled: Sequence[str] = ()) -> None:
        """Takes in what has ended.

        Args:
            cancelled: just now, at the engine. What has not ended is still to come, as cancelled.
        """
        try:
            done = member.engine.completed(timeout_s)
            ended = {made.request_id for made in done if made.finish_reason is not FinishReason.CANCELLED}
            member.ledger.cancel(i for i in cancelled if i not in ended)
            for completion in done:
                member.ledger.settle(completion)
                self._hand_over(completion)
        except GenerationError as error:
            member.ledger.drop(error.request_ids)
            self._forget(error.request_ids)
            self._errors.append(error)
            if cancelled:
                self._collect(member, cancelled=cancelled)
        except EngineFailed as error:
            self._fail(member, error)

    def _hand_over(self, completion: Completion) -> None:
        request_id = completion.request_id
        if completion.finish_reason is not FinishReason.CANCELLED:
            self._ledger.drop([request_id])
        if self._muted[request_id]:
            self._muted[request_id] -= 1
        else:
            self._done.append(completion)

    def cancel(self, request_ids: Iterable[str]) -> None:
        ids = {i for i in request_ids if i in self._ledger.held}
        held = {member: [i for i in member.ledger.held if i in ids] for member in self._in_state("up")}
        held = {member: own for member, own in held.items() if own}
        self._each([*held], lambda member: member.engine.cancel(held[member]))
        for member, own in held.items():
            if member.state == "up":
                self._collect(member, cancelled=own)
        waiting = [request for unit in self._queue for request in unit if request.request_id in ids]
        left = ([request for request in unit if request.request_id not in ids] for unit in self._queue)
        self._queue = deque(unit for unit in left if unit)
        self._ledger.drop(ids)
        for request in waiting:
            self._hand_over(cancelled_completion(request))

    def generated(self, request_ids: Iterable[str]) -> dict[str, PartialCompletion]:
        ids, found = set(request_ids), dict[str, PartialCompletion]()

        def ask(member: RoutedEngine) -> None:
            found.update(member.engine.generated(ids & member.ledger.held.keys()))

        self._each([m for m in self._in_state("up") if not ids.isdisjoint(m.ledger.held)], ask)
        return found

    # All of them -----------------------------------------------------------------------------------------

    def _all(self, do: Callable[[RoutedEngine], object]) -> None:
        for error in self._each(self._in_state("up"), do).values():
            raise error

    def pause(self) -> None:
        self._is_paused = True
        self._all(lambda member: member.engine.pause())

    def resume(self) -> None:
        self._is_paused = False
        self._all(lambda member: member.engine.resume())

    def sleep(self, level: Literal[1, 2]) -> None:
        """Waits for engines that are being started; what fails from now on is started when the others wake."""
        while self._in_state("starting"):
            self._look_at_starting()
            time.sleep(_SLICE_S)
        self._is_asleep = True
        self._all(lambda member: member.engine.sleep(level))

    def wake(self) -> None:
        self._is_asleep = False
        self._all(lambda member: member.engine.wake())
        for member in self._in_state("asleep"):
            self._restart(member)

    def weight_sink(self) -> TensorSink:
        """Returns the sink for new weights; the engines have it in common."""
        return self._members[0].engine.weight_sink()

    def stats(self) -> EngineStats:
        """Sums over all engines since they were first made; the oldest of their policy versions."""
        now = [member.engine.stats() for member in self._in_state("up")]
        version = min((stats.policy_version for stats in now), default=0)
        summed = EngineStats.total([*now, *(member.past for member in self._members)])
        counts: dict[str, Any] = {
            "num_restarts": self.restarts,
            "num_rerouted": self.rerouted,
            "policy_version": version,
        }
        return replace(summed, num_waiting=summed.num_waiting + sum(map(len, self._queue)), **counts)

    def close(self) -> None:
        members, self._members = self._members, []
        self._asked(members, lambda member: member.engine.close())
        self._threads.shutdown()


# Each of them -------------------------------------------------------------------------------------------


class RoutedEngine:
    """One engine, and what it owes.

    Attributes:
        past: counters of before the last restart.
        up_s: since when it is up.
    """

    def __init__(self, engine: RolloutEngine, name: str, max_restarts: int) -> None:
        self.engine = engine
        self.name = name
        self.ledger = RequestLedger(name)
        self.state: State = "starting" if hasattr(engine, "is_ready") else "up"
        self.reason = ""
        self.past = EngineStats()
        self.up_s = time.monotonic()
        self._max_restarts = max_restarts
        self._failures = 0  # since it was up for long

    def note_failure(self) -> bool:
        """Notes a failure; tells whether another start is due."""
        if self.state == "up" and time.monotonic() - self.up_s >= _HEALTHY_S:
            self._failures = 0
        self._failures += 1
        self.past = EngineStats.total([self.past, self.engine.stats()])
        return self._failures <= self._max_restarts

    @property
    def has_weights(self) -> bool:
        return bool(getattr(self.engine, "has_weights", lambda: True)())


def max_request_tokens(request: Request) -> int:
    """Returns how many tokens a request may come to."""
    return len(request.prompt_ids) + request.sampling.max_new_tokens


def group_requests(requests: Iterable[Request]) -> list[list[Request]]:
    """Puts the requests of one group together, in the order of their first."""
    units: dict[str, list[Request]] = {}
    for request in requests:
        units.setdefault(request.group, []).append(request)
    return list(units.values())


def cancelled_completion(request: Request) -> Completion:
    """Makes the cancelled completion of a request that no engine began."""
    return Completion(request.request_id, request.group, (), (), (), FinishReason.CANCELLED)
