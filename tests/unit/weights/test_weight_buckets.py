"""The plan of buckets, and the promise that a buffer is not filled again before every receiver has confirmed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.distributed import HashStore

from quartet.weights.buckets import ALIGNMENT, Bucket, BucketSend, plan_buckets
from quartet.weights.cuda_ipc import CudaHandles, CudaIpcSend
from quartet.weights.digest import bytes_of
from quartet.weights.manifest import DTYPES, TensorSpec
from quartet.weights.progress import StoreBoard
from quartet.weights.transport import Offer

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
specs_of = st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), shapes), max_size=8).map(
    lambda rows: [TensorSpec(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(rows)]
)


@given(specs_of, st.integers(ALIGNMENT, 400))
def test_every_element_has_one_place(specs: list[TensorSpec], bucket_bytes: int) -> None:
    buckets = plan_buckets(specs, bucket_bytes)
    assert [bucket.number for bucket in buckets] == list(range(len(buckets)))
    placed: dict[str, list[tuple[int, int]]] = {spec.name: [] for spec in specs}
    for bucket in buckets:
        end = 0
        for span in bucket.spans:
            assert span.offset % ALIGNMENT == 0 and span.offset >= end and span.count > 0
            end = span.offset + span.num_bytes
            placed[span.spec.name].append((span.start, span.start + span.count))
        assert bucket.num_bytes == end <= bucket_bytes
    for spec in specs:
        edges = placed[spec.name]
        assert [start for start, _ in edges] == [0, *(end for _, end in edges[:-1])][: len(edges)]
        assert (edges[-1][1] if edges else 0) == spec.num_elements


class Packing(BucketSend):
    """Unpacks every bucket where it is shipped."""

    kind = "cuda_ipc"

    def __init__(self, bucket_bytes: int, found: dict[str, Tensor]) -> None:
        super().__init__(0)
        self._bucket_bytes = bucket_bytes
        self._buffers = [torch.zeros(bucket_bytes, dtype=torch.uint8) for _ in range(2)]
        self._found = found
        self.freed: list[int] = []
        self.shipped: list[int] = []

    def open(self, specs: Sequence[TensorSpec], version: int) -> Offer:
        self._watch(StoreBoard(HashStore()), specs)
        return {}

    def _wait_until_free(self, number: int) -> None:
        self.freed.append(number)

    def _ship(self, bucket: Bucket, data: Tensor) -> None:
        assert data.numel() == bucket.num_bytes
        self.shipped.append(bucket.number)
        for piece in bucket.spans:
            self._found[piece.spec.name].view(-1)[piece.start : piece.start + piece.count] = piece.view(data)


@given(specs_of, st.integers(ALIGNMENT, 200))
def test_what_is_packed_comes_out_again(specs: list[TensorSpec], bucket_bytes: int) -> None:
    tensors = {s.name: torch.randint(0, 2, s.shape).to(s.torch_dtype) for s in specs}
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    packing = Packing(bucket_bytes, found)
    packing.open(specs, 1)
    packing.send(specs, iter(tensors.values()))
    assert packing.shipped == list(range(len(plan_buckets(specs, bucket_bytes))))
    assert packing.freed == [number - 2 for number in packing.shipped]
    assert all(torch.equal(bytes_of(found[name]), bytes_of(tensors[name])) for name in tensors)


def test_a_bucket_that_holds_no_element_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        plan_buckets([], 8)


# A buffer in use -----------------------------------------------------------------------------------------


class Handles(CudaHandles):
    """Of buffers in this process; notes how often each was waited for."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self.synchronized = 0

    def allocate(self, num_bytes: int) -> Tensor:
        self.buffers.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return self.buffers[-1]

    def export(self, buffer: Tensor) -> Mapping[str, Any]:
        return {"number": next(i for i, own in enumerate(self.buffers) if own is buffer)}

    def open(self, handle: Mapping[str, Any]) -> Tensor:
        return self.buffers[handle["number"]]

    def synchronize(self) -> None:
        self.synchronized += 1


class Noting:
    """In the place of a progress: says what was noted and waited for, in order."""

    def __init__(self, handles: Handles) -> None:
        self.events: list[tuple[str, int]] = []
        self._handles = handles
        self._announced: dict[int, list[int]] = {}

    def note(self, *, step: int | None = None, tensor: str | None = None) -> None:
        if step is not None:
            assert self._handles.synchronized == step, "noted before the copies into it were through"
            self._announced[step] = self._handles.buffers[(step - 1) % 2].tolist()
            self.events.append(("filled", step))

    def wait(self, step: int) -> None:
        if step > 0:
            # A slow receiver reads only now, right before it notes that it has.
            if step < 4:
                assert self._handles.buffers[(step - 1) % 2].tolist() == self._announced[step], "filled again before"
            self.events.append(("taken", step))

    def fail(self, error: BaseException) -> None:
        pass


def test_no_buffer_is_filled_before_its_last_contents_are_taken() -> None:
    handles = Handles()
    transport = CudaIpcSend(2, handles=handles, bucket_bytes=64)
    spec = TensorSpec("w", "U8", (5 * 64,))
    offer = transport.open([spec], 1)
    assert offer["buffers"] == {str(rank): [{"number": 0}, {"number": 1}] for rank in range(2)}
    noting = Noting(handles)
    transport._progress = noting  # type: ignore[assignment]
    transport.send([spec], iter([torch.arange(5 * 64).to(torch.uint8)]))
    assert noting.events == [
        ("filled", 1), ("filled", 2), ("taken", 1), ("filled", 3), ("taken", 2), ("filled", 4), ("taken", 3),
        ("filled", 5), ("taken", 5),
    ]  # fmt: skip
    transport.close()


def test_after_a_failure_the_old_buffers_are_left_alone() -> None:
    handles = Handles()
    transport = CudaIpcSend(1, handles=handles, bucket_bytes=64)
    spec = TensorSpec("w", "U8", (64,))
    transport.open([spec], 1)
    transport.fail(RuntimeError("the sync broke"))
    offer = transport.open([spec], 1)
    assert [handle["number"] for handle in offer["buffers"]["0"]] == [2, 3]
    transport.close()
