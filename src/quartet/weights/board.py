"""Where the ends of a sync stand, so that one that hangs, fails or dies is noticed by the others.

Each end notes its position on a board that all of them read: shared memory on one machine, the store of the process
group between machines. The sender waits for its receivers, receivers wait for the sender, and every wait ends when the
other end stands still for too long. So no call of a sync takes longer than the silence that is allowed, whatever
happens to the driver.
"""

from __future__ import annotations

import os
import platform
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from quartet.weights.errors import OtherEndFailed, WeightSyncError, WeightSyncTimeout, at_tensor
from quartet.weights.shared_memory import open_shared, path_of

SENDER = 0
"""The sender's place on a board; receiver ``rank`` has ``1 + rank``."""
READY = 1
"""A receiver's first step: everything fits. With bucket ``n`` an end is through at step ``READY + 1 + n``."""
_POLL_S = 5e-5
_LIFE_S = 0.02
"""Between two looks whether the other processes live."""
_EXPLANATION_S = 1.0
"""A connection may break before the reason is on the board."""


@dataclass(frozen=True)
class Position:
    """
    Attributes:
        step: that this end is through with; 0 before the first one.
        tensor: index of the tensor that it is at.
        pid: of its process, if it is on the sender's machine; 0: not known.
        failed: 1 where it has given up.
        beat: changes while the sender waits for a receiver that goes on.
    """

    step: int = 0
    tensor: int = 0
    pid: int = 0
    failed: int = 0
    beat: int = 0


class Board(Protocol):
    """
    Attributes:
        interval_s: between two looks of an end that waits.
    """

    interval_s: float

    def read(self, end: int) -> Position: ...

    def write(self, end: int, position: Position) -> None:
        """
        Raises:
            RuntimeError: the board went with the sender, which kept it; so does ``read``.
        """


class MemoryBoard:
    """In nameless shared memory, which other processes of the machine open by ``path``.

    Read and written by system calls: with a position, the reader also sees the data that were there when it was noted.
    """

    interval_s = _POLL_S
    _ROW = struct.Struct("=5q")

    def __init__(self, path: str | None = None) -> None:
        if path is None:
            self._descriptor = os.memfd_create("quartet-board", os.MFD_CLOEXEC)
        else:
            self._descriptor = open_shared(path, os.O_RDWR)
        weakref.finalize(self, os.close, self._descriptor)

    @property
    def path(self) -> str:
        return path_of(self._descriptor)

    def read(self, end: int) -> Position:
        row = os.pread(self._descriptor, self._ROW.size, end * self._ROW.size)
        return Position(*self._ROW.unpack(row)) if row else Position()

    def write(self, end: int, position: Position) -> None:
        os.pwrite(self._descriptor, self._ROW.pack(*astuple(position)), end * self._ROW.size)


class StoreBoard:
    """In the store of a process group, whose server is the sender; under a name of its own for each sync."""

    interval_s = 0.02

    def __init__(self, store: Any, name: str) -> None:
        self._store = dist.PrefixStore(name, store)

    def read(self, end: int) -> Position:
        key = str(end)
        return Position(*map(int, self._store.get(key).split())) if self._store.check([key]) else Position()

    def write(self, end: int, position: Position) -> None:
        self._store.set(str(end), " ".join(map(str, astuple(position))))


class Progress:
    """One end's place on the board, and its waits for others.

    Args:
        end: whose, ``SENDER`` or ``1 + rank``.
        others: whom it waits for.
        names: of the tensors that are sent.
        timeout_s: how long one of them may stand still.
        machine: the sender's; only there a process is known by its number.
    """

    def __init__(
        self, board: Board, end: int, others: Sequence[int], names: Sequence[str], timeout_s: float, machine: str
    ) -> None:
        self._board, self._end, self._others = board, end, others
        self._names, self._timeout_s = names, timeout_s
        self._is_near = machine == machine_id()
        self._mine = Position(pid=os.getpid() if self._is_near else 0)
        self._looked_s = 0.0
        self.note()

    def note(self, **changes: int) -> None:
        """This end has come so far: it is through with a ``step``, or at a ``tensor``."""
        self._mine = replace(self._mine, **changes)
        try:
            self._board.write(self._end, self._mine)
        except RuntimeError as error:
            raise self._gone(SENDER, replace(self._mine, pid=0), str(error)) from error

    def fail(self) -> None:
        """This end has failed; the others notice at their next look."""
        try:
            self._board.write(self._end, replace(self._mine, failed=1))
        except RuntimeError:
            return  # the others notice that, too

    def wait(self, step: int, ready: Callable[[], bool] | None = None) -> None:
        """Until every other end is through with ``step``, or ``ready`` gives True.

        Raises:
            WeightSyncTimeout: of the one that stands still and holds things up.
            OtherEndFailed: another end has failed or is gone.
        """
        seen: dict[int, Position] = {}
        moved_s = dict.fromkeys(self._others, time.monotonic())
        looked_s = 0.0
        while not (ready is not None and ready()):
            now_s = time.monotonic()
            if now_s - looked_s >= self._board.interval_s:
                looked_s = now_s
                found = self._found()
                if ready is None and all(position.step >= step for position in found.values()):
                    return
                self._check_lives(found)
                moved = [end for end in self._others if found[end] != seen.get(end)]
                moved_s |= dict.fromkeys(moved, now_s)
                if moved and seen and self._end == SENDER:
                    self.note(beat=self._mine.beat + 1)  # who waits for us sees that we go on
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
        return OtherEndFailed(
            "the connection that carries the weights broke",
            found=f"{error}{at_tensor(self._name(self._mine))}",
            remedy="see the logs of the other processes; between machines, all of them must reach the address of the "
            "sender's default route",
            tensor=self._name(self._mine),
        )

    def _found(self) -> dict[int, Position]:
        try:
            return {end: self._board.read(end) for end in self._others}
        except RuntimeError as error:
            raise self._gone(SENDER, replace(self._mine, pid=0), str(error)) from error

    def _check_lives(self, found: dict[int, Position]) -> None:
        for end, position in found.items():
            if position.failed:
                remedy = "see its own error or log; the next sync starts anew"
                at = f"step {position.step} of the data"
                raise self._blamed(OtherEndFailed, end, position, "gave up the weight sync", at, remedy)
        now_s = time.monotonic()
        if self._is_near and now_s - self._looked_s > _LIFE_S:
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
