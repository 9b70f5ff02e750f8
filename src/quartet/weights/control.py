"""The driver of a weight sync: it asks a sender and its receivers, wherever they are, for one step after the other.

Every end is reached by a function from a request of ``endpoint`` to its answer: a worker's call, say.
``connect_endpoints`` chooses a transport, ``sync`` brings a version::

    transport = await connect(sender, receivers)
    manifest = await sync(sender, receivers, version=7)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from quartet.config import UserError
from quartet.weights.endpoint import Endpoint, Transport
from quartet.weights.errors import (
    OtherEndFailed,
    WeightMismatch,
    WeightsRefused,
    WeightsUnusable,
    WeightSyncError,
    WeightSyncTimeout,
    at_rank,
    at_tensor,
)
from quartet.weights.manifest import WeightManifest
from quartet.weights.transport import Announcement

Ask = Callable[..., Awaitable[Any]]
"""Gives an end a request, by its name and arguments, and its answer back."""
End = tuple[int | None, Ask]
"""A receiver's rank, or None for the sender, and how it is reached."""
TIMEOUT_S = 120.0
GRACE_S = 5.0
"""Beyond its own limit an end gets so much to say how it ended."""
SLOWEST_BYTES_PER_S = 1e7
"""Slower data are a fault: the driver's limit for moving them all."""


async def connect_endpoints(
    sender: Ask,
    receivers: Sequence[Ask],
    transport: Transport | Literal["auto"] = "auto",
    *,
    timeout_s: float = TIMEOUT_S,
) -> Transport:
    """Gives both ends their halves of a transport; again, after one was lost, with what stands in its place.

    Args:
        timeout_s: how long an end may be silent, now and in every sync.

    Raises:
        UserError: the transport does not lead from the sender to these receivers.
        WeightSyncError: an end failed.
    """
    ends = (to_sender, *to_receivers) = _ends(sender, receivers)
    await _tell(ends, timeout_s, "disconnect")
    here, *there = await _tell(ends, timeout_s, "describe")
    chosen = choose_transport(here, there) if transport == "auto" else transport
    _check_reach(chosen, here, there)
    _check_releases(chosen, here, there)
    host = "127.0.0.1" if len({end.machine for end in (here, *there)}) == 1 else here.address
    await _tell([to_sender], timeout_s, "connect", chosen, len(receivers), host, timeout_s, _wanted(there))
    for rank, receiver in to_receivers:
        await _tell([(rank, receiver)], timeout_s, "connect", chosen, rank, timeout_s)
    return chosen


async def sync(sender: Ask, receivers: Sequence[Ask], version: int, *, timeout_s: float = TIMEOUT_S) -> WeightManifest:
    """Brings the sender's weights as ``version`` to the receivers that it was connected with, in the same order.

    Args:
        timeout_s: as given to ``connect_endpoints``.

    Returns:
        What all receivers serve now.

    Raises:
        WeightSyncError: of all that the ends report the one that says most; where a worker died it is the cause.
            Every receiver serves the old version as a whole, or is unusable.
    """
    ends = (to_sender, *to_receivers) = _ends(sender, receivers)
    announcement: Announcement
    manifest: WeightManifest
    (announcement,) = await _tell([to_sender], timeout_s, "prepare", version)
    number, has_begun = announcement.sync, False
    try:
        await _tell(to_receivers, timeout_s, "announce", announcement)
        has_begun = True
        # The ends watch each other while the data move, and an end that gives up may wait as long again for its
        # connections to close; this limit is for the case that all of them stand still.
        limit_s = 2 * timeout_s + sum(spec.num_bytes for spec in announcement.tensors) / SLOWEST_BYTES_PER_S
        if announcement.transport == "shared":  # the sender moves everything before a receiver takes it
            (manifest,) = await _tell([to_sender], limit_s, "move", number)
            await _tell(to_receivers, limit_s, "move", number)
        else:
            manifest, *_ = await _tell(ends, limit_s, "move", number, silence_s=2 * timeout_s)
        await _tell(to_receivers, timeout_s, "verify", number, manifest)
        await _tell(to_receivers, timeout_s, "commit", number)
    except BaseException as error:
        reason = f"{error.problem}: {error.found}" if isinstance(error, UserError) else str(error) or repr(error)
        # An end that cannot be told has failed already, which is being raised.
        calls = asyncio.gather(*(ask("abort", number, reason, has_begun) for _, ask in ends), return_exceptions=True)
        await asyncio.wait([calls], timeout=GRACE_S)
        raise
    return manifest


def choose_transport(sender: Endpoint, receivers: Sequence[Endpoint]) -> Transport:
    """The nearest way that leads to all receivers, if there is one."""
    if any((end.machine, end.pid) == (sender.machine, sender.pid) for end in receivers):
        return "shared"
    here = all(end.machine == sender.machine for end in receivers)
    if sender.device != "cpu":
        return "cuda_ipc" if here and all(end.device == sender.device for end in receivers) else "collective"
    return "shared_memory" if here else "collective"


