"""Shared memory without a name."""

from __future__ import annotations

import os

import pytest
import torch

from quartet.weights.errors import WeightSyncError
from quartet.weights.manifest import TensorSpec
from quartet.weights.shared_memory import Segment, layout

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
    owner = Segment.create(4096)
    path = owner.path
    other = Segment.open(path, 4096)
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
        Segment.open(path, 4096)
    follower = Segment.create(4096)  # may have the number of the one that was closed
    with pytest.raises(WeightSyncError, match="cannot be opened"):
        Segment.open(path, 4096)
    follower.close()


def test_more_memory_than_there_is_fails_at_once() -> None:
    with pytest.raises(WeightSyncError, match="no shared memory"):
        Segment.create(2**60)


def test_tensors_begin_at_lines_of_the_cache() -> None:
    offsets, num_bytes = layout(SPECS)
    assert all(offset % 64 == 0 for offset in offsets.values()) and num_bytes == 64 * 4
