"""Which sequences of a step make up a trajectory.

Shapes: T stored tokens, S sequences, N trajectories.

A trajectory is the response ``response`` of the group ``group``: one sequence, or several where an environment rewrote
the state. Its sequences stand next to each other, in the order in which they were played.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch


@dataclass(frozen=True)
class Trajectories:
    """Numbers of a batch's trajectories, in the order of their first sequences.

    Args:
        owner_S: ``[S]`` int64 the trajectory of each sequence.
        final_N: ``[N]`` int64 the last sequence of each trajectory: it holds the final action, and what is said of
            the whole trajectory (scores, whether it ended) stands there.
    """

    owner_S: Tensor
    final_N: Tensor

    def __len__(self) -> int:
        return len(self.final_N)

    @classmethod
    def of(cls, batch: RaggedBatch) -> Trajectories:
        """Read from the sequence fields ``group`` and ``response``."""
        group_S, response_S = batch.sequence["group"], batch.sequence["response"]
        is_first_S = torch.ones(len(batch), dtype=torch.bool)
        is_first_S[1:] = (group_S[1:] != group_S[:-1]) | (response_S[1:] != response_S[:-1])
        is_final_S = is_first_S.roll(-1)
        return cls(is_first_S.long().cumsum(0) - 1, is_final_S.nonzero().squeeze(1))


def last_ones(batch: RaggedBatch) -> list[list[int]]:
    """Places of the trajectories' last sequences, as one part of the batch."""
    return [Trajectories.of(batch).final_N.tolist()]


def num_emitted(batch: RaggedBatch, trajectories: Trajectories) -> Tensor:
    """``[N]`` float32 tokens that the policy emitted in each trajectory, trained on or not."""
    lengths_S = torch.tensor([batch.segment_lengths[leaf] for leaf in batch.leaves], dtype=torch.float32)
    if "observation_mask" in batch.token:
        observed = batch.sequence_index()[batch.token["observation_mask"]]
        lengths_S -= torch.bincount(observed, minlength=len(batch))
    return torch.zeros(len(trajectories)).index_add(0, trajectories.owner_S, lengths_S)
