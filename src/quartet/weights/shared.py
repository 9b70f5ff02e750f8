"""Transport ``shared``: sender and sinks in one process, zero copies.

A sink that adopts serves from the trainer's own memory (of sharded weights: from the gathered tensors). That is safe
while nothing trains, and only then: the weights change under the engine as soon as an optimizer steps.
Other sinks copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from quartet.weights.digest import Hasher
from quartet.weights.manifest import Manifest
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
            held = {spec.name: tensor for spec, tensor in zip(specs, tensors, strict=True)}
            manifest = Manifest(version, specs, tuple(self._hasher.digests(list(held.values()))))
            for sink in self._sinks:
                if not sink.adopt(held):
                    for name, tensor in held.items():
                        sink.write(name, 0, tensor.view(-1))
                        sink.arrived(name)
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

    def close(self) -> None:
        self._hasher.close()
