"""The trainer's weights to its rollout engines, by calls of their workers.

``WeightSenderMixin`` and ``WeightReceiverMixin`` are the two ends as methods of workers; ``open_weight_sync`` chooses a
transport and connects them, ``sync_weights`` brings a version::

    transport = await open_weight_sync(actor, engines)
    num_bytes = await sync_weights(actor, engines, version)

What is nearest is taken: the trainer's tensors themselves within one process, shared memory on one machine where an end
is on the CPU or all share one GPU, else a collective.

The canary: a fixed prompt whose log-probabilities engine and trainer must agree on after every weight update.

Digests of tensors prove only their transport; this proves what is computed with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

from torch import Tensor

from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.cluster.dispatch import ONE_COPY, dispatch
from quartet.config.errors import UserError
from quartet.rollout.protocol import StepEngine
from quartet.schedule.clock import await_uncancelled
from quartet.schedule.role_group import LocalGroup, RoleGroup
from quartet.text.examples import PromptText
from quartet.train.engine import TrainEngine
from quartet.weights.manifest import (
    PeerFailed,
    WeightMismatch,
    WeightsRefused,
    WeightsUnusable,
    WeightSyncError,
    WeightSyncTimeout,
    with_rank,
)
from quartet.weights.sync import SyncEndpoint, Transport, WeightOffer, WeightReceiver, WeightSender

TIMEOUT_S = 120.0
GRACE_S = 5.0
"""Beyond its own limit an end gets so much to say how it ended."""
SLOWEST_BYTES_PER_S = 1e7
"""Slower data are a fault: the driver's limit for moving them all."""
Choice = Transport | Literal["auto"]
Calls = dict[int | None, Awaitable[Any]]
"""Calls of ends: of the receivers by their ranks, of the sender under None."""


class WeightSenderMixin:
    """The weight sender of the worker of a trainer, which has its ``engine``.

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
        whole = partial(packed.gather.whole, everywhere=everywhere)
        return WeightSender(self.sent_weights, device=device, rank=rank, whole=whole)

    def sent_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Returns the weights, named as engines take them."""
        return self.engine.weights()

    @dispatch(ONE_COPY)
    def connect_weights(self, engines: Sequence[SyncEndpoint], transport: Choice, timeout_s: float) -> Any:
        """Connects as ``WeightSender.connect`` does."""
        return self.weight_sender.connect(engines, transport, timeout_s)

    @dispatch(ONE_COPY)
    def offer_weights(self, version: int) -> Any:
        """Offers weights as ``WeightSender.offer`` does."""
        return self.weight_sender.offer(version)

    @dispatch(ONE_COPY)
    def send_weights(self) -> WeightSyncError | None:
        """Sends weights as ``WeightSender.send`` does."""
        return self.weight_sender.send()


class WeightReceiverMixin:
    """The weight receiver of the worker of a rollout engine with its own weights."""

    engine: StepEngine

    @cached_property
    def weight_receiver(self) -> WeightReceiver:
        return WeightReceiver(self.engine.weight_sink(), self.before_weights)

    def before_weights(self) -> None:
        """Prepares for new weights, which are about to come."""

    def describe_weights(self) -> SyncEndpoint:
        """Describes this end as ``WeightReceiver.describe`` does."""
        return self.weight_receiver.describe()

    def receive_weights(self, offer: WeightOffer, rank: int) -> WeightSyncError | None:
        """Receives weights as ``WeightReceiver.receive`` does."""
        return self.weight_receiver.receive(offer, rank)


