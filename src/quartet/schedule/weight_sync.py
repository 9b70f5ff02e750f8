"""The trainer's weights to its rollout engines, wherever both live.

A ``WeightOutlet`` stands beside the trainer, a ``WeightInlet`` beside every engine, both as methods of hosts
(``SendsWeights``, ``TakesWeights``). ``link`` chooses a transport and connects the ends, ``deliver`` brings a version::

    transport = await link(actor, engines)  # handles
    num_bytes = await deliver(actor, engines, version)

``auto`` takes what is nearest: the engine's memory itself within one process, CUDA IPC on one GPU, shared memory on one
machine, else a collective.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Literal

from quartet.config import UserError
from quartet.schedule.role_group import LocalGroup, RoleGroup
from quartet.schedule.weight_ends import (
    Failed,
    SendsWeights,
    Spot,
    TakesWeights,
    Transport,
    WeightInlet,
    WeightOutlet,
)
from quartet.schedule.worker import drained
from quartet.weights import WeightMismatch, WeightsRefused, WeightsUnusable, WeightSyncError

__all__ = [
    "SendsWeights",
    "TakesWeights",
    "WeightInlet",
    "WeightOutlet",
    "choose_transport",
    "deliver",
    "link",
    "unlink",
]

TIMEOUT_S = 120.0
_GRACE_S = 5.0
"""Beyond its own limit an end gets so much to say how it ended."""


def choose_transport(trainer: Spot, engines: Sequence[Spot]) -> Transport:
    """The nearest way that leads to all engines.

    Raises:
        UserError: some engines are in the trainer's process and others are not.
    """
    inside = [(e.machine, e.pid) == (trainer.machine, trainer.pid) for e in engines]
    if all(inside):
        return "shared"
    if any(inside):
        raise UserError(
            "one weight sync cannot reach engines within the trainer's process and others outside of it",
            found=f"{sum(inside)} of {len(engines)} engines in the trainer's process {trainer.pid}",
            remedy="link them in two groups, each with a trainer's host of its own",
        )
    here = all(e.machine == trainer.machine for e in engines)
    if trainer.device != "cpu":
        return "cuda_ipc" if here and all(e.device == trainer.device for e in engines) else "collective"
    return "shared_memory" if here else "collective"


async def link(
    trainer: RoleGroup[SendsWeights],
    engines: Sequence[RoleGroup[TakesWeights]],
    transport: Transport | Literal["auto"] = "auto",
    *,
    host: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Transport:
    """Connects a trainer's host with those of its engines; again, after one was lost, with what stands in its place.

    Args:
        trainer: a ``SendsWeights``.
        engines: a ``TakesWeights`` each, which gets its index as rank.
        host: where engines on other machines reach the trainer's; the address of its default route when left out.
        timeout_s: how long an end may be silent, now and in every sync.

    Returns:
        The transport.

    Raises:
        UserError: the transport does not lead from the trainer to these engines.
        WeightSyncError: an end did not come.
    """
    await unlink(trainer, engines, timeout_s)
    asking: list[_Call] = [(trainer, SendsWeights.weights_spot, ())]
    spots = await _together([*asking, *((e, TakesWeights.weights_spot, ()) for e in engines)], timeout_s)
    chosen = choose_transport(spots[0], spots[1:]) if transport == "auto" else transport
    _check_reach(chosen, spots[0], spots[1:])
    wanted = await _together([(engine, TakesWeights.weights_wanted, ()) for engine in engines], timeout_s)
    if differing := next((rank for rank, dtypes in enumerate(wanted) if dtypes != wanted[0]), None):
        raise UserError(
            "engines that take the same weights want them in different dtypes",
            found=f"engine {differing} differs from engine 0",
            remedy="build all rollout engines of a run with the same precision",
        )
    if host is None:
        host = "127.0.0.1" if len({spot.machine for spot in spots}) == 1 else spots[0].address
    opening = (SendsWeights.weights_open, (chosen, len(engines), host, timeout_s, wanted[0]))
    (address,) = await _together([(trainer, *opening)], timeout_s)
    meeting: list[_Call] = [
        (engine, TakesWeights.weights_open, (chosen, address, rank, timeout_s)) for rank, engine in enumerate(engines)
    ]
    await _together([*meeting, (trainer, SendsWeights.weights_connect, ())], timeout_s)
    return chosen


async def deliver(
    trainer: RoleGroup[SendsWeights],
    engines: Sequence[RoleGroup[TakesWeights]],
    version: int,
    *,
    timeout_s: float = TIMEOUT_S,
) -> int:
    """Brings the trainer's weights as ``version`` to the engines that it was linked with, in the same order.

    Args:
        timeout_s: as given to ``link``.

    Returns:
        Bytes sent to each engine, all of which serve ``version`` now.

    Raises:
        WeightSyncError: of all that the ends report the one that says most; where a worker died it is the cause.
    """
    sending: list[_Call] = [(trainer, SendsWeights.weights_send, (version,))]
    results = await _together([*sending, *((e, TakesWeights.weights_receive, (version,)) for e in engines)], timeout_s)
    return int(results[0])


async def unlink(
    trainer: RoleGroup[SendsWeights], engines: Sequence[RoleGroup[TakesWeights]], timeout_s: float = TIMEOUT_S
) -> None:
    """Lets all ends go; engines keep what they have."""
    closing: list[_Call] = [(trainer, SendsWeights.weights_close, ())]
    await _together([*closing, *((engine, TakesWeights.weights_close, ()) for engine in engines)], timeout_s)


def _check_reach(transport: Transport, trainer: Spot, engines: Sequence[Spot]) -> None:
    places = [(spot.machine, spot.pid) for spot in engines]
    inside = places.count((trainer.machine, trainer.pid))
    if transport == "shared" and inside < len(engines):
        found, remedy = f"{inside} of {len(engines)} engines in the trainer's process", "use the transport auto"
    elif transport != "shared" and inside:
        found, remedy = "an engine in the trainer's own process, which would wait for itself", "use the transport auto"
    elif transport != "shared" and len(set(places)) < len(places):
        found, remedy = "several engines in one process, which take turns", "place one engine in each process"
    elif transport == "shared_memory" and any(machine != trainer.machine for machine, _ in places):
        found, remedy = "engines on other machines, in other containers or of other users", "use collective or auto"
    elif transport == "cuda_ipc" and any(spot.device != trainer.device or spot.device == "cpu" for spot in engines):
        found, remedy = "ends that are not on one GPU", "use collective, shared_memory or auto"
    else:
        return
    raise UserError(f"the weight transport {transport} does not lead to every engine", found=found, remedy=remedy)


_Call = tuple[RoleGroup[Any], Callable[..., Any], tuple[Any, ...]]


async def _together(calls: Sequence[_Call], timeout_s: float) -> list[Any]:
    """The calls side by side, results in their order. Who is cancelled meanwhile is held until they have ended."""
    return await drained(_all_of(calls, timeout_s))


async def _all_of(calls: Sequence[_Call], timeout_s: float) -> list[Any]:
    # Tasks begin in the order in which they are made. A host of this process computes in its task's first step, so
    # it comes when the calls to other processes are on their way.
    tasks: dict[int, asyncio.Task[Any]] = {}
    for index in sorted(range(len(calls)), key=lambda i: isinstance(calls[i][0], LocalGroup)):
        tasks[index] = asyncio.ensure_future(_called(*calls[index]))
    await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
    waiting = {task for task in tasks.values() if not task.done()}
    if waiting:
        # The others learn of a failure by themselves; one that stands still must not keep us.
        _, waiting = await asyncio.wait(waiting, timeout=timeout_s + _GRACE_S)
        for task in waiting:
            task.add_done_callback(lambda late: late.cancelled() or late.exception())
    ended = [tasks[index] for index in range(len(calls)) if tasks[index] not in waiting]
    if errors := [error for task in ended if (error := task.exception()) is not None]:
        _raise_best(errors)
    return [task.result() for task in ended]


async def _called(group: RoleGroup[Any], method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    result = await group.call(method, *args)
    if isinstance(result, Failed):
        raise result.error
    return result


def _raise_best(errors: Sequence[BaseException]) -> None:
    """Raises the error of a sync that says most; an error of another kind is its cause, or is raised itself."""
    of_syncs = [error for error in errors if isinstance(error, WeightSyncError)]
    others = [error for error in errors if not isinstance(error, WeightSyncError)]
    if not of_syncs:
        raise others[0]
    # What is wrong with the weights, then what the trainer saw, which knows all ranks, then what engines saw; that one
    # has no weights now says least.
    unsaid = [error for error in of_syncs if not isinstance(error, WeightsUnusable)] or of_syncs
    exact = [error for error in unsaid if isinstance(error, (WeightMismatch, WeightsRefused))]
    raise (exact or unsaid)[0] from (others[0] if others else None)
