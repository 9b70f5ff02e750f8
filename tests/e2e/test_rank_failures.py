"""One of four ranks on Ray fails in the middle of an update: the job goes on by itself, and ends with the bits of a run
that began with the smaller token budget, or in which nothing failed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quartet.cluster import WorkerGroup
from quartet.train.parallel.mesh import Mesh

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
FOUR = {
    "cluster": {"type": "ray", "cpus_per_process": 0.1, "max_restarts": 1},
    "processes": 4,
    "sharding": {"shard": 2, "tensor": 2},
}
ODD, LIMIT_S = 1, 8.0
STEP = ("model", "step")


def shorten(host: Any) -> None:
    """In a worker's process, before it makes its mesh: the time limit of collectives within a pass."""
    Mesh.of.__func__.__kwdefaults__["time_limit"] = timedelta(seconds=LIMIT_S)  # type: ignore[attr-defined]


def plant(host: Any, kind: str, role: str, rank: int) -> None:
    """In a worker's process: the role's next pass fails, where it is the odd one."""
    if rank != ODD:
        return
    worker = host._worker.roles[role]
    layers = worker.packed.model.model.layers

    def fail(*_: Any) -> None:
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            time.sleep(600)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def spoil(_: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
        return output * float("nan")

    def in_backward(_: Any, given: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    if kind == "nan":
        once = layers[-1].register_forward_hook(spoil)
        worker.step, step = lambda number: (step(number), once.remove())[0], worker.step
    elif kind == "backward":
        layers[-1].register_forward_hook(in_backward)
    else:
        layers[-1 if kind == "last" else 0].register_forward_pre_hook(fail)


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Once, when a role is called with a method (and step), the odd rank fails in it."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

    def install(kind: str, *call: Any) -> None:
        left, submit, places = [kind], WorkerGroup._submit, WorkerGroup._places

        def submitted(self: WorkerGroup, method: str, mode: Any, args: Any, *rest: Any, **options: Any) -> Any:
            if left and method == "run_role" and args[: len(call)] == call:
                planted = left.pop()
                ray.get([h.__ray_call__.remote(plant, planted, call[0], rank) for rank, h in enumerate(self.handles)])
            return submit(self, method, mode, args, *rest, **options)

        def places_of(self: WorkerGroup) -> Any:
            if kind == "hang":
                ray.get([handle.__ray_call__.remote(shorten) for handle in self.handles])
            return places(self)

        monkeypatch.setattr(WorkerGroup, "_submit", submitted)
        monkeypatch.setattr(WorkerGroup, "_places", places_of)

    return install


@pytest.fixture
def sft(world: Any, recipes: Any, quartet: Callable[..., Any]) -> Callable[..., Any]:
    """Runs the job on four processes, or takes the run that is there."""

    def run(name: str, *overrides: str, **changes: Any) -> Any:
        job = recipes["sft"](output_dir=name, steps=3, **{"checkpoint": {"every_steps": 9}, **changes})
        return quartet("sft", world.recipe(name, job | FOUR), *overrides)

    return run


def done(found: Any) -> str:
    assert found.status == 0, found.err
    return " ".join((found.out + found.err).split())


def without_count(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name != "train/num_oom"} for row in rows]


def same_weights(one: Path, other: Path) -> None:
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (one, other))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def undisturbed(sft: Callable[..., Any]) -> Path:
    if not (path := Path("ranks-undisturbed")).exists():
        done(sft(path.name))
    return path


@pytest.mark.parametrize("place", ["first", "last", "backward"])
def test_after_memory_ran_out_the_run_goes_on_with_half_the_budget(
    place: str, ray_cluster: Any, fails: Any, sft: Any, metrics_of: Any
) -> None:
    """From its beginning, as there is no checkpoint: with the bits of a run that began so. A deaths' budget of 0 is
    enough."""
    fails(place, *STEP, 1)
    run = Path(f"ranks-{place}")
    said = done(sft(run.name, "cluster.max_restarts=0"))
    assert f"rank {ODD} of group 'sft' died: memory ran out on rank {ODD} of 4: a micro-batch of at most " in said
    rows = metrics_of(run)
    budget = int(rows[0]["train/token_budget"])
    assert [row["step"] for row in rows] == [1, 2, 3] and budget < 256
    assert {(row["train/token_budget"], row["train/num_oom"]) for row in rows} == {(budget, 1.0)}
    if not (smaller := Path(f"ranks-{budget}")).exists():
        done(sft(smaller.name, f"train.token_budget={budget}"))
    same_weights(run, smaller)
    assert without_count(rows) == without_count(metrics_of(smaller))


