"""Nameless memory that several processes of a machine see.

Made by ``memfd_create``: other processes open it as a descriptor of the process that made it, and the kernel frees it
with the last one that holds it. So there is nothing to clean up after a crash, nothing in ``/dev/shm`` to leak, and no
limit of ``/dev/shm`` (64 MB in a container by default). All run on one machine, under one user and in one process
namespace, on Linux.

Where the ends of a sync stand, so that one that hangs, fails or dies is noticed by the others.

Each end notes its position on a board that all of them read: shared memory on one machine, the store of the process
group between machines. The sender waits for its receivers, receivers wait for the sender, and every wait ends when the
other end stands still for too long. So no call of a sync takes longer than the silence that is allowed, whatever
happens to the driver.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from quartet.observe.memory import available_bytes
from quartet.weights.manifest import PeerFailed, TensorSpec, WeightSyncError, WeightSyncTimeout, tensor_clause

ALIGNMENT = 64
"""Bytes between the beginnings of tensors: what torch gives its own."""


def memory_layout(specs: Sequence[TensorSpec]) -> tuple[dict[str, int], int]:
    """Decides where each tensor begins, in bytes, and counts the bytes of all."""
    offsets, used = {}, 0
    for spec in specs:
        offsets[spec.name] = used
        used += -(-spec.num_bytes // ALIGNMENT) * ALIGNMENT
    return offsets, max(used, ALIGNMENT)


class SharedSegment:
    """
    Args:
        owner: writes go to all who see it. Who else writes changes a copy of its own.

    Attributes:
        bytes: all of it, flat uint8.
    """

    def __init__(self, descriptor: int, num_bytes: int, *, owner: bool) -> None:
        self.descriptor = descriptor
        self.num_bytes = num_bytes
        access = mmap.ACCESS_WRITE if owner else mmap.ACCESS_COPY
        self.bytes = torch.from_numpy(np.frombuffer(mmap.mmap(descriptor, num_bytes, access=access), dtype=np.uint8))
        self.close = weakref.finalize(self, os.close, descriptor)
        """Nobody can open it any more; the mapping goes with the last tensor that views it."""

    @classmethod
    def create(cls, num_bytes: int) -> SharedSegment:
        """
        Raises:
            WeightSyncError: no memory.
        """
        # The kernel would hand out page after page until it kills a process.
        if num_bytes > (available := available_bytes()):
            raise _no_memory(num_bytes, f"{available / 2**30:.2f} GiB are available")
        descriptor = os.memfd_create("quartet-weights", os.MFD_CLOEXEC)
        try:
            # Reserved now: memory that is not there must fail here, not with a bus error at the first write.
            os.posix_fallocate(descriptor, 0, num_bytes)
            return cls(descriptor, num_bytes, owner=True)
        except OSError as error:
            os.close(descriptor)
            raise _no_memory(num_bytes, str(error)) from error

    @classmethod
    def open(cls, path: str, num_bytes: int) -> SharedSegment:
        """Opens another process's, by its ``path``.

        Raises:
            WeightSyncError: it is not within reach.
        """
        return cls(open_shared(path, os.O_RDONLY), num_bytes, owner=False)

    @property
    def path(self) -> str:
        return descriptor_path(self.descriptor)

    def tensors(self, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
        offsets, _ = memory_layout(specs)
        return {
            spec.name: self.bytes[offsets[spec.name] :][: spec.num_bytes].view(spec.torch_dtype).view(spec.shape)
            for spec in specs
        }


def descriptor_path(descriptor: int) -> str:
    """Returns the path by which other processes of this machine open nameless memory."""
    return f"/proc/{os.getpid()}/fd/{descriptor}#{os.fstat(descriptor).st_ino}"


def open_shared(path: str, flags: int) -> int:
    """Opens a descriptor of another process's nameless memory.

    Raises:
        WeightSyncError: it is not within reach.
    """
    name, _, inode = path.partition("#")
    try:
        descriptor = os.open(name, flags | os.O_CLOEXEC)
        if str(os.fstat(descriptor).st_ino) == inode:
            return descriptor
        os.close(descriptor)
        found = f"{name} is another file by now"
    except OSError as error:
        found = str(error)
    raise WeightSyncError(
        "the sender's shared memory cannot be opened",
        found=found,
        remedy="run both ends on one machine, as one user and in one process namespace; between containers "
        "use the transport collective",
    )


def _no_memory(num_bytes: int, found: str) -> WeightSyncError:
    return WeightSyncError(
        "there is no shared memory for the weights",
        found=f"{num_bytes / 2**30:.2f} GiB asked for, {found}",
        remedy="free memory on this machine, or use the transport collective",
    )


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
class SyncPosition:
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


class MemoryBoard:
    """In nameless shared memory, which other processes of the machine open by ``path``.

    Attributes:
        interval_s: between two looks of an end that waits.

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
        return descriptor_path(self._descriptor)

    def read(self, end: int) -> SyncPosition:
        row = os.pread(self._descriptor, self._ROW.size, end * self._ROW.size)
        return SyncPosition(*self._ROW.unpack(row)) if row else SyncPosition()

    def write(self, end: int, position: SyncPosition) -> None:
        os.pwrite(self._descriptor, self._ROW.pack(*astuple(position)), end * self._ROW.size)


