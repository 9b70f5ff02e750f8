"""Flat buckets: tensors laid end to end in a few buffers of a fixed size, cut where one is full.

Both ends make the same plan from the announced tensors, so a bucket needs no description of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from quartet.weights.digest import tensor_digest
from quartet.weights.manifest import TensorSpec
from quartet.weights.progress import SyncProgress
from quartet.weights.sink import TensorSink
from quartet.weights.transport import SendTransport

NUM_BUFFERS = 2
ALIGNMENT = 16
"""Bytes; every dtype can then be viewed where its span begins."""


@dataclass(frozen=True)
class BucketSpan:
    """A run of one tensor's elements in a bucket.

    Attributes:
        start, count: elements of the flattened tensor.
        offset: bytes from the bucket's beginning.
    """

    spec: TensorSpec
    start: int
    count: int
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.count * self.spec.torch_dtype.itemsize

    def view(self, bucket: Tensor) -> Tensor:
        """Its flat values in ``bucket`` (flat uint8)."""
        return bucket[self.offset : self.offset + self.num_bytes].view(self.spec.torch_dtype)


@dataclass(frozen=True)
class Bucket:
    number: int
    spans: tuple[BucketSpan, ...]

    @property
    def num_bytes(self) -> int:
        return self.spans[-1].offset + self.spans[-1].num_bytes if self.spans else 0

    def unpack(self, buffer: Tensor, sink: TensorSink, progress: SyncProgress) -> None:
        """Brings its spans to ``sink`` and notes on which tensor this works."""
        for span in self.spans:
            progress.note(tensor=span.spec.name)
            sink.write(span.spec.name, span.start, span.view(buffer))


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Every element of every tensor once, in order. Tensors without elements need no bucket.

    Raises:
        ValueError: no element fits into a bucket.
    """
    if bucket_bytes < ALIGNMENT:
        raise ValueError(f"buckets of {bucket_bytes} bytes; at least {ALIGNMENT} are needed")
    buckets: list[Bucket] = []
    spans: list[BucketSpan] = []
    used = 0
    for spec in specs:
        start, size = 0, spec.torch_dtype.itemsize
        while start < spec.num_elements:
            offset = -(-used // ALIGNMENT) * ALIGNMENT
            count = min(spec.num_elements - start, (bucket_bytes - offset) // size)
            if count <= 0:
                buckets.append(Bucket(len(buckets), tuple(spans)))
                spans, used = [], 0
                continue
            spans.append(BucketSpan(spec, start, count, offset))
            start, used = start + count, offset + count * size
    if spans:
        buckets.append(Bucket(len(buckets), tuple(spans)))
    return tuple(buckets)


class BucketSend(SendTransport):
    """Lays tensors into buckets as they come, in two buffers by turns."""

    _bucket_bytes: int
    _buffers: list[Tensor]

    def send(self, specs: Sequence[TensorSpec], tensors: Iterator[Tensor]) -> list[str]:
        buckets, digests = plan_buckets(specs, self._bucket_bytes), []
        places = ((bucket, span) for bucket in buckets for span in bucket.spans)
        for spec in specs:
            self.progress.note(tensor=spec.name)
            tensor, left = next(tensors), spec.num_elements
            while left:
                bucket, span = next(places)
                buffer = self._buffers[bucket.number % NUM_BUFFERS]
                if span is bucket.spans[0]:
                    self._wait_until_free(bucket.number - NUM_BUFFERS)
                span.view(buffer).copy_(tensor.view(-1)[span.start : span.start + span.count])
                if span is bucket.spans[-1]:
                    self._ship(bucket, buffer[: bucket.num_bytes])
                left -= span.count
            digests.append(tensor_digest(tensor))
        self._finish()
        self.progress.wait(len(buckets))
        return digests

    @abstractmethod
    def _wait_until_free(self, number: int) -> None:
        """The buffer of the bucket with this number, if there is one, may be filled again."""

    @abstractmethod
    def _ship(self, bucket: Bucket, data: Tensor) -> None:
        """The bucket is full. Notes that; whether the receivers have it is seen later."""

    def _finish(self) -> None:
        """All buckets are shipped."""
