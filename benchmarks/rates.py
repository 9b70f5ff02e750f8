"""What this machine does at best, measured on the spot: products by shape, memory bandwidth by working set.

Seconds are the least of several repetitions: a floor is what the machine can do, not what it did on average.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

WORKING_SETS = tuple(2**n for n in range(18, 29, 2))
"""Bytes: 256 KiB (a core's cache) to 256 MiB (main memory)."""


@dataclass(frozen=True)
class Product:
    """``batch`` products of ``[rows, inner] x [inner, columns]``; which operand is stored transposed matters."""

    rows: int
    inner: int
    columns: int
    batch: int = 1
    transposed: str = "right"

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.rows * self.inner * self.columns


@dataclass
class Rates:
    """Measures each shape once per dtype.

    Args:
        budget_s: seconds spent on one measurement, at least two repetitions.
        working_sets: bytes at which bandwidths are measured.
    """

    budget_s: float = 0.25
    working_sets: tuple[int, ...] = WORKING_SETS
    _products: dict[tuple[Product, torch.dtype], float] = field(default_factory=dict)
    _read: dict[int, float] = field(default_factory=dict)
    _copy: dict[int, float] = field(default_factory=dict)

    def flops_per_s(self, product: Product, dtype: torch.dtype) -> float:
        key = (product, dtype)
        if key not in self._products:
            left, right = _operands(product, dtype)
            out = left @ right
            seconds = self._least(lambda: torch.matmul(left, right, out=out))
            self._products[key] = product.flops / seconds
        return self._products[key]

    def peak_flops_per_s(self, dtype: torch.dtype, size: int = 2048) -> float:
        """Of a large square product: the machine's rate, whatever the model."""
        return self.flops_per_s(Product(size, size, size), dtype)

    def read_bytes_per_s(self, num_bytes: float) -> float:
        size = self._class_of(num_bytes)
        if size not in self._read:
            source = torch.ones(size // 4)
            self._read[size] = size / self._least(source.sum)
        return self._read[size]

    def copy_bytes_per_s(self, num_bytes: float) -> float:
        """Bytes read plus bytes written, of a working set of both together."""
        size = self._class_of(num_bytes)
        if size not in self._copy:
            source = torch.ones(size // 8)
            target = torch.empty_like(source)
            self._copy[size] = size / self._least(lambda: target.copy_(source))
        return self._copy[size]

    def memory_seconds(self, read: float, written: float) -> float:
        """Time to stream ``read`` and ``written`` bytes once: pairs of them as in a copy, the rest as reads."""
        total, paired = read + written, 2 * min(read, written)
        rest = total - paired
        seconds = paired / self.copy_bytes_per_s(total) if paired else 0.0
        return seconds + (rest / self.read_bytes_per_s(total) if rest else 0.0)

    def _class_of(self, num_bytes: float) -> int:
        return next((size for size in self.working_sets if size >= num_bytes), self.working_sets[-1])

    def _least(self, work: Callable[[], object]) -> float:
        work()
        least, end, done = float("inf"), time.perf_counter() + self.budget_s, 0
        while done < 2 or time.perf_counter() < end:
            start = time.perf_counter()
            work()
            least = min(least, time.perf_counter() - start)
            done += 1
        return least


def _operands(product: Product, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch = (product.batch,) if product.batch > 1 else ()

    def stored(rows: int, columns: int, transposed: bool) -> Tensor:
        if transposed:
            return torch.randn(*batch, columns, rows).to(dtype).transpose(-1, -2)
        return torch.randn(*batch, rows, columns).to(dtype)

    left = stored(product.rows, product.inner, product.transposed == "left")
    return left, stored(product.inner, product.columns, product.transposed == "right")
