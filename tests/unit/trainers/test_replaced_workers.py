"""What a run does about workers that died: how often it starts them anew, and how it ends where that does not help."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from quartet.cluster import WorkerDied, WorkerError
from quartet.cluster.errors import Death, Failure
from quartet.config import UserError
from quartet.trainers.rl import RLTrainer
from quartet.trainers.workers import RayRunWorkers


class Gone:
    """A group whose worker is dead and cannot be made anew."""

    name = "trained"

    def __init__(self) -> None:
        self.restarts = 0

    def dead(self, timeout_s: float = 1.0) -> list[Death]:
        return [Death(self.name, 0, None, "here", "starting", "it raised", "OSError: no such model")]

    def restart(self) -> None:
        self.restarts += 1
        raise WorkerError(Failure(self.name, 0, 1, "here", "trained.__init__", "OSError: no such model", ""))


def workers(group: Any, max_restarts: int) -> RayRunWorkers:
    found: Any = RayRunWorkers.__new__(RayRunWorkers)
    found._groups, found._num_deaths, found._changing = {group.name: group}, 0, {"actor"}
    found.cluster = SimpleNamespace(max_restarts=max_restarts)
    found.placement = SimpleNamespace(pool_of={"actor": group.name, "rollout": group.name})
    return found


def test_a_worker_that_cannot_be_made_anew_ends_the_run_after_its_restarts() -> None:
    """It was asked for ever whether it lives."""
    group = Gone()
    trainer: Any = RLTrainer.__new__(RLTrainer)
    trainer.workers, trainer._attempt = workers(group, max_restarts=3), None
    trainer.run = SimpleNamespace(check_stop=lambda step: None)
    with pytest.raises(UserError, match="died more often") as caught:
        asyncio.run(asyncio.wait_for(trainer._after_death(WorkerDied(group.dead()[0])), 60))
    assert group.restarts == 3
    assert caught.value.found == (
        "death 4, cluster.max_restarts is 3; rank 0 of group 'trained' died: OSError: no such model (actor, rollout)"
    )
