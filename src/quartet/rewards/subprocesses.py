"""Processes beside the trainer that answer questions: for user code, and for libraries that may hang.

These functions wait; call them in threads.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from quartet.processes import MessagePipe, Process, ProcessDied, ProcessTimeout


class WorkerRequests:
    """The trainer's questions, in the process that answers them."""

    def __init__(self, wire: MessagePipe) -> None:
        self._wire = wire

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Gives each question with its number, until the trainer has no more."""
        with contextlib.suppress(EOFError):
            while True:
                number, data = self._wire.receive()
                try:
                    question = pickle.loads(data)
                except Exception as error:  # Objects of classes that are not found here, or cannot be made.
                    self.answer(number, {"unreadable": f"{type(error).__name__}: {error}"[:2000]})
                    continue
                yield number, question

    def answer(self, number: int, value: Any) -> None:
        """Answers question ``number`` with ``value``."""
        self._wire.send([number, value])


class Subprocess(Process):
    """A process that is ready when it is made; ``greeting`` is the first message that it sent.

    Args:
        target: ``module:function`` that runs there, with a wire for ``WorkerRequests``; found as this process finds
            modules. It answers question 0, which belongs to no question, when it is ready.
        settings: pickled for it.
        quiet: what it prints is dropped, and not printed where this process prints.
        threads: what OpenMP, and so torch and numpy, computes with there; None: as many as it likes.
        patience_s: most seconds until it is ready.

    Raises:
        ProcessDied: it cannot be started.
        ProcessTimeout: it is not ready in time.
    """

    def __init__(
        self,
        target: str,
        settings: Mapping[str, Any],
        *,
        quiet: bool = False,
        threads: int | None = None,
        patience_s: float | None = None,
    ) -> None:
        self._numbers = itertools.count(1)
        greeting: Future[Any] = Future()
        self._waiting = {0: greeting}
        self._asking = threading.Lock()
        environment = None if threads is None else {**os.environ, "OMP_NUM_THREADS": str(threads)}
        output = subprocess.DEVNULL if quiet else None
        try:
            super().__init__(target, settings, path=[*sys.path], environment=environment, output=output)
        except OSError as error:
            raise ProcessDied(f"it does not start: {error}") from error
        try:
            self.greeting = _result(greeting, patience_s)
        except BaseException:
            self.kill()
            raise

    @property
    def is_lost(self) -> bool:
        return self.was_killed or self.lost is not None

    def ask(self, question: Any, patience_s: float | None = None) -> Any:
        """Returns the answer to ``question``: plain data whose form is not checked. Several threads may ask at a time.

        Raises:
            ProcessTimeout: there was none within ``patience_s``. The process is to be ended then.
            ProcessDied: the process has ended, or wrote something that is no answer.
            Exception: ``question`` cannot be pickled; nothing was sent. Where it cannot be unpickled, the answer is
                ``{"unreadable": why}``.
        """
        data = pickle.dumps(question)
        with self._asking:
            if self.lost is not None:
                raise ProcessDied(self.lost)
            number, answer = next(self._numbers), Future[Any]()
            self._waiting[number] = answer
        self.send((number, data), patience_s)
        return _result(answer, patience_s)

    def close(self) -> None:
        """Waits until it is gone: it ends by itself where it waits for questions, and is killed where it computes."""
        self.end(0.0 if self._waiting or self.lost is not None else self.dies_within_s)

    def take(self, message: Any) -> None:
        number, value = message
        with self._asking:
            answer = self._waiting.pop(number)
        answer.set_result(value)

    def take_end(self) -> None:
        with self._asking:
            waiting, self._waiting = [*self._waiting.values()], {}
        for answer in waiting:
            answer.set_exception(ProcessDied(self.lost or ""))


def _result(answer: Future[Any], patience_s: float | None) -> Any:
    try:
        return answer.result(patience_s)
    except TimeoutError:
        raise ProcessTimeout(f"it gave no answer within {patience_s:g} s") from None


# Several ----------------------------------------------------------------------------------------------------


@dataclass
class _PoolSlot:
    """Where a process is, or the next one will be."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    process: Subprocess | None = None
    num_calls: int = 0


class SubprocessPool:
    """``num`` processes, each started when it is first needed, and again when it is gone.

    Args:
        start: makes one that is ready; its errors go to the call that needed the process.
    """

    def __init__(self, start: Callable[[], Subprocess], num: int) -> None:
        self._start = start
        self._slots = [_PoolSlot() for _ in range(num)]
        self._lock = threading.Lock()
        self._is_closed = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[Subprocess]:
        """Lends the process with the fewest calls."""
        with self._lock:
            slot = min(self._slots, key=lambda slot: slot.num_calls)
            slot.num_calls += 1
        try:
            yield self._process(slot)
        finally:
            with self._lock:
                slot.num_calls -= 1

    @property
    def is_full(self) -> bool:
        """Tells whether all processes are there."""
        return not any(slot.process is None or slot.process.is_lost for slot in self._slots)

    def fill(self) -> None:
        """Starts those that are not there."""
        for slot in self._slots:
            self._process(slot)

    def close(self) -> None:
        """Ends all of them; may be called twice."""
        self._is_closed = True
        for slot in self._slots:
            if (process := slot.process) is not None:
                process.close()

    def _process(self, slot: _PoolSlot) -> Subprocess:
        with slot.lock:
            if self._is_closed:
                raise ProcessDied("the run is over")
            if slot.process is None or slot.process.is_lost:
                slot.process = self._start()
                if self._is_closed:
                    slot.process.close()
            return slot.process
