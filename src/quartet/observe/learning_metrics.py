"""Rows of the table of metrics about losses, updates, KL, advantages, and sampler against trainer."""

from __future__ import annotations

LEARNING_ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "loss/policy",
        "1",
        "Policy loss of the actor without its KL, entropy and demonstration terms, mean over the step's updates. For "
        "clipped objectives its value says little: it is near 0 by construction when advantages are whitened.",
        "NaN or infinite; growing steadily in size while the score falls.",
    ),
    (
        "loss/value",
        "reward²",
        "Half the squared error of the critic against the returns, the larger of clipped and unclipped.",
        "Grows from step to step, or stays far above half the variance of the returns.",
    ),
    (
        "loss/sft",
        "nats/token",
        "Mean negative log-probability of the demonstration tokens that carry loss.",
        "Flat from the start (learning rate too low, wrong mask), or nears 0 while held-out loss rises.",
    ),
    (
        "loss/ptx",
        "nats/token",
        "Mean negative log-probability of the demonstrations mixed into the actor's updates, before its coefficient.",
        "Rises: the policy forgets what the demonstrations show. Raise ptx.coef.",
    ),
    (
        "loss/reward_model",
        "nats/pair",
        "Negative log-sigmoid of the score difference between chosen and rejected answer, mean over pairs.",
        "Stays at 0.69, the loss of a coin toss.",
    ),
    (
        "loss/preference",
        "1",
        "Loss of preference training (DPO and its relatives, KTO), its likelihood term included.",
        "Does not leave its first value (0.69 for DPO), or nears 0 while eval/loss rises.",
    ),
    (
        "loss/process_reward",
        "nats/step",
        "Binary cross-entropy between a step's label and the probability that it is right, mean over labelled steps.",
        "Stays at 0.69, the loss of a coin toss, or at the entropy of the labels.",
    ),
    (
        "loss/entropy",
        "nats/token",
        "Entropy as it enters the actor's loss (where entropy_coef is above 0), before its coefficient; per token with "
        "token_mean, else as algorithm.aggregation says.",
        "Larger than the policy loss once multiplied: the bonus steers the training.",
    ),
    (
        "loss/kl",
        "nats/token",
        "KL penalty to the reference as a term of the actor's loss (kl.place: loss), before its coefficient; per token "
        "with token_mean, else as algorithm.aggregation says.",
        "Larger than the policy loss once multiplied, while the score falls.",
    ),
    (
        "policy/approx_kl",
        "nats/token",
        "KL of the policy that began the step to the one before each of its updates (0 at the first), k3 estimate, "
        "mean over the updates. Per response, not per token, with policy_loss sequence_clipped.",
        "Above about 0.05 per token: the step is too large for the clipped objective.",
    ),
    (
        "policy/clip_frac",
        "fraction",
        "Loss tokens whose ratio was clipped, mean over the step's updates; responses with sequence_clipped. For cispo "
        "those whose weight was bounded.",
        "Above 0.3: most of the gradient is thrown away. Exactly 0 over many steps: steps are timid.",
    ),
    (
        "policy/clip_frac_numerical",
        "fraction",
        "Clipped loss tokens (or responses) in the step's first mini-batch, where the ratio must be exactly 1.",
        "Anything but 0: trainer and old log-probabilities disagree.",
    ),
    (
        "policy/dual_clip_frac",
        "fraction",
        "Loss tokens of negative advantage that the dual clip holds, mean over the step's updates (where it is on).",
        "Above 0.01: ratios run far above 1; fewer updates per step or a smaller learning rate.",
    ),
    (
        "policy/clip_frac_drift",
        "fraction",
        "Clipped loss tokens (or responses) in the later mini-batches, where the policy has really moved.",
        "Above 0.3: fewer epochs or a smaller learning rate.",
    ),
    (
        "policy/entropy",
        "nats/token",
        "Mean entropy of the actor's next-token distribution at loss tokens, at sampling temperature.",
        "Falls towards 0 within a few steps (collapse) or rises steadily (the policy dissolves).",
    ),
    (
        "policy/ratio_mean",
        "1",
        "Mean of exp(policy_logprobs − old_logprobs) over loss tokens; with gspo and sequence_clipped of the "
        "responses' ratios.",
        "Away from 1 by more than a few per cent.",
    ),
    (
        "policy/ratio_max",
        "1",
        "Largest ratio of any loss token in the step, or of any response with gspo and sequence_clipped.",
        "Hundreds: single tokens moved by orders of magnitude.",
    ),
    (
        "policy/grad_norm",
        "1",
        "Norm of the actor's gradient before clipping, mean over updates.",
        "Far above the clipping threshold at every step, or 0.",
    ),
    (
        "critic/grad_norm",
        "1",
        "Norm of the critic's gradient before clipping, mean over updates.",
        "Far above the clipping threshold at every step, or 0.",
    ),
    (
        "critic/explained_variance",
        "1",
        "1 − var(returns − values) / var(returns) over action tokens.",
        "Below 0 after the first steps: the critic is worse than a constant.",
    ),
    (
        "critic/value_mean",
        "reward",
        "Mean predicted value over action tokens.",
        "Drifts away from returns/mean.",
    ),
    (
        "critic/clip_frac",
        "fraction",
        "Action tokens at which the clipped value error was the larger one.",
        "Above 0.5: the clip range holds the critic back.",
    ),
    (
        "optim/lr",
        "1",
        "Learning rate of the last update.",
        "Not the recipe's schedule: 0 where training should go on.",
    ),
    (
        "optim/grad_norm",
        "1",
        "Norm of the gradient before clipping (supervised stages), mean over updates.",
        "Far above the clipping threshold at every step, or 0.",
    ),
    (
        "optim/skipped_steps",
        "updates",
        "Updates left out because their gradient was not finite, counted since the run began.",
        "Grows: find the sample or the overflow behind it.",
    ),
    (
        "train/token_budget",
        "tokens",
        "Most tokens of one micro-batch with gradients now in force; the smaller one of actor and critic.",
        "Below the recipe's token_budget: memory ran out, and more and smaller micro-batches are run.",
    ),
    (
        "train/num_oom",
        "times",
        "How often memory ran out in forward passes and updates since the run began; each time the budget was "
        "halved and the pass done again from its start.",
        "Grows: set the recipe's budgets to what memory allows, the failed attempts cost time.",
    ),
    (
        "kl/ref",
        "nats/token",
        "Mean of policy_logprobs − ref_logprobs over action tokens (k1: unbiased, can be negative).",
        "Grows without levelling off while the score rises: the reward is being exploited.",
    ),
    (
        "kl/ref_k3",
        "nats/token",
        "Mean of exp(−d) − 1 + d with d = policy − ref log-probability (k3: never negative, less noisy).",
        "As kl/ref; far above it: single tokens which the reference finds much likelier.",
    ),
    (
        "kl/coef",
        "1",
        "Coefficient of the KL penalty in force.",
        "An adaptive coefficient that grows or falls all the time: its target is out of reach.",
    ),
    (
        "advantages/mean",
        "reward",
        "Mean advantage over action tokens as the loss uses it.",
        "Far from 0 where advantages are whitened.",
    ),
    (
        "advantages/std",
        "reward",
        "Standard deviation of the advantages over action tokens as the loss uses it.",
        "0: no signal. Far from 1 where advantages are whitened.",
    ),
    (
        "returns/mean",
        "reward",
        "Mean return over action tokens, the critic's target.",
        "Drifts away from critic/value_mean.",
    ),
    (
        "agreement/logprob_diff_mean",
        "nats",
        "Mean absolute difference of rollout_logprobs and old_logprobs over action tokens.",
        "Above 1e-3 in fp32 or 0.02 in bf16: sampler and trainer compute different models.",
    ),
    (
        "agreement/logprob_diff_max",
        "nats",
        "Largest absolute difference of rollout_logprobs and old_logprobs.",
        "Above 0.01 in fp32 or 0.5 in bf16, unless generation ran ahead: it then includes what was learned since.",
    ),
    (
        "agreement/canary_diff",
        "nats",
        "Largest log-probability difference of engine and trainer on the fixed prompt after an update.",
        "Beyond the tolerance the run stops; a value that creeps towards it is the early sign.",
    ),
    (
        "correction/weight_mean",
        "1",
        "Mean off-policy correction weight old / rollout over action tokens.",
        "Away from 1 by more than a few per cent.",
    ),
    (
        "correction/limited_frac",
        "fraction",
        "Action tokens whose correction weight was truncated or masked.",
        "Above 0.05: sampler and trainer have drifted apart.",
    ),
)
