"""The digest: its definition, its independence of pieces and threads, the faults that it sees."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quartet.weights import digest
from quartet.weights.digest import (
    BLOCK_BYTES,
    BLOCK_WORDS,
    COLUMNS,
    byte_view,
    digest_text,
    partial_digest,
    piece_digest,
    tensor_digest,
)

MASK = 2**64 - 1


def splitmix64(n: int) -> list[int]:
    numbers, state = [], 0
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        numbers.append(z ^ (z >> 31))
    return numbers


NUM_SUMS = 1025 + 63
CONSTANTS = splitmix64(2 * NUM_SUMS + 1)


def defined(data: bytes) -> str:
    """The definition, word by word."""
    p = CONSTANTS[-1] & ~7 | 5
    data += b"\0" * (-len(data) % 8)
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    total = 0
    for k, start in enumerate(range(0, len(words), BLOCK_WORDS)):
        sums = [0] * NUM_SUMS
        for place, word in enumerate(words[start : start + BLOCK_WORDS]):
            sums[place % 1025] += word
            sums[1025 + place // 1025] += word
        for i, f in enumerate(sums):
            lower, upper = f & 0xFFFFFFFF, f >> 32 & 0xFFFFFFFF
            total += (lower * (CONSTANTS[2 * i] | 1) + upper * (CONSTANTS[2 * i + 1] | 1)) * pow(p, k, 2**64)
    return f"{total & MASK:016x}"


@pytest.mark.parametrize("num_bytes", [0, 9, 9001, BLOCK_BYTES + 13])
@pytest.mark.parametrize("threads", [1, 3])
def test_it_is_what_its_definition_says(num_bytes: int, threads: int) -> None:
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes))
    assert tensor_digest(data, threads) == defined(data.numpy().tobytes())


def test_a_known_value_never_changes() -> None:
    """Digests travel between releases: another value means another wire format."""
    assert splitmix64(1) == [0xE220A8397B1DCDAF]  # the generator's published first number
    numbers = torch.arange(5, dtype=torch.int64)
    assert tensor_digest(numbers) == defined(numbers.numpy().tobytes()) == "e3382c86b197571a"


def test_pieces_add_up_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randn(5 * BLOCK_WORDS + 3)
    flat = byte_view(data).numpy()
    starts = range(0, len(flat), 2 * BLOCK_BYTES)
    parts = [partial_digest(flat[at : at + 2 * BLOCK_BYTES], at // BLOCK_BYTES) for at in reversed(starts)]
    assert f"{sum(parts) & MASK:016x}" == tensor_digest(data)
    on_device = [digest._device_digest(byte_view(data)[at : at + 2 * BLOCK_BYTES], at // BLOCK_BYTES) for at in starts]
    on_threads = [piece_digest(byte_view(data)[at : at + 2 * BLOCK_BYTES], at // BLOCK_BYTES) for at in starts]
    assert digest_text(sum(on_device)) == digest_text(sum(on_threads)) == tensor_digest(data)
    monkeypatch.setattr(digest, "_THREAD_BYTES", BLOCK_BYTES)
    assert tensor_digest(data, 4) == defined(flat.tobytes())


def test_the_devices_arithmetic_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "_DEVICE_PIECE_BLOCKS", 2)
    for count in (0, 3, BLOCK_BYTES, 3 * BLOCK_BYTES + 4):
        data = torch.randint(0, 256, (count + 4,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
        for start in (0, 4):  # the second begins amid a word
            found = digest._device_digest(data[start : start + count])
            assert f"{found:016x}" == defined(data[start : start + count].numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.int8])
def test_dtypes_and_strides_do_not_matter_only_bytes_do(dtype: torch.dtype) -> None:
    tensor = (torch.randn(12, 7) * 3).to(dtype)
    expected = defined(tensor.view(torch.uint8).numpy().tobytes())
    strided = tensor.t().contiguous().t()
    assert not strided.is_contiguous()
    assert [tensor_digest(tensor), tensor_digest(strided)] == [expected, expected]


def same(a: Tensor, b: Tensor) -> bool:
    return tensor_digest(a) == tensor_digest(b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_faults_that_a_plain_sum_would_miss(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(192 * 4096, generator=generator).to(dtype)
    per_block = BLOCK_BYTES // data.element_size()
    row = 4096  # numbers of a matrix's row: a multiple of what one of the sums runs over

    def flipped(*places: int) -> Tensor:
        return data * torch.ones_like(data).index_fill_(0, torch.tensor(places), -1)

    def swapped(one: int, other: int) -> Tensor:
        words = data.view(torch.int64).clone()
        words[[one, other]] = words[[other, one]]
        return words.view(dtype)

    faults = {
        "all signs": -data,
        "every other sign": flipped(*range(1, data.numel(), 2)),
        "signs of the second half of every row": data.view(-1, 2, row // 2) * torch.tensor([[1], [-1]], dtype=dtype),
        "two signs": flipped(1, 3),
        "signs of one word": flipped(0, 1),
        "signs at one place of two rows": flipped(5, 5 + row),
        "signs at one place of two blocks": flipped(5, 5 + per_block),
        "two words of one column of a block": swapped(3, 3 + COLUMNS),
        "two words of one row of a block": swapped(3, 40),
        "swapped neighbours": data.view(-1, 2).flip(1),
        "two rows swapped": data.view(-1, row)[[1, 0, *range(2, data.numel() // row)]],
        "all rows turned around": data.view(-1, row).flip(0),
        "transposed": data.view(-1, row).t(),
        "swapped blocks": torch.cat([data[per_block:][:per_block], data[:per_block], data[2 * per_block :]]),
        "moved by one": data.roll(1),
        "moved by a row": data.roll(row),
        "an update that never came": data + torch.randn(data.shape, generator=generator).to(dtype),
        "a page of zeros": torch.cat([data[:2048], torch.zeros(512, dtype=dtype), data[2560:]]),
    }
    for fault, changed in faults.items():
        changed = changed.reshape(-1)
        assert not torch.equal(changed, data), fault
        assert not same(changed, data), fault


def test_every_single_bit_counts() -> None:
    data = np.zeros(64, dtype=np.uint8)
    seen = {partial_digest(data)}
    for bit in range(512):
        changed = data.copy()
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(partial_digest(changed))
    assert len(seen) == 513


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("num_bytes", [0, 5, BLOCK_BYTES, 20 * BLOCK_BYTES + 9])
def test_copying_gives_the_bytes_and_their_digest(threads: int, num_bytes: int) -> None:
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    target = torch.full((num_bytes,), 7, dtype=torch.uint8)
    assert digest_text(piece_digest(source, 0, target, threads)) == tensor_digest(source)
    assert torch.equal(source, target)


def test_a_forked_child_digests_with_threads_of_its_own() -> None:
    code = """
import os, signal
import torch
from quartet.weights.digest import BLOCK_BYTES, tensor_digest
tensor = torch.arange(40 * BLOCK_BYTES, dtype=torch.uint8)
digest = tensor_digest(tensor, threads=2)
if os.fork() == 0:
    signal.alarm(20)
    os._exit(0 if tensor_digest(tensor, threads=2) == digest else 1)
print(os.wait()[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "0\n", done.stderr


def test_of_a_copy_it_is_what_came_there_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = (torch.randint(256, (2 * BLOCK_BYTES,), dtype=torch.uint8) for _ in range(2))
    true, positive = piece_digest(source), np.positive

    def faulty(values: Any, out: Any) -> Any:
        positive(values, out=out)
        out[-1, -1] ^= np.uint64(1)
        return out

    monkeypatch.setattr(digest.np, "positive", faulty)
    assert piece_digest(source, 0, target) != true
