"""How an episode goes: turns, limits, failures of the environment, and what is left behind."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quartet.batch.trajectory import STEP_PREFIX, Trajectory, TrajectoryEnd
from quartet.config import plugins
from quartet.config.errors import UserError
from quartet.config.recipe import EnvironmentConfig
from quartet.envs.episode import ContextFull, EpisodeError, run_episode
from quartet.envs.protocol import EnvironmentFactory, Item, Observation, StepResult, environment_factory
from quartet.envs.transcript import SOURCE as ENVIRONMENT
from quartet.envs.transcript import Action, EpisodeLimits, ObservedState, Transcript
from quartet.observe.global_state import EXCLUSIVE
from quartet.text.tokenizer import TextCodec

ITEM = Item("begin", {"answer": 3}, "row7", seed=11)
STEPS = STEP_PREFIX + ENVIRONMENT


class Counting:
    """``turns`` turns of text; keeps what it was given."""

    def __init__(self, turns: int = 3, rewards: tuple[float | None, ...] = (0.5, None, 1.0)) -> None:
        self.turns, self.rewards = turns, rewards
        self.seen: list[Any] = []
        self.closed = 0

    async def reset(self, item: Item) -> str:
        self.seen.append(item)
        return item.prompt + ":"

    async def step(self, action: str) -> StepResult:
        self.seen.append(action)
        turn = len(self.seen) - 2
        done = turn == self.turns - 1
        return StepResult(None if done else f" {turn}:", self.rewards[turn % len(self.rewards)], done)

    async def close(self) -> None:
        self.closed += 1


class Scripted:
    """An engine that answers turn ``t`` with its ``t``-th text, cut to what it may emit."""

    def __init__(self, codec: TextCodec, texts: list[str]) -> None:
        self.codec, self.texts = codec, texts
        self.asked: list[tuple[tuple[int, ...], int, int]] = []

    async def __call__(self, token_ids: tuple[int, ...], turn: int, max_new_tokens: int) -> Action:
        self.asked.append((token_ids, turn, max_new_tokens))
        ids = tuple(self.codec.encode_continuation(self.texts[turn]))[:max_new_tokens]
        return Action(ids, (-1.0,) * len(ids), (0,) * len(ids), "length")


async def played(make: EnvironmentFactory, generate: Any, codec: TextCodec, limits: EpisodeLimits) -> Trajectory:
    """An episode in text, and the tokens of its transcript."""
    transcript = Transcript(codec)

    async def act(turn: int, seen: ObservedState) -> str:
        transcript.see(seen)
        room = transcript.room(limits)
        if room < 1:
            raise ContextFull(len(transcript.token_ids))
        return transcript.act(await generate(transcript.token_ids, turn, room))

    ending = await run_episode("0.0", make, ITEM, act, limits)
    if ending.reward is not None:
        transcript.earn(ending.reward)
    return Trajectory(transcript.sequences(), ending.end, {ENVIRONMENT: ending.score})


def play(environment: Any, generate: Any, codec: TextCodec, **limits: Any) -> Trajectory:
    values = {"max_turns": 5, "max_sequence_tokens": 100, **limits}
    return asyncio.run(played(EnvironmentFactory(lambda: environment), generate, codec, EpisodeLimits(**values)))


def earned(episode: Trajectory) -> float:
    return episode.scores[ENVIRONMENT]


def test_an_episode_from_reset_to_done(plain: TextCodec) -> None:
    environment, generate = Counting(), Scripted(plain, ["a", "bb", "c"])
    episode = play(environment, generate, plain)
    assert environment.seen == [ITEM, "a", "bb", "c"] and environment.closed == 1
    assert (episode.num_turns, earned(episode), episode.end) == (3, 1.5, TrajectoryEnd.DONE)
    (only,) = episode.sequences
    assert plain.decode((*only.prompt_ids, *only.token_ids)) == "begin:a 0:bb 1:c"
    assert only.columns[STEPS] == (0.5, *[0.0] * 3, *[0.0] * 2, *[0.0] * 3, 1.0)
    for token_ids, turn, room in generate.asked:
        assert room == 100 - len(token_ids)
        assert plain.decode(token_ids) == "begin:a 0:bb 1:"[: (6, 10, 15)[turn]]


def test_without_rewards_there_is_none(plain: TextCodec) -> None:
    assert math.isnan(play(Counting(rewards=(None,)), Scripted(plain, ["a"] * 3), plain).scores["environment"])
    assert earned(play(Counting(rewards=(0.0,)), Scripted(plain, ["a"] * 3), plain)) == 0.0


def test_max_turns_cut_an_episode_off(plain: TextCodec) -> None:
    environment = Counting(turns=9)
    episode = play(environment, Scripted(plain, ["a"] * 9), plain, max_turns=2)
    assert (episode.num_turns, episode.end, environment.closed) == (2, TrajectoryEnd.MAX_TURNS, 1)


@pytest.mark.parametrize(("limit", "turns"), [(10, 1), (11, 2)])
def test_an_episode_that_no_longer_fits_is_cut_off(plain: TextCodec, limit: int, turns: int) -> None:
    """``begin:`` has 6 tokens; an action 1, an observation 3."""
    episode = play(Counting(turns=9), Scripted(plain, ["a"] * 9), plain, max_sequence_tokens=limit)
    assert (episode.num_turns, episode.end) == (turns, TrajectoryEnd.MAX_TURNS if turns == 5 else TrajectoryEnd.CONTEXT)
    assert all(len(s.prompt_ids) + len(s.token_ids) <= limit for s in episode.sequences)


class Rewriting(Counting):
    async def step(self, action: str) -> StepResult:
        result = await super().step(action)
        return StepResult(Observation(f"state {len(self.seen)}", rewrites=True), result.reward, result.done)


def test_a_limit_on_all_sequences_together(plain: TextCodec) -> None:
    """``begin:`` and an action are 7 tokens, a later state and its action 8."""
    for limit, turns in ((22, 2), (23, 3)):
        episode = play(Rewriting(turns=9), Scripted(plain, ["a"] * 9), plain, max_tokens=limit)
        assert (episode.num_turns, len(episode.sequences), episode.end) == (turns, turns, TrajectoryEnd.CONTEXT)
        assert [s.columns[STEPS] for s in episode.sequences] == [(0.5,), (0.0,), (1.0,)][:turns], "each of its action"


def test_a_first_state_without_room_is_refused(plain: TextCodec) -> None:
    environment = Counting()
    with pytest.raises(UserError, match="no room") as raised:
        play(environment, Scripted(plain, []), plain, max_sequence_tokens=6)
    assert "6 tokens of at most 6" in raised.value.found and "row7" in raised.value.found
    assert environment.closed == 1


# Failures ------------------------------------------------------------------------------------------------


class Failing(Counting):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    async def step(self, action: str) -> Any:
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (asyncio.CancelledError(), "`step` raised CancelledError"),
        (SystemExit(0), "`step` raised SystemExit: 0"),
        (GeneratorExit("over"), "`step` raised RuntimeError: it raised GeneratorExit"),
        (ZeroDivisionError("by zero"), "`step` raised ZeroDivisionError: by zero"),
        ("text", "returned 'text', not a StepResult"),
        (StepResult("x", reward=float("nan")), "returned the reward nan"),
        (StepResult("x", reward=10**400), "returned the reward a number beyond what float32 holds"),
        (StepResult(None), "returned None as observation and is not done"),
        (StepResult(3), "returned 3 as observation"),  # type: ignore[arg-type]
        (StepResult([{"role": "user"}]), "as observation"),
    ],
)
def test_a_failing_step_is_reported_with_its_episode(plain: TextCodec, result: Any, problem: str) -> None:
    environment = Failing(result)
    with pytest.raises(EpisodeError) as raised:
        play(environment, Scripted(plain, ["ans"]), plain)
    assert problem in raised.value.problem
    assert "'begin' (row7), turn" in raised.value.found and "action 'ans'" in raised.value.found
    assert "resume" in raised.value.remedy
    assert environment.closed == 1


@pytest.mark.parametrize("reward", [np.float32(0.5), torch.tensor(0.5)])
def test_a_reward_may_be_a_scalar_of_numpy_or_torch(plain: TextCodec, reward: Any) -> None:
    episode = play(Failing(StepResult(None, reward=reward, done=True)), Scripted(plain, ["a"]), plain)
    assert earned(episode) == 0.5 and type(earned(episode)) is float


class Drawing(Counting):
    """Draws and seeds wherever it is called."""

    def __init__(self) -> None:
        torch.rand(1)
        super().__init__()

    async def reset(self, item: Item) -> str:
        np.random.seed(3)
        await asyncio.sleep(0)
        random.random()
        return await super().reset(item)

    async def step(self, action: str) -> StepResult:
        torch.rand(1)
        return await super().step(action)

    async def close(self) -> None:
        random.seed(3)


def _random_state() -> tuple[Any, ...]:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


def test_its_random_numbers_are_not_those_of_training(plain: TextCodec) -> None:
    make, before = EnvironmentFactory(Drawing), _random_state()
    limits = EpisodeLimits(max_turns=5, max_sequence_tokens=100)
    asyncio.run(played(make, Scripted(plain, ["a"] * 5), plain, limits))
    assert _random_state() == before
    (drawn,) = make.guard.warnings()
    for name in ("`random`", "numpy's global generator", "torch's global generator"):
        assert name in drawn


def test_a_state_without_tokens_is_reported_with_its_episode(plain: TextCodec) -> None:
    empty = StepResult(Observation("", rewrites=True))
    with pytest.raises(EpisodeError, match="no tokens") as raised:
        play(Failing(empty), Scripted(plain, ["ans"]), plain)
    assert "row7" in raised.value.found and "action 'ans'" in raised.value.found


def test_what_is_no_environment_at_all(plain: TextCodec) -> None:
    with pytest.raises(EpisodeError, match="`reset` raised AttributeError"):
        play(object(), Scripted(plain, []), plain)


class Slow(Counting):
    async def step(self, action: str) -> StepResult:
        await asyncio.sleep(30)
        return await super().step(action)


def test_a_state_that_no_tokenizer_knows_is_placed(plain: TextCodec) -> None:
    with pytest.raises(EpisodeError, match="cannot read a text") as caught:
        play(Failing(StepResult("cut \ud83d")), Scripted(plain, ["a"]), plain)
    assert "row7" in caught.value.found and "turn 2" in caught.value.found


def test_an_error_of_the_engine_is_not_the_environments(plain: TextCodec) -> None:
    async def refuse(*_: Any) -> Action:
        raise UserError("refused", found="x", remedy="y")

    environment = Counting()
    with pytest.raises(UserError, match="refused") as caught:
        play(environment, refuse, plain)
    assert not isinstance(caught.value, EpisodeError) and caught.value.found == "x"
    assert environment.closed == 1


def test_a_step_that_takes_too_long(plain: TextCodec) -> None:
    environment = Slow()
    with pytest.raises(EpisodeError, match=r"`step` took longer than environment.timeout_s, 0.01 s"):
        play(environment, Scripted(plain, ["a"]), plain, timeout_s=0.01)
    assert environment.closed == 1


class Napping(Counting):
    """Waits ``waits`` and computes ``computes`` seconds in each step, five times."""

    def __init__(self, waits: float, computes: float = 0.0) -> None:
        super().__init__(turns=1)
        self.waits, self.computes = waits, computes

    async def step(self, action: str) -> StepResult:
        for _ in range(5):
            time.sleep(self.computes)
            await asyncio.sleep(self.waits)
        return await super().step(action)


def test_a_time_limit_counts_the_environments_own_time(plain: TextCodec) -> None:
    """Not what it waits for a training step, which holds the lock that user code takes in the event loop."""
    updating, stopped = threading.Event(), threading.Event()

    def update() -> None:
        while not stopped.is_set():
            with EXCLUSIVE:
                updating.set()
                time.sleep(0.15)
            time.sleep(0.005)

    thread = threading.Thread(target=update)
    thread.start()
    try:
        updating.wait()
        assert play(Napping(waits=0.005), Scripted(plain, ["a"]), plain, timeout_s=0.12).end is TrajectoryEnd.DONE
    finally:
        stopped.set()
        thread.join()


@pytest.mark.parametrize(("waits", "computes"), [(0.05, 0.0), (0.0, 0.05)])
def test_waiting_and_computing_are_the_environments_own_time(plain: TextCodec, waits: float, computes: float) -> None:
    with pytest.raises(EpisodeError, match="took longer than"):
        play(Napping(waits, computes), Scripted(plain, ["a"]), plain, timeout_s=0.1)


def test_a_failing_close_is_reported_unless_something_failed_before(plain: TextCodec) -> None:
    class Stuck(Failing):
        async def close(self) -> None:
            raise OSError("stuck")

    with pytest.raises(EpisodeError, match="`close` raised OSError: stuck"):
        play(Stuck(StepResult(None, 1.0, done=True)), Scripted(plain, ["a"]), plain)
    with pytest.raises(EpisodeError, match="`step` raised ValueError: first"):
        play(Stuck(ValueError("first")), Scripted(plain, ["a"]), plain)


def test_a_cancelled_episode_closes_its_environment(plain: TextCodec) -> None:
    environment = Slow()

    async def cancel() -> None:
        limits = EpisodeLimits(max_turns=3, max_sequence_tokens=50)
        make = EnvironmentFactory(lambda: environment)
        task = asyncio.create_task(played(make, Scripted(plain, ["a"]), plain, limits))
        while len(environment.seen) < 1:
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert environment.closed == 1


# From a recipe -------------------------------------------------------------------------------------------


SOURCE = """
class Good:
    def __init__(self, size=1):
        self.size = size
    async def reset(self, item): ...
    async def step(self, action): ...

