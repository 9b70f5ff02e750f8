"""The processes of a torchrun as one group: rank 0 drives, and every process does its part of what it asks for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed

from quartet.cluster.dispatch import RankCall
from quartet.cluster.errors import RankFailed, WorkerDeath, WorkerDied, WorkerFailure, raising_rank_failed
from quartet.cluster.torchrun import machine_name
from quartet.cluster.worker import Worker
from quartet.config.errors import UserError

_PATIENCE = timedelta(days=30)
"""A rank waits for the next call as long as others take for theirs; one that is gone is noticed at once."""
_NOTICED_S = 1.0
Run = Callable[..., Any]
"""``run(method, *args, **kwargs)`` is a rank's own part of a call."""


@dataclass(frozen=True)
class LastMessage:
    """The last message of rank 0.

    Attributes:
        status: exit status, 0 where all went well.
        value: what the others return.
    """

    status: int
    value: Any = None


class TorchrunRanks(Worker):
    """Forms the process group of all processes that torchrun has started; each makes one.

    Args:
        name: of the run, in messages.
        backend: of the process group; what the ranks' devices need where it is left out.
        same: what must be equal on all ranks, the recipe say.

    Raises:
        UserError: it is not equal.
    """

    def __init__(self, name: str, backend: str | None = None, same: Any = None) -> None:
        self.name = name
        self.init_process_group(backend)
        # Of its own, since what is called uses others at the same time.
        self._control = distributed.new_group(backend="gloo", timeout=_PATIENCE)
        self._is_intact = True
        self._passed_on: set[int] = set()
        found: list[Any] = [None] * self.world_size
        with self._reaching("starting"):
            distributed.all_gather_object(found, same, group=self._control)
        if others := [rank for rank, value in enumerate(found) if value != found[0]]:
            raise UserError(
                "the processes of the run were started with different recipes",
                found=f"rank {others[0]} has another one than rank 0",
                remedy="give the same recipe and overrides on every node",
            )

    def ask(self, run: Run, method: str, calls: Sequence[RankCall | None]) -> list[Any]:
        """Has every rank make its call, on rank 0: returns the results in the order of ranks, None of one not called.

        A rank whose part raises ends with that error, and its process with it, whatever the others are doing.

        Raises:
            Exception: of rank 0's own part.
            WorkerDied: another process has ended.
        """
        answers: list[Any] = [None] * self.world_size
        with self._reaching(method):
            distributed.broadcast_object_list([(method, calls)], src=0, group=self._control)
        own = self._part(run, method, calls)
        with self._reaching(method):
            distributed.gather_object((own, None), answers, dst=0, group=self._control)
        for number in {number for _, number in answers if number is not None} - self._passed_on:
            self._passed_on.add(number)
            # Not as SIGINT: this process may have got that, too, and a second one stops it at once.
            os.kill(os.getpid(), signal.SIGTERM if number == signal.SIGINT else number)
        return [result for result, _ in answers]

    def serve(self, run: Run, stopped_by: Callable[[], int | None]) -> LastMessage:
        """Does the parts of the other ranks until rank 0 ends.

        Args:
            stopped_by: the signal that this process got; rank 0 is told.

        Raises:
            WorkerError, UserError: a part raised; it names this rank.
            WorkerDied: another process has ended.
        """
        while True:
            message: list[Any] = [None]
            with self._reaching("waiting for rank 0"):
                distributed.broadcast_object_list(message, src=0, group=self._control)
            if isinstance(message[0], LastMessage):
                return message[0]
            own = self._part(run, *message[0])
            with self._reaching("waiting for rank 0"):
                distributed.gather_object((own, stopped_by()), dst=0, group=self._control)

    def end(self, end: LastMessage) -> None:
        """Lets the other ranks go, on rank 0, where they can be reached."""
        with suppress(RuntimeError):  # one that is gone needs no word
            if self._is_intact:
                distributed.broadcast_object_list([end], src=0, group=self._control)

    def _part(self, run: Run, method: str, calls: Sequence[RankCall | None]) -> Any:
        call = calls[self.rank]
        if call is None:
            return None
        with self._reaching(method):
            try:
                return run(method, *call.args, **call.kwargs)
            except RankFailed:
                raise
            except Exception as error:
                self._is_intact = False
                if self.rank == 0:
                    raise
                host, pid = machine_name().partition("/")[0], os.getpid()
                failure = WorkerFailure.of(error, group=self.name, rank=self.rank, pid=pid, host=host, where=method)
                raise failure.error() from None

    @contextmanager
    def _reaching(self, during: str) -> Iterator[None]:
        """Turns a rank that cannot be reached in the ``with`` block into a worker that died."""
        try:
            with raising_rank_failed(self.world_size):
                yield
        except RankFailed as error:
            self._is_intact = False
            # torchrun is to notice that one first, and not this one's end: its report names the cause.
            time.sleep(_NOTICED_S)
            said = f"{error}; torchrun's report and the output of that rank name it"
            raise WorkerDied(WorkerDeath(self.name, None, None, "unknown host", during, said)) from error
