"""Randomness as a function of what a token is, never of when or with whom it was computed.

A run's seed and a response's place give the request's seed; the request's seed and a token's position give
the uniform number that picks the token, or with the token's id the number that it races with.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_RACE = np.uint64(0xD1B54A32D192ED03)
_MIX_32 = 0x297A2D39


def sample_seed(run_seed: int, step: int, prompt_id: str | int, response_index: int, turn: int = 0) -> int:
    """A 63-bit seed, the same on every machine and in every process."""
    place = f"{run_seed}\x1f{step}\x1f{prompt_id}\x1f{response_index}" + (f"\x1f{turn}" if turn else "")
    digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_keys(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What ``uniforms`` takes, from seeds ``[B]``; computed once for all positions."""
    return _splitmix(seeds.copy())


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) per (key, position), both ``[B]``: splitmix64 over a mixed seed, 53 bits kept."""
    mixed = _splitmix(positions * _GOLDEN + keys)
    mixed >>= np.uint64(11)
    return mixed.astype(np.float64) * 2.0**-53


def race_keys(keys: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.int32]:
    """``[B, 2]`` of each (key, position): what is added to the hashes of tokens, and what they are multiplied by."""
    mixed = _splitmix((positions * _GOLDEN + keys) ^ _RACE).view(np.int32).reshape(-1, 2)
    mixed[:, 1] |= 1
    return mixed


@lru_cache(maxsize=4)
def token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """``[V]`` int32, each another: tokens with one hash would have the same noise everywhere.

    The last steps of MurmurHash3 (Appleby), every one of which can be undone.
    """
    x = np.arange(vocab_size, dtype=np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(16)
    return torch.from_numpy(x.view(np.int32)).to(device)


def race_numbers(hashes: Tensor, keys: Tensor, scratch: Tensor | None = None) -> Tensor:
    """One number in (0, 1] per row of ``keys [B, 2]`` and token: ``[B, V]`` fp32, precise where it is small.

    Two rounds of multiplication and shift in 32 bits. A shift of signed numbers copies the sign, which the exclusive or
    then takes out: 31 bits are left.

    Args:
        scratch: ``[2, B, V]`` int32 to compute in, the second of which becomes the result.
    """
    x, shifted = hashes.new_empty(2, len(keys), len(hashes)) if scratch is None else scratch
    torch.add(hashes, keys[:, :1], out=x)
    x.mul_(keys[:, 1:])
    x.bitwise_xor_(torch.bitwise_right_shift(x, 15, out=shifted)).mul_(_MIX_32)
    x.bitwise_xor_(torch.bitwise_right_shift(x, 16, out=shifted))
    return shifted.view(torch.float32).copy_(x).add_(0.5).mul_(2.0**-31)


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Output function of splitmix64, in place (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, 2014).
    """
    x += _GOLDEN
    x ^= x >> np.uint64(30)
    x *= _MIX_1
    x ^= x >> np.uint64(27)
    x *= _MIX_2
    x ^= x >> np.uint64(31)
    return x
