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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TensorSpec:
        """
        Raises:
            WeightSyncError: not what ``to_json`` gives.
        """
        name, dtype, shape = value.get("name"), value.get("dtype"), value.get("shape")
        sizes_fit = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
        if not isinstance(name, str) or dtype not in DTYPES or not sizes_fit:
            raise _malformed(f"the tensor {value!r:.200}")
        assert isinstance(dtype, str) and isinstance(shape, list)
        return cls(name, dtype, tuple(shape))


@dataclass(frozen=True)
class Manifest:
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
        tensors = [
            {**spec.to_json(), "digest": digest} for spec, digest in zip(self.tensors, self.digests, strict=True)
        ]
        return {"wire_format": WIRE_FORMAT, "version": self.version, "digest": self.digest, "tensors": tensors}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Manifest:
        """
        Raises:
            WeightSyncError: another wire format, not a manifest, or one whose digest is not that of its lines.
        """
        if value.get("wire_format") != WIRE_FORMAT:
            raise other_wire_format(value.get("wire_format"))
        rows, version = value.get("tensors"), value.get("version")
        if not isinstance(rows, list) or type(version) is not int:
            raise _malformed(f"version {version!r}, tensors of type {type(rows).__name__}")
        digests = [row.get("digest") for row in rows]
        if not all(isinstance(digest, str) for digest in digests):
            raise _malformed("a tensor without a digest")
        manifest = cls(version, tuple(TensorSpec.from_json(row) for row in rows), tuple(digests))
        if manifest.digest != value.get("digest"):
            raise _malformed(f"the digest {value.get('digest')!r} of lines that give {manifest.digest!r}")
        return manifest


def tensors_from_json(rows: Any) -> tuple[TensorSpec, ...]:
    """
    Raises:
        WeightSyncError: not a list of tensors.
    """
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise _malformed(f"tensors of type {type(rows).__name__}")
    return tuple(TensorSpec.from_json(row) for row in rows)


def num_bytes_of(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.num_bytes for spec in specs)


def other_wire_format(found: object) -> WeightSyncError:
    return WeightSyncError(
        "the other end of the weight sync speaks another wire format",
        found=f"wire format {found!r}, here {WIRE_FORMAT}",
        remedy="install the same release of quartet on both ends",
    )


def _malformed(found: str) -> WeightSyncError:
    return WeightSyncError(
        "the manifest of the weights cannot be read",
        found=found,
        remedy="install the same release of quartet on both ends",
    )
