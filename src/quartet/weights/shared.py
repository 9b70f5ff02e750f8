"""Transport ``shared``: sender and sinks in one process, zero copies.

A sink that adopts serves from the trainer's own memory (of sharded weights: from the gathered tensors). That is safe
while nothing trains, and only then: the weights change under the engine as soon as an optimizer steps.
Other sinks copy, one tensor after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from quartet.weights.digest import Hasher
from quartet.weights.manifest import Manifest, TensorSpec
from quartet.weights.sink import WeightSink
from quartet.weights.source import WeightSource


class SharedSender:
    """A ``WeightSender`` without receivers: it knows the sinks themselves."""

    def __init__(self, sinks: Sequence[WeightSink], *, hasher: Hasher | None = None) -> None:
        self._sinks = tuple(sinks)
        self._hasher = hasher or Hasher()

    def send(self, source: WeightSource, version: int) -> Manifest:
        tensors = source.tensors()
        try:
            specs = source.specs()
            for sink in self._sinks:
                sink.begin(specs, version)
            digests = self._move(specs, tensors)
            manifest = Manifest(version, specs, tuple(digests))
            for sink in self._sinks:
                sink.verify(manifest)
            for sink in self._sinks:
                sink.commit(manifest)
        except BaseException as error:
            for sink in self._sinks:
                sink.abort(f"{type(error).__name__}: {error}")
            if isinstance(error, Exception):
                # The other ranks of the trainer take part to the end.
                for _ in tensors:
                    pass
            raise
        return manifest

    def _move(self, specs: Sequence[TensorSpec], tensors: Iterator[Tensor]) -> list[str]:
        """The digests of ``tensors``, which all sinks have afterwards."""
        adopting = [sink for sink in self._sinks if sink.adopts]
        copying = [sink for sink in self._sinks if not sink.adopts]
        held: dict[str, Tensor] = {}
        digests = []
        for spec, tensor in zip(specs, tensors, strict=True):
            digests.append(self._hasher.digest(tensor))
            for sink in copying:
                _write(sink, spec.name, tensor)
            if adopting:
                held[spec.name] = tensor
        for sink in adopting:
            if not sink.adopt(held):
                for name, tensor in held.items():
                    _write(sink, name, tensor)
        return digests

    def close(self) -> None:
        self._hasher.close()


def _write(sink: WeightSink, name: str, tensor: Tensor) -> None:
    sink.write(name, 0, tensor.view(-1))
    sink.arrived(name)
