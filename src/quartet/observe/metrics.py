"""Every metric the system logs, in one table: name, unit, meaning, what a bad value looks like.

A name that is not in the table cannot be logged, so the table, ``docs/metrics.md`` and the report's
explanations never fall behind the code. Names with a placeholder (``reward/<source>``) stand for a family; an
exact name wins over a family. After a change, write the page anew:
``python -m quartet.observe.metrics > docs/metrics.md``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from quartet.observe.evaluation_metrics import EVALUATION_ROWS
from quartet.observe.rollout_metrics import ROLLOUT_ROWS


@dataclass(frozen=True)
class Metric:
    """One row of the table; ``name`` may hold ``<placeholders>``."""

    name: str
    unit: str
    meaning: str
    bad: str


_ROWS = (
    Metric(
        "loss/policy",
        "1",
        "Policy loss of the actor without its KL, entropy and demonstration terms, mean over the step's updates. For "
        "clipped objectives its value says little: it is near 0 by construction when advantages are whitened.",
        "NaN or infinite; growing steadily in size while the score falls.",
    ),
    Metric(
        "loss/value",
        "reward²",
        "Half the squared error of the critic against the returns, the larger of clipped and unclipped.",
        "Grows from step to step, or stays far above half the variance of the returns.",
    ),
    Metric(
        "loss/sft",
        "nats/token",
        "Mean negative log-probability of the demonstration tokens that carry loss.",
        "Flat from the start (learning rate too low, wrong mask), or nears 0 while held-out loss rises.",
    ),
    Metric(
        "loss/ptx",
        "nats/token",
        "Mean negative log-probability of the demonstrations mixed into the actor's updates, before its coefficient.",
        "Rises: the policy forgets what the demonstrations show. Raise ptx.coef.",
    ),
    Metric(
        "loss/reward_model",
        "nats/pair",
        "Negative log-sigmoid of the score difference between chosen and rejected answer, mean over pairs.",
        "Stays at 0.69, the loss of a coin toss.",
    ),
    Metric(
        "loss/preference",
        "1",
        "Loss of preference training (DPO and its relatives, KTO), its likelihood term included.",
        "Does not leave its first value (0.69 for DPO), or nears 0 while eval/loss rises.",
    ),
    Metric(
        "loss/process_reward",
        "nats/step",
        "Binary cross-entropy between a step's label and the probability that it is right, mean over labelled steps.",
        "Stays at 0.69, the loss of a coin toss, or at the entropy of the labels.",
    ),
    Metric(
        "loss/entropy",
        "nats/token",
        "Entropy as it enters the actor's loss (where entropy_coef is above 0), before its coefficient; per token with "
        "token_mean, else as algorithm.aggregation says.",
        "Larger than the policy loss once multiplied: the bonus steers the training.",
    ),
    Metric(
        "loss/kl",
        "nats/token",
        "KL penalty to the reference as a term of the actor's loss (kl.place: loss), before its coefficient; per token "
        "with token_mean, else as algorithm.aggregation says.",
        "Larger than the policy loss once multiplied, while the score falls.",
    ),
    Metric(
        "policy/approx_kl",
        "nats/token",
        "KL of the policy that began the step to the one before each of its updates (0 at the first), k3 estimate, "
        "mean over the updates. Per response, not per token, with policy_loss sequence_clipped.",
        "Above about 0.05 per token: the step is too large for the clipped objective.",
    ),
    Metric(
        "policy/clip_frac",
        "fraction",
        "Loss tokens whose ratio was clipped, mean over the step's updates; responses with sequence_clipped. For cispo "
        "those whose weight was bounded.",
        "Above 0.3: most of the gradient is thrown away. Exactly 0 over many steps: steps are timid.",
    ),
    Metric(
        "policy/clip_frac_numerical",
        "fraction",
        "Clipped loss tokens (or responses) in the step's first mini-batch, where the ratio must be exactly 1.",
        "Anything but 0: trainer and old log-probabilities disagree.",
    ),
    Metric(
        "policy/dual_clip_frac",
        "fraction",
        "Loss tokens of negative advantage that the dual clip holds, mean over the step's updates (where it is on).",
        "Above 0.01: ratios run far above 1; fewer updates per step or a smaller learning rate.",
    ),
    Metric(
        "policy/clip_frac_drift",
        "fraction",
        "Clipped loss tokens (or responses) in the later mini-batches, where the policy has really moved.",
        "Above 0.3: fewer epochs or a smaller learning rate.",
    ),
    Metric(
        "policy/entropy",
        "nats/token",
        "Mean entropy of the actor's next-token distribution at loss tokens, at sampling temperature.",
        "Falls towards 0 within a few steps (collapse) or rises steadily (the policy dissolves).",
    ),
    Metric(
        "policy/ratio_mean",
        "1",
        "Mean of exp(policy_logprobs − old_logprobs) over loss tokens; with gspo and sequence_clipped of the "
        "responses' ratios.",
        "Away from 1 by more than a few per cent.",
    ),
    Metric(
        "policy/ratio_max",
        "1",
        "Largest ratio of any loss token in the step, or of any response with gspo and sequence_clipped.",
        "Hundreds: single tokens moved by orders of magnitude.",
    ),
    Metric(
        "policy/grad_norm",
        "1",
        "Norm of the actor's gradient before clipping, mean over updates.",
        "Far above the clipping threshold at every step, or 0.",
    ),
    Metric(
        "critic/grad_norm",
        "1",
        "Norm of the critic's gradient before clipping, mean over updates.",
        "Far above the clipping threshold at every step, or 0.",
    ),
    Metric(
        "critic/explained_variance",
        "1",
        "1 − var(returns − values) / var(returns) over action tokens.",
        "Below 0 after the first steps: the critic is worse than a constant.",
    ),
    Metric(
        "critic/value_mean",
        "reward",
        "Mean predicted value over action tokens.",
        "Drifts away from returns/mean.",
    ),
    Metric(
        "critic/clip_frac",
        "fraction",
        "Action tokens at which the clipped value error was the larger one.",
        "Above 0.5: the clip range holds the critic back.",
    ),
    Metric(
        "optim/lr",
        "1",
        "Learning rate of the last update.",
        "Not the recipe's schedule: 0 where training should go on.",
    ),
    Metric(
        "optim/grad_norm",
        "1",
        "Norm of the gradient before clipping (supervised stages), mean over updates.",
        "Far above the clipping threshold at every step, or 0.",
    ),
    Metric(
        "optim/skipped_steps",
        "updates",
        "Updates left out because their gradient was not finite, counted since the run began.",
        "Grows: find the sample or the overflow behind it.",
    ),
    Metric(
        "train/token_budget",
        "tokens",
        "Most tokens of one micro-batch with gradients now in force; the smaller one of actor and critic.",
        "Below the recipe's token_budget: memory ran out, and more and smaller micro-batches are run.",
    ),
    Metric(
        "train/num_oom",
        "times",
        "How often memory ran out in forward passes and updates since the run began; each time the budget was "
        "halved and the pass done again from its start.",
        "Grows: set the recipe's budgets to what memory allows, the failed attempts cost time.",
    ),
    Metric(
        "kl/ref",
        "nats/token",
        "Mean of policy_logprobs − ref_logprobs over action tokens (k1: unbiased, can be negative).",
        "Grows without levelling off while the score rises: the reward is being exploited.",
    ),
    Metric(
        "kl/ref_k3",
        "nats/token",
        "Mean of exp(−d) − 1 + d with d = policy − ref log-probability (k3: never negative, less noisy).",
        "As kl/ref; far above it: single tokens which the reference finds much likelier.",
    ),
    Metric(
        "kl/coef",
        "1",
        "Coefficient of the KL penalty in force.",
        "An adaptive coefficient that grows or falls all the time: its target is out of reach.",
    ),
    Metric(
        "reward/score_mean",
        "reward",
        "Mean score of the rollouts before any KL penalty.",
        "Falls, or jumps while eval/score_mean stands still.",
    ),
    Metric(
        "reward/score_std",
        "reward",
        "Standard deviation of the scores within the batch.",
        "Near 0: nothing to learn from.",
    ),
    Metric(
        "reward/with_kl_mean",
        "reward",
        "Mean per trajectory of the score less the penalties for length and a missing end, and less KL where that is "
        "part of the reward: what the algorithm maximises.",
        "Falls while reward/score_mean rises: the penalty eats the gain.",
    ),
    Metric(
        "reward/overlong_penalty",
        "reward",
        "Mean over rollouts of what the soft length penalty takes off the score (where the recipe has one).",
        "Does not fall: responses keep running into the limit.",
    ),
    Metric(
        "reward/not_applicable",
        "rollouts",
        "Rollouts for which no reward source gave a number; they are left out of the update (but for distillation).",
        "More than a few: the reward does not fit the data.",
    ),
    Metric(
        "reward/sampled_score_mean",
        "reward",
        "Mean score of all rollouts sampled for the step, those of rejected groups included (dynamic sampling).",
        "As reward/score_mean, which sees only the groups that were kept.",
    ),
    Metric(
        "reward/greedy_mean",
        "reward",
        "Mean over prompts of the greedy response's shaped score, the baseline.",
        "Far above reward/score_mean: sampling is too hot to reach what the policy knows.",
    ),
    Metric(
        "reward/<source>/gate_open",
        "fraction",
        "Rollouts at which a gated source counts, of those it applies to.",
        "Stays near 0: the policy never passes the gate, and what lies behind it teaches nothing.",
    ),
    Metric(
        "reward/<source>/left_out",
        "rollouts",
        "Rollouts for which a source failed, after all its retries, and that it was left out of.",
        "More than a few: its server, limits or deadline do not bear the load.",
    ),
    Metric(
        "reward/<source>",
        "reward",
        "Mean of one reward source over the rollouts it applies to, before weights.",
        "One source rises at the others' expense.",
    ),
    Metric(
        "advantages/mean",
        "reward",
        "Mean advantage over action tokens as the loss uses it.",
        "Far from 0 where advantages are whitened.",
    ),
    Metric(
        "advantages/std",
        "reward",
        "Standard deviation of the advantages over action tokens as the loss uses it.",
        "0: no signal. Far from 1 where advantages are whitened.",
    ),
    Metric(
        "returns/mean",
        "reward",
        "Mean return over action tokens, the critic's target.",
        "Drifts away from critic/value_mean.",
    ),
    Metric(
        "groups/zero_variance",
        "fraction",
        "Groups whose responses all have the same score after penalties (or of which fewer than two have one), so "
        "that group-relative advantages are 0.",
        "Above 0.5: prompts too easy or too hard, most of the generation teaches nothing.",
    ),
    Metric(
        "groups/sampled",
        "prompts",
        "Prompts sampled for the step until it was full (dynamic sampling).",
        "Near max_prompts_factor · prompts_per_step, where the run stops.",
    ),
    Metric(
        "groups/rejected_frac",
        "fraction",
        "Sampled groups that were rejected because their responses all have the same score (or fewer than two have "
        "one).",
        "Above 0.7: most of the generation is thrown away; change the prompts.",
    ),
    *(Metric(*row) for row in ROLLOUT_ROWS),
    Metric(
        "agreement/logprob_diff_mean",
        "nats",
        "Mean absolute difference of rollout_logprobs and old_logprobs over action tokens.",
        "Above 1e-3 in fp32 or 0.02 in bf16: sampler and trainer compute different models.",
    ),
    Metric(
        "agreement/logprob_diff_max",
        "nats",
        "Largest absolute difference of rollout_logprobs and old_logprobs.",
        "Above 0.01 in fp32 or 0.5 in bf16.",
    ),
    Metric(
        "agreement/canary_diff",
        "nats",
        "Largest log-probability difference of engine and trainer on the fixed prompt after an update.",
        "Beyond the tolerance the run stops; a value that creeps towards it is the early sign.",
    ),
    Metric(
        "correction/weight_mean",
        "1",
        "Mean off-policy correction weight old / rollout over action tokens.",
        "Away from 1 by more than a few per cent.",
    ),
    Metric(
        "correction/limited_frac",
        "fraction",
        "Action tokens whose correction weight was truncated or masked.",
        "Above 0.05: sampler and trainer have drifted apart.",
    ),
    Metric(
        "sft/perplexity",
        "1",
        "exp of the mean loss per demonstration token.",
        "Rises on held-out data: overfitting.",
    ),
    Metric(
        "reward_model/accuracy",
        "fraction",
        "Pairs in which the chosen answer scores higher than the rejected one (ties count one half).",
        "Near 0.5: no better than a coin toss.",
    ),
    Metric(
        "reward_model/margin",
        "reward",
        "Mean score difference between chosen and rejected answer.",
        "Negative, or growing without bound while accuracy stands still.",
    ),
    Metric(
        "preference/accuracy",
        "fraction",
        "Pairs whose chosen answer has the higher implicit reward (docs/preference.md); ties count as wrong.",
        "Stays near 0.5, or reaches 1 within a few steps: the pairs differ in something trivial.",
    ),
    Metric(
        "preference/margin",
        "1",
        "Mean difference of the implicit rewards of chosen and rejected answers.",
        "Negative, or growing without bound while eval/accuracy stands still.",
    ),
    Metric(
        "preference/reward_chosen",
        "1",
        "Mean implicit reward of the chosen (KTO: the desirable) answers; with a reference it starts at 0.",
        "Falls steadily: the chosen answers become less likely, too. Lower the learning rate, or set sft_coef.",
    ),
    Metric(
        "preference/reward_rejected",
        "1",
        "Mean implicit reward of the rejected (KTO: the undesirable) answers.",
        "Falls by far more than preference/reward_chosen rises: probability goes to answers nobody has seen.",
    ),
    Metric(
        "preference/logprob_chosen",
        "nats/token",
        "Log-probability per token of the chosen answers under the policy, mean over answers.",
        "Falls steadily.",
    ),
    Metric(
        "preference/logprob_rejected",
        "nats/token",
        "Log-probability per token of the rejected answers under the policy, mean over answers.",
        "Falls by nats within a few steps.",
    ),
    Metric(
        "preference/kl",
        "nats/answer",
        "KTO's reference point: the KL to the reference estimated on answers to other prompts, at least 0.",
        "Tens of nats: the policy has left the reference; raise beta or lower the learning rate.",
    ),
    Metric(
        "process_reward/accuracy",
        "fraction",
        "Labelled steps that the model puts on the label's side of one half (labels of exactly one half aside).",
        "No higher than the share of the more frequent label: nothing is learned about single steps.",
    ),
    Metric(
        "process_reward/calibration",
        "1",
        "Mean probability of being right less mean label, over labelled steps.",
        "Away from 0 after the first steps: too hopeful above it, too strict below.",
    ),
    Metric(
        "process/gap_outcome",
        "reward",
        "Mean outcome reward of right answers less that of wrong ones (right: above the middle of the step's range).",
        "Near 0: outcomes of right and wrong answers hardly differ.",
    ),
    Metric(
        "process/gap_process",
        "reward",
        "Mean process reward of right answers less that of wrong ones, right and wrong by their outcome.",
        "Near 0 or negative: the process reward likes wrong answers as much, and pulls against the outcome.",
    ),
    Metric(
        "process/steps_mean",
        "steps",
        "Steps per rollout that the process reward sees.",
        "Grows with the score: steps are being made for their reward's sake; use combine: min.",
    ),
    Metric(
        "process/unscored",
        "rollouts",
        "Rollouts without a process reward: the model's own tokenizer loses steps of their text.",
        "More than a few: give the model a tokenizer that keeps the separator.",
    ),
    Metric(
        "eval/exact_match",
        "fraction",
        "Held-out prompts answered exactly as the checker wants.",
        "Falls while reward/score_mean rises: the reward is being exploited.",
    ),
    Metric(
        "eval/score_mean",
        "reward",
        "Mean score on held-out prompts.",
        "Falls behind reward/score_mean.",
    ),
    Metric(
        "reference/age",
        "steps",
        "Steps since the reference took over the actor's weights (iterative DPO).",
        "Never 0: refresh_steps is larger than the run.",
    ),
    Metric(
        "eval/offset",
        "reward",
        "Mean score of both sides of the held-out pairs (reward model).",
        "Drifts away from 0: set centring.",
    ),
    *(Metric(*row) for row in EVALUATION_ROWS),
    Metric(
        "eval/<name>",
        "as named",
        "A held-out figure of the recipe's own evaluation.",
        "Moves against the training score.",
    ),
    Metric(
        "time/<stage>_s",
        "s",
        "Seconds in one stage of the step, its spans added up; stages overlap, so they may exceed the step.",
        "One stage grows from step to step.",
    ),
    Metric(
        "overlap/score_generate_s",
        "s",
        "Seconds in which scoring ran while later groups were still being generated.",
        "0 with more than one chunk per step: stages wait for each other.",
    ),
    Metric(
        "tokens/useful",
        "tokens",
        "Distinct tokens whose computation the step needs; a shared prompt counts once.",
        "Jumps without a change of prompts or lengths.",
    ),
    Metric(
        "memory/rss_bytes",
        "bytes",
        "Resident memory of this process.",
        "Grows from step to step: something keeps old batches.",
    ),
    Metric(
        "policy_version",
        "versions",
        "Version of the weights with which the step's rollouts were sampled.",
        "Stands still while training goes on.",
    ),
    Metric(
        "data/epoch",
        "epochs",
        "Passes over the prompts or demonstrations so far.",
        "Far above 1 with falling held-out figures: overfitting.",
    ),
    Metric(
        "data/ptx_epoch",
        "epochs",
        "Passes over the demonstrations that are mixed into the actor's updates.",
        "Far above 1 while loss/ptx nears 0: they are learned by heart.",
    ),
)

METRICS: Mapping[str, Metric] = MappingProxyType({row.name: row for row in _ROWS})
"""The table by name; families stand under their placeholder name."""

_PLACEHOLDER = re.compile(r"<\w+>")
_FAMILY_MEMBER = r"[\w.+@:-]+(?:/[\w.+@:-]+)*"
_FAMILIES = tuple(
    (re.compile(_FAMILY_MEMBER.join(re.escape(part) for part in _PLACEHOLDER.split(row.name))), row)
    for row in _ROWS
    if _PLACEHOLDER.search(row.name)
)


@cache
def find_metric(name: str) -> Metric:
    """The row that explains ``name``.

    Raises:
        ValueError: the table does not know the name; the message offers the nearest one.
    """
    if name in METRICS and not _PLACEHOLDER.search(name):
        return METRICS[name]
    for pattern, row in _FAMILIES:
        if pattern.fullmatch(name):
            return row
    family = [known for known in METRICS if known.split("/")[0] == name.split("/")[0]]
    near = difflib.get_close_matches(name, family or METRICS, n=1, cutoff=0.0)
    raise ValueError(f"unknown metric {name!r}; the nearest known name is {near[0]!r} (table: quartet.observe.metrics)")


def check_names(names: Iterable[str]) -> None:
    """Raises ValueError for the first name that :func:`find_metric` does not know."""
    for name in names:
        find_metric(name)


def metrics_page() -> str:
    """The text of ``docs/metrics.md``, one table per family of names."""
    lines = [
        "# Metrics",
        "",
        "Every figure a run logs to `metrics.jsonl` and TensorBoard. This page is written from the table in",
        "`src/quartet/observe/metrics.py` by `python -m quartet.observe.metrics > docs/metrics.md`; a test",
        "keeps the two equal, and a name that is not here cannot be logged. Names in angle brackets stand",
        "for any name: a reward source called `style` is logged as `reward/style`. The thresholds are rules",
        "of thumb for where to look first.",
        "",
        "`metrics.jsonl` holds one JSON object per logged step: `step`, `time_s` (Unix time in seconds) and",
        "the metrics by name. A value that is not finite is `null`, and `nonfinite` says which:",
        '`{"loss/policy": "nan"}`.',
    ]
    family = ""
    for row in sorted(_ROWS, key=lambda row: (row.name.split("/")[0], _ROWS.index(row))):
        prefix = row.name.split("/")[0]
        if prefix != family:
            family = prefix
            lines += ["", f"## {family}", "", "| name | unit | meaning | a bad value |", "|---|---|---|---|"]
        lines.append(f"| `{row.name}` | {row.unit} | {row.meaning} | {row.bad} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(metrics_page(), end="")
