"""Returns of tokens, baselines per trajectory, and what becomes of equal scores under whitening."""

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quartet.algorithms.advantages import (
    discounted_returns,
    group_relative_advantages,
    length_weighted_advantages,
    normalise_in_groups,
    optimal_token_baseline,
    overlong_penalty,
    pass_at_k_advantages,
    rescale_by_informative_groups,
    score_energy,
    subtract_baseline,
    teacher_advantages,
    whiten_unless_equal,
)
from quartet.algorithms.segments import masked_owner, masked_whiten

NAN, INFINITY = float("nan"), float("inf")


def slow_returns(rewards, layout, gamma):
    returns = torch.zeros_like(rewards)
    for n in range(layout.num_owners):
        after = 0.0
        for t in reversed(layout.tokens_of(n)):
            returns[t] = after = rewards[t] + gamma * after
    return returns


# Discounted returns --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.0, 0.7, 0.99, 1.0])
@pytest.mark.parametrize("num_tokens", [1, 60, 700])
def test_returns_match_a_loop(gamma, num_tokens, make_layout, close):
    layout = make_layout(num_tokens, num_tokens)
    rewards = layout.normal(0)
    found = discounted_returns(layout.poisoned(rewards, -INFINITY), layout.acting, gamma)
    close(found, slow_returns(rewards, layout, gamma))


# A baseline from elsewhere -------------------------------------------------------------------------------


def test_less_baseline_matches_a_loop(make_layout, close):
    layout = make_layout(6)
    returns, baseline = layout.normal(0), torch.arange(layout.num_owners, dtype=torch.float64)
    expected = torch.zeros_like(returns)
    for n in range(layout.num_owners):
        for t in layout.tokens_of(n):
            expected[t] = returns[t] - baseline[n]
    close(subtract_baseline(layout.poisoned(returns, NAN), baseline, layout.acting), expected)


def test_teacher_advantages_by_hand():
    teacher = torch.tensor([-1.0, -2.0, -INFINITY, -0.5])
    policy = torch.tensor([-3.0, -0.5, NAN, -0.5])
    found = teacher_advantages(teacher, policy, torch.tensor([True, True, False, True]))
    assert found.tolist() == [2.0, -1.5, 0.0, 0.0]
    assert teacher_advantages(teacher.bfloat16(), policy.bfloat16(), torch.tensor([True] * 2 + [False] * 2)).dtype == (
        torch.float32
    )


def test_the_plain_policy_gradient_of_teacher_advantages_is_that_of_the_divergence(close):
    logits = torch.tensor([1.0, 2.0, 0.5, -1.0], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.5, 2.5, 0.0, 0.0], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    (divergence,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    # The expectation over the policy's own tokens, with the advantages held fixed.
    advantages = teacher_advantages(teacher, policy.detach(), torch.ones(4, dtype=torch.bool))
    (found,) = torch.autograd.grad((policy.exp().detach() * -advantages * policy).sum(), logits)
    close(found, divergence)


# Length-weighted -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(2, 5), min_size=1, max_size=5), st.integers(0, 2**31), st.sampled_from([0.0, 1e7]))
def test_length_weighted_matches_a_loop(sizes, seed, offset):
    generator = torch.Generator().manual_seed(seed)
    group = torch.tensor([10 * g for g, size in enumerate(sizes) for _ in range(size)])
    group = group[torch.randperm(len(group), generator=generator)]
    scores = torch.randn(len(group), generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, 100, (len(group),), generator=generator)
    expected = torch.zeros_like(scores)
    for n in range(len(group)):
        members = [m for m in range(len(group)) if group[m] == group[n]]
        expected[n] = scores[n] - sum(lengths[m] * scores[m] for m in members) / sum(lengths[m] for m in members)
    torch.testing.assert_close(
        length_weighted_advantages(scores + offset, lengths, group), expected, atol=1e-7, rtol=1e-9
    )


# Rescaled groups -----------------------------------------------------------------------------------------


def test_rescaling_by_hand(close):
    """Five of nine responses are in groups with variance: the mean of all is that of these five."""
    group = torch.tensor([4, 4, 7, 7, 7, 2, 2, 9, 9])
    scores = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.1, 0.1, 3.0, 3.0], dtype=torch.float64)
    plain = group_relative_advantages(scores, group, normalise_std=False)
    found = rescale_by_informative_groups(plain, group, scores)
    close(found, plain * 9 / 5)
    assert torch.all(found[5:] == 0)
    # The same gradient as a mean over the varying groups alone.
    slopes = torch.arange(9, dtype=torch.float64)
    close((found * slopes).mean(), (plain * slopes)[:5].mean())


