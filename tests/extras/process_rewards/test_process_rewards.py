"""Process rewards: hand-computed cases, slow references, gradients, and what a token that ends no step may hold."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quartet.extras.process_rewards.trainer import (
    mean_gap,
    process_rewards,
    right_answers,
    step_credits,
    step_loss,
)

RULES = ("sum", "min", "discounted")
GAMMA = 0.5


def slow(layout, scores: Tensor, rule: str) -> tuple[Tensor, list[float]]:
    """Credits token by token and one number per trajectory, in plain Python."""
    credits, totals = torch.zeros(layout.num_tokens, dtype=torch.float64), []
    for n in range(layout.num_owners):
        seen: list[float] = []
        for k, t in enumerate(layout.tokens_of(n)):
            score = float(scores[t])
            if rule == "sum":
                credits[t] = score
            elif rule == "discounted":
                credits[t] = GAMMA**k * score
            else:
                credits[t] = min([*seen, score]) - (min(seen) if seen else 0.0)
            seen.append(score)
        weighted = [GAMMA**k * s for k, s in enumerate(seen)]
        totals.append({"sum": sum(seen), "min": min(seen, default=0.0), "discounted": sum(weighted)}[rule])
    return credits, totals


# Scores and credits --------------------------------------------------------------------------------------


# Trajectory 0 scores 0.9, 0.4, 0.6, 0.1 and trajectory 1 scores -0.5, 0.5, a token of each in turn.
OWNER = torch.tensor([0, 1, 0, -1, 0, 1, 0, 0])
STEP = torch.tensor([True, True, True, True, True, True, False, True])
SCORES = torch.tensor([0.9, -0.5, 0.4, 9.0, 0.6, 0.5, 9.0, 0.1], dtype=torch.float64)


@pytest.mark.parametrize(
    ("rule", "expected", "totals"),
    [
        ("sum", [0.9, -0.5, 0.4, 0, 0.6, 0.5, 0, 0.1], [2.0, 0.0, 0.0]),
        ("min", [0.9, -0.5, -0.5, 0, 0.0, 0.0, 0, -0.3], [0.1, -0.5, 0.0]),
        ("discounted", [0.9, -0.5, 0.2, 0, 0.15, 0.25, 0, 0.0125], [1.2625, -0.25, 0.0]),
    ],
)
def test_rules_by_hand(rule, expected: list[float], totals: list[float]) -> None:
    assert step_credits(SCORES, STEP, OWNER, rule, GAMMA).tolist() == pytest.approx(expected)
    # The third trajectory has no step.
    assert process_rewards(SCORES, STEP, OWNER, 3, rule, GAMMA).tolist() == pytest.approx(totals)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_rules_agree_with_the_slow_reference(make_layout, close, rule, dtype, seed) -> None:
    layout = make_layout(seed)
    scores = layout.normal(seed, dtype)
    credits, totals = slow(layout, scores, rule)
    for poison in (0.0, math.nan, -math.inf):
        given = layout.poisoned(scores, poison)
        before = given.clone()
        found = step_credits(given, layout.mask, layout.owner, rule, GAMMA)
        close(found, credits, dtype)
        total = process_rewards(given, layout.mask, layout.owner, layout.num_owners, rule, GAMMA)
        close(total, torch.tensor(totals, dtype=torch.float64), dtype)
        assert torch.equal(given.nan_to_num(), before.nan_to_num()), "inputs are left alone"


def test_equal_minima_are_equal_numbers() -> None:
    """However a minimum was reached: a difference in the last digit would be a signal within a group."""
    scores = torch.tensor([0.9, 0.7, 0.3, 0.3, 0.8, 0.3])
    owner = torch.tensor([0, 0, 0, 1, 2, 2])
    found = process_rewards(scores, torch.ones(6, dtype=torch.bool), owner, 3, "min")
    assert found.tolist() == [scores[2].item()] * 3


def test_no_steps_at_all() -> None:
    nothing = torch.zeros(4, dtype=torch.bool)
    for rule in RULES:
        assert step_credits(torch.ones(4), nothing, torch.zeros(4, dtype=torch.int64), rule).tolist() == [0.0] * 4


# The loss ------------------------------------------------------------------------------------------------

LABELS = torch.tensor([1.0, 0.0, 0.5, 0.25, 1.0], dtype=torch.float64)
LOGITS = torch.tensor([math.log(3.0), 0.0, 7.0, -math.log(3.0), -2.0], dtype=torch.float64)
KEPT = torch.tensor([True, True, False, True, True])


def by_hand(logit: float, label: float) -> float:
    p = 1 / (1 + math.exp(-logit))
    return -(label * math.log(p) + (1 - label) * math.log(1 - p))


def test_the_loss_by_hand() -> None:
    out = step_loss(LOGITS, LABELS, KEPT, 4)
    kept = [0, 1, 3, 4]
    expected = sum(by_hand(float(LOGITS[t]), float(LABELS[t])) for t in kept) / 4
    assert float(out.loss) == pytest.approx(expected, abs=1e-12)
    assert float(step_loss(LOGITS[1:2], LABELS[1:2], KEPT[1:2], 1).loss) == pytest.approx(math.log(2))
    # Right: the first and the fourth; the second has logit 0 and counts one half; the last is wrong.
    assert (float(out.num_correct), int(out.num_decided)) == (2.5, 4)


def test_a_soft_label_of_one_half_is_learned_but_not_counted_as_right_or_wrong() -> None:
    out = step_loss(LOGITS, LABELS, torch.tensor([False, False, True, False, False]), 1)
    assert float(out.loss) == pytest.approx(by_hand(7.0, 0.5))
    assert (int(out.num_decided), float(out.num_correct)) == (0, 0.0)


def test_gradients() -> None:
    logits = LOGITS.clone().requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: step_loss(x, LABELS, KEPT, 4).loss, (logits,))
    step_loss(logits, LABELS, KEPT, 4).loss.backward()
    expected = torch.where(KEPT, (LOGITS.sigmoid() - LABELS) / 4, 0.0)
    torch.testing.assert_close(logits.grad, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("poison", [math.nan, -math.inf, math.inf])
def test_tokens_that_end_no_labelled_step_leave_no_trace(poison: float) -> None:
    logits = torch.where(KEPT, LOGITS, poison).requires_grad_(True)
    out = step_loss(logits, torch.where(KEPT, LABELS, math.nan), KEPT, 4)
    assert float(out.loss.detach()) == float(step_loss(LOGITS, LABELS, KEPT, 4).loss)
    out.loss.backward()
    assert logits.grad is not None and bool(logits.grad.isfinite().all()) and float(logits.grad[2]) == 0.0


def test_nothing_labelled_gives_zero_and_half_precision_is_reduced_in_fp32() -> None:
    assert float(step_loss(LOGITS, LABELS, torch.zeros(5, dtype=torch.bool), 0).loss) == 0.0
    out = step_loss(LOGITS.bfloat16(), LABELS, KEPT, 4)
    assert out.loss.dtype == torch.float32
    rounded = step_loss(LOGITS.bfloat16().double(), LABELS, KEPT, 4).loss
    assert float(out.loss) == pytest.approx(float(rounded), rel=1e-6)


# Right and wrong answers ---------------------------------------------------------------------------------


def test_gaps_between_right_and_wrong() -> None:
    outcomes = torch.tensor([1.0, 0.0, 1.0, 0.0, 5.0])
    applies = torch.tensor([True, True, True, True, False])
    right = right_answers(outcomes, applies)
    assert right is not None and right.tolist() == [True, False, True, False, False]
    rewards = torch.tensor([0.9, 0.2, 0.5, 0.4, -7.0])
    assert float(mean_gap(rewards, right, applies)) == pytest.approx(0.7 - 0.3)
    assert float(mean_gap(outcomes, right, applies)) == 1.0


def test_equal_outcomes_say_nothing() -> None:
    ones = torch.ones(3)
    assert right_answers(ones, torch.tensor([True, True, False])) is None
    assert right_answers(ones, torch.zeros(3, dtype=torch.bool)) is None
    scaled = right_answers(torch.tensor([-1.0, 1.0]), torch.ones(2, dtype=torch.bool))
    assert scaled is not None and scaled.tolist() == [False, True]
