"""The worker of engines that generate at their own pace: slices of time, pauses, sleep, canaries of every engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import pytest
import torch

from quartet.config import UserError
from quartet.config.cluster import OffloadConfig
from quartet.extras.simulation.cost_model import Cost
from quartet.extras.simulation.simulation import TimedCodec, TimedEngine
from quartet.rollout.protocol import Completion, FinishReason, SamplingParams
from quartet.rollout.router import Router
from quartet.rollout.stepped import SteppedEngine
from quartet.schedule.rollout_worker import PromptRequest, SampleRequest, ServedRolloutWorker
from quartet.schedule.weight_sync import CanaryProbe
from quartet.text.tokenizer import TextCodec
from quartet.weights.manifest import WeightSyncError
from quartet.weights.sink import TensorSink
from quartet.weights.sync import Offer

SINK = TensorSink([("w", torch.zeros(2))])
PROBE = CanaryProbe("p", 3, tolerance=1e-3)


class Slow(TimedEngine):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__(Cost(), max_running=64)
        self.log: list[str] = []

    def weight_sink(self) -> TensorSink:
        return SINK

    def sleep(self, level: Literal[1, 2]) -> None:
        self.log.append(f"sleep {level}")

    def wake(self) -> None:
        self.log.append("wake")


class Noted(SteppedEngine):
    def pause(self) -> None:
        cast(Slow, self.engine).log.append("pause")
        super().pause()

    def resume(self) -> None:
        cast(Slow, self.engine).log.append("resume")
        super().resume()


def made(
    num: int = 2, *, shares: bool = True, level: Literal[1, 2] = 1, lease_s: float = 5.0
) -> tuple[ServedRolloutWorker, list[Slow]]:
    engines = [Slow() for _ in range(num)]
    router = Router([Noted(cast(Any, engine)) for engine in engines], policy="least_tokens")
    worker = ServedRolloutWorker(
        router,
        cast(TextCodec, TimedCodec()),
        weight_bytes=10,
        lease_s=lease_s,
        shares_devices=shares,
        sleep_level=level,
    )
    return worker, engines


def asked(group: int, *lengths: int) -> PromptRequest:
    samples = [SampleRequest(f"{group}.{i}", SamplingParams(max_new_tokens=n)) for i, n in enumerate(lengths)]
    return PromptRequest(str(group), "", tuple(samples))


def ended(outputs: Any) -> list[str]:
    return [one.request_id for one in outputs.ended]


def test_a_call_ends_with_a_group_and_pauses_engines_that_share_devices() -> None:
    worker, engines = made()
    first = worker.run_steps([asked(0, 2, 3), asked(1, 5000, 5000)], (), 1)
    assert ended(first) == ["0.0", "0.1"]
    assert first.steps_left == 0
    assert {"0.0", "0.1"}.isdisjoint(engines[0].held.keys() | engines[1].held.keys())
    assert all(engine.log[-1] == "pause" for engine in engines)
    second = worker.run_steps((), (), 1)
    assert sorted(ended(second)) == ["1.0", "1.1"]
    assert [engine.log for engine in engines] == [["pause", "resume", "pause"]] * 2
    assert first.sampled + second.sampled == second.stats.generated_tokens == 10005
    batch = worker.responses(1, ["1.0", "1.1"])
    assert len(batch) == 2


def test_engines_of_their_own_devices_go_on() -> None:
    worker, engines = made(shares=False)
    worker.run_steps([asked(0, 2), asked(1, 9)], (), 1)
    assert all(engine.log == [] for engine in engines)


def test_a_slice_of_time_ends_a_call_without_anything() -> None:
    worker, engines = made(lease_s=1e-9)
    outputs = worker.run_steps([asked(0, 50)], (), 1)
    assert (ended(outputs), outputs.steps_left) == ([], 0)
    assert outputs.progress is not None
    assert outputs.progress.expected == 50
    assert engines[0].held.keys() | engines[1].held.keys() == {"0.0"}


def test_what_is_stopped_begins_anew_and_what_is_cancelled_does_not() -> None:
    worker, engines = made(1, lease_s=1e-9)
    worker.run_steps([asked(0, 4), asked(1, 4)], (), 1)
    assert ended(worker.stop_running()) == []
    assert engines[0].held == {}
    worker._lease_s = 5.0
    engines[0].update_weights(None, 7)
    outputs = worker.run_steps((), ["1.0"], 1)
    assert ended(outputs) == ["0.0"]
    assert worker.responses(0, ["0.0"]).token["policy_version"].tolist()[-4:] == [7] * 4


def test_every_engine_sings_and_weights_come_in_a_pause() -> None:
    worker, engines = made(3, shares=False)
    worker.run_canary(PROBE, "canary")
    probed = worker.canary()
    assert len(probed) == 3
    assert len(set(probed.ids)) == 3
    assert int(probed.token["loss_mask"].sum()) == 9
    offer = Offer("shared", 1, (), {"sender": "elsewhere"}, 0, 1.0, "here")
    assert isinstance(worker.receive_weights(offer, 0), WeightSyncError)  # no trainer is here
    assert all(engine.log[-1] == "pause" for engine in engines)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_in_order_and_the_canary_afterwards(level: Literal[1, 2]) -> None:
    worker, engines = made(level=level)
    worker.make_offloadable(OffloadConfig())
    assert worker.sizes() == {"generate": 10}
    worker.run_canary(PROBE, "canary")
    assert (worker.offload().num_bytes, worker.offload().num_bytes) == (10, 0)
    assert (worker.onload("generate").num_bytes, worker.onload("generate").num_bytes) == (10, 0)
    assert [engine.log for engine in engines] == [["pause", f"sleep {level}", "wake"]] * 2
    before = engines[0].stats().num_steps
    assert ended(worker.run_steps([asked(0, 2)], (), 1)) == ["0.0"]
    assert engines[0].stats().num_steps > before
    worker.offload()
    worker.onload("generate")
    engines[1].num_updates = 1  # computes with other weights than before
    with pytest.raises(UserError, match="woken or started anew computes with other weights"):
        worker.run_steps([asked(1, 2)], (), 1)


def test_a_refused_request_fails_alone() -> None:
    worker, engines = made(1)

    def refuse(requests: Sequence[Any]) -> None:
        if any(request.group == "1" for request in requests):
            raise UserError("refused", found="it", remedy="none")
        TimedEngine.submit(engines[0], requests)

    engines[0].submit = refuse  # type: ignore[method-assign]
    outputs = worker.run_steps([asked(0, 2), asked(1, 2)], (), 1)
    assert ended(outputs) == ["0.0"]
    ((ids, error),) = outputs.failed
    assert ids == ("1.0",)
    assert error.problem == "refused"


def test_answers_of_an_engine_that_does_nothing_else() -> None:
    worker, _ = made()
    batch = worker.answers([asked(0, 2, 3), asked(1, 1)], [4, 5])
    assert batch.sequence["group"].tolist() == [4, 4, 5]


def test_an_engine_that_comes_back_late_is_asked_the_canary() -> None:
    worker, engines = made(2, shares=False)
    router = worker._router
    away = router._members[1]
    away.state = "starting"
    is_ready = False
    cast(Any, away.engine).is_ready = lambda: is_ready
    worker.run_canary(PROBE, "canary")
    assert len(worker.canary()) == 1
    worker.run_steps([asked(0, 2)], (), 1)
    is_ready, engines[1].num_updates = True, 1  # it has other weights
    worker.run_steps([asked(1, 2)], (), 1)
    with pytest.raises(UserError, match="woken or started anew computes with other weights"):
        worker.run_steps([asked(2, 2)], (), 1)


def test_what_ended_for_a_former_driver_is_no_answer_to_the_next_one() -> None:
    worker, engines = made(1, shares=False, lease_s=1e-9)
    worker.run_steps([asked(0, 2)], (), 1)
    while not worker._router._done:  # it has ended, and was not handed over yet
        worker._router._collect(worker._router._members[0])
    worker.begin()
    engines[0].update_weights(None, 7)
    worker._lease_s = 5.0
    assert ended(worker.run_steps([asked(0, 3)], (), 1)) == ["0.0"]
    assert worker.responses(0, ["0.0"]).token["policy_version"].tolist()[-3:] == [7] * 3


def test_late_and_cancelled_completions_are_nobodys() -> None:
    worker, _ = made(1)
    late = Completion("9.9", "9", (1,), (0.0,), (0,), FinishReason.CANCELLED)
    assert worker._ended([late]) == []
