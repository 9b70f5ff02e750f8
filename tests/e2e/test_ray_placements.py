"""Roles in processes of their own, on a Ray of this machine: the same training as in one process, to the bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quartet.observe.spans import read_spans
from tiny_vision import picture_bytes, save_model

pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
ROLES = ["actor", "critic", "reference", "reward", "rollout"]
RAY = {"type": "ray", "cpus_per_process": 0.1}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "separated": {"type": "separated", **{role: {} for role in ROLES}},
    "full_offload": {"type": "full_offload", "pool": {"budget_bytes": 2_000_000}},
    "pipelined": {
        "type": "pipelined",
        "pools": {
            "policy": {"roles": ["rollout", "actor"]},
            "scores": {"roles": ["critic", "reference", "reward"]},
        },
    },
}


@pytest.fixture(scope="module")
def serial(read_by_workers: Any) -> dict[str, Any]:
    return {"steps": 3, "checkpoint": {"every_steps": 1}, **read_by_workers}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_workers_train_the_same_model(
    name: str,
    ray_cluster: Any,
    world: Any,
    recipes: Any,
    quartet: Callable[..., Any],
    same_run: Any,
    serial: Any,
    metrics_of: Any,
) -> None:
    if not Path("ray-serial").exists():
        quartet("rl", world.recipe("ray-serial", recipes["rl"](output_dir="ray-serial", **serial)))
    placed = recipes["rl"](output_dir=f"ray-{name}", placement=PLACEMENTS[name], cluster=RAY, **serial)
    found = quartet("rl", world.recipe(f"ray-{name}", placed))
    assert found.status == 0, found.err
    same_run(Path("ray-serial"), Path(f"ray-{name}"))
    assert "rl: 3/3" in found.out or "rl: 3/3" in found.err
    last = metrics_of(Path(f"ray-{name}"))[-1]
    assert last["loss/ptx"] > 0 and last["reward/foreign"] != last["reward/reward_model"]


def test_heads_learn_along_in_the_actors_process(
    ray_cluster: Any,
    world: Any,
    recipes: Any,
    quartet: Callable[..., Any],
    same_run: Any,
    learning_heads: dict[str, Any],
) -> None:
    """While the critic trains in another; drafts are among the figures that are the same."""
    content = recipes["rl"](steps=3)
    content["rollout"] = {**content["rollout"], "speculation": learning_heads}
    assert quartet("rl", world.recipe("heads-serial", {**content, "output_dir": "heads-serial"})).status == 0
    placed = {**content, "output_dir": "heads-ray", "placement": PLACEMENTS["pipelined"], "cluster": RAY}
    found = quartet("rl", world.recipe("heads-ray", placed))
    assert found.status == 0, found.err
    same_run(Path("heads-serial"), Path("heads-ray"))
    for step in range(3):
        spans = {span.name: span for span in read_spans(Path("heads-ray/spans.jsonl")) if span.step == step}
        actor, heads, publish = (spans[name] for name in ("train_actor", "train_heads", "publish"))
        assert actor.end_s <= heads.start_s < heads.end_s <= publish.start_s
        assert spans["train_critic"].start_s < heads.start_s and heads.role == "heads"


def test_adapters_come_home(
    ray_cluster: Any, world: Any, recipes: Any, quartet: Callable[..., Any], same_run: Any
) -> None:
    """A LoRA actor whose reference is in another pool: the driver's base model is whole when the adapters return."""
    pools = {"policy": {"roles": ["rollout", "actor"]}, "frozen": {"roles": ["reference"]}}
    placed = {"placement": {"type": "pipelined", "pools": pools}, "cluster": RAY}
    train = {"optim": {"lr": 3e-3}, "token_budget": 128, "lora": {"rank": 2}}
    for name, section in (("lora-serial", {}), ("lora-ray", placed)):
        recipe = recipes["rl"]("grpo", output_dir=name, steps=2, **section)
        recipe |= {"actor": {"model": {"path": "model"}, "train": train}}
        recipe["algorithm"]["kl"] = {"coef": 0.05}
        found = quartet("rl", world.recipe(name, recipe))
        assert found.status == 0, found.err
    same_run(Path("lora-serial"), Path("lora-ray"))