async def open_weight_sync(
    trainer: RoleGroup[WeightSenderMixin],
    engines: Sequence[RoleGroup[WeightReceiverMixin]],
    transport: Choice = "auto",
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

    async def connect() -> Transport:
        ends: Sequence[SyncEndpoint] = await _answers(
            {rank: engine.call(WeightReceiverMixin.describe_weights) for rank, engine in enumerate(engines)}, timeout_s
        )
        connected = trainer.call(WeightSenderMixin.connect_weights, ends, transport, timeout_s)
        chosen: Transport
        (chosen,) = await _answers({None: connected}, timeout_s)
        return chosen

    return await await_uncancelled(connect())


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
            Every receiver serves one version as a whole, or is unusable.
    """

    async def sync() -> int:
        offer: WeightOffer
        (offer,) = await _answers({None: trainer.call(WeightSenderMixin.offer_weights, version)}, timeout_s)
        # The ends watch each other, and one that gives up may wait as long again for its connections to close; the
        # driver's own limit is for the case that all of them stand still.
        limit_s = 4 * timeout_s + offer.num_bytes / SLOWEST_BYTES_PER_S
        calls: Calls = {None: _soon(trainer, trainer.call(WeightSenderMixin.send_weights))}
        for rank, engine in enumerate(engines):
            calls[rank] = _soon(engine, engine.call(WeightReceiverMixin.receive_weights, offer, rank))
        await _answers(calls, limit_s, silence_s=2 * timeout_s)
        return offer.num_bytes

    return await await_uncancelled(sync())


async def _soon(group: RoleGroup[Any], call: Awaitable[Any]) -> Any:
    """Awaits the answer of a call of ``group``."""
    if isinstance(group, LocalGroup):
        await asyncio.sleep(0)  # it may compute at once: calls to other processes go before
    return await call


async def _answers(calls: Calls, limit_s: float, *, silence_s: float = 0.0) -> list[Any]:
    """Returns what several ends answer that are called side by side.

    Args:
        limit_s: for all of them.
        silence_s: how long the others take to notice that one has failed.

    Raises:
        WeightSyncError: an end failed, or has not answered.
    """
    if not calls:
        return []
    limit_s += GRACE_S
    tasks = {rank: asyncio.ensure_future(_answer(rank, call)) for rank, call in calls.items()}
    _, waiting = await asyncio.wait(tasks.values(), timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
    if waiting and any(task.done() and task.exception() is not None for task in tasks.values()):
        # The others notice that one has failed by themselves; one that stands still must not keep the driver.
        await asyncio.wait(tasks.values(), timeout=silence_s + GRACE_S)
    errors: list[tuple[int | None, BaseException]] = []
    for rank, task in tasks.items():
        if not task.done():
            task.add_done_callback(lambda late: late.cancelled() or late.exception())
            errors.append((rank, _silent(rank, limit_s)))
        elif (raised := task.exception()) is not None:
            errors.append((rank, raised))
    if errors:
        _raise_best(errors)
    return [task.result() for task in tasks.values()]


async def _answer(rank: int | None, call: Awaitable[Any]) -> Any:
    answer = await call
    if isinstance(answer, WeightSyncError):
        raise with_rank(answer, rank)
    return answer


def _who(rank: int | None) -> str:
    return "the trainer" if rank is None else f"the engine of rank {rank}"


def _silent(rank: int | None, limit_s: float) -> WeightSyncTimeout:
    return WeightSyncTimeout(
        f"{_who(rank)} did not answer in a weight sync within {limit_s:g} s",
        found="a call that does not end",
        remedy="see its log; start it again, or raise weight_sync.timeout_s if it only needs longer",
        rank=rank,
    )


def _raise_best(errors: Sequence[tuple[int | None, BaseException]]) -> None:
    """Raises the error that says most, of equals the sender's, which comes first and knows all receivers."""

    def says(pair: tuple[int | None, BaseException]) -> int:
        # What is wrong with the weights; what is no error of a sync, a dead worker; what broke; who was silent. That
        # another end has failed or that an engine has no weights now says least.
        error = pair[1]
        if isinstance(error, WeightMismatch | WeightsRefused):
            return 0
        if not isinstance(error, WeightSyncError):
            return 1
        return 4 if isinstance(error, PeerFailed | WeightsUnusable) else 2 + isinstance(error, WeightSyncTimeout)

    rank, error = min(errors, key=says)
    if isinstance(error, WeightSyncError) or not isinstance(error, Exception):
        raise error
    tensors = [each.tensor for _, each in errors if isinstance(each, WeightSyncError)]
    if isinstance(error, UserError) and not tensors:
        raise error
    raise WeightSyncError(
        f"{_who(rank)} failed in a weight sync",
        found=f"{type(error).__name__}: {error}",
        remedy="see its log for the reason; the next sync starts anew, with a dead worker replaced",
        rank=rank,
        tensor=next(filter(None, tensors), None),
    ) from error


@dataclass(frozen=True)
class CanarySpec:
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
    """Returns the largest difference between an engine's ``rollout_logprobs`` of the canary's tokens and the trainer's,
    in nats."""
    mask = probed.token["loss_mask"]
    expected: Tensor = columns.token["logprobs"][mask]
    return float((probed.token["rollout_logprobs"][mask] - expected.double()).abs().max())
