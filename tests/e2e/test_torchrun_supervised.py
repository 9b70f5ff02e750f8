"""Supervised jobs in the processes of a torchrun, without Ray: the model of one process, twice the same bits, a rank
that is killed, and what cannot be started so.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quartet.cluster.worker import free_port

HELD_OUT = {"evaluation_data": {"path": "demonstrations.jsonl", "limit": 6}, "evaluate_every_steps": 3}


@pytest.fixture
def start(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[BaseProcess, Path]]:
    """Starts ``torchrun OPTIONS… -m quartet COMMAND…`` in the world: torchrun, and the log of all its ranks."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1])

    def started(options: Sequence[str], *command: str, **fault: Any) -> tuple[BaseProcess, Path]:
        function = importlib.import_module("torchrun_forks").torchrun
        log = tmp_path / f"{len(list(tmp_path.iterdir()))}.log"
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        arguments = ([*options, "entry.py", *command], str(log), environment, str(world.path))
        agent: BaseProcess = (
            importlib.import_module("forkserver").context().Process(target=function, args=arguments, kwargs=fault)
        )
        agent.start()
        log.touch()
        return agent, log

    return started


@pytest.fixture
def torchrun(start: Callable[..., tuple[BaseProcess, Path]]) -> Callable[..., tuple[int, str]]:
    """Runs two ranks to their end: torchrun's exit status, and what they wrote."""

    def run(*command: str, restarts: int = 0, **fault: Any) -> tuple[int, str]:
        options = ["--nproc-per-node=2", f"--master-port={free_port()}", f"--max-restarts={restarts}"]
        agent, log = start(options, *command, **fault)
        agent.join(120)
        assert agent.exitcode is not None, log.read_text()
        return agent.exitcode, log.read_text()

    return run


def agree(one: Path, many: Path, metrics_of: Callable[[Path], list[dict[str, float]]]) -> None:
    """As sums have another order; the first step shows that alone, and then AdamW makes last digits grow."""
    rows, others = metrics_of(one), metrics_of(many)
    assert [row.keys() for row in rows] == [row.keys() for row in others]
    for row, other in zip(rows, others, strict=True):
        rel = 1e-6 if row["step"] == 1 else 1e-3
        for name in row.keys() - {"train/token_budget", "train/num_oom"}:
            assert other[name] == pytest.approx(row[name], rel=rel, abs=rel / 10), (name, row["step"])
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (one, many))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("cut", ["shard", "pipeline"])
def test_two_ranks_train_as_one_process_and_go_on_after_a_death(
    cut: str,
    torchrun: Callable[..., tuple[int, str]],
    world: Any,
    recipes: Any,
    quartet: Callable[..., Any],
    metrics_of: Any,
    same_run: Any,
) -> None:
    """Each holds half of every weight, or half of the layers. The second run, with weights and optimizer in host
    memory, loses a rank; torchrun starts it anew, and it goes on with the bits of the first.
    """

    def recipe(name: str) -> str:
        checkpoint = {"every_steps": 2, "background": False}
        return world.recipe(name, recipes["sft"](output_dir=name, checkpoint=checkpoint, **HELD_OUT))

    one, two, dead = Path("torchrun-one"), Path(f"torchrun-{cut}"), Path(f"torchrun-{cut}-dead")
    if not one.exists():
        assert quartet("sft", recipe(one.name)).status == 0
    status, said = torchrun("sft", recipe(two.name), f"sharding.{cut}=2")
    assert status == 0, said
    assert said.count(f"model: {two}/model") == 1, "one rank speaks"
    agree(one, two, metrics_of)

    parts = f"sharding={{{cut}: 2, cpu_offload: true}}"
    status, said = torchrun("sft", recipe(dead.name), parts, kill=4, restarts=1)
    assert status == 0 and "exitcode: -9" in said, said
    assert "error: a worker of the run died" in said and "begins anew" not in said, said
    same_run(two, dead)


