"""Where the weights come from: whole tensors under the names that the wire carries, one at a time.

A trainer that shards its weights takes part with all its ranks: rank 0 sends, the others ask for every tensor, too.
Every gather is a collective, so all ranks do the same ones in the same order and nothing between them, to the end, even
where the sync fails halfway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor
from torch.distributed import Store
from torch.distributed.tensor import DTensor

from quartet.weights.errors import WeightSyncTimeout
from quartet.weights.gather import gather
from quartet.weights.manifest import TensorSpec


class NamedSource:
    """
    Args:
        named: gives ``(name, tensor)`` anew for every sync, ``model.named_parameters`` say; DTensors are gathered.
        like: the dtype of each tensor by its name, where they differ (``TensorSink.dtypes`` of an engine).
        everywhere: every rank that holds a part gets the tensors, not only the first.
        watch: names the rank that is missing when a gather hangs; needed by no unsharded model.
    """

    def __init__(
        self,
        named: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        like: Mapping[str, torch.dtype] | None = None,
        everywhere: bool = False,
        watch: GatherWatchdog | None = None,
    ) -> None:
        self._gather = partial(gather, everywhere=everywhere)
        self._named = named
        self._like = dict(like or {})
        self._watch = watch

    def specs(self) -> tuple[TensorSpec, ...]:
        """What will be sent, in order. No collective."""
        return tuple(TensorSpec.of(name, tensor, self._like.get(name)) for name, tensor in self._named())

    @torch.no_grad()
    def tensors(self) -> Iterator[Tensor]:
        """Their contents in that order, each whole and contiguous, valid until the next one is asked for.

        Collective where the weights are sharded: all ranks go through them to the end, and the first one gets them.
        """
        for name, tensor in self._named():
            tensor = tensor.detach()
            if self._watch is not None and isinstance(tensor, DTensor):
                self._watch.wait(name)
            whole = self._gather(tensor)
            if whole is not None:
                yield whole.to(dtype=self._like.get(name)).contiguous()


class GatherWatchdog:
    """Waits before each gather until all ranks have come to it, and names one that has not.

    Args:
        store: seen by all ranks, on all of which this is made.
        timeout_s: for one tensor.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._step = 0

    def wait(self, name: str) -> None:
        """
        Raises:
            WeightSyncTimeout: a rank has not come to this tensor in time; it is named.
        """
        self._step += 1
        keys = [f"quartet/weights/gather/{rank}/{self._step}" for rank in range(self._world_size)]
        self._store.set(keys[self._rank], "")
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise WeightSyncTimeout(
                f"gathering {name!r} for a weight sync took more than {self._timeout_s:g} s",
                found=f"rank {', '.join(map(str, late))} did not come to it",
                remedy="see what the rank named here last said; start the ranks again, their process group is broken",
                rank=late[0] if late else None,
                tensor=name,
            ) from error
        # All ranks have left the step before, so no rank asks for its key any more.
        self._store.delete_key(f"quartet/weights/gather/{self._rank}/{self._step - 1}")