def test_a_lowered_budget_stays_after_a_checkpoint_and_a_resume(
    ray_cluster: Any, fails: Any, sft: Any, metrics_of: Any
) -> None:
    """The run ends like one that was killed there and went on with the smaller budget in its recipe."""
    saving = {"checkpoint": {"every_steps": 1, "background": False}}
    run, killed = Path("ranks-saved"), Path("ranks-killed")
    fails("last", *STEP, 1)
    fails("kill", *STEP, 2)
    sft(run.name, "cluster.max_restarts=0", **saving).expect_user_error("died more often", "death 1")
    budget = int(metrics_of(run)[-1]["train/token_budget"])
    (run / "budgets.json").unlink()  # the checkpoint says it, too
    done(sft(run.name, "--resume", **saving))
    rows = metrics_of(run)
    assert [row["train/token_budget"] for row in rows] == [256, budget, budget]
    assert [row["train/num_oom"] for row in rows] == [0, 1, 1]
    fails("kill", *STEP, 1)
    sft(killed.name, "cluster.max_restarts=0", **saving).expect_user_error("died more often", "rank 1 of group 'sft'")
    done(sft(killed.name, "--resume", f"train.token_budget={budget}", **saving))
    same_weights(run, killed)
    assert without_count(rows) == without_count(metrics_of(killed))


@pytest.mark.parametrize("kind", ["kill", "hang"])
def test_after_a_death_or_a_rank_that_hangs_the_run_ends_as_if_nothing_had_happened(
    kind: str, undisturbed: Path, ray_cluster: Any, fails: Any, sft: Any, same_run: Any
) -> None:
    """One that hangs is noticed by the others, after the time limit of their collectives."""
    fails(kind, *STEP, 1)
    said = done(sft(f"ranks-{kind}"))
    assert ("; no answer from ranks [" if kind == "hang" else f"rank {ODD} of group 'sft' died: ") in said
    same_run(undisturbed, Path(f"ranks-{kind}"))


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(
    undisturbed: Path, ray_cluster: Any, fails: Any, sft: Any, metrics_of: Any
) -> None:
    """All have the same weights after the step, or the next one would say that they have come apart."""
    fails("nan", *STEP, 1)
    done(sft("ranks-nan"))
    rows = metrics_of(Path("ranks-nan"))
    assert [row["optim/skipped_steps"] for row in rows] == [0, 1, 1]
    assert rows[0] == metrics_of(undisturbed)[0]
    # The update that was left out was the second one of its learning rate, too.
    assert rows[2]["optim/lr"] == rows[1]["optim/lr"]


def test_roles_of_rl_go_on_with_half_their_budgets(
    ray_cluster: Any, world: Any, recipes: Any, quartet: Callable[..., Any], fails: Any, metrics_of: Any
) -> None:
    """The reference from the beginning of its step, the actor from that of the run: the whole run then has the
    bits of one with both budgets in its recipe."""

    def run(name: str, *overrides: str) -> str:
        content = recipes["rl"]("grpo", output_dir=name, steps=2, chunk_size=4, minibatches=1)
        content["placement"] = {
            "type": "pipelined",
            "pools": {
                "engine": {"roles": ["rollout"]},
                "trained": {"roles": ["actor"], "processes": 2},
                "frozen": {"roles": ["reference"], "processes": 2},
            },
        }
        content["cluster"] = {"type": "ray", "cpus_per_process": 0.1, "max_restarts": 0}
        content["algorithm"] = {"name": "grpo", "kl": {"coef": 0.05}}
        content["reference"] = {"sharding": {"shard": 2}}
        content["actor"] |= {"sharding": {"shard": 2}}
        return done(quartet("rl", world.recipe(name, content), *overrides))

    fails("first", "actor", "update")
    fails("last", "reference", "forward")
    said = run("ranks-rl")
    assert "of group 'frozen' died: memory ran out" in said and "; the run went on after step 0" in said
    noted = {note["role"]: note for note in json.loads(Path("ranks-rl/budgets.json").read_text())}
    budgets = [f"{note['key']}={note['tokens']}" for note in noted.values()]
    assert {role: note["num_oom"] for role, note in noted.items()} == {"actor": 1, "reference": 1}
    run("ranks-rl-smaller", *budgets)
    same = [
        [{name: value for name, value in row.items() if name != "train/num_oom"} for row in metrics_of(Path(path))]
        for path in ("ranks-rl", "ranks-rl-smaller")
    ]
    assert same[0] == same[1] and metrics_of(Path("ranks-rl"))[-1]["train/num_oom"] == 2
    same_weights(Path("ranks-rl"), Path("ranks-rl-smaller"))
