"""The manifest: what it says, as JSON, and its digest."""

from __future__ import annotations

import json

import pytest
import torch

from quartet.weights.errors import WeightSyncError
from quartet.weights.manifest import TensorSpec, WeightManifest

SPECS = (TensorSpec("a", "F32", (2, 3)), TensorSpec("b", "BF16", ()), TensorSpec("c", "BOOL", (0, 4)))
MANIFEST = WeightManifest(3, SPECS, ("0" * 16, "1" * 16, "2" * 16))


def test_specs_know_their_size_and_dtype() -> None:
    assert [spec.num_bytes for spec in SPECS] == [24, 2, 0]
    assert MANIFEST.num_bytes == 26
    assert TensorSpec.of("b", torch.tensor(1.0), torch.bfloat16) == SPECS[1]
    with pytest.raises(WeightSyncError, match="complex64"):
        TensorSpec.of("z", torch.zeros(1, dtype=torch.complex64))


def test_json() -> None:
    found = json.loads(json.dumps(MANIFEST.to_json()))
    tensor = {"name": "a", "dtype": "F32", "shape": [2, 3], "digest": "0" * 16}
    assert found["tensors"][0] == tensor and len(found.pop("tensors")) == 3
    assert found == {"wire_format": 1, "version": 3, "digest": MANIFEST.digest}


def test_the_digest_of_all_is_of_contents_and_not_of_their_order() -> None:
    turned = WeightManifest(4, SPECS[::-1], MANIFEST.digests[::-1])
    assert turned.digest == MANIFEST.digest
    others = [
        WeightManifest(3, SPECS, ("0" * 16, "1" * 16, "3" * 16)),
        WeightManifest(3, (TensorSpec("a", "F32", (3, 2)), *SPECS[1:]), MANIFEST.digests),
        WeightManifest(3, (TensorSpec("x", "F32", (2, 3)), *SPECS[1:]), MANIFEST.digests),
        WeightManifest(3, (TensorSpec("a", "I32", (2, 3)), *SPECS[1:]), MANIFEST.digests),
    ]
    assert len({manifest.digest for manifest in (MANIFEST, *others)}) == 5


def test_as_many_digests_as_tensors() -> None:
    with pytest.raises(ValueError, match="3 tensors with 1 digests"):
        WeightManifest(1, SPECS, ("0",))
