"""A rollout engine as a step engine, for who drives either: a step waits until something has ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from quartet.rollout.protocol import Completion, EngineStats, Generated, GenerationError, Request, RolloutEngine
from quartet.weights.sink import TensorSink, write_into


class PacedEngine:
    """
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
        write_into(self.weight_sink(), source or (), version)

    def weight_sink(self) -> TensorSink:
        return self.engine.weight_sink()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def generated(self, request_ids: Iterable[str]) -> dict[str, Generated]:
        return self.engine.generated(request_ids)
