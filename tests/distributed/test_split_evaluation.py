"""Ranks of a supervised job share held-out passes and those of the reference: same figures, a part of the passes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import split_evaluation as ranks
from rank_forks import run_ranks
from tolerances import TOLERANCES


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every job in one process, and under ``path`` what it left on disk."""
    path = tmp_path_factory.mktemp("alone")
    for job in ranks.JOBS:
        (path / job).mkdir()
    return {"path": path} | {job: ranks.evaluated(job, None, path / job) for job in ranks.JOBS}


def files(path: Path) -> Iterator[tuple[str, str]]:
    """Names and shapes of the reference tables."""
    for file in sorted(path.rglob("*.safetensors")):
        yield file.name, str({name: values.shape for name, values in load_file(file).items()})


def close(found: dict[str, float], expected: dict[str, float]) -> None:
    """As fp32: models are fp64, but norms and log-probabilities round in fp32, and packs are others."""
    atol, rtol = TOLERANCES[torch.float32]
    assert found == pytest.approx(expected, rel=rtol, abs=atol)


@pytest.mark.parametrize(("world", "shard", "jobs"), [(2, 1, ["dpo"]), (2, 2, list(ranks.JOBS))])
def test_ranks_share_the_passes_and_agree_with_one_process(
    world: int, shard: int, jobs: list[str], alone: dict[str, Any], tmp_path: Path
) -> None:
    of_ranks = run_ranks(world, ranks.on_ranks, shard, jobs, str(tmp_path))
    for job in jobs:
        expected, found = alone[job], [of_rank[job] for of_rank in of_ranks]
        for of_rank in found:
            close(of_rank["figures"], expected["figures"])
            close(of_rank["step"], expected["step"])
        for name in ("reference", "evaluation"):
            computed, once = [of_rank[name] for of_rank in found], expected[name]
            assert sum(counts.tokens for counts in computed) == once.tokens, (job, name)
            assert max(counts.tokens for counts in computed) <= 1.1 * once.tokens / world, (job, name)
            # Of each batch a rank may need one pass more than its part of them.
            most = once.passes // world + once.batches
            assert max(counts.passes + counts.idle for counts in computed) <= most, (job, name)
        if "tables" in expected:
            for of_rank in found:
                assert of_rank["missing"] == expected["missing"]
                atol, rtol = TOLERANCES[torch.float32]
                torch.testing.assert_close(of_rank["tables"], expected["tables"], rtol=rtol, atol=atol)
            ours, theirs = (dict(files(path / job)) for path in (tmp_path, alone["path"]))
            assert ours == theirs and len(ours) == 2, "other numbers of processes take each other's tables"
    assert not (tmp_path / "unseen").exists()


def test_two_processes_take_the_tables_of_one(alone: dict[str, Any]) -> None:
    for found in run_ranks(2, ranks.on_ranks, 2, ["dpo"], str(alone["path"])):
        assert found["dpo"]["missing"] == found["dpo"]["reference"].passes == 0
        close(found["dpo"]["figures"], alone["dpo"]["figures"])


def test_all_ranks_are_told_where_one_fails() -> None:
    for shard in (1, 2):
        first, second = run_ranks(2, ranks.failing, shard)
        assert second == "ValueError: planted"
        assert first.startswith("RankFailed") and "rank 1 of 2: ValueError: planted" in first
