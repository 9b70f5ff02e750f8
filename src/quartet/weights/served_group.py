"""The sender's end of a process group that a server's workers join because the server was told to over HTTP.

They make the group beside their default one with the function of torch's that is used here, too: by which names its
members meet in the store differs between versions of torch, and is torch's own affair.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from quartet.weights.errors import WeightSyncError

_LOOK_S = 0.01
_LONG = timedelta(days=1)
"""NCCL's own limit, never reached: it would end this process. Waiting is ours."""


class ServedGroup:
    """Rank 0 of a group whose other members are on a server.

    Args:
        host: where they reach this process.
        device: where tensors are sent from: NCCL from a GPU, gloo from the CPU.
        timeout_s: until all members are there, and of every broadcast.

    Attributes:
        name: nobody else's, ever.

    Raises:
        RuntimeError: ``host`` is not this machine's.
    """

    def __init__(self, num_receivers: int, host: str, device: torch.device, timeout_s: float) -> None:
        self.size, self.device, self.name = 1 + num_receivers, device, f"quartet_{uuid.uuid4().hex[:12]}"
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._limit = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(
            host, 0, self.size, is_master=True, timeout=self._limit, wait_for_workers=False, use_libuv=True
        )
        self.port = self._store.port
        self._group: Any = None

    def form(self, answer: Future[Any]) -> None:
        """
        Args:
            answer: of the server that was told to join. Where it is an error nothing is waited for.

        Raises:
            WeightSyncError: not all came in time.
        """
        while not self._store.num_keys() and not answer.done():
            time.sleep(_LOOK_S)
        if answer.done():
            answer.result()
        store = dist.PrefixStore(self.name, self._store)
        limit = self._limit if self.backend == "gloo" else _LONG
        backend, options = dist.Backend(self.backend), {"group_name": self.name, "timeout": limit}
        try:
            self._group, _ = c10d._new_process_group_helper(self.size, 0, [], backend, store, **options)  # type: ignore[arg-type]
        except RuntimeError as error:
            raise self._broke("its members did not all come", error) from error

    def send(self, tensors: Iterable[Tensor], answer: Future[Any]) -> None:
        """Broadcasts one after the other.

        Args:
            answer: as in ``form``, of the server that was told to receive these.

        Raises:
            WeightSyncError: a broadcast failed, or was not taken in time.
        """
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        end = time.monotonic() + self._limit.total_seconds()
        sent = [tensor.to(self.device) for tensor in tensors]  # held until it is through
        try:
            for work in [self._group.broadcast([tensor], options) for tensor in sent]:
                while not work.is_completed():
                    if answer.done():
                        answer.result()
                    if time.monotonic() > end:
                        raise self._broke("a broadcast was not taken", f"within {self._limit.total_seconds():g} s")
                    time.sleep(_LOOK_S)
                work.wait()
        except RuntimeError as error:
            raise self._broke("a broadcast failed", error) from error

    def _broke(self, problem: str, found: object) -> WeightSyncError:
        return WeightSyncError(
            f"the group for new weights broke: {problem}",
            found=f"{found} ({self.size} members, {self.backend})",
            remedy="see the server's log; it must reach this machine, and have as many workers as the recipe says",
        )

    def close(self) -> None:
        """Gives up what is under way; gloo cannot, and its end waits for that in a thread."""
        held, self._group = [self._group], None  # whoever drops the last reference waits: the thread, not this frame
        if held[0] is not None:
            threading.Thread(target=_end, args=(held,), name=f"end of {self.name}", daemon=True).start()


def _end(held: list[Any]) -> None:
    group = held.pop()
    group.abort()
    c10d._world.pg_group_ranks[group] = {}  # which only torch's own callers of the function enter
    dist.destroy_process_group(group)
