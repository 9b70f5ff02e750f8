"""PPO whose roles are cut by tensor, context, shard and pipeline stages on a Ray of this machine: the run of one
process, whoever dies and whatever mesh goes on.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quartet.cluster import WorkerGroup

pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
RAY = {"type": "ray", "cpus_per_process": 0.1, "max_restarts": 1}
CUTS: dict[str, dict[str, Any]] = {
    "actor": {"tensor": 2, "shard": 2},
    "critic": {"context": 2},
    "reference": {"context": 2, "fixed_order": True},
    "reward": {"tensor": 2},
}
PIPELINED = {
    "type": "pipelined",
    "pools": {
        "engine": {"roles": ["rollout"]},
        "trained": {"roles": ["actor", "critic", "reference"], "processes": 4},
        "frozen": {"roles": ["reward"], "processes": 2},
    },
}
STAGES: dict[str, dict[str, Any]] = {
    "actor": {"pipeline": 2, "tensor": 2},
    "critic": {"shard": 2},
    "reference": {"pipeline": 2, "context": 2},
    "reward": {"pipeline": 2},
}
OTHER_STAGES: dict[str, dict[str, Any]] = {
    "actor": {"shard": 2, "pipeline": 2},
    "critic": {"pipeline": 2},
    "reference": {"shard": 2},
    "reward": {"tensor": 2},
}
STAGED = {
    "type": "pipelined",
    "pools": {
        "engine": {"roles": ["rollout"]},
        "policies": {"roles": ["actor", "reference"], "processes": 4},
        "judges": {"roles": ["critic", "reward"], "processes": 2},
    },
}
FIGURES = (
    "loss/value",
    "loss/policy",
    "loss/ptx",
    "reward/score_mean",
    "critic/grad_norm",
    "policy/grad_norm",
    "kl/ref",
)


def cut(recipe: dict[str, Any], cuts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    roles = {role: {**recipe.get(role, {}), "sharding": cuts[role]} for role in ("actor", "critic", "reference")}
    is_model = ("model", "process_model")
    rewards = [r | {"sharding": cuts["reward"]} if r["type"] in is_model else r for r in recipe["rewards"]]
    return recipe | roles | {"rewards": rewards}


@pytest.fixture(scope="module")
def steps(read_by_workers: Any) -> dict[str, Any]:
    return {"steps": 3, "checkpoint": {"every_steps": 1}, **read_by_workers}


@pytest.fixture
def alone(world: Any, recipes: Any, quartet: Callable[..., Any], steps: Any) -> Path:
    """The run of one process; ``test_ray_placements.py`` makes the same."""
    path = Path("ray-serial")
    if not path.exists():
        assert quartet("rl", world.recipe(path.name, recipes["rl"](output_dir=path.name, **steps))).status == 0
    return path


def check_alike(one: Path, other: Path, metrics_of: Callable[[Path], list[dict[str, float]]]) -> None:
    """Sums have another order."""
    rows, others = metrics_of(one), metrics_of(other)
    assert [row["step"] for row in others] == [row["step"] for row in rows] == [0, 1, 2, 3]
    assert {*FIGURES} <= rows[-1].keys() and rows[-1]["policy/grad_norm"] > 0 and rows[-1]["loss/ptx"] > 0
    for row, found in zip(rows, others, strict=True):
        assert found.get("tokens/useful") == row.get("tokens/useful"), "what peers compute together counts once"
        for name in row.keys() & set(FIGURES):
            assert found[name] == pytest.approx(row[name], rel=1e-5, abs=1e-6), (row["step"], name)
    assert max(row.get("agreement/canary_diff", 0.0) for row in others) < 1e-5


def kill_once(monkeypatch: pytest.MonkeyPatch, role: str, method: str, rank: int, after: int) -> list[int]:
    """SIGKILL of a rank when a call of a role's method has just been made, after so many; whom it was."""
    asked, calls, killed = WorkerGroup.ask, [0], list[int]()

    def ask(self: WorkerGroup, *args: Any, **options: Any) -> Any:
        future = asked(self, *args, **options)
        if args[1:3] == (role, method):
            calls[0] += 1
            if calls[0] == after + 1:
                killed.append(self.processes[rank].pid)
                os.kill(killed[0], signal.SIGKILL)
        return future

    monkeypatch.setattr(WorkerGroup, "ask", ask)
    return killed


def test_a_run_on_meshes_goes_on_when_a_rank_dies_and_another_mesh_takes_it_up(
    ray_cluster: Any,
    alone: Path,
    world: Any,
    recipes: Any,
    quartet: Callable[..., Any],
    metrics_of: Any,
    steps: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = recipes["rl"](output_dir="parallel", placement=PIPELINED, cluster=RAY, **steps)
    with monkeypatch.context() as patched:
        killed = kill_once(patched, "actor", "update", rank=3, after=1)
        found = quartet("rl", world.recipe("parallel", cut(whole, CUTS)))
    assert found.status == 0, found.err
    assert killed and "rank 3 of group 'trained' died" in " ".join((found.out + found.err).split())
    check_alike(alone, Path("parallel"), metrics_of)

    back = recipes["rl"](output_dir="parallel-back", **steps)
    taken_up("parallel", back, world, quartet)
    check_alike(alone, Path("parallel-back"), metrics_of)


def test_a_run_in_stages_goes_on_when_a_rank_dies_and_other_stages_take_it_up(
    ray_cluster: Any,
    alone: Path,
    world: Any,
    recipes: Any,
    quartet: Callable[..., Any],
    metrics_of: Any,
    steps: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rank that dies has the last stage, whose embedding is tied to that of the first one."""
    whole = recipes["rl"](output_dir="staged", placement=STAGED, cluster=RAY, **steps)
    with monkeypatch.context() as patched:
        killed = kill_once(patched, "actor", "update", rank=3, after=1)
        found = quartet("rl", world.recipe("staged", cut(whole, STAGES)))
    assert found.status == 0, found.err
    assert killed and "rank 3 of group 'policies' died" in " ".join((found.out + found.err).split())
    check_alike(alone, Path("staged"), metrics_of)

    back = cut(recipes["rl"](output_dir="staged-back", placement=STAGED, cluster=RAY, **steps), OTHER_STAGES)
    taken_up("staged", back, world, quartet)
    check_alike(alone, Path("staged-back"), metrics_of)


def test_a_role_that_cannot_be_cut_so_is_named_before_workers_start(
    ray_cluster: Any, world: Any, recipes: Any, quartet: Callable[..., Any], steps: Any
) -> None:
    recipe = recipes["rl"](output_dir="uncut", placement=PIPELINED, cluster=RAY, **steps)
    path = world.recipe("uncut", cut(recipe, CUTS | {"critic": {"context": 4}}))
    says = ("critic: Qwen2", "2 heads", "sharding.context 4", "choose tensor × context among 1, 2")
    found, examined = quartet("rl", path), quartet("doctor", path)
    found.expect_user_error(*says)
    assert "starting workers" not in found.out + found.err
    assert examined.status == 1 and all(part in examined.out for part in says), examined.out


def taken_up(source: str, recipe: dict[str, Any], world: Any, quartet: Callable[..., Any]) -> None:
    """Resumes a copy of the run in ``source`` from its second step."""
    name = recipe["output_dir"]
    shutil.copytree(source, name)
    shutil.rmtree(Path(name) / "checkpoints" / "step_00000003")
    (Path(name) / "summary.json").unlink()
    found = quartet("rl", world.recipe(name, recipe), "--resume")
    assert found.status == 0, found.err