def _check_reach(transport: Transport, sender: Endpoint, receivers: Sequence[Endpoint]) -> None:
    places = [(end.machine, end.pid) for end in receivers]
    inside = places.count((sender.machine, sender.pid))
    if transport == "shared" and inside < len(receivers):
        found = f"{inside} of {len(receivers)} engines in the trainer's process {sender.pid}"
        remedy = "sync engines within the trainer's process and others outside of it in two groups, with a trainer each"
        remedy += ", or use the transport auto" if not inside else ""
    elif transport != "shared" and inside:
        found, remedy = "an engine in the trainer's own process, which would wait for itself", "use the transport auto"
    elif transport != "shared" and len(set(places)) < len(places):
        found, remedy = "several engines in one process, which take turns", "place one engine in each process"
    elif transport == "shared_memory" and any(machine != sender.machine for machine, _ in places):
        found, remedy = "engines on other machines, in other containers or of other users", "use collective or auto"
    elif transport == "cuda_ipc" and any(end.device != sender.device or end.device == "cpu" for end in receivers):
        found, remedy = "ends that are not on one GPU", "use collective, shared_memory or auto"
    else:
        return
    raise UserError(f"the weight transport {transport} does not lead to every engine", found=found, remedy=remedy)


def _check_releases(transport: Transport, sender: Endpoint, receivers: Sequence[Endpoint]) -> None:
    def release(end: Endpoint) -> str:
        # The data of these pass through torch at both ends.
        needed = transport in ("collective", "cuda_ipc")
        return ".".join(end.torch.split("+")[0].split(".")[:2]) if needed else "any"

    for rank, end in enumerate(receivers):
        for what, here, there in (
            ("protocol", sender.protocol, end.protocol),
            ("byte order", sender.byte_order, end.byte_order),
            ("torch release", release(sender), release(end)),
        ):
            if here != there:
                raise WeightSyncError(
                    f"the two ends of the weight sync differ in their {what}",
                    found=f"the trainer has {here}, engine {rank} has {there} (transport {transport})",
                    remedy="install the same releases on both ends, or use the transport shared_memory",
                    rank=rank,
                )


def _wanted(receivers: Sequence[Endpoint]) -> dict[str, str]:
    """The dtypes that all receivers take."""
    wanted = [dict(end.dtypes or {}) for end in receivers]
    if differing := next((rank for rank, dtypes in enumerate(wanted) if dtypes != wanted[0]), None):
        raise UserError(
            "engines that take the same weights want them in different dtypes",
            found=f"engine {differing} differs from engine 0",
            remedy="build all rollout engines of a run with the same precision",
        )
    return wanted[0] if wanted else {}


def _ends(sender: Ask, receivers: Sequence[Ask]) -> list[End]:
    return [(None, sender), *enumerate(receivers)]


async def _tell(ends: Sequence[End], limit_s: float, request: str, *args: Any, silence_s: float = 0.0) -> list[Any]:
    """A request to several ends side by side, and their answers.

    Args:
        limit_s: for all of them.
        silence_s: how long the others take to notice that one has failed.

    Raises:
        WeightSyncError: an end failed, or has not answered.
    """
    if not ends:
        return []
    limit_s += GRACE_S
    tasks = [asyncio.ensure_future(_asked(rank, ask(request, *args))) for rank, ask in ends]
    _, waiting = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
    if waiting and any(task.done() and task.exception() is not None for task in tasks):
        # The others notice that one has failed by themselves; one that stands still must not keep the driver.
        await asyncio.wait(tasks, timeout=silence_s + GRACE_S)
    errors: list[tuple[int | None, BaseException]] = []
    for (rank, _), task in zip(ends, tasks, strict=True):
        if not task.done():
            task.add_done_callback(lambda late: late.cancelled() or late.exception())
            errors.append((rank, _silent(rank, limit_s)))
        elif (raised := task.exception()) is not None:
            errors.append((rank, raised))
    if errors:
        _raise_best(errors)
    return [task.result() for task in tasks]


async def _asked(rank: int | None, call: Awaitable[Any]) -> Any:
    answer = await call
    if isinstance(answer, WeightSyncError):
        raise at_rank(answer, rank)
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
    """Raises the error that says most; what is no error of a sync (a dead worker) is its cause, or raised itself."""
    others = [(rank, error) for rank, error in errors if not isinstance(error, WeightSyncError)]

    def order(pair: tuple[int | None, WeightSyncError]) -> tuple[int, bool]:
        # What is wrong with the weights; then what the sender saw, which knows all receivers; then what they saw. That
        # another end has failed or that an engine has no weights now says least.
        rank, error = pair
        if isinstance(error, WeightMismatch | WeightsRefused):
            return 0, False
        return (2 if isinstance(error, OtherEndFailed | WeightsUnusable) else 1), rank is not None

    best = sorted(((rank, e) for rank, e in errors if isinstance(e, WeightSyncError)), key=order)
    if not others:
        raise best[0][1]
    rank, cause = others[0]
    if best and order(best[0])[0] == 0:
        raise best[0][1] from cause
    if not isinstance(cause, Exception):
        raise cause
    tensor = next((error.tensor for _, error in best if error.tensor is not None), None)
    raise WeightSyncError(
        f"{_who(rank)} failed in a weight sync",
        found=f"{type(cause).__name__}: {cause}{at_tensor(tensor)}",
        remedy="see its log for the reason; the next sync starts anew, with a dead worker replaced",
        rank=rank,
        tensor=tensor,
    ) from cause
