"""Where the weights come from: whole tensors under the names that the wire carries, one at a time.

A trainer that shards its weights takes part with all its ranks: rank 0 sends, the others ask for every tensor, too.
Every gather is a collective, so all ranks do the same ones in the same order and nothing between them, to the end, even
where the sync fails halfway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quartet.weights.fusion import FusedProjection, split_fused
from quartet.weights.manifest import TensorSpec


class NamedSource:
    """
    Args:
        named: gives ``(name, tensor)`` anew for every sync, ``model.named_parameters`` say; DTensors are gathered.
        like: the dtype of each tensor by the name that is sent, where they differ (``TensorSink.dtypes`` of an engine).
        fused: parameters that are sent in parts.
    """

    def __init__(
        self,
        named: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        like: Mapping[str, torch.dtype] | None = None,
        fused: Sequence[FusedProjection] = (),
    ) -> None:
        self._named = named
        self._like = dict(like or {})
        self._fused = tuple(fused)

    def specs(self) -> tuple[TensorSpec, ...]:
        """What will be sent, in order. No collective."""
        # On the meta device a fused tensor splits without being gathered.
        shapes = ((name, torch.empty(t.shape, dtype=t.dtype, device="meta")) for name, t in self._named())
        return tuple(TensorSpec.of(n, t, self._like.get(n)) for n, t in split_fused(shapes, self._fused))

    @torch.no_grad()
    def tensors(self) -> Iterator[Tensor]:
        """Their contents in that order, each whole and contiguous, valid until the next one is asked for.

        Collective where the weights are sharded.
        """
        for name, tensor in self._named():
            tensor = tensor.detach()
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for part_name, part in split_fused([(name, whole)], self._fused):
                yield part.to(dtype=self._like.get(part_name)).contiguous()