def cut(recipe: dict[str, Any]) -> dict[str, Any]:
    """The same recipe with every model in two parts."""
    half = {"sharding": {"shard": 2}}
    parts = {role: {**recipe.get(role, {}), **half} for role in ("actor", "critic", "reference")}
    rewards = [{**reward, **(half if reward["type"] == "model" else {})} for reward in recipe["rewards"]]
    return recipe | parts | {"rewards": rewards}


def test_models_in_parts_train_as_whole_ones(
    ray_cluster: Any,
    world: Any,
    recipes: Any,
    quartet: Callable[..., Any],
    metrics_of: Any,
    serial: Any,
) -> None:
    """Sums have another order: figures are the same to four digits, also after one process has gone on alone."""
    if not Path("ray-serial").exists():
        quartet("rl", world.recipe("ray-serial", recipes["rl"](output_dir="ray-serial", **serial)))
    name, pools = (
        "cut",
        {
            "policy": {"roles": ["rollout", "actor"], "processes": 2},
            "scores": {"roles": ["critic", "reference", "reward"], "processes": 2},
        },
    )
    placement = {"type": "pipelined", "pools": pools}
    recipe = cut(recipes["rl"](output_dir=name, placement=placement, cluster=RAY, **serial))
    found = quartet("rl", world.recipe(name, recipe))
    assert found.status == 0, found.err
    whole = recipes["rl"](output_dir=f"{name}-back", **serial)
    begun_elsewhere(name, f"{name}-back", quartet, world.recipe(f"{name}-back", whole))
    figures = {"loss/value", "loss/ptx", "reward/score_mean", "critic/grad_norm", "actor/grad_norm"}
    for one, *others in zip(*(metrics_of(Path(run)) for run in ("ray-serial", name, f"{name}-back")), strict=True):
        for other in others:
            for figure in one.keys() & figures:
                assert other[figure] == pytest.approx(one[figure], rel=1e-3), (one["step"], figure)
    assert one["loss/ptx"] > 0
    assert max(row.get("agreement/canary_diff", 0.0) for row in metrics_of(Path(name))) < 1e-4


def begun_elsewhere(source: str, name: str, quartet: Callable[..., Any], recipe: Path) -> None:
    """Resumes a copy of the run in ``source`` from its second step."""
    shutil.copytree(source, name)
    shutil.rmtree(Path(name) / "checkpoints" / "step_00000003")
    (Path(name) / "summary.json").unlink()
    found = quartet("rl", recipe, "--resume")
    assert found.status == 0, found.err
    assert "rl: 3/3" in found.out or "rl: 3/3" in found.err


def test_a_run_goes_on_under_another_placement_and_number_of_processes(
    ray_cluster: Any, world: Any, recipes: Any, quartet: Callable[..., Any], same_run: Any, metrics_of: Any, serial: Any
) -> None:
    """What one process has saved several take up, to the bit; what two replicas have saved one does."""
    if not Path("ray-serial").exists():
        quartet("rl", world.recipe("ray-serial", recipes["rl"](output_dir="ray-serial", **serial)))
    placed = recipes["rl"](output_dir="moved", placement=PLACEMENTS["pipelined"], cluster=RAY, **serial)
    begun_elsewhere("ray-serial", "moved", quartet, world.recipe("moved", placed))
    same_run(Path("ray-serial"), Path("moved"))
    two = {
        "type": "pipelined",
        "pools": {
            "engine": {"roles": ["rollout"]},
            "learners": {"roles": ["actor", "critic"], "processes": 2},
            "frozen": {"roles": ["reference", "reward"]},
        },
    }
    placed = recipes["rl"](output_dir="replicas", placement=two, cluster=RAY, **serial)
    begun_elsewhere("ray-serial", "replicas", quartet, world.recipe("replicas", placed))
    begun_elsewhere("replicas", "back", quartet, world.recipe("back", recipes["rl"](output_dir="back", **serial)))
    one, back = (metrics_of(Path(name))[-1] for name in ("ray-serial", "back"))
    for name in ("loss/value", "reward/score_mean", "critic/grad_norm", "rollout/length_mean"):
        assert back[name] == pytest.approx(one[name], rel=1e-4), name


