"""Preference objectives against unmodified models, one sequence at a time, and under every way to cut a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.preference import (
    AOTLoss,
    BCOPairLoss,
    DiscoPOPLoss,
    DPOLoss,
    EXOPairLoss,
    HingeLoss,
    IPOLoss,
    KTOLoss,
    ORPOLoss,
    PointwisePairLoss,
    RobustDPOLoss,
    SimPOLoss,
)
from quartet.train.objectives import (
    KTOObjective,
    PairwiseObjective,
    PreferenceObjective,
    answer_logprobs,
    pair_sides,
)

CONFIGS: dict[str, Any] = {
    "dpo": DPOLoss(beta=0.5),
    "dpo-everything": DPOLoss(beta=0.5, label_smoothing=0.1, margin_coef=0.7, sft_coef=0.3),
    "robust_dpo": RobustDPOLoss(beta=0.5, label_smoothing=0.2),
    "ipo": IPOLoss(beta=0.5),
    "ipo-sum": IPOLoss(beta=0.5, per_token=False),
    "hinge": HingeLoss(beta=0.2, sft_coef=1.0),
    "simpo": SimPOLoss(beta=2.0, gamma=0.5),
    "orpo": ORPOLoss(odds_coef=0.4),
    "exo_pair": EXOPairLoss(beta=0.5, label_smoothing=0.01),
    "discopop": DiscoPOPLoss(beta=0.5, discopop_tau=0.3),
    **{name: PointwisePairLoss(name=name, beta=0.5) for name in ("nca_pair", "sppo_hard", "apo_zero", "apo_down")},
    "bco_pair": BCOPairLoss(beta=0.5),
    "aot": AOTLoss(beta=0.5, label_smoothing=0.1),
    "kto": KTOLoss(beta=0.5, desirable_weight=1.3, undesirable_weight=0.8),
}


def objective_of(config: Any) -> Any:
    return KTOObjective(config) if isinstance(config, KTOLoss) else PreferenceObjective(config)


@pytest.fixture(scope="module")
def answers(pairs: RaggedBatch) -> RaggedBatch:
    """The pairs with everything that a preference loss reads; one answer's first token is masked."""
    mask = pairs.sequence_index() >= 0
    mask[pairs.leaf_span(5)[0]] = False
    generator = torch.Generator().manual_seed(11)
    reference = -6 - 4 * torch.rand(len(pairs), generator=generator, dtype=torch.float64)
    return pairs.with_token(loss_mask=mask).with_sequence(
        ref_logprobs=reference,
        kl=torch.full((len(pairs),), 0.4, dtype=torch.float64),
        anchor=torch.linspace(-1.0, 2.0, 5, dtype=torch.float64).repeat_interleave(2),
    )


@pytest.fixture(params=list(CONFIGS))
def config(request: pytest.FixtureRequest) -> Any:
    return CONFIGS[request.param]


