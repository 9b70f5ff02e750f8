"""One sync as each end sees it: what to tell, what to wait for, and how a wait ends when nothing comes.

============ ===================================== ========== ==========================================
sender tells  meaning                               answer     meaning
============ ===================================== ========== ==========================================
``join``      form the collective group             joined
``announce``  version, tensors, the way of the data ready      everything fits, the data may come
``at``        tensor ``index`` is the next one
``bucket``    bucket ``number`` is there            taken      its buffer may be used again
``seal``      the manifest                          verified   every digest is right
``commit``    all receivers have verified           committed  the new version is served
``abort``     given up, with the reason             failed     the same from a receiver, at any time
============ ===================================== ========== ==========================================

Every message carries the number of its sync. What is left over from one that failed is recognised by it and skipped.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from quartet.weights.control import Channel, Hub, Message, PeerGone
from quartet.weights.errors import (
    WeightMismatch,
    WeightsRefused,
    WeightSyncError,
    WeightSyncTimeout,
    at_tensor,
)
from quartet.weights.manifest import TensorSpec

_POLL_S = 2e-4
_EXPLANATION_S = 1.0
"""A connection that breaks is noticed before the reason arrives on the other one."""
_ANSWERS = ("joined", "ready", "taken", "verified", "committed")


class Exchange:
    """The sender's end of one sync."""

    def __init__(self, hub: Hub, sync: int, version: int) -> None:
        self.hub = hub
        self.sync = sync
        self.version = version
        self.at: str | None = None
        """The tensor that is under way."""
        self._answers: dict[tuple[int, str], int] = {}

    def tell(self, kind: str, **fields: Any) -> None:
        self.hub.tell({"type": kind, "sync": self.sync, **fields}, at=self.at)

    def wait(self, kind: str, number: int = 0, *, doing: str) -> None:
        """Until every receiver has answered ``kind`` (of buckets: up to ``number``).

        Raises:
            WeightSyncError: a receiver failed, is gone or is late; it is named.
        """
        try:
            self.hub.wait(lambda rank: self._has(rank, kind, number), self._note, at=self.at, doing=doing)
        except WeightSyncTimeout as error:
            raise self._who_is_late(error, kind, number, doing) from error.__cause__

    def until(self, done: Callable[[], bool], *, behind: str, number: int, doing: str) -> None:
        """Until ``done``, with an ear to the receivers.

        Args:
            behind: the answer (up to ``number``) by which the receiver that holds things up is found.

        Raises:
            WeightSyncError: as ``wait``.
        """
        deadline = time.monotonic() + self.hub.timeout_s
        while not done():
            for rank, channel in list(self.hub.channels.items()):
                try:
                    while (message := channel.receive(0.0)) is not None:
                        self._note(rank, message)
                except PeerGone as error:
                    raise self.hub.gone(rank, error, self.at) from error
                except WeightSyncTimeout as error:
                    raise self._who_is_late(error, behind, number, doing) from error.__cause__
            if time.monotonic() > deadline:
                late = [rank for rank in self.hub.channels if not self._has(rank, behind, number)]
                raise self.hub.late(late[0] if late else min(self.hub.channels), self.at, doing)
            time.sleep(_POLL_S)

    def broke(self, error: RuntimeError) -> WeightSyncError:
        """What to raise for a failure of the data's way: what a receiver says about it, if it says so soon."""
        try:
            soon = time.monotonic() + _EXPLANATION_S
            self.until(lambda: time.monotonic() > soon, behind="taken", number=0, doing="the data")
        except WeightSyncError as explained:
            return explained
        return _broken(error, self.at)

    def abort(self, reason: str) -> None:
        """Tells whoever is still there."""
        for channel in self.hub.channels.values():
            with contextlib.suppress(PeerGone):
                channel.send({"type": "abort", "sync": self.sync, "version": self.version, "reason": reason})

    def _who_is_late(self, error: WeightSyncTimeout, kind: str, number: int, doing: str) -> WeightSyncTimeout:
        """A receiver that got tired of waiting (and is still there) waits for another one; where all of them are tired,
        for us."""
        if error.rank not in self.hub.channels:
            return error
        others = [rank for rank in self.hub.channels if rank != error.rank and not self._has(rank, kind, number)]
        soon = time.monotonic() + _EXPLANATION_S
        late = [rank for rank in others if not self._is_tired(rank, soon) and not self._has(rank, kind, number)]
        return self.hub.late(late[0], self.at, doing) if late else error

    def _is_tired(self, rank: int, deadline: float) -> bool:
        """Whether a receiver says, soon, that it has failed, too."""
        try:
            while (message := self.hub.channels[rank].receive(max(0.0, deadline - time.monotonic()))) is not None:
                self._note(rank, message)
        except (PeerGone, WeightSyncError):
            return True
        return False

    def _has(self, rank: int, kind: str, number: int) -> bool:
        return self._answers.get((rank, kind), -1) >= number

    def _note(self, rank: int, message: Message) -> None:
        if message.get("sync") != self.sync:
            return
        kind = message.get("type")
        if kind == "failed":
            raise self._failure(rank, message)
        if kind in _ANSWERS:
            self._answers[rank, str(kind)] = int(message.get("number", 0))

    def _failure(self, rank: int, message: Message) -> WeightSyncError:
        peer = self.hub.channels[rank].peer
        problem, found, tensor = (str(message.get(key)) for key in ("problem", "found", "tensor"))
        if message.get("error") == WeightMismatch.__name__:
            sent, arrived = str(message.get("sent")), str(message.get("arrived"))
            return WeightMismatch(tensor, sent=sent, arrived=arrived, version=self.version, rank=rank)
        kinds = {kind.__name__: kind for kind in (WeightsRefused, WeightSyncTimeout)}
        return kinds.get(str(message.get("error")), WeightSyncError)(
            f"a receiver of weights failed: {problem}",
            found=f"{found} ({peer})",
            remedy=str(message.get("remedy")),
            rank=rank,
            tensor=None if message.get("tensor") is None else tensor,
        )


