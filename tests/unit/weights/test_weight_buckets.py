"""The plan of buckets, and the promise that a buffer is not filled again before every receiver has confirmed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from quartet.weights import sync
from quartet.weights.digest import BLOCK_BYTES, byte_view, tensor_digest
from quartet.weights.manifest import DTYPES, TensorSpec
from quartet.weights.shared_memory import ALIGNMENT
from quartet.weights.sink import TensorSink
from quartet.weights.sync import (
    SharedMemorySender,
    WeightBucket,
    plan_buckets,
    receive_tensors,
    send_tensors,
)

shapes = st.one_of(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.tuples(st.integers(0, 2 * BLOCK_BYTES // 8)))
specs_of = st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), shapes), max_size=8).map(
    lambda rows: [TensorSpec(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(rows)]
)
bucket_sizes = st.integers(BLOCK_BYTES, 3 * BLOCK_BYTES)


@given(specs_of, bucket_sizes)
def test_every_byte_has_one_place_and_cuts_are_between_blocks(specs: list[TensorSpec], bucket_bytes: int) -> None:
    buckets = plan_buckets(specs, bucket_bytes)
    assert [bucket.number for bucket in buckets] == list(range(len(buckets)))
    sizes = [*(spec.num_bytes for spec in specs), 16 * len(specs)]
    placed: list[list[tuple[int, int]]] = [[] for _ in sizes]
    for bucket in buckets:
        end = 0
        for span in bucket.spans:
            assert span.offset % ALIGNMENT == 0 and span.offset >= end and span.num_bytes > 0
            assert span.start % BLOCK_BYTES == 0
            end = span.offset + span.num_bytes
            placed[span.tensor].append((span.start, span.start + span.num_bytes))
        assert bucket.num_bytes == end <= bucket_bytes
    for size, edges in zip(sizes, placed, strict=True):
        assert [start for start, _ in edges] == [0, *(end for _, end in edges[:-1])][: len(edges)]
        assert (edges[-1][1] if edges else 0) == size


def test_a_bucket_that_holds_no_block_is_refused() -> None:
    with pytest.raises(ValueError, match=f"at least {BLOCK_BYTES}"):
        plan_buckets([], 8)


# What comes through them ---------------------------------------------------------------------------------


class Noting:
    """In the place of a progress: says what was noted and waited for, in order."""

    def __init__(self, look: Callable[[int], Tensor] | None = None) -> None:
        self.events: list[tuple[str, int]] = []
        self._look = look
        self._shipped: dict[int, Tensor] = {}

    def note(self, **changes: int) -> None:
        if self._look is not None and "step" in changes:
            step = changes["step"]
            self._shipped[step] = self._look(step).clone()
            self.events.append(("filled", step))

    def wait(self, step: int) -> None:
        assert self._look is not None
        if step in self._shipped:
            # A slow receiver reads only now, right before it notes that it has.
            assert torch.equal(self._look(step), self._shipped[step]), "filled again before"
        self.events.append(("taken", step))


class Shelf:
    """Keeps every bucket."""

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self.shipped: list[tuple[WeightBucket, Tensor]] = []

    def empty(self, bucket: WeightBucket, at: Any) -> Tensor:
        self._buffer = torch.zeros(self.bucket_bytes, dtype=torch.uint8)
        return self._buffer

    def ship(self, bucket: WeightBucket, at: Any) -> None:
        self.shipped.append((bucket, self._buffer))

    def finish(self, at: Any) -> None: ...

    def full(self, plan: Any, at: Any) -> Any:
        return iter(self.shipped)


@given(specs_of, bucket_sizes)
def test_what_is_packed_comes_out_again(specs: list[TensorSpec], bucket_bytes: int) -> None:
    tensors = {s.name: torch.randint(0, 2, s.shape).to(s.torch_dtype) for s in specs}
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    shelf: Any = Shelf(bucket_bytes)
    plan, sink = plan_buckets(specs, bucket_bytes), TensorSink(found.items())
    at: Any = Noting()
    send_tensors(shelf, plan, iter(tensors.values()), at)
    assert [bucket for bucket, _ in shelf.shipped] == plan
    sink.begin(specs, 1)
    assert receive_tensors(shelf, plan, specs, sink, at) == tuple(map(tensor_digest, tensors.values()))
    assert all(torch.equal(byte_view(found[name]), byte_view(tensors[name])) for name in tensors)


def test_no_buffer_is_filled_before_its_last_contents_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "NUM_IN_MEMORY", 2)
    half = SharedMemorySender()
    spec = TensorSpec("w", "U8", (5 * half.bucket_bytes - 64,))
    _, place = half.open(2)
    assert len(place["paths"]) == 2
    noting: Any = Noting(lambda step: half._rooms[step % 2].bytes)
    plan = plan_buckets([spec], half.bucket_bytes)
    send_tensors(half, plan, iter([torch.arange(spec.num_bytes).to(torch.uint8)]), noting)
    assert noting.events == [
        ("taken", 0), ("filled", 2), ("taken", 1), ("filled", 3), ("taken", 2), ("filled", 4), ("taken", 3),
        ("filled", 5), ("taken", 4), ("filled", 6),
    ]  # fmt: skip


def test_after_a_failure_the_old_buffers_are_left_alone() -> None:
    half = SharedMemorySender()
    _, first = half.open(1)
    assert half.open(1)[1]["paths"] == first["paths"]
    half.drop()
    assert half.open(1)[1]["paths"] != first["paths"]
