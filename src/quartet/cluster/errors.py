"""What went wrong in a worker: as it travels, and as the driver raises it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import distributed

from quartet.config.errors import UserError


@dataclass(frozen=True)
class WorkerFailure:
    """An exception of a worker's method, in place of its result.

    Attributes:
        rank: -1 where the sender did not know.
        where: role and method, ``actor.update``.
        summary: type and message, one line.
        traceback: as the worker printed it.
        user_error: problem, found and remedy of a ``UserError``.
        is_echo: it only says that another rank failed.
    """

    group: str
    rank: int
    pid: int
    host: str
    where: str
    summary: str
    traceback: str
    user_error: tuple[str, str, str] | None = None
    is_echo: bool = False

    @classmethod
    def of(cls, error: BaseException, *, group: str, rank: int, pid: int, host: str, where: str) -> WorkerFailure:
        """Makes a failure of text alone, which travels: the exception's class need not exist where it is read."""
        three = (error.problem, error.found, error.remedy) if isinstance(error, UserError) else None
        summary = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        text = "".join(traceback.format_exception(error)).rstrip()
        return cls(group, rank, pid, host, where, summary, text, three, isinstance(error, RankFailed))

    def error(self) -> UserError | WorkerError:
        """Makes what the driver raises: a ``UserError`` again as one, everything else as ``WorkerError``."""
        if self.user_error is None:
            return WorkerError(self)
        problem, found, remedy = self.user_error
        return UserError(problem, found=f"{found} (rank {self.rank} of group {self.group!r})", remedy=remedy)


@dataclass(frozen=True)
class LostResult:
    """In place of a result: the process that owed it, or that held its data, is gone.

    ``key`` is the back end's name of that process, None where it is not known.
    """

    key: str | None
    reason: str


@dataclass(frozen=True)
class WorkerDeath:
    """A worker that died.

    Attributes:
        rank: None where only the group or nothing but the loss of data is known.
        during: the call that found out.
        reason: what the back end knows.
    """

    group: str
    rank: int | None
    pid: int | None
    host: str
    during: str
    reason: str

    def brief(self) -> str:
        return f"{f'rank {self.rank}' if self.rank is not None else 'a process'} of group {self.group!r} died"

    def report(self) -> str:
        """Tells who died, and of what."""
        return f"{self.brief()}: {self.reason}"


class ClusterError(Exception):
    """Workers could not do what they were asked to."""


class RankFailed(ClusterError):
    """A rank that this one computes with failed, or cannot be reached any more."""


@contextmanager
def raising_rank_failed(ranks: int) -> Iterator[None]:
    """Turns the failure of a collective of so many ranks, in the ``with`` block, into ``RankFailed``.

    torch has types of its own for it; gloo raises a plain RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, distributed.DistError) or "gloo" in str(error)):
            raise
        said = str(error).strip().partition("\n")[0]
        raise RankFailed(f"another of {ranks} ranks failed, or cannot be reached: {said}") from error


class WorkerError(ClusterError):
    """A method raised in a worker, which lives on; the message ends with the worker's own traceback."""

    def __init__(self, failure: WorkerFailure) -> None:
        self.failure = failure
        super().__init__(failure)

    def __str__(self) -> str:
        f = self.failure
        head = f"{f.where} raised in rank {f.rank} of group {f.group!r} (pid {f.pid} on {f.host}): {f.summary}"
        return f"{head}\n{f.traceback}"


class WorkerDied(ClusterError):
    """A worker's process is gone; its group works again after ``restart()``."""

    def __init__(self, death: WorkerDeath) -> None:
        self.death = death
        super().__init__(death)

    def __str__(self) -> str:
        d = self.death
        who = f"rank {d.rank} of group {d.group!r} (pid {d.pid} on {d.host})"
        if d.rank is None:
            who = f"a process that group {d.group!r} needs"
        return f"{who} died; noticed by {d.during}; its own output may say more\n  reason: {d.reason}"
