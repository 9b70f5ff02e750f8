from functools import partial

import pytest
import torch

from quartet.algorithms import losses
from quartet.algorithms.losses import LossTokens, PolicyTokens, aggregation_denominators, kl_loss

CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.3}


def policy_loss(*given, **options):
    return losses.policy_loss(PolicyTokens(*given), **options)


def sequence_policy_loss(*given, **options):
    return losses.sequence_policy_loss(PolicyTokens(*given), **options)


def near(logprobs, seed, spread=0.3):
    return logprobs + spread * torch.randn(
        logprobs.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def case(make_layout, seed=0, num_tokens=60, num_owners=7):
    layout = make_layout(seed, num_tokens, num_owners)
    policy = layout.normal(1) - 2
    return layout, policy, near(policy, 2), layout.normal(3)


def slow_token_loss(ratio, advantage, dual_clip=None):
    clipped = min(max(ratio, 0.8), 1.3)
    loss = max(-advantage * ratio, -advantage * clipped)
    if dual_clip is not None and advantage < 0:
        loss = min(loss, -dual_clip * advantage)
    return loss


# Tokens --------------------------------------------------------------------------------------------------


def test_ppo_at_ratio_one_is_reinforce(close):
    """Published gradients of ratio · A and of log-probability · A, logits [1, 2, 1, 1], action 1, A = 1."""
    logits = torch.tensor([1.0, 2.0, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    logprob = logits.log_softmax(0)[1:2]
    mask, owner = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    tokens = LossTokens(mask, owner, aggregation_denominators(mask, owner, 1))
    advantage = torch.ones(1, dtype=torch.float64)
    losses = [
        policy_loss(logprob, logprob.detach(), advantage, tokens, **CLIP).loss,
        sequence_policy_loss(logprob, logprob.detach(), advantage, tokens, **CLIP).loss,
        -logprob.sum(),
    ]
    gradients = [-torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in losses]
    published = torch.tensor([-0.1749, 0.5246, -0.1749, -0.1749], dtype=torch.float64)
    torch.testing.assert_close(gradients[0], published, atol=5e-5, rtol=0)
    close(gradients[0], gradients[2])
    close(gradients[1], gradients[2])


def test_a_dual_clip_matches_a_loop(make_layout):
    layout, policy, old, advantages = case(make_layout)
    policy = near(old, 5, spread=1.0)
    out = policy_loss(
        layout.poisoned(policy, float("-inf")),
        layout.poisoned(old, float("-inf")),
        layout.poisoned(advantages, float("nan")),
        layout.tokens(),
        dual_clip=1.5,
        **CLIP,
    )
    tokens = [t for n in range(layout.num_owners) for t in layout.tokens_of(n)]
    ratio = (policy - old).exp()
    losses = [slow_token_loss(float(ratio[t]), float(advantages[t]), 1.5) for t in tokens]
    assert out.loss.item() == pytest.approx(sum(losses) / len(tokens), rel=1e-9)
    clipped = [t for t in tokens if (ratio[t] > 1.3 and advantages[t] > 0) or (ratio[t] < 0.8 and advantages[t] < 0)]
    dual = [t for t in tokens if advantages[t] < 0 and ratio[t] > 1.5]
    assert clipped and out.num_clipped == len(clipped)
    assert dual and out.num_dual_clipped == len(dual)
    assert out.num_units == len(tokens)


def test_gradcheck_of_a_dual_clip(make_layout):
    layout, policy, old, advantages = case(make_layout, num_tokens=20, num_owners=4)
    loss_of = partial(policy_loss, dual_clip=1.5, **CLIP)
    assert torch.autograd.gradcheck(
        lambda x: loss_of(x, old, advantages, layout.tokens()).loss, policy.requires_grad_()
    )


# Sequences -----------------------------------------------------------------------------------------------


def sequence_case(make_layout):
    layout, policy, _, _ = case(make_layout)
    advantages = torch.randn(layout.num_owners, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return layout, policy, near(policy, 2, spread=0.2), advantages


def test_sequence_loss_matches_a_loop(make_layout):
    layout, policy, old, advantages = sequence_case(make_layout)
    poison = float("-inf")
    out = sequence_policy_loss(
        layout.poisoned(policy, poison), layout.poisoned(old, poison), advantages, layout.tokens(), **CLIP
    )
    losses = []
    for n in range(layout.num_owners):
        tokens = layout.tokens_of(n)
        if tokens:
            ratio = float((policy - old)[tokens].sum().exp())
            losses.append(slow_token_loss(ratio, float(advantages[n])))
            assert out.ratios[n].item() == pytest.approx(ratio)
    assert out.loss.item() == pytest.approx(sum(losses) / len(losses), rel=1e-9)
    assert out.num_units == len(losses) == layout.num_owners - 2


def test_sequence_micro_batches_add_up(make_layout, close):
    layout, policy, old, advantages = sequence_case(make_layout)
    out = sequence_policy_loss(policy, old, advantages, layout.tokens(), **CLIP)
    shares = [
        sequence_policy_loss(policy[own], old[own], advantages, layout.tokens(own=own), **CLIP)
        for own in (layout.owner < 2, layout.owner >= 2)
    ]
    close(sum(s.loss for s in shares), out.loss)
    assert sum(s.num_clipped for s in shares) == out.num_clipped
    close(sum(s.ratio_sum for s in shares), out.ratio_sum)


def test_sequence_gradcheck_and_unchanged_inputs(make_layout, unchanged):
    layout, policy, old, advantages = sequence_case(make_layout)
    rest = (old, advantages, layout.tokens())
    unchanged(sequence_policy_loss, policy, *rest, **CLIP)
    assert torch.autograd.gradcheck(lambda x: sequence_policy_loss(x, *rest, **CLIP).loss, policy.requires_grad_())


# Terms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_loss(kind, make_layout, close, unchanged):
    layout, policy, reference, _ = case(make_layout, num_tokens=20, num_owners=4)
    unchanged(kl_loss, policy, reference, layout.tokens(), kind)
    d = (policy - reference)[layout.mask & (layout.owner >= 0)]
    per_token = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[kind]
    poison = float("-inf")
    found = kl_loss(layout.poisoned(policy, poison), layout.poisoned(reference, poison), layout.tokens(), kind)
    close(found, per_token.mean())
    reference.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_loss(x, reference, layout.tokens(), kind), policy.requires_grad_())
    kl_loss(policy, reference, layout.tokens(), kind).backward()
    assert reference.grad is None
