"""What a rollout worker keeps of what was sampled: until its group is made, and no longer.

An engine's host that a former driver left in the middle of its work serves the next one as if nothing had been.

The worker of engines that generate at their own pace: slices of time, pauses, sleep, canaries of every engine.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import pytest
import torch

from quartet.batch.ragged import RaggedBatch
from quartet.batch.trajectory import TrajectoryEnd
from quartet.config import UserError
from quartet.config.common import OffloadConfig
from quartet.envs.episode import FinishedEpisode
from quartet.envs.protocol import Observation
from quartet.envs.transcript import EpisodeLimits, ObservedState, StateError
from quartet.extras.simulation.simulation import Cost, TimedCodec, TimedEngine
from quartet.rollout.protocol import (
    Completion,
    EngineStats,
    FinishReason,
    GenerationError,
    Request,
    SamplingParams,
    StepEngine,
    SteppedEngine,
)
from quartet.rollout.router import Router
from quartet.schedule.groups import split_by_group
from quartet.schedule.rollout_worker import (
    FinishedRequest,
    PromptRequest,
    RequestStore,
    RolloutWorker,
    ServedRolloutWorker,
    TurnRequest,
)
from quartet.schedule.weight_sync import CanarySpec
from quartet.text.tokenizer import TextCodec
from quartet.weights.sink import TensorSink
from quartet.weights.sync import WeightOffer


class Letters:
    """A token per character."""

    eos_ids: frozenset[int] = frozenset()

    def encode_prompt(self, prompt: str) -> list[int]:
        if not prompt:
            raise UserError("the prompt has no tokens", found="''", remedy="give it some text")
        return self.encode_continuation(prompt)

    def encode_continuation(self, text: str, pictures: Sequence[Any] = ()) -> list[int]:
        return [ord(letter) for letter in text]

    def decode_completion(self, prompt_ids: Sequence[int], ids: Sequence[int], *, whole: bool = False) -> str:
        return "".join(map(chr, ids))


CODEC = cast(TextCodec, Letters())
LIMITS = EpisodeLimits(max_turns=4, max_sequence_tokens=8)


class Engine(TimedEngine):
    """Refuses prompts with a question mark, and fails on requests that are poisoned."""

    def __init__(self) -> None:
        super().__init__(Cost(), 9)
        self.poisoned: set[str] = set()

    def submit(self, requests: Sequence[Request]) -> None:
        if any(ord("?") in request.prompt_ids for request in requests):
            raise UserError("refused", found="?", remedy="none")
        super().submit(requests)

    def step(self) -> list[Completion]:
        for request_id in self.poisoned & self.held.keys():
            del self.held[request_id]
            raise GenerationError("not finite", [request_id])
        return super().step()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def worker(engine: Engine) -> RolloutWorker:
    return RolloutWorker(cast(StepEngine, engine), CODEC)


def kept(of: RolloutWorker | RequestStore) -> set[str]:
    """Names of all that is kept."""
    held: dict[str, Any] = vars(of._requests if isinstance(of, RolloutWorker) else of)
    return {name for values in held.values() if isinstance(values, dict) for name in values}


def asked(group: str, prompt: str, *lengths: int) -> PromptRequest:
    samples = {f"{group}.{r}": SamplingParams(max_new_tokens=length) for r, length in enumerate(lengths)}
    return PromptRequest(group, prompt, samples)


def turn(number: int, state: Any, *, rewrites: bool = False, reward: float | None = None, most: int = 2) -> TurnRequest:
    seen = ObservedState(Observation(state, rewrites=rewrites), reward)
    return TurnRequest(f"0.0.{number}", "0.0", seen, SamplingParams(max_new_tokens=most), LIMITS)


def completion(request_id: str, text: str, text_end: int | None = None) -> Completion:
    ids, num = tuple(map(ord, text)), len(text)
    return Completion(request_id, "0", ids, (-0.5,) * num, (3,) * num, FinishReason.STOP, text_end)


def texts(batch: RaggedBatch) -> list[str]:
    """Of whole sequences."""
    return ["".join(map(chr, batch.token_ids(s))) for s in range(len(batch))]


def test_a_group_has_its_tokens_and_nothing_of_it_is_kept() -> None:
    sampled = RequestStore(CODEC)
    requests = sampled.engine_requests(asked("0", "hi", 4, 4))
    assert [(r.request_id, r.group, r.prompt_ids) for r in cast(list[Request], requests)] == [
        ("0.0", "0", (104, 105)), ("0.1", "0", (104, 105))
    ]  # fmt: skip
    sampled.engine_requests(asked("1", "other", 4))
    assert sampled.ended(completion("0.1", "no")) == FinishedRequest("0.1"), "its text comes with the group"
    sampled.ended(completion("0.0", "yes.", 3))
    batch = sampled.responses(7, ["0.0", "0.1"])
    assert batch.ids == ("7.0", "7.1") and texts(batch) == ["hiyes.", "hino"]
    assert batch.objects["completion"] == ("yes", "no") and kept(sampled) == {"1.0"}


def test_the_greedy_baseline_stands_behind_the_others() -> None:
    sampled = RequestStore(CODEC)
    sampled.engine_requests(asked("0", "hi", 4, 4, 4))
    for r in range(3):
        sampled.ended(completion(f"0.{r}", str(r)))
    batch = sampled.responses(7, ["0.0", "0.2"], greedy="0.1")
    assert batch.ids == ("7.0", "7.1", "7.greedy") and batch.objects["completion"] == ("0", "2", "1")
    assert batch.sequence["greedy"].tolist() == [False, False, True] and not kept(sampled)


def test_an_episode_goes_on_in_text_and_its_tokens_stay() -> None:
    sampled = RequestStore(CODEC)
    (first,) = cast(list[Request], sampled.engine_requests(turn(0, "ab", rewrites=True, most=9)))
    assert first.prompt_ids == (97, 98) and first.sampling.max_new_tokens == 6, "no more than there is room for"
    assert sampled.ended(completion("0.0.0", "xy")) == FinishedRequest("0.0.0", text="xy")
    (second,) = cast(list[Request], sampled.engine_requests(turn(1, "c", reward=0.5)))
    assert second.prompt_ids == tuple(map(ord, "abxyc")) and second.sampling.max_new_tokens == 2
    sampled.ended(completion("0.0.1", "z"))
    batch = sampled.episodes(7, [FinishedEpisode("0.0", TrajectoryEnd.DONE, 2.5, 2.0)], 0)
    assert texts(batch) == ["abxycz"] and batch.sequence["reward/environment"].tolist() == [2.5]
    assert batch.token["step_reward/environment"].tolist() == [0, 0, 0, 0.5, 0, 2.0]
    assert batch.token["action_mask"].tolist() == [False, False, True, True, False, True]
    assert not kept(sampled)


def test_a_turn_without_room_ends_at_once_and_leaves_its_episode(worker: RolloutWorker) -> None:
    worker.run_steps([turn(0, "abcd", rewrites=True)], (), 2)
    outputs = worker.run_steps([turn(1, "efgh", reward=1.0)], (), 1)
    assert outputs.ended == (FinishedRequest("0.0.1", held=10),) and not outputs.failed and not outputs.sampled
    assert kept(worker) == {"0.0"}
    batch = worker.episodes(0, [FinishedEpisode("0.0", TrajectoryEnd.CONTEXT, 1.0, None)])
    assert len(batch.token_ids(0)) == 6, "less the observation that nothing answers"
    assert batch.token["step_reward/environment"].tolist()[-1] == 1.0 and not kept(worker)


@pytest.mark.parametrize("state", ["", [{"role": "user", "content": "x"}]])
def test_a_state_that_cannot_be_tokenised_is_refused_with_its_kind(worker: RolloutWorker, state: Any) -> None:
    """Messages for a state of text, and none at all."""
    worker.run_steps([turn(0, "a", rewrites=True)], (), 2) if state else None
    outputs = worker.run_steps([turn(1, state, rewrites=not state)], (), 1)
    ((request_ids, error),) = outputs.failed
    assert request_ids == ("0.0.1",) and type(error) is StateError and not outputs.ended
    assert not kept(worker), "nor the turns before"


def test_what_is_refused_is_not_kept(worker: RolloutWorker) -> None:
    refused = worker.run_steps([asked("0", "?", 1, 1), asked("1", "", 1), turn(0, "?", rewrites=True)], (), 3).failed
    assert [request_ids for request_ids, _ in refused] == [("0.0", "0.1"), ("1.0",), ("0.0.0",)]
    assert {type(error) for _, error in refused} == {UserError} and not kept(worker)
    with pytest.raises(UserError, match="refused"):
        worker.answers([asked("0", "hi", 1), asked("1", "?", 1)], [0, 1])
    with pytest.raises(UserError, match="no tokens"):
        worker.answers([asked("0", "hi", 1), asked("1", "", 1)], [0, 1])
    assert not kept(worker)


def test_what_is_cancelled_is_not_kept_whether_it_has_ended_or_not(worker: RolloutWorker) -> None:
    outputs = worker.run_steps(
        [asked("0", "hi", 1, 9), asked("1", "ho", 9), turn(0, "a", rewrites=True, most=5)], (), 2
    )
    assert [ended.request_id for ended in outputs.ended] == ["0.0"]
    assert not worker.run_steps((), ("0.0", "0.1", "0.0.0"), 1).ended and kept(worker) == {"1.0"}
    again = worker.run_steps([asked("0", "hi", 1, 1)], (), 2)
    assert [ended.request_id for ended in again.ended] == ["0.0", "0.1"], "the names may be used again"
    worker.responses(0, ["0.0", "0.1"])
    assert kept(worker) == {"1.0"}
    worker.begin()
    assert not kept(worker)


def test_what_failed_is_not_kept(worker: RolloutWorker, engine: Engine) -> None:
    engine.poisoned = {"0.1", "0.0.0"}
    failed = set()
    submit = [asked("0", "hi", 3, 3), turn(0, "a", rewrites=True)]
    for _ in range(2):
        outputs = worker.run_steps(submit, (), 3)
        ((request_ids, error),) = pickle.loads(pickle.dumps(outputs)).failed
        assert type(error) is GenerationError and error.request_ids == request_ids and error.remedy
        failed.update(request_ids)
        submit = []
    assert failed == {"0.1", "0.0.0"} and kept(worker) == {"0.0"}, "its sibling goes on until it is cancelled"
    worker.run_steps((), ("0.0", "0.1"), 0)
    assert not kept(worker)
    engine.poisoned = {"2.0"}
    with pytest.raises(GenerationError):
        worker.answers([asked("1", "hi", 3), asked("2", "hi", 3)], [0, 1])
    assert not kept(worker)


def test_answers_are_groups_under_their_own_indices(worker: RolloutWorker) -> None:
    batch = worker.answers([asked("eval.0", "hi", 3, 1), asked("eval.1", "you", 2)], [4, 2])
    assert batch.ids == ("4.0", "4.1", "2.0") and batch.sequence["group"].tolist() == [4, 4, 2]
    assert [len(ids) for ids in map(batch.token_ids, range(3))] == [5, 3, 5]
    prompts = {i: texts(of)[0][: -len(of.objects["completion"][0])] for i, of in split_by_group(batch).items()}
    assert prompts == {4: "hi", 2: "you"}
    assert not kept(worker)


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


SINK = TensorSink([("w", torch.zeros(2))])
PROBE = CanarySpec("p", 3, tolerance=1e-3)


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
    router = Router([Noted(cast(Any, engine)) for engine in engines])
    worker = ServedRolloutWorker(
        router,
        cast(TextCodec, TimedCodec()),
        weight_bytes=10,
        lease_s=lease_s,
        shares_devices=shares,
        sleep_level=level,
    )
    return worker, engines


def asked_of_rollout(group: int, *lengths: int) -> PromptRequest:
    samples = {f"{group}.{i}": SamplingParams(max_new_tokens=n) for i, n in enumerate(lengths)}
    return PromptRequest(str(group), "", samples)


def ended(outputs: Any) -> list[str]:
    return [one.request_id for one in outputs.ended]


def test_a_call_ends_with_a_group_and_pauses_engines_that_share_devices() -> None:
    worker, engines = made()
    first = worker.run_steps([asked_of_rollout(0, 2, 3), asked_of_rollout(1, 5000, 5000)], (), 1)
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
    worker.run_steps([asked_of_rollout(0, 2), asked_of_rollout(1, 9)], (), 1)
    assert all(engine.log == [] for engine in engines)


def test_a_slice_of_time_ends_a_call_without_anything() -> None:
    worker, engines = made(lease_s=1e-9)
    outputs = worker.run_steps([asked_of_rollout(0, 50)], (), 1)
    assert (ended(outputs), outputs.steps_left) == ([], 0)
    assert engines[0].held.keys() | engines[1].held.keys() == {"0.0"}


def test_every_engine_sings_and_weights_come_in_a_pause() -> None:
    worker, engines = made(3, shares=False)
    worker.run_canary(PROBE, "canary")
    probed = worker.canary()
    assert len(probed) == 3
    assert len(set(probed.ids)) == 3
    assert int(probed.token["loss_mask"].sum()) == 9
    offer = WeightOffer("shared", 1, (), {"sender": "elsewhere"}, 0, 1.0, "here")
    with pytest.raises(KeyError):  # no trainer is here
        worker.receive_weights(offer, 0)
    assert all(engine.log[-1] == "pause" for engine in engines)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_in_order(level: Literal[1, 2]) -> None:
    worker, engines = made(level=level)
    worker.make_offloadable(OffloadConfig())
    assert worker.sizes() == {"generate": 10}
    worker.run_canary(PROBE, "canary")
    assert (worker.offload().num_bytes, worker.offload().num_bytes) == (10, 0)
    assert (worker.onload("generate").num_bytes, worker.onload("generate").num_bytes) == (10, 0)
    assert [engine.log for engine in engines] == [["pause", f"sleep {level}", "wake"]] * 2
    assert ended(worker.run_steps([asked_of_rollout(0, 2)], (), 1)) == ["0.0"]


def test_a_refused_request_fails_alone() -> None:
    worker, engines = made(1)

    def refuse(requests: Sequence[Any]) -> None:
        if any(request.group == "1" for request in requests):
            raise UserError("refused", found="it", remedy="none")
        TimedEngine.submit(engines[0], requests)

    engines[0].submit = refuse  # type: ignore[method-assign]
    outputs = worker.run_steps([asked_of_rollout(0, 2), asked_of_rollout(1, 2)], (), 1)
    assert ended(outputs) == ["0.0"]
    ((ids, error),) = outputs.failed
    assert ids == ("1.0",)
    assert error.problem == "refused"


def test_what_ended_for_a_former_driver_is_no_answer_to_the_next_one() -> None:
    worker, engines = made(1, shares=False, lease_s=1e-9)
    worker.run_steps([asked_of_rollout(0, 2)], (), 1)
    while not worker._router._done:  # it has ended, and was not handed over yet
        worker._router._collect(worker._router._members[0])
    worker.begin()
    engines[0].update_weights(None, 7)
    worker._lease_s = 5.0
    assert ended(worker.run_steps([asked_of_rollout(0, 3)], (), 1)) == ["0.0"]
    assert worker.responses(0, ["0.0"]).token["policy_version"].tolist()[-3:] == [7] * 3
