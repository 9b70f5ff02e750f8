"""What Ctrl-C (SIGINT), SIGTERM and SIGUSR1 do to a run.

Inside ``graceful`` the first of them, whichever it is, asks the run to save and end after the step in flight. A SIGINT
after it stops at once; SIGTERM and SIGUSR1 never do, since schedulers repeat them. Elsewhere (imports, loading,
evaluation) there is nothing to wait for, and the first stops at once. ``StoppedBySignal`` is raised for that wherever
the main thread is; whatever swallows it there meets it again with the next ``check``.

The same signal twice within one long operation of the interpreter, which calls the handler afterwards, is one.

Runs a job's coroutine to its end, from a script or from inside a running event loop (a notebook).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from types import FrameType
from typing import Any, TypeVar

from quartet.config.errors import UserError
from quartet.observe.process import end_thread_pool

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
GRACE_S = 2.0
"""For so long after ``StoppedBySignal`` was raised further signals are ignored: what cleans up is not interrupted by
keys that were pressed in a row.
"""


class StoppedBySignal(KeyboardInterrupt):
    """A signal stops the program at once. ``number``: of the first signal that came."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


def signal_number(stop: BaseException) -> int:
    """Returns the signal behind a ``KeyboardInterrupt``; SIGINT where it was not raised here."""
    return int(getattr(stop, "number", signal.SIGINT))


class StopSignals:
    """The signals that came, and what they mean where the program is."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.at_once = False  # the program is to stop where it is
        self._raised_s = float("-inf")
        self._graceful = 0
        self._is_installed = False

    @property
    def requested(self) -> bool:
        """Tells whether any signal came."""
        return self.first is not None

    def check(self) -> None:
        """Raises ``StoppedBySignal`` where that was due and got lost, and outside ``graceful`` where a signal came
        inside."""
        if self.at_once or (self.requested and not self._graceful):
            raise self._stopped()

    @contextlib.contextmanager
    def graceful(self) -> Iterator[None]:
        """Lets the first signal inside the block only ask: see ``requested``."""
        self.check()
        self._graceful += 1
        self.listen()
        try:
            yield
        finally:
            self._graceful -= 1

    # Signals ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def installed(self, *, ends_process: bool) -> Iterator[None]:
        """Handles the signals of this process, in its main thread."""
        former = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        self._is_installed = True
        self.listen()
        try:
            yield
        finally:
            for number, handler in former.items():
                if ends_process and self.first is not None:
                    signal.signal(number, signal.SIG_IGN)
                elif handler is not None:  # set by a library in C, and not ours to name
                    signal.signal(number, handler)
            self._is_installed = False

    def listen(self) -> None:
        """Makes this the handler of the signals."""
        if self._is_installed and threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                signal.signal(number, self._on_signal)

    @property
    def exit_status(self) -> int:
        """128 + the first signal's number, as a shell has it."""
        return 128 + (self.first or signal.SIGINT)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = signal.Signals(number)
            stops = not self._graceful
        else:
            stops = number == signal.SIGINT and time.monotonic() - self._raised_s > GRACE_S
        if stops:
            self.at_once = True
            raise self._stopped()

    def _stopped(self) -> StoppedBySignal:
        self._raised_s = time.monotonic()
        return StoppedBySignal(self.first or signal.SIGINT)


_current: StopSignals | None = None


@contextlib.contextmanager
def stop_signals(*, ends_process: bool = False) -> Iterator[StopSignals]:
    """Handles the signals inside; a scope within another shares what came. Outside the main thread, to which signals
    belong, nothing ever comes unless the main thread has such a scope.

    Args:
        ends_process: where a signal came, the process ends after this scope.
    """
    global _current
    if _current is not None:
        yield _current
        return
    found = StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    with found.installed(ends_process=ends_process):
        _current = found
        try:
            yield found
        finally:
            _current = None


def reclaim_signals() -> None:
    """Takes the signals back after something that sets handlers of its own: Ray has one for SIGTERM, set where it
    connects."""
    if _current is not None:
        _current.listen()


def _forget() -> None:
    """Forgets the signals in a forked child, which is another process: what ends it must not reach us, nor wait for a
    step of ours."""
    global _current
    if _current is not None:
        _current = None
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in STOP_SIGNALS[1:]:
            signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)


T = TypeVar("T")
CLEAN_UP_S = 3.0
"""How long the tasks of a program that is stopped at once have to leave."""


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work`` and returns its result; blocks until then.

    Where this thread runs an event loop already, as a notebook does, ``work`` gets a thread and a loop of its own.
    ``KeyboardInterrupt`` cancels it there, waits for its end and is raised here.

    Raises:
        UserError: this is called by user code that holds up a run until it returns.
    """
    from quartet.observe.global_state import current_guarded_code  # brings torch, which --help does without

    if (caller := current_guarded_code()) is not None:
        work.close()
        raise UserError(
            f"{caller} starts a run inside of another one, which would wait for ever",
            found="a call of a trainer or an evaluation in code that was passed from Python",
            remedy="name the function in the recipe (type: function, target: file.py:name), where it has a process of "
            "its own, or start the other run in a process",
        )
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(work)
    task: list[asyncio.Task[T]] = []
    begin, begun = threading.Event(), threading.Event()

    async def main() -> T:
        begin.wait()  # not before an interrupt of the calling thread would cancel it
        task.append(asyncio.ensure_future(work))
        begun.set()
        return await task[0]

    end_thread_pool()  # of loading, say: what computes for ``work`` has one of its own
    context = contextvars.copy_context()
    with ThreadPoolExecutor(1, thread_name_prefix="quartet-loop") as pool:
        try:
            future = pool.submit(context.run, asyncio.run, main())
            begin.set()
            # A signal that arrives as a thread begins to wait for a lock is handled only when that wait has ended.
            while not wait([future], timeout=1.0).done:
                pass
            return future.result()
        except KeyboardInterrupt:
            begin.set()
            if begun.wait(CLEAN_UP_S) and not task[0].done():
                task[0].get_loop().call_soon_threadsafe(task[0].cancel)
            raise


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Runs ``work`` as ``asyncio.run`` does, except that a ``KeyboardInterrupt`` is not waited out.

    It may be raised between taking a callback from the loop's queue and calling it: the task that it would have woken
    then never ends, however often it is cancelled, and ``asyncio.run`` waits for it for ever. Here the tasks have
    ``CLEAN_UP_S`` seconds.
    """
    runner = asyncio.Runner()
    loop = runner.get_loop()
    try:
        try:
            result = runner.run(work)
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):
                runner.close()
            raise
        runner.close()
        return result
    except KeyboardInterrupt:
        _abandon(loop)
        raise


def _abandon(loop: asyncio.AbstractEventLoop) -> None:
    if loop.is_closed():
        return
    # Tasks that never end would be complained about; those that end with an error are consequences.
    loop.set_exception_handler(lambda *_: None)
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        done, _ = loop.run_until_complete(asyncio.wait(tasks, timeout=CLEAN_UP_S))
        for task in done:
            if not task.cancelled():
                task.exception()  # read, or asyncio reports it as never retrieved
    asyncio.set_event_loop(None)
    loop.close()
