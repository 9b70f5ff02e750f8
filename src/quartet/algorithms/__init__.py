"""Pure tensor math of the methods: no logging, no files, no randomness, inputs left unchanged.

Tensors are flat ``[T]`` over the stored tokens of a ragged batch. A mask ``[T]`` bool says which tokens
count, an owner index ``[T]`` int64 (``trajectory`` or ``sequence``) whose they are, -1 for none. Tokens of
one trajectory stand in time order; other tokens may stand between them. Reductions run in fp32, in fp64 for
fp64 input.

Where to find what a recipe names:

====================== ========================================================= ==================================
method                 advantages                                                loss
====================== ========================================================= ==================================
SFT                    -                                                         ``losses.sft_loss``
reward model           -                                                         ``losses.pairwise_reward_loss``
PPO                    ``advantages.token_rewards``, ``advantages.gae``,         ``losses.policy_loss``,
                       ``segments.masked_whiten``                                ``losses.value_loss``
GRPO, DAPO             ``advantages.group_relative_advantages`` (with std)       ``losses.policy_loss``
Dr. GRPO               ``advantages.group_relative_advantages`` (without std)    the same, aggregation
                                                                                 ``sequence_mean_token_sum_norm``
GSPO                   ``advantages.group_relative_advantages`` (with std)       ``losses.gspo_loss``
CISPO                  ``advantages.group_relative_advantages`` (with std)       ``losses.cispo_loss``
SAPO, GMPO             ``advantages.group_relative_advantages`` (with std)       ``losses.sapo_loss``, ``gmpo_loss``
GDPO                   ``advantages.normalise_in_groups``                        ``losses.policy_loss``
pass@k                 ``advantages.pass_at_k_advantages``                       ``losses.policy_loss``
optimal token baseline ``advantages.optimal_token_baseline``                     ``losses.policy_loss``
GPG                    ``advantages.group_relative_advantages`` (without std),   ``losses.reinforce_loss``
                       ``advantages.rescale_by_informative_groups``
RLOO, published        ``advantages.completion_rewards``,                        ``losses.sequence_policy_loss``
                       ``advantages.leave_one_out_advantages``
RLOO, token            the same                                                  ``losses.policy_loss``
OPO                    ``advantages.length_weighted_advantages``                 ``losses.policy_loss``
REINFORCE++            ``advantages.token_rewards``,                             ``losses.policy_loss``
                       ``advantages.discounted_returns``,
                       ``segments.masked_whiten``
REINFORCE++-baseline   ``advantages.group_relative_advantages`` (without std),   ``losses.policy_loss``
                       ``advantages.whiten_unless_equal``
ReMax                  ``advantages.token_rewards``,                             ``losses.reinforce_loss``
                       ``advantages.discounted_returns``,
                       ``advantages.subtract_baseline``
distillation           ``advantages.teacher_advantages``                         ``losses.reinforce_loss``
DPO and relatives      -                                                         ``preference.dpo_loss``, …
KTO                    -                                                         ``preference.kto_loss``
online DPO             ``preference.best_and_worst``                             ``preference.dpo_loss``, …
best of n              ``preference.best_of_groups_mask``                        ``losses.sft_loss``
====================== ========================================================= ==================================

Around them, in ``losses``: four aggregations with global denominators, KL estimators (k1, k2, k3) and the adaptive
coefficient, importance weights; in ``segments`` what all of it is computed with, and which tokens have high entropy
(Clip-Cov, KL-Cov); in ``evaluation_math`` pass@k, votes and intervals.
"""
