"""Where the weights come from: whole tensors under the names that the wire carries, one at a time.

A trainer that shards its weights takes part with all its ranks: rank 0 sends, the others call ``take_part``. Every
gather is a collective, so all ranks do the same ones in the same order and nothing between them, to the end, even
where the sync fails halfway.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import Store
from torch.distributed.tensor import DTensor

from quartet.weights.errors import WeightSyncTimeout
from quartet.weights.fusion import FusedProjection, split_fused
from quartet.weights.manifest import TensorSpec

Named = Iterable[tuple[str, Tensor]]


class WeightSource(Protocol):
    def specs(self) -> tuple[TensorSpec, ...]:
        """What will be sent, in order. No collective."""

    def tensors(self) -> Iterator[Tensor]:
        """Their contents in that order, each whole and contiguous, valid until the next one is asked for.

        Collective where the weights are sharded.
        """


class NamedSource:
    """
    Args:
        named: gives ``(name, tensor)`` anew for every sync, ``model.named_parameters`` say; DTensors are gathered.
        dtype: floating-point tensors are sent in it (the engine's); as they are when left out.
        like: the dtype of each tensor by the name that is sent, where they differ (``TensorSink.dtypes`` of an engine);
            goes before ``dtype``.
        fused: parameters that are sent in parts.
        watch: names the rank that is missing when a gather hangs; needed by no unsharded model.
    """

    def __init__(
        self,
        named: Callable[[], Named],
        *,
        dtype: torch.dtype | None = None,
        like: Mapping[str, torch.dtype] | None = None,
        fused: Sequence[FusedProjection] = (),
        watch: GatherWatch | None = None,
    ) -> None:
        self._named = named
        self._dtype = dtype
        self._like = dict(like or {})
        self._fused = tuple(fused)
        self._watch = watch

    def specs(self) -> tuple[TensorSpec, ...]:
        # On the meta device a fused tensor splits without being gathered.
        shapes = ((name, torch.empty(t.shape, dtype=t.dtype, device="meta")) for name, t in self._named())
        return tuple(TensorSpec.of(n, t, self._dtype_of(n, t)) for n, t in split_fused(shapes, self._fused))

    @torch.no_grad()
    def tensors(self) -> Iterator[Tensor]:
        if self._watch is not None:
            self._watch.begin()
        for name, tensor in self._named():
            whole = self._gathered(name, tensor)
            for part_name, part in split_fused([(name, whole)], self._fused):
                yield part.to(self._dtype_of(part_name, part)).contiguous()

    def _gathered(self, name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if not isinstance(tensor, DTensor):
            return tensor
        return tensor.full_tensor() if self._watch is None else self._watch.run(name, tensor.full_tensor)

    def _dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        if name in self._like:
            return self._like[name]
        return self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype


def take_part(source: WeightSource) -> None:
    """What the trainer's ranks other than 0 do while rank 0 sends: the same gathers, the results dropped."""
    for _ in source.tensors():
        pass


class GatherWatch:
    """Ends a gather in which a rank is missing, and says which one.

    Every rank notes in ``store`` which tensor it has come to. The collective itself runs on a thread of its own, so
    that the caller can stop waiting for it; after that the ranks' group is of no use any more.

    Args:
        store: seen by all ranks, on all of which this is made.
        timeout_s: for one tensor.
    """

    def __init__(self, store: Store, rank: int, world_size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._round = 0
        self._step = 0

    def begin(self) -> None:
        """A new pass over the weights."""
        self._round += 1
        self._step = 0

    def run(self, name: str, gather: Callable[[], Tensor]) -> Tensor:
        """
        Raises:
            WeightSyncTimeout: a rank has not come to this tensor in time; it is named.
        """
        self._step += 1
        self._store.set(self._key(self._rank), f"{self._round} {self._step} {name}")
        done: queue.SimpleQueue[Tensor | BaseException] = queue.SimpleQueue()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        # What hangs in a daemon does not keep the process from ending.
        threading.Thread(target=_gather, args=(gather, device, done), name="gather", daemon=True).start()
        try:
            result = done.get(timeout=self._timeout_s)
        except queue.Empty:
            raise self._hung(name) from None
        if isinstance(result, BaseException):
            raise result
        return result

    def _key(self, rank: int) -> str:
        return f"quartet/weights/gather/{rank}"

    def _hung(self, name: str) -> WeightSyncTimeout:
        late, places = [], []
        self._store.set_timeout(timedelta(seconds=1))
        for rank in range(self._world_size):
            if not self._store.check([self._key(rank)]):
                late.append(rank)
                places.append(f"rank {rank} has not begun")
                continue
            at_round, at_step, at_name = self._store.get(self._key(rank)).decode().split(" ", 2)
            if (int(at_round), int(at_step)) < (self._round, self._step):
                late.append(rank)
                where = f"at {at_name!r}" if int(at_round) == self._round else "in an earlier sync"
                places.append(f"rank {rank} is {where}")
        return WeightSyncTimeout(
            f"gathering {name!r} for a weight sync took more than {self._timeout_s:g} s",
            found="; ".join(places) or "all ranks have come to it, so one of them stands still inside the collective",
            remedy="see what the rank named here last said; start the ranks again, their process group is broken",
            rank=late[0] if late else None,
            tensor=name,
        )


def _gather(call: Callable[[], Tensor], device: int | None, done: queue.SimpleQueue[Tensor | BaseException]) -> None:
    # Device and gradient mode belong to a thread.
    if device is not None:
        torch.cuda.set_device(device)
    try:
        with torch.no_grad():
            done.put(call())
    except BaseException as error:  # handed to the caller, who raises it
        done.put(error)
