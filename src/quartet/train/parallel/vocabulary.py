"""A vocabulary in parts: of an embedding and a head, whose rows tensor ranks have between them.

Shapes: M selected rows, V vocabulary, D hidden. Rank r has rows ``r · width`` to ``(r + 1) · width - 1``, the last one
what is left, as a DTensor's ``Shard(0)`` lies.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quartet.models.logprobs import LEAST
from quartet.train.parallel.pass_group import PassGroup


class VocabParallel:
    """The vocabulary's rows of this rank, for ``models.logprobs.VocabularyPart``.

    Args:
        size: V; large enough for every rank to have some.
    """

    def __init__(self, size: int, group: PassGroup) -> None:
        self._group = group
        self.width = -(-size // group.size)
        self.start = self.width * group.rank
        self.stop = min(size, self.start + self.width)

    def local(self, weight: Tensor) -> Tensor:
        """This rank's rows of ``[V, …]``."""
        return weight.to_local() if isinstance(weight, DTensor) else weight[self.start : self.stop]

    def own(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """``tokens`` among these rows, and whether they are (bool; else the number is 0)."""
        owned = (tokens >= self.start) & (tokens < self.stop)
        return (tokens - self.start).where(owned, 0), owned

    def join(self, labels: Tensor, logprobs: Tensor, normaliser: Tensor, entropies: Tensor | None) -> None:
        """Replaces ``[M]`` results over this rank's rows by those over all; see ``models.logprobs``. Collective."""
        own = [logprobs, normaliser] if entropies is None else [logprobs, normaliser, entropies]
        parts = self._group.stack(torch.stack(own))
        normaliser.copy_(parts[:, 1].logsumexp(0))
        masses = (parts[:, 1] - normaliser).clamp_(min=LEAST)
        holders = labels.div(self.width, rounding_mode="floor").unsqueeze(0)
        logprobs.copy_((parts[:, 0] + masses).gather(0, holders).squeeze(0))
        if entropies is not None:
            entropies.copy_((masses.exp() * (parts[:, 2] - masses)).sum(0))
