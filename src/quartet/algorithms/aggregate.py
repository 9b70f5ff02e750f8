"""From per-token losses to one number, independent of how the mini-batch was cut.

Shape suffixes: T stored tokens of a micro-batch or mini-batch, N trajectories of the mini-batch.

=============================== ===============================================================
``token_mean``                  sum of all / number of loss tokens
``sequence_mean_token_mean``    mean over sequences of (sum / number of its loss tokens)
``sequence_mean_token_sum``     mean over sequences of its sum
``sequence_mean_token_sum_norm`` mean over sequences of (sum / ``norm``), ``norm`` a constant
=============================== ===============================================================

Denominators are those of the whole mini-batch, so micro-batches *add up* to the mini-batch's loss. "Sequence"
is the owner that the caller's index names: the trajectory where one has several sequences. Those without loss
tokens are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

from quartet.algorithms.segments import gather_owner, keep, masked_owner, segment_count

Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
]


@dataclass(frozen=True)
class AggregationDenominators:
    """What a mini-batch's loss is divided by.

    ``num_tokens`` and ``num_sequences`` (scalars, int64) are sums: with several data-parallel ranks, replace
    them by their sums over ranks. ``tokens_per_sequence`` ``[N]`` int64 is addressed by the owner index of
    the micro-batches, which therefore keeps the mini-batch's numbering. ``norm`` is the constant of
    ``sequence_mean_token_sum_norm``; ``mean_weight`` (scalar) divides importance weights (``off_policy``).
    """

    num_tokens: Tensor
    num_sequences: Tensor
    tokens_per_sequence: Tensor
    norm: float | None = None
    mean_weight: Tensor | None = None


def aggregation_denominators(
    loss_mask_T: Tensor, owner_T: Tensor, num_owners: int, *, norm: float | None = None
) -> AggregationDenominators:
    """Denominators of a whole mini-batch.

    Args:
        loss_mask_T: ``[T]`` bool.
        owner_T: ``[T]`` int64 owner index; tokens owned by none never count.
        num_owners: N.
        norm: tokens, above 0 (usually the longest response allowed); needed by
            ``sequence_mean_token_sum_norm``.
    """
    count_N = segment_count(masked_owner(owner_T, loss_mask_T), num_owners)
    return AggregationDenominators(count_N.sum(), (count_N > 0).sum(), count_N, norm)


@dataclass(frozen=True)
class LossTokens:
    """The tokens of a micro-batch that have loss, and how their losses become one number.

    Attributes:
        loss_mask_T: ``[T]`` bool.
        owner_T: ``[T]`` int64 owner in the mini-batch's numbering, -1 for none; -1, too, where the mask is False.
        denominators: of the whole mini-batch.
        aggregation: one of the four.
    """

    loss_mask_T: Tensor
    owner_T: Tensor
    denominators: AggregationDenominators
    aggregation: Aggregation = "token_mean"

    def __post_init__(self) -> None:
        object.__setattr__(self, "owner_T", masked_owner(self.owner_T, self.loss_mask_T))

    @cached_property
    def mask_T(self) -> Tensor:
        """``[T]`` bool: in the loss mask, and owned."""
        return self.owner_T >= 0


def aggregate(values_T: Tensor, tokens: LossTokens) -> Tensor:
    """A micro-batch's share of the mini-batch's loss; the shares of all micro-batches add up to it.

    Args:
        values_T: ``[T]`` per-token losses of the micro-batch; elsewhere they are ignored, whatever they are.
        tokens: which have loss.

    Returns:
        Scalar fp32 (fp64 for fp64 input), 0 where there are no loss tokens.
    """
    kept_T, denominators = keep(values_T, tokens.mask_T), tokens.denominators
    num_sequences = denominators.num_sequences.clamp(min=1)
    match tokens.aggregation:
        case "token_mean":
            return kept_T.sum() / denominators.num_tokens.clamp(min=1)
        case "sequence_mean_token_mean":
            count_T = gather_owner(denominators.tokens_per_sequence, tokens.owner_T).clamp(min=1)
            return (kept_T / count_T).sum() / num_sequences
        case "sequence_mean_token_sum":
            return kept_T.sum() / num_sequences
        case "sequence_mean_token_sum_norm":
            if denominators.norm is None:
                raise ValueError("sequence_mean_token_sum_norm needs denominators with a norm")
            return kept_T.sum() / (num_sequences * denominators.norm)
