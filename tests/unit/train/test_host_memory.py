"""The stores: files without names, pinned memory that is given back."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest
import torch

from quartet.config import UserError
from quartet.train import offload
from quartet.train.offload import MappedFileStore, PinnedMemoryStore


class Runtime:
    """What is pinned by CUDA's runtime, without a device."""

    def __init__(self, code=0):
        self.code = code
        self.pinned = {}

    def cudaHostRegister(self, address, num_bytes, flags):
        if self.code == 0:
            self.pinned[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address):
        del self.pinned[address]
        return 0


@pytest.fixture
def runtime(monkeypatch):
    found = Runtime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(offload, "_cuda", lambda: found)
    return found


def check_tensors(tensors, sizes):
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    for number, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        assert tensor.dtype == torch.uint8 and tensor.shape == (size,)
        assert tensor.untyped_storage().nbytes() == size and tensor.storage_offset() == 0
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == number + 1).all()), "no part overlaps another"


def mappings(directory):
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(directory) in line]


SIZES = [1, 64, 65, 4096, 100_000, 4]


def test_mapped_files_have_no_name(tmp_path):
    store = MappedFileStore(tmp_path / "below" / "away")
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    tensors = store.allocate(SIZES)
    check_tensors(tensors, SIZES)
    assert list(store.directory.iterdir()) == []
    maps = mappings(store.directory)
    assert len(maps) == 1 and "(deleted)" in maps[0]
    assert len(os.listdir("/proc/self/fd")) == before + 1
    last = tensors.pop()
    del tensors
    assert int(last[0]) == len(SIZES), "one part keeps the file"
    del last
    gc.collect()
    assert not mappings(store.directory)
    assert len(os.listdir("/proc/self/fd")) == before


def test_mapped_files_say_when_there_is_no_room(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"0\.1 MiB(.|\n)*No space left"):
        MappedFileStore(tmp_path).allocate(SIZES)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="no room"):
        MappedFileStore(tmp_path / "file").allocate(SIZES)


def test_pinned_memory_is_exact_and_unpinned_with_its_last_tensor(runtime):
    tensors = PinnedMemoryStore().allocate(SIZES)
    check_tensors(tensors, SIZES)
    (address,) = runtime.pinned
    assert address == tensors[0].data_ptr() and address % 4096 == 0
    assert runtime.pinned[address] == sum(-(-size // 64) * 64 for size in SIZES)
    last = tensors.pop()
    del tensors
    gc.collect()
    assert runtime.pinned, "it must stay pinned while a tensor lies in it"
    del last
    gc.collect()
    assert not runtime.pinned


def test_pinned_memory_that_is_refused_is_given_back(runtime):
    runtime.code = 2
    with pytest.raises(UserError, match=r"cudaHostRegister gave error 2(.|\n)*ulimit"):
        PinnedMemoryStore().allocate(SIZES)
    assert not runtime.pinned
