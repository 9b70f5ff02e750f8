"""Two Ray nodes whose storage is not shared: what the driver has below one directory, the second has below another."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from quartet.cluster import WorkerGroup
from quartet.cluster.worker import PATHS
from quartet.observe.digests import digest_files
from quartet.schedule.role_group import RemoteGroup, RolesWorker
from quartet.trainers import rl
from quartet.trainers.supervised_worker import SupervisedWorker

pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
SPREAD = {"type": "ray", "cpus_per_process": 0.1, "strategy": "spread"}
POOL = {"type": "full_offload", "pool": {"budget_bytes": 200_000_000}}
HERE, THERE = Path("apart"), Path("apart-there")


@pytest.fixture(scope="module")
def two_nodes(ray_cluster: Any, shared_ray: Any, world_of_session: Any) -> Iterator[None]:
    root = world_of_session.path
    with shared_ray.another_node(8, {PATHS: f"{root / HERE}:{root / THERE}"}):
        yield


class Later:
    """In the place of the future of a call that is not made yet."""

    def __init__(self, made: Coroutine[Any, Any, Any]) -> None:
        self.seconds: dict[int, float] = {}
        self._made = made

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._made.__await__()


def killed_at(step: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on SIGKILL hits the second worker when it is asked for that step, once the checkpoint is there."""
    asked = WorkerGroup.ask

    def ask(self: WorkerGroup, method: Any, *args: Any, **options: Any) -> Any:
        if method is not RolesWorker.run_role or args[1:] != (SupervisedWorker.step.__name__, step):
            return asked(self, method, *args, **options)

        async def killed() -> Any:
            async with asyncio.timeout(60):
                while not checkpoint.exists():
                    await asyncio.sleep(0.01)
            future = asked(self, method, *args, **options)
            os.kill(self.processes[1].pid, signal.SIGKILL)
            return await future

        return Later(killed())

    monkeypatch.setattr(WorkerGroup, "ask", ask)


def test_a_killed_run_goes_on_without_the_other_machines_files(
    two_nodes: None,
    world: Any,
    recipes: Any,
    quartet: Callable[..., Any],
    same_run: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And with those alone. Each node has half of the model, so neither could go on with what its rank has written."""

    def recipe(output_dir: Path) -> str:
        section = {"cluster": SPREAD, "nodes": 2, "sharding": {"shard": 2}, "output_dir": str(output_dir)}
        return str(world.recipe(output_dir.name, recipes["sft"](**section)))

    straight, run, there, moved = Path("shared-sft"), HERE / "sft", THERE / "sft", Path("moved-sft")
    found = quartet("sft", recipe(straight))
    assert found.status == 0 and "do not share" not in found.out + found.err, found.err
    with monkeypatch.context() as patched:
        killed_at(5, run / "checkpoints" / "step_00000004", patched)
        found = quartet("sft", recipe(run))
    found.expect_user_error("a worker of the run died", "--resume")
    assert "1 of the run's machines do not share the storage" in found.out + found.err
    checkpoints = digest_files(run / "checkpoints")
    assert {"step_00000004/engine/__0_0.distcp", "step_00000004/engine/__1_0.distcp"} <= checkpoints.keys()
    assert digest_files(there / "checkpoints") == checkpoints

    shutil.copytree(there, moved)
    shutil.rmtree(there)
    found = quartet("sft", recipe(run), "--resume")
    assert found.status == 0, found.err
    same_run(straight, run)
    assert digest_files(there / "checkpoints") == digest_files(run / "checkpoints")
    found = quartet("sft", recipe(moved), "--resume")
    assert found.status == 0, found.err
    assert "metrics.jsonl is not as it was" not in found.out + found.err, "the records were there, too"
    same_run(straight, moved)


def test_what_workers_write_comes_to_the_driver(
    two_nodes: None,
    world: Any,
    recipes: Any,
    quartet: Callable[..., Any],
    same_run: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them are on the other node: models, rollouts, checkpoints, tables of a reference are written there. Where
    one dies, the new one begins with the checkpoint there.
    """
    write_rollouts, killed = rl.write_rollouts, list[int]()

    async def killing(run: Any, writer: Any, step: int, experience: Any) -> None:
        if step == 2 and isinstance(writer, RemoteGroup) and not killed:
            run.drain()  # the checkpoint of step 1 is there
            killed.extend(info.pid for info in writer.group.processes)
            os.kill(killed[0], signal.SIGKILL)
        await write_rollouts(run, writer, step, experience)

    monkeypatch.setattr(rl, "write_rollouts", killing)
    job = {"steps": 2, "checkpoint": {"every_steps": 1}}
    far = {"cluster": {"type": "ray", "cpus_per_process": 5}}
    for command, recipe, section, names in (
        ("rl", recipes["rl"](**job), {"placement": POOL}, ("model", "critic", "rollouts", "checkpoints")),
        ("preference", recipes["reward-model"](**job), {}, ("model", "reference", "checkpoints")),
    ):
        alone, run, there = Path(f"alone-{command}"), HERE / command, THERE / command
        for output_dir, changes in ((alone, {}), (run, far | section)):
            found = quartet(command, world.recipe(output_dir.name, recipe | changes | {"output_dir": str(output_dir)}))
            assert found.status == 0, found.err
        same_run(alone, run)
        for name in names:
            files = digest_files(run / name)
            files.pop("README.md", None)  # the driver's own: the card of a model
            assert files == digest_files(there / name) != {}, name
    assert killed
