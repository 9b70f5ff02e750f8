"""Messages to and from a child process, by a thread that never waits for one that stands still."""

from __future__ import annotations

import pickle
import select
import socket
import struct
import time
from typing import Any

_HEAD = struct.Struct("!i")
"""Bytes of the pickle that follows, as ``multiprocessing.connection.Connection`` has it, which is the child's end."""
_READ_BYTES = 1 << 18
_LONGEST_MS = (1 << 31) - 1


class ChannelTimeout(Exception):
    """The child takes nothing."""


class Channel:
    """
    Args:
        wire: a stream socket; owned from now on.
    """

    def __init__(self, wire: socket.socket) -> None:
        wire.setblocking(False)
        self._wire = wire
        self._buffer = bytearray()
        self.heard = time.monotonic()
        """When anything came last."""

    def fileno(self) -> int:
        return self._wire.fileno()

    def send(self, message: object, patience_s: float) -> None:
        """Takes in what comes meanwhile: a child that waits for its own words to be read takes no others.

        Raises:
            ChannelTimeout: nothing moved either way for so long.
            EOFError: the child is gone.
        """
        data = pickle.dumps(message)
        rest = memoryview(_HEAD.pack(len(data)) + data)
        moved = time.monotonic()
        while rest:
            left = moved + patience_s - time.monotonic()
            events = self._wait(select.POLLIN | select.POLLOUT, left)
            if not events:
                raise ChannelTimeout
            try:
                if events & ~select.POLLOUT:
                    self._read()
                if events & select.POLLOUT:
                    rest = rest[self._wire.send(rest) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise EOFError from error
            moved = time.monotonic()

    def receive(self, timeout_s: float) -> list[Any]:
        """The messages that have come; waits for the first at most so long.

        Raises:
            EOFError: the child is gone, and there is none.
            ValueError: what came is no message.
        """
        messages = self._messages()
        if not messages and self._wait(select.POLLIN, timeout_s):
            try:
                self._read()
            except ConnectionError as error:
                raise EOFError from error
            messages = self._messages()
        return messages

    def _wait(self, events: int, timeout_s: float) -> int:
        poll = select.poll()  # ``select`` itself knows no descriptors above 1023
        poll.register(self._wire, events)
        return next((found for _, found in poll.poll(min(max(0.0, timeout_s) * 1000, _LONGEST_MS))), 0)

    def _read(self) -> None:
        data = self._wire.recv(_READ_BYTES)
        if not data:
            raise EOFError
        self.heard = time.monotonic()
        self._buffer += data

    def _messages(self) -> list[Any]:
        found, start = [], 0
        while len(self._buffer) >= start + _HEAD.size:
            (size,) = _HEAD.unpack_from(self._buffer, start)
            end = start + _HEAD.size + size
            if size < 0:
                raise ValueError(f"a message of {size} bytes")
            if len(self._buffer) < end:
                break
            try:
                found.append(pickle.loads(memoryview(self._buffer)[start + _HEAD.size : end]))
            except Exception as error:  # Whatever the bytes do to a reader: they are no message.
                raise ValueError(f"a message that cannot be read ({type(error).__name__}: {error})") from error
            start = end
        del self._buffer[:start]
        return found

    def close(self) -> None:
        self._wire.close()
