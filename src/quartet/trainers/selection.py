"""Online preference: the responses of a group that a step learns from, and as what.

Shapes: T stored tokens, S sequences, N trajectories.

============== =====================================================================================
``best_of_n``  the best responses of each group, as demonstrations
``online_dpo`` the best and the worst response of each group, as a pair
============== =====================================================================================

In the experience a selected response has the advantage 1 (learned to do) or -1 (the worse side of a pair) on every
token, the others have 0. Only selected sequences go through the update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quartet.algorithms.advantages import broadcast_to_tokens
from quartet.algorithms.preference import best_and_worst, best_of_groups
from quartet.algorithms.rewards import token_rewards
from quartet.algorithms.segments import masked_owner, segment_sum
from quartet.batch.ragged import RaggedBatch
from quartet.config.algorithms import BestOfN, OnlineDPO, Selection
from quartet.train.engine import Objective
from quartet.train.preference_objectives import (
    BestOfNObjective,
    OnlinePairObjective,
    PreferenceObjective,
    answer_logprobs,
)
from quartet.trainers.estimators import Estimate, Scored


def selected(config: Selection, scored: Scored) -> Estimate:
    """Which responses are learned from, as advantages of 1, -1 and 0."""
    acting_N = torch.zeros(len(scored.scores_N), dtype=torch.bool)
    acting_N[scored.trajectory_T[scored.action_mask_T]] = True
    signs_N = torch.zeros_like(scored.shaped_N)
    if bool(acting_N.any()):
        signs_N[acting_N] = _signs(config, scored.shaped_N[acting_N], scored.group_N[acting_N])
    return Estimate(
        broadcast_to_tokens(signs_N, scored.trajectory_T, scored.action_mask_T),
        token_rewards(scored.shaped_N, None, 0.0, scored.action_mask_T, scored.trajectory_T),
        None,
        scored.shaped_N,
    )


def _signs(config: Selection, scores_N: Tensor, group_N: Tensor) -> Tensor:
    match config:
        case BestOfN():
            kept_N = best_of_groups(scores_N, group_N, config.keep)
            if config.min_score is not None:
                kept_N &= scores_N >= config.min_score
            return kept_N.to(scores_N.dtype)
        case OnlineDPO():
            return best_and_worst(scores_N, group_N).to(scores_N.dtype)
    raise TypeError(f"no way to select responses for {type(config).__name__}")


def learned_from(config: Selection, batch: RaggedBatch) -> RaggedBatch:
    """The selected sequences of an experience; all of them without loss tokens where nothing was selected.

    Pairs have the sequence fields ``pair``, ``chosen``, ``margin`` (the difference of their total rewards) and, where
    the loss has a reference, ``ref_logprobs``.
    """
    advantages_T, owner_T = batch.token["advantages"], batch.sequence_index()
    is_trained_T = batch.token["loss_mask"] & (advantages_T != 0)
    batch = batch.with_token(loss_mask=is_trained_T)
    trained = torch.unique(owner_T[is_trained_T]).tolist()
    if isinstance(config, OnlineDPO):
        trained = _whole_pairs(batch, trained)
    if not trained:
        return batch.with_token(loss_mask=torch.zeros_like(is_trained_T))
    batch = batch.select(trained)
    return _as_pairs(batch) if isinstance(config, OnlineDPO) else batch


def _whole_pairs(batch: RaggedBatch, trained: list[int]) -> list[int]:
    """Without responses whose partner has no token to learn from."""
    group_S = batch.sequence["group"]
    groups = group_S[trained].tolist()
    return [s for s, group in zip(trained, groups, strict=True) if groups.count(group) == 2]


def _as_pairs(batch: RaggedBatch) -> RaggedBatch:
    trained_T = masked_owner(batch.sequence_index(), batch.token["loss_mask"])
    sign_S = segment_sum(batch.token["advantages"], trained_T, len(batch)).sign()
    pair_S = torch.unique(batch.sequence["group"], return_inverse=True)[1]
    margin_P = segment_sum(sign_S * batch.sequence["total_reward"], pair_S, len(batch) // 2)
    fields = {"pair": pair_S, "chosen": sign_S > 0, "margin": margin_P[pair_S]}
    if "ref_logprobs" in batch.token:
        fields["ref_logprobs"] = answer_logprobs(batch.token["ref_logprobs"], batch)[0]
    return batch.with_sequence(**fields)


def selection_objective(
    config: Selection, num_trajectories: int, temperature: float, max_new_tokens: int, *, is_first: bool
) -> Objective:
    """What an update on ``learned_from`` minimises; arguments as for ``PolicyObjective``."""
    match config:
        case BestOfN():
            return BestOfNObjective(config.aggregation, num_trajectories, temperature, max_new_tokens, is_first)
        case OnlineDPO():
            return OnlinePairObjective(PreferenceObjective(config.loss, temperature), is_first)
    raise TypeError(f"no objective for {type(config).__name__}")
