"""Every token-level policy loss against a loop, and under every way to cut and order a batch."""

from functools import partial

import pytest
import torch

from quartet.algorithms.losses import (
    LossTokens,
    PolicyTokens,
    aggregation_denominators,
    cispo_loss,
    gmpo_loss,
    gspo_loss,
    kl_cov_loss,
    policy_loss,
    reinforce_loss,
    sapo_loss,
)

AGGREGATIONS = (
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm",
)  # fmt: skip
NORM = 9.0
INFINITY = float("inf")
CLIP = {"clip_eps_low": 0.1, "clip_eps_high": 0.15}
COEF = 0.7


def given(loss, policy, old, advantages, tokens, weights_T=None, **options):
    return loss(PolicyTokens(policy, old, advantages, tokens, weights_T), **options)


def kl_cov(tokens):
    return kl_cov_loss(tokens, held_T=tokens.old_logprobs_T < -1.9, ppo_kl_coef=COEF)


LOSSES = {
    "clipped": partial(given, policy_loss, **CLIP),
    "gspo": partial(given, gspo_loss, **CLIP),
    "cispo": partial(given, cispo_loss, **CLIP),
    "cispo-unbounded": partial(given, cispo_loss, clip_eps_low=None, clip_eps_high=0.15),
    "reinforce": partial(given, reinforce_loss),
    "sapo": partial(given, sapo_loss, tau_pos=1.0, tau_neg=1.4),
    "gmpo": partial(given, gmpo_loss, **CLIP),
    "kl_cov": partial(given, kl_cov),
}
SEQUENCE = ("gspo", "gmpo")
UNCLIPPED = ("reinforce", "sapo", "kl_cov")


