"""What every environment must do, whatever it is about. A new one joins by one entry in ``ENVIRONMENTS``."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quartet.batch.trajectory import STEP_PREFIX, Trajectory, TrajectoryEnd
from quartet.config.recipe import EnvironmentConfig
from quartet.envs.episode import run_episode
from quartet.envs.protocol import Environment, Item, Observation, StepResult, environment_factory
from quartet.envs.transcript import SOURCE, Action, EpisodeLimits, ObservedState, Transcript
from quartet.text.tokenizer import TextCodec

ROOT = Path(__file__).parents[2]
MAX_TURNS = 6


def examples() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_environments", ROOT / "examples" / "environments.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Interview:
    """Messages: three questions, after which the whole conversation is folded into one summary."""

    def __init__(self) -> None:
        self.asked = 0

    async def reset(self, item: Item) -> list[dict[str, Any]]:
        return [{"role": "system", "content": "Answer."}, {"role": "user", "content": str(item.prompt)}]

    async def step(self, action: str) -> StepResult:
        self.asked += 1
        if self.asked == 3:
            return StepResult(Observation([{"role": "user", "content": f"So: {action}?"}], rewrites=True), 0.1)
        if self.asked == 5:
            return StepResult(None, float(len(action)), done=True)
        return StepResult([{"role": "user", "content": "And then?"}])


@dataclass(frozen=True)
class Case:
    """An environment, rows to play, and an action that takes it on (empty: any)."""

    make: Callable[[], Environment]
    columns: dict[str, Any] = field(default_factory=dict)
    good: str = ""


def _case(target: Callable[..., Environment], columns: dict[str, Any] | None = None, **options: Any) -> Case:
    return Case(environment_factory(EnvironmentConfig(options=options), target), columns or {})


ENVIRONMENTS: dict[str, Callable[[], Case]] = {
    "guess": lambda: _case(examples().Guess, most=4),
    "note": lambda: _case(examples().Note, {"number": 47}),
    "interview": lambda: _case(Interview),
}


@pytest.fixture(params=list(ENVIRONMENTS), scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    return ENVIRONMENTS[request.param]()


def item(case: Case, seed: int = 5) -> Item:
    return Item("Find it", case.columns, "row", seed)


def history(case: Case, actions: list[str], seed: int = 5) -> list[Any]:
    """What an environment says to these actions, until it is done."""

    async def run() -> list[Any]:
        environment = case.make()
        found: list[Any] = [await environment.reset(item(case, seed))]
        for action in actions:
            found.append(await environment.step(action))
            if found[-1].done:
                break
        return found

    return asyncio.run(run())


def content(observation: Any) -> Any:
    return observation.content if isinstance(observation, Observation) else observation


ACTIONS = st.lists(st.sampled_from(["1", "3", "", "47", "no idea", "é\x00\ufffd", "<|im_end|>", "2 4"]), max_size=6)


@settings(max_examples=25)
@given(actions=ACTIONS)
def test_any_text_is_an_action(case: Case, actions: list[str]) -> None:
    """Results have the promised types; the state stays of one kind unless it is rewritten."""
    first, *results = history(case, actions)
    kind = type(content(first))
    assert kind in (str, list) and content(first)
    for result in results:
        assert isinstance(result, StepResult)
        assert result.reward is None or math.isfinite(result.reward)
        assert isinstance(result.done, bool)
        if result.done:
            continue
        assert result.observation is not None
        rewrites = isinstance(result.observation, Observation) and result.observation.rewrites
        kind = type(content(result.observation)) if rewrites else kind
        assert type(content(result.observation)) is kind


@settings(max_examples=15)
@given(actions=ACTIONS, seed=st.integers(0, 3))
def test_an_episode_is_a_function_of_item_and_actions(case: Case, actions: list[str], seed: int) -> None:
    """Nothing comes from the clock, from other episodes or from a shared random state: a resumed run plays the same."""
    random.seed(1)
    expected = history(case, actions, seed)
    random.seed(2)
    history(case, ["something", "else"], seed + 1)
    assert history(case, actions, seed) == expected


def test_episodes_do_not_know_of_each_other(case: Case) -> None:
    async def side_by_side() -> tuple[list[Any], list[Any]]:
        one, two = case.make(), case.make()
        first = [await one.reset(item(case))]
        second = [await two.reset(item(case))]
        for action in ("1", "4"):
            for environment, found in ((one, first), (two, second)):
                if len(found) == 1 or not found[-1].done:
                    found.append(await environment.step(action))
        return first, second

    first, second = asyncio.run(side_by_side())
    assert first == second == history(case, ["1", "4"])


# Played over an engine -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({t: n for n, t in enumerate([*alphabet, "<|im_start|>", "<|im_end|>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return TextCodec(fast)


def play(case: Case, codec: TextCodec, seed: int) -> tuple[Trajectory, list[tuple[int, ...]]]:
    """An episode against an engine that draws tokens of digits and ends of text; and what it sampled."""
    sampled: list[tuple[int, ...]] = []
    tokens = codec.encode_continuation("0123456789")
    limits = EpisodeLimits(MAX_TURNS, max_sequence_tokens=400)
    transcript = Transcript(codec)

    async def act(turn: int, seen: ObservedState) -> str:
        transcript.see(seen)
        draw = random.Random(f"{seed}/{turn}")
        ids = (*draw.choices(tokens, k=draw.randint(1, 2)), *([codec.eos_id] if draw.random() < 0.7 else []))
        kept = ids[: transcript.room(limits)]
        sampled.append(kept)
        reason = "stop" if kept[-1] == codec.eos_id else "length"
        return transcript.act(Action(kept, tuple(-draw.random() for _ in kept), (0,) * len(kept), reason))

    played = asyncio.run(run_episode("0.0", case.make, item(case, seed), act, limits))
    if played.reward is not None:
        transcript.earn(played.reward)
    return Trajectory(transcript.sequences(), played.end, {SOURCE: played.score}), sampled


@pytest.mark.parametrize("seed", range(3))
def test_a_trajectory_holds_what_was_sampled_and_what_was_read(case: Case, codec: TextCodec, seed: int) -> None:
    episode, sampled = play(case, codec, seed)
    assert 1 <= episode.num_turns == len(sampled) <= MAX_TURNS
    assert episode.end in (TrajectoryEnd.DONE, TrajectoryEnd.MAX_TURNS)
    emitted = [
        token
        for sequence in episode.sequences
        for token, is_action in zip(sequence.token_ids, sequence.action_mask, strict=True)
        if is_action
    ]
    assert emitted == [token for ids in sampled for token in ids]
    assert sum(sequence.num_turns for sequence in episode.sequences) == episode.num_turns
    earned = sum(reward for sequence in episode.sequences for reward in sequence.columns[STEP_PREFIX + SOURCE])
    assert earned == pytest.approx(0.0 if math.isnan(score := episode.scores[SOURCE]) else score)
    for sequence in episode.sequences:
        assert sequence.action_mask[-1] and sequence.prompt_ids
        assert all(p < 0 for p, a in zip(sequence.logprobs, sequence.action_mask, strict=True) if a)
    assert play(case, codec, seed)[0] == episode
