"""The trainer's weights to its rollout engines, by calls of their workers.

``WeightSenderMixin`` and ``WeightReceiverMixin`` are the two ends as methods of workers; ``open_weight_sync`` chooses a
transport and connects them, ``sync_weights`` brings a version::

    transport = await open_weight_sync(actor, engines)
    num_bytes = await sync_weights(actor, engines, version)

``auto`` takes what is nearest: the engine's memory itself within one process, CUDA IPC on one GPU, shared memory on one
machine, else a collective.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, Concatenate, Literal, TypeVar

from torch import Tensor

from quartet.cluster.dispatch import ONE_COPY, dispatch
from quartet.rollout.protocol import StepEngine
from quartet.schedule.clock import drained
from quartet.schedule.role_group import LocalGroup, RoleGroup
from quartet.train.engine import TrainEngine
from quartet.weights.control import TIMEOUT_S, Ask, connect_endpoints, sync
from quartet.weights.endpoint import Transport, WeightReceiver, WeightSender

W = TypeVar("W")


class WeightSenderMixin:
    """For the worker of a trainer, which has its ``engine``.

    Attributes:
        sends_everywhere: of a sharded model every rank sends, to an engine beside it, all of them at once; else the
            first rank sends to all.
    """

    engine: TrainEngine[Any]
    sends_everywhere = False

    @cached_property
    def weight_sender(self) -> WeightSender:
        # Of the ranks of a sharded model the first one sends; the others are asked, too, and take part in its gathers.
        everywhere = self.sends_everywhere
        packed = self.engine.packed
        device, rank = packed.device, 0 if everywhere or packed.gather.is_first else 1
        return WeightSender(self.sent_weights, device=device, rank=rank, everywhere=everywhere)

    def sent_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Named as engines take them."""
        return self.engine.weights()

    @dispatch(ONE_COPY)
    def send_weights(self, request: str, *args: Any) -> Any:
        """Answers one request of a weight sync."""
        return self.weight_sender.answer(request, *args)


class WeightReceiverMixin:
    """For the worker of a rollout engine with its own weights."""

    engine: StepEngine

    @cached_property
    def weight_receiver(self) -> WeightReceiver:
        return WeightReceiver(self.engine.weight_sink())

    def receive_weights(self, request: str, *args: Any) -> Any:
        """Answers one request of a weight sync."""
        return self.weight_receiver.answer(request, *args)


async def open_weight_sync(
    trainer: RoleGroup[WeightSenderMixin],
    engines: Sequence[RoleGroup[WeightReceiverMixin]],
    transport: Transport | Literal["auto"] = "auto",
    *,
    timeout_s: float = TIMEOUT_S,
) -> Transport:
    """Connects a trainer with its engines; again, after one was lost, with what stands in its place.

    Args:
        trainer: a ``WeightSenderMixin``.
        engines: a ``WeightReceiverMixin`` each, which gets its index as rank.
        timeout_s: how long an end may be silent, now and in every sync.

    Raises:
        UserError: the transport does not lead from the trainer to these engines.
        WeightSyncError: an end failed.
    """
    sender, receivers = _ends(trainer, engines)
    return await drained(connect_endpoints(sender, receivers, transport, timeout_s=timeout_s))


async def sync_weights(
    trainer: RoleGroup[WeightSenderMixin],
    engines: Sequence[RoleGroup[WeightReceiverMixin]],
    version: int,
    *,
    timeout_s: float = TIMEOUT_S,
) -> int:
    """Brings the trainer's weights as ``version`` to the engines that it was connected with, in the same order.

    Args:
        timeout_s: as given to ``open_weight_sync``.

    Returns:
        Bytes sent to each engine, all of which serve ``version`` now.

    Raises:
        WeightSyncError: of all that the ends report the one that says most; where a worker died it is the cause.
    """
    sender, receivers = _ends(trainer, engines)
    manifest = await drained(sync(sender, receivers, version, timeout_s=timeout_s))
    return manifest.num_bytes


def _ends(
    trainer: RoleGroup[WeightSenderMixin], engines: Sequence[RoleGroup[WeightReceiverMixin]]
) -> tuple[Ask, list[Ask]]:
    def ask(group: RoleGroup[W], method: Callable[Concatenate[W, ...], Any]) -> Ask:
        async def asked(request: str, *args: Any) -> Any:
            if isinstance(group, LocalGroup):
                await asyncio.sleep(0)  # it may compute at once: calls to other processes go before
            return await group.call(method, request, *args)

        return asked

    receivers = [ask(engine, WeightReceiverMixin.receive_weights) for engine in engines]
    return ask(trainer, WeightSenderMixin.send_weights), receivers
