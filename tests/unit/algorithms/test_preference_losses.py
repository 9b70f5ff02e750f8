"""Preference losses: hand-computed cases, plain Python twins, limits, gradients."""

import math
from functools import partial

import pytest
import torch

from quartet.algorithms import preference
from quartet.algorithms.preference import (
    AnswerPairs,
    best_and_worst,
    best_of_groups_mask,
    kto_loss,
    kto_reference_point,
    step_anchors,
)

NUM_PAIRS = 9


def of_sides(loss):
    return lambda chosen, rejected, num_pairs, **options: loss(AnswerPairs(chosen, rejected, num_pairs), **options)


aot_unpaired_loss = of_sides(preference.aot_unpaired_loss)
bco_pair_loss = of_sides(preference.bco_pair_loss)
discopop_loss = of_sides(preference.discopop_loss)
dpo_loss = of_sides(preference.dpo_loss)
exo_pair_loss = of_sides(preference.exo_pair_loss)
hinge_loss = of_sides(preference.hinge_loss)
ipo_loss = of_sides(preference.ipo_loss)
odds_ratio_loss = of_sides(preference.odds_ratio_loss)
robust_dpo_loss = of_sides(preference.robust_dpo_loss)
simpo_loss = of_sides(preference.simpo_loss)


def pointwise_pair_loss(kind, *sides, beta):
    return preference.pointwise_pair_loss(kind, AnswerPairs(*sides), beta=beta)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def log_odds(mean_logprob):
    p = math.exp(mean_logprob)
    return math.log(p / (1 - p))


def slow_dpo(chosen, rejected, beta, label_smoothing, margin=0.0):
    x = beta * (chosen - rejected) - margin
    return -(1 - label_smoothing) * math.log(sigmoid(x)) - label_smoothing * math.log(1 - sigmoid(x))


def slow_robust(chosen, rejected, beta, label_smoothing):
    """The unbiased estimate written as Chowdhury et al. have it: a weighted difference of the loss and its flip."""
    right = slow_dpo(chosen, rejected, beta, 0.0)
    flipped = slow_dpo(rejected, chosen, beta, 0.0)
    return ((1 - label_smoothing) * right - label_smoothing * flipped) / (1 - 2 * label_smoothing)


def slow_exo(chosen, rejected, beta, smoothing):
    """The reverse KL between two distributions over the two answers."""
    x = beta * (chosen - rejected)
    policy, labels = (sigmoid(x), sigmoid(-x)), (1 - smoothing, smoothing)
    return sum(p * math.log(p / q) for p, q in zip(policy, labels, strict=True))


def slow_discopop(chosen, rejected, beta, tau):
    x = beta * (chosen - rejected)
    share = sigmoid(x / tau)
    return (1 - share) * -math.log(sigmoid(x)) + share * math.exp(-x)


SLOW_POINTWISE = {
    "nca_pair": lambda w, b: -math.log(sigmoid(w)) - 0.5 * math.log(sigmoid(-w)) - 0.5 * math.log(sigmoid(-b)),
    "sppo_hard": lambda w, b: (w / 0.3 - 0.5 / 0.3) ** 2 + (b / 0.3 + 0.5 / 0.3) ** 2,
    "apo_zero": lambda w, b: 1 - sigmoid(w) + sigmoid(b),
    "apo_down": lambda w, b: sigmoid(w) + 1 - sigmoid(w - b),
}
ANCHOR = 0.4


def anchored(chosen, rejected, num_pairs):
    anchors = (torch.full_like(chosen, ANCHOR), torch.full_like(rejected, ANCHOR))
    return bco_pair_loss(chosen, rejected, num_pairs, beta=0.3, anchors=anchors)