def slow_loss(config: Any, batch: RaggedBatch, model: Any) -> Tensor:
    """The papers' formulas on Python lists."""
    totals, lengths = [], []
    for s in range(len(batch)):
        start, stop = batch.leaf_span(s)
        ids = batch.token_ids(s)
        log_p = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        own = [t for t in range(start, stop) if batch.token["loss_mask"][t]]
        places = [len(ids) - (stop - t) for t in own]
        totals.append(sum(log_p[place - 1, ids[place]] for place in places))
        lengths.append(len(places))
    reference = batch.sequence["ref_logprobs"].tolist()
    ratios = [total - ref for total, ref in zip(totals, reference, strict=True)]
    means = [total / n for total, n in zip(totals, lengths, strict=True)]
    if isinstance(config, KTOLoss):
        losses = []
        for s, ratio in enumerate(ratios):
            above = config.beta * (ratio - 0.4)
            if batch.sequence["chosen"][s]:
                losses.append(config.desirable_weight * (1 - torch.sigmoid(above)))
            else:
                losses.append(config.undesirable_weight * (1 - torch.sigmoid(-above)))
        return sum(losses) / len(losses)
    losses = []
    rows = list(zip(batch.sequence["pair"].tolist(), batch.sequence["chosen"].tolist(), strict=True))
    for p in range(len(batch) // 2):
        win, lose = rows.index((p, True)), rows.index((p, False))
        given = "anchor" if isinstance(config, BCOPairLoss | AOTLoss) else "margin"
        losses.append(slow_pair(config, ratios, means, lengths, win, lose, float(batch.sequence[given][win])))
    return sum(losses) / len(losses)


def slow_pair(config: Any, ratios: list, means: list, lengths: list, win: int, lose: int, margin: float) -> Tensor:
    gap = ratios[win] - ratios[lose]
    nll = getattr(config, "sft_coef", 0.0) * -means[win]
    match config:
        case DPOLoss():
            x = config.beta * gap - config.margin_coef * margin
            return nll - sum(
                share * torch.log(torch.sigmoid(sign * x))
                for share, sign in ((1 - config.label_smoothing, 1), (config.label_smoothing, -1))
            )
        case RobustDPOLoss():
            e, x = config.label_smoothing, config.beta * gap
            return (-(1 - e) * torch.log(torch.sigmoid(x)) + e * torch.log(torch.sigmoid(-x))) / (1 - 2 * e)
        case IPOLoss():
            if config.per_token:
                gap = ratios[win] / lengths[win] - ratios[lose] / lengths[lose]
            return (gap - 1 / (2 * config.beta)) ** 2
        case HingeLoss():
            return nll + torch.clamp(1 - config.beta * gap, min=0)
        case EXOPairLoss():
            own = torch.sigmoid(config.beta * torch.stack([gap, -gap]))
            labels = torch.tensor([0.99, 0.01], dtype=torch.float64)
            return (own * (own / labels).log()).sum()
        case DiscoPOPLoss():
            x = config.beta * gap
            share = torch.sigmoid(x / config.discopop_tau)
            return -(1 - share) * torch.log(torch.sigmoid(x)) + share * torch.exp(-x)
        case PointwisePairLoss():
            up, down = torch.sigmoid(config.beta * ratios[win]), torch.sigmoid(config.beta * ratios[lose])
            return {
                "nca_pair": -torch.log(up) - (torch.log(1 - up) + torch.log(1 - down)) / 2,
                "sppo_hard": (ratios[win] - 0.5 / config.beta) ** 2 + (ratios[lose] + 0.5 / config.beta) ** 2,
                "apo_zero": 1 - up + down,
                "apo_down": up + 1 - torch.sigmoid(config.beta * gap),
            }[config.name]
        case BCOPairLoss():
            sides = (ratios[win] - margin, margin - ratios[lose])
            return -sum(torch.log(torch.sigmoid(config.beta * side)) for side in sides)
        case AOTLoss():
            x = config.beta * (gap - margin)
            return -0.9 * torch.log(torch.sigmoid(x)) - 0.1 * torch.log(torch.sigmoid(-x))
        case SimPOLoss():
            return -torch.log(torch.sigmoid(config.beta * (means[win] - means[lose]) - config.gamma))
        case _:
            odds = [p / (1 - p) for p in (means[win].exp(), means[lose].exp())]
            return -means[win] - config.odds_coef * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))


@pytest.fixture
def whole(config: Any, answers: RaggedBatch, make_engine: Any, gradients: Any) -> Any:
    engine = make_engine("causal", token_budget=10_000)
    return engine.train_step(answers, objective_of(config)), gradients(engine)


