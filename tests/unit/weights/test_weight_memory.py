"""Shared memory without a name; what a source announces and gives."""

from __future__ import annotations

import os

import pytest
import torch

from quartet.weights.manifest import TensorSpec, WeightSyncError
from quartet.weights.shared_memory import SharedSegment, memory_layout
from quartet.weights.sink import NamedSource

WEIGHTS = {
    "w": torch.arange(6.0).view(2, 3),
    "n": torch.tensor([True, False, True]),
    "h": torch.tensor(1.5, dtype=torch.bfloat16),
    "e": torch.empty(0, 2),
    "d": torch.ones(2, dtype=torch.float64),
}
SPECS = [TensorSpec.of(name, tensor) for name, tensor in WEIGHTS.items()]


def test_a_segment_has_no_name_and_reaches_only_who_opens_it() -> None:
    before = set(os.listdir("/dev/shm"))
    owner = SharedSegment.create(4096)
    path = owner.path
    other = SharedSegment.open(path, 4096)
    owner.bytes[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert other.bytes[:4].tolist() == [1, 2, 3, 0]
    other.bytes[0] = 9  # its own copy of the page from now on
    assert owner.bytes[0] == 1
    assert set(os.listdir("/dev/shm")) == before
    tensor = owner.bytes[:8]
    owner.close()
    other.close()
    assert tensor[1] == 2
    with pytest.raises(WeightSyncError, match="cannot be opened"):
        SharedSegment.open(path, 4096)
    follower = SharedSegment.create(4096)  # may have the number of the one that was closed
    with pytest.raises(WeightSyncError, match="cannot be opened"):
        SharedSegment.open(path, 4096)
    follower.close()


def test_more_memory_than_there_is_fails_at_once() -> None:
    with pytest.raises(WeightSyncError, match="no shared memory"):
        SharedSegment.create(2**60)


def test_tensors_begin_at_lines_of_the_cache() -> None:
    offsets, num_bytes = memory_layout(SPECS)
    assert all(offset % 64 == 0 for offset in offsets.values()) and num_bytes == 64 * 4


def test_specs_know_their_size_and_dtype() -> None:
    assert [spec.num_bytes for spec in SPECS] == [24, 3, 2, 0, 16]
    assert TensorSpec.of("b", torch.tensor(1.0), torch.bfloat16) == TensorSpec("b", "BF16", ())
    with pytest.raises(WeightSyncError, match="complex64"):
        TensorSpec.of("z", torch.zeros(1, dtype=torch.complex64))


def test_each_tensor_comes_as_announced_and_in_the_dtype_that_is_wanted() -> None:
    """Of an engine whose products are bf16 and whose norms are not. Nothing is copied that need not be."""
    given = {"norm": torch.randn(3), "gate_proj": torch.randn(4, 3).t(), "steps": torch.tensor([4])}
    source = NamedSource(given.items, like={"norm": torch.float32, "gate_proj": torch.bfloat16})
    specs, found = source.specs(), list(source.tensors())
    assert [(spec.name, spec.dtype) for spec in specs] == [("norm", "F32"), ("gate_proj", "BF16"), ("steps", "I64")]
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in found] == [(s.shape, s.torch_dtype) for s in specs]
    assert all(tensor.is_contiguous() for tensor in found)
    assert found[0].data_ptr() == given["norm"].data_ptr()
    assert torch.equal(found[1], given["gate_proj"].bfloat16())
