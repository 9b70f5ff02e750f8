"""A sync from beginning to end, the same for every transport: announce, move the data, seal, verify, commit.

The trainer makes a ``Sender`` over an *outlet*, every engine a ``Receiver`` over the *inlet* of the same kind; the two
halves of a transport move bytes and know nothing of versions and digests. Nothing is written before every receiver has
said that all names and shapes fit, and no new version is served before every receiver has found every digest right.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from quartet.weights.control import Address, Hub, Message, connect, introduction
from quartet.weights.errors import WeightSyncError, unexpected_version
from quartet.weights.exchange import Exchange, Link, unexpected
from quartet.weights.manifest import Manifest, TensorSpec, tensors_from_json
from quartet.weights.sink import WeightSink
from quartet.weights.source import WeightSource

Offer = dict[str, Any]
"""What a receiver needs in order to find the data: JSON."""


class WeightSender(Protocol):
    """What a trainer holds, whatever the transport."""

    def send(self, source: WeightSource, version: int) -> Manifest:
        """Brings ``source`` to every sink as ``version``; returns when all of them serve it.

        Raises:
            WeightSyncError: names the rank and the tensor; no sink serves a mixture.
        """

    def close(self) -> None: ...


class Outlet(ABC):
    """The sender's half of a transport.

    Attributes:
        kind: both halves have the same.
        same_torch: the data pass through torch at both ends, so the releases must agree.
    """

    kind: ClassVar[str]
    same_torch: ClassVar[bool] = False

    @abstractmethod
    def open(self, specs: Sequence[TensorSpec], exchange: Exchange) -> Offer:
        """Makes room for these tensors. Nothing that a receiver serves from may be touched yet."""

    @abstractmethod
    def put(self, spec: TensorSpec, tensor: Tensor) -> str:
        """Takes the next tensor, whole and contiguous, which may be changed afterwards.

        Returns:
            Its digest.
        """

    @abstractmethod
    def finish(self, manifest: Manifest) -> None:
        """All tensors are there: what is still held back goes out."""

    @abstractmethod
    def abort(self) -> None:
        """The sync failed; the next one starts with ``open``."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back."""


class Inlet(ABC):
    """The receiver's half."""

    kind: ClassVar[str]
    same_torch: ClassVar[bool] = False

    def join(self, message: Message, link: Link) -> None:
        """Forms what is formed once, before the first sync."""
        raise unexpected(f"a call to form a group, over {self.kind}")

    @abstractmethod
    def open(self, offer: Offer, specs: Sequence[TensorSpec], sink: WeightSink, link: Link) -> None:
        """Finds the data. ``sink`` has begun."""

    @abstractmethod
    def landed(self, name: str, sink: WeightSink) -> None:
        """The outlet has taken this tensor; where no buckets carry it, it is there now."""

    def take(self, number: int, sink: WeightSink) -> int | None:
        """Takes a bucket.

        Returns:
            The last bucket whose buffer the sender may use again; None when it is the same as before.
        """
        raise unexpected(f"bucket {number}, over {self.kind}")

    @abstractmethod
    def finish(self, manifest: Manifest, sink: WeightSink) -> None:
        """All is sent; brings to ``sink`` what is not there yet."""

    @abstractmethod
    def abort(self) -> None:
        """The sync failed; the next one starts with ``open``."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back."""


