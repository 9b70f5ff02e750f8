"""The manifest: JSON there and back, and what is refused."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch

from quartet.weights.errors import WeightSyncError
from quartet.weights.manifest import WIRE_FORMAT, TensorSpec, WeightManifest

SPECS = (TensorSpec("a", "F32", (2, 3)), TensorSpec("b", "BF16", ()), TensorSpec("c", "BOOL", (0, 4)))
MANIFEST = WeightManifest(3, SPECS, ("0" * 16, "1" * 16, "2" * 16))


def test_specs_know_their_size_and_dtype() -> None:
    assert [spec.num_bytes for spec in SPECS] == [24, 2, 0]
    assert MANIFEST.num_bytes == 26
    assert TensorSpec.of("b", torch.tensor(1.0), torch.bfloat16) == SPECS[1]
    with pytest.raises(WeightSyncError, match="complex64"):
        TensorSpec.of("z", torch.zeros(1, dtype=torch.complex64))


def test_json_there_and_back() -> None:
    text = json.dumps(MANIFEST.to_json())
    assert WeightManifest.from_json(json.loads(text)) == MANIFEST


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


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"wire_format": WIRE_FORMAT + 1}, "wire format"),
        ({"version": "3"}, "version '3'"),
        ({"tensors": None}, "tensors None"),
        ({"digest": "0" * 32}, "the digest '000"),
    ],
)
def test_what_is_no_manifest_is_refused(change: dict[str, Any], found: str) -> None:
    value = MANIFEST.to_json() | change
    with pytest.raises(WeightSyncError, match=found):
        WeightManifest.from_json(value)


@pytest.mark.parametrize(
    "change", [{"dtype": "F31"}, {"shape": [-1]}, {"shape": [True]}, {"shape": "2"}, {"name": 5}, {"digest": None}]
)
def test_a_tensor_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    value = copy.deepcopy(MANIFEST.to_json())
    value["tensors"][0] |= change
    with pytest.raises(WeightSyncError, match="cannot be read"):
        WeightManifest.from_json(value)


def test_as_many_digests_as_tensors() -> None:
    with pytest.raises(ValueError, match="3 tensors with 1 digests"):
        WeightManifest(1, SPECS, ("0",))
