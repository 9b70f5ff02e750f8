"""Data-parallel updates between real processes (gloo): what they compute, and what is left when one of them fails."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quartet.cluster.worker import free_port

SCRIPT = Path(__file__).parents[1] / "data_parallel_ranks.py"
_spec = importlib.util.spec_from_file_location("data_parallel_ranks", SCRIPT)
assert _spec is not None and _spec.loader is not None
ranks: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)

LIMIT_S = 400.0


def run(job: str, world: int, folder: Path) -> list[int]:
    """Return codes of the ranks; all have ended when it returns."""
    port, deadline = free_port(), time.monotonic() + LIMIT_S
    command = [sys.executable, str(SCRIPT), job]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen([*command, str(rank), str(world), str(port), str(folder)], env=environment)
        for rank in range(world)
    ]
    try:
        return [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank found."""
    folder = tmp_path_factory.mktemp(f"world{request.param}")
    assert run("all", request.param, folder) == [0] * request.param
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(request.param)]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    """The same in one process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {name: ranks.updates(name, None) for name in ranks.cases()}
    torch.set_num_threads(before)
    return found


@pytest.mark.parametrize("name", list(ranks.cases()))
def test_updates_are_those_of_one_process(
    name: str,
    results: list[dict[str, Any]],
    alone: dict[str, dict[str, Any]],
    tolerances: dict[torch.dtype, tuple[float, float]],
) -> None:
    """Up to the order of sums, in fp64: the second update shows what the first one did to the optimizer."""
    atol, rtol = tolerances[torch.float64]
    expected = alone[name]
    for found in (result["updates"][name] for result in results):
        for metrics, of_one in zip(found["metrics"], expected["metrics"], strict=True):
            assert metrics == pytest.approx(of_one, rel=rtol, abs=atol)
        assert found["weights"].keys() == expected["weights"].keys()
        for key, value in expected["weights"].items():
            torch.testing.assert_close(found["weights"][key], value, atol=atol, rtol=rtol)


def test_replicas_stay_equal_to_the_bit(results: list[dict[str, Any]]) -> None:
    first, *others = results
    for other in others:
        assert _same(other["state"], first["state"])
        assert _same(other["updates"], first["updates"])
        assert other["few"] == first["few"]


def _same(actual: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(_same(actual[key], expected[key]) for key in expected)
    if isinstance(expected, Tensor):
        return torch.equal(actual, expected)
    return bool(actual == expected)


def test_memory_that_runs_out_on_one_shrinks_the_budget_of_all(results: list[dict[str, Any]]) -> None:
    found = [result["out_of_memory"] for result in results]
    assert all(other == found[0] for other in found)
    assert found[0]["num_oom"] == 1 and found[0]["tokens"] < 13 and found[0]["as_the_smaller"]


def test_a_rank_that_fails_is_named_and_the_others_go_on(results: list[dict[str, Any]]) -> None:
    world, found = len(results), [result["failure"] for result in results]
    assert found[-1]["error"] == "KeyError: 'ref_logprobs'"
    for other in found[:-1]:
        assert other["error"].startswith("RankFailed")
        assert f"rank {world - 1} of {world}: KeyError: 'ref_logprobs'" in other["error"]
    assert all(one["seconds"] < 10 for one in found)
    assert all(one["after"] == found[0]["after"] for one in found)


def test_a_process_that_is_gone_stops_the_others(tmp_path: Path) -> None:
    assert run("loss", 3, tmp_path) == [7, 0, 0]
    for rank in (1, 2):
        found = torch.load(tmp_path / f"rank{rank}.pt")["loss"]
        assert "cannot be reached any more" in found["error"]
        assert found["seconds"] < 30
