"""The two halves of a transport: they move bytes and know nothing of versions, digests compared, or commits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from torch import Tensor

from quartet.weights.manifest import TensorSpec
from quartet.weights.messages import Announcement, Offer, Transport
from quartet.weights.sink import TensorSink


class SendTransport(ABC):
    """The sender's half."""

    kind: ClassVar[Transport]

    @abstractmethod
    def open(self, specs: Sequence[TensorSpec], version: int) -> Offer:
        """Makes room for these tensors. Nothing that a receiver serves from may be touched yet."""

    @abstractmethod
    def send(self, specs: Sequence[TensorSpec], tensors: Iterator[Tensor]) -> list[str]:
        """Moves all tensors, of which each is valid until the next one is asked for.

        Returns:
            Their digests. Every receiver has taken everything, where the two ends run at once.

        Raises:
            WeightSyncError: a receiver failed, is gone or is late; it is named.
        """

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """The sync failed; receivers that wait for data are told, and the next sync begins with ``open``."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back."""


class ReceiveTransport(ABC):
    """A receiver's half."""

    kind: ClassVar[Transport]

    @abstractmethod
    def open(self, announcement: Announcement, sink: TensorSink) -> None:
        """Finds the data. ``sink`` has begun."""

    @abstractmethod
    def receive(self, announcement: Announcement, sink: TensorSink) -> None:
        """Brings all tensors to ``sink``.

        Raises:
            WeightSyncError: the sender failed, is gone or is late.
        """

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """The sync failed; a sender that waits for this receiver is told, and the next sync begins with ``open``."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back."""
