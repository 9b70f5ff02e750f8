"""What a weight sync ends in when it does not end well. Every error names the rank and the tensor."""

from __future__ import annotations

from copy import copy

from quartet.config import UserError


class WeightSyncError(UserError):
    """A sync that did not come to its end.

    Attributes:
        rank: the receiver's rank that is to blame; None where it is the sender, or this process.
        tensor: the tensor that was under way; None before the first and after the last.
    """

    def __init__(
        self, problem: str, *, found: str, remedy: str, rank: int | None = None, tensor: str | None = None
    ) -> None:
        self.rank = rank
        self.tensor = tensor
        super().__init__(problem, found=found, remedy=remedy)


def at_rank(error: WeightSyncError, rank: int | None) -> WeightSyncError:
    """The error as one of the receiver of this rank, which reported it, where it names no rank; None: the sender."""
    if rank is None or error.rank is not None:
        return error
    named = copy(error)
    named.rank = rank
    if f"rank {rank}" not in f"{error.problem} {error.found}":
        UserError.__init__(named, error.problem, found=f"{error.found} (at rank {rank})", remedy=error.remedy)
    return named


class WeightSyncTimeout(WeightSyncError):
    """An end did nothing for longer than the time allowed."""


class OtherEndFailed(WeightSyncError):
    """Another end of the sync has failed or is gone; what it says itself tells more."""


class WeightsRefused(WeightSyncError):
    """Names, shapes, dtypes or the version do not fit the sink. Nothing was written, it keeps what it had."""


class WeightMismatch(WeightSyncError):
    """A tensor arrived with other contents than it was sent with.

    Attributes:
        sent, arrived: the two digests.
    """

    def __init__(self, name: str, *, sent: str, arrived: str, version: int) -> None:
        self.sent = sent
        self.arrived = arrived
        super().__init__(
            f"the weights of version {version} did not arrive as they were sent",
            found=f"{name!r} with the digest {arrived}, sent with {sent}",
            remedy="sync again; if it comes back, something writes into the weights while they are sent or served, "
            "or the memory or the network is faulty",
            tensor=name,
        )


class WeightsUnusable(WeightSyncError):
    """Weights are asked for that are not whole, or not of the version that is wanted."""


def at_tensor(name: str | None) -> str:
    """The end of a sentence about a sync."""
    return "" if name is None else f", at tensor {name!r}"
