"""Every token-level policy loss against a loop, and under every way to cut and order a batch."""

import math
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


def test_gspo_by_hand():
    # Trajectory 0 has log-ratios 0.2 and 0 (mean 0.1, above 1.08), trajectory 1 has -0.05.
    owner, mask = torch.tensor([0, -1, 1, 0]), torch.ones(4, dtype=torch.bool)
    policy = torch.tensor([-1.0, -9.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.2, -1.0, -1.95, -3.0], dtype=torch.float64)
    advantages = torch.tensor([2.0, 0.0, 3.0, 2.0], dtype=torch.float64)
    out = given(
        gspo_loss,
        policy,
        old,
        advantages,
        LossTokens(mask, owner, aggregation_denominators(mask, owner, 2), "sequence_mean_token_mean"),
        clip_eps_low=0.08,
        clip_eps_high=0.08,
    )
    out.loss.backward()
    ratio = float(torch.tensor(-0.05, dtype=torch.float64).exp())
    assert out.loss.item() == pytest.approx((-2 * 1.08 - 3 * ratio) / 2)
    assert policy.grad.tolist() == pytest.approx([0.0, 0.0, -3 * ratio / 2, 0.0])
    assert (out.num_units, out.num_clipped) == (3, 2)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gspo_equals_its_stop_gradient_form(aggregation, make_layout, close):
    """``stop(s) * exp(policy_t - stop(policy_t))`` per token (GSPO-token; Zheng et al., 2025), one advantage each."""
    layout, policy, old, advantages = case(make_layout)
    tokens = layout.tokens(aggregation, norm=NORM)
    mine, other = (policy.clone().requires_grad_() for _ in range(2))
    out = given(gspo_loss, mine, old, advantages, tokens, **CLIP)
    out.loss.backward()
    # The same clip on the same value: an old that makes the token's own ratio the sequence's.
    surrogate = given(policy_loss, other, policy - out.ratios.log(), advantages, tokens, **CLIP)
    surrogate.loss.backward()
    close(out.loss.detach(), surrogate.loss.detach())
    close(mine.grad, other.grad)


def by_hand(loss, ratios, advantages, **options):
    """Loss and gradient of one trajectory, at log-probabilities whose ratios to the old ones are given."""
    owner, mask = torch.zeros(len(ratios), dtype=torch.int64), torch.ones(len(ratios), dtype=torch.bool)
    policy = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    tokens = LossTokens(mask, owner, aggregation_denominators(mask, owner, 1))
    old, advantages = torch.zeros(len(ratios), dtype=torch.float64), torch.tensor(advantages, dtype=torch.float64)
    out = given(loss, policy, old, advantages, tokens, **options)
    out.loss.backward()
    return out, policy.grad.tolist()


def test_sapo_by_hand():
    # Ratio 1: the gate is 1/2, times 4 / τ. Ratio 1 + ln 3 and τ 1: σ(ln 3) = 3/4, slope 3/16 times the ratio.
    ratio = 1 + math.log(3)
    out, gradient = by_hand(sapo_loss, [1.0, ratio, 1.0], [1.0, 1.0, -1.0], tau_pos=1.0, tau_neg=2.0)
    assert out.loss.item() == pytest.approx((-2.0 - 3.0 + 1.0) / 3)
    assert gradient == pytest.approx([-1 / 3, -4 * 3 / 16 * ratio / 3, 1 / 3])
    # A negative advantage is let go of sooner: τ 2 at the same ratio has slope σ(2 ln 3) σ(-2 ln 3) = 9 / 100.
    _, steeper = by_hand(sapo_loss, [ratio], [-1.0], tau_pos=1.0, tau_neg=2.0)
    assert steeper == pytest.approx([4 * 9 / 100 * ratio])


def test_gmpo_by_hand():
    # Log-ratios 0.6 (held at 0.4 as A > 0) and -0.8 (which hurts, and stays): mean -0.2. A < 0: 0.6 and -0.4, mean 0.1.
    ratios = [math.exp(x) for x in (0.6, -0.8)]
    limits = {"clip_eps_low": 0.4, "clip_eps_high": 0.4}
    out, gradient = by_hand(gmpo_loss, ratios, [2.0, 2.0], **limits)
    assert out.loss.item() == pytest.approx(-2 * math.exp(-0.2)) and out.num_clipped == 1
    assert gradient == pytest.approx([0.0, -math.exp(-0.2)])
    out, gradient = by_hand(gmpo_loss, ratios, [-2.0, -2.0], **limits)
    assert out.loss.item() == pytest.approx(2 * math.exp(0.1)) and gradient == pytest.approx([math.exp(0.1), 0.0])


