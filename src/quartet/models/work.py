"""What a model's passes compute, counted where they run, and what its device could compute in that time.

FLOPs are those that the sequences need by the model's shape: products by their weights, attention by the pairs of
tokens, backward passes too. What is computed again (recomputation, copies of a prompt, a pass repeated with smaller
micro-batches) and idle passes are no part of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from quartet.batch.ragged import RaggedBatch
from quartet.observe.memory import peak_resident_bytes

PEAK_FLOPS = {
    "H200 NVL": (835e12, 60e12),
    "H200": (989e12, 67e12),
    "H100 NVL": (835e12, 60e12),
    "H100 PCIe": (756e12, 51e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
}
"""FLOP/s of dense products by the vendor's data sheets, in bf16 and in fp32 (no TF32). Longer names go first."""


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Returns the peak FLOP/s of dense products on this device; None where no data sheet is known, as on every CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    halves, singles = next((peaks for known, peaks in PEAK_FLOPS.items() if known in name), (None, None))
    return halves if precision == "bf16" else singles


def attended_pairs(batch: RaggedBatch) -> int:
    """Counts pairs of a token and one that it attends to, itself included; those of a shared prompt once."""
    depths: list[int] = []
    pairs = 0
    for parent, length in zip(batch.parents, batch.segment_lengths, strict=True):
        depths.append(depths[parent] + batch.segment_lengths[parent] if parent >= 0 else 0)
        pairs += length * depths[-1] + length * (length + 1) // 2
    return pairs


@dataclass(frozen=True)
class ModelFlops:
    """What a forward pass takes by the model's shape; a product of one weight is two FLOPs.

    Attributes:
        token: of the layers' products, per token.
        pair: of attention, per token attended to.
        row: of the head, per row that it reads.
        trained_token, trained_row: the share of these products whose weights learn.
    """

    token: float
    pair: float
    row: float
    trained_token: float = 0.0
    trained_row: float = 0.0

    def of(self, tokens: int, pairs: int, rows: int, *, gradients: bool) -> float:
        """Returns the FLOPs of one pass. A backward takes the forward's once more for the inputs, and besides what the
        gradients of trained weights take; in attention's products both factors are inputs.
        """
        forward = self.token * tokens + self.pair * pairs + self.row * rows
        if not gradients:
            return forward
        return 2 * forward + self.trained_token * tokens + self.pair * pairs + self.trained_row * rows


@dataclass(frozen=True)
class WorkTotals:
    """What passes took, added up over passes and processes.

    Attributes:
        computed_tokens: positions that were computed, those of idle passes and padding too.
        useful_tokens: of the sequences, a shared prompt once.
        flops: that the sequences needed.
        seconds: in passes and updates, of every process.
        possible_flops: that the devices could have computed in these seconds; None where that is unknown.
        sent_bytes: weights, gradients and rows, to other processes.
        host_peak_bytes, device_peak_bytes: of a process, since it began; the largest.
        sent: of ``sent_bytes`` how many by each kind of collective.
        pictures: that went through the model's tower.
    """

    computed_tokens: int = 0
    useful_tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    possible_flops: float | None = None
    sent_bytes: int = 0
    host_peak_bytes: int = 0
    device_peak_bytes: int = 0
    sent: Mapping[str, int] = field(default_factory=dict)
    pictures: int = 0

    @classmethod
    def joined(cls, parts: Iterable[WorkTotals]) -> WorkTotals:
        parts = list(parts)
        possible = [part.possible_flops for part in parts if part.possible_flops is not None]
        return cls(
            sum(part.computed_tokens for part in parts),
            sum(part.useful_tokens for part in parts),
            sum(part.flops for part in parts),
            sum(part.seconds for part in parts),
            sum(possible) if parts and len(possible) == len(parts) else None,
            sum(part.sent_bytes for part in parts),
            max((part.host_peak_bytes for part in parts), default=0),
            max((part.device_peak_bytes for part in parts), default=0),
            dict(sum((Counter(part.sent) for part in parts), Counter[str]())),
            sum(part.pictures for part in parts),
        )


class WorkCounter:
    """Counts the work of one model in this process."""

    def __init__(self) -> None:
        self.computed_tokens = self.useful_tokens = self.pictures = 0
        self.flops = self._seconds = 0.0
        self.sent: Counter[str] = Counter()
        """Bytes by kind of collective."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Times a pass or an update."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - begun

    def take(self, device: torch.device, precision: str) -> WorkTotals:
        """Returns what was counted since the last call."""
        peak, on_gpu = peak_flops(device, precision), device.type == "cuda"
        found = WorkTotals(
            self.computed_tokens,
            self.useful_tokens,
            self.flops,
            self._seconds,
            None if peak is None else self._seconds * peak,
            self.sent.total(),
            peak_resident_bytes(),
            torch.cuda.max_memory_allocated(device) if on_gpu else 0,
            dict(self.sent),
            self.pictures,
        )
        self.sent.clear()
        self.computed_tokens = self.useful_tokens = self.pictures = 0
        self.flops = self._seconds = 0.0
        return found