# Whitened groups -----------------------------------------------------------------------------------------


def whitened(scores, group, layout_owner, mask):
    labels = torch.unique(group, return_inverse=True)[1]
    equal = torch.tensor([len(set(scores[labels == g].tolist())) == 1 for g in range(int(labels.max()) + 1)])
    return whiten_unless_equal(
        group_relative_advantages(scores, group, False), equal[labels], masked_owner(layout_owner, mask)
    )


def test_whitened_groups_match_a_loop_and_equal_ones_stay_exactly_zero(close):
    group = torch.tensor([0, 0, 1, 1, 2, 2])
    scores = torch.tensor([1.0, 2.0, 0.1, 0.1, 3.0, 9.0], dtype=torch.float64)
    lengths = [3, 1, 2, 2, 1, 4]
    owner = torch.tensor([n for n, length in enumerate(lengths) for _ in range(length)])
    mask = torch.ones(len(owner), dtype=torch.bool)
    mask[1] = False
    found = whitened(scores, group, owner, mask)
    raw = torch.tensor([{0: -0.5, 1: 0.5, 2: 0.0, 3: 0.0, 4: -3.0, 5: 3.0}[int(n)] for n in owner], dtype=torch.float64)
    kept = raw[mask]
    expected = torch.where(mask & ~((owner == 2) | (owner == 3)), (raw - kept.mean()) / (kept.std() + 1e-6), 0.0)
    assert abs(float(kept.mean())) > 0.1, "without the rule the equal group would move by the batch's mean"
    close(found, expected)
    assert torch.all(found[(owner == 2) | (owner == 3)] == 0)


def test_the_mean_alone_by_hand():
    mask = torch.tensor([True, True, False, True])
    assert masked_whiten(torch.tensor([1.0, 2.0, NAN, 6.0]), mask, scale=False).tolist() == [-2.0, -1.0, 0.0, 3.0]


# The whole batch, single sources -------------------------------------------------------------------------


def test_the_batchs_deviation_by_hand():
    # Deviations from the groups' means -1, 1, -2, 2; that of 1, 3, 2, 6 around 3 is sqrt((4 + 0 + 1 + 9) / 3).
    scores, group = torch.tensor([1.0, 3.0, 2.0, 6.0]), torch.tensor([4, 4, 9, 9])
    found = group_relative_advantages(scores, group, "batch")
    assert found.tolist() == pytest.approx([x / math.sqrt(14 / 3) for x in (-1, 1, -2, 2)], abs=1e-5)
    assert group_relative_advantages(torch.tensor([0.1, 0.1, 2.0, 6.0]), group, "batch")[:2].tolist() == [0.0, 0.0]


def test_sources_are_normalised_by_hand():
    # 1 and 3 around 2 with deviation sqrt(2); equal scores and one alone say nothing; NaN does not apply.
    scores, group = torch.tensor([1.0, 0.1, 3.0, NAN, 0.1, 5.0]), torch.tensor([2, 7, 2, 2, 7, 8])
    found = normalise_in_groups(scores, group)
    assert found[[0, 2]].tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-5)
    assert found[[1, 4, 5]].tolist() == [0.0, 0.0, 0.0] and bool(found[3].isnan())


# Best of k -----------------------------------------------------------------------------------------------


def slow_best_of_k(scores, k, normalise):
    sets = list(combinations(range(len(scores)), min(k, len(scores) - 1)))
    best = [max(scores[i] for i in chosen) for chosen in sets]
    mean = sum(best) / len(best)
    std = math.sqrt(sum((b - mean) ** 2 for b in best) / len(best)) + 1e-6 if normalise else 1.0
    own = [[b for b, chosen in zip(best, sets, strict=True) if i in chosen] for i in range(len(scores))]
    return [(sum(values) / len(values) - mean) / std for values in own]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3, 9])