class Plain:
    async def reset(self, item): ...
    def step(self, action): ...
"""


@pytest.fixture
def target(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    (tmp_path / "worlds.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return lambda name: f"worlds.py:{name}"


def test_a_fresh_object_per_episode(target: Callable[[str], str]) -> None:
    make = environment_factory(EnvironmentConfig(target=target("Good"), options={"size": 3}))
    one, two = make(), make()
    assert one is not two and one.size == two.size == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "problem", "found"),
    [
        ("Plain", "no async method `step`", "Plain.step is not async"),
        ("Goood", "no environment 'Goood'", "it defines Good, Plain"),
    ],
)
def test_classes_that_do_not_fit_are_refused_before_anything_runs(
    target: Callable[[str], str], name: str, problem: str, found: str
) -> None:
    with pytest.raises(UserError) as raised:
        environment_factory(EnvironmentConfig(target=target(name)))
    assert problem in raised.value.problem and found in raised.value.found


def test_an_environment_of_a_plug_in_has_a_name(target: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    target("Good")
    monkeypatch.syspath_prepend(".")
    added = plugins.Plugin(environments={"good": "worlds:Good"})
    monkeypatch.setattr(plugins, "installed_plugins", lambda: (added,))
    assert environment_factory(EnvironmentConfig(type="good", options={"size": 3}))().size == 3  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="both set"):
        EnvironmentConfig(type="good", target="worlds:Good")
    with pytest.raises(UserError, match=r"environment\.type bad.*good"):
        EnvironmentConfig(type="bad")


def test_no_target_and_no_class() -> None:
    with pytest.raises(UserError, match="there is no environment"):
        environment_factory(EnvironmentConfig())
