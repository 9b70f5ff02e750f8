"""Advantages of a step against cases computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.config.algorithms import (
    GDPO,
    GRPO,
    PPO,
    RLOO,
    AlgorithmConfig,
    ClipCovLoss,
    KLConfig,
    KLCovLoss,
    OffPolicyConfig,
    RejectionConfig,
)
from quartet.schedule.iteration import Chunk
from quartet.trainers.experience import Experience, ExperienceAssembler

NAN = float("nan")
NO_KL = KLConfig(coef=0.0)


def step(
    groups: Sequence[Sequence[int]],
    scores: Mapping[str, Sequence[float]],
    *,
    ended: Sequence[bool] | None = None,
    columns: Mapping[str, Sequence[float]] | None = None,
    per_chunk: int = 1,
) -> list[tuple[Chunk, list[ColumnSet]]]:
    """Chunks of ``per_chunk`` groups; ``groups[g]`` holds the lengths of its responses, ``columns`` one value per
    response token in order."""
    chunks, place, sample = [], 0, 0
    for index, start in enumerate(range(0, len(groups), per_chunk)):
        part = groups[start : start + per_chunk]
        names = [f"{start + g}.{r}" for g, lengths in enumerate(part) for r in range(len(lengths))]
        batch = RaggedBatch.from_groups([[5, 6]] * len(part), [[[7] * n for n in lengths] for lengths in part], names)
        mask = batch.sequence_index() >= 0
        num_tokens, num = int(mask.sum()), len(names)
        batch = batch.with_token(action_mask=mask, loss_mask=mask, rollout_logprobs=torch.zeros(batch.num_tokens))
        batch = batch.with_sequence(
            group=torch.tensor([start + g for g, lengths in enumerate(part) for _ in lengths]),
            response=torch.tensor([r for lengths in part for r in range(len(lengths))]),
            ended=torch.tensor([True] * num if ended is None else list(ended[sample : sample + num])),
        )
        token = {}
        for name, values in (columns or {}).items():
            token[name] = torch.zeros(batch.num_tokens)
            token[name][mask] = torch.tensor(list(values[place : place + num_tokens]), dtype=torch.float32)
        rewards = {f"reward/{name}": torch.tensor(list(v[sample : sample + num])) for name, v in scores.items()}
        chunks.append((Chunk(3, index, batch), [ColumnSet(batch.ids, token, rewards)]))
        place, sample = place + num_tokens, sample + num
    return chunks


def assemble(
    config: AlgorithmConfig,
    chunks: list[tuple[Chunk, list[ColumnSet]]],
    *,
    weights: Mapping[str, float] | None = None,
    shuffle: Callable[[int, int], Tensor] | None = None,
) -> Experience:
    return ExperienceAssembler(config, weights or {"score": 1.0}, lambda: config.kl.coef, shuffle)(chunks)


def actions(experience: Experience, name: str) -> list[float]:
    """A token field on all response tokens, those that were left out included."""
    batch = experience.batch
    return batch.token[name][batch.sequence_index() >= 0].tolist()


@pytest.mark.parametrize("config", [GRPO(kl=NO_KL), RLOO(kl=NO_KL)])
def test_equal_rewards_give_exactly_zero(config: AlgorithmConfig) -> None:
    chunks = step([[2, 1, 3], [1, 1, 1]], {"score": [0.1, 0.1, 0.1, 0.0, 1.0, 1.0]})
    experience = assemble(config, chunks)
    assert actions(experience, "advantages")[:6] == [0.0] * 6
    assert any(actions(experience, "advantages")[6:])
    assert experience.metrics["groups/zero_variance"] == 0.5


@pytest.mark.parametrize("config", [RLOO(kl=KLConfig(coef=0.1)), GRPO(kl=KLConfig(coef=0.1, place="reward"))])
def test_equality_looks_at_raw_scores_before_kl_enters(config: AlgorithmConfig) -> None:
    columns = {"old_logprobs": [-1.0, -2.0], "ref_logprobs": [-3.0, -2.0]}
    experience = assemble(config, step([[1, 1]], {"score": [1.0, 1.0]}, columns=columns))
    assert experience.batch.sequence["total_reward"].tolist() != [1.0, 1.0]
    assert actions(experience, "advantages") == [0.0, 0.0]


def test_a_reward_that_does_not_apply_is_left_out_of_baseline_masks_and_means() -> None:
    chunks = step([[1, 1, 2], [1, 1]], {"score": [1.0, 2.0, NAN, 4.0, 8.0]})
    experience = assemble(RLOO(kl=NO_KL), chunks)
    assert actions(experience, "advantages") == pytest.approx([-1.0, 1.0, 0.0, 0.0, -4.0, 4.0])
    assert actions(experience, "loss_mask") == [True, True, False, False, True, True]
    assert actions(experience, "action_mask") == actions(experience, "loss_mask")
    assert experience.metrics["reward/not_applicable"] == 1.0
    assert experience.metrics["reward/score_mean"] == pytest.approx(15.0 / 4)
    assert experience.metrics["groups/zero_variance"] == 0.0
    assert math.isnan(experience.batch.sequence["score"][2])


def test_sources_are_weighted_and_one_that_does_not_apply_drops_out_of_the_sum() -> None:
    chunks = step([[1, 1, 1]], {"a": [1.0, 2.0, NAN], "b": [4.0, NAN, NAN]})
    experience = assemble(GRPO(kl=NO_KL), chunks, weights={"a": 2.0, "b": 0.5})
    assert experience.batch.sequence["score"].tolist()[:2] == [4.0, 4.0]
    assert experience.metrics["reward/not_applicable"] == 1.0
    assert experience.metrics["reward/a"] == pytest.approx(1.5)
    assert experience.metrics["reward/b"] == pytest.approx(4.0)


@pytest.mark.parametrize("config", [PPO(kl=KLConfig(coef=0.1)), RLOO(kl=KLConfig(coef=0.1)), GRPO()])
def test_cutting_into_chunks_changes_nothing(config: AlgorithmConfig) -> None:
    groups, scores = [[2, 1], [1, 3], [2, 2]], {"score": [1.0, 2.0, 0.5, 0.5, 3.0, -1.0]}
    drawn = torch.randn(3, 11, generator=torch.Generator().manual_seed(0)).tolist()
    columns = dict(zip(("old_logprobs", "ref_logprobs", "values"), drawn, strict=True))
    one, three = (assemble(config, step(groups, scores, columns=columns, per_chunk=n)) for n in (1, 3))
    assert one.batch.ids == three.batch.ids
    assert actions(one, "advantages") == actions(three, "advantages")
    assert one.metrics == three.metrics


# Parts of a step -----------------------------------------------------------------------------------------


def test_responses_that_sampler_and_trainer_disagree_about_are_left_out() -> None:
    """Their scores stay in the group's mean: 1 and 3 around 2. The sampler's log-probabilities are 0."""
    config = GRPO(normalise_std=False, off_policy=OffPolicyConfig(rejection=RejectionConfig(upper=1.2)))
    columns = {"old_logprobs": [0.3, 0.1, 0.1, -0.2, -0.4, -0.1]}
    experience = assemble(config, step([[2, 1], [2, 1]], {"score": [1.0, 3.0, 0.0, 1.0]}, columns=columns))
    # Geometric means e^0.2, e^0.1, e^-0.3 and e^-0.1, against 1.2 = e^0.18.
    assert actions(experience, "loss_mask") == [False, False, True, False, False, True]
    assert actions(experience, "advantages") == [-1.0, -1.0, 1.0, -0.5, -0.5, 0.5]
    assert experience.metrics["correction/rejected_frac"] == 0.5
    lower = RejectionConfig(statistic="sequence", upper=1.5, lower=0.9)
    config = GRPO(off_policy=OffPolicyConfig(rejection=lower))
    again = assemble(config, step([[2, 1], [2, 1]], {"score": [1.0, 3.0, 0.0, 1.0]}, columns=columns))
    assert actions(again, "loss_mask") == [True, True, True, False, False, True]


def test_tokens_are_told_apart_over_the_whole_step_however_it_was_cut() -> None:
    columns = {"old_logprobs": [-1.0, -4.0, -2.0, -1.0, -5.0, -2.0], "old_entropies": [0.1, 0.9, 0.3, 0.8, 0.2, 0.5]}
    scores = {"score": [1.0, 3.0, 0.0, 4.0]}
    config = GRPO(normalise_std=False, top_entropy_quantile=0.34, policy_loss=KLCovLoss(kl_cov_ratio=0.34))
    for per_chunk in (1, 2):
        chunks = step([[2, 1], [2, 1]], scores, columns=columns, per_chunk=per_chunk)
        experience = assemble(config, chunks)
        # Without means: advantages -0.5, -0.5, 1.5, -1.5, -1.5, 2.5; log-probabilities 1.5, -1.5, 0.5, 1.5, -2.5, 0.5.
        assert actions(experience, "high_covariance") == [False, False, False, False, True, True]
        assert actions(experience, "high_entropy") == [False, True, False, True, False, False]
        for kind in ("entropy", "covariance"):
            assert experience.metrics[f"policy/high_{kind}_frac"] == pytest.approx(1 / 3)
    chunks = step([[2, 1], [2, 1]], scores, columns=columns)
    config = GRPO(normalise_std=False, policy_loss=ClipCovLoss(clip_cov_ratio=0.2, clip_cov_lb=0.0, clip_cov_ub=4.0))
    weights, chosen = {"score": 1.0}, set()
    for seed in range(20):
        found = actions(ExperienceAssembler(config, weights, lambda: 0.0, seed=seed)(chunks), "high_covariance")
        assert found == actions(ExperienceAssembler(config, weights, lambda: 0.0, seed=seed)(chunks), "high_covariance")
        assert sum(found) == 1
        chosen.add(found.index(True))
    assert chosen == {1, 2, 4, 5}, "those with a covariance of 0.75, 0.75, 3.75 and 1.25"


def test_sources_are_normalised_within_groups_before_they_are_added_up() -> None:
    """Scores in the thousands do not drown those in tenths; the kept score is the sum as it is."""
    scores = {"a": [1000.0, 3000.0, 5.0, 5.0], "b": [0.3, 0.1, 0.1, 0.3]}
    config = GDPO(whiten_advantages=False)
    experience = assemble(config, step([[2, 1], [1, 1]], scores), weights={"a": 1.0, "b": 0.5})
    root = math.sqrt(0.5)
    expected = [-root + root / 2, -root + root / 2, root - root / 2, -root / 2, root / 2]
    assert actions(experience, "advantages") == pytest.approx(expected, abs=1e-4)
    assert experience.batch.sequence["score"].tolist() == pytest.approx([1000.15, 3000.05, 5.05, 5.15])
