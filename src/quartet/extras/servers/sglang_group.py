"""New weights for an SGLang server over a process group (``/update_weights_from_distributed``).

Both ends make the group beside their default one with the function of torch's that is used here: by which names its
members meet in the store differs between versions of torch, and is torch's own affair.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from quartet.cluster.torchrun import address_towards
from quartet.config import UserError
from quartet.config.remote import RemoteServer, RetryConfig
from quartet.remote.json_client import JSONClient
from quartet.rollout.staging import Load, StagedWeights
from quartet.weights.manifest import WeightsRefused, WeightSyncError

_PART_BYTES = 1 << 30
"""Of one request: the server has so much memory more while it takes new weights."""
_GOODBYE_S = 5.0
_LOOK_S = 0.01
_LONG = timedelta(days=1)
"""NCCL's own limit, never reached: it would end this process. Waiting is ours."""


class GroupWeights:
    """Staged weights on the way to one server.

    Args:
        num_workers: of the server: its tensor-parallel size. Each takes the part that it needs.
        device: from which the weights are sent.
        shapes: of the checkpoint that the server was started with, by name.

    Raises:
        WeightsRefused: names or shapes are not the checkpoint's.
    """

    def __init__(
        self,
        staging: StagedWeights,
        server: RemoteServer,
        *,
        num_workers: int = 1,
        device: torch.device | None = None,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.staging, self._server, self._num_workers = staging, server, num_workers
        self._device = device or torch.device("cpu")
        _check(staging, shapes)
        # Sent once only: who did not hear the answer would wait for a second broadcast.
        self._client = JSONClient(server.model_copy(update={"retry": RetryConfig(attempts=1)}))
        self._group: ServedGroup | None = None

    def send(self, version: int) -> Any:
        """What the server says at the end; it is the engine's to look at.

        Raises:
            UserError: it did not take all of it. The group is given up; the next call forms another one.
        """
        answer: Any = None
        try:
            group = self._group = self._group or self._formed()
            parts = list(_parts(self.staging))
            for number, part in enumerate(parts):
                last = {"weight_version": str(version)} if number == len(parts) - 1 else {}
                body = {
                    "names": [name for name, _ in part],
                    "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
                    "shapes": [list(tensor.shape) for _, tensor in part],
                    "group_name": group.name,
                    "flush_cache": bool(last),
                    **last,
                }
                told = self._tell("/update_weights_from_distributed", body)
                group.send((tensor for _, tensor in part), told)
                answer = _agreed(told.result())
        except BaseException:
            self.leave()
            raise
        return answer

    def _formed(self) -> ServedGroup:
        host = address_towards(urlsplit(self._server.url).hostname or "")
        group = ServedGroup(self._num_workers, host, self._device, self._server.timeout_s)
        where = {"master_address": host, "master_port": group.port, "rank_offset": 1, "world_size": group.size}
        told = self._tell(
            "/init_weights_update_group", {**where, "group_name": group.name, "backend": group.backend}
        )  # fmt: skip
        try:
            group.form(told)
            _agreed(told.result())
        except BaseException:
            group.close()
            raise
        return group

    def _tell(self, path: str, body: Any) -> Future[Any]:
        return self._client.start(body, lambda answer: answer, path)

    def leave(self) -> None:
        """The server's end of the group is left to itself; it may have died with the server."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def attach(self, load: Load) -> None:
        self.staging.attach(load)

    def detach(self, load: Load) -> None:
        self.staging.detach(load)
        if self._group is not None:
            with suppress(UserError, TimeoutError):
                self._tell("/destroy_weights_update_group", {"group_name": self._group.name}).result(_GOODBYE_S)
        self.leave()
        self._client.close()


def _agreed(answer: Any) -> Any:
    if not (isinstance(answer, dict) and answer.get("success") is True):
        raise UserError("the server refused", found=repr(answer), remedy="see its log")
    return answer


def _parts(staging: StagedWeights) -> Iterator[list[tuple[str, Tensor]]]:
    part: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in staging.handle:
        if part and size + tensor.nbytes > _PART_BYTES:
            yield part
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    yield part


def _check(staging: StagedWeights, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """SGLang passes over names that it does not know, and keeps old weights where none come."""
    sent = {spec.name: spec.shape for spec in staging.handle.specs}
    sent |= {name: sent[own] for name, own in staging.handle.ties if name in shapes}
    wrong = [name for name in sorted({**sent, **shapes}) if sent.get(name) != shapes.get(name)]
    if wrong:
        name, had = wrong[0], shapes.get(wrong[0], "nothing")
        raise WeightsRefused(
            "the policy's weights are not those of the checkpoint that the server has",
            found=f"{name!r}: {sent.get(name, 'nothing')} is sent, {had} is in the checkpoint ({len(wrong)} such)",
            remedy="use rollout.engine.weights: disk, or another engine",
            tensor=name,
        )


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
