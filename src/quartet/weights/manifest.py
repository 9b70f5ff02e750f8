"""What is sent: names, shapes and dtypes of tensors; and what a sync ends in when it does not end well.

What a weight sync ends in when it does not end well. Every error names the rank and the tensor.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from quartet.config import UserError


class WeightSyncError(UserError):
    """A sync that did not come to its end.

    Attributes:
        rank: the receiver's rank that is to blame; None where it is the sender, or this process.
        tensor: the tensor that was under way; None before the first and after the last.
    """

    def __init__(
        self, problem: str, *, found: str, remedy: str, rank: int | None = None, tensor: str | None = None
    ) -> None:
        self.rank = rank
        self.tensor = tensor
        super().__init__(problem, found=found, remedy=remedy)


def with_rank(error: WeightSyncError, rank: int | None) -> WeightSyncError:
    """Returns the error as one of the receiver of this rank, which reported it, where it names no rank; None: the
    sender.
    """
    if rank is None or error.rank is not None:
        return error
    named = copy(error)
    named.rank = rank
    if f"rank {rank}" not in f"{error.problem} {error.found}":
        UserError.__init__(named, error.problem, found=f"{error.found} (at rank {rank})", remedy=error.remedy)
    return named


class WeightSyncTimeout(WeightSyncError):
    """An end did nothing for longer than the time allowed."""


class PeerFailed(WeightSyncError):
    """Another end of the sync has failed or is gone; what it says itself tells more."""


class WeightsRefused(WeightSyncError):
    """Names, shapes, dtypes or the version do not fit the sink. Nothing was written, it keeps what it had."""


class WeightMismatch(WeightSyncError):
    """A tensor arrived with other contents than it was sent with.

    Attributes:
        sent, arrived: the two digests.
    """

    def __init__(self, name: str, *, sent: str, arrived: str, version: int) -> None:
        self.sent = sent
        self.arrived = arrived
        super().__init__(
            f"the weights of version {version} did not arrive as they were sent",
            found=f"{name!r} with the digest {arrived}, sent with {sent}",
            remedy="sync again; if it comes back, something writes into the weights while they are sent or served, "
            "or the memory or the network is faulty",
            tensor=name,
        )


class WeightsUnusable(WeightSyncError):
    """Weights are asked for that are not whole, or not of the version that is wanted."""


def tensor_clause(name: str | None) -> str:
    """Writes the end of a sentence about a sync."""
    return "" if name is None else f", at tensor {name!r}"


DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the names that safetensors gives them."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a key of ``DTYPES``."""
    return _NAMES[dtype]


@dataclass(frozen=True)
class TensorSpec:
    """One whole tensor, before its contents are known.

    Attributes:
        dtype: a key of ``DTYPES``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> TensorSpec:
        """Describes ``tensor``, unsharded if it is a DTensor, cast to ``dtype``.

        Raises:
            WeightSyncError: a dtype that the wire format has no name for.
        """
        wanted = dtype or tensor.dtype
        if wanted not in _NAMES:
            raise WeightSyncError(
                "the wire format has no name for a tensor's dtype",
                found=f"{name!r} of {wanted}",
                remedy=f"send it as one of {', '.join(str(d) for d in _NAMES)}",
                tensor=name,
            )
        return cls(name, _NAMES[wanted], tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize
