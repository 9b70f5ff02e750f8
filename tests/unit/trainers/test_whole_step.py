"""One step of every method, with two updates, against plain transformers models, plain loops and torch's AdamW.

The slow side knows the kept rollouts (ids, scores, why they ended) and the models as they were. Everything that a step
does with them is computed again: log-probabilities, values, penalties, KL, advantages, mini-batches, losses, updates.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

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
    BestOfN,
    CISPOLoss,
    ClipCovLoss,
    ClippedLoss,
    Distillation,
    DrGRPO,
    GMPOLoss,
    GroupAlgorithm,
    GroupRelativeAlgorithm,
    KLConfig,
    KLCovLoss,
    OnlineDPO,
    OptimalTokenBaseline,
    OverlongConfig,
    PassAtK,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
    SequenceClippedLoss,
)
from quartet.config.common import OptimConfig, SamplingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.recipe import ActorConfig, CriticConfig, ReferenceConfig, RLRecipe, RolloutConfig
from quartet.config.run import LogConfig
from quartet.observe.rollouts import RolloutRecord, read_rollout_step
from quartet.observe.trackers import read_metrics
from quartet.trainers.rl import RLTrainer

TEMPERATURE, LONGEST, PENALTY = 0.8, 6, 0.25
OPTIM = OptimConfig(lr=0.1, eps=0.01, max_grad_norm=1e6)
"""An epsilon above most gradients: the update then is nearly linear in them and does not magnify rounding."""
CLIP = {"clip_eps_low": 0.02, "clip_eps_high": 0.03}
REWARD_KL = KLConfig(coef=0.1)
LOSS_KL = KLConfig(coef=0.1, place="loss", estimator="k3")
METHODS: dict[str, Any] = {
    "ppo": PPO(
        policy_loss=ClippedLoss(dual_clip=1.02, **CLIP), kl=REWARD_KL, gamma=0.9, gae_lambda=0.8, value_clip=0.05,
        entropy_coef=0.05,
    ),
    "ppo, cut off": PPO(policy_loss=ClippedLoss(**CLIP), kl=REWARD_KL, gamma=0.9, bootstrap_truncated=True),
    "grpo": GRPO(policy_loss=ClippedLoss(**CLIP), kl=LOSS_KL, entropy_coef=0.05),
    "grpo, KL in the reward": GRPO(policy_loss=ClippedLoss(**CLIP), kl=KLConfig(coef=0.1, estimator="k2")),
    "dr_grpo": DrGRPO(policy_loss=ClippedLoss(**CLIP)),
    "dapo": DAPO(policy_loss=ClippedLoss(**CLIP), overlong=OverlongConfig(buffer=3, penalty=0.5)),
    "gspo": GSPO(),
    "cispo": CISPO(policy_loss=CISPOLoss(**CLIP)),
    "gpg": GPG(),
    "rloo": RLOO(policy_loss=SequenceClippedLoss(**CLIP), kl=REWARD_KL),
    "rloo, tokens": RLOO(policy_loss=ClippedLoss(**CLIP), kl=REWARD_KL),
    "sapo": SAPO(),
    "gmpo": GMPO(policy_loss=GMPOLoss(**CLIP)),
    "clip_cov": GRPO(policy_loss=ClipCovLoss(clip_cov_ratio=0.9, clip_cov_lb=0.05, **CLIP)),
    "kl_cov": DrGRPO(
        policy_loss=KLCovLoss(kl_cov_ratio=0.1, ppo_kl_coef=0.5), normalise_std="batch", top_entropy_quantile=0.4
    ),
    "pass_at_k": PassAtK(k=1, reward_clip_range=(-0.5, 1.5), policy_loss=ClippedLoss(**CLIP)),
    "gdpo": GDPO(policy_loss=ClippedLoss(**CLIP)),
    "optimal_token_baseline": OptimalTokenBaseline(policy_loss=ClippedLoss(**CLIP)),
    "opo": OPO(policy_loss=ClippedLoss(**CLIP)),
    "reinforce_pp": ReinforcePlusPlus(policy_loss=ClippedLoss(**CLIP), kl=REWARD_KL, gamma=0.9),
    "reinforce_pp_baseline": ReinforcePlusPlusBaseline(policy_loss=ClippedLoss(**CLIP)),
    "remax": ReMax(kl=REWARD_KL, gamma=0.9),
    "distillation": Distillation(),
    "best_of_n": BestOfN(keep=1),
    "online_dpo": OnlineDPO(),
}  # fmt: skip


# The slow side -------------------------------------------------------------------------------------------


def read(model: Any, record: RolloutRecord, share: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of a response's tokens, at a share of the temperature."""
    ids = [*record.prompt_ids, *record.response_ids]
    logits = model(torch.tensor([ids])).logits[0, len(record.prompt_ids) - 1 : -1].double() / (TEMPERATURE * share)
    log_p = logits.log_softmax(-1)
    return log_p[range(len(record.response_ids)), record.response_ids], -(log_p.exp() * log_p).sum(-1)


