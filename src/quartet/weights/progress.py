"""Where the ends of a sync stand while the data move, so that one that hangs, fails or dies is noticed by the others.

Each end notes its position on a board that all of them read: a page of shared memory on one machine, the store of the
process group between machines. The sender waits for its receivers, receivers wait for the sender, and every wait ends
when the other end stands still for too long. So no call of a sync takes longer than the silence that is allowed,
whatever happens to the driver.
"""

from __future__ import annotations

import os
import platform
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

from quartet.weights.errors import OtherEndFailed, WeightSyncError, WeightSyncTimeout, at_tensor
from quartet.weights.manifest import TensorSpec

SENDER = 0
"""The sender's place on a board; receiver ``rank`` has ``1 + rank``."""
_POLL_S = 5e-5
_LIFE_S = 0.02
"""Between two looks whether the other processes live."""
_EXPLANATION_S = 1.0
"""A connection may break before the reason is on the board."""


class State(IntEnum):
    RUNNING = 0
    FAILED = 1
    TIRED = 2
    """Failed, because another end did nothing for too long."""


@dataclass(frozen=True)
class Position:
    """
    Attributes:
        step: the transport's steps that this end is through with.
        tensor: index of the tensor that it is at.
        pid: of its process, if it is on the same machine; 0: not known (yet).
    """

    step: int = 0
    tensor: int = 0
    state: State = State.RUNNING
    pid: int = 0


class SharedMemoryBoard:
    """In nameless shared memory, which other processes of the machine open by ``path``.

    Read and written by system calls: with a position, the reader also sees the data that were there when it was noted.
    """

    interval_s = _POLL_S
    """Between two looks of an end that waits."""
    _ROW = struct.Struct("=4q")

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def create(cls, num_ends: int) -> SharedMemoryBoard:
        board = cls(os.memfd_create("quartet-progress", os.MFD_CLOEXEC))
        for end in range(num_ends):
            board.write(end, Position())
        return board

    @classmethod
    def open(cls, path: str) -> SharedMemoryBoard:
        """
        Raises:
            WeightSyncError: it is not within reach.
        """
        return cls(open_shared(path, os.O_RDWR))

    @property
    def path(self) -> str:
        return path_of(self._descriptor)

    def read(self, end: int) -> Position:
        row = os.pread(self._descriptor, self._ROW.size, end * self._ROW.size)
        step, tensor, state, pid = self._ROW.unpack(row)
        return Position(step, tensor, State(state), pid)

    def write(self, end: int, position: Position) -> None:
        row = self._ROW.pack(position.step, position.tensor, position.state, position.pid)
        os.pwrite(self._descriptor, row, end * self._ROW.size)

    def close(self) -> None:
        os.close(self._descriptor)


class BoardGone(Exception):
    """The board went with the process that kept it, the sender."""


class StoreBoard:
    """In the store of a process group, whose server is the sender."""

    interval_s = 0.02

    def __init__(self, store: Any) -> None:
        self._store = store
        self._machine = machine_id()

    def clear(self, num_ends: int) -> None:
        """At the beginning of a sync, by the sender."""
        for end in range(num_ends):
            self.write(end, Position())

    def read(self, end: int) -> Position:
        key = f"progress/{end}"
        try:
            if not self._store.check([key]):
                return Position()
            step, tensor, state, pid, machine = self._store.get(key).decode().split(" ", 4)
        except RuntimeError as error:  # its server, the sender, is gone
            raise BoardGone(str(error)) from error
        # A process is known by its number only on its own machine.
        return Position(int(step), int(tensor), State(int(state)), int(pid) if machine == self._machine else 0)

    def write(self, end: int, position: Position) -> None:
        try:
            fields = (position.step, position.tensor, int(position.state), position.pid, self._machine)
            self._store.set(f"progress/{end}", " ".join(map(str, fields)))
        except RuntimeError as error:
            raise BoardGone(str(error)) from error

    def close(self) -> None:
        """The store belongs to the process group."""


ProgressBoard = SharedMemoryBoard | StoreBoard


