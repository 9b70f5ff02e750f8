"""An engine's host that a former driver left in the middle of its work serves the next one as if nothing had been."""

from __future__ import annotations

from dataclasses import replace

from quartet.extras.simulation.simulation import TimedCodec
from quartet.rollout.protocol import Completion, EngineStats, FinishReason, Request, SamplingParams
from quartet.schedule.rollout_worker import PromptRequest, RolloutWorker


class Endless:
    """Holds what it is given; the first token of a request is also its last when it is asked to end."""

    def __init__(self) -> None:
        self.held: dict[str, Request] = {}
        self.ready: list[Completion] = []
        self.counted = EngineStats()

    def submit(self, requests: list[Request]) -> None:
        for request in requests:
            assert request.request_id not in self.held, "submitted twice"
            self.held[request.request_id] = request

    def cancel(self, ids: tuple[str, ...]) -> None:
        for name in ids:
            if (request := self.held.pop(name, None)) is not None:
                self.ready.append(Completion(name, request.group, (), (), (), FinishReason.CANCELLED))

    @property
    def has_work(self) -> bool:
        return bool(self.held or self.ready)

    def step(self) -> list[Completion]:
        self.counted = replace(self.counted, generated_tokens=self.counted.generated_tokens + len(self.held))
        ready, self.ready = self.ready, []
        return ready

    def stats(self) -> EngineStats:
        return self.counted


def test_what_a_former_driver_left_is_given_up() -> None:
    engine = Endless()
    host = RolloutWorker(engine, TimedCodec())  # type: ignore[arg-type]
    asked = PromptRequest("0", "", {f"0.{r}": SamplingParams() for r in range(2)})
    host.run_steps([asked], (), 3)
    assert host.begin().generated_tokens == 6, "its counts go on"
    assert not engine.held
    again = host.run_steps([asked], (), 2)
    assert again.sampled == 4 and not again.failed
    assert not again.ended, "what was cancelled belongs to nobody"
