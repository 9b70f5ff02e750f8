"""Every objective against a slow reference (plain model, plain loops), and under every way to cut a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch
from quartet.config.algorithms import (
    CISPO,
    GMPO,
    GPG,
    GRPO,
    GSPO,
    PPO,
    RLOO,
    SAPO,
    CISPOLoss,
    ClipCovLoss,
    ClippedLoss,
    Distillation,
    GMPOLoss,
    GSPOLoss,
    KLConfig,
    KLCovLoss,
    OffPolicyConfig,
    ReinforceLoss,
    SAPOLoss,
    SequenceClippedLoss,
    kl_term,
)
from quartet.train.objectives import PairwiseObjective, PolicyObjective, SFTObjective, ValueObjective
from unshared import unshared

TEMPERATURE = 0.9
NUM_TRAJECTORIES = 6
MAX_NEW_TOKENS = 8
AGGREGATIONS = (
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm",
)  # fmt: skip
KL_LOSS = KLConfig(coef=0.2, estimator="k3", place="loss")
ONLY_KL_REWARD = KLConfig(coef=0.2, estimator="k1", place="reward")


def _policy(config, is_first=False):
    return PolicyObjective(
        config, NUM_TRAJECTORIES, TEMPERATURE, kl_coef=0.2, is_first=is_first, max_new_tokens=MAX_NEW_TOKENS
    )


# The slow reference --------------------------------------------------------------------------------------


@dataclass
class Slow:
    """Per-token quantities of an unmodified model, one sequence at a time, as Python dictionaries by stored token."""

    batch: RaggedBatch
    model: torch.nn.Module

    def _each(self, mask: str, temperature: float):
        """``(stored token, its id, outputs of the state before it)`` of the tokens under a mask."""
        for s in range(len(self.batch)):
            start, stop = self.batch.leaf_span(s)
            ids = self.batch.token_ids(s)
            if hasattr(self.model, "score"):
                hidden = self.model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
                outputs = self.model.score(hidden).squeeze(-1)
            else:
                logits = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
                outputs = (logits / temperature).log_softmax(-1)
            for t in range(start, stop):
                if self.batch.token[mask][t]:
                    where = len(ids) - (stop - t)
                    yield t, ids[where], outputs[where - 1]

    @cached_property
    def _rows(self):
        # One forward for both: Llama's norms round gradients to fp32, and two passes would round twice.
        return list(self._each("loss_mask", TEMPERATURE))

    def logprobs(self):
        return {t: row[label] for t, label, row in self._rows}

    def entropies(self):
        return {t: -(row.exp() * row).sum() for t, _, row in self._rows}

    def demonstrated(self):
        return [row[label] for _, label, row in self._each("loss_mask", 1.0)]

    def values(self):
        return {t: value for t, _, value in self._each("action_mask", 1.0)}

    def scores(self):
        return [
            self.model(input_ids=torch.tensor([self.batch.token_ids(s)]), use_cache=False).logits[0, 0]
            for s in range(len(self.batch))
        ]

    def trajectories(self) -> dict[int, list[int]]:
        """Loss tokens of each trajectory that has any."""
        found: dict[int, list[int]] = {}
        for s, n in enumerate(self.batch.sequence["trajectory"].tolist()):
            tokens = [t for t in range(*self.batch.leaf_span(s)) if self.batch.token["loss_mask"][t]]
            if tokens:
                found.setdefault(n, []).extend(tokens)
        return found

    def field(self, name: str, t: int) -> float:
        return float(self.batch.token[name][t])

    def aggregated(self, losses: dict[int, Tensor], aggregation: str) -> Tensor:
        groups = [[losses[t] for t in tokens] for tokens in self.trajectories().values()]
        if aggregation == "token_mean":
            return sum(sum(g) for g in groups) / sum(map(len, groups))
        if aggregation == "sequence_mean_token_mean":
            return sum(sum(g) / len(g) for g in groups) / len(groups)
        total = sum(sum(g) for g in groups) / len(groups)
        return total / MAX_NEW_TOKENS if aggregation == "sequence_mean_token_sum_norm" else total


def _surrogate(ratio: Tensor, advantage: float, config) -> Tensor:
    config = config.policy_loss
    clipped = ratio.clamp(1 - config.clip_eps_low, 1 + config.clip_eps_high)
    loss = torch.maximum(-advantage * ratio, -advantage * clipped)
    if getattr(config, "dual_clip", None) is not None and advantage < 0:
        loss = torch.minimum(loss, torch.tensor(-config.dual_clip * advantage, dtype=loss.dtype))
    return loss


def _token_loss(slow: Slow, logprobs: dict[int, Tensor], t: int, config) -> Tensor:
    advantage, loss = slow.field("advantages", t), config.policy_loss
    if isinstance(loss, ReinforceLoss):
        return -advantage * logprobs[t]
    if isinstance(loss, GSPOLoss):
        own = next(tokens for tokens in slow.trajectories().values() if t in tokens)
        mean = sum(logprobs[u] - slow.field("old_logprobs", u) for u in own) / len(own)
        return _surrogate(mean.exp(), advantage, config)
    ratio = (logprobs[t] - slow.field("old_logprobs", t)).exp()
    if isinstance(loss, SAPOLoss):
        tau = loss.tau_pos if advantage > 0 else loss.tau_neg
        return -advantage * 4 / tau / (1 + (-tau * (ratio - 1)).exp())
    if isinstance(loss, GMPOLoss):
        own = next(tokens for tokens in slow.trajectories().values() if t in tokens)
        held = []
        for u in own:  # each by the sign of its own advantage
            most = loss.clip_eps_high if slow.field("advantages", u) > 0 else None
            least = -loss.clip_eps_low if most is None else None
            held.append((logprobs[u] - slow.field("old_logprobs", u)).clamp(least, most))
        return -advantage * (sum(held) / len(held)).exp()
    if isinstance(loss, KLCovLoss):
        penalty = loss.ppo_kl_coef * ratio.log().abs() if slow.batch.token["high_covariance"][t] else 0.0
        return -advantage * ratio + penalty
    if isinstance(loss, CISPOLoss):
        low = 0.0 if loss.clip_eps_low is None else 1 - loss.clip_eps_low
        return -advantage * ratio.detach().clamp(low, 1 + loss.clip_eps_high) * logprobs[t]
    return _surrogate(ratio, advantage, config)


def _slow_policy(slow: Slow, config) -> Tensor:
    logprobs = slow.logprobs()
    weights = dict.fromkeys(logprobs, 1.0)
    if config.off_policy is not None:
        for tokens in slow.trajectories().values():
            logs = [slow.field("old_logprobs", t) - slow.field("rollout_logprobs", t) for t in tokens]
            for t, own in zip(tokens, logs, strict=True):
                log = sum(logs) if config.off_policy.level == "sequence" else own
                weight = math.exp(log)
                capped = config.off_policy.cap if config.off_policy.mode == "truncate" else 0.0
                weights[t] = weight if weight <= config.off_policy.cap else capped
                if config.off_policy.floor is not None and weight < config.off_policy.floor:
                    weights[t] = config.off_policy.floor if config.off_policy.mode == "truncate" else 0.0
        if config.off_policy.batch_normalize:
            by_trajectory = [[weights[t] for t in tokens] for tokens in slow.trajectories().values()]
            if config.off_policy.level == "token":
                by_trajectory = [list(weights.values())]
            mean = sum(sum(row) / len(row) for row in by_trajectory) / len(by_trajectory)
            weights = {t: weight / mean for t, weight in weights.items()}
    for t in weights:
        left_out = isinstance(config.policy_loss, ClipCovLoss) and bool(slow.batch.token["high_covariance"][t])
        if left_out or (config.top_entropy_quantile < 1 and not slow.batch.token["high_entropy"][t]):
            weights[t] = 0.0
    if isinstance(config.policy_loss, SequenceClippedLoss):
        losses = []
        for tokens in slow.trajectories().values():
            ratio = sum(logprobs[t] - slow.field("old_logprobs", t) for t in tokens).exp()
            advantage = sum(slow.field("advantages", t) * weights[t] for t in tokens) / len(tokens)
            losses.append(_surrogate(ratio, advantage, config))
        loss = sum(losses) / len(losses)
    else:
        losses = {t: weights[t] * _token_loss(slow, logprobs, t, config) for t in logprobs}
        loss = slow.aggregated(losses, config.aggregation)
    if config.entropy_coef:
        loss = loss - config.entropy_coef * slow.aggregated(slow.entropies(), config.aggregation)
    if kl_term(config).place == "loss":
        kl = {}
        for t, logprob in logprobs.items():
            log_ratio = slow.field("ref_logprobs", t) - logprob
            kl[t] = log_ratio.exp() - 1 - log_ratio
        loss = loss + 0.2 * slow.aggregated(kl, config.aggregation)
    return loss


def _slow_sft(slow: Slow) -> Tensor:
    logprobs = slow.demonstrated()
    return -sum(logprobs) / len(logprobs)


def _slow_pairs(slow: Slow) -> Tensor:
    scores = slow.scores()
    found: dict[int, dict[bool, tuple[Tensor, float]]] = {}
    sequence = slow.batch.sequence
    for s, score in enumerate(scores):
        sides = found.setdefault(int(sequence["pair"][s]), {})
        sides[bool(sequence["chosen"][s])] = (score, float(sequence["margin"][s]))
    losses = []
    for sides in found.values():
        (chosen, margin), (rejected, _) = sides[True], sides[False]
        losses.append(-torch.log(torch.sigmoid(chosen - rejected - margin)) + 0.05 * (chosen + rejected) ** 2)
    return sum(losses) / len(losses)


def _slow_values(slow: Slow) -> Tensor:
    losses = []
    for t, value in slow.values().items():
        old, target = slow.field("values", t), slow.field("returns", t)
        clipped = value.clamp(old - 0.2, old + 0.2)
        losses.append(0.5 * torch.maximum((value - target) ** 2, (clipped - target) ** 2))
    return sum(losses) / len(losses)


@dataclass(frozen=True)
class Case:
    kind: str
    objective: object
    slow: Callable[[Slow], Tensor]


def _policy_case(config) -> Case:
    return Case("causal", _policy(config), lambda slow: _slow_policy(slow, config))


CASES: dict[str, Case] = {
    "sft": Case("causal", SFTObjective(), _slow_sft),
    "pairwise": Case("scalar", PairwiseObjective(centring=0.05), _slow_pairs),
    "value": Case("scalar", ValueObjective(PPO(value_clip=0.2), NUM_TRAJECTORIES), _slow_values),
    "ppo": _policy_case(PPO()),
    **{f"grpo-{a}": _policy_case(GRPO(aggregation=a, kl=KL_LOSS)) for a in AGGREGATIONS},
    "ppo-everything": _policy_case(
        PPO(
            aggregation="sequence_mean_token_mean",
            entropy_coef=0.1,
            policy_loss=ClippedLoss(dual_clip=1.2, clip_eps_low=0.1, clip_eps_high=0.3),
            off_policy=OffPolicyConfig(cap=1.05, mode="mask"),
        )
    ),
    "rloo-token": _policy_case(RLOO(policy_loss=ClippedLoss(), kl=ONLY_KL_REWARD)),
    "rloo-sequence": _policy_case(RLOO(kl=ONLY_KL_REWARD)),
    "rloo-sequence-corrected": _policy_case(RLOO(off_policy=OffPolicyConfig(level="sequence", cap=1.1))),
    "gspo": _policy_case(GSPO(policy_loss=GSPOLoss(clip_eps_low=0.05, clip_eps_high=0.05))),
    "gspo-corrected": _policy_case(
        GSPO(
            policy_loss=GSPOLoss(clip_eps_low=0.05, clip_eps_high=0.05),
            aggregation="token_mean",
            off_policy=OffPolicyConfig(level="sequence", cap=1.1, mode="mask"),
        )
    ),
    "cispo": _policy_case(CISPO(policy_loss=CISPOLoss(clip_eps_high=0.1))),
    "cispo-everything": _policy_case(
        CISPO(
            policy_loss=CISPOLoss(clip_eps_low=0.1, clip_eps_high=0.1),
            aggregation="sequence_mean_token_sum_norm",
            entropy_coef=0.1,
            off_policy=OffPolicyConfig(cap=1.05),
        )
    ),
    "sapo": _policy_case(SAPO()),
    "gmpo": _policy_case(GMPO(policy_loss=GMPOLoss(clip_eps_low=0.1, clip_eps_high=0.1))),
    "clip_cov": _policy_case(GRPO(policy_loss=ClipCovLoss(), off_policy=OffPolicyConfig(cap=1.05, floor=0.95))),
    "kl_cov": _policy_case(GRPO(policy_loss=KLCovLoss(ppo_kl_coef=0.3))),
    "high entropy": _policy_case(GRPO(kl=KL_LOSS, top_entropy_quantile=0.5, policy_loss=ClipCovLoss())),
    **{
        f"divided by the mean, {level}": _policy_case(
            GRPO(off_policy=OffPolicyConfig(level=level, mode="mask", cap=1.1, floor=0.9, batch_normalize=True))
        )
        for level in ("token", "sequence")
    },
    "gpg": _policy_case(GPG()),
    "distillation": _policy_case(Distillation(off_policy=OffPolicyConfig(cap=1.05))),
}


@pytest.fixture(params=list(CASES))
def case(request) -> Case:
    return CASES[request.param]


@pytest.fixture
def data(case, batch, pairs) -> RaggedBatch:
    return pairs if isinstance(case.objective, PairwiseObjective) else batch


@pytest.fixture
def whole(case, data, make_engine, gradients, weights):
    """Metrics, gradients and weights of one update with everything in one micro-batch."""
    engine = make_engine(case.kind, token_budget=10_000)
    metrics = engine.train_step(data, case.objective)
    return metrics, gradients(engine), weights(engine)


def _check(found, whole, same):
    metrics, grads, after = whole
    same(found[1], grads)
    same(found[2], after)
    same(
        {name: torch.tensor(value, dtype=torch.float64) for name, value in found[0].items()},
        {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()},
    )


def test_equals_the_slow_reference(case, data, whole, make_model, same):
    model = make_model(case.kind, torch.float64)
    loss = case.slow(Slow(data, model))
    loss.backward()
    metrics, grads, _ = whole
    same(grads, {name: p.grad for name, p in model.named_parameters()})
    coefficients = {
        "loss/kl": 0.2,
        "loss/entropy": -getattr(getattr(case.objective, "config", None), "entropy_coef", 0.0),
    }
    parts = sum(coefficients.get(name, 1.0) * value for name, value in metrics.items() if name.startswith("loss/"))
    assert parts == pytest.approx(float(loss.detach()), abs=1e-10)


@pytest.mark.parametrize("token_budget", [16, 40])
def test_micro_batches_change_nothing(case, data, whole, token_budget, make_engine, gradients, weights, same):
    engine = make_engine(case.kind, token_budget=token_budget, logprob_chunk=3)
    metrics = engine.train_step(data, case.objective)
    _check((metrics, gradients(engine), weights(engine)), whole, same)


def test_sharing_prompts_changes_nothing(case, data, whole, make_engine, gradients, weights, same):
    engine = make_engine(case.kind, token_budget=24)
    flat = unshared(data)
    assert flat.num_tokens > data.num_tokens
    metrics = engine.train_step(flat, case.objective)
    _check((metrics, gradients(engine), weights(engine)), whole, same)


# Micro-batches really were several, and the awkward cases really occur --------------------------------------


def test_the_batch_is_cut_and_clipped(batch, make_engine):
    """Guards the tests above."""
    parts = []

    class Counting(PolicyObjective):
        def loss(self, outputs, part, denominators, sums):
            parts.append(len(part))
            return super().loss(outputs, part, denominators, sums)

    objective = Counting(PPO(), NUM_TRAJECTORIES, TEMPERATURE, kl_coef=0.0, is_first=False, max_new_tokens=8)
    metrics = make_engine(token_budget=16).train_step(batch, objective)
    assert len(parts) > 2 and sum(parts) == 7
    assert 0 < metrics["policy/clip_frac"] < 1
    assert metrics["policy/clip_frac_drift"] == metrics["policy/clip_frac"]
    assert "policy/clip_frac_numerical" not in metrics


# The first mini-batch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("config", [PPO(), RLOO(), GSPO(), CISPO()], ids=["token", "sequence", "gspo", "cispo"])
def test_first_ratio_is_exactly_one(precision, config, batch, make_engine):
    """Whatever the dtype, the cut and the weights by now; ``old_logprobs`` of the batch is not even looked at."""
    engine = make_engine(dtype=torch.float32, precision=precision, token_budget=20)
    bare, _ = batch.pop("old_logprobs")
    for _ in range(3):
        metrics = engine.train_step(bare, _policy(config, is_first=True))
        assert metrics["policy/ratio_mean"] == 1.0
        assert metrics["policy/ratio_max"] == 1.0
        assert metrics["policy/clip_frac"] == metrics["policy/clip_frac_numerical"] == 0.0
        assert metrics["policy/approx_kl"] == 0.0
        assert metrics["grad_norm"] > 0
        assert "policy/clip_frac_drift" not in metrics


def test_the_dual_clip_is_counted_where_it_is_on(batch, make_engine):
    config = PPO(policy_loss=ClippedLoss(dual_clip=1.05))
    engine = make_engine()
    own = engine.forward(batch, _policy(config).needs).token["logprobs"]
    mask, advantages = batch.token["loss_mask"], batch.token["advantages"]
    held = mask & (advantages < 0) & ((own - batch.token["old_logprobs"]).exp() > 1.05)
    metrics = engine.train_step(batch, _policy(config))
    assert metrics["policy/dual_clip_frac"] == pytest.approx(float(held.sum() / mask.sum())) != 0
    assert "policy/dual_clip_frac" not in make_engine().train_step(batch, _policy(PPO()))


def test_agreement_is_measured_on_the_first(batch, make_engine):
    """By hand: the fixture's rollout log-probabilities are the model's own plus known noise."""
    engine = make_engine()
    own = engine.forward(batch, _policy(PPO()).needs).token["logprobs"]
    difference = (own - batch.token["rollout_logprobs"]).abs()[batch.token["loss_mask"]]
    metrics = engine.train_step(batch, _policy(PPO(), is_first=True))
    assert metrics["agreement/logprob_diff_mean"] == pytest.approx(float(difference.mean()), rel=1e-9)
    assert metrics["agreement/logprob_diff_max"] == pytest.approx(float(difference.max()), rel=1e-9)


# Pairs ---------------------------------------------------------------------------------------------------


def test_pair_metrics_by_hand(pairs, make_engine):
    engine = make_engine("scalar", token_budget=20)
    scores = engine.forward(pairs, PairwiseObjective().needs).sequence["scores"]
    chosen, pair = pairs.sequence["chosen"], pairs.sequence["pair"]
    margins = torch.stack([scores[(pair == p) & chosen].sum() - scores[(pair == p) & ~chosen].sum() for p in range(5)])
    metrics = engine.train_step(pairs, PairwiseObjective())
    assert metrics["reward_model/accuracy"] == float((margins > 0).double().mean())
    assert metrics["reward_model/margin"] == pytest.approx(float(margins.mean()), rel=1e-9)


def test_no_loss_tokens_leave_the_gradient_zero(batch, make_engine):
    engine = make_engine()
    nothing = batch.select([4])
    assert not bool(nothing.token["loss_mask"].any())
    metrics = engine.train_step(nothing, _policy(PPO()))
    assert metrics["grad_norm"] == 0.0
    assert metrics["loss/policy"] == 0.0


@pytest.mark.parametrize("token_budget", [20, 10_000])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_weights_and_limits_of_the_correction_are_logged(batch, make_engine, mode, token_budget):
    config = PPO(off_policy=OffPolicyConfig(cap=1.05, mode=mode), entropy_coef=0.01)
    objective = PolicyObjective(config, 6, 0.9, kl_coef=0.0, is_first=False, max_new_tokens=8)
    metrics = make_engine(token_budget=token_budget).train_step(batch, objective)
    mask = batch.token["loss_mask"]
    weights = (batch.token["old_logprobs"] - batch.token["rollout_logprobs"])[mask].exp()
    above = weights > 1.05
    assert 0 < int(above.sum()) < len(weights)
    expected = torch.where(above, 1.05 if mode == "truncate" else 0.0, weights)
    assert metrics["correction/weight_mean"] == pytest.approx(float(expected.mean()))
    assert metrics["correction/limited_frac"] == pytest.approx(float(above.double().mean()))
    assert metrics["loss/entropy"] == pytest.approx(metrics["policy/entropy"])
