"""Pure tensor math of the methods: no logging, no files, no randomness, inputs left unchanged.

Tensors are flat ``[T]`` over the stored tokens of a ragged batch. A mask ``[T]`` bool says which tokens
count, an owner index ``[T]`` int64 (``trajectory`` or ``sequence``) whose they are, -1 for none. Tokens of
one trajectory stand in time order; other tokens may stand between them. Reductions run in fp32, in fp64 for
fp64 input.

Where to find what a recipe names:

================ ============================================== =========================================
method           advantages                                     loss
================ ============================================== =========================================
SFT              -                                              ``losses.sft_loss``
reward model     -                                              ``losses.pairwise_reward_loss``
PPO              ``rewards.token_rewards``, ``advantages.gae``, ``losses.policy_loss``,
                 ``segments.masked_whiten``                     ``losses.value_loss``
GRPO             ``advantages.group_relative`` (with std)       ``losses.policy_loss``, ``losses.kl_loss``
Dr. GRPO         ``advantages.group_relative`` (without std)    ``losses.policy_loss``, aggregation
                                                                ``sequence_mean_token_sum_norm``
RLOO, token      ``rewards.completion_rewards``,                ``losses.policy_loss``
                 ``advantages.leave_one_out``
RLOO, published  ``rewards.completion_rewards``,                ``losses.sequence_policy_loss``
                 ``advantages.leave_one_out``
================ ============================================== =========================================

Around them: ``aggregate`` (four aggregations, global denominators), ``kl`` (k1, k2, k3), ``off_policy``
(importance weights), ``controllers`` (adaptive KL coefficient), ``segments`` and ``scan`` (what all of it is
computed with).
"""

from quartet.algorithms.advantages import broadcast_to_tokens, gae, group_relative, leave_one_out
from quartet.algorithms.aggregate import (
    Aggregation,
    AggregationDenominators,
    aggregate,
    aggregation_denominators,
)
from quartet.algorithms.controllers import adaptive_kl_coef
from quartet.algorithms.kl import KLKind, kl_estimate
from quartet.algorithms.losses import (
    PairwiseLossOutput,
    PolicyLossOutput,
    ValueLossOutput,
    entropy_bonus,
    kl_loss,
    pairwise_reward_loss,
    policy_loss,
    sequence_policy_loss,
    sft_loss,
    value_loss,
)
from quartet.algorithms.off_policy import ImportanceWeights, importance_weights
from quartet.algorithms.rewards import completion_rewards, penalise_missing_eos, token_rewards
from quartet.algorithms.segments import masked_mean, masked_whiten

__all__ = [
    "Aggregation",
    "AggregationDenominators",
    "ImportanceWeights",
    "KLKind",
    "PairwiseLossOutput",
    "PolicyLossOutput",
    "ValueLossOutput",
    "adaptive_kl_coef",
    "aggregate",
    "aggregation_denominators",
    "broadcast_to_tokens",
    "completion_rewards",
    "entropy_bonus",
    "gae",
    "group_relative",
    "importance_weights",
    "kl_estimate",
    "kl_loss",
    "leave_one_out",
    "masked_mean",
    "masked_whiten",
    "pairwise_reward_loss",
    "penalise_missing_eos",
    "policy_loss",
    "sequence_policy_loss",
    "sft_loss",
    "token_rewards",
    "value_loss",
]