def test_a_pool_that_cannot_be_granted_is_refused_before_anything_is_loaded(
    ray_cluster: Any, world: Any, recipes: Any, quartet: Callable[..., Any]
) -> None:
    placement = {"type": "full_offload", "pool": {"processes": 1000}}
    recipe = recipes["rl"](output_dir="ray-big", placement=placement, cluster={"type": "ray"})
    found = quartet("rl", world.recipe("ray-big", recipe))
    found.expect_user_error("more processes than there are devices", "fewer processes")
    assert not Path("ray-big").exists()


def test_an_actor_in_parts_trains_while_engines_run_ahead(
    ray_cluster: Any, world: Any, recipes: Any, quartet: Callable[..., Any], metrics_of: Any
) -> None:
    """GRPO, two parts of the actor, with its optimizer in host memory, beside two of its reference."""
    pools = {"engine": {"roles": ["rollout"]}, "policy": {"roles": ["actor", "reference"], "processes": 2}}
    placement = {"type": "asynchronous", "max_staleness": 1, "pools": pools}
    recipe = recipes["rl"]("grpo", output_dir="ahead", steps=3, placement=placement, cluster=RAY)
    recipe["algorithm"] |= {"kl": {"coef": 0.05}, "off_policy": {"level": "token", "mode": "truncate", "cap": 2.0}}
    parts = recipe.setdefault("reference", {})["sharding"] = {"shard": 2, "fixed_order": True}
    recipe["actor"]["sharding"] = parts | {"cpu_offload": True}
    found = quartet("rl", world.recipe("ahead", recipe))
    assert found.status == 0, found.err
    rows = metrics_of(Path("ahead"))
    assert rows[-1]["step"] == 3 and rows[-1]["policy_version"] >= 2
    assert max(row["agreement/canary_diff"] for row in rows if "agreement/canary_diff" in row) < 1e-4


def test_a_picture_is_looked_at_once_for_all_processes(
    ray_cluster: Any, world: Any, quartet: Callable[..., Any], same_run: Any
) -> None:
    """By ``vision``, in a pool of its own, or by whoever needs it first; the actor's demonstrations have some, too."""
    (world.path / "seen").mkdir()
    save_model("llava", world.path / "seen/model")
    colours = [(200, 30, 60), (20, 130, 60), (10, 30, 200)]
    rows = []
    for n, colour in enumerate(colours):
        (world.path / f"seen/{n}.png").write_bytes(picture_bytes(colour=colour))
        content = [{"type": "image"}, {"type": "text", "text": "what?"}]
        rows.append({"prompt": [{"role": "user", "content": content}], "image": f"{n}.png", "completion": "hell"})
    (world.path / "seen/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {
        "job": "rl",
        "actor": {"model": {"path": "seen/model"}, "train": {"optim": {"lr": 1e-3}}},
        "data": {"path": "seen/rows.jsonl"},
        "ptx": {"data": {"path": "seen/rows.jsonl"}, "coef": 0.5, "examples_per_minibatch": 2},
        "algorithm": {"name": "ppo"},
        "rewards": [{"type": "length", "target": 3}],
        "rollout": {"sampling": {"max_new_tokens": 5}},
        **{"steps": 3, "prompts_per_step": 2, "responses_per_prompt": 2},
    }
    pools = {"a": ["rollout"], "b": ["actor", "reference"], "c": ["critic"], "d": ["vision"]}
    placement = {"type": "pipelined", "pools": {name: {"roles": roles} for name, roles in pools.items()}}
    for name, options in {"serial": {}, "ray": {"placement": placement, "cluster": RAY}}.items():
        found = quartet("rl", world.recipe(f"seen-{name}", {**content, **options, "output_dir": f"seen/{name}"}))
        assert found.status == 0, found.err
    same_run(Path("seen/serial"), Path("seen/ray"))
    assert len(list(Path("seen/ray/pictures/features").rglob("*.safetensors"))) == len(colours)
    ahead = [span for span in read_spans(Path("seen/ray/spans.jsonl")) if span.name == "look_ahead"]
    assert len(ahead) == 6 and all(span.role == "vision" for span in ahead)
