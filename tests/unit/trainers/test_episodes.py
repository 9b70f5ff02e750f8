"""Trajectories of several sequences: their layout, their scores, one GAE over all of their actions, and training."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.batch.trajectory import (
    STEP_PREFIX,
    Trajectories,
    Trajectory,
    TrajectoryEnd,
    TrajectorySequence,
    last_sequences,
    num_policy_tokens,
)
from quartet.config import UserError
from quartet.config.algorithms import DAPO, GRPO, PPO, RLOO, KLConfig, OverlongConfig, ReMax
from quartet.config.common import OptimConfig, SamplingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.evaluation import EvaluationConfig
from quartet.config.recipe import (
    ActorConfig,
    CheckpointConfig,
    CriticConfig,
    EnvironmentConfig,
    LogConfig,
    RLRecipe,
    RolloutConfig,
)
from quartet.data.datasets import PromptItem
from quartet.envs.episode import EpisodeError, FinishedEpisode
from quartet.envs.protocol import EnvironmentFactory, Item, Observation, StepResult
from quartet.envs.transcript import SOURCE, EpisodeLimits
from quartet.observe.rollouts import RolloutRecord, read_rollout_step
from quartet.observe.trackers import read_metrics
from quartet.rollout.protocol import Completion, FinishReason, Request, SamplingParams
from quartet.schedule.groups import PromptGroup, group_batch, make_chunk
from quartet.schedule.iteration import Chunk, SubsetScorer, UpdatePlan
from quartet.schedule.rollout_worker import FinishedRequest, RequestStore, TurnRequest
from quartet.text.tokenizer import TextCodec
from quartet.trainers.experience import Experience, ExperienceAssembler
from quartet.trainers.loop import episode_metrics
from quartet.trainers.rl import RLTrainer
from quartet.trainers.roles import EpisodeRunner

NO_KL = KLConfig(coef=0.0)


def sequence(
    prompt: Sequence[int], tokens: str, rewards: Sequence[float] = (), *, state: str = "state", reason: str = "stop"
) -> TrajectorySequence:
    """``tokens``: ``a`` for an action, ``o`` for an observation; ``rewards`` of the runs of actions, in order."""
    ends = [i for i, kind in enumerate(tokens) if kind == "a" and tokens[i + 1 : i + 2] != "a"]
    by_place = dict(zip(ends, rewards, strict=False))
    return TrajectorySequence(
        prompt_ids=tuple(prompt),
        token_ids=tuple(10 + i for i in range(len(tokens))),
        action_mask=tuple(kind == "a" for kind in tokens),
        logprobs=tuple(-0.5 if kind == "a" else 0.0 for kind in tokens),
        columns={STEP_PREFIX + SOURCE: tuple(by_place.get(i, 0.0) for i in range(len(tokens)))},
        versions=tuple(2 if kind == "a" else -1 for kind in tokens),
        state=state,
        completion=f"{len(tokens)} tokens",
        finish_reason=reason,
        num_turns=len(ends),
    )


def group(index: int, *episodes: Trajectory) -> PromptGroup:
    prompt = PromptItem(f"p{index}", "ask", {"answer": "4"}, "", 2)
    return PromptGroup.of(index, prompt, group_batch(index, episodes))


def episode(*sequences: TrajectorySequence, end: TrajectoryEnd = TrajectoryEnd.DONE) -> Trajectory:
    total = sum(r for s in sequences for r in s.columns[STEP_PREFIX + SOURCE])
    return Trajectory(tuple(sequences), end, {SOURCE: total})


REWRITTEN = episode(
    sequence([5, 6], "aa", [0.5], state="first"), sequence([7, 8, 9], "aoa", [-0.25, 2.0], state="last")
)
EXTENDED = episode(sequence([5, 6], "aooaa", [0.0, 1.0]))
CUT_OFF = episode(sequence([5, 6], "a", [0.0]), end=TrajectoryEnd.MAX_TURNS)


def two_groups() -> Chunk:
    return make_chunk(4, 1, [group(0, REWRITTEN, EXTENDED), group(3, EXTENDED, CUT_OFF)])


# Layout --------------------------------------------------------------------------------------------------


def test_a_chunk_holds_every_sequence_behind_its_own_state() -> None:
    chunk = two_groups()
    batch = chunk.data
    assert batch.ids == ("0.0", "0.0.1", "0.1", "3.0", "3.1")
    assert [batch.token_ids(s)[:3] for s in range(5)] == [[5, 6, 10], [7, 8, 9], *[[5, 6, 10]] * 3]
    assert batch.segment_lengths == (2, 3, 2, 3, 5, 2, 5, 1), "equal first states of a group are stored once"
    leaf = batch.sequence_index() >= 0
    kinds = "".join("a" if m else "o" for m in batch.token["action_mask"][leaf].tolist())
    assert kinds == "aa" + "aoa" + "aooaa" + "aooaa" + "a"
    assert torch.equal(batch.token["observation_mask"], leaf & ~batch.token["action_mask"])
    assert batch.sequence["group"].tolist() == [0, 0, 0, 3, 3]
    assert batch.sequence["response"].tolist() == [0, 0, 1, 0, 1]
    assert batch.sequence["part"].tolist() == [0, 1, 0, 0, 0]
    assert batch.sequence["ended"].tolist() == [False, True, True, True, False]
    assert batch.objects["finish_reason"] == ("rewritten", "stop", "stop", "stop", "max_turns")
    assert [item.prompt for item in batch.objects["prompt"]] == ["first", "last", "state", "state", "state"]
    assert batch.objects["prompt"][1].columns == {"answer": "4"}
    rewards = batch.sequence["reward/environment"].tolist()
    assert math.isnan(rewards[0]) and rewards[1:] == [2.25, 1.0, 1.0, 0.0]
    assert (chunk.step, chunk.index) == (4, 1)


def test_trajectories_are_counted_not_sequences() -> None:
    batch = two_groups().data
    trajectories = Trajectories.of(batch)
    assert trajectories.owner_S.tolist() == [0, 0, 1, 2, 3]
    assert trajectories.final_N.tolist() == [1, 2, 3, 4]
    assert num_policy_tokens(batch, trajectories).tolist() == [4, 3, 3, 1]
    assert episode_metrics(batch) == {
        "episode/turns_mean": (3 + 2 + 2 + 1) / 4,
        "episode/sequences_mean": 5 / 4,
        "episode/observation_tokens": (1 + 2 + 2) / 4,
        "episode/done_frac": 0.75,
    }


def test_mini_batches_keep_trajectories_whole() -> None:
    batch = two_groups().data
    cut = [batch.select(picked) for picked in UpdatePlan(2, 2, seed=0).selections(batch, 1)]
    assert sorted(len(part) for part in cut[:2]) == [2, 3]
    for part in cut:
        assert set(part.ids) in ({"0.0", "0.0.1", "0.1"}, {"3.0", "3.1"})


# Advantages ----------------------------------------------------------------------------------------------


def assemble(config: Any, chunk: Chunk, **columns: Sequence[float]) -> Experience:
    """``columns``: one value per action token in order."""
    batch, token = chunk.data, {}
    for name, values in columns.items():
        token[name] = torch.zeros(batch.num_tokens)
        token[name][batch.token["action_mask"]] = torch.tensor(values)
    return ExperienceAssembler(config, {"environment": 1.0}, lambda: config.kl.coef)(
        [(chunk, [ColumnSet(batch.ids, token)])]
    )


def on_actions(experience: Experience, name: str) -> list[float]:
    batch = experience.batch
    acted = (batch.sequence_index() >= 0) & ~batch.token["observation_mask"]
    return batch.token[name][acted].tolist()


def slow_gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    found, advantage, following = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        found.append(advantage)
        following = value
    return found[::-1]


def test_one_gae_runs_over_both_sequences() -> None:
    """Worked by hand, gamma 1 and lambda 0.5: the last reward reaches the first sequence's tokens."""
    chunk = make_chunk(0, 0, [group(0, episode(sequence([5, 6], "aa"), sequence([7], "aoa", [0.0, 1.0])))])
    config = PPO(kl=NO_KL, gae_lambda=0.5, whiten_advantages=False)
    experience = assemble(config, chunk, values=[0.1, 0.2, 0.4, 0.8])
    assert on_actions(experience, "token_rewards") == [0.0, 0.0, 0.0, 1.0]
    last = 1.0 - 0.8
    third = (0.8 - 0.4) + 0.5 * last
    second = (0.4 - 0.2) + 0.5 * third
    first = (0.2 - 0.1) + 0.5 * second
    assert on_actions(experience, "advantages") == pytest.approx([first, second, third, last])
    assert first == pytest.approx(0.1 + 0.5 * (0.2 + 0.5 * (0.4 + 0.5 * 0.2)))
    assert not experience.batch.token["advantages"][experience.batch.token["observation_mask"]].any()


