"""Published versions: whole or not at all, readable by others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quartet.extras.servers.sglang import publish
from quartet.weights.manifest import TensorSpec

WEIGHTS = {
    "w": torch.arange(6.0).view(2, 3),
    "n": torch.tensor([True, False, True]),
    "h": torch.tensor(1.5, dtype=torch.bfloat16),
    "e": torch.empty(0, 2),
    "d": torch.ones(2, dtype=torch.float64),
}
SPECS = [TensorSpec.of(name, tensor) for name, tensor in WEIGHTS.items()]


def test_other_programs_read_it_and_the_template_lies_beside(tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.mkdir()
    (template / "config.json").write_text("{}")
    (template / "model.safetensors").write_text("old weights")
    path = publish(tmp_path / "out", 12, SPECS, WEIGHTS.values(), template)
    assert path == tmp_path / "out" / "version_00000012"
    assert sorted(p.name for p in path.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]
    found = load_file(path / "model.safetensors")
    assert found.keys() == WEIGHTS.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in WEIGHTS.items()
    )


def test_only_the_newest_stay_and_the_same_version_may_come_again(tmp_path: Path) -> None:
    for version in (1, 2, 2, 3):
        publish(tmp_path, version, SPECS, WEIGHTS.values())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["version_00000002", "version_00000003"]


def test_a_version_that_breaks_off_is_never_seen(tmp_path: Path) -> None:
    def broken() -> Iterator[Tensor]:
        yield from list(WEIGHTS.values())[:2]
        raise RuntimeError("the disk is on fire")

    publish(tmp_path, 1, SPECS, WEIGHTS.values())
    with pytest.raises(RuntimeError, match="on fire"):
        publish(tmp_path, 2, SPECS, broken())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["version_00000001"]
    # What a killed process leaves is cleared away by the next version.
    (tmp_path / ".draft_00000002").mkdir()
    publish(tmp_path, 2, SPECS, WEIGHTS.values())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["version_00000001", "version_00000002"]
