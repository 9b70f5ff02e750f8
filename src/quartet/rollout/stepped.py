"""Between the two protocols: a step engine as a rollout engine, and a rollout engine as a step engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from quartet.rollout.protocol import (
    Completion,
    EngineStats,
    Generated,
    GenerationError,
    Request,
    RolloutEngine,
    StepEngine,
)

if TYPE_CHECKING:
    from torch import Tensor

    from quartet.weights.sink import TensorSink


class SteppedEngine:
    """A step engine that computes in the thread which waits for completions; closing it leaves that as it is."""

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
        engine: Any = self.engine
        engine.sleep(level)

    def wake(self) -> None:
        engine: Any = self.engine
        engine.wake()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def close(self) -> None:
        """Nothing was started."""


class PacedEngine:
    """A rollout engine whose steps wait until something has ended.

    Args:
        engine: generates at its own pace, between steps, too.
        step_s: longest step.
    """

    def __init__(self, engine: RolloutEngine, step_s: float = 1.0) -> None:
        self.engine = engine
        self.step_s = step_s
        self._held: set[str] = set()

    def submit(self, requests: Sequence[Request]) -> None:
        self.engine.submit(requests)
        self._held.update(request.request_id for request in requests)

    def note(self, request_ids: Iterable[str]) -> None:
        """These were submitted to the engine by other ways, and are waited for."""
        self._held.update(request_ids)

    @property
    def has_work(self) -> bool:
        return bool(self._held)

    def step(self) -> list[Completion]:
        try:
            done = self.engine.completed(self.step_s)
        except GenerationError as error:
            self._held.difference_update(error.request_ids)
            raise
        self._held.difference_update(completion.request_id for completion in done)
        return done

    def cancel(self, request_ids: Iterable[str]) -> None:
        self.engine.cancel(request_ids)

    def update_weights(self, source: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        from quartet.weights.in_process import write_into

        write_into(self.weight_sink(), source or (), version)

    def weight_sink(self) -> TensorSink:
        return self.engine.weight_sink()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def generated(self, request_ids: Iterable[str]) -> dict[str, Generated]:
        return self.engine.generated(request_ids)
