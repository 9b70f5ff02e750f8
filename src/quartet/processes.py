"""Child processes that answer messages: one way to start them, to talk to them and to end them.

A process is started fresh, not forked, in a session of its own, under a keeper that kills everything that it started,
in whatever process group, when it has ended. It ends when the process that started it ends, however that ends, and
nothing that it does to itself reaches that. This file is also the program which becomes keeper and process, maybe of
another Python environment: it needs the standard library alone.
"""

from __future__ import annotations

import abc
import contextlib
import ctypes
import fcntl
import importlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

END = signal.SIGRTMIN
"""Tells a keeper to end what it keeps; nobody sends it to a whole job."""
_FOR_THE_STARTER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Sent to a whole job. The process that starts others ends its step first, and needs them for it."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)
_STOP_S = 10.0
_MAX_BYTES = 1 << 31
_READ_BYTES = 1 << 20


class ProcessDied(Exception):
    """The process is gone, or of no use."""


class ProcessTimeout(ProcessDied):
    """The process does not answer in time."""


class MessagePipe:
    """One end of a connection. A message is pickled: its length, eight bytes, and then so many.

    Attributes:
        heard: when anything came last.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end, self._writing = end, threading.Lock()
        self.heard = time.monotonic()

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Any, patience_s: float | None = None) -> None:
        """
        Raises:
            ProcessTimeout: none of it was taken for so long.
            OSError: the other end is gone.
        """
        data = pickle.dumps(message)
        most = struct.pack("@ll", *divmod(int((patience_s or 0) * 1e6), 1_000_000))  # 0: no limit
        with self._writing:
            try:
                self._end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, most)
                self._end.sendall(len(data).to_bytes(8, "big") + data)
            except BlockingIOError:
                raise ProcessTimeout(f"it took no message within {patience_s:g} s") from None

    def receive(self) -> Any:
        """Waits for the next message.

        Raises:
            EOFError: the other end is gone.
            ValueError: what came is no message.
        """
        size = int.from_bytes(self._read(8), "big")
        if size > _MAX_BYTES:
            raise ValueError(f"a message of {size} bytes")
        data = self._read(size)
        try:
            return pickle.loads(data)
        except Exception as error:  # whatever the bytes do to a reader: they are no message
            raise ValueError(f"a message that cannot be read ({type(error).__name__}: {error})") from error

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            try:
                part = self._end.recv(min(size - len(found), _READ_BYTES))
            except OSError:
                part = b""
            if not part:
                raise EOFError
            self.heard = time.monotonic()
            found += part
        return bytes(found)

    def shut(self, how: int) -> None:
        with contextlib.suppress(OSError):
            self._end.shutdown(how)

    def close(self) -> None:
        with self._writing:
            self._end.close()


class Process(abc.ABC):
    """
    Args:
        target: ``module:function`` that is called there with ``settings`` and the other end of the wire.
        settings: pickled for it.
        path: where it finds modules; None: as its interpreter does.
        python: the interpreter; None: this one.
        output: where it prints, as ``subprocess`` has it; None: where this process does.
        passed: descriptors that stay open there.

    Attributes:
        pid: of its keeper, until its first message tells its own.
        lost: why there is nothing to be expected any more.
        was_killed: by this side.

    Raises:
        OSError: it cannot be started.
    """

    dies_within_s = 1.0
    """Most seconds from the end of its connection to its own."""

    def __init__(
        self,
        target: str,
        settings: Mapping[str, Any],
        *,
        path: Sequence[str] | None = None,
        python: str | None = None,
        environment: Mapping[str, str] | None = None,
        output: Any = None,
        passed: Sequence[int] = (),
    ) -> None:
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        self.wire = MessagePipe(ours)
        try:
            self._process = subprocess.Popen(
                # -P: a user's random.py in the current directory must not stand for Python's own.
                [python or sys.executable, "-P", __file__, str(theirs.fileno()), str(lifeline)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(), lifeline, *passed),
                env=environment,
                # Ctrl-C is for this process, which ends its step before it stops.
                start_new_session=True,
            )
        except OSError:
            self.wire.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self.pid = self._process.pid
        self.lost: str | None = None
        self._grace_s = self.dies_within_s
        self.was_killed = self._is_reaped = False
        self._lock = threading.Lock()
        self._has_ended = threading.Event()
        self._reader = threading.Thread(target=self._read, name=f"process-{self._process.pid}", daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, name=f"process-{self._process.pid}-end", daemon=True).start()
        self.send((path, target, dict(settings)))

    @abc.abstractmethod
    def take(self, message: Any) -> None:
        """Is called in the reading thread with all that the process says."""

    @abc.abstractmethod
    def take_end(self) -> None:
        """Is called in the reading thread once ``lost`` says why."""

    def send(self, message: Any, patience_s: float | None = None) -> None:
        """Sends it; where the process is gone, nothing happens.

        Raises:
            ProcessTimeout: none of it was taken for so long.
        """
        with contextlib.suppress(OSError):  # It is lost, or will be soon; the reader tells why.
            self.wire.send(message, patience_s)

    def kill(self) -> None:
        """Ends it with all that it has started; does not wait for it."""
        with self._lock:
            self.was_killed = True
        self._end_group()

    def _end_group(self) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if not self._is_reaped:  # Before that its number stays its own.
                os.kill(self._process.pid, END)

    def end(self, patience_s: float) -> str:
        """Closes the connection, kills it unless it ends within so long, and returns why it is gone."""
        self._grace_s = patience_s
        self.wire.shut(socket.SHUT_WR)
        if patience_s <= 0 or not self._has_ended.wait(patience_s):
            self.kill()
        self._reader.join()
        return self.lost or ""

    def _read(self) -> None:
        what = "it closed its connection to the trainer"
        try:
            self.pid = self.wire.receive()
            while True:
                self.take(self.wire.receive())
        except EOFError:
            pass  # ``_bury`` tells why.
        except Exception as error:
            what = f"it said what is no message: {error}"
        self._bury(what)

    def _watch(self) -> None:
        """Ends the reading when the process has ended: what it has forked may keep the socket open."""
        with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored: the kernel has reaped it.
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)  # not reaped, so its number stays its own
        self._has_ended.set()
        self.wire.shut(socket.SHUT_RDWR)

    def _bury(self, what: str) -> None:
        ended_itself = self._has_ended.wait(self._grace_s) and not self.was_killed
        if self.was_killed:
            what = "it was killed"
        self._end_group()
        self._has_ended.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # where somebody has killed the keeper
        with self._lock:
            self._is_reaped = True
        status = self._process.wait()
        self.lost = describe_exit(status) if ended_itself else what
        self.take_end()
        self.wire.close()
        os.close(self._lifeline)


def describe_exit(status: int) -> str:
    """Says by what exit status, or signal, a process ended."""
    if status >= 0:
        return f"it ended with exit status {status}"
    name = signal.Signals(-status).name if -status in {*signal.Signals} else f"signal {-status}"
    hint = ", perhaps for want of memory" if -status == signal.SIGKILL else ""
    return f"it was ended by {name}{hint}"


# Programs of others --------------------------------------------------------------------------------------


def die_with_parent(number: int) -> None:
    """Has this process get the signal when the one that started it has ended, however that came about."""
    if _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def prepare_child() -> None:
    """Makes a child heed the signals that we ignore, and end with us; called there before its program begins."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent(signal.SIGTERM)


