"""An engine behind a router: what it owes, what it has made, whether it can be asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal

from quartet.rollout.ledger import RequestLedger
from quartet.rollout.progress import EngineProgress
from quartet.rollout.protocol import Completion, EngineStats, FinishReason, Request, RolloutEngine

State = Literal["up", "starting", "asleep", "out"]


_HEALTHY_S = 600.0
"""After so long without a failure an engine is as good as new."""
_LONGEST_WAIT_S = 30.0


class RestartBudget:
    """How often, and how soon, an engine is started anew: at once after its first failure, then after 1 s, 2 s, 4 s, …,
    at most 30 s. All of it is forgotten once the engine was up for ten minutes.

    Args:
        most: failures in this time after which there is another start.
        clock: seconds that never jump.
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most, self._clock = most, clock
        self._used = 0
        self._due_s, self._up_s = -math.inf, clock()

    def note_up(self) -> None:
        self._up_s = self._clock()

    def note_failure(self, *, was_up: bool) -> bool:
        """Whether there is another start."""
        now = self._clock()
        if was_up and now - self._up_s >= _HEALTHY_S:
            self._used = 0
        self._due_s = now + (min(2.0 ** (self._used - 1), _LONGEST_WAIT_S) if self._used else 0.0)
        self._used += 1
        return self._used <= self._most

    @property
    def is_due(self) -> bool:
        """Whether the wait before the next start is over."""
        return self._clock() >= self._due_s


class Member:
    """One engine, and what it owes."""

    def __init__(self, engine: RolloutEngine, name: str, budget: RestartBudget) -> None:
        self.engine = engine
        self.name = name
        self.ledger = RequestLedger(name)
        self.state: State = "starting" if hasattr(engine, "is_ready") else "up"
        self.reason = ""
        self.budget = budget
        self.is_waiting = False  # "starting", but not yet asked to
        self.done = 0  # tokens of answers, since there was no work
        self.past = EngineStats()  # of those before the last restart
        self._settled = 0  # tokens of all answers since the last start

    @property
    def has_weights(self) -> bool:
        return bool(getattr(self.engine, "has_weights", lambda: True)())

    def settle(self, completion: Completion) -> None:
        self.ledger.settle(completion)
        self.done += len(completion.token_ids)
        self._settled += len(completion.token_ids)

    @property
    def running_tokens(self) -> int:
        """That it has made for requests which go on."""
        return max(0, self.engine.stats().generated_tokens - self._settled) if self.ledger.held else 0

    @property
    def outstanding_tokens(self) -> int:
        return sum(map(size, self.ledger.held.values())) - self.running_tokens

    def progress(self) -> EngineProgress:
        done = self.done + self.running_tokens
        expected = self.done + sum(request.sampling.max_new_tokens for request in self.ledger.held.values())
        return EngineProgress(self.name, done, expected, self.state != "up")

    def begin_anew(self) -> None:
        self.past, self._settled = EngineStats.total([self.past, self.engine.stats()]), 0


def size(request: Request) -> int:
    """Tokens that it may come to."""
    return len(request.prompt_ids) + request.sampling.max_new_tokens


def units_of(requests: Iterable[Request]) -> list[list[Request]]:
    """Requests of one group together, in the order of their first."""
    units: dict[str, list[Request]] = {}
    for request in requests:
        units.setdefault(request.group, []).append(request)
    return list(units.values())


def cancelled_completion(request: Request) -> Completion:
    """Of a request that no engine began."""
    return Completion(request.request_id, request.group, (), (), (), FinishReason.CANCELLED)
