"""What a rollout worker keeps of what was sampled: until its group is made, and no longer."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, cast

import pytest

from quartet.batch.ragged import RaggedBatch
from quartet.batch.trajectory import TrajectoryEnd
from quartet.config import UserError
from quartet.envs.episode import FinishedEpisode
from quartet.envs.protocol import Observation
from quartet.envs.transcript import EpisodeLimits, Seen, StateError
from quartet.extras.simulation.simulation import Cost, TimedEngine
from quartet.rollout.protocol import Completion, FinishReason, GenerationError, Request, SamplingParams, StepEngine
from quartet.schedule.groups import by_group
from quartet.schedule.rollout_worker import (
    FinishedRequest,
    PromptRequest,
    RequestStore,
    RolloutWorker,
    TurnRequest,
)
from quartet.text.tokenizer import TextCodec


class Letters:
    """A token per character."""

    eos_ids: frozenset[int] = frozenset()

    def encode_prompt(self, prompt: str) -> list[int]:
        if not prompt:
            raise UserError("the prompt has no tokens", found="''", remedy="give it some text")
        return self.encode_continuation(prompt)

    def encode_continuation(self, text: str) -> list[int]:
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
    seen = Seen(Observation(state, rewrites=rewrites), reward)
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
    assert {index: texts(of)[0][: -len(of.objects["completion"][0])] for index, of in by_group(batch).items()} == {
        4: "hi", 2: "you"
    }  # fmt: skip
    assert not kept(worker)
