"""The policy's weights in shared memory, from which engines in other processes take them.

    trainer ─► weight_sink() ─► shared memory ─ load(version) ─► engine processes, each its own copy

All transports, digests and checks of a ``TensorSink`` end in this memory; what stands there once a sync is committed is
whole. So an engine that is started anew takes the weights from here, without the trainer. The memory has no name, as
that of the transport ``shared_memory``, and goes with its last user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from quartet.weights.manifest import TensorSpec
from quartet.weights.shared_memory import SharedSegment, memory_layout
from quartet.weights.sink import SinkStatus, TensorSink

Load = Callable[[int], None]
"""Has an engine take over the version that is staged; its own failure is the engine's to remember."""


@dataclass(frozen=True)
class StagedHandle:
    """Plain data by which another process of this machine reads the staged weights.

    Attributes:
        ties: other names of tensors in ``specs``.
    """

    path: str
    num_bytes: int
    specs: tuple[TensorSpec, ...]
    ties: tuple[tuple[str, str], ...]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yields ``(name, tensor)``, each tensor once, under its first name. They show what is staged: copy them.

        Raises:
            WeightSyncError: the process that staged them is gone, or out of reach.
        """
        yield from SharedSegment.open(self.path, self.num_bytes).tensors(self.specs).items()


class StagedWeights:
    """
    Args:
        named: ``(name, tensor)`` of all that is sent; only names and shapes count, so the meta device will do. A
            parameter under two names is one piece of memory.
        dtype: of the engines; None: as the tensors have it.

    Raises:
        WeightSyncError: not on Linux, or not enough memory.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> None:
        first: dict[int, TensorSpec] = {}
        names: dict[str, str] = {}
        kept = list(named)  # of tensors that are gone others may have the id
        for name, tensor in kept:
            names[name] = first.setdefault(id(tensor), TensorSpec.of(name, tensor, dtype)).name
        specs = tuple(first.values())
        self._segment = SharedSegment.create(memory_layout(specs)[1])
        ties = tuple((name, own) for name, own in names.items() if name != own)
        self.handle = StagedHandle(self._segment.path, self._segment.num_bytes, specs, ties)
        tensors = self._segment.tensors(specs)
        self._sink = TensorSink([(name, tensors[own]) for name, own in names.items()], on_commit=self._load)
        self._loads: list[Load] = []

    def weight_sink(self) -> TensorSink:
        return self._sink

    @property
    def version(self) -> int | None:
        """The version of what is staged; None where that is nothing, or not whole."""
        return self._sink.version if self._sink.status is SinkStatus.READY else None

    def attach(self, load: Load) -> None:
        """Has ``load`` called with the version of every commit, beside those of other engines, until ``detach``."""
        self._loads.append(load)

    def detach(self, load: Load) -> None:
        if load in self._loads:
            self._loads.remove(load)

    def _load(self, version: int) -> None:
        if self._loads:
            with ThreadPoolExecutor(len(self._loads)) as pool:
                list(pool.map(lambda load: load(version), self._loads))

    def close(self) -> None:
        """Gives the memory back once no process reads it."""
        self._segment.close()