def test_after_memory_ran_out_on_a_rank_torchrun_goes_on_with_half_the_budget(
    torchrun: Callable[..., tuple[int, str]], world: Any, recipes: Any, metrics_of: Any
) -> None:
    """From its beginning, as there is no checkpoint: with the bits of a run that began so."""

    def recipe(name: str) -> str:
        return world.recipe(name, recipes["sft"](output_dir=name, steps=2, checkpoint={"every_steps": 9}))

    run, smaller = Path("torchrun-memory"), Path("torchrun-smaller")
    status, said = torchrun("sft", recipe(run.name), "sharding.shard=2", kill=2, no_memory=True, restarts=1)
    assert status == 0 and "memory ran out on rank 1 of 2" in said, said
    rows = metrics_of(run)
    budget = int(rows[0]["train/token_budget"])
    assert budget < 256 and [row["train/num_oom"] for row in rows] == [1, 1]
    status, said = torchrun("sft", recipe(smaller.name), "sharding.shard=2", f"train.token_budget={budget}")
    assert status == 0, said
    assert [row | {"train/num_oom": 1} for row in metrics_of(smaller)] == rows
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (run, smaller))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("cut", ["copies", "tensor", "pipeline"])
def test_one_process_goes_on_with_what_two_ranks_have_saved(
    cut: str,
    torchrun: Callable[..., tuple[int, str]],
    world: Any,
    recipes: Any,
    quartet: Callable[..., Any],
    metrics_of: Any,
) -> None:
    """KTO reads answers to other prompts under policy and reference, which both compute."""
    job = recipes["reward-model"](loss={"name": "kto"}, steps=4, checkpoint={"every_steps": 2, "background": False})
    one, many = Path("torchrun-kto-one"), Path(f"torchrun-kto-{cut}")
    if not one.exists():
        assert quartet("preference", world.recipe("torchrun-kto-one", job | {"output_dir": str(one)})).status == 0
    path = world.recipe(many.name, job | {"output_dir": str(many)})
    of_mesh = [f"sharding.{cut}=2"] if cut != "copies" else []
    status, said = torchrun("preference", path, *of_mesh, kill=4, no_memory=cut == "tensor")
    assert status == 1, said
    if cut == "tensor":
        assert "error: memory ran out on rank 1 of 2" in said and "go on with --resume" in said, said
    else:
        assert "Signal 9 (SIGKILL)" in said, said
    assert sorted(found.name for found in (many / "checkpoints").glob("step_*")) == ["step_00000002"]
    found = quartet("preference", path, "--resume", *(["train.token_budget=2000"] if cut == "tensor" else []))
    assert found.status == 0, found.err
    agree(one, many, metrics_of)


def test_a_signal_to_another_node_lets_the_first_one_save(
    start: Callable[..., tuple[BaseProcess, Path]], world: Any, recipes: Any, metrics_of: Any
) -> None:
    run = Path("torchrun-nodes")
    path = world.recipe("torchrun-nodes", recipes["sft"](output_dir=str(run), steps=2000))
    rendezvous = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=test"]
    nodes = [start([*rendezvous, "--nproc-per-node=1"], "sft", path, "checkpoint.every_steps=5000") for _ in range(2)]
    deadline = time.monotonic() + 60
    while not any("sft: " in log.read_text() for _, log in nodes):
        assert time.monotonic() < deadline, [log.read_text() for _, log in nodes]
        time.sleep(0.05)
    (silent,) = [agent for agent, log in nodes if not log.read_text().count("sft: ")]
    os.kill(silent.pid or 0, signal.SIGTERM)
    for agent, log in nodes:
        agent.join(60)
        assert agent.exitcode not in (0, None), log.read_text()
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    assert (run / "checkpoints" / f"step_{metrics_of(run)[-1]['step']:08d}").is_dir()


def test_what_cannot_run_so_is_refused(torchrun: Callable[..., tuple[int, str]], world: Any, recipes: Any) -> None:
    path = world.recipe("torchrun-no", recipes["sft"](output_dir="torchrun-no"))
    status, said = torchrun("sft", path, "sharding.shard=3")
    assert status == 1 and "sharding is shard 3, but the model has 2 processes" in said, said
    assert said.startswith("error: recipe torchrun-no.yaml is not valid")
    status, said = torchrun("eval", path)
    assert status == 1 and "quartet eval runs in one process" in said, said
    assert not Path("torchrun-no").exists()
