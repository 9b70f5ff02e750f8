"""Every method's advantages against a slow reference in plain loops, and the properties they all have."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from torch import Tensor

from quartet.algorithms.segments import masked_owner
from quartet.batch.ragged import RaggedBatch
from quartet.config.algorithms import (
    CISPO,
    DAPO,
    GDPO,
    GMPO,
    GPG,
    GRPO,
    GSPO,
    OPO,
    PPO,
    RLOO,
    SAPO,
    Distillation,
    DrGRPO,
    GroupAlgorithm,
    GroupRelativeAlgorithm,
    OptimalTokenBaseline,
    PassAtK,
    PolicyGradientConfig,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from quartet.trainers.experience import SHARP, ScoredBatch, estimate_advantages, shaped_scores

METHODS: dict[str, PolicyGradientConfig] = {
    config.name: config
    for config in (
        PPO(gamma=0.9, gae_lambda=0.8), GRPO(), DrGRPO(), DAPO(), GSPO(), CISPO(), GPG(), RLOO(), OPO(),
        ReinforcePlusPlus(gamma=0.9), ReinforcePlusPlusBaseline(), ReMax(gamma=0.9), Distillation(),
        SAPO(), GMPO(), GDPO(), PassAtK(), OptimalTokenBaseline(),
    )
}  # fmt: skip
NAMES = set(METHODS)
METHODS |= {
    "grpo, batch": GRPO(normalise_std="batch"),
    "rloo, whitened": RLOO(whiten_advantages=True),
    "ppo, mean": PPO(gamma=0.9, gae_lambda=0.8, whiten_advantages="mean"),
    "reinforce_pp_baseline, mean": ReinforcePlusPlusBaseline(whiten_advantages="mean"),
    "optimal_token_baseline, whitened": OptimalTokenBaseline(whiten_advantages=True),
}
EQUAL = 2
"""The group whose scores are equal."""


def scored(seed: int = 0, kl_coef: float = 0.3, permutation: list[int] | None = None) -> ScoredBatch:
    """Four groups of three trajectories over a flat batch: lengths from 1, masked tokens between, unowned tokens before
    each trajectory, one trajectory without action tokens, a group of equal scores."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (12,), generator=generator).tolist()
    lengths[0] = 1
    columns = [torch.randn(n + 2, generator=generator, dtype=torch.float64) for n in lengths for _ in range(4)]
    sharp = [1.5 * columns[4 * n + 2] - 0.4 for n in range(12)]
    masks = [torch.rand(n + 2, generator=generator) < 0.8 for n in lengths]
    scores = torch.randn(12, generator=generator, dtype=torch.float64)
    scores[3 * EQUAL : 3 * EQUAL + 3] = 0.1
    baseline = torch.randn(12, generator=generator, dtype=torch.float64)
    for n, mask in enumerate(masks):
        mask[:2] = False
        mask[-1] = True
        masks[n] = mask & (n != 4)
    order = permutation if permutation is not None else list(range(12))
    owner = torch.cat([torch.tensor([-1, -1] + [i] * lengths[n]) for i, n in enumerate(order)])
    mask = torch.cat([masks[n] for n in order])
    token = {
        name: torch.cat([columns[4 * n + c] for n in order])
        for c, name in enumerate(("values", "ref_logprobs", "old_logprobs", "kl"))
    }
    token[SHARP] = torch.cat([sharp[n] for n in order])
    kl = torch.where(mask, token.pop("kl"), 0.0)
    batch = RaggedBatch.from_sequences([[7] * len(owner)], token=token)
    return ScoredBatch(
        batch=batch,
        owner_T=masked_owner(owner, mask),
        scores_N=scores[order],
        shaped_N=scores[order],
        kl_T=kl,
        kl_coef=kl_coef,
        group_N=torch.tensor([10 + n // 3 for n in order]),
        length_N=torch.tensor([int(masks[n].sum()) for n in order]),
        ended_N=torch.tensor([n % 3 > 0 for n in order]),
        baseline_N=baseline[order],
    )


# The slow reference --------------------------------------------------------------------------------------


def tokens_of(data: ScoredBatch) -> list[list[int]]:
    num = len(data.scores_N)
    return [[t for t in range(len(data.owner_T)) if data.owner_T[t] == n] for n in range(num)]


def slow(config: PolicyGradientConfig, data: ScoredBatch) -> Tensor:
    owned = tokens_of(data)
    rewards = [[-data.kl_coef * float(data.kl_T[t]) for t in tokens] for tokens in owned]
    for n, row in enumerate(rewards):
        if row:
            row[-1] += float(data.shaped_N[n])
    found = torch.zeros(len(data.owner_T), dtype=torch.float64)
    if isinstance(config, OptimalTokenBaseline):
        for n, tokens in enumerate(owned):
            found[tokens] = torch.tensor(_slow_optimal(data, owned, rewards, n), dtype=torch.float64)
    elif isinstance(config, GroupAlgorithm):
        for n, advantage in enumerate(_slow_groups(config, data, owned, rewards)):
            found[owned[n]] = 0.0 if data.group_N[n] == 10 + EQUAL else advantage
    else:
        for n, tokens in enumerate(owned):
            found[tokens] = torch.tensor(_slow_tokens(config, data, n, tokens, rewards[n]), dtype=torch.float64)
    whitens = getattr(config, "whiten_advantages", False)
    if whitens:
        every = [t for tokens in owned for t in tokens]
        spread = 1.0 if whitens == "mean" else found[every].std() + 1e-6
        found[every] = (found[every] - found[every].mean()) / spread
    if isinstance(config, GroupAlgorithm):
        for n, tokens in enumerate(owned):
            if data.group_N[n] == 10 + EQUAL:
                found[tokens] = 0.0
    return found


def _slow_optimal(data: ScoredBatch, owned, rewards, n: int) -> list[float]:
    """Of trajectory ``n``; one without ties for its length gets 0 where it is alone."""
    token, found = data.batch.token, []
    members = [m for m in range(len(owned)) if data.group_N[m] == data.group_N[n]]
    for t in range(len(owned[n])):
        numerator = denominator = 0.0
        for m in (m for m in members if len(owned[m]) > t):
            energies = []
            for u in owned[m][: t + 1]:
                plain, sharp = float(token["old_logprobs"][u]), float(token[SHARP][u])
                energies.append(max(0.0, 1 - 2 * math.exp(plain) + math.exp(min(0.0, 2 * plain - sharp))))
            numerator += sum(energies) * sum(rewards[m][t:])
            denominator += sum(energies)
        found.append(sum(rewards[n][t:]) - numerator / max(denominator, 1e-8))
    return found


def _slow_groups(config, data: ScoredBatch, owned, rewards) -> list[float]:
    """One advantage per trajectory; those without a token take no part."""
    found = [0.0] * len(owned)
    totals = [sum(row) for row in rewards]
    acting = [n for n, tokens in enumerate(owned) if tokens]
    varying = [n for n in acting if data.group_N[n] != 10 + EQUAL]
    for n in acting:
        members = [m for m, tokens in enumerate(owned) if tokens and data.group_N[m] == data.group_N[n]]
        mean = sum(totals[m] for m in members) / len(members)
        if isinstance(config, RLOO):
            found[n] = totals[n] - sum(totals[m] for m in members if m != n) / (len(members) - 1)
        elif isinstance(config, OPO):
            weight = sum(len(owned[m]) for m in members)
            found[n] = totals[n] - sum(len(owned[m]) * totals[m] for m in members) / weight
        else:
            found[n] = totals[n] - mean
            if isinstance(config, PassAtK):
                found[n] = _slow_best_of_two(totals, members, n)
            elif isinstance(config, GroupRelativeAlgorithm) and config.normalise_std:
                pool = acting if config.normalise_std == "batch" else members
                mean = sum(totals[m] for m in pool) / len(pool)
                variance = sum((totals[m] - mean) ** 2 for m in pool) / (len(pool) - 1)
                found[n] /= math.sqrt(variance) + 1e-6
            if isinstance(config, GPG):
                found[n] *= len(acting) / len(varying)
    return found


def _slow_best_of_two(totals, members: list[int], n: int) -> float:
    """Of all pairs in the group; of two members each is a choice of its own."""
    chosen = list(combinations(members, min(2, len(members) - 1)))
    best = [max(totals[m] for m in pair) for pair in chosen]
    mean = sum(best) / len(best)
    own = [b for b, pair in zip(best, chosen, strict=True) if n in pair]
    return (sum(own) / len(own) - mean) / (math.sqrt(sum((b - mean) ** 2 for b in best) / len(best)) + 1e-6)


def _slow_tokens(config, data: ScoredBatch, n: int, tokens: list[int], rewards: list[float]) -> list[float]:
    token = data.batch.token
    if isinstance(config, Distillation):
        return [float(token["ref_logprobs"][t] - token["old_logprobs"][t]) for t in tokens]
    found = []
    for i in range(len(tokens)):
        if isinstance(config, PPO):
            total = 0.0
            for j in range(i, len(tokens)):
                after = float(token["values"][tokens[j + 1]]) if j + 1 < len(tokens) else 0.0
                delta = rewards[j] + config.gamma * after - float(token["values"][tokens[j]])
                total += (config.gamma * config.gae_lambda) ** (j - i) * delta
            found.append(total)
            continue
        total = sum(config.gamma ** (j - i) * rewards[j] for j in range(i, len(tokens)))
        found.append(total - (float(data.baseline_N[n]) if isinstance(config, ReMax) else 0.0))
    return found


# Tests ---------------------------------------------------------------------------------------------------


@pytest.fixture
def close(tolerances: dict[torch.dtype, tuple[float, float]]) -> Callable[[Tensor, Tensor], None]:
    def check(actual: Tensor, expected: Tensor) -> None:
        atol, rtol = tolerances[torch.float64]
        torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)

    return check


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("name", METHODS)
def test_matches_the_slow_reference(name: str, kl_coef: float, seed: int, close) -> None:
    data = scored(seed, kl_coef)
    found = estimate_advantages(METHODS[name], data)
    close(found.advantages_T, slow(METHODS[name], data))
    totals = torch.tensor(
        [float(data.shaped_N[n]) - kl_coef * float(data.kl_T[tokens].sum()) for n, tokens in enumerate(tokens_of(data))]
    )
    if name == "distillation":
        totals = data.scores_N.float()
    acting = data.length_N > 0
    torch.testing.assert_close(found.rewards_N[acting].float(), totals[acting])


@pytest.mark.parametrize("name", [name for name, config in METHODS.items() if isinstance(config, GroupAlgorithm)])
def test_equal_scores_give_exactly_zero_whatever_the_kl(name: str) -> None:
    data = scored(kl_coef=0.3)
    found = estimate_advantages(METHODS[name], data).advantages_T
    equal = (data.owner_T >= 3 * EQUAL) & (data.owner_T < 3 * EQUAL + 3)
    assert bool(equal.any()) and torch.all(found[equal] == 0)
    if not isinstance(METHODS[name], PassAtK | OptimalTokenBaseline):  # in which some have no say
        assert torch.all(found[data.action_mask_T & ~equal] != 0)


@pytest.mark.parametrize("name", METHODS)
def test_masked_positions_may_hold_anything(name: str, close) -> None:
    data = scored()
    acts = data.action_mask_T
    poisoned = {k: torch.where(acts, v, -math.inf) for k, v in data.batch.token.items()}
    batch = RaggedBatch.from_sequences([[7] * len(acts)], token=poisoned)
    with_poison = replace(data, batch=batch, kl_T=torch.where(acts, data.kl_T, math.nan))
    found = estimate_advantages(METHODS[name], with_poison)
    close(found.advantages_T, estimate_advantages(METHODS[name], data).advantages_T)
    assert torch.all(found.advantages_T[~acts] == 0)


@pytest.mark.parametrize("name", METHODS)
def test_a_step_without_trained_tokens_is_all_zero(name: str) -> None:
    data = scored()
    found = estimate_advantages(METHODS[name], replace(data, owner_T=torch.full_like(data.owner_T, -1)))
    assert torch.all(found.advantages_T == 0) and torch.all(found.token_rewards_T == 0)


def test_every_method_of_the_recipe_is_covered() -> None:
    assert set(NAMES) == {member.model_fields["name"].default for member in PolicyGradientConfig.__args__}


# Shaping -------------------------------------------------------------------------------------------------


def test_scores_are_held_within_their_range_before_penalties() -> None:
    config = RLOO(missing_eos_penalty=0.5, reward_clip_range=(-1.0, 2.0))
    ended = torch.tensor([True, False, True, False])
    found = shaped_scores(config, torch.tensor([9.0, 9.0, 0.5, -9.0]), ended, torch.ones(4), 4)
    assert found.tolist() == [2.0, 1.5, 0.5, -1.5]
