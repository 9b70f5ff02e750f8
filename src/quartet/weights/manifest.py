"""What is sent: the tensors' names, shapes and dtypes before, and a manifest with digests after.

A manifest is JSON, and the data beside it are raw bytes: little-endian, row-major, unsharded. So both ends need the
same ``WIRE_FORMAT`` and nothing else in common, neither Python nor torch::

    {"wire_format": 1, "version": 7, "digest": "…",
     "tensors": [{"name": "lm_head.weight", "dtype": "BF16", "shape": [32000, 4096], "digest": "…"}, …]}
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from quartet.weights.errors import WeightSyncError

WIRE_FORMAT = 1
"""Counts changes of the manifest or of the digest's definition."""
HEADS_PREFIX = "medusa."
"""First part of the names of Medusa heads' tensors, which travel beside their trunk's."""
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

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or min(self.shape, default=0) < 0:
            raise _malformed(f"the tensor {self.name!r} of {self.dtype} {list(self.shape)}")

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


class _Row(BaseModel):
    name: str
    dtype: str
    shape: list[int] | tuple[int, ...]
    digest: str


class _Written(BaseModel):
    version: int
    digest: str
    tensors: list[_Row]


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

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> WeightManifest:
        """
        Raises:
            WeightSyncError: another wire format, not a manifest, or one whose digest is not that of its lines.
        """
        if value.get("wire_format") != WIRE_FORMAT:
            raise _malformed(f"wire format {value.get('wire_format')!r}, here {WIRE_FORMAT}")
        try:
            written = _Written.model_validate(dict(value), strict=True)
        except ValidationError as error:
            wrong = error.errors()[0]
            raise _malformed(f"{'.'.join(map(str, wrong['loc']))} {wrong['input']!r:.200}: {wrong['msg']}") from error
        tensors = tuple(TensorSpec(row.name, row.dtype, tuple(row.shape)) for row in written.tensors)
        manifest = cls(written.version, tensors, tuple(row.digest for row in written.tensors))
        if manifest.digest != written.digest:
            raise _malformed(f"the digest {written.digest!r} of lines that give {manifest.digest!r}")
        return manifest


def _malformed(found: str) -> WeightSyncError:
    return WeightSyncError(
        "the manifest of the weights cannot be read",
        found=found,
        remedy="install the same release of quartet on both ends",
    )
