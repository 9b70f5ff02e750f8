"""Digests of tensors: sums over pieces (offset, length) of their bytes, at memory speed, in any order on any device.

The bytes, little-endian and row-major, are read as 64-bit words, the last one filled up with zeros. They lie in blocks
of 63 rows of 1025 words. Everything is modulo 2^64. Of block ``k`` only sums are taken, since memory speed leaves time
for no more::

    f_0 … f_1024     the sums of its columns
    f_1025 … f_1087  the sums of its rows
    digest = Σ_k P^k · Σ_i (lower half of f_i · a_i + upper half of f_i · b_i)

Two words never share both their row and their column, so one or two changed words of a block always show in ``f``, and
the odd sides keep regular patterns (every other sign, say) from cancelling. The last line is multilinear hashing
(Carter and Wegman 1979), which misses a change of ``f`` with a chance of about 2^-32. Its constants are from SplitMix64
seeded with 0 (Steele et al. 2014): ``a_i`` and ``b_i`` are its numbers ``2 i`` and ``2 i + 1`` made odd, ``P`` is the
next one made 5 modulo 8, which gives its powers the longest period. The digest finds faults, not forgers.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
ROWS, COLUMNS = 63, 1025
BLOCK_WORDS = ROWS * COLUMNS
BLOCK_BYTES = 8 * BLOCK_WORDS
_NUM_SUMS = ROWS + COLUMNS
_THREAD_BYTES = 8 * BLOCK_BYTES
"""What one thread takes at a time of a large piece."""
_DEVICE_PIECE_BLOCKS = 256
_MASK = 2**64 - 1


def _splitmix64(n: int) -> list[int]:
    numbers, state = [], 0
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        numbers.append(z ^ (z >> 31))
    return numbers


@cache
def _constants() -> tuple[Words, Words, int]:
    """Returns ``a``; ``c = b - 2^32 a``, with which ``lower a + upper b = f a + upper c``; and ``P``."""
    numbers = _splitmix64(2 * _NUM_SUMS + 1)
    pairs = np.array(numbers[:-1], dtype=np.uint64).reshape(_NUM_SUMS, 2) | np.uint64(1)
    a = np.ascontiguousarray(pairs[:, 0])
    return a, pairs[:, 1] - (a << np.uint64(32)), numbers[-1] & ~7 | 5


def byte_view(tensor: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor as a flat uint8 view."""
    # A single element counts as contiguous with any stride, but only with 1 can its bytes be viewed.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def partial_digest(data: Bytes, first_block: int = 0, copy: Bytes | None = None) -> int:
    """Returns the part of the sum that ``data`` gives, where it begins at block ``first_block`` of its tensor.

    Args:
        copy: filled with ``data`` on the way; it is what the sum is taken of then, while it is in the cache.
    """
    whole = len(data) // BLOCK_BYTES * BLOCK_BYTES
    sums = [_sums_of_blocks(data[:whole], None if copy is None else copy[:whole])]
    if whole < len(data):
        rest = data[whole:]
        if copy is not None:
            copy[whole:] = rest
            rest = copy[whole:]
        sums.append(_sums_of_rest(rest))
    return _combine(np.concatenate(sums), first_block)