# Loss, twin of one pair, whether its inputs are mean log-probabilities (below 0).
LOSSES = {
    "dpo": (partial(dpo_loss, beta=0.3), lambda c, r: slow_dpo(c, r, 0.3, 0.0), False),
    "cdpo": (partial(dpo_loss, beta=0.3, label_smoothing=0.1), lambda c, r: slow_dpo(c, r, 0.3, 0.1), False),
    "robust": (
        partial(robust_dpo_loss, beta=0.3, label_smoothing=0.1),
        lambda c, r: slow_robust(c, r, 0.3, 0.1),
        False,
    ),
    "ipo": (partial(ipo_loss, beta=0.3), lambda c, r: ((c - r) - 1 / 0.6) ** 2, False),
    "hinge": (partial(hinge_loss, beta=0.3), lambda c, r: max(0.0, 1 - 0.3 * (c - r)), False),
    "exo_pair": (
        partial(exo_pair_loss, beta=0.3, label_smoothing=0.01),
        lambda c, r: slow_exo(c, r, 0.3, 0.01),
        False,
    ),
    "discopop": (
        partial(discopop_loss, beta=0.3, discopop_tau=0.2),
        lambda c, r: slow_discopop(c, r, 0.3, 0.2),
        False,
    ),
    **{
        kind: (partial(pointwise_pair_loss, kind, beta=0.3), lambda c, r, slow=slow: slow(0.3 * c, 0.3 * r), False)
        for kind, slow in SLOW_POINTWISE.items()
    },
    "bco_pair": (
        anchored,
        lambda c, r: -math.log(sigmoid(0.3 * (c - ANCHOR))) - math.log(sigmoid(0.3 * (ANCHOR - r))),
        False,
    ),
    "simpo": (partial(simpo_loss, beta=2.5, gamma=0.5), lambda c, r: -math.log(sigmoid(2.5 * c - 2.5 * r - 0.5)), True),
    "odds": (odds_ratio_loss, lambda c, r: -math.log(sigmoid(log_odds(c) - log_odds(r))), True),
}


@pytest.fixture(params=list(LOSSES))
def case(request):
    """Loss, twin, and random log-ratios or mean log-probabilities of both sides in fp64."""
    loss, twin, is_mean = LOSSES[request.param]
    generator = torch.Generator().manual_seed(3)
    chosen, rejected = (3 * torch.randn(NUM_PAIRS, generator=generator, dtype=torch.float64) for _ in range(2))
    if is_mean:
        chosen, rejected = -chosen.abs() / 3 - 0.01, -rejected.abs() / 3 - 0.01
    return loss, twin, chosen, rejected


# Every loss ----------------------------------------------------------------------------------------------


def test_equals_its_plain_twin(case):
    loss, twin, chosen, rejected = case
    expected = sum(twin(float(c), float(r)) for c, r in zip(chosen, rejected, strict=True)) / NUM_PAIRS
    assert float(loss(chosen, rejected, NUM_PAIRS).loss) == pytest.approx(expected, rel=1e-9)


def test_gradients(case):
    loss, _, chosen, rejected = case
    for tensor in (chosen, rejected):
        tensor.requires_grad_()
    assert torch.autograd.gradcheck(lambda c, r: loss(c, r, NUM_PAIRS).loss, (chosen, rejected))


def test_shares_add_up_in_any_order(case, close):
    loss, _, chosen, rejected = case
    whole = loss(chosen, rejected, NUM_PAIRS).loss
    parts = [loss(chosen[rows], rejected[rows], NUM_PAIRS).loss for rows in (slice(4, 9), slice(0, 4))]
    close(sum(parts), whole)
    order = torch.randperm(NUM_PAIRS, generator=torch.Generator().manual_seed(0))
    close(loss(chosen[order], rejected[order], NUM_PAIRS).loss, whole)


def test_half_precision_is_computed_in_fp32(case):
    loss, _, chosen, rejected = case
    out = loss(chosen.bfloat16(), rejected.bfloat16(), NUM_PAIRS)
    exact = loss(chosen.bfloat16().double(), rejected.bfloat16().double(), NUM_PAIRS)
    assert out.loss.dtype == torch.float32
    assert float(out.loss) == pytest.approx(float(exact.loss), rel=1e-5)


# Each by hand --------------------------------------------------------------------------------------------


def pair(chosen, rejected):
    return torch.tensor([chosen], dtype=torch.float64), torch.tensor([rejected], dtype=torch.float64)


