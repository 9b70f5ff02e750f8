"""The conversation: introductions, strangers, silence, messages in pieces."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.weights import (
    Address,
    DiskInlet,
    DiskOutlet,
    NamedSource,
    Receiver,
    Sender,
    SharedMemoryInlet,
    SharedMemoryOutlet,
    TensorSink,
    WeightSyncError,
    WeightSyncTimeout,
)
from quartet.weights.control import Channel, PeerGone, check_introduction, introduction


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    # A pair of Unix sockets has no such option; a listening one gives two ends that do.
    ours.close(), theirs.close()
    listener = socket.create_server(("127.0.0.1", 0))
    other = socket.create_connection(listener.getsockname())
    connection, _ = listener.accept()
    channel = Channel(connection, "the other end", 1.0)
    yield channel, other
    channel.close()
    other.close()
    listener.close()


def test_messages_come_whole_however_they_are_cut(pair: tuple[Channel, socket.socket]) -> None:
    channel, other = pair
    data = b"\0\0\0\x0e" + b'{"type": "at"}' + b"\0\0\0\x02" + b"{}"
    for byte in data[:-1]:
        other.sendall(bytes([byte]))
    assert channel.receive(1.0) == {"type": "at"}
    assert channel.receive(0.0) is None
    other.sendall(data[-1:])
    assert channel.receive(1.0) == {}


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\x03abc", b"\0\0\0\x02[]"])
def test_what_is_no_message_ends_the_connection(pair: tuple[Channel, socket.socket], data: bytes) -> None:
    channel, other = pair
    other.sendall(data)
    with pytest.raises(PeerGone, match="the other end sends something"):
        channel.receive(1.0)


def test_a_closed_connection_is_noticed_at_once(pair: tuple[Channel, socket.socket]) -> None:
    channel, other = pair
    other.close()
    with pytest.raises(PeerGone):
        channel.receive(30.0)


@pytest.mark.parametrize("text", ["", "localhost", "localhost/abc", "localhost:1", "localhost:x/abc", ":1/abc"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(WeightSyncError, match="no address"):
        Address.parse(text)


def test_an_address_is_text() -> None:
    address = Address("10.0.0.7", 4123, "0abc")
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    ("change", "same_torch", "problem"),
    [
        ({"wire_format": 99}, False, "another wire format"),
        ({"transport": "disk"}, False, "differ in their transport"),
        ({"byte_order": "big"}, False, "differ in their byte order"),
        ({"torch": "1.0.1"}, True, "the same torch release"),
        ({"torch": "1.0.1"}, False, None),
        ({"torch": torch.__version__.split("+")[0] + "+cu999"}, True, None),
    ],
)
def test_ends_that_do_not_fit_together(change: dict[str, Any], same_torch: bool, problem: str | None) -> None:
    mine = introduction("collective", 0)
    theirs = introduction("collective", 1) | change
    if problem is None:
        check_introduction(mine, theirs, same_torch=same_torch)
    else:
        with pytest.raises(WeightSyncError, match=problem):
            check_introduction(mine, theirs, same_torch=same_torch)


def test_both_ends_hear_that_they_do_not_fit(tmp_path: Path) -> None:
    sender = Sender(DiskOutlet(tmp_path), timeout_s=5)
    errors: list[WeightSyncError] = []

    def connect() -> None:
        try:
            sender.connect()
        except WeightSyncError as error:
            errors.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    with pytest.raises(WeightSyncError, match="differ in their transport"):
        Receiver(SharedMemoryInlet(), sender.address, timeout_s=5)
    thread.join()
    assert "'disk' here, 'shared_memory' at rank 0" in str(errors[0])
    sender.close()


def test_strangers_and_second_comers_are_turned_away() -> None:
    sender = Sender(SharedMemoryOutlet(), num_receivers=1, timeout_s=5)
    thread = threading.Thread(target=sender.connect)
    thread.start()
    address = sender.address
    wrong = Address(address.host, address.port, "guess")
    for where, rank in ((wrong, 0), (address, 7)):
        with pytest.raises(WeightSyncError, match="turned this receiver away"):
            Receiver(SharedMemoryInlet(), where, rank=rank, timeout_s=5)
    with socket.create_connection((address.host, address.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        receiver = Receiver(SharedMemoryInlet(), address, timeout_s=5)
    thread.join()
    receiver.close()
    sender.close()


def test_who_does_not_come_is_named() -> None:
    sender = Sender(SharedMemoryOutlet(), num_receivers=3, timeout_s=5)
    receiver: list[Receiver] = []
    thread = threading.Thread(target=lambda: receiver.append(Receiver(SharedMemoryInlet(), sender.address, rank=1)))
    thread.start()
    with pytest.raises(WeightSyncTimeout, match="1 of 3, missing rank 0, rank 2"):
        sender.connect(timeout_s=0.5)
    thread.join()
    receiver[0].close()
    sender.close()


def test_nobody_at_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(WeightSyncError, match="cannot be reached"):
        Receiver(DiskInlet(), Address("127.0.0.1", port, "x"), timeout_s=1)


def test_a_sender_that_never_begins_is_a_timeout() -> None:
    sender = Sender(SharedMemoryOutlet(), timeout_s=5)
    thread = threading.Thread(target=sender.connect)
    thread.start()
    receiver = Receiver(SharedMemoryInlet(), sender.address, timeout_s=0.2)
    thread.join()
    sink = TensorSink([("w", torch.zeros(1))])
    with pytest.raises(WeightSyncTimeout, match="to begin a sync"):
        receiver.receive(sink)
    sender.close()
    with pytest.raises(WeightSyncError, match="is gone"):
        receiver.receive(sink)
    receiver.close()


def test_publishing_needs_no_receiver(tmp_path: Path) -> None:
    sender = Sender(DiskOutlet(tmp_path), num_receivers=0)
    sender.connect()
    assert sender.send(NamedSource(lambda: {"w": torch.ones(2)}.items()), 1).version == 1
    sender.close()