class StoreBoard:
    """In the store of a process group, whose server is the sender; under a name of its own for each sync.

    ``read`` and ``write`` raise RuntimeError where the store went with the sender.
    """

    interval_s = 0.02

    def __init__(self, store: Any, name: str) -> None:
        self._store = dist.PrefixStore(name, store)

    def read(self, end: int) -> SyncPosition:
        key = str(end)
        return SyncPosition(*map(int, self._store.get(key).split())) if self._store.check([key]) else SyncPosition()

    def write(self, end: int, position: SyncPosition) -> None:
        self._store.set(str(end), " ".join(map(str, astuple(position))))


Board = MemoryBoard | StoreBoard


class SyncProgress:
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
        self._mine = SyncPosition(pid=os.getpid() if self._is_near else 0)
        self._looked_s = 0.0
        self.note()

    def note(self, **changes: int) -> None:
        """Notes how far this end has come: it is through with a ``step``, or at a ``tensor``."""
        self._mine = replace(self._mine, **changes)
        try:
            self._board.write(self._end, self._mine)
        except RuntimeError as error:
            raise self._gone(SENDER, replace(self._mine, pid=0), str(error)) from error

    def fail(self) -> None:
        """Notes that this end has failed; the others notice at their next look."""
        try:
            self._board.write(self._end, replace(self._mine, failed=1))
        except RuntimeError:
            return  # the others notice that, too

    def wait(self, step: int, ready: Callable[[], bool] | None = None) -> None:
        """Waits until every other end is through with ``step``, or ``ready`` gives True.

        Raises:
            WeightSyncTimeout: of the one that stands still and holds things up.
            OtherEndFailed: another end has failed or is gone.
        """
        seen: dict[int, SyncPosition] = {}
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
        """Returns what to raise when the transport breaks: what the board says about it, if it says so soon."""
        soon = time.monotonic() + _EXPLANATION_S
        try:
            self.wait(0, lambda: time.monotonic() > soon)
        except WeightSyncError as explained:
            return explained
        return PeerFailed(
            "the connection that carries the weights broke",
            found=f"{error}{tensor_clause(self._name(self._mine))}",
            remedy="see the logs of the other processes; between machines, all of them must reach the address of the "
            "sender's default route",
            tensor=self._name(self._mine),
        )

    def _found(self) -> dict[int, SyncPosition]:
        try:
            return {end: self._board.read(end) for end in self._others}
        except RuntimeError as error:
            raise self._gone(SENDER, replace(self._mine, pid=0), str(error)) from error

    def _check_lives(self, found: dict[int, SyncPosition]) -> None:
        for end, position in found.items():
            if position.failed:
                remedy = "see its own error or log; the next sync starts anew"
                at = f"step {position.step} of the data"
                raise self._blamed(PeerFailed, end, position, "gave up the weight sync", at, remedy)
        now_s = time.monotonic()
        if self._is_near and now_s - self._looked_s > _LIFE_S:
            self._looked_s = now_s
            for end, position in found.items():
                if position.pid and not _lives(position.pid):
                    raise self._gone(end, position, "its process has ended")

    def _name(self, position: SyncPosition) -> str | None:
        return self._names[position.tensor] if position.tensor < len(self._names) else None

    def _late(self, end: int, position: SyncPosition) -> WeightSyncError:
        did, found = f"did nothing for {self._timeout_s:g} s", f"it stands at step {position.step} of the data"
        remedy = "see its log; start it again, or raise weight_sync.timeout_s if it only needs longer"
        return self._blamed(WeightSyncTimeout, end, position, did, found, remedy)

    def _gone(self, end: int, position: SyncPosition, found: str) -> WeightSyncError:
        remedy = "see its log for the reason, start it again and connect the weights anew"
        return self._blamed(PeerFailed, end, position, "is gone", found, remedy)

    def _blamed(
        self, kind: type[WeightSyncError], end: int, position: SyncPosition, did: str, found: str, remedy: str
    ) -> WeightSyncError:
        who = "the sender of weights" if end == SENDER else f"the receiver of weights of rank {end - 1}"
        process = f" (process {position.pid})" if position.pid else ""
        name = self._name(position)
        rank = None if end == SENDER else end - 1
        return kind(
            f"{who}{process} {did}", found=f"{found}{tensor_clause(name)}", remedy=remedy, rank=rank, tensor=name
        )


def machine_id() -> str:
    """Returns the same for processes that can open each other's memory: one boot, one process namespace, one user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


def _lives(pid: int) -> bool:
    """Tells whether a process of this machine runs; one that has ended and was not waited for yet does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
