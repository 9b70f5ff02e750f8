"""What a policy did with one prompt, token by token: a single turn is a trajectory of one sequence with one action.

::

    prompt_ids    what the policy read first
    token_ids     7 8 </s>     5 6          9 </s>
    action_mask   1 1 1        0 0          1 1
                  action       observation  action

Everything but ``prompt_ids`` and ``token_ids`` can be known without the tokens themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch

REWARD_PREFIX = "reward/"
"""Sequence columns of reward sources, read at a trajectory's last sequence: NaN where a source does not apply."""
STEP_PREFIX = "step_reward/"
"""Token columns of sources whose score is a sum of rewards earned on the way: what each action token earned."""
STEP_SCORE_PREFIX = "step_score/"
"""Token columns of process reward models: a step's score on its last token, NaN elsewhere."""


@dataclass(frozen=True)
class TrajectorySequence:
    """A run of turns whose states extend each other.

    Attributes:
        prompt_ids: tokens of its first state.
        token_ids: what follows, from the first action's first token to the last action's last one.
        action_mask, logprobs, versions: per token of ``token_ids``: whether the policy emitted it, its log-probability
            under the engine in nats (0 for observations), and the version of the weights that sampled it (-1 for
            observations).
        finish_reason: of the last action.
        num_turns: actions.
        columns: more token fields by name, one number per token of ``token_ids``.
        state: what the last action answers, as text or messages; None for the data set's prompt.
        completion: the last action as text, up to a stop string.
        text_end: characters of the last action's text before the stop string; None without one.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    action_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str
    num_turns: int = 1
    columns: Mapping[str, Sequence[float]] = field(default_factory=dict)
    state: Any = None
    completion: str = ""
    text_end: int | None = None


class TrajectoryEnd(StrEnum):
    DONE = "done"
    MAX_TURNS = "max_turns"
    CONTEXT = "context"
    """The next state leaves no room for an action."""
    FAILED = "failed"
    """The environment failed: nothing of it is scored, or learned from."""


CUT_OFF = (TrajectoryEnd.MAX_TURNS.value, TrajectoryEnd.CONTEXT.value)
"""Finish reasons of trajectories that might have gone on."""


@dataclass(frozen=True)
class Trajectory:
    """Sequences in the order in which they were sampled, at least one; several where the state was rewritten.

    ``scores``: what was earned on the way by source, NaN where nothing was. Only environments have any.
    """

    sequences: tuple[TrajectorySequence, ...]
    end: TrajectoryEnd = TrajectoryEnd.DONE
    scores: Mapping[str, float] = field(default_factory=dict)

    @property
    def finish_reason(self) -> str:
        return self.sequences[-1].finish_reason if self.end is TrajectoryEnd.DONE else self.end.value

    @property
    def num_turns(self) -> int:
        return sum(sequence.num_turns for sequence in self.sequences)


# In a batch ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trajectories:
    """Which sequences of a batch make up a trajectory: the response ``response`` of the group ``group``.

    One sequence, or several where an environment rewrote the state; these stand next to each other, in the order in
    which they were played. S sequences, N trajectories, in the order of their first sequences.

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
        """Reads the trajectories from the sequence fields ``group`` and ``response``."""
        group_S, response_S = batch.sequence["group"], batch.sequence["response"]
        is_first_S = torch.ones(len(batch), dtype=torch.bool)
        is_first_S[1:] = (group_S[1:] != group_S[:-1]) | (response_S[1:] != response_S[:-1])
        is_final_S = is_first_S.roll(-1)
        return cls(is_first_S.long().cumsum(0) - 1, is_final_S.nonzero().squeeze(1))


def last_sequences(batch: RaggedBatch) -> list[list[int]]:
    """Returns the places of the trajectories' last sequences, as one part of the batch."""
    return [Trajectories.of(batch).final_N.tolist()]


def num_policy_tokens(batch: RaggedBatch, trajectories: Trajectories) -> Tensor:
    """Returns ``[N]`` float32 tokens that the policy emitted in each trajectory, trained on or not."""
    lengths_S = torch.tensor([batch.segment_lengths[leaf] for leaf in batch.leaves], dtype=torch.float32)
    if "observation_mask" in batch.token:
        observed = batch.sequence_index()[batch.token["observation_mask"]]
        lengths_S -= torch.bincount(observed, minlength=len(batch))
    return torch.zeros(len(trajectories)).index_add(0, trajectories.owner_S, lengths_S)
