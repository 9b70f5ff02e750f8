"""Workers are killed in the middle of their work; the run replaces them and ends as if none had died. Actor and critic
are each held by two of them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quartet.cluster import WorkerGroup
from quartet.schedule.role_group import ColocatedWorker
from quartet.trainers.workers import WRITER_ROLE

pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
PLACEMENT = {
    "type": "pipelined",
    "pools": {
        "engine": {"roles": ["rollout"]},
        "trained": {"roles": ["actor", "critic"], "processes": 2},
        "frozen": {"roles": ["reference", "reward"], "processes": 2},
    },
}

HISTORY = {"type": "history", "min_match": 1, "costs": {"plain": [1.0], "drafted": [1.0]}}
"""What engines have learned goes back with the models, or stays that of the step's beginning."""


@dataclass(frozen=True)
class Death:
    """SIGKILL of ranks of the pool on which a role is, when a call of its method has just been made.

    Args:
        after: so many calls of that method since the last death (or the beginning).
    """

    role: str
    method: str
    after: int
    ranks: tuple[int, ...] = (0,)


class Killer:
    """Kills in the order of the deaths, each when its time has come."""

    def __init__(self, deaths: list[Death]) -> None:
        self.left = list(deaths)
        self._calls = 0

    def note(self, group: WorkerGroup, role: str, method: str) -> None:
        if not self.left or (role, method) != (self.left[0].role, self.left[0].method):
            return
        self._calls += 1
        if self._calls > self.left[0].after:
            for rank in self.left.pop(0).ranks:
                os.kill(group.processes[rank].pid, signal.SIGKILL)
            self._calls = 0


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Death]], Killer]:
    real, asked = WorkerGroup.call, WorkerGroup.ask

    def install(deaths: list[Death]) -> Killer:
        made = Killer(deaths)

        def call(self: WorkerGroup, method: Any, *args: Any, **options: Any) -> Any:
            future = real(self, method, *args, **options)
            if method is ColocatedWorker.run_role:
                made.note(self, args[0], args[1])
            return future

        def ask(self: WorkerGroup, method: Any, *args: Any, **options: Any) -> Any:
            future = asked(self, method, *args, **options)
            if method is ColocatedWorker.run_role:
                made.note(self, args[0], args[1])
            return future

        monkeypatch.setattr(WorkerGroup, "call", call)
        monkeypatch.setattr(WorkerGroup, "ask", ask)
        return made

    return install


def recipe_of(recipes: Any, name: str, *, max_restarts: int, **changes: Any) -> dict[str, Any]:
    cluster = {"type": "ray", "cpus_per_process": 0.1, "max_restarts": max_restarts}
    content: dict[str, Any] = recipes["rl"](output_dir=name, placement=PLACEMENT, cluster=cluster, **changes)
    content["rollout"] = {**content["rollout"], "speculation": HISTORY}
    for role in ("actor", "critic"):
        content[role] = {**content.get(role, {}), "sharding": {"shard": 2}}
    return content


@pytest.fixture
def undisturbed(ray_cluster: Any, world: Any, recipes: Any, read_by_workers: Any, quartet: Callable[..., Any]) -> Path:
    path = Path("undisturbed")
    if not path.exists():
        found = quartet(
            "rl", world.recipe("undisturbed", recipe_of(recipes, "undisturbed", max_restarts=0, **read_by_workers))
        )
        assert found.status == 0, found.err
    return path


DEATHS = [
    Death("reference", "forward", after=5),  # one of two ranks, in the second step
    Death("rollout", "run_steps", after=1),  # in the middle of generation
    Death("actor", "update", after=1, ranks=(0, 1)),  # the whole pool, between two consistent points
    Death(WRITER_ROLE, "finish_rollouts", after=1),  # while the file is being written, or right after
    Death("critic", "save_checkpoint", after=0),  # while the states are copied
    Death("actor", "finish_checkpoint", after=0),  # while its share is being written, or right after
    Death("actor", "update", after=1, ranks=(1,)),  # after a step that was not saved: engines have newer weights
]


def test_a_run_whose_workers_die_ends_like_one_whose_workers_live(
    undisturbed: Path,
    world: Any,
    recipes: Any,
    read_by_workers: Any,
    quartet: Callable[..., Any],
    same_run: Any,
    killer: Any,
) -> None:
    """Rollouts are written when the step is done again, and no share of a checkpoint is taken for a whole one."""
    deaths = killer(DEATHS)
    recipe = recipe_of(recipes, "disturbed", max_restarts=len(DEATHS), **read_by_workers)
    found = quartet("rl", world.recipe("disturbed", recipe))
    assert found.status == 0, found.err
    assert not deaths.left, "all of them died"
    said = " ".join((found.out + found.err).split())
    for pool, count in (("frozen", 1), ("engine", 1), ("trained", 5)):
        # When it happened, and in the notes at the end. A writer that dies in the background may die with another.
        assert said.count(f"of group '{pool}' died: ") in {2 * count, 2 * max(1, count - 1)}
    assert not list(Path("disturbed/rollouts").glob("*.tmp"))
    assert sorted(path.name for path in Path("disturbed/checkpoints").iterdir()) == ["step_00000004", "step_00000005"]
    same_run(undisturbed, Path("disturbed"))


@pytest.mark.slow
def test_more_deaths_than_allowed_end_a_run_that_can_be_resumed(
    undisturbed: Path,
    world: Any,
    recipes: Any,
    read_by_workers: Any,
    quartet: Callable[..., Any],
    same_run: Any,
    killer: Any,
) -> None:
    killer([Death("actor", "update", after=3), Death("rollout", "run_steps", after=1)])
    recipe = world.recipe("mortal", recipe_of(recipes, "mortal", max_restarts=1, **read_by_workers))
    found = quartet("rl", recipe)
    found.expect_user_error("died more often", "cluster.max_restarts is 1", "rank 0 of group 'engine' died", "--resume")
    found = quartet("rl", recipe, "--resume")
    assert found.status == 0, found.err
    same_run(undisturbed, Path("mortal"))