def test_dpo_by_hand():
    # Log-ratios 2 and -1 with beta 0.5: a difference of 1.5, -log sigmoid(1.5) = log(1 + e^-1.5).
    out = dpo_loss(*pair(2.0, -1.0), 1, beta=0.5)
    assert float(out.loss) == pytest.approx(0.20141327798275246)
    assert (float(out.chosen_rewards_P), float(out.rejected_rewards_P)) == (1.0, -0.5)
    # One wrong label in ten: 0.9 of that and 0.1 of log(1 + e^1.5).
    smoothed = dpo_loss(*pair(2.0, -1.0), 1, beta=0.5, label_smoothing=0.1)
    assert float(smoothed.loss) == pytest.approx(0.9 * 0.20141327798275246 + 0.1 * 1.7014132779827524)
    # A margin of 1.5 takes the whole difference away.
    margin = torch.tensor([1.5], dtype=torch.float64)
    assert float(dpo_loss(*pair(2.0, -1.0), 1, beta=0.5, margin_P=margin).loss) == pytest.approx(math.log(2))


def test_orpo_by_hand_and_at_its_ends():
    # Mean probabilities 0.8 and 0.5: odds 4 and 1, -log sigmoid(log 4) = log(5 / 4).
    chosen, rejected = pair(math.log(0.8), math.log(0.5))
    out = odds_ratio_loss(chosen, rejected, 1)
    assert float(out.loss) == pytest.approx(math.log(5 / 4))
    assert float(out.chosen_rewards_P) == pytest.approx(math.log(4))
    assert float(preference.answer_nll(AnswerPairs(chosen, rejected, 1))) == pytest.approx(-math.log(0.8))
    # Certain and impossible answers give finite losses and gradients, in fp32 too.
    for dtype in (torch.float32, torch.float64):
        ends = torch.tensor([0.0, -1e-9, -200.0], dtype=dtype, requires_grad=True)
        loss = odds_ratio_loss(ends, torch.full_like(ends, -0.7), 3).loss
        loss.backward()
        assert bool(torch.isfinite(loss)) and bool(torch.isfinite(ends.grad).all())


def test_log_odds_keep_their_digits_on_both_sides_of_one_half():
    for log_p in (-1e-6, -0.1, -math.log(2), -0.7, -5.0, -30.0):
        exact = math.log(math.exp(log_p)) - math.log(-math.expm1(log_p))
        out = odds_ratio_loss(*pair(log_p, -0.7), 1)
        assert float(out.chosen_rewards_P) == pytest.approx(exact, rel=1e-9)


# The whole step ------------------------------------------------------------------------------------------


def test_anchors_by_hand():
    # Log-ratios 1, 3 and 2 of the chosen, -1, 0 and -2 of the rejected answers.
    policy = torch.tensor([[-4.0, -6.0], [-1.0, -4.0], [-2.0, -9.0]], dtype=torch.float64)
    reference = torch.tensor([[-5.0, -5.0], [-4.0, -4.0], [-4.0, -7.0]], dtype=torch.float64)
    assert step_anchors("bco_pair", policy, reference).tolist() == [[0.5, 0.5]] * 3
    # Margins 2, 3 and 7 against 0, 0 and 3, of the same order.
    assert step_anchors("aot", policy, reference).tolist() == [[0.0, 0.0]] * 3
    # The reference's margins now 3, 0 and 0: the least margin, 2, meets 0 and not 3, the largest meets 3 and not 0.
    turned = torch.stack([torch.tensor([-5.0, -4.0, -4.0]), torch.tensor([-8.0, -4.0, -4.0])], 1).double()
    assert step_anchors("aot", policy, turned)[:, 0].tolist() == [-3.0, 0.0, 3.0]
    # By rank: 1 and -2, 2 and -1, 3 and 0.
    assert step_anchors("aot_unpaired", policy, reference).tolist() == [[-2.0, 2.0], [0.0, 3.0], [-1.0, 1.0]]


