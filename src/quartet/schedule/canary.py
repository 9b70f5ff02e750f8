"""The canary: a fixed prompt whose log-probabilities engine and trainer must agree on after every weight update.

Digests of tensors prove only their transport; this proves what is computed with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch
from quartet.config.errors import UserError
from quartet.text.examples import PromptText


@dataclass(frozen=True)
class CanaryProbe:
    """
    Args:
        num_tokens: of its greedy continuation.
        tolerance: nats that the log-probability of a token may differ by.
    """

    prompt: PromptText
    num_tokens: int
    tolerance: float

    def check(self, difference: float, version: int) -> None:
        """
        Raises:
            UserError: after the update to ``version`` the two differ by more than ``tolerance``, or by no number.
        """
        if not difference <= self.tolerance:
            raise UserError(
                f"after weight update {version} the rollout engine computes with other weights than the trainer",
                found=f"log-probabilities of the canary prompt differ by {difference:.3g}, "
                f"more than {self.tolerance:.3g}",
                remedy="if both are meant to differ by that much (another precision), raise canary_tolerance; "
                "otherwise the engine kept old or other weights",
            )


def canary_difference(probed: RaggedBatch, columns: ColumnSet) -> float:
    """The largest between an engine's ``rollout_logprobs`` of the canary's tokens and the trainer's, in nats."""
    mask = probed.token["loss_mask"]
    expected: Tensor = columns.token["logprobs"][mask]
    return float((probed.token["rollout_logprobs"][mask] - expected.double()).abs().max())
