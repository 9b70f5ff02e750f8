"""The two halves of a transport: they move bytes and know nothing of versions, digests compared, or commits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quartet.weights.manifest import TensorSpec
from quartet.weights.progress import SENDER, ProgressBoard, SyncProgress
from quartet.weights.sink import TensorSink

Offer = Mapping[str, Any]
"""What a receiver needs in order to find the data: JSON."""


@dataclass(frozen=True)
class Announcement:
    """What will be sent.

    Attributes:
        sync: its number, which all later requests carry.
        transport: its ``kind``.
        tensors: in the order in which they are sent.
    """

    sync: int
    version: int
    transport: str
    tensors: tuple[TensorSpec, ...]
    offer: Offer


class _Half(ABC):
    """What both have in common: how they watch the other ends, fail and are closed."""

    kind: ClassVar[str]
    _board: ProgressBoard | None = None
    _progress: SyncProgress | None = None

    def __init__(self, end: int, others: Sequence[int], timeout_s: float, device: torch.device | str) -> None:
        self._end, self._others = end, others
        self._timeout_s = timeout_s
        self._device = torch.device(device)

    @property
    def progress(self) -> SyncProgress:
        """Of the sync that is under way."""
        assert self._progress is not None
        return self._progress

    def _watch(self, board: ProgressBoard, specs: Sequence[TensorSpec]) -> None:
        """The positions of this sync stand on ``board``, which is closed with the next one."""
        self._close_board()
        self._board = board
        self._progress = SyncProgress(board, self._end, self._others, specs, self._timeout_s)

    def fail(self, error: BaseException) -> None:
        """The sync failed; ends that wait for this one are told, and the next sync begins with ``open``."""
        if self._progress is not None:
            self._progress.fail(error)
            self._progress = None
        self._drop()

    def close(self) -> None:
        """Gives everything back."""
        self._drop()
        self._close_board()

    def _close_board(self) -> None:
        if self._board is not None:
            self._board.close()
        self._board = self._progress = None

    def _drop(self) -> None:  # noqa: B027 (not every transport holds something)
        """Lets go of what the data stand in."""


class SendTransport(_Half):
    """The sender's half.

    Args:
        timeout_s: how long a receiver may stand still.
        device: where the sender computes.
        host: where receivers reach its machine.
    """

    def __init__(
        self,
        num_receivers: int = 1,
        *,
        timeout_s: float = 120.0,
        device: torch.device | str = "cpu",
        host: str = "127.0.0.1",
    ) -> None:
        super().__init__(SENDER, range(1, 1 + num_receivers), timeout_s, device)
        self._num_receivers = num_receivers
        self._host = host

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


class ReceiveTransport(_Half):
    """A receiver's half.

    Args:
        timeout_s: how long the sender may stand still.
        device: where the engine computes.
    """

    def __init__(self, rank: int = 0, *, timeout_s: float = 120.0, device: torch.device | str = "cpu") -> None:
        super().__init__(1 + rank, [SENDER], timeout_s, device)
        self._rank = rank

    @abstractmethod
    def open(self, announcement: Announcement, sink: TensorSink) -> None:
        """Finds the data. ``sink`` has begun."""

    @abstractmethod
    def receive(self, announcement: Announcement, sink: TensorSink) -> None:
        """Brings all tensors to ``sink``.

        Raises:
            WeightSyncError: the sender failed, is gone or is late.
        """
