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
from quartet.observe.files import digest_files
from quartet.schedule.role_group import ColocatedWorker, RemoteGroup
from quartet.trainers import rl
from quartet.trainers.run_files import output_path
from quartet.trainers.supervised import SupervisedWorker

pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
SPREAD = {"type": "ray", "cpus_per_process": 0.1, "strategy": "spread"}
POOL = {"type": "full_offload", "pool": {"budget_bytes": 200_000_000}}
HERE, THERE = Path("apart"), Path("apart-there")


@pytest.fixture(scope="module")
def two_nodes(ray_cluster: Any, shared_ray: Any, world_of_session: Any) -> Iterator[None]:
    root = world_of_session.path
    with shared_ray.another_node(8, {PATHS: f"{root / HERE}:{root / THERE}"}):
        yield


@pytest.fixture
def at_url(world: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The URL of a run that works in ``HERE``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(Path(HERE).absolute()))
    return lambda name: f"file://{Path('store').absolute() / name}"


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
        if method is not ColocatedWorker.run_role or args[1:] != (SupervisedWorker.step.__name__, step):
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


def test_a_directory_that_a_machine_does_not_see_is_refused(
    two_nodes: None, world: Any, recipes: Any, quartet: Callable[..., Any]
) -> None:
    section = {"cluster": SPREAD, "nodes": 2, "sharding": {"shard": 2}, "output_dir": str(HERE / "refused")}
    found = quartet("sft", str(world.recipe("refused", recipes["sft"](**section))))
    found.expect_user_error("does not see the run's directory", "or on Ray to a URL")


def test_a_killed_run_goes_on_from_its_url(
    two_nodes: None,
    world: Any,
    recipes: Any,
    quartet: Callable[..., Any],
    same_run: Any,
    at_url: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with nothing left on either machine. Each node has half of the model, so that neither could go on alone."""

    def recipe(name: str, output_dir: str) -> str:
        section = {"cluster": SPREAD, "nodes": 2, "sharding": {"shard": 2}, "output_dir": output_dir}
        return str(world.recipe(name, recipes["sft"](**section)))

    straight, run = Path("shared-sft"), output_path(at_url("sft"), "sft", False)
    found = quartet("sft", recipe("straight", str(straight)))
    assert found.status == 0 and "files come from there" not in found.out + found.err, found.err
    with monkeypatch.context() as patched:
        killed_at(5, run / "checkpoints" / "step_00000004", patched)
        found = quartet("sft", recipe("apart", at_url("sft")))
    found.expect_user_error("a worker of the run died", "--resume")
    assert "files come from there" in found.out + found.err
    files = digest_files(run / "checkpoints")
    assert {"step_00000004/engine/__0_0.distcp", "step_00000004/engine/__1_0.distcp"} <= files.keys()
    assert not list(Path("store/sft").glob(".sent/**/*.distcp"))
    for machine in (HERE, THERE):
        shutil.rmtree(machine)
    found = quartet("sft", recipe("apart", at_url("sft")), "--resume")
    assert found.status == 0, found.err
    same_run(straight, run)


def test_what_workers_write_comes_to_the_driver(
    two_nodes: None,
    world: Any,
    recipes: Any,
    quartet: Callable[..., Any],
    same_run: Any,
    at_url: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them are on the other node: models, rollouts, checkpoints, tables of a reference are written there. Where
    one dies, the new one begins with the checkpoint, which it fetches.
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
        ("rl", recipes["rl"](**job), {"placement": POOL}, ("model", "critic", "rollouts")),
        ("preference", recipes["reward-model"](**job), {}, ("model", "reference")),
    ):
        alone, run = Path(f"alone-{command}"), output_path(at_url(command), command, False)
        there = THERE / run.relative_to(HERE.absolute())
        for output_dir, changes in ((str(alone), {}), (at_url(command), far | section)):
            name = f"{command}-{len(changes)}"
            found = quartet(command, world.recipe(name, recipe | changes | {"output_dir": output_dir}))
            assert found.status == 0, found.err
        same_run(alone, run)
        for name in names:
            files = digest_files(run / name)
            files.pop("README.md", None)  # the driver's own: the card of a model
            assert files == digest_files(there / name) != {}, name
    assert killed
