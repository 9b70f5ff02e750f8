"""Becomes a process beside the trainer: run by :mod:`quartet.rewards.subprocesses` as a program.

Questions and answers have a socket of their own, so that what user code prints, or does to the standard streams, does
not come between them. A question is its number and its length, eight bytes each, and then so many, pickled, since it
comes from the trainer. An answer is its length, eight bytes, and then so many of JSON, since the trainer trusts nothing
that comes from here.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import pickle
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

_FOR_THE_TRAINER = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Sent to a whole job. The trainer ends its step first, and needs this process for it."""


END = signal.SIGRTMIN
"""Tells a keeper to end what it keeps; nobody sends it to a whole job."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class PipeChannel:
    """The trainer's questions, and the way of the answers."""

    def __init__(self, wire: socket.socket) -> None:
        self._wire = wire
        self._questions = wire.makefile("rb")
        self._owner = os.getpid()

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Each question with its number, until the trainer has no more."""
        while len(head := self._questions.read(16)) == 16:
            number, size = int.from_bytes(head[:8], "big"), int.from_bytes(head[8:], "big")
            data = self._questions.read(size)
            try:
                question = pickle.loads(data)
            except Exception as error:  # Objects of classes that are not found here, or do not let themselves be made.
                self.answer(number, {"unreadable": f"{type(error).__name__}: {error}"[:2000]})
                continue
            yield number, question

    def say_who(self) -> None:
        """The first that is sent: which process answers."""
        self._wire.sendall(self._owner.to_bytes(8, "big"))

    def answer(self, number: int, value: Any) -> None:
        """``value`` must be what JSON knows."""
        if os.getpid() != self._owner:
            os._exit(0)  # A copy that user code forked, and that came back from it: its original answers.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # User code may have closed or replaced it.
                stream.flush()
        data = json.dumps([number, value]).encode()
        self._wire.sendall(len(data).to_bytes(8, "big") + data)


def main() -> None:
    wire, lifeline = (int(text) for text in sys.argv[1:])
    sys.argv[1:] = []
    for fd in (wire, lifeline):
        os.set_inheritable(fd, False)
    signals = serve_under_keeper(wire, lifeline)
    leave_signals_to_the_trainer()
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    channel = PipeChannel(socket.socket(fileno=wire))
    channel.say_who()
    for _, (path, module, settings) in channel:
        sys.path[:] = path
        importlib.import_module(module).serve(settings, channel)


def serve_under_keeper(wire: int, lifeline: int) -> set[signal.Signals]:
    """Returns in a child of this process, with the signals that were blocked before. This one stays as its keeper: it
    adopts whatever the child's programs leave behind, in whatever process group, and kills all of it when the child or
    the trainer has ended, or the trainer says so. Then it ends as the child did.
    """
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, END, *_FOR_THE_TRAINER})
    libc, keeper = ctypes.CDLL(None), os.getpid()
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    end_with_trainer(lifeline, keeper, END)
    child = os.fork()
    if not child:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:
            os._exit(1)
        os.close(lifeline)
        return {signal.Signals(number) for number in former}
    os.close(wire)
    status = None
    while status is None and signal.sigwait({signal.SIGCHLD, END}) != END:
        ended = os.waitpid(-1, os.WNOHANG)
        while ended[0] not in (0, child):
            ended = os.waitpid(-1, os.WNOHANG)
        status = ended[1] if ended[0] == child else None
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in _children(keeper):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pid, last = os.waitpid(-1, 0)
            status = last if pid == child else status
    _end_as(status or 0)


def _children(parent: int) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == parent:
                found.append(int(pid))
    return found


def _end_as(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def end_with_trainer(lifeline: int, owner: int | None = None, number: int = signal.SIGKILL) -> None:
    """The kernel kills this process group when the other end of ``lifeline`` closes, that is when the trainer ends,
    however it ends; with an ``owner`` that process gets the signal.

    Not ``PR_SET_PDEATHSIG``, which already fires when the thread ends that started this process.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp() if owner is None else owner)
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, number)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        if not os.read(lifeline, 1):
            os._exit(1)  # It was closed before the kernel was asked.


def leave_signals_to_the_trainer() -> None:
    # Handlers and not SIG_IGN, which programs started from here would inherit; what is forked gets the usual ones back.
    usual = {number: signal.signal(number, lambda *_: None) for number in _FOR_THE_TRAINER}

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