class SyncProgress:
    """One end's place on the board, and its waits for others.

    Args:
        end: whose, ``SENDER`` or ``1 + rank``.
        others: whom it waits for.
        timeout_s: how long one of them may stand still.
    """

    def __init__(
        self, board: ProgressBoard, end: int, others: Sequence[int], specs: Sequence[TensorSpec], timeout_s: float
    ) -> None:
        self._board = board
        self._end = end
        self._others = tuple(others)
        self._names = [spec.name for spec in specs]
        self._index = {name: index for index, name in enumerate(self._names)}
        self._timeout_s = timeout_s
        self._mine = Position(pid=os.getpid())
        self._looked_s = 0.0
        self.note()

    def note(self, *, step: int | None = None, tensor: str | None = None) -> None:
        """This end has come so far: it is through with ``step`` steps, and is at ``tensor``."""
        if step is not None:
            self._mine = replace(self._mine, step=step)
        if tensor is not None:
            self._mine = replace(self._mine, tensor=self._index[tensor])
        try:
            self._board.write(self._end, self._mine)
        except BoardGone as error:
            raise self._without_board(error) from error

    def fail(self, error: BaseException) -> None:
        """This end has failed; the others notice at their next look."""
        state = State.TIRED if isinstance(error, WeightSyncTimeout) else State.FAILED
        try:
            self._board.write(self._end, replace(self._mine, state=state))
        except BoardGone:
            return  # the others notice that, too

    def wait(self, step: int, ready: Callable[[], bool] | None = None) -> int:
        """Until every other end is through with ``step`` steps, or ``ready`` gives True.

        Returns:
            Steps that all of them are through with (with ``ready``: at the last look).

        Raises:
            WeightSyncTimeout: of the one that stands still and holds things up.
            OtherEndFailed: another end has failed or is gone.
        """
        seen: dict[int, Position] = {}
        moved_s = dict.fromkeys(self._others, time.monotonic())
        reached, looked_s = 0, 0.0
        while True:
            if ready is not None and ready():
                return reached
            now_s = time.monotonic()
            if now_s - looked_s >= self._board.interval_s:
                looked_s = now_s
                try:
                    found = {end: self._board.read(end) for end in self._others}
                except BoardGone as error:
                    raise self._without_board(error) from error
                reached = min((position.step for position in found.values()), default=step)
                if ready is None and reached >= step:
                    return reached
                self._check_states(found, step)
                moved_s |= {end: now_s for end in self._others if found[end] != seen.get(end)}
                seen = found
                behind = [end for end in self._others if found[end].step < step] or self._others
                for end in sorted(behind, key=lambda end: found[end].step):
                    if now_s - moved_s[end] > self._timeout_s:
                        raise self._late(end, found[end])
            time.sleep(_POLL_S)

    def broke(self, error: RuntimeError) -> WeightSyncError:
        """What to raise when the transport breaks: what the board says about it, if it says so soon."""
        soon = time.monotonic() + _EXPLANATION_S
        try:
            self.wait(0, lambda: time.monotonic() > soon)
        except WeightSyncError as explained:
            return explained
        name = self._name(self._mine)
        return OtherEndFailed(
            "the connection that carries the weights broke",
            found=f"{error}{at_tensor(name)}",
            remedy="see the logs of the other processes; the next sync connects anew",
            tensor=name,
        )

    def _without_board(self, error: BoardGone) -> WeightSyncError:
        return self._gone(SENDER, Position(tensor=self._mine.tensor), str(error))

    def _check_states(self, found: dict[int, Position], step: int) -> None:
        for end, position in found.items():
            if position.state is State.TIRED:
                # It waits for another receiver, as we do; where there is none, for us.
                behind = [
                    e
                    for e, p in found.items()
                    if p.state is State.RUNNING and p.step <= position.step and p.step < step
                ]
                if behind:
                    raise self._late(behind[0], found[behind[0]])
            if position.state is not State.RUNNING:
                at, remedy = f"step {position.step} of the data", "see its own error or log; the next sync starts anew"
                raise self._blamed(OtherEndFailed, end, position, "gave up the weight sync", at, remedy)
        now_s = time.monotonic()
        if now_s - self._looked_s > _LIFE_S:
            self._looked_s = now_s
            for end, position in found.items():
                if position.pid and not _lives(position.pid):
                    raise self._gone(end, position, "its process has ended")

    def _name(self, position: Position) -> str | None:
        return self._names[position.tensor] if position.tensor < len(self._names) else None

    def _late(self, end: int, position: Position) -> WeightSyncError:
        did, found = f"did nothing for {self._timeout_s:g} s", f"it stands at step {position.step} of the data"
        remedy = "see its log; start it again, or raise weight_sync.timeout_s if it only needs longer"
        return self._blamed(WeightSyncTimeout, end, position, did, found, remedy)

    def _gone(self, end: int, position: Position, found: str) -> WeightSyncError:
        remedy = "see its log for the reason, start it again and connect the weights anew"
        return self._blamed(OtherEndFailed, end, position, "is gone", found, remedy)

    def _blamed(
        self, kind: type[WeightSyncError], end: int, position: Position, did: str, found: str, remedy: str
    ) -> WeightSyncError:
        who = "the sender of weights" if end == SENDER else f"the receiver of weights of rank {end - 1}"
        process = f" (process {position.pid})" if position.pid else ""
        name = self._name(position)
        rank = None if end == SENDER else end - 1
        return kind(f"{who}{process} {did}", found=f"{found}{at_tensor(name)}", remedy=remedy, rank=rank, tensor=name)


def path_of(descriptor: int) -> str:
    """By which other processes of this machine open nameless memory."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def open_shared(path: str, flags: int) -> int:
    """A descriptor of another process's nameless memory.

    Raises:
        WeightSyncError: it is not within reach.
    """
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise WeightSyncError(
            "the sender's shared memory cannot be opened",
            found=str(error),
            remedy="run both ends on one machine, as one user and in one process namespace; between containers "
            "use the transport collective",
        ) from error


def machine_id() -> str:
    """The same for processes that can open each other's memory: one boot, one process namespace, one user."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return f"{platform.node()} {os.getuid()}"
    return f"{boot.read_text(encoding='ascii').strip()} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


def _lives(pid: int) -> bool:
    """Whether a process of this machine runs; one that has ended and was not waited for yet does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