def case(make_layout, num_tokens=60, num_owners=7, dtype=torch.float64):
    """Policy, old and advantages; the advantage is one per trajectory, as with group baselines."""
    layout = make_layout(0, num_tokens, num_owners)
    policy = layout.normal(1) - 2
    per_owner = torch.randn(2, num_owners, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    advantages, drift = (torch.where(layout.owner >= 0, row[layout.owner], 0.0) for row in per_owner)
    old = policy + 0.3 * layout.normal(2) + 0.3 * drift
    return layout, policy.to(dtype), old.to(dtype), advantages.to(dtype)


def run(name, layout, policy, old, advantages, aggregation="sequence_mean_token_mean", weights=None):
    return LOSSES[name](policy, old, advantages, layout.tokens(aggregation, norm=NORM), weights_T=weights)


def slow(name, layout, policy, old, advantages, aggregation, weights):
    """Loss with gradient, and the number of clipped tokens, token by token."""
    rows, clipped = [], 0
    for n in range(layout.num_owners):
        tokens = layout.tokens_of(n)
        row = []
        for t in tokens:
            if name in ("gspo", "clipped"):
                own = [t] if name == "clipped" else tokens
                ratio = (sum(policy[u] - old[u] for u in own) / len(own)).exp()
                bounded = ratio.clamp(0.9, 1.15)
                loss = torch.maximum(-advantages[t] * ratio, -advantages[t] * bounded)
                clipped += int(-advantages[t] * bounded > -advantages[t] * ratio)
            elif name == "reinforce":
                loss = -advantages[t] * policy[t]
            elif name == "sapo":
                tau = 1.0 if advantages[t] > 0 else 1.4
                gate = 1 / (1 + (-tau * ((policy[t] - old[t]).exp() - 1)).exp())
                loss = -advantages[t] * gate * 4 / tau
            elif name == "gmpo":
                # As published: the sign of the advantage taken out, the smaller of the two, the sign put back.
                sign, logs = (1 if advantages[t] > 0 else -1), [policy[u] - old[u] for u in tokens]
                held = [sign * torch.minimum(sign * x, sign * x.clamp(-0.1, 0.15)) for x in logs]
                loss = -advantages[t] * (sum(held) / len(held)).exp()
                clipped += int(held[tokens.index(t)] != policy[t] - old[t])
            elif name == "kl_cov":
                log_ratio = policy[t] - old[t]
                loss = -advantages[t] * log_ratio.exp() + (COEF * log_ratio.abs() if old[t] < -1.9 else 0.0)
            else:
                ratio = float((policy[t] - old[t]).detach().exp())
                bounded = min(ratio, 1.15) if name == "cispo-unbounded" else min(max(ratio, 0.9), 1.15)
                loss = -advantages[t] * bounded * policy[t]
                clipped += int(bounded != ratio)
            row.append(loss * weights[t])
        if row:
            rows.append(row)
    sums = [sum(row) for row in rows]
    match aggregation:
        case "token_mean":
            return sum(sums) / sum(map(len, rows)), clipped
        case "sequence_mean_token_mean":
            return sum(s / len(row) for s, row in zip(sums, rows, strict=True)) / len(rows), clipped
        case "sequence_mean_token_sum":
            return sum(sums) / len(rows), clipped
    return sum(sums) / len(rows) / NORM, clipped


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_matches_a_loop(name, aggregation, make_layout, close):
    layout, policy, old, advantages = case(make_layout)
    weights = layout.normal(7).abs()
    slow_policy = policy.clone().requires_grad_()
    expected, clipped = slow(name, layout, slow_policy, old, advantages, aggregation, weights)
    expected.backward()
    poisoned = layout.poisoned(policy, -INFINITY).requires_grad_()
    out = run(
        name,
        layout,
        poisoned,
        layout.poisoned(old, -INFINITY),
        layout.poisoned(advantages, float("nan")),
        aggregation,
        layout.poisoned(weights, float("nan")),
    )
    out.loss.backward()
    close(out.loss.detach(), expected.detach())
    close(poisoned.grad, slow_policy.grad)
    assert out.num_clipped == clipped and (clipped > 0) == (name not in UNCLIPPED)
    tokens = layout.mask & (layout.owner >= 0)
    assert out.num_units == tokens.sum()
    assert torch.all(out.ratios[~tokens] == 1)
    log_ratio = (policy - old)[tokens]
    close(out.approx_kl_sum, (log_ratio.exp() - 1 - log_ratio).sum())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_add_up(name, aggregation, make_layout, close):
    layout, policy, old, advantages = case(make_layout)
    policy.requires_grad_()
    out = run(name, layout, policy, old, advantages, aggregation)
    (gradient,) = torch.autograd.grad(out.loss, policy)
    # Whole trajectories for a sequence ratio, torn ones for the others.
    place = torch.arange(layout.num_tokens)
    part = layout.owner.clamp(min=0) % 3 if name in SEQUENCE else place % 3
    shares = [
        LOSSES[name](policy[own], old[own], advantages[own], layout.tokens(aggregation, own, NORM))
        for own in (part == p for p in range(3))
    ]
    (of_shares,) = torch.autograd.grad(sum(s.loss for s in shares), policy)
    close(sum(s.loss for s in shares), out.loss)
    close(of_shares, gradient)
    for field in ("num_units", "num_clipped", "ratio_sum", "approx_kl_sum"):
        close(sum(getattr(s, field) for s in shares).double(), getattr(out, field).double())


@pytest.mark.parametrize("name", SEQUENCE)
def test_a_torn_trajectory_is_refused(name, make_layout):
    layout, policy, old, advantages = case(make_layout)
    half = torch.arange(layout.num_tokens) < layout.num_tokens // 2
    with pytest.raises(ValueError, match="whole in one micro-batch"):
        LOSSES[name](policy[half], old[half], advantages[half], layout.tokens(own=half))


@pytest.mark.parametrize("name", LOSSES)
def test_only_the_policy_gets_a_gradient_and_inputs_stay(name, make_layout, unchanged):
    layout, policy, old, advantages = case(make_layout)
    weights = layout.normal(5).abs()
    for tensor in (policy, old, advantages, weights):
        tensor.requires_grad_()
    unchanged(LOSSES[name], policy, old, advantages, layout.tokens(), weights_T=weights)
    out = run(name, layout, policy, old, advantages, weights=weights)
    out.loss.backward()
    assert old.grad is None and advantages.grad is None and weights.grad is None
    assert torch.all(policy.grad[~layout.mask] == 0) and torch.any(policy.grad[layout.mask] != 0)
    assert not out.ratios.requires_grad and not out.approx_kl_sum.requires_grad and not out.num_clipped.requires_grad


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_with_minus_infinity_in_any_dtype(name, dtype):
    """Tokens ruled out by the model leave loss and gradient finite, from logits in half precision, too."""
    logits = torch.tensor([[1.0, -INFINITY, 0.5], [0.0, 2.0, -INFINITY]], dtype=dtype, requires_grad=True)
    policy = logits.float().log_softmax(-1)[torch.arange(2), torch.tensor([0, 1])]
    owner, mask = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    tokens = LossTokens(mask, owner, aggregation_denominators(mask, owner, 1), "sequence_mean_token_mean")
    out = LOSSES[name](policy, policy.detach(), torch.ones(2), tokens)
    out.loss.backward()
    assert torch.isfinite(out.loss) and torch.isfinite(logits.grad).all()
    # Of -log softmax, halved: probabilities less the one-hot of the token.
    expected = (logits.detach().float().softmax(-1) - torch.eye(3)[[0, 1]]) / 2
    torch.testing.assert_close(logits.grad.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_ratios_stay_finite(name):
    mask, owner = torch.ones(2, dtype=torch.bool), torch.tensor([0, 1])
    policy = torch.tensor([0.0, -500.0], requires_grad=True)
    tokens = LossTokens(mask, owner, aggregation_denominators(mask, owner, 2))
    advantages = torch.tensor([-1.0, 1.0])
    out = LOSSES[name](policy, torch.tensor([-500.0, 0.0]), advantages, tokens)
    out.loss.backward()
    assert torch.isfinite(out.loss) and torch.isfinite(policy.grad).all()
