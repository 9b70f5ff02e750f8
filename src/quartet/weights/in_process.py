"""Transport ``shared``: sender and sinks in one process, zero copies.

A sink that adopts serves from the trainer's own memory (of sharded weights: from the gathered tensors). That is safe
while nothing trains, and only then: the weights change under the engine as soon as an optimizer steps.
Other sinks copy, one tensor after the other.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from quartet.weights.digest import tensor_digest
from quartet.weights.errors import WeightSyncError
from quartet.weights.manifest import TensorSpec, WeightManifest
from quartet.weights.sink import TensorSink
from quartet.weights.source import NamedSource
from quartet.weights.transport import Announcement, Offer, ReceiveTransport, SendTransport

_open: dict[str, SharedSend] = {}
"""Senders of this process by their offers: both ends may belong to one worker, and neither knows the other."""
_numbers = itertools.count()


class SharedSend(SendTransport):
    kind = "shared"

    def __init__(self, num_receivers: int = 1, **common: Any) -> None:
        super().__init__(num_receivers, **common)
        self._key = f"process {os.getpid()}, sender {next(_numbers)}"
        self._sinks: list[TensorSink | None] = [None] * num_receivers

    def open(self, specs: Sequence[TensorSpec], version: int) -> Offer:
        _open[self._key] = self
        self._sinks = [None] * len(self._sinks)
        return {"key": self._key}

    def join(self, rank: int, sink: TensorSink) -> None:
        """A receiver's sink, for the sync that has been opened."""
        self._sinks[rank] = sink

    def send(self, specs: Sequence[TensorSpec], tensors: Iterator[Tensor]) -> list[str]:
        if None in self._sinks:
            raise WeightSyncError(
                "not every engine takes part in the weight sync",
                found=f"{len([s for s in self._sinks if s is not None])} of {len(self._sinks)} engines",
                remedy="announce the weights to all engines before they are sent",
                rank=self._sinks.index(None),
            )
        return move([sink for sink in self._sinks if sink is not None], specs, tensors)

    def _drop(self) -> None:
        _open.pop(self._key, None)


class SharedReceive(ReceiveTransport):
    kind = "shared"

    def open(self, announcement: Announcement, sink: TensorSink) -> None:
        sender = _open.get(str(announcement.offer["key"]))
        if sender is None:
            raise WeightSyncError(
                "the trainer's weights are not in this process",
                found=f"{announcement.offer['key']!r}, this is process {os.getpid()}",
                remedy="use the transport shared only within one process, or auto",
            )
        sender.join(self._rank, sink)

    def receive(self, announcement: Announcement, sink: TensorSink) -> None:
        pass  # the sender has brought everything


def move(sinks: Sequence[TensorSink], specs: Sequence[TensorSpec], tensors: Iterator[Tensor]) -> list[str]:
    """Brings all tensors to sinks that have begun; returns their digests."""
    adopting = [sink for sink in sinks if sink.adopts]
    copying = [sink for sink in sinks if not sink.adopts]
    held: dict[str, Tensor] = {}
    digests = []
    for spec, tensor in zip(specs, tensors, strict=True):
        digests.append(tensor_digest(tensor))
        for sink in copying:
            sink.write(spec.name, 0, tensor.view(-1))
        if adopting:
            held[spec.name] = tensor
    for sink in adopting:
        if not sink.adopt(held):
            for name, tensor in held.items():
                sink.write(name, 0, tensor.view(-1))
    return digests


def sync_in_process(source: NamedSource, sinks: Sequence[TensorSink], version: int) -> WeightManifest:
    """Brings ``source`` to sinks of this process as ``version``, without a driver and its requests.

    Raises:
        WeightSyncError: names the tensor; no sink serves a mixture.
    """
    tensors = source.tensors()
    try:
        specs = source.specs()
        for sink in sinks:
            sink.begin(specs, version)
        manifest = WeightManifest(version, specs, tuple(move(sinks, specs, tensors)))
        for sink in sinks:
            sink.verify(manifest)
        for sink in sinks:
            sink.commit()
    except BaseException as error:
        for sink in sinks:
            sink.abort(f"{type(error).__name__}: {error}")
        if isinstance(error, Exception):
            deque(tensors, maxlen=0)  # the other ranks wait in their gathers for this one, to the last tensor
        raise
    return manifest


def write_into(sink: TensorSink, named: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Brings ``(name, tensor)`` pairs to one sink of this process, in its dtypes; raises as ``sync_in_process``."""
    pairs = list(named)
    sync_in_process(NamedSource(lambda: pairs, like=sink.dtypes()), [sink], version)