def terminating(process: subprocess.Popen[bytes]) -> None:
    """Asks a process to end, and sees to it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class ProcessReaper:
    """A process that waits until this one has closed it, or ended in whatever way, and then kills what is left of
    others: Ray's agents wait for a minute before they follow a Ray that was killed.

    Args:
        processes: by number, and when each began.
    """

    def __init__(self, processes: Mapping[int, str]) -> None:
        lifeline, self._lifeline = os.pipe()
        places = [f"{pid}:{began}" for pid, began in processes.items()]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, "", str(lifeline), *places],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[lifeline],
            start_new_session=True,
        )
        os.close(lifeline)

    def close(self) -> None:
        os.close(self._lifeline)
        self._process.wait()


def _outlive(lifeline: int, places: Sequence[str]) -> None:
    os.read(lifeline, 1)
    for pid, began in (place.split(":") for place in places):
        if process_start_time(int(pid)) == began:
            os.kill(int(pid), signal.SIGKILL)


def descendant_processes(pid: int) -> dict[int, str]:
    """Finds all processes below one, and when each began: a number may be given to another process later."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        if (fields := _stat(int(name))) is not None:
            parents[int(name)] = int(fields[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child: process_start_time(child) for child in found - {pid}}


def process_start_time(pid: int) -> str:
    """Returns when the process began, in the kernel's ticks; nothing where there is none."""
    fields = _stat(pid)
    return fields[19] if fields is not None else ""


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of ``/proc/<pid>/stat`` behind the command's name."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
    return None


# In the process itself -----------------------------------------------------------------------------------


def main() -> None:
    if not sys.argv[1]:
        return _outlive(int(sys.argv[2]), sys.argv[3:])
    end, lifeline = (int(text) for text in sys.argv[1:])
    sys.argv[1:] = []
    for fd in (end, lifeline):
        os.set_inheritable(fd, False)
    signals = _serve_under_keeper(end, lifeline)
    _leave_signals_to_the_starter()
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    wire = MessagePipe(socket.socket(fileno=end))
    path, target, settings = wire.receive()
    wire.send(os.getpid())
    if path is not None:
        sys.path[:] = path
    module, _, name = target.partition(":")
    getattr(importlib.import_module(module), name)(settings, wire)


def _serve_under_keeper(end: int, lifeline: int) -> set[signal.Signals]:
    """Returns in a child of this process, with the signals that were blocked before. This one stays as its keeper: it
    adopts whatever the child's programs leave behind, in whatever process group, and kills all of it when the child or
    its starter has ended, or the starter says so. Then it ends as the child did.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, END, *_FOR_THE_STARTER})
    keeper = os.getpid()
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _end_with_starter(lifeline)
    child = os.fork()
    if not child:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)
        os.close(lifeline)
        return {signal.Signals(number) for number in former}
    os.close(end)
    status = None
    while status is None and signal.sigwait({signal.SIGCHLD, END}) != END:
        ended = os.waitpid(-1, os.WNOHANG)
        while ended[0] not in (0, child):
            ended = os.waitpid(-1, os.WNOHANG)
        status = ended[1] if ended[0] == child else None
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in descendant_processes(keeper):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pid, last = os.waitpid(-1, 0)
            status = last if pid == child else status
    _end_as(status or 0)


def _end_as(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _end_with_starter(lifeline: int) -> None:
    """Has the kernel send END when the other end of ``lifeline`` closes, that is when the starter ends, however.

    Not ``PR_SET_PDEATHSIG``, which already fires when the thread ends that started this process.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, END)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        if not os.read(lifeline, 1):
            os._exit(1)  # It was closed before the kernel was asked.


def _leave_signals_to_the_starter() -> None:
    # Handlers and not SIG_IGN, which programs started from here would inherit; what is forked gets the usual ones back.
    usual = {number: signal.signal(number, lambda *_: None) for number in _FOR_THE_STARTER}

    def hold() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, usual)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, usual)

    def restore() -> None:
        for number, handler in usual.items():
            signal.signal(number, handler)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=restore)


if __name__ == "__main__":
    main()