class Sender:
    """
    Args:
        num_receivers: engines that take part, of ranks 0 to ``num_receivers - 1``.
        host: where receivers reach this machine; they may be on others.
        timeout_s: how long one piece of work may take at the other end: a bucket, all digests.
    """

    def __init__(
        self, outlet: Outlet, *, num_receivers: int = 1, host: str = "127.0.0.1", timeout_s: float = 120.0
    ) -> None:
        self._outlet = outlet
        self._hub = Hub(num_receivers, host=host, timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._sync = 0

    @property
    def address(self) -> Address:
        """For ``Receiver``; pass it on as text or as it is."""
        return self._hub.address

    def connect(self, timeout_s: float | None = None) -> None:
        """Waits for all receivers; again, after one was lost, for the new one of its rank.

        Raises:
            WeightSyncTimeout: ranks that did not come.
            WeightSyncError: a receiver with another wire format, transport or (where it matters) torch.
        """
        hello = introduction(self._outlet.kind, 0)
        self._hub.accept(hello, same_torch=self._outlet.same_torch, timeout_s=timeout_s or self._timeout_s)

    def send(self, source: WeightSource, version: int) -> Manifest:
        self._sync += 1
        exchange = Exchange(self._hub, self._sync, version)
        tensors = source.tensors()
        try:
            self._check_connected()
            specs = source.specs()
            offer = self._outlet.open(specs, exchange)
            exchange.tell("announce", version=version, tensors=[spec.to_json() for spec in specs], offer=offer)
            exchange.wait("ready", doing="the announcement")
            digests = []
            for index, spec in enumerate(specs):
                exchange.at = spec.name
                exchange.tell("at", index=index)
                digests.append(self._outlet.put(spec, next(tensors)))
            manifest = Manifest(version, specs, tuple(digests))
            self._outlet.finish(manifest)
            exchange.at = None
            exchange.tell("seal", manifest=manifest.to_json())
            exchange.wait("verified", doing="the check of the digests")
            exchange.tell("commit")
            exchange.wait("committed", doing="the change of version")
        except BaseException as error:
            exchange.abort(_reason(error))
            self._outlet.abort()
            if isinstance(error, Exception):
                # The other ranks of the trainer take part to the end.
                for _ in tensors:
                    pass
            raise
        return manifest

    def _check_connected(self) -> None:
        if missing := self._hub.missing():
            raise WeightSyncError(
                "not every receiver of weights is connected",
                found=f"no connection to {', '.join(f'rank {rank}' for rank in missing)}",
                remedy="start them (again) and call sender.connect() before the sync",
                rank=missing[0],
            )

    def close(self) -> None:
        """Lets the receivers go and gives back all memory; they keep what they have."""
        self._outlet.close()
        self._hub.close()


class Receiver:
    """
    Args:
        rank: 0 to ``num_receivers - 1``, each once.
        timeout_s: how long the sender may be silent.

    Raises:
        WeightSyncError: the sender cannot be reached, or does not fit.
    """

    def __init__(self, inlet: Inlet, address: Address | str, *, rank: int = 0, timeout_s: float = 120.0) -> None:
        self._inlet = inlet
        where = Address.parse(address) if isinstance(address, str) else address
        hello = introduction(inlet.kind, rank)
        channel = connect(where, hello, same_torch=inlet.same_torch, timeout_s=timeout_s)
        self._link = Link(channel, rank, timeout_s)

    def receive(self, sink: WeightSink, version: int | None = None) -> Manifest:
        """Takes part in one sync; returns when ``sink`` serves the new version.

        Args:
            version: what is waited for, where that is known: no other one is taken, and if the trainer has given up
                sending it already, this is said at once.

        Raises:
            WeightSyncError: it failed, here or elsewhere; ``sink`` serves the old version as a whole, or is unusable.
        """
        link, inlet = self._link, self._inlet
        message = link.first(version)
        try:
            if message["type"] == "join":
                inlet.join(message, link)
                link.answer("joined")
                message = link.expect("announce", "to announce the weights")
            if version not in (None, message["version"]):
                raise unexpected_version(version, message["version"])
            link.specs = tensors_from_json(message["tensors"])
            sink.begin(link.specs, message["version"])
            inlet.open(message["offer"], link.specs, sink, link)
            link.answer("ready")
            manifest = self._take_all(sink)
            sink.verify(manifest)
            link.answer("verified")
            link.expect("commit", "to commit")
            sink.commit(manifest)
            link.answer("committed")
        except BaseException as error:
            sink.abort(_reason(error))
            inlet.abort()
            link.fail(error)
            raise
        return manifest

    def _take_all(self, sink: WeightSink) -> Manifest:
        link = self._link
        while (message := link.next("to send on")).get("type") != "seal":
            if message.get("type") == "at":
                if link.at is not None:
                    self._inlet.landed(link.at, sink)
                link.at = link.specs[message["index"]].name
            elif message.get("type") == "bucket":
                taken = self._inlet.take(message["number"], sink)
                if taken is not None:
                    link.answer("taken", number=taken)
            else:
                raise unexpected(f"{message.get('type')!r} where tensors or the manifest belong")
        if link.at is not None:
            self._inlet.landed(link.at, sink)
        manifest = Manifest.from_json(message["manifest"])
        self._inlet.finish(manifest, sink)
        return manifest

    def close(self) -> None:
        """Leaves; the sink keeps what it has."""
        self._inlet.close()
        self._link.channel.close()


def _reason(error: BaseException) -> str:
    if isinstance(error, WeightSyncError):
        return f"{error.problem}: {error.found}"
    return f"{type(error).__name__}: {error}"
