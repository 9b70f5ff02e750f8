"""Workers whose parts can leave their device for others and come back, as the arbiter's leases ask."""

from __future__ import annotations

import contextlib
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator

from quartet.cluster.dispatch import RANK_ZERO, dispatch
from quartet.config.cluster import OffloadConfig
from quartet.schedule.leases import LeaseMode
from quartet.train.host_memory import MappedFiles, PinnedMemory
from quartet.train.offload import PARTS, Moved, Offload, OffloadPart, Store

_PARTS_OF: dict[LeaseMode, tuple[OffloadPart, ...]] = {"forward": ("params",), "generate": ("params",), "train": PARTS}


def store_of(config: OffloadConfig) -> Store:
    if config.to == "pinned_memory":
        return PinnedMemory()
    return MappedFiles(config.directory or tempfile.gettempdir())


class Offloadable(ABC):
    """A worker with parts that move, once ``make_offloadable`` was called."""

    _parts: Offload | None = None

    def make_offloadable(self, config: OffloadConfig) -> None:
        self._parts = self._offload(store_of(config))

    def onload(self, mode: LeaseMode) -> Moved:
        """Brings in what ``mode`` needs and is not there."""
        return self._movable.onload(_PARTS_OF[mode])

    def offload(self) -> Moved:
        """Everything leaves."""
        return self._movable.offload()

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Within, the parameters are there, whatever leases say: for the moments in which a model is read or replaced
        as a whole."""
        away = self._parts is not None and not self._parts.is_resident(("params",))
        if away:
            self._movable.onload(("params",))
        try:
            yield
        finally:
            if away:
                self._movable.offload(("params",))

    def stop_offloading(self) -> None:
        """Parameters come back for good: the model is its owner's again. Nothing where it does not move."""
        if self._parts is not None:
            self._parts.release()

    @property
    def _movable(self) -> Offload:
        if self._parts is None:
            raise RuntimeError(f"this {type(self).__name__} does not move: its pool has no budget")
        return self._parts

    @dispatch(RANK_ZERO)
    @abstractmethod
    def sizes(self) -> dict[LeaseMode, int]:
        """Bytes that must be on the device in each mode."""

    @abstractmethod
    def _offload(self, store: Store) -> Offload:
        """What moves this host's parts to ``store`` and back."""