class Link:
    """The receiver's end, over all syncs."""

    def __init__(self, channel: Channel, rank: int, timeout_s: float) -> None:
        self.channel = channel
        self.rank = rank
        self.timeout_s = timeout_s
        self.sync = 0
        self.at: str | None = None
        self.specs: Sequence[TensorSpec] = ()
        self._arrived: deque[Message] = deque()

    def first(self, version: int | None = None) -> Message:
        """The message that begins the next sync, ``join`` or ``announce``.

        Args:
            version: what is waited for; None: whatever comes.

        Raises:
            WeightSyncError: the sender is gone, says nothing or has given up already.
        """
        self.at, self.specs = None, ()
        before, self.sync = self.sync, -1
        # An abort that lay here already is of a sync that this receiver was never in, unless it is the one waited for.
        waited = False
        try:
            while True:
                message = self._read(0.0)
                if message is None:
                    waited, message = True, self._next("to begin a sync")
                if message.get("sync", 0) <= before:
                    continue
                if message.get("type") != "abort":
                    self.sync = message["sync"]
                    return message
                before = message["sync"]
                if waited or (version is not None and message.get("version") == version):
                    raise self._given_up(message)
        except BaseException:
            self.sync = before
            raise

    def expect(self, kind: str, doing: str) -> Message:
        """As ``next``, for a message of one kind."""
        message = self.next(doing)
        if message.get("type") != kind:
            raise unexpected(f"{message.get('type')!r} where {kind!r} belongs")
        return message

    def next(self, doing: str) -> Message:
        """The next message of this sync.

        Raises:
            WeightSyncError: the sender is gone, says nothing or has given up.
        """
        while True:
            message = self._next(doing)
            if message.get("sync") != self.sync:
                continue
            if message.get("type") == "abort":
                raise self._given_up(message)
            return message

    def until(self, done: Callable[[], bool], *, doing: str) -> None:
        """Until ``done``, with an ear to the sender.

        Raises:
            WeightSyncError: as ``next``.
        """
        deadline = time.monotonic() + self.timeout_s
        while not done():
            try:
                while (message := self.channel.receive(0.0)) is not None:
                    if message.get("type") == "abort" and message.get("sync") == self.sync:
                        raise self._given_up(message)
                    self._arrived.append(message)
            except PeerGone as error:
                raise self._gone(error) from error
            if time.monotonic() > deadline:
                raise self._late(doing)
            time.sleep(_POLL_S)

    def broke(self, error: RuntimeError) -> WeightSyncError:
        """What to raise for a failure of the data's way: what the sender says about it, if it says so soon."""
        try:
            soon = time.monotonic() + _EXPLANATION_S
            self.until(lambda: time.monotonic() > soon, doing="to say why the data stopped")
        except WeightSyncError as explained:
            return explained
        return _broken(error, self.at)

    def answer(self, kind: str, **fields: Any) -> None:
        """
        Raises:
            WeightSyncError: the sender is gone.
        """
        try:
            self.channel.send({"type": kind, "sync": self.sync, **fields})
        except PeerGone as error:
            raise self._gone(error) from error

    def fail(self, error: BaseException) -> None:
        """Tells the sender, if it is still there."""
        message: Message = {"type": "failed", "sync": self.sync, "error": type(error).__name__, "tensor": self.at}
        message |= {"problem": str(error), "found": type(error).__name__, "remedy": "see the receiver's log"}
        if isinstance(error, WeightSyncError):
            message |= {"problem": error.problem, "found": error.found, "remedy": error.remedy, "tensor": error.tensor}
        if isinstance(error, WeightMismatch):
            message |= {"sent": error.sent, "arrived": error.arrived}
        with contextlib.suppress(PeerGone):
            self.channel.send(message)

    def _next(self, doing: str) -> Message:
        message = self._read(self.timeout_s)
        if message is None:
            raise self._late(doing)
        return message

    def _read(self, timeout_s: float) -> Message | None:
        if self._arrived:
            return self._arrived.popleft()
        try:
            return self.channel.receive(timeout_s)
        except PeerGone as error:
            raise self._gone(error) from error

    def _late(self, doing: str) -> WeightSyncError:
        remedy = "see what the trainer does; raise timeout_s if it only needs longer"
        what, found = f"did nothing for {self.timeout_s:g} s", f"this receiver waits for it {doing}"
        return self._ended(what, found, remedy, WeightSyncTimeout)

    def _gone(self, error: PeerGone) -> WeightSyncError:
        remedy = "see the trainer's log for the reason; make a new receiver for the next sender"
        return self._ended("is gone", str(error), remedy)

    def _given_up(self, message: Message) -> WeightSyncError:
        remedy = "see the trainer's log; the next sync starts anew"
        return self._ended("gave up the weight sync", str(message.get("reason")), remedy)

    def _ended(
        self, what: str, found: str, remedy: str, kind: type[WeightSyncError] = WeightSyncError
    ) -> WeightSyncError:
        """What the sender did, and where."""
        found += at_tensor(self.at)
        return kind(f"{self.channel.peer} {what}", found=found, remedy=remedy, rank=0, tensor=self.at)


def _broken(error: RuntimeError, tensor: str | None) -> WeightSyncError:
    return WeightSyncError(
        "the group for weight syncs broke",
        found=f"{error}{at_tensor(tensor)}",
        remedy="see the logs of the other processes; the next sync forms another group",
        tensor=tensor,
    )


def unexpected(found: str) -> WeightSyncError:
    """The two ends do not follow one protocol."""
    return WeightSyncError(
        "the sender of weights asks for something that makes no sense here",
        found=found,
        remedy="install the same release of quartet on both ends and use the same transport",
    )
