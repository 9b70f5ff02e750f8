"""``quartet rl`` in an allocation of two nodes and as a Ray job: the training of one process, to the bit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quartet.cluster.torchrun import RAY_ARGUMENTS
from quartet.cluster.worker import free_port
from quartet.processes import terminating

pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
ONE_PROCESS = "--num-cpus=1 --object-store-memory=100000000"
"""Room for one process on each node, so that two pools need both."""
PLACEMENT = {
    "type": "pipelined",
    "pools": {"policy": {"roles": ["rollout", "actor"]}, "scores": {"roles": ["critic", "reference", "reward"]}},
}
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "7" * 64}


@pytest.fixture
def alone(world: Any, recipes: Any, quartet: Callable[..., Any]) -> Path:
    """The same run in one process."""
    path = Path("launched-alone")
    if not path.exists():
        assert quartet("rl", world.recipe("alone", recipes["rl"](steps=2, output_dir=str(path)))).status == 0
    return path


@pytest.fixture
def recipe(world: Any, recipes: Any) -> str:
    return str(world.recipe("launched", recipes["rl"](steps=2, placement=PLACEMENT)))


@pytest.mark.slow
def test_torchrun_places_the_roles_on_the_nodes_of_the_allocation(alone: Path, recipe: str, same_run: Any) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=run"]
    command = [*torchrun, *meeting, "-m", "quartet", "rl", recipe, "output_dir=allocated"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", RAY_ARGUMENTS: ONE_PROCESS}
    nodes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    said = [node.communicate(timeout=500)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    same_run(alone, Path("allocated"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_all_processes_of_a_run_with_its_own_ray(world: Any, recipes: Any, number: signal.Signals) -> None:
    """As a terminal and SLURM send it: Ray's processes, the command's children, do not see it."""
    run = world.path / f"signalled-{number}"
    cluster = {"type": "ray", "cpus_per_process": 0.1}
    recipe = world.recipe(run.name, recipes["rl"](steps=10_000, placement=PLACEMENT, cluster=cluster))
    command = [sys.executable, "-m", "quartet", "rl", recipe, f"output_dir={run}", "--resume=auto", "log.level=info"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (world.path / f"{run.name}.log").open("w+") as log:
        started = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 240
        while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_bytes().count(b"\n") < 3:
            assert started.poll() is None and time.monotonic() < deadline, Path(log.name).read_text()
            time.sleep(0.1)
        os.killpg(started.pid, number)
        status = started.wait(50)
        said = Path(log.name).read_text()
    ended = json.loads((run / "run.json").read_text())["status"]
    assert (status, ended) == (128 + number, "interrupted"), said
    assert "stopped after step" in said and list((run / "checkpoints").iterdir())
    records = set(re.findall(r"INFO \[(.+) 0\] quartet\.trainers\.(?:devices|checkpoints): ", said))
    assert records == {"driver", "actor+rollout", "critic+reference+reward_model"}, said


@pytest.mark.slow
def test_workers_of_one_machine_fetch_a_model_of_the_hub_once(
    hub: Any, alone: Path, world: Any, recipes: Any, same_run: Any, tmp_path: Path
) -> None:
    commit = hub.put("me/base", world.path / "model")
    content = recipes["rl"](steps=2, placement=PLACEMENT, cluster={"type": "ray", "cpus_per_process": 0.1})
    content["actor"]["model"] = {"path": "me/base"}
    command = [sys.executable, "-m", "quartet", "rl", world.recipe("hub", content), "output_dir=from-hub"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(hub.downloads().values()) == {1}, hub.downloads()
    assert json.loads(Path("from-hub/run.json").read_text())["commits"]["actor.model.path"] == f"me/base@{commit}"
    same_run(alone, Path("from-hub"))


@contextlib.contextmanager
def head_with_dashboard(folder: Path) -> Iterator[str]:
    """A Ray head that takes jobs; its address for them."""
    port = free_port()
    arguments = ["--head", "--block", f"--port={free_port()}", f"--ray-client-server-port={free_port()}"]
    arguments += ["--num-cpus=3", "--object-store-memory=100000000", "--min-worker-port=0", "--max-worker-port=0"]
    arguments += ["--include-dashboard=true", f"--dashboard-port={port}", "--disable-usage-stats"]
    environment = {**os.environ, **TOKEN, "OMP_NUM_THREADS": "1"}
    with (folder / "head.log").open("wb") as log:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments]
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/api/version")
        asked.add_header("Authorization", f"Bearer {TOKEN['RAY_AUTH_TOKEN']}")
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(asked, timeout=5):
                break
            assert time.monotonic() < deadline and head.poll() is None, (folder / "head.log").read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        terminating(head)


@pytest.mark.slow
def test_a_ray_job_runs_on_the_cluster_that_it_was_submitted_to(
    alone: Path, recipe: str, same_run: Any, tmp_path: Path
) -> None:
    pytest.importorskip("aiohttp_cors", reason="jobs need pip install 'ray[default]'")
    with head_with_dashboard(tmp_path) as address:
        ray = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", address]
        output = Path("job").absolute()
        entry = [sys.executable, "-m", "quartet", "rl", recipe, "cluster.type=ray", f"output_dir={output}"]
        done = subprocess.run(
            [*ray, "--working-dir", ".", "--", *entry],
            env={**os.environ, **TOKEN},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    same_run(alone, Path("job"))