def test_rewards_of_turns_stand_where_they_were_earned() -> None:
    values = torch.randn(11, generator=torch.Generator().manual_seed(0)).tolist()
    config = PPO(kl=NO_KL, gamma=0.9, gae_lambda=0.8, whiten_advantages=False)
    experience = assemble(config, two_groups(), values=values)
    rewards = [0.0, 0.5, -0.25, 2.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    assert on_actions(experience, "token_rewards") == pytest.approx(rewards)
    expected = []
    for start, stop in ((0, 4), (4, 7), (7, 10), (10, 11)):
        expected += slow_gae(rewards[start:stop], values[start:stop], 0.9, 0.8)
    assert on_actions(experience, "advantages") == pytest.approx(expected, abs=1e-6)
    assert experience.batch.sequence["score"].tolist() == [2.25, 2.25, 1.0, 1.0, 0.0]
    assert experience.metrics["reward/score_mean"] == pytest.approx((2.25 + 1.0 + 1.0 + 0.0) / 4)
    assert experience.metrics["reward/environment"] == pytest.approx(4.25 / 4)


def test_a_source_beside_the_environment_lands_on_the_last_action() -> None:
    chunk = two_groups()
    nan = math.nan
    other = ColumnSet(chunk.data.ids, sequence={"reward/other": torch.tensor([nan, 4.0, 2.0, nan, 1.0])})
    values = ColumnSet(chunk.data.ids, token={"values": torch.zeros(chunk.data.num_tokens)})
    config = PPO(kl=NO_KL, whiten_advantages=False)
    weights = {"environment": 2.0, "other": 0.5}
    experience = ExperienceAssembler(config, weights, lambda: 0.0)([(chunk, [other, values])])
    expected = [0.0, 1.0, -0.5, 4.0 + 2.0, 0.0, 0.0, 2.0 + 1.0, 0.0, 0.0, 2.0, 0.5]
    assert on_actions(experience, "token_rewards") == pytest.approx(expected)
    assert experience.metrics["reward/other"] == pytest.approx(7.0 / 3)


@pytest.mark.parametrize("config", [GRPO(kl=NO_KL, normalise_std=False), RLOO(kl=NO_KL)])
def test_groups_compare_trajectories(config: Any) -> None:
    """2.25 against 1, and 1 against 0: every action token of a trajectory has its one advantage."""
    gaps = [1.25, 1.0]
    scale = 0.5 if isinstance(config, GRPO) else 1.0
    expected = [gaps[0]] * 4 + [-gaps[0]] * 3 + [gaps[1]] * 3 + [-gaps[1]]
    found = on_actions(assemble(config, two_groups()), "advantages")
    assert found == pytest.approx([scale * value for value in expected])


def test_an_episode_that_was_cut_off_pays_for_its_missing_end() -> None:
    config = PPO(kl=NO_KL, whiten_advantages=False, missing_eos_penalty=0.75)
    experience = assemble(config, two_groups(), values=[0.0] * 11)
    assert on_actions(experience, "token_rewards")[-2:] == [1.0, -0.75]


# Scoring -------------------------------------------------------------------------------------------------


def test_a_source_of_reward_sees_each_trajectory_once() -> None:
    seen: list[RaggedBatch] = []

    class Lengths:
        async def score(self, chunk: Chunk) -> ColumnSet:
            batch = chunk.data
            seen.append(batch)
            lengths = torch.tensor([float(stop - start) for start, stop in map(batch.leaf_span, range(len(batch)))])
            places = torch.arange(batch.num_tokens, dtype=torch.float32)
            return ColumnSet(batch.ids, {"place": places}, {"reward/length": lengths})

    chunk = two_groups()
    found = asyncio.run(SubsetScorer(Lengths(), last_sequences).score(chunk))
    assert seen[0].ids == ("0.0.1", "0.1", "3.0", "3.1")
    assert seen[0].objects["completion"][0] == "3 tokens" and seen[0].objects["prompt"][0].prompt == "last"
    lengths = found.sequence["reward/length"].tolist()
    assert math.isnan(lengths[0]) and lengths[1:] == [3.0, 5.0, 5.0, 1.0]
    for k, s in enumerate([1, 2, 3, 4]):
        there, here = (slice(*batch.leaf_span(i)) for batch, i in ((chunk.data, s), (seen[0], k)))
        assert found.token["place"][there].tolist() == list(range(here.start, here.stop))
    assert not found.token["place"][slice(*chunk.data.leaf_span(0))].any()


# Playing -------------------------------------------------------------------------------------------------


class Echo:
    """Two turns; the state extends, or is rewritten."""

    live = most = 0

    def __init__(self, rewrites: bool = False) -> None:
        self.rewrites = rewrites
        self.said: list[str] = []

    async def reset(self, item: Item) -> str:
        Echo.live += 1
        Echo.most = max(Echo.most, Echo.live)
        await asyncio.sleep(0)
        return f"{item.prompt}"

    async def step(self, action: str) -> StepResult:
        self.said.append(action)
        if len(self.said) == 2:
            return StepResult(None, sum(c.isdigit() for c in action) / 4, done=True)
        state = f"{sum(c.isdigit() for c in action)}+" if self.rewrites else "+"
        return StepResult(Observation(state, rewrites=self.rewrites))

    async def close(self) -> None:
        Echo.live -= 1


class Recording:
    """A policy that remembers the requests to its engine, which answers at once, later requests first."""

    def __init__(self, codec: TextCodec) -> None:
        self.sampled = RequestStore(codec)
        self.requests: list[Request] = []

    async def act(self, index: int, request: TurnRequest) -> FinishedRequest:
        asked = self.sampled.engine_requests(request)
        if isinstance(asked, FinishedRequest):
            return asked
        self.requests += asked
        for _ in range(20 - len(self.requests)):
            await asyncio.sleep(0)
        (one,) = asked
        made = (5, one.sampling.seed % 7 + 3)[: one.sampling.max_new_tokens]
        num = len(made)
        return self.sampled.ended(
            Completion(one.request_id, one.group, made, (-1.0, -2.0)[:num], (0,) * num, FinishReason.LENGTH)
        )

    async def episodes(self, index: int, prompt: Any, endings: Sequence[FinishedEpisode]) -> PromptGroup:
        return PromptGroup.of(index, prompt, self.sampled.episodes(index, endings, version=2))


def player(policy: Recording, max_tokens: int = 60, **changes: Any) -> EpisodeRunner:
    config = EnvironmentConfig(**changes)
    limits = EpisodeLimits(config.max_turns, max_tokens)
    return EpisodeRunner(EnvironmentFactory(Echo), config, policy, limits, run_seed=3)


@pytest.fixture
def codec(tokenizer: Any) -> TextCodec:
    return TextCodec.of(tokenizer)


ITEM = PromptItem("p1", "1+2=", {}, "", 2)


def contents(group: PromptGroup) -> dict[str, Any]:
    """Of a group's batch, as values that can be compared."""
    batch = group.batch
    columns = {name: values.tolist() for name, values in {**batch.token, **batch.sequence}.items()}
    tokens = [batch.token_ids(s) for s in range(len(batch))]
    return {"ids": batch.ids, "tokens": tokens, **batch.objects, **columns}


def test_what_is_sampled_depends_on_place_and_turn_alone(codec: TextCodec) -> None:
    def played(**changes: Any) -> tuple[PromptGroup, dict[str, int]]:
        policy = Recording(codec)
        found = asyncio.run(player(policy, **changes).group(7, ITEM, SamplingParams(max_new_tokens=4), 3))
        return found, {r.request_id: r.sampling.seed for r in policy.requests}

    together, seeds = played()
    alone, again = played(max_environments=1)
    assert contents(together) == contents(alone) and seeds == again
    assert sorted(seeds) == [f"7.{r}.{turn}" for r in range(3) for turn in range(2)]
    assert len(set(seeds.values())) == 6


def test_no_more_environments_than_allowed(codec: TextCodec) -> None:
    Echo.live = Echo.most = 0
    asyncio.run(player(Recording(codec), max_environments=2).group(0, ITEM, SamplingParams(), 4))
    assert (Echo.most, Echo.live) == (2, 0)


def test_a_failing_episode_ends_the_others_before_its_error_goes_on(codec: TextCodec) -> None:
    Echo.live = 0

    class Failing(Recording):
        async def act(self, index: int, request: TurnRequest) -> FinishedRequest:
            if request.request_id == "0.1.1":
                raise UserError("no", found="x", remedy="y")
            return await super().act(index, request)

    with pytest.raises(UserError, match="no"):
        asyncio.run(player(Failing(codec)).group(0, ITEM, SamplingParams(), 4))
    assert Echo.live == 0


# Environments that fail ------------------------------------------------------------------------------------


class Flaky(Echo):
    """Fails in the episodes of ``failing``, so often each, at their second turn."""

    failing: dict[int, int] = {}  # noqa: RUF012 - set by each test

    async def reset(self, item: Item) -> str:
        self.episode = item.episode
        return await super().reset(item)

    async def step(self, action: str) -> StepResult:
        found = await super().step(action)
        if len(self.said) == 2 and Flaky.failing.get(self.episode, 0) > 0:
            Flaky.failing[self.episode] -= 1
            raise OSError("the simulator is gone")
        return found


def flaky(
    codec: TextCodec, on_error: str, failing: dict[int, int], num: int = 3
) -> tuple[PromptGroup, list[str], Recording]:
    """A group's batch, what is told of its environment, and what its policy was asked for."""
    Flaky.failing = dict(failing)
    make, policy = EnvironmentFactory(partial(Flaky, True)), Recording(codec)
    config = EnvironmentConfig(on_error=on_error)
    runner = EpisodeRunner(make, config, policy, EpisodeLimits(config.max_turns, 60), run_seed=3)
    found = asyncio.run(runner.group(7, ITEM, SamplingParams(max_new_tokens=4), num))
    return found, make.warnings(), policy


def test_an_episode_that_failed_stops_the_run(codec: TextCodec) -> None:
    with pytest.raises(EpisodeError, match="the simulator is gone"):
        flaky(codec, "stop", {1: 1})


def test_an_episode_that_failed_is_left_out_and_never_counts_as_0(codec: TextCodec) -> None:
    undisturbed, *_ = flaky(codec, "leave_out", {})
    found, (told,), policy = flaky(codec, "leave_out", {1: 9})
    assert not policy.sampled._transcripts and "in 1 episodes" in told
    assert found.batch.objects["finish_reason"] == ("rewritten", "length", "failed", "rewritten", "length")
    assert found.batch.sequence["version"].tolist() == [0, 0, 2, 0, 0], "of present weights, so that it is never stale"
    scores = found.batch.sequence["reward/environment"].tolist()
    assert math.isnan(scores[2])
    # A source that knows nothing of it gives 0 to the empty answer, which does not count either.
    rule = torch.tensor([math.nan, 1.0, 0.0, math.nan, 0.5])
    batch = found.batch.with_sequence(**{"reward/rule": rule})
    weights = {SOURCE: 1.0, "rule": 1.0}
    experience = ExperienceAssembler(RLOO(kl=NO_KL), weights, lambda: 0.0)([(Chunk(4, 0, batch), [])])
    judged = experience.batch.sequence["score"].tolist()
    assert math.isnan(judged[2]) and not any(map(math.isnan, judged[:2] + judged[3:]))
    learned = experience.batch.sequence_index()[experience.batch.token["action_mask"]].unique().tolist()
    assert learned == [0, 1, 3, 4]
    assert experience.metrics["reward/rule"] == 0.75 and experience.metrics["reward/not_applicable"] == 1.0
    assert episode_metrics(batch)["episode/left_out"] == 1.0 and "episode/left_out" not in episode_metrics(
        undisturbed.batch
    )


# Training ------------------------------------------------------------------------------------------------

TRAIN = TrainConfig(optim=OptimConfig(lr=1e-2))


def recipe(path: Path, rewrites: bool, **changes: Any) -> RLRecipe:
    values: dict[str, Any] = {
        "output_dir": str(path),
        "algorithm": PPO(kl=KLConfig(coef=0.05), gamma=0.98, gae_lambda=0.9, whiten_advantages=False),
        "actor": ActorConfig(train=TRAIN),
        "critic": CriticConfig(train=TRAIN),
        "environment": EnvironmentConfig(options={"rewrites": rewrites}, max_turns=3, max_tokens=40),
        "rollout": RolloutConfig(sampling=SamplingConfig(max_new_tokens=4), engine=NativeEngineConfig(max_running=8)),
        "steps": 3,
        "prompts_per_step": 4,
        "responses_per_prompt": 2,
        "minibatches": 2,
        "chunk_size": 2,
        "log": LogConfig(tensorboard=False),
        "threads": 1,
    }
    return RLRecipe(**{**values, **changes})


@pytest.fixture
def trainer(causal_lm: Any, tokenizer: Any, prompts: list[str]) -> Callable[..., RLTrainer]:
    def make(used: RLRecipe, **changes: Any) -> RLTrainer:
        objects = {"model": causal_lm(), "tokenizer": tokenizer, "prompts": prompts, "environment": Echo, **changes}
        return RLTrainer(used, **objects)

    return make


def trajectories_of(records: Sequence[RolloutRecord]) -> dict[str, list[RolloutRecord]]:
    found: dict[str, list[RolloutRecord]] = {}
    for record in sorted(records, key=lambda record: record.part):
        found.setdefault(record.trajectory_id, []).append(record)
    return found


def on_actions_of(parts: Sequence[RolloutRecord], name: str) -> list[float]:
    return [
        value
        for record in parts
        for value, observed in zip(record.columns[name], record.columns["observation_mask"], strict=True)
        if not observed
    ]


@pytest.mark.parametrize("rewrites", [True, False])
def test_training_learns_from_one_gae_over_the_whole_trajectory(
    rewrites: bool, trainer: Callable[..., RLTrainer], tmp_path: Path, digits: Any
) -> None:
    result = trainer(recipe(tmp_path / "run", rewrites), rewards=[digits]).train()
    rows = [row for row in read_metrics(result.path / "metrics.jsonl") if "episode/turns_mean" in row]
    assert len(rows) == 3
    for row in rows:
        assert row["episode/turns_mean"] == 2.0
        assert row["episode/sequences_mean"] == (2.0 if rewrites else 1.0)
        assert row["policy/clip_frac_numerical"] == 0.0
        assert row["agreement/logprob_diff_max"] < 1e-4, "sampler and trainer see the same sequences"
        assert {"reward/environment", "reward/share_of_digits", "kl/ref", "critic/explained_variance"} <= set(row)
    for step in (1, 2, 3):
        records = read_rollout_step(result.path / "rollouts", step)
        found = trajectories_of(records)
        assert len(found) == 8 and len(records) == (16 if rewrites else 8)
        for parts in found.values():
            rewards, values = on_actions_of(parts, "token_rewards"), on_actions_of(parts, "values")
            expected = slow_gae(rewards, values, 0.98, 0.9)
            assert on_actions_of(parts, "advantages") == pytest.approx(expected, abs=1e-4)
            assert len(rewards) > len(on_actions_of(parts[:1], "values")) if rewrites else len(parts) == 1
            assert {part.score for part in parts} == {parts[-1].score}


@pytest.mark.parametrize("algorithm", [GRPO(kl=KLConfig(coef=0.1, place="loss", estimator="k3")), RLOO(), DAPO()])
def test_group_methods_train_on_episodes(algorithm: Any, trainer: Callable[..., RLTrainer], tmp_path: Path) -> None:
    """RLOO's ratio is that of the whole trajectory, so its sequences stay in one micro-batch."""
    train = TrainConfig(optim=OptimConfig(lr=1e-2), token_budget=64)
    used = recipe(tmp_path / "run", True, algorithm=algorithm, actor=ActorConfig(train=train))
    result = trainer(used).train()
    rows = read_metrics(result.path / "metrics.jsonl")
    assert all(math.isfinite(row["loss/policy"]) for row in rows if "loss/policy" in row)
    assert rows[-1]["episode/sequences_mean"] == 2.0
    # Dynamic sampling judges a group by its episodes.
    assert ("groups/sampled" in rows[-1]) == isinstance(algorithm, DAPO)


def files_of(run: Path) -> dict[str, Any]:
    kept = ("reward/", "episode/", "loss/", "policy/", "advantages/", "rollout/length", "eval/")
    rows = read_metrics(run / "metrics.jsonl")
    found: dict[str, Any] = {"rows": [{k: v for k, v in row.items() if k.startswith(kept)} for row in rows]}
    for path in sorted((run / "rollouts").iterdir()):
        found[path.name] = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    return found


@pytest.mark.parametrize("rewrites", [True, False])
def test_a_resumed_run_plays_the_same_episodes(
    rewrites: bool, trainer: Callable[..., RLTrainer], tmp_path: Path
) -> None:
    whole = trainer(recipe(tmp_path / "whole", rewrites)).train()

    class Stopping(Echo):
        count = 0

        async def reset(self, item: Item) -> str:
            Stopping.count += 1
            if Stopping.count > 12:
                raise OSError("the simulator is gone")
            return await super().reset(item)

    broken = recipe(tmp_path / "cut", rewrites, checkpoint=CheckpointConfig(every_steps=1))
    with pytest.raises(UserError, match="`reset` raised OSError") as raised:
        trainer(broken, environment=Stopping).train()
    assert "resume" in raised.value.remedy
    cut = trainer(broken, resume=True).train()
    assert files_of(cut.path) == files_of(whole.path)
    one, two = (dict(result.model.named_parameters()) for result in (whole, cut))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_held_out_episodes_are_scored_by_their_own_rewards(
    trainer: Callable[..., RLTrainer], tmp_path: Path, prompts: list[str], digits: Any
) -> None:
    evaluation = EvaluationConfig(sampling=SamplingConfig(temperature=0.0, max_new_tokens=4))
    used = recipe(tmp_path / "run", True, steps=1, evaluation=evaluation)
    result = trainer(used, rewards=[digits], evaluation_prompts=prompts[:3]).train()
    rows = [row for row in read_metrics(result.path / "metrics.jsonl") if "eval/score_mean" in row]
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert row["eval/score_mean"] == pytest.approx(row["eval/environment"] + row["eval/share_of_digits"])
        assert 2 <= row["eval/length_mean"] <= 8, "tokens of both turns"


# What does not fit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        (ReMax(), "greedy"),
        (DAPO(overlong=OverlongConfig(buffer=2)), "overlong"),
    ],
)
def test_methods_about_single_responses_are_refused(tmp_path: Path, algorithm: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        recipe(tmp_path, True, algorithm=algorithm)