def test_kl_cov_by_hand():
    held = torch.tensor([True, False, True])
    out, gradient = by_hand(kl_cov_loss, [2.0, 2.0, 0.5], [1.0, 1.0, 0.0], held_T=held, ppo_kl_coef=0.5)
    assert out.loss.item() == pytest.approx((-2 - 2 + 2 * 0.5 * math.log(2)) / 3)
    assert gradient == pytest.approx([(-2 + 0.5) / 3, -2 / 3, -0.5 / 3])


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    owner, mask = torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)
    policy = torch.tensor([2.0, 0.5, 1.0], dtype=torch.float64).log().requires_grad_()
    out = given(
        cispo_loss,
        policy,
        torch.zeros(3, dtype=torch.float64),
        torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64),
        LossTokens(mask, owner, aggregation_denominators(mask, owner, 1)),
        clip_eps_low=0.2,
        clip_eps_high=0.28,
    )
    out.loss.backward()
    assert policy.grad.tolist() == pytest.approx([-1.28 / 3, 2 * 0.8 / 3, -3 / 3])
    assert out.num_clipped == 2


@pytest.mark.parametrize("name", LOSSES)
def test_at_ratio_one_all_are_reinforce(name, make_layout, close):
    layout, policy, _, advantages = case(make_layout)
    mine, plain = (policy.clone().requires_grad_() for _ in range(2))
    out = run(name, layout, mine, policy, advantages)
    out.loss.backward()
    run("reinforce", layout, plain, policy, advantages).loss.backward()
    close(mine.grad, plain.grad)
    assert out.num_clipped == 0 and torch.all(out.ratios == 1) and out.approx_kl_sum == 0


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
def test_order_of_tokens_does_not_matter(name, make_layout, close):
    layout, policy, old, advantages = case(make_layout)
    p = torch.randperm(layout.num_tokens, generator=torch.Generator().manual_seed(0))
    before = run(name, layout, policy, old, advantages)
    after = LOSSES[name](policy[p], old[p], advantages[p], layout.tokens("sequence_mean_token_mean", p))
    close(after.loss, before.loss)
    close(after.ratios, before.ratios[p])


@pytest.mark.parametrize("name", ["clipped", "gspo", "reinforce", "sapo", "gmpo", "kl_cov"])
def test_gradcheck(name, make_layout):
    layout, policy, old, advantages = case(make_layout, num_tokens=20, num_owners=4)
    assert torch.autograd.gradcheck(lambda x: run(name, layout, x, old, advantages).loss, policy.requires_grad_())


def test_gradcheck_of_cispo_with_its_weight_held_fixed(make_layout):
    """Its weight is a constant, so the numerical twin gets it as importance weights of the plain gradient."""
    layout, policy, old, advantages = case(make_layout, num_tokens=20, num_owners=4)
    weights = (policy - old).exp().clamp(0.9, 1.15)
    policy.requires_grad_()
    (found,) = torch.autograd.grad(run("cispo", layout, policy, old, advantages).loss, policy)

    def twin(x):
        return run("reinforce", layout, x, old, advantages, weights=weights).loss

    (expected,) = torch.autograd.grad(twin(policy), policy)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    assert torch.autograd.gradcheck(twin, policy)


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
def test_fully_masked_micro_batch_contributes_nothing(name, make_layout):
    layout, policy, old, advantages = case(make_layout)
    layout.mask = torch.zeros_like(layout.mask)
    policy.requires_grad_()
    out = run(name, layout, policy, old, advantages)
    out.loss.backward()
    assert out.loss == 0 and torch.all(policy.grad == 0) and out.num_units == 0 and out.num_clipped == 0


@pytest.mark.parametrize("name", LOSSES)
def test_length_one_responses(name):
    owner, mask = torch.arange(3), torch.ones(3, dtype=torch.bool)
    old, advantages = torch.full((3,), -1.0), torch.tensor([1.0, -1.0, 0.0])
    policy = (old + torch.tensor([0.05, -0.05, 0.0])).requires_grad_()
    out = LOSSES[name](policy, old, advantages, LossTokens(mask, owner, aggregation_denominators(mask, owner, 3)))
    out.loss.backward()
    ratio = torch.ones(3) if name == "reinforce" else (policy - old).exp().detach()
    if name == "sapo":
        gate = torch.sigmoid(torch.tensor([1.0, 1.4, 1.4]) * (ratio - 1))
        ratio = 4 * gate * (1 - gate) * ratio
    torch.testing.assert_close(policy.grad, -advantages * ratio / 3)


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
def test_bfloat16_log_probabilities_are_reduced_in_single(name, make_layout, close):
    layout, policy, old, advantages = case(make_layout, dtype=torch.bfloat16)
    out = run(name, layout, policy, old, advantages)
    assert out.loss.dtype == torch.float32
    close(out.loss, run(name, layout, policy.double(), old.double(), advantages.double()).loss, torch.float32)


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_ratios_stay_finite(name):
    mask, owner = torch.ones(2, dtype=torch.bool), torch.tensor([0, 1])
    policy = torch.tensor([0.0, -500.0], requires_grad=True)
    tokens = LossTokens(mask, owner, aggregation_denominators(mask, owner, 2))
    advantages = torch.tensor([-1.0, 1.0])
    out = LOSSES[name](policy, torch.tensor([-500.0, 0.0]), advantages, tokens)
    out.loss.backward()
    assert torch.isfinite(out.loss) and torch.isfinite(policy.grad).all()
