"""Work behind the run's back: one thread does what was handed over, in the order in which it was handed over."""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping

from quartet.config.errors import describe_error

_USUAL_LIMIT = 4
"""Of pieces of one name in a ``BackgroundWriter``."""
_MOST_WAITING = 1000
"""Pieces that wait for a ``BestEffortThread``."""


class BackgroundWriter:
    """Does pieces of work on a thread of its own, strictly one after another.

    Since the order is kept, a piece may rely on those before it: a checkpoint is complete only after the records that
    were handed over before it. A piece that raises ends the writer: what waits behind it is dropped, and its error
    comes out, as it is, of every later call. Calls belong to one thread.

    Args:
        limits: how many pieces of a name may wait or be under way, ``_USUAL_LIMIT`` of others; beyond it ``submit`` and
            ``wait_for_room`` wait.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._limits = limits
        # Entered by itself: ``with condition`` is a Python call, where an interrupt leaves it locked for ever.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[tuple[str, Callable[[], object]]] = deque()
        self._pending: Counter[str] = Counter()
        self._error: BaseException | None = None
        self._closed = False
        self._ended = False
        self._thread: threading.Thread | None = None

    def has_room(self, name: str) -> bool:
        """Tells whether ``submit`` would neither wait nor raise."""
        return self._error is None and self._pending[name] < self._limits.get(name, _USUAL_LIMIT)

    def wait_for_room(self, name: str) -> None:
        """Returns once ``submit`` would not have to wait; until then nothing needs to be copied for it."""
        with self._lock:
            self._changed.wait_for(lambda: self._error or self.has_room(name))
            self._raise()

    def submit(self, name: str, work: Callable[[], object]) -> None:
        """Hands ``work`` over; nothing it reads may change from here on."""
        self.wait_for_room(name)
        with self._lock:
            if self._closed:
                raise RuntimeError("the writer is closed")
            if self._thread is None:
                # No daemon: an interpreter that ends waits for the file being written.
                self._thread = threading.Thread(target=self._run, name="quartet-writer")
                self._thread.start()
            self._pending[name] += 1
            self._waiting.append((name, work))
            self._changed.notify_all()

    def drain(self) -> None:
        """Returns once everything handed over is done."""
        with self._lock:
            self._changed.wait_for(lambda: self._error or not self._pending.total())
            self._raise()

    def close(self, *, abandon: bool = False) -> None:
        """Ends the thread after what was handed over; with ``abandon`` after the piece under way."""
        with self._lock:
            if abandon:
                self._drop_waiting()
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            with self._lock:
                # An interrupted ``join`` takes the thread for ended, so that another one would not wait.
                self._changed.wait_for(lambda: self._ended)
            self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _drop_waiting(self) -> None:
        for name, _ in self._waiting:
            self._pending[name] -= 1
        self._waiting.clear()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if not self._waiting:
                    self._ended = True
                    self._changed.notify_all()
                    return
                name, work = self._waiting.popleft()
            error: BaseException | None = None
            try:
                work()
            except BaseException as raised:  # It belongs to the thread that submits, whatever it is.
                error = raised
            # What was handed over is large: none of it may live on until the next piece comes.
            del work
            with self._lock:
                self._pending[name] -= 1
                if error is not None:
                    self._error = error
                    self._drop_waiting()
                self._changed.notify_all()


class BestEffortThread:
    """Does pieces of work on a thread of its own, in order; whoever hands them over never waits, and meets no error.

    A piece that raises is dropped, and so is one that finds too many waiting. The thread is a daemon: a call that hangs
    does not keep the process.

    Args:
        name: what the work is for, in messages.
        tell: is told of the first failure, in this thread; in ``close``, of a call that hangs.

    Attributes:
        num_dropped: pieces that were not done.
    """

    def __init__(self, name: str, tell: Callable[[str], object]) -> None:
        self._name, self._tell = name, tell
        self._waiting: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._has_failed = False
        self._thread: threading.Thread | None = None
        self.num_dropped = 0

    def submit(self, work: Callable[[], object]) -> None:
        """Hands ``work`` over; nothing it reads may change from here on."""
        if self._waiting.qsize() >= _MOST_WAITING:
            self.num_dropped += 1
            return
        self._waiting.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"quartet-{self._name}", daemon=True)
            self._thread.start()

    def close(self, last: Callable[[], object], patience_s: float = 30.0) -> None:
        """Returns once all is done, and ``last`` after it, or ``patience_s`` later."""
        if self._thread is None:
            return
        self._waiting.put(last)
        self._waiting.put(None)
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self.num_dropped += self._waiting.qsize() - 1  # for ``last`` and the end the one under way
            self._tell(f"{self._name}: a call has not ended within the last {patience_s:g} s")

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            try:
                work()
            except BaseException as error:  # Of a library that may raise anything, SystemExit too.
                self.num_dropped += 1
                if not self._has_failed:
                    self._has_failed = True
                    self._tell(f"{self._name} fails ({describe_error(error)}): the run goes on without what it lacks")
