"""The doctor's check of memory counts of a model that is cut what the rank with most has, and refuses by that."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import torch

from pipeline_ranks import make_packed
from quartet.cluster.dispatch import RankLayout, dispatched_methods
from quartet.config.placement import ResolvedPlacement, ResolvedPool
from quartet.extras.doctor.checks import Finding
from quartet.extras.doctor.examine import check_memory
from quartet.schedule.model_worker import TrainWorker
from quartet.trainers.workers import RunWorkers
from rank_forks import run_ranks
from stage_sizes import CRITIC, critic_sizes


class Ranks:
    """A group of workers that have answered already."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers

    async def call(self, method: Any) -> Any:
        plan = dispatched_methods(TrainWorker)[method.__name__].mode.plan(RankLayout(len(self._answers)), (), {})
        return plan.collect([self._answers[rank] for rank in plan.answers], plan.shares)


def finding(critic: list[Any], budget_bytes: int) -> Finding:
    pool = ResolvedPool("critics", len(critic), 1, 1, budget_bytes)
    placement = ResolvedPlacement("separated", (pool,), {"critic": "critics", "rollout": "critics"})
    groups = {"critic": Ranks(critic), "rollout": Ranks([{"generate": 0}])}
    workers = SimpleNamespace(placement=placement, models=["critic"], groups_of=lambda role: [groups[role]])
    workers.sizes = lambda: RunWorkers.sizes(workers)  # type: ignore[arg-type]
    packed = SimpleNamespace(device=torch.device("cpu"))
    recipe = SimpleNamespace(cluster=SimpleNamespace(type="ray"))
    run: Any = SimpleNamespace(
        workers=workers, roles=SimpleNamespace(actor=SimpleNamespace(packed=packed), recipe=recipe)
    )
    return asyncio.run(check_memory(run))


def test_memory_of_a_model_in_stages_is_that_of_the_largest_one() -> None:
    sizes = run_ranks(4, critic_sizes, 2, 2)
    held = [of["forward"] for of in sizes]
    assert all(of["train"] == 4 * of["forward"] for of in sizes)
    assert sum(held) == sum(p.nbytes for p in make_packed(CRITIC).model.parameters())
    # The last stage has a layer more; a rank of the first one would say that all fits well.
    needed = 4 * 4 * max(held)
    assert max(held[0], held[2]) < 0.9 * min(held[1], held[3])
    assert finding(sizes, 2 * needed).found.startswith(f"GiB by role: critic {needed / 2**30:.3g} (50% of")
    assert finding(sizes, 2 * needed).status == "ok"
    assert finding(sizes, needed + 1).status == "warning"
