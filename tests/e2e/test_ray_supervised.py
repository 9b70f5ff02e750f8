"""Supervised jobs in processes of Ray: the model of one process, a worker that dies, what stays out of the driver."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from quartet.cluster import WorkerGroup
from quartet.config import UserError
from quartet.extras.process_rewards.config import ProcessRewardRecipe
from quartet.extras.process_rewards.trainer import ProcessRewardTrainer
from quartet.schedule.role_group import ColocatedWorker
from quartet.trainers.supervised import SupervisedWorker

pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
RAY = {"type": "ray", "cpus_per_process": 0.1}
TWO = {"cluster": RAY, "processes": 2}
HELD_OUT = {"evaluation_data": {"path": "demonstrations.jsonl", "limit": 6}, "evaluate_every_steps": 3}


def agree(one: Path, many: Path, metrics_of: Callable[[Path], list[dict[str, float]]]) -> None:
    """Sums have another order. The first step shows that alone; then AdamW, which divides small gradients by their own
    size, makes the last digits grow.
    """
    rows, others = metrics_of(one), metrics_of(many)
    assert [row.keys() for row in rows] == [row.keys() for row in others]
    for row, other in zip(rows, others, strict=True):
        rel = 1e-6 if row["step"] == 1 else 1e-3
        for name in row:
            assert other[name] == pytest.approx(row[name], rel=rel, abs=rel / 10), (name, row["step"])
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (one, many))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)


def killed_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on SIGKILL hits the second worker when it has been asked for that step."""
    asked = WorkerGroup.ask

    def ask(self: WorkerGroup, method: Any, *args: Any, **options: Any) -> Any:
        future = asked(self, method, *args, **options)
        if method is ColocatedWorker.run_role and args[1:] == (SupervisedWorker.step.__name__, step):
            os.kill(self.processes[1].pid, signal.SIGKILL)
        return future

    monkeypatch.setattr(WorkerGroup, "ask", ask)


def test_two_processes_train_as_one_and_a_death_can_be_resumed(
    ray_cluster: Any,
    world: Any,
    recipes: Any,
    quartet: Callable[..., Any],
    metrics_of: Any,
    same_run: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each with half of the model."""
    one, many, dead = (f"ray-sft-{name}" for name in ("one", "two", "dead"))
    recipe = {name: recipes["sft"](output_dir=name, **HELD_OUT) for name in (one, many, dead)}
    several = TWO | {"sharding": {"shard": 2}}
    assert quartet("sft", world.recipe("one", recipe[one])).status == 0
    found = quartet("sft", world.recipe("two", recipe[many] | several))
    assert found.status == 0, found.err
    assert "starting 2 workers" in found.out + found.err and "sft: 6/6" in found.out + found.err
    agree(Path(one), Path(many), metrics_of)

    path = world.recipe("dead", recipe[dead] | several)
    with monkeypatch.context() as patched:
        killed_at(3, patched)
        found = quartet("sft", path)
    found.expect_user_error("a worker of the run died", "rank 1 of group 'sft' died", "--resume")
    assert [row["step"] for row in metrics_of(Path(dead))] == [1, 2, 3]
    found = quartet("sft", path, "--resume")
    assert found.status == 0, found.err
    same_run(Path(many), Path(dead))


def test_one_process_goes_on_with_what_two_have_saved(
    ray_cluster: Any, world: Any, recipes: Any, quartet: Callable[..., Any], metrics_of: Any
) -> None:
    run = Path("ray-rm")
    job = recipes["reward-model"](output_dir=str(run), checkpoint={"every_steps": 2, "keep": 9})
    assert quartet("reward-model", world.recipe("rm-one", job | {"output_dir": f"{run}-one"})).status == 0
    found = quartet("reward-model", world.recipe("rm", job | TWO))
    assert found.status == 0, found.err
    agree(Path(f"{run}-one"), run, metrics_of)
    for checkpoint in sorted((run / "checkpoints").glob("step_*"))[2:]:
        for file in sorted(checkpoint.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        checkpoint.rmdir()
    (run / "summary.json").unlink()
    found = quartet("reward-model", world.recipe("rm", job), "--resume")
    assert found.status == 0, found.err
    assert "starting" not in found.out + found.err
    agree(Path(f"{run}-one"), run, metrics_of)


def test_the_reference_is_computed_before_the_first_step(
    ray_cluster: Any, world: Any, recipes: Any, quartet: Callable[..., Any], metrics_of: Any
) -> None:
    """KTO reads answers to other prompts under policy and reference in every step."""
    job = recipes["reward-model"](loss={"name": "kto"}, steps=3)
    one, many = "ray-kto-one", "ray-kto"
    assert quartet("preference", world.recipe("kto-one", job | {"output_dir": one})).status == 0
    several = TWO | {"sharding": {"shard": 2}, "output_dir": many}
    found = quartet("preference", world.recipe("kto", job | several))
    assert found.status == 0, found.err
    assert "reference: 18/18" in found.out + found.err, "training and held-out pairs, without those of equal answers"
    agree(Path(one), Path(many), metrics_of)


def test_objects_stay_as_they_are_and_the_result_is_loaded_when_asked(
    ray_cluster: Any, world: Any, same_run: Any
) -> None:
    rows = [{"prompt": f"{n}+1=", "steps": [f"{n}+1", f"={n + n % 2}"], "labels": [1, n % 2]} for n in range(2, 10)]
    results = {}
    for name in ("ray-process-one", "ray-process"):
        model = AutoModelForCausalLM.from_pretrained("model")
        before = {key: value.clone() for key, value in model.state_dict().items()}
        section = {"cluster": RAY} if name == "ray-process" else {}
        recipe = ProcessRewardRecipe.model_validate(
            {"output_dir": name, "threads": 1, "steps": 2, "answers_per_step": 4, "separator": ";", **section}
        )
        tokenizer = AutoTokenizer.from_pretrained("model")
        trainer = ProcessRewardTrainer(recipe, model=model, tokenizer=tokenizer, rows=rows, evaluation_rows=rows)
        if section:
            with pytest.raises(UserError, match="are in its workers"):
                trainer.evaluate()
        results[name] = trainer.train()
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "its body is copied"
    same_run(Path("ray-process-one"), Path("ray-process"))
    ours, theirs = (result.model.state_dict() for result in results.values())
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_what_a_worker_refuses_comes_before_anything_is_written(
    ray_cluster: Any, world: Any, recipes: Any, quartet: Callable[..., Any]
) -> None:
    job = recipes["sft"](output_dir="ray-refused", data={"path": "nowhere.jsonl"}, cluster=RAY)
    quartet("sft", world.recipe("refused", job)).expect_user_error("nowhere.jsonl")
    assert not Path("ray-refused").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"processes": 2}, ("cluster.type local has one process", "set cluster.type: ray")),
        ({"cluster": RAY, "device": "cuda:1"}, ("Ray decides which GPU a process sees",)),
    ],
)
def test_processes_need_a_cluster(
    changes: dict[str, Any], told: tuple[str, ...], world: Any, recipes: Any, quartet: Callable[..., Any]
) -> None:
    job = recipes["sft"](output_dir="ray-refused", **changes)
    quartet("sft", world.recipe("refused", job)).expect_user_error(*told)
    assert not Path("ray-refused").exists()
