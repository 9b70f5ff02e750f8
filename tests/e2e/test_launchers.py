"""``quartet rl`` in an allocation of two nodes: roles on both, and the training of one process, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quartet.cluster.ray_node import RAY_ARGUMENTS
from quartet.cluster.worker import free_port

pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
POOLS = {"policy": {"roles": ["rollout", "actor"]}, "scores": {"roles": ["critic", "reference", "reward"]}}


@pytest.mark.slow
def test_torchrun_places_the_roles_on_the_nodes_of_the_allocation(
    world: Any, recipes: Any, quartet: Callable[..., Any], same_run: Any
) -> None:
    content = recipes["rl"](steps=2, placement={"type": "pipelined", "pools": POOLS}, cluster={"type": "local"})
    recipe = world.recipe("allocation", {**content, "placement": None} if "placement" not in content else content)
    alone = world.recipe("alone", recipes["rl"](steps=2, output_dir="alone"))
    assert quartet("rl", alone).status == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=run"]
    command = [*torchrun, *meeting, "-m", "quartet", "rl", recipe, "output_dir=allocated"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", RAY_ARGUMENTS: "--object-store-memory=100000000"}
    nodes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    said = [node.communicate(timeout=500)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    same_run(Path("alone"), Path("allocated"))