def _sums_of_blocks(data: Bytes, copy: Bytes | None) -> Words:
    """Returns ``f`` of whole blocks, ``[blocks, 1088]``."""
    lines = data.view(np.uint64).reshape(-1, COLUMNS)
    written = None if copy is None else copy.view(np.uint64).reshape(-1, COLUMNS)
    sums = np.empty((len(lines) // ROWS, _NUM_SUMS), dtype=np.uint64)
    for out, begin in zip(sums, range(0, len(lines), ROWS), strict=True):
        block = lines[begin : begin + ROWS]
        if written is not None:
            # For blocks of this size numpy's vector loops are faster than its copy, which calls the C library's.
            block = np.positive(block, out=written[begin : begin + ROWS])
        np.add.reduce(block, axis=1, out=out[COLUMNS:])
        np.add.reduce(block, axis=0, out=out[:COLUMNS])
    return sums


def _sums_of_rest(data: Bytes) -> Words:
    """Returns ``f`` of what is less than a block, ``[1, 1088]``: of whole rows, the last one filled up with zeros."""
    rows = -(-len(data) // (8 * COLUMNS))
    block = np.zeros((rows, COLUMNS), dtype=np.uint64)
    block.view(np.uint8).reshape(-1)[: len(data)] = data
    sums = np.zeros((1, _NUM_SUMS), dtype=np.uint64)
    np.add.reduce(block, axis=0, out=sums[0, :COLUMNS])
    np.add.reduce(block, axis=1, out=sums[0, COLUMNS : COLUMNS + rows])
    return sums


def _combine(sums: Words, first_block: int) -> int:
    """Computes the last line of the digest's definition, for ``sums [blocks, 1088]``."""
    a, c, p = _constants()
    total, power = 0, pow(p, first_block, 2**64)
    for block_sum in (np.dot(sums, a) + np.dot(sums >> np.uint64(32), c)).tolist():
        total = (total + block_sum * power) & _MASK
        power = (power * p) & _MASK
    return total


def _device_digest(data: Tensor, first_block: int = 0) -> int:
    """Computes ``partial_digest`` where the tensor is, in torch's wrapping int64; only the sums travel."""
    total = 0
    for start in range(0, data.numel(), _DEVICE_PIECE_BLOCKS * BLOCK_BYTES):
        piece = data[start : start + _DEVICE_PIECE_BLOCKS * BLOCK_BYTES]
        num_blocks = -(-piece.numel() // BLOCK_BYTES)
        if piece.numel() % BLOCK_BYTES or piece.storage_offset() % 8:
            filled = piece.new_zeros(num_blocks * BLOCK_BYTES)
            filled[: piece.numel()] = piece
            piece = filled
        words = piece.view(torch.int64).view(num_blocks, ROWS, COLUMNS)
        sums = torch.cat([words.sum(1), words.sum(2)], 1).cpu().numpy().view(np.uint64)
        total = (total + _combine(sums, first_block + start // BLOCK_BYTES)) & _MASK
    return total


def digest_text(total: int) -> str:
    """Writes a digest from the sum of its pieces: 16 hex digits."""
    return f"{total & _MASK:016x}"


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "digest")


# A forked child has none of the threads, and would wait for them.
os.register_at_fork(after_in_child=_pool.cache_clear)


def tensor_digest(tensor: Tensor, threads: int | None = None) -> str:
    """Returns the digest, 16 hex digits. A strided tensor is copied first."""
    return digest_text(piece_digest(byte_view(tensor.contiguous()), threads=threads))


def piece_digest(data: Tensor, first_block: int = 0, target: Tensor | None = None, threads: int | None = None) -> int:
    """Returns the part of a tensor's sum that a piece gives; the sum of all its pieces is its digest.

    Args:
        data: flat uint8; begins at block ``first_block`` and ends with a block or with the tensor.
        target: takes a copy of the bytes, block by block; what came there is summed (flat uint8).
        threads: as many as torch uses when left out.
    """
    if target is not None and not (data.device.type == target.device.type == "cpu"):
        data, target = target.copy_(data), None
    if data.device.type != "cpu":
        return _device_digest(data, first_block)
    read, written = data.numpy(), None if target is None else target.numpy()

    def part(at: int) -> int:
        end = at + _THREAD_BYTES
        copy = None if written is None else written[at:end]
        return partial_digest(read[at:end], first_block + at // BLOCK_BYTES, copy)

    starts, threads = range(0, len(read), _THREAD_BYTES), threads or torch.get_num_threads()
    if threads == 1 or len(starts) < 2:
        return sum(map(part, starts))
    return sum(_pool(threads).map(part, starts))
