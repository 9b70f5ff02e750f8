"""Rows of the table of metrics about rewards and groups, and about training without sampling."""

from __future__ import annotations

REWARD_ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "reward/score_mean",
        "reward",
        "Mean score of the rollouts before any KL penalty.",
        "Falls, or jumps while eval/score_mean stands still.",
    ),
    (
        "reward/score_std",
        "reward",
        "Standard deviation of the scores within the batch.",
        "Near 0: nothing to learn from.",
    ),
    (
        "reward/with_kl_mean",
        "reward",
        "Mean per trajectory of the score less the penalties for length and a missing end, and less KL where that is "
        "part of the reward: what the algorithm maximises.",
        "Falls while reward/score_mean rises: the penalty eats the gain.",
    ),
    (
        "reward/overlong_penalty",
        "reward",
        "Mean over rollouts of what the soft length penalty takes off the score (where the recipe has one).",
        "Does not fall: responses keep running into the limit.",
    ),
    (
        "reward/not_applicable",
        "rollouts",
        "Rollouts for which no reward source gave a number; they are left out of the update (but for distillation).",
        "More than a few: the reward does not fit the data.",
    ),
    (
        "reward/sampled_score_mean",
        "reward",
        "Mean score of all rollouts sampled for the step, those of rejected groups included (dynamic sampling).",
        "As reward/score_mean, which sees only the groups that were kept.",
    ),
    (
        "reward/greedy_mean",
        "reward",
        "Mean over prompts of the greedy response's shaped score, the baseline.",
        "Far above reward/score_mean: sampling is too hot to reach what the policy knows.",
    ),
    (
        "reward/<source>/gate_open",
        "fraction",
        "Rollouts at which a gated source counts, of those it applies to.",
        "Stays near 0: the policy never passes the gate, and what lies behind it teaches nothing.",
    ),
    (
        "reward/<source>/left_out",
        "rollouts",
        "Rollouts for which a source failed, after all its retries, and that it was left out of.",
        "More than a few: its server, limits or deadline do not bear the load.",
    ),
    (
        "reward/<source>",
        "reward",
        "Mean of one reward source over the rollouts it applies to, before weights.",
        "One source rises at the others' expense.",
    ),
    (
        "groups/zero_variance",
        "fraction",
        "Groups whose responses all have the same score after penalties (or of which fewer than two have one), so "
        "that group-relative advantages are 0.",
        "Above 0.5: prompts too easy or too hard, most of the generation teaches nothing.",
    ),
    (
        "groups/sampled",
        "prompts",
        "Prompts sampled for the step until it was full (dynamic sampling).",
        "Near max_prompts_factor · prompts_per_step, where the run stops.",
    ),
    (
        "groups/rejected_frac",
        "fraction",
        "Sampled groups that were rejected because their responses all have the same score (or fewer than two have "
        "one).",
        "Above 0.7: most of the generation is thrown away; change the prompts.",
    ),
    (
        "sft/perplexity",
        "1",
        "exp of the mean loss per demonstration token.",
        "Rises on held-out data: overfitting.",
    ),
    (
        "reward_model/accuracy",
        "fraction",
        "Pairs in which the chosen answer scores higher than the rejected one (ties count one half).",
        "Near 0.5: no better than a coin toss.",
    ),
    (
        "reward_model/margin",
        "reward",
        "Mean score difference between chosen and rejected answer.",
        "Negative, or growing without bound while accuracy stands still.",
    ),
    (
        "preference/accuracy",
        "fraction",
        "Pairs whose chosen answer has the higher implicit reward (docs/preference.md); ties count as wrong.",
        "Stays near 0.5, or reaches 1 within a few steps: the pairs differ in something trivial.",
    ),
    (
        "preference/margin",
        "1",
        "Mean difference of the implicit rewards of chosen and rejected answers.",
        "Negative, or growing without bound while eval/accuracy stands still.",
    ),
    (
        "preference/reward_chosen",
        "1",
        "Mean implicit reward of the chosen (KTO: the desirable) answers; with a reference it starts at 0.",
        "Falls steadily: the chosen answers become less likely, too. Lower the learning rate, or set sft_coef.",
    ),
    (
        "preference/reward_rejected",
        "1",
        "Mean implicit reward of the rejected (KTO: the undesirable) answers.",
        "Falls by far more than preference/reward_chosen rises: probability goes to answers nobody has seen.",
    ),
    (
        "preference/logprob_chosen",
        "nats/token",
        "Log-probability per token of the chosen answers under the policy, mean over answers.",
        "Falls steadily.",
    ),
    (
        "preference/logprob_rejected",
        "nats/token",
        "Log-probability per token of the rejected answers under the policy, mean over answers.",
        "Falls by nats within a few steps.",
    ),
    (
        "preference/kl",
        "nats/answer",
        "KTO's reference point: the KL to the reference estimated on answers to other prompts, at least 0.",
        "Tens of nats: the policy has left the reference; raise beta or lower the learning rate.",
    ),
    (
        "process_reward/accuracy",
        "fraction",
        "Labelled steps that the model puts on the label's side of one half (labels of exactly one half aside).",
        "No higher than the share of the more frequent label: nothing is learned about single steps.",
    ),
    (
        "process_reward/calibration",
        "1",
        "Mean probability of being right less mean label, over labelled steps.",
        "Away from 0 after the first steps: too hopeful above it, too strict below.",
    ),
    (
        "process/gap_outcome",
        "reward",
        "Mean outcome reward of right answers less that of wrong ones (right: above the middle of the step's range).",
        "Near 0: outcomes of right and wrong answers hardly differ.",
    ),
    (
        "process/gap_process",
        "reward",
        "Mean process reward of right answers less that of wrong ones, right and wrong by their outcome.",
        "Near 0 or negative: the process reward likes wrong answers as much, and pulls against the outcome.",
    ),
    (
        "process/steps_mean",
        "steps",
        "Steps per rollout that the process reward sees.",
        "Grows with the score: steps are being made for their reward's sake; use combine: min.",
    ),
    (
        "process/unscored",
        "rollouts",
        "Rollouts without a process reward: the model's own tokenizer loses steps of their text.",
        "More than a few: give the model a tokenizer that keeps the separator.",
    ),
    (
        "reference/age",
        "steps",
        "Steps since the reference took over the actor's weights (iterative DPO).",
        "Never 0: refresh_steps is larger than the run.",
    ),
)
