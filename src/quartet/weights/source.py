"""Where the weights come from: whole tensors under the names that the wire carries, one at a time.

A trainer that shards its weights takes part with all its ranks: rank 0 sends, the others ask for every tensor, too.
Every gather is a collective, so all ranks do the same ones in the same order and nothing between them, to the end, even
where the sync fails halfway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from quartet.weights.gather import gather
from quartet.weights.manifest import TensorSpec


class NamedSource:
    """
    Args:
        named: gives ``(name, tensor)`` anew for every sync, ``model.named_parameters`` say; DTensors are gathered.
        like: the dtype of each tensor by its name, where they differ (``TensorSink.dtypes`` of an engine).
        everywhere: every rank that holds a part gets the tensors, not only the first.
    """

    def __init__(
        self,
        named: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        like: Mapping[str, torch.dtype] | None = None,
        everywhere: bool = False,
    ) -> None:
        self._gather = partial(gather, everywhere=everywhere)
        self._named = named
        self._like = dict(like or {})

    def specs(self) -> tuple[TensorSpec, ...]:
        """What will be sent, in order. No collective."""
        return tuple(TensorSpec.of(name, tensor, self._like.get(name)) for name, tensor in self._named())

    @torch.no_grad()
    def tensors(self) -> Iterator[Tensor]:
        """Their contents in that order, each whole and contiguous, valid until the next one is asked for.

        Collective where the weights are sharded: all ranks go through them to the end, and the first one gets them.
        """
        for name, tensor in self._named():
            whole = self._gather(tensor)
            if whole is not None:
                yield whole.to(dtype=self._like.get(name)).contiguous()
