"""What is sent: the tensors' names, shapes and dtypes before, and a manifest with digests after.

Beside published weights it is JSON::

    {"wire_format": 1, "version": 7, "digest": "…",
     "tensors": [{"name": "lm_head.weight", "dtype": "BF16", "shape": [32000, 4096], "digest": "…"}, …]}
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from quartet.weights.errors import WeightSyncError

WIRE_FORMAT = 1
"""Counts changes of the manifest or of the digest's definition."""
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
    """A key of ``DTYPES``."""
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
        """Of ``tensor``, unsharded if it is a DTensor, cast to ``dtype``.

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
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.torch_dtype.itemsize


@dataclass(frozen=True)
class WeightManifest:
    """The weights of one version.

    Attributes:
        tensors: in the order in which they are sent.
        digests: of each, in the same order.
    """

    version: int
    tensors: tuple[TensorSpec, ...]
    digests: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.tensors) != len(self.digests):
            raise ValueError(f"{len(self.tensors)} tensors with {len(self.digests)} digests")

    @cached_property
    def digest(self) -> str:
        """Of all names, dtypes, shapes and contents, whatever their order: BLAKE2b with 16 bytes, as hex."""
        lines = sorted(
            json.dumps([spec.name, spec.dtype, list(spec.shape), digest], separators=(",", ":"))
            for spec, digest in zip(self.tensors, self.digests, strict=True)
        )
        return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors)

    def to_json(self) -> dict[str, Any]:
        tensors = [asdict(spec) | {"digest": digest} for spec, digest in zip(self.tensors, self.digests, strict=True)]
        return {"wire_format": WIRE_FORMAT, "version": self.version, "digest": self.digest, "tensors": tensors}
