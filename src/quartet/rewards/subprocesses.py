"""Processes beside the trainer that answer questions: for user code, and for libraries that may hang.

A process is started fresh, not forked, in a session of its own, under a keeper that kills everything that it started,
in whatever process group, when it has ended. It ends when the trainer ends, however that ends, and nothing that it does
to itself reaches the trainer. The other side is
``subprocess_main.py``. These functions wait; call them in threads.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quartet.rewards.subprocess_main import END

_MAIN = Path(__file__).with_name("subprocess_main.py")
_MAX_ANSWER_BYTES = 64 << 20
_END_S = 1.0
"""Most seconds for an idle process to end by itself, and for a dying one to be dead once its socket is closed."""


class SubprocessDied(Exception):
    """The process is gone, or of no use. ``was_killed``: by this side, and through no fault of the question."""

    def __init__(self, text: str, *, was_killed: bool = False) -> None:
        super().__init__(text)
        self.was_killed = was_killed


class SubprocessTimeout(SubprocessDied):
    """The process does not answer in time."""


class Subprocess:
    """One process, ``pid``, which is ready when it is made; ``greeting`` is the first message that it sent.

    Args:
        module: whose ``serve(settings, channel)`` runs there, found as this process finds modules. It answers question
            0, which belongs to no question, when it is ready.
        settings: pickled for it.
        quiet: what it prints is dropped, and not printed where this process prints.
        threads: what OpenMP, and so torch and numpy, computes with there; None: as many as it likes.
        patience_s: most seconds until it is ready.

    Raises:
        SubprocessDied: it cannot be started.
        SubprocessTimeout: it is not ready in time.
    """

    def __init__(
        self,
        module: str,
        settings: Mapping[str, Any],
        *,
        quiet: bool = False,
        threads: int | None = None,
        patience_s: float | None = None,
    ) -> None:
        self._wire, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        output = subprocess.DEVNULL if quiet else None
        try:
            self._process = subprocess.Popen(
                # -P: a user's random.py in the current directory must not stand for Python's own.
                [sys.executable, "-P", str(_MAIN), str(theirs.fileno()), str(lifeline)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(), lifeline),
                env=os.environ if threads is None else {**os.environ, "OMP_NUM_THREADS": str(threads)},
                # Ctrl-C is for the trainer, which ends its step before it stops.
                start_new_session=True,
            )
        except OSError as error:
            self._wire.close()
            os.close(self._lifeline)
            raise SubprocessDied(f"it does not start: {error}") from error
        finally:
            theirs.close()
            os.close(lifeline)
        self.pid = 0  # told with the greeting
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lost: str | None = None
        self._is_killed = self._is_reaped = False
        self._has_ended = threading.Event()
        number, greeting = self._expect()
        self._reader = threading.Thread(target=self._read, name=f"process-{self._process.pid}", daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, name=f"process-{self._process.pid}-end", daemon=True).start()
        try:
            self._send(number, pickle.dumps(([*sys.path], module, dict(settings))), None)
            self.greeting = _result(greeting, patience_s)
        except BaseException:
            self.kill()
            raise

    @property
    def is_lost(self) -> bool:
        return self._is_killed or self._lost is not None

    def ask(self, question: Any, patience_s: float | None = None) -> Any:
        """The answer to ``question``: plain data whose form is not checked. Several threads may ask at a time.

        Raises:
            SubprocessTimeout: there was none within ``patience_s``. The process is to be ended then.
            SubprocessDied: the process has ended, or wrote something that is no answer.
            Exception: ``question`` cannot be pickled; nothing was sent. Where it cannot be unpickled, the answer is
                ``{"unreadable": why}``.
        """
        number, answer = self._expect()
        try:
            data = pickle.dumps(question)
        except BaseException:
            with self._lock:
                self._waiting.pop(number, None)
            raise
        self._send(number, data, patience_s)
        return _result(answer, patience_s)

    def kill(self) -> None:
        """Ends it with all that it has started; does not wait for it."""
        with self._lock:
            self._is_killed = True
            if not self._is_reaped:  # Before that its number stays its own.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._process.pid, END)

    def end(self) -> None:
        """Waits until it is gone: it ends by itself where it waits for questions, and is killed where it computes."""
        with self._lock:
            is_idle = not self._waiting and self._lost is None
        if is_idle:
            with contextlib.suppress(OSError):
                self._wire.shutdown(socket.SHUT_WR)
            self._reader.join(_END_S)
        self.kill()
        self._reader.join()

    # Questions -------------------------------------------------------------------------------------------

    def _expect(self) -> tuple[int, Future[Any]]:
        with self._lock:
            if self._lost is not None:
                raise SubprocessDied(self._lost, was_killed=self._is_killed)
            number, answer = next(self._numbers), Future[Any]()
            self._waiting[number] = answer
            return number, answer

    def _send(self, number: int, data: bytes, patience_s: float | None) -> None:
        most = struct.pack("@ll", *divmod(int((patience_s or 0) * 1e6), 1_000_000))  # 0: no limit
        with self._writing:
            try:
                self._wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, most)
                self._wire.sendall(number.to_bytes(8, "big") + len(data).to_bytes(8, "big") + data)
            except BlockingIOError:
                raise SubprocessTimeout(f"it took no question within {patience_s:g} s") from None
            except OSError:
                return  # It is lost, or will be soon; the reader tells why.

    # Answers ---------------------------------------------------------------------------------------------

    def _read(self) -> None:
        what = "it closed its connection to the trainer"
        try:
            with self._wire.makefile("rb") as answers:
                self.pid = int.from_bytes(answers.read(8), "big")
                while len(head := answers.read(8)) == 8:
                    size = int.from_bytes(head, "big")
                    if size > _MAX_ANSWER_BYTES:
                        raise ValueError(f"{size} bytes")
                    if len(data := answers.read(size)) < size:
                        break
                    number, value = json.loads(data)
                    with self._lock:
                        answer = self._waiting.pop(number)
                    answer.set_result(value)
        except OSError:
            pass  # The process is gone; ``_bury`` tells why.
        except Exception as error:  # Whatever the bytes do to a reader: they are no answer.
            what = f"it wrote something that is no answer: {type(error).__name__}"
        self._bury(what)

    def _watch(self) -> None:
        """Ends the reading when the process has ended: what it has forked may keep the socket open."""
        with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored: the kernel has reaped it.
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)  # not reaped, so its number stays its own
        self._has_ended.set()
        with contextlib.suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)

    def _bury(self, what: str) -> None:
        ended_itself = self._has_ended.wait(_END_S) and not self._is_killed
        was_killed = self._is_killed
        self.kill()
        with self._lock:
            self._is_reaped = True
        status = self._process.wait()
        if was_killed:
            what = "it was killed"
        elif ended_itself:
            what = how_it_ended(status)
        with self._lock:
            self._lost, self._is_killed = what, was_killed
            waiting, self._waiting = [*self._waiting.values()], {}
        for answer in waiting:
            answer.set_exception(SubprocessDied(what, was_killed=was_killed))
        with self._writing:
            self._wire.close()
        os.close(self._lifeline)


def _result(answer: Future[Any], patience_s: float | None) -> Any:
    try:
        return answer.result(patience_s)
    except TimeoutError:
        raise SubprocessTimeout(f"it gave no answer within {patience_s:g} s") from None


def how_it_ended(status: int) -> str:
    """In words: by what exit status, or signal."""
    if status >= 0:
        return f"it ended with exit status {status}"
    name = signal.Signals(-status).name if -status in {*signal.Signals} else f"signal {-status}"
    hint = ", perhaps for want of memory" if -status == signal.SIGKILL else ""
    return f"it was ended by {name}{hint}"


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
        """The process with the fewest calls."""
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
        """Whether all of them are there."""
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
                process.end()

    def _process(self, slot: _PoolSlot) -> Subprocess:
        with slot.lock:
            if self._is_closed:
                raise SubprocessDied("the run is over")
            if slot.process is None or slot.process.is_lost:
                slot.process = self._start()
                if self._is_closed:
                    slot.process.end()
            return slot.process
