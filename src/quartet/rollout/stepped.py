"""A step engine as a rollout engine: it computes in the thread that waits for completions. Without torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from quartet.config import UserError
from quartet.rollout.protocol import Completion, EngineStats, Generated, Request, StepEngine

if TYPE_CHECKING:
    from quartet.weights.sink import TensorSink


@runtime_checkable
class Sleeper(Protocol):
    """A step engine that can give up memory."""

    def sleep(self, level: Literal[1, 2]) -> None: ...

    def wake(self) -> None: ...


class SteppedEngine:
    """Drives ``engine``; closing it leaves that as it is."""

    def __init__(self, engine: StepEngine) -> None:
        self.engine = engine
        self._is_paused = False

    def submit(self, requests: Sequence[Request]) -> None:
        self.engine.submit(requests)

    @property
    def can_step(self) -> bool:
        """Whether there is work, and no pause."""
        return not self._is_paused and self.engine.has_work

    def completed(self, timeout_s: float) -> list[Completion]:
        """As the protocol has it; makes at least one step where it can, however short the time is."""
        end = time.monotonic() + timeout_s
        done: list[Completion] = []
        while not done and self.can_step:
            done = self.engine.step()
            if time.monotonic() >= end:
                break
        return done

    def cancel(self, request_ids: Iterable[str]) -> None:
        self.engine.cancel(request_ids)

    def generated(self, request_ids: Iterable[str]) -> dict[str, Generated]:
        return self.engine.generated(request_ids)

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def weight_sink(self) -> TensorSink:
        return self.engine.weight_sink()

    def sleep(self, level: Literal[1, 2]) -> None:
        self._sleeper().sleep(level)

    def wake(self) -> None:
        self._sleeper().wake()

    def _sleeper(self) -> Sleeper:
        if not isinstance(self.engine, Sleeper):
            raise UserError(
                "the rollout engine cannot sleep",
                found=type(self.engine).__name__,
                remedy="use an engine that gives up memory, or a placement that asks for none",
            )
        return self.engine

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def close(self) -> None:
        """Nothing was started."""
