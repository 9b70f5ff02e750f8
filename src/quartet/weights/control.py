"""The conversation beside the data: JSON messages over TCP between the sender and its receivers.

A message is its length in 4 bytes, big-endian, and that many bytes of JSON. Every wait has an end, a peer that dies is
noticed at once because its connection closes, and a connection without the address's token is turned away.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from quartet.weights.errors import WeightSyncError, WeightSyncTimeout, at_tensor
from quartet.weights.manifest import WIRE_FORMAT, other_wire_format

Message = dict[str, Any]
_LENGTH = struct.Struct("!I")
_MAX_MESSAGE = 2**28
HANDSHAKE_S = 10.0
"""A connection that has not introduced itself by then is not one of ours."""


class PeerGone(Exception):
    """The other end closed the connection, or the machine did so for it."""


@dataclass(frozen=True)
class Address:
    """Where a sender listens. As text, ``host:port/token``, it goes to the receivers by any way there is."""

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}/{self.token}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """
        Raises:
            WeightSyncError: not ``host:port/token``.
        """
        place, _, token = text.partition("/")
        host, _, port = place.rpartition(":")
        if not host or not port.isdigit() or not token:
            raise WeightSyncError(
                "this is no address of a weight sender",
                found=repr(text),
                remedy="pass on str(sender.address) unchanged",
            )
        return cls(host, int(port), token)


class Channel:
    """One connection. ``peer`` names the other end in errors."""

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(timeout_s)
        self.connection = connection
        self.peer = peer
        self._buffer = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)

    def close(self) -> None:
        self._selector.close()
        self.connection.close()

    def send(self, message: Mapping[str, Any]) -> None:
        """
        Raises:
            PeerGone: or a peer that reads nothing until the buffers are full and the time is up.
        """
        body = json.dumps(message).encode()
        try:
            self.connection.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise PeerGone(f"{self.peer}: {error}") from error

    def receive(self, timeout_s: float) -> Message | None:
        """The next message; None when there is none in time (0: none that has arrived already).

        Raises:
            PeerGone
        """
        deadline = time.monotonic() + timeout_s
        while (message := self.parse()) is None:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                return None
            self.fill()
        return message

    def fill(self) -> None:
        """Reads what has arrived; only where the connection is known to be readable.

        Raises:
            PeerGone
        """
        try:
            data = self.connection.recv(2**16)
        except OSError as error:
            raise PeerGone(f"{self.peer}: {error}") from error
        if not data:
            raise PeerGone(f"{self.peer} closed the connection")
        self._buffer += data

    def parse(self) -> Message | None:
        """The first message that has been read in full.

        Raises:
            PeerGone: what arrives is none of ours.
        """
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        end = _LENGTH.size + length
        if length > _MAX_MESSAGE:
            raise PeerGone(f"{self.peer} sends something that is no message")
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            message = json.loads(body)
        except ValueError as error:
            raise PeerGone(f"{self.peer} sends something that is no JSON") from error
        if not isinstance(message, dict):
            raise PeerGone(f"{self.peer} sends something that is no message")
        return message


# Introductions -------------------------------------------------------------------------------------------


def introduction(kind: str, rank: int) -> Message:
    """What both ends say about themselves first."""
    return {
        "type": "hello",
        "wire_format": WIRE_FORMAT,
        "transport": kind,
        "rank": rank,
        "torch": torch.__version__,
        "byte_order": "little" if _LITTLE_ENDIAN else "big",
        "pid": os.getpid(),
        "host": platform.node(),
    }


_LITTLE_ENDIAN = struct.pack("=H", 1) == b"\x01\x00"


def check_introduction(mine: Message, theirs: Message, *, same_torch: bool) -> None:
    """
    Args:
        same_torch: the transport's data pass through torch at both ends (collectives, CUDA handles).

    Raises:
        WeightSyncError: the two ends do not fit together.
    """
    if theirs.get("wire_format") != WIRE_FORMAT:
        raise other_wire_format(theirs.get("wire_format"))
    for what in ("transport", "byte_order"):
        if mine[what] != theirs.get(what):
            raise WeightSyncError(
                f"the two ends of the weight sync differ in their {what.replace('_', ' ')}",
                found=f"{mine[what]!r} here, {theirs.get(what)!r} at {peer_name(theirs)}",
                remedy="use the same transport at both ends, on machines of the same byte order",
            )
    if same_torch and _release(mine["torch"]) != _release(str(theirs.get("torch"))):
        raise WeightSyncError(
            f"{mine['transport']} needs the same torch release at both ends of the weight sync",
            found=f"torch {mine['torch']} here, {theirs.get('torch')} at {peer_name(theirs)}",
            remedy="use shared memory or disk, which need no common version, or install the same torch",
        )


def _release(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def peer_name(hello: Message) -> str:
    return f"rank {hello.get('rank')} (process {hello.get('pid')} on {hello.get('host')})"


def connect(address: Address, hello: Message, *, same_torch: bool, timeout_s: float) -> Channel:
    """A receiver's side of the introduction.

    Raises:
        WeightSyncError: nobody answers, or the two ends do not fit together.
    """
    try:
        connection = socket.create_connection((address.host, address.port), timeout=timeout_s)
    except OSError as error:
        raise WeightSyncError(
            "the weight sender cannot be reached",
            found=f"{address.host}:{address.port}: {error}",
            remedy="make the sender first and pass on its address; between machines give it a host that they can reach",
        ) from error
    channel = Channel(connection, "the sender", timeout_s)
    try:
        channel.send({**hello, "token": address.token})
        answer = channel.receive(timeout_s)
    except PeerGone as error:
        channel.close()
        raise WeightSyncError(
            "the weight sender turned this receiver away",
            found=str(error),
            remedy="pass on str(sender.address) unchanged; each rank from 0 on connects once",
        ) from error
    if answer is None:
        channel.close()
        raise WeightSyncTimeout(
            f"the weight sender did not answer within {timeout_s:g} s",
            found=f"a connection to {address.host}:{address.port} and silence",
            remedy="call sender.connect() while the receivers are made",
        )
    try:
        check_introduction(hello, answer, same_torch=same_torch)
    except WeightSyncError:
        channel.close()
        raise
    channel.peer = f"the sender (process {answer.get('pid')} on {answer.get('host')})"
    return channel


# The sender's side ---------------------------------------------------------------------------------------


class Hub:
    """All connections of one sender.

    Args:
        num_receivers: their ranks are 0 to ``num_receivers - 1``.
        host: where to listen; receivers must be able to reach it.
    """

    def __init__(self, num_receivers: int, *, host: str, timeout_s: float) -> None:
        self.num_receivers = num_receivers
        self.timeout_s = timeout_s
        self.channels: dict[int, Channel] = {}
        self.memberships = 0
        """Counts receivers that came, so a change of who is there shows."""
        self.losses = 0
        """Counts receivers that were let go. One of them may live on and serve what it had."""
        self._listener = socket.create_server((host, 0), backlog=num_receivers + 8)
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_hex(16))

    def close(self) -> None:
        self._listener.close()
        for rank in list(self.channels):
            self.drop(rank)

    def drop(self, rank: int) -> None:
        """The receiver is no longer one of ours; a new one of that rank may come."""
        self.channels.pop(rank).close()
        self.losses += 1

    def missing(self) -> list[int]:
        """Ranks without a living connection."""
        for rank, channel in list(self.channels.items()):
            try:
                while channel.receive(0.0) is not None:
                    pass  # answers to a sync that was given up
            except PeerGone:
                self.drop(rank)
        return [rank for rank in range(self.num_receivers) if rank not in self.channels]

    def accept(self, hello: Message, *, same_torch: bool, timeout_s: float) -> None:
        """Waits until every rank is there.

        Raises:
            WeightSyncTimeout: ranks that did not come are named.
            WeightSyncError: one came that does not fit; it was told why.
        """
        deadline = time.monotonic() + timeout_s
        while missing := self.missing():
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, place = self._listener.accept()
            except TimeoutError:
                raise WeightSyncTimeout(
                    f"not every receiver of weights connected within {timeout_s:g} s",
                    found=f"{self.num_receivers - len(missing)} of {self.num_receivers}, missing "
                    f"{', '.join(f'rank {rank}' for rank in missing)}",
                    remedy=f"look at their logs; they connect to {self.address.host}:{self.address.port}",
                    rank=missing[0],
                ) from None
            self._introduce(Channel(connection, f"{place[0]}:{place[1]}", self.timeout_s), hello, missing, same_torch)

    def _introduce(self, channel: Channel, hello: Message, missing: list[int], same_torch: bool) -> None:
        try:
            theirs = channel.receive(HANDSHAKE_S)
            token = str((theirs or {}).get("token")).encode()
            known = secrets.compare_digest(token, self.address.token.encode())
            if theirs is None or not known or theirs.get("rank") not in missing:
                channel.close()
                return
            channel.send(hello)
            check_introduction(hello, theirs, same_torch=same_torch)
        except PeerGone:
            channel.close()
            return
        except WeightSyncError:
            channel.close()
            raise
        channel.peer = peer_name(theirs)
        self.channels[theirs["rank"]] = channel
        self.memberships += 1

    def tell(self, message: Message, *, at: str | None = None) -> None:
        """Sends ``message`` to all.

        Raises:
            WeightSyncError: a receiver is gone; it is named.
        """
        for rank, channel in list(self.channels.items()):
            try:
                channel.send(message)
            except PeerGone as error:
                raise self.gone(rank, error, at) from error

    def wait(
        self, done: Callable[[int], bool], note: Callable[[int, Message], None], *, at: str | None, doing: str
    ) -> None:
        """Reads messages until ``done`` is true of every rank. ``note`` gets each of them.

        Raises:
            WeightSyncTimeout: of the ranks that are not done, for ``timeout_s`` without any message.
            WeightSyncError: a receiver is gone, whichever; or what ``note`` raises.
        """
        with selectors.DefaultSelector() as selector:
            for rank, channel in self.channels.items():
                selector.register(channel.connection, selectors.EVENT_READ, rank)
            self._note_parsed(note, at)
            while late := [rank for rank in self.channels if not done(rank)]:
                ready = selector.select(self.timeout_s)
                if not ready:
                    raise self.late(late[0], at, doing)
                for key, _ in ready:
                    try:
                        self.channels[key.data].fill()
                    except PeerGone as error:
                        raise self.gone(key.data, error, at) from error
                self._note_parsed(note, at)

    def _note_parsed(self, note: Callable[[int, Message], None], at: str | None) -> None:
        for rank, channel in list(self.channels.items()):
            try:
                while (message := channel.parse()) is not None:
                    note(rank, message)
            except PeerGone as error:
                raise self.gone(rank, error, at) from error

    def gone(self, rank: int, error: PeerGone, at: str | None) -> WeightSyncError:
        peer = self.channels[rank].peer
        self.drop(rank)
        return WeightSyncError(
            f"a receiver of weights is gone: {peer}",
            found=f"{error}{at_tensor(at)}",
            remedy="see its log for the reason, start it again and call sender.connect() before the next sync",
            rank=rank,
            tensor=at,
        )

    def late(self, rank: int, at: str | None, doing: str) -> WeightSyncTimeout:
        peer = self.channels[rank].peer
        self.drop(rank)
        return WeightSyncTimeout(
            f"a receiver of weights did nothing for {self.timeout_s:g} s: {peer}",
            found=f"no answer to {doing}{at_tensor(at)}",
            remedy="start it again and call sender.connect() before the next sync, or raise timeout_s",
            rank=rank,
            tensor=at,
        )