def read_values(model: Any, record: RolloutRecord) -> Tensor:
    """Of the states before each token of a response, and of the one behind the last."""
    ids = [*record.prompt_ids, *record.response_ids]
    hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state
    return model.score(hidden)[0, len(record.prompt_ids) - 1 :, 0].double()


def whitened(rows: Sequence[Tensor]) -> list[Tensor]:
    every = torch.cat(list(rows))
    return [(row - every.mean()) / (every.std() + 1e-6) for row in rows]


def highest(rows: Sequence[Tensor], share: float) -> list[Tensor]:
    """Of all tokens the given share, those with the highest values."""
    every = torch.cat(list(rows)).sort(descending=True).values
    return [row >= every[int(share * len(every)) - 1] for row in rows]


def summed_from_here_on(rewards: Tensor, gamma: float) -> Tensor:
    found = rewards.clone()
    for t in range(len(rewards) - 2, -1, -1):
        found[t] += gamma * found[t + 1]
    return found


@dataclass
class Slow:
    """A step's rollouts, and what the models say of them before the first update."""

    config: Any
    records: list[RolloutRecord]
    greedy: dict[str, float]
    old: list[Tensor]
    reference: list[Tensor]
    values: list[Tensor]
    entropies: list[Tensor]
    sharp: list[Tensor]

    def __post_init__(self) -> None:
        self.groups = list(dict.fromkeys(r.group for r in self.records))
        self.members = {g: [i for i, r in enumerate(self.records) if r.group == g] for g in self.groups}
        scores = [float(r.score or 0.0) for r in self.records]
        if isinstance(self.config, GDPO):
            own = [torch.tensor([scores[i] for i in self.members[r.group]]).double() for r in self.records]
            scores = [float((x - o.mean()) / (o.std() + 1e-6)) for x, o in zip(scores, own, strict=True)]
        if getattr(self.config, "reward_clip_range", None) is not None:
            least, most = self.config.reward_clip_range
            scores = [min(max(x, least), most) for x in scores]
        self.shaped = [x - self._penalty(r) for x, r in zip(scores, self.records, strict=True)]
        self.equal = {g for g, own in self.members.items() if len({self.shaped[i] for i in own}) == 1}
        kl = getattr(self.config, "kl", KLConfig(coef=0.0))
        self.coef = kl.coef if kl.place == "reward" else 0.0
        difference = [old - ref for old, ref in zip(self.old, self.reference, strict=True)]
        self.kl = [d if kl.estimator == "k1" else 0.5 * d**2 for d in difference]

    def _penalty(self, record: RolloutRecord) -> float:
        penalty = PENALTY if record.finish_reason == "length" else 0.0
        overlong = getattr(self.config, "overlong", None)
        if overlong is not None:
            over = len(record.response_ids) - (LONGEST - overlong.buffer)
            penalty += overlong.penalty * max(0.0, over / overlong.buffer)
        return penalty if not isinstance(self.config, Distillation) else 0.0

    def advantages(self) -> list[Tensor]:
        config, lengths = self.config, [len(old) for old in self.old]
        if isinstance(config, Distillation):
            return [ref - old for ref, old in zip(self.reference, self.old, strict=True)]
        if isinstance(config, OptimalTokenBaseline):
            return self._by_position()
        if isinstance(config, GroupAlgorithm):
            found = self._of_groups()
            rows = [torch.full((n,), a, dtype=torch.float64) for n, a in zip(lengths, found, strict=True)]
            return self._whitened_groups(rows) if config.whiten_advantages else rows
        if isinstance(config, PPO):
            return whitened(self._generalised())
        rewards = self._rewards()
        returns = [summed_from_here_on(row, config.gamma) for row in rewards]
        if isinstance(config, ReMax):
            return [row - self.greedy[r.group] for row, r in zip(returns, self.records, strict=True)]
        return whitened(returns)

    def _rewards(self) -> list[Tensor]:
        rewards = [-self.coef * kl for kl in self.kl]
        for row, score in zip(rewards, self.shaped, strict=True):
            row[-1] += score
        return rewards

    def _generalised(self) -> list[Tensor]:
        config, found = self.config, []
        for rewards, values, record in zip(self._rewards(), self.values, self.records, strict=True):
            after = values[1:].clone()
            if not config.bootstrap_truncated or record.finish_reason != "length":
                after[-1] = 0.0
            deltas = rewards + config.gamma * after - values[:-1]
            found.append(summed_from_here_on(deltas, config.gamma * config.gae_lambda))
        return found

    def returns(self) -> list[Tensor]:
        """The critic's targets."""
        return [advantage + values[:-1] for advantage, values in zip(self._generalised(), self.values, strict=True)]

    def _by_position(self) -> list[Tensor]:
        """The optimal token baseline, without KL: a return is the score, wherever it is taken from."""
        paths = [
            (1 - 2 * old.exp() + (2 * old - sharp).exp()).cumsum(0)
            for old, sharp in zip(self.old, self.sharp, strict=True)
        ]
        found = []
        for i, record in enumerate(self.records):
            row = torch.zeros_like(self.old[i])
            for t in range(len(row)):
                own = [j for j in self.members[record.group] if len(paths[j]) > t]
                baseline = sum(paths[j][t] * self.shaped[j] for j in own) / sum(paths[j][t] for j in own)
                row[t] = 0.0 if record.group in self.equal else self.shaped[i] - baseline
            found.append(row)
        return found

    def choose(self, advantages: Sequence[Tensor]) -> None:
        """Which tokens of the step learn in full, and which a penalty holds."""
        config, loss = self.config, self.config.policy_loss
        learns, held = [[torch.full_like(old, fill, dtype=torch.bool) for old in self.old] for fill in (True, False)]
        if config.top_entropy_quantile < 1:
            learns = highest(self.entropies, config.top_entropy_quantile)
        if loss.name in ("clip_cov", "kl_cov"):
            means = [torch.cat(list(rows)).mean() for rows in (self.old, advantages)]
            products = [(x - means[0]) * (y - means[1]) for x, y in zip(self.old, advantages, strict=True)]
            if loss.name == "kl_cov":
                held = highest(products, loss.kl_cov_ratio)
            else:
                learns = [~((x > loss.clip_cov_lb) & (x < loss.clip_cov_ub)) for x in products]
        self.learns, self.held = learns, held

    def _of_groups(self) -> list[float]:
        config, found = self.config, [0.0] * len(self.records)
        totals = [score - self.coef * float(kl.sum()) for score, kl in zip(self.shaped, self.kl, strict=True)]
        for group, own in self.members.items():
            rewards = torch.tensor([totals[i] for i in own], dtype=torch.float64)
            weights = torch.tensor([len(self.old[i]) for i in own], dtype=torch.float64)
            for place, i in enumerate(own):
                if isinstance(config, RLOO):
                    baseline = (rewards.sum() - rewards[place]) / (len(own) - 1)
                else:
                    baseline = (weights * rewards).sum() / weights.sum() if isinstance(config, OPO) else rewards.mean()
                advantage = rewards[place] - baseline
                if isinstance(config, GroupRelativeAlgorithm) and config.normalise_std:
                    pool = torch.tensor(totals, dtype=torch.float64) if config.normalise_std == "batch" else rewards
                    # With k = 1 all ways to choose are the responses themselves: a deviation of the whole.
                    advantage = advantage / (pool.std(correction=0 if isinstance(config, PassAtK) else 1) + 1e-6)
                if isinstance(config, GPG):
                    advantage = advantage * len(self.groups) / (len(self.groups) - len(self.equal))
                found[i] = 0.0 if group in self.equal else float(advantage)
        return found

    def _whitened_groups(self, rows: list[Tensor]) -> list[Tensor]:
        return [
            torch.zeros_like(row) if record.group in self.equal else row
            for row, record in zip(whitened(rows), self.records, strict=True)
        ]

    # Losses ------------------------------------------------------------------------------------------

    def aggregated(self, rows: Sequence[Tensor], how: str) -> Tensor:
        if how == "token_mean":
            return torch.cat(list(rows)).mean()
        if how == "sequence_mean_token_mean":
            return torch.stack([row.mean() for row in rows]).mean()
        assert how == "sequence_mean_token_sum_norm"
        return torch.stack([row.sum() for row in rows]).mean() / LONGEST

    def loss(self, model: Any, chosen: Sequence[int], advantages: Sequence[Tensor]) -> Tensor:
        """Of one mini-batch, its records given by number."""
        config, loss = self.config, self.config.policy_loss
        read_now = [read(model, self.records[i]) for i in chosen]
        rows = []
        for (policy, _), i in zip(read_now, chosen, strict=True):
            log_ratio, advantage = policy - self.old[i], advantages[i]
            if loss.name == "reinforce":
                rows.append(-advantage * policy)
                continue
            if loss.name == "cispo":
                weight = log_ratio.detach().exp().clamp(1 - loss.clip_eps_low, 1 + loss.clip_eps_high)
                rows.append(-advantage * weight * policy)
                continue
            if loss.name in ("sapo", "gmpo", "kl_cov"):
                if loss.name == "sapo":
                    tau = torch.where(advantage > 0, loss.tau_pos, loss.tau_neg).double()
                    row = -advantage * 4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1))
                elif loss.name == "gmpo":
                    most = loss.clip_eps_high if float(advantage[0]) > 0 else None
                    held = log_ratio.clamp(None if most is not None else -loss.clip_eps_low, most)
                    row = -advantage * held.mean().exp()
                else:
                    row = -advantage * log_ratio.exp() + loss.ppo_kl_coef * log_ratio.abs() * self.held[i]
                rows.append(row * self.learns[i])
                continue
            if loss.name == "gspo":
                log_ratio = log_ratio.mean().expand_as(log_ratio)
            if loss.name == "sequence_clipped":
                log_ratio, advantage = log_ratio.sum().unsqueeze(0), advantage[:1]
            ratio = log_ratio.exp()
            clipped = ratio.clamp(1 - loss.clip_eps_low, 1 + loss.clip_eps_high)
            row = torch.maximum(-advantage * ratio, -advantage * clipped)
            if getattr(loss, "dual_clip", None) is not None:
                row = torch.where(advantage < 0, torch.minimum(row, -loss.dual_clip * advantage), row)
            rows.append(row if loss.name == "sequence_clipped" else row * self.learns[i])
        # A row of one number per response has one mean, however it is taken.
        total = self.aggregated(rows, config.aggregation)
        total = total - config.entropy_coef * self.aggregated([h for _, h in read_now], config.aggregation)
        kl = getattr(config, "kl", REWARD_KL)
        if kl.place == "loss" and kl.coef:
            difference = [policy - self.reference[i] for (policy, _), i in zip(read_now, chosen, strict=True)]
            rows = [(-d).exp() - 1 + d if kl.estimator == "k3" else 0.5 * d**2 for d in difference]
            total = total + kl.coef * self.aggregated(rows, config.aggregation)
        return total

    def value_loss(self, model: Any, chosen: Sequence[int], returns: Sequence[Tensor]) -> Tensor:
        clip, rows = self.config.value_clip, []
        for i in chosen:
            found, old = read_values(model, self.records[i])[:-1], self.values[i][:-1]
            bounded = old + (found - old).clamp(-clip, clip)
            rows.append(0.5 * torch.maximum((found - returns[i]) ** 2, (bounded - returns[i]) ** 2))
        return torch.cat(rows).mean()

    def selected_loss(self, model: Any, groups: Sequence[str]) -> Tensor:
        best = {g: sorted(self.members[g], key=lambda i: -self.shaped[i]) for g in groups}
        if isinstance(self.config, BestOfN):
            rows = [-read(model, self.records[i])[0] for own in best.values() for i in own[: self.config.keep]]
            return torch.cat(rows).mean()
        losses = []
        for own in best.values():
            good, bad = own[0], own[-1]
            ratios = [(read(model, self.records[i])[0] - self.reference[i]).sum() for i in (good, bad)]
            losses.append(-logsigmoid(self.config.loss.beta * (ratios[0] - ratios[1])))
        return torch.stack(losses).mean()