def test_pass_at_k_matches_every_choice_in_any_order(k, normalise, unchanged):
    generator = torch.Generator().manual_seed(k)
    group = torch.tensor([3] * 5 + [1] * 7 + [8] * 2 + [0] * 6)
    scores = torch.randint(0, 4, (20,), generator=generator).double() + torch.where(group == 0, 1e3, 0.0)
    found = pass_at_k_advantages(scores, group, k, normalise)
    for g in (3, 1, 8, 0):
        expected = slow_best_of_k(scores[group == g].tolist(), k, normalise)
        assert found[group == g].tolist() == pytest.approx(expected, abs=1e-8)
    p = torch.randperm(20, generator=generator)
    torch.testing.assert_close(pass_at_k_advantages(scores[p], group[p], k, normalise), found[p])
    unchanged(pass_at_k_advantages, scores, group, k, normalise)
    assert pass_at_k_advantages(torch.full((3,), 0.1), torch.zeros(3), k, normalise).tolist() == [0.0] * 3


# Optimal token baseline ----------------------------------------------------------------------------------


def test_the_optimal_token_baseline_by_hand():
    # Two trajectories with returns 1 and 4; paths 1, 2 and 3, 4, 5: baselines 13 / 4, 18 / 6, and 4 alone.
    owner = torch.tensor([-1, 0, 1, 0, 1, 1, -1])
    returns = torch.tensor([NAN, 1.0, 4.0, 1.0, 4.0, 4.0, NAN])
    energy = torch.tensor([NAN, 1.0, 3.0, 1.0, 1.0, 1.0, NAN])
    found = optimal_token_baseline(returns, energy, torch.tensor([5, 5]), owner)
    assert found.tolist() == pytest.approx([0, 1 - 13 / 4, 4 - 13 / 4, 1 - 3, 4 - 3, 0, 0])


def test_the_energy_is_the_norm_of_the_scores_gradient():
    logits = torch.tensor([[2.0, 0.5, -1.0], [0.0, 0.0, 7.0]], dtype=torch.float64, requires_grad=True)
    labels, temperature = torch.tensor([1, 2]), 0.7
    plain, sharp = ((logits / t).log_softmax(-1)[torch.arange(2), labels] for t in (temperature, temperature / 2))
    (gradient,) = torch.autograd.grad(plain.sum(), logits)
    found = score_energy(plain, sharp, torch.tensor([True, True]))
    assert found.tolist() == pytest.approx((temperature * gradient).square().sum(-1).tolist())


# Long responses ------------------------------------------------------------------------------------------


def test_overlong_penalty_by_hand():
    lengths = torch.tensor([1, 12, 13, 14, 16, 99])
    found = overlong_penalty(lengths, limit=16, buffer=4, penalty=2.0)
    assert found.tolist() == [0.0, 0.0, 0.5, 1.0, 2.0, 2.0]


def test_baselines_leave_inputs_unchanged_and_are_constants(make_layout, unchanged):
    layout = make_layout(4)
    values = layout.normal(0).requires_grad_()
    per_owner = torch.ones(layout.num_owners, dtype=torch.float64, requires_grad=True)
    group = torch.zeros(layout.num_owners, dtype=torch.int64)
    calls = [
        (discounted_returns, (values, layout.acting, 0.9)),
        (subtract_baseline, (values, per_owner, layout.acting)),
        (teacher_advantages, (values, values, layout.mask)),
        (length_weighted_advantages, (per_owner, torch.ones(layout.num_owners), group)),
        (rescale_by_informative_groups, (per_owner, group, torch.arange(layout.num_owners))),
        (normalise_in_groups, (per_owner, group)),
        (pass_at_k_advantages, (per_owner, group, 2, True)),
        (optimal_token_baseline, (values, values, group, layout.acting)),
        (whiten_unless_equal, (per_owner, group > 0, layout.acting)),
        (overlong_penalty, (torch.arange(4), 8, 4, 1.0)),
    ]
    for function, arguments in calls:
        unchanged(function, *arguments)
        assert not function(*arguments).requires_grad, function.__name__
