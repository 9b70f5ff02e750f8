import math

import pytest
import torch

from quartet.algorithms.losses import adaptive_kl_coef, kl_estimate

POLICY = torch.tensor([-12.3, -8.3, -2.3], dtype=torch.float64)
REFERENCE = torch.tensor([-11.3, -8.4, -2.0], dtype=torch.float64)


def test_by_hand(close):
    d = [-1.0, 0.1, -0.3]
    close(kl_estimate(POLICY, REFERENCE, "k2"), torch.tensor([0.5, 0.005, 0.045], dtype=torch.float64))
    expected = torch.tensor([math.exp(-x) - 1 + x for x in d], dtype=torch.float64)
    close(kl_estimate(POLICY, REFERENCE, "k3"), expected)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_expectation_is_the_divergence(kind, close):
    policy = torch.tensor([1.0, 2.0, 0.5, -1.0], dtype=torch.float64).log_softmax(0)
    reference = torch.tensor([0.5, 2.5, 0.0, 0.0], dtype=torch.float64).log_softmax(0)
    divergence = (policy.exp() * (policy - reference)).sum()
    expectation = (policy.exp() * kl_estimate(policy, reference, kind)).sum()
    close(expectation, divergence)


def test_gradient_of_k2_is_that_of_the_divergence(close):
    # In expectation over samples of the policy, so with the weights held fixed.
    logits = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    weights = policy.exp().detach()
    (expected,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (found,) = torch.autograd.grad((weights * kl_estimate(policy, reference, "k2")).sum(), logits)
    close(found, expected)


@pytest.mark.parametrize("difference", [-1000.0, -25.0, 25.0, 1000.0])
def test_extreme_ratios_stay_finite_and_only_the_exponent_is_clamped(difference, close):
    k3 = kl_estimate(torch.tensor([difference], dtype=torch.float64), torch.zeros(1).double(), "k3")
    clamped = max(-20.0, min(20.0, -difference))
    close(k3, torch.tensor([math.expm1(clamped) + difference], dtype=torch.float64))
    assert k3 >= 0
    k1 = kl_estimate(torch.tensor([difference]), torch.zeros(1), "k1")
    assert k1.item() == difference


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_masked_infinities_give_zero_and_no_gradient(kind):
    logprobs = torch.tensor([float("-inf"), -1.0], requires_grad=True)
    reference = torch.tensor([float("-inf"), -2.0])
    kl = kl_estimate(logprobs, reference, kind, mask_T=torch.tensor([False, True]))
    kl.sum().backward()
    assert kl[0] == 0 and logprobs.grad[0] == 0
    assert torch.isfinite(kl).all() and torch.isfinite(logprobs.grad).all()


def test_nearly_equal_policies_keep_their_digits():
    # (1e-4)² / 2 in fp32; exp(x) - 1 - x would give 0 or 6e-8 here.
    kl = kl_estimate(torch.tensor([1e-4]), torch.zeros(1), "k3")
    assert kl.item() == pytest.approx(5e-9, rel=1e-2)


# The adaptive coefficient -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (6.0, 0.2),  # on target: unchanged
        (6.6, 0.2 * (1 + 0.1 * 256 / 10_000)),  # 10 % above
        (60.0, 0.2 * (1 + 0.2 * 256 / 10_000)),  # far above: the error counts 20 % at most
        (-1.0, 0.2 * (1 - 0.2 * 256 / 10_000)),  # an estimate may be negative
    ],
)
def test_coefficient_by_hand(observed, expected):
    assert adaptive_kl_coef(0.2, observed, 6.0, 10_000, 256) == pytest.approx(expected)