def halves(items: Sequence[Any]) -> list[Sequence[Any]]:
    size = -(-len(items) // 2)
    return [part for part in (items[:size], items[size:]) if part]


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps, weight_decay=0.0)


def update(model: Any, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def trained_slowly(slow: Slow, actor: Any, critic: Any) -> None:
    """Both updates of the step, in place."""
    optimizer = adam(actor)
    if isinstance(slow.config, (BestOfN, OnlineDPO)):
        for part in halves([g for g in slow.groups if g not in slow.equal]):
            update(actor, optimizer, slow.selected_loss(actor, part))
        return
    advantages = slow.advantages()
    slow.choose(advantages)
    parts = [[i for g in part for i in slow.members[g]] for part in halves(slow.groups)]
    for part in parts:
        update(actor, optimizer, slow.loss(actor, part, advantages))
    if critic is not None:
        returns, optimizer = slow.returns(), adam(critic)
        for part in parts:
            update(critic, optimizer, slow.value_loss(critic, part, returns))


# The test ------------------------------------------------------------------------------------------------


Updates = dict[str, Tensor]
"""What a step added to each parameter, by model and name."""


def added(**models: tuple[Any, Any]) -> Updates:
    """Of each model as it was and as it is."""
    return {
        f"{kind} {name}": after.detach() - start.detach()
        for kind, (first, last) in models.items()
        for (name, start), after in zip(first.named_parameters(), last.parameters(), strict=True)
    }


def same_updates(fast: Updates, slow: Updates, allowed: dict[str, float]) -> None:
    """``allowed`` belongs to models: an update is as wrong as the model's log-probabilities and advantages are."""
    for name, theirs in slow.items():
        torch.testing.assert_close(
            fast[name], theirs, atol=allowed[name.split()[0]], rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", METHODS)
def test_a_step_equals_the_slow_one(
    name: str,
    causal_lm: Any,
    scalar_model: Any,
    tokenizer: Any,
    prompts: Any,
    tmp_path: Path,
    leeway: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = METHODS[name]
    scored = {"missing_eos_penalty": PENALTY} if hasattr(config, "missing_eos_penalty") else {}
    config = config.model_copy(update=scored)
    causal_lm(5).save_pretrained(tmp_path / "other")
    has_critic, train = isinstance(config, PPO), TrainConfig(optim=OPTIM, token_budget=60)
    reads_other = name in ("distillation", "online_dpo") or getattr(getattr(config, "kl", None), "coef", 0) > 0
    critic = scalar_model()
    torch.nn.init.normal_(critic.score.weight, std=0.3, generator=torch.Generator().manual_seed(2))
    first_critic = copy.deepcopy(critic)

    def graded(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        """The same for all answers to most prompts, but for the penalties."""
        return [
            float(sum(map(ord, text)) % 3) if sum(map(ord, prompt)) % 3 == 0 else 1.0
            for prompt, text in zip(prompts, completions, strict=True)
        ]

    recipe = RLRecipe(
        output_dir=str(tmp_path / "run"),
        threads=1,
        algorithm=config,
        actor=ActorConfig(train=train),
        critic=CriticConfig(train=train) if has_critic else CriticConfig(),
        reference=ReferenceConfig(path=str(tmp_path / "other") if reads_other else None),
        rollout=RolloutConfig(
            sampling=SamplingConfig(max_new_tokens=LONGEST, temperature=TEMPERATURE),
            engine=NativeEngineConfig(max_running=8),
        ),
        steps=1,
        prompts_per_step=8,
        responses_per_prompt=2,
        minibatches=2,
        chunk_size=2,
        log=LogConfig(tensorboard=False),
    )
    trainer = RLTrainer(
        recipe, model=causal_lm(), tokenizer=tokenizer, rewards=[graded], prompts=prompts,
        critic=critic if has_critic else None,
    )  # fmt: skip
    result = trainer.train()

    records = read_rollout_step(tmp_path / "run" / "rollouts", 1)
    sampled = [record for record in records if not record.sequence_id.endswith(".greedy")]
    greedy = {r.group: float(r.score or 0.0) for r in records if r.sequence_id.endswith(".greedy")}
    assert {len(r.response_ids) for r in sampled} > {LONGEST}, "of several lengths"

    def slowly(rounded: Callable[[Any], Any], config: Any = config) -> Updates:
        """The step's updates of models that are rounded otherwise."""
        actor, other, values = rounded(causal_lm()), rounded(causal_lm(5)), rounded(copy.deepcopy(first_critic))
        started = {"actor": copy.deepcopy(actor), "critic": copy.deepcopy(values)}
        with torch.no_grad():
            slow = Slow(
                config, sampled, greedy,
                [read(actor, record)[0] for record in sampled],
                [read(other, record)[0] for record in sampled],
                [read_values(values, record) for record in sampled],
                [read(actor, record)[1] for record in sampled],
                [read(actor, record, share=0.5)[0] for record in sampled],
            )  # fmt: skip
        assert len(slow.groups) == 8
        assert bool(slow.equal) != (name == "dapo") and len(slow.equal) < 8, "some groups are equal, but for dapo's"
        trained_slowly(slow, actor, values if has_critic else None)
        return added(actor=(started["actor"], actor), **({"critic": (started["critic"], values)} if has_critic else {}))

    slow = slowly(lambda model: model)
    fast = added(actor=(causal_lm(), result.model), **({"critic": (first_critic, result.critic)} if has_critic else {}))
    assert max(float(update.abs().max()) for update in slow.values()) > 1e-2, "something is learned"
    # The longest sums are those of a weight's gradient, over tokens.
    num_tokens = sum(len(record.prompt_ids) + len(record.response_ids) for record in sampled)
    moved = leeway(slowly, torch.float32, terms=num_tokens)
    allowed = {kind: max(v for n, v in moved.items() if n.startswith(kind)) for kind in {n.split()[0] for n in moved}}
    same_updates(fast, slow, allowed)
    with pytest.raises(AssertionError, match="not close"), monkeypatch.context() as patch:
        # A temperature that is wrong by a thousandth.
        patch.setitem(globals(), "TEMPERATURE", TEMPERATURE * 1.001)
        same_updates(fast, slowly(lambda model: model), allowed)
    if has_critic:
        with pytest.raises(AssertionError, match="not close"):
            wrong = slowly(lambda model: model, config.model_copy(update={"gamma": config.gamma * 0.99}))
            same_updates(fast, {n: update for n, update in wrong.items() if n.startswith("critic")}, allowed)
    row = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    if "policy/clip_frac" in row:
        assert row["policy/clip_frac_numerical"] == 0.0 < row["policy/clip_frac_drift"], "the clip is at work"
