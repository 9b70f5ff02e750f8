import math

import pytest
import torch

from quartet.algorithms.losses import pairwise_reward_loss, sft_loss, value_loss

# Values --------------------------------------------------------------------------------------------------


def value_case(make_layout, num_tokens=60):
    layout = make_layout(1, num_tokens, 7)
    return layout, layout.normal(0), layout.normal(1), layout.normal(2)


@pytest.mark.parametrize("clip_eps", [None, 0.2])
def test_value_loss_matches_a_loop(clip_eps, make_layout):
    layout, values, old, returns = value_case(make_layout)
    nan = float("nan")
    out = value_loss(
        layout.poisoned(values, nan),
        layout.poisoned(old, nan),
        layout.poisoned(returns, nan),
        layout.tokens(),
        clip_eps=clip_eps,
    )
    losses, num_clipped = [], 0
    for n in range(layout.num_owners):
        for t in layout.tokens_of(n):
            unclipped = float((values[t] - returns[t]) ** 2)
            clipped = unclipped
            if clip_eps is not None:
                near_old = min(max(float(values[t]), float(old[t]) - clip_eps), float(old[t]) + clip_eps)
                clipped = (near_old - float(returns[t])) ** 2
            losses.append(0.5 * max(clipped, unclipped))
            num_clipped += clipped > unclipped
    assert out.loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-9)
    assert out.num_clipped == num_clipped and bool(num_clipped) == (clip_eps is not None)


@pytest.mark.parametrize("clip_eps", [None, 0.2])
def test_value_loss_gradcheck_split_and_order(clip_eps, make_layout, close, unchanged):
    layout, values, old, returns = value_case(make_layout, 30)

    def loss(rows, x):
        return value_loss(
            x[rows], old[rows], returns[rows], layout.tokens("sequence_mean_token_mean", rows), clip_eps=clip_eps
        ).loss

    everything = torch.arange(layout.num_tokens)
    assert torch.autograd.gradcheck(lambda x: loss(everything, x), values.clone().requires_grad_())
    close(loss(everything[:11], values) + loss(everything[11:], values), loss(everything, values))
    close(loss(everything.flip(0), values), loss(everything, values))
    unchanged(value_loss, values, old, returns, layout.tokens(), clip_eps=clip_eps)


# Demonstrations ------------------------------------------------------------------------------------------


def test_sft_loss_is_cross_entropy(make_layout, close, unchanged):
    layout = make_layout(0, 12, 4)
    logits = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(5, (12,), generator=torch.Generator().manual_seed(1))
    counted = layout.mask & (layout.owner >= 0)
    expected = torch.nn.functional.cross_entropy(logits[counted], labels[counted])
    logprobs = logits.log_softmax(1)[torch.arange(12), labels]
    close(sft_loss(logprobs, layout.tokens()), expected)
    unchanged(sft_loss, logprobs, layout.tokens())
    assert torch.autograd.gradcheck(lambda x: sft_loss(x, layout.tokens()), logprobs.requires_grad_())


# Pairs ---------------------------------------------------------------------------------------------------

CHOSEN = torch.tensor([1.0, 0.0, -2.0], dtype=torch.float64)
REJECTED = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)


def test_pairwise_loss_with_margin_and_centring():
    margin = torch.tensor([0.5, 1.0, 0.0])
    out = pairwise_reward_loss(CHOSEN, REJECTED, 3, margin_P=margin, centring=0.1)
    expected = [math.log1p(math.exp(-d)) for d in (0.5, -1.0, -3.0)]
    centred = [0.1 * s**2 for s in (1.0, 0.0, -1.0)]
    assert out.loss.item() == pytest.approx((sum(expected) + sum(centred)) / 3)
    assert out.num_correct == 1


def test_pairwise_loss_split_order_and_gradcheck(close, unchanged):
    options = {"margin_P": torch.tensor([0.5, 1.0, 0.0]), "centring": 0.1}
    total = pairwise_reward_loss(CHOSEN, REJECTED, 3, **options)
    shares = [
        pairwise_reward_loss(CHOSEN[rows], REJECTED[rows], 3, margin_P=options["margin_P"][rows], centring=0.1)
        for rows in (slice(0, 1), slice(1, 3), slice(3, 3))
    ]
    close(sum(s.loss for s in shares), total.loss)
    flipped = pairwise_reward_loss(
        CHOSEN.flip(0), REJECTED.flip(0), 3, margin_P=options["margin_P"].flip(0), centring=0.1
    )
    close(flipped.loss, total.loss)
    unchanged(pairwise_reward_loss, CHOSEN, REJECTED, 3, **options)
    assert torch.autograd.gradcheck(
        lambda c, r: pairwise_reward_loss(c, r, 3, **options).loss,
        (CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()),
    )


def test_pairwise_loss_of_far_scores_is_finite_and_bfloat16_becomes_single():
    out = pairwise_reward_loss(torch.tensor([-1e4]).bfloat16(), torch.tensor([1e4]).bfloat16(), 1)
    assert out.loss.dtype == torch.float32
    assert out.loss.item() == pytest.approx(2e4, rel=1e-2)
