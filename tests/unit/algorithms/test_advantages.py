import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quartet.algorithms.advantages import (
    gae,
    group_relative_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
)

PUBLISHED_SCORES = torch.tensor([1, 2, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10], dtype=torch.float64)
PUBLISHED_GROUPS = torch.arange(12) % 3


def slow_gae(rewards, values, layout, gamma, gae_lambda):
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for n in range(layout.num_owners):
        next_value = next_advantage = 0.0
        for t in reversed(layout.tokens_of(n)):
            delta = rewards[t] + gamma * next_value - values[t]
            advantages[t] = next_advantage = delta + gamma * gae_lambda * next_advantage
            returns[t] = advantages[t] + values[t]
            next_value = values[t]
    return advantages, returns


# GAE -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.0, 0.5), (0.7, 0.0)])
@pytest.mark.parametrize("num_tokens", [1, 60, 700])
def test_gae_matches_a_loop(gamma, gae_lambda, num_tokens, make_layout, close):
    layout = make_layout(num_tokens, num_tokens)
    rewards, values = layout.normal(0), layout.normal(1)
    expected = slow_gae(rewards, values, layout, gamma, gae_lambda)
    poison = float("-inf")
    found = gae(layout.poisoned(rewards, poison), layout.poisoned(values, poison), layout.acting, gamma, gae_lambda)
    for actual, wanted in zip(found, expected, strict=True):
        close(actual, wanted)


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.99, 0.9), (0.7, 0.0)])
def test_gae_with_values_behind_the_end_matches_a_loop(gamma, gae_lambda, make_layout, close):
    """A value behind the end is a last reward of that value, discounted once; 0 is none."""
    layout = make_layout(11)
    rewards, values = layout.normal(0), layout.normal(1)
    behind = torch.tensor([0.0, 2.0, -3.0] * layout.num_owners, dtype=torch.float64)[: layout.num_owners]
    ended = rewards.clone()
    for n in range(layout.num_owners):
        if layout.tokens_of(n):
            ended[layout.tokens_of(n)[-1]] += gamma * behind[n]
    found = gae(rewards, values, layout.acting, gamma, gae_lambda, bootstrap_N=behind)
    for actual, wanted in zip(found, slow_gae(ended, values, layout, gamma, gae_lambda), strict=True):
        close(actual, wanted)
    plain = gae(rewards, values, layout.acting, gamma, gae_lambda)
    assert not torch.equal(found[0], plain[0])


def test_a_final_reward_reaches_the_first_turn_of_another_sequence():
    # Two sequences of one trajectory, with another trajectory's tokens between them.
    owner = torch.tensor([0, 1, 1, -1, 0])
    rewards = torch.tensor([0.0, 0.0, 5.0, 0.0, 1.0])
    advantages, _ = gae(rewards, torch.zeros(5), owner, 1.0, 1.0)
    assert advantages.tolist() == [1.0, 5.0, 5.0, 0.0, 1.0]


def test_gae_of_nothing_and_of_fully_masked_rows():
    empty = torch.zeros(0)
    found = gae(empty, empty, empty.long(), 1.0, 0.95)
    assert found[0].shape == found[1].shape == (0,)
    nan = torch.full((3,), float("nan"))
    masked = gae(nan, nan, torch.full((3,), -1), 1.0, 0.95)
    assert masked[0].tolist() == masked[1].tolist() == [0, 0, 0]


def test_gae_is_a_constant(make_layout, unchanged):
    layout = make_layout(3)
    values = layout.normal(0).requires_grad_()
    assert not gae(layout.normal(1), values, layout.acting, 1.0, 0.95)[1].requires_grad
    unchanged(gae, layout.normal(1), values, layout.acting, 1.0, 0.95)


# Groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("deviation", "share"), [(1e-4, 0.99), (1e-6, 0.5), (1e-8, 0.0099)])
def test_nearly_equal_rewards_are_no_equal_rewards(deviation, share):
    # docs/conventions.md: the share of a full-size advantage that is left at this standard deviation.
    scores = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    group = torch.zeros(3, dtype=torch.int64)
    found = group_relative_advantages(scores * deviation, group, normalise_std=True)
    assert float(found[2]) == pytest.approx(share, rel=2e-3)


@given(st.lists(st.integers(2, 5), min_size=1, max_size=5), st.integers(0, 2**31))
def test_groups_match_a_loop(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    group = torch.tensor([10 * g for g, size in enumerate(sizes) for _ in range(size)])
    group = group[torch.randperm(len(group), generator=generator)]
    scores = torch.randn(len(group), generator=generator, dtype=torch.float64)
    centred, normalised, left_out = (torch.zeros_like(scores) for _ in range(3))
    for n in range(len(group)):
        members = [m for m in range(len(group)) if group[m] == group[n]]
        others = [m for m in members if m != n]
        centred[n] = scores[n] - scores[members].mean()
        normalised[n] = centred[n] / (scores[members].std() + 1e-6)
        left_out[n] = scores[n] - scores[others].mean()
    exact = {"atol": 1e-10, "rtol": 1e-9}
    torch.testing.assert_close(group_relative_advantages(scores, group, False), centred, **exact)
    torch.testing.assert_close(group_relative_advantages(scores, group, True), normalised, **exact)
    torch.testing.assert_close(leave_one_out_advantages(scores, group), left_out, **exact)


ESTIMATORS = {
    "grpo": lambda scores, group, **raw: group_relative_advantages(scores, group, True, **raw),
    "dr_grpo": lambda scores, group, **raw: group_relative_advantages(scores, group, False, **raw),
    "rloo": leave_one_out_advantages,
    # Lengths that depend on the score alone, so that they travel with their members.
    "opo": lambda scores, group, **raw: length_weighted_advantages(
        scores, 1 + scores.float().abs().clamp(max=50), group, **raw
    ),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("score", [0.1, -7.3, 1e6, 1e-30])
def test_equal_scores_give_exactly_zero(name, size, score):
    scores = torch.cat([torch.full((size,), score), torch.tensor([1.0, 2.0])])
    group = torch.tensor([0] * size + [1, 1])
    advantages = ESTIMATORS[name](scores, group)
    assert torch.all(advantages[:size] == 0)
    assert torch.all(advantages[size:] != 0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equality_is_judged_on_raw_scores(name):
    raw = torch.tensor([1.0, 1.0, 0.0, 1.0])
    with_kl = raw - torch.tensor([0.1, 0.2, 0.3, 0.4])
    advantages = ESTIMATORS[name](with_kl, torch.tensor([0, 0, 1, 1]), raw_scores_N=raw)
    assert advantages[:2].tolist() == [0, 0] and torch.all(advantages[2:] != 0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_groups_of_one_are_refused_by_name(name):
    with pytest.raises(ValueError, match=r"groups of one: \[7\]"):
        ESTIMATORS[name](torch.ones(3), torch.tensor([0, 7, 0]))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_bfloat16_scores(name, close):
    # These scores are exact in bfloat16.
    found = ESTIMATORS[name](PUBLISHED_SCORES.bfloat16(), PUBLISHED_GROUPS)
    assert found.dtype == torch.float32
    close(found, ESTIMATORS[name](PUBLISHED_SCORES, PUBLISHED_GROUPS))