def test_equals_the_formula_on_an_unmodified_model(
    config: Any, answers: RaggedBatch, whole: Any, make_model: Any, same: Any
) -> None:
    model = make_model("causal", torch.float64)
    loss = slow_loss(config, answers, model)
    loss.backward()
    metrics, grads = whole
    assert metrics["loss/preference"] == pytest.approx(float(loss.detach()), abs=1e-10)
    same(grads, {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize(("token_budget", "share"), [(11, True), (30, True), (16, False)])
def test_cutting_and_sharing_change_nothing(
    config: Any, answers: RaggedBatch, whole: Any, token_budget: int, share: bool, make_engine: Any, gradients: Any,
    same: Any,
) -> None:  # fmt: skip
    engine = make_engine("causal", token_budget=token_budget + 4 * (not share), share_prefixes=share)
    metrics = engine.train_step(answers, objective_of(config))
    same(gradients(engine), whole[1])
    for name, value in whole[0].items():
        assert metrics[name] == pytest.approx(value, abs=1e-9), name


def test_a_prompt_is_computed_once_for_both_answers(answers: RaggedBatch, make_engine: Any) -> None:
    """The largest pair has a prompt of 4 tokens and answers of 1 and 6: it fits a budget of 11, and not one of 10."""
    seen: list[int] = []
    engine = make_engine("causal", token_budget=11)
    hidden = engine.packed.hidden
    engine.packed.hidden = lambda ids, *rest: seen.append(len(ids)) or hidden(ids, *rest)
    engine.train_step(answers, PreferenceObjective(DPOLoss()))
    assert sum(seen) == answers.num_tokens
    with pytest.raises(UserError, match=r"longer than train\.token_budget"):
        make_engine("causal", token_budget=10).train_step(answers, PreferenceObjective(DPOLoss()))


# Metrics -------------------------------------------------------------------------------------------------


def test_pair_metrics_by_hand(answers: RaggedBatch, make_engine: Any) -> None:
    engine = make_engine("causal")
    objective = PreferenceObjective(DPOLoss(beta=0.5))
    totals, lengths = answer_logprobs(engine.forward(answers, objective.needs).token["logprobs"], answers)
    metrics = engine.train_step(answers, objective)
    rewards = 0.5 * (totals - answers.sequence["ref_logprobs"])
    first, second = [0, 3, 4, 6, 9], [1, 2, 5, 7, 8]
    assert pair_sides(answers)[0].tolist() == first
    assert metrics["preference/reward_chosen"] == pytest.approx(float(rewards[first].mean()))
    assert metrics["preference/reward_rejected"] == pytest.approx(float(rewards[second].mean()))
    assert metrics["preference/margin"] == pytest.approx(float((rewards[first] - rewards[second]).mean()))
    assert metrics["preference/accuracy"] == float((rewards[first] > rewards[second]).double().mean())
    assert metrics["preference/logprob_chosen"] == pytest.approx(float((totals / lengths)[first].mean()))
    assert lengths[5] == answers.leaf_span(5)[1] - answers.leaf_span(5)[0] - 1, "the masked token does not count"


def test_kto_shows_accuracy_only_where_answers_come_in_pairs(answers: RaggedBatch, make_engine: Any) -> None:
    objective = KTOObjective(KTOLoss())
    metrics = make_engine("causal").train_step(answers, objective)
    assert {"preference/accuracy", "preference/margin"} <= metrics.keys() and metrics["preference/kl"] == 0.4
    alone = answers.select([0, 2, 5]).with_sequence(pair=torch.tensor([0, 1, 2]))
    metrics = make_engine("causal").train_step(alone, objective)
    assert "preference/accuracy" not in metrics
    assert {"preference/reward_chosen", "preference/reward_rejected"} <= metrics.keys()


def test_half_a_pair_is_an_error(answers: RaggedBatch, make_engine: Any) -> None:
    with pytest.raises(ValueError, match="one chosen and one rejected"):
        make_engine("causal").train_step(answers.select([0, 1, 3]), PreferenceObjective(DPOLoss()))


def test_margins_of_a_reward_model_are_scaled(pairs: RaggedBatch, make_engine: Any) -> None:
    """Margins of 0.5, 0.1, 0.3, 0 and 1: their factor is what stands in the loss, and 0 takes them away."""
    without = {name: values for name, values in pairs.sequence.items() if name != "margin"}
    bare = RaggedBatch(pairs.input_ids, pairs.segment_lengths, pairs.parents, pairs.leaves, pairs.ids, sequence=without)
    losses = [
        make_engine("scalar").train_step(batch, PairwiseObjective(margin_scale=scale))["loss/reward_model"]
        for batch, scale in ((pairs, 1.0), (pairs, 2.0), (pairs, 0.0), (bare, 1.0))
    ]
    assert losses[2] == pytest.approx(losses[3]) and losses[1] > losses[0] > losses[2]