@pytest.mark.parametrize("kind", ["aot", "aot_unpaired"])
def test_sorting_within_the_step_equals_the_published_form(kind, close):
    """TRL sorts the batch's values with their gradient; here each pair meets constants, in any part of the step."""
    generator = torch.Generator().manual_seed(4)
    policy, reference = (3 * torch.randn(NUM_PAIRS, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    mine, theirs = (policy.clone().requires_grad_() for _ in range(2))
    values, others = (theirs - reference).unbind(1)
    if kind == "aot":
        values, others = theirs[:, 0] - theirs[:, 1], reference[:, 0] - reference[:, 1]
    x = 0.3 * (values.sort().values - others.sort().values)
    smoothing = 0.1
    logsigmoid = torch.nn.functional.logsigmoid
    expected = (-(1 - smoothing) * logsigmoid(x) - smoothing * logsigmoid(-x)).mean()
    expected.backward()
    anchors, ratios, total = step_anchors(kind, policy, reference), mine - reference, 0.0
    for rows in (slice(5, 9), slice(0, 5)):
        (chosen, rejected), own = ratios[rows].unbind(1), anchors[rows].unbind(1)
        options = {"beta": 0.3, "label_smoothing": smoothing}
        if kind == "aot":
            total = total + dpo_loss(chosen, rejected, NUM_PAIRS, margin_P=0.3 * own[0], **options).loss
        else:
            total = total + aot_unpaired_loss(chosen, rejected, NUM_PAIRS, anchors=own, **options).loss
    total.backward()
    close(total.detach(), expected.detach())
    close(mine.grad, theirs.grad)


# KTO -----------------------------------------------------------------------------------------------------


def slow_kto(ratio, desirable, kl, beta, good, bad):
    if desirable:
        return good * (1 - sigmoid(beta * (ratio - kl)))
    return bad * (1 - sigmoid(beta * (kl - ratio)))


def kto_case():
    generator = torch.Generator().manual_seed(5)
    ratios = 3 * torch.randn(8, generator=generator, dtype=torch.float64)
    return ratios, torch.tensor([True, False, False, True, True, True, False, True])


def test_kto_equals_its_plain_twin_gradients_and_shares(close, unchanged):
    ratios, desirable = kto_case()
    kl = torch.tensor(0.7, dtype=torch.float64)
    options = {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    whole = kto_loss(ratios, desirable, kl, 8, **options)
    rows = zip(ratios.tolist(), desirable.tolist(), strict=True)
    assert float(whole.loss) == pytest.approx(sum(slow_kto(r, d, 0.7, 0.4, 1.5, 0.5) for r, d in rows) / 8)
    parts = [kto_loss(ratios[p], desirable[p], kl, 8, **options).loss for p in (slice(0, 3), slice(3, 8))]
    close(sum(parts), whole.loss)
    close(whole.rewards_S, 0.4 * ratios)
    unchanged(kto_loss, ratios, desirable, kl, 8, **options)
    ratios.requires_grad_()
    assert torch.autograd.gradcheck(lambda r: kto_loss(r, desirable, kl, 8, **options).loss, (ratios,))


def test_the_reference_point_is_a_mean_never_below_zero_and_a_constant():
    ratios = torch.tensor([1.0, -0.5, 2.5], requires_grad=True)
    point = kto_reference_point(ratios)
    assert float(point) == pytest.approx(1.0) and not point.requires_grad
    assert float(kto_reference_point(-ratios)) == 0.0
    answers = torch.tensor([0.3], requires_grad=True)
    kl = torch.tensor(0.2, requires_grad=True)
    kto_loss(answers, torch.tensor([True]), kl, 1, beta=1.0).loss.backward()
    assert kl.grad is None


# Choosing among responses --------------------------------------------------------------------------------


def slow_choice(scores, groups, keep):
    """Members of each group from the highest score, equal ones in their order; none where all are equal."""
    best, signs = set(), [0] * len(scores)
    for group in set(groups):
        members = sorted((n for n in range(len(scores)) if groups[n] == group), key=lambda n: -scores[n])
        if len({scores[n] for n in members}) > 1:
            best.update(members[:keep])
            signs[members[0]], signs[members[-1]] = 1, -1
    return best, signs


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("keep", [1, 3])
def test_choices_equal_their_plain_twin(seed, keep):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 4, (40,), generator=generator).double()
    groups = torch.randint(0, 9, (40,), generator=generator) * 7
    best, signs = slow_choice(scores.tolist(), groups.tolist(), keep)
    assert set(best_of_groups_mask(scores, groups, keep).nonzero().flatten().tolist()) == best
    assert best_and_worst(scores, groups).tolist() == signs
