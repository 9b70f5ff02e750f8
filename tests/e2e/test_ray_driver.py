"""On Ray the process that starts a run holds no model: it checks headers and a twin; workers load, train and write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from quartet.config import UserError
from quartet.config.recipe import RLRecipe
from quartet.schedule.model_worker import ModelWorker
from quartet.schedule.role_group import RemoteGroup
from quartet.trainers.rl import RLTrainer

pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
PLACED: dict[str, Any] = {
    "placement": {"type": "pipelined", "pools": {"policy": {"roles": ["rollout", "actor"]}}},
    "cluster": {"type": "ray", "cpus_per_process": 0.1},
}


def _without_model(content: dict[str, Any]) -> RLRecipe:
    train = content["actor"]["train"]
    return RLRecipe.model_validate({**content, "actor": {"train": train}})


def _grpo(recipes: Any, name: str, **changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = recipes["rl"]("grpo", output_dir=name, steps=2, **changes)
    content["algorithm"]["kl"] = {"coef": 0.0}
    return content


def test_an_object_stays_as_it_is_and_the_result_is_loaded_when_asked(
    ray_cluster: Any, world: Any, recipes: Any, same_run: Any
) -> None:
    """Weights of the driver's models are looked for in every tensor that it can reach."""
    results = {}
    for name, section in (("passed-serial", {}), ("passed-ray", PLACED)):
        model = AutoModelForCausalLM.from_pretrained("model")
        before = {key: value.clone() for key, value in model.state_dict().items()}
        recipe = _without_model(_grpo(recipes, name, **section))
        trainer = RLTrainer(recipe, model=model, tokenizer=AutoTokenizer.from_pretrained("model"))
        result = results[name] = trainer.train()
        trained = all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert trained == (name == "passed-ray"), "trained in place in one process alone"
        assert model.config._attn_implementation == "sdpa", "usable as it was"
        assert (result.model is model) == (name == "passed-serial")
        is_empty = {p.device.type for owned in trainer.roles.models() for p in owned.model.parameters()}
        assert is_empty == ({"meta"} if name == "passed-ray" else {"cpu"})
    same_run(Path("passed-serial"), Path("passed-ray"))
    ours, theirs = (result.model.state_dict() for result in results.values())
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert results["passed-ray"].critic is None and results["passed-ray"].model is results["passed-ray"].model


def test_what_weights_alone_show_is_refused_by_a_worker_before_anything_is_written(
    ray_cluster: Any, world: Any, recipes: Any, quartet: Callable[..., Any]
) -> None:
    AutoModelForCausalLM.from_pretrained("model").save_pretrained("broken")
    AutoTokenizer.from_pretrained("model").save_pretrained("broken")
    weights = load_file("broken/model.safetensors")
    weights["model.norm.weight"] *= float("nan")
    save_file(weights, "broken/model.safetensors", {"format": "pt"})
    content = _grpo(recipes, "ray-broken", **PLACED)
    content["actor"]["model"] = {"path": "broken"}
    found = quartet("rl", world.recipe("ray-broken", content))
    found.expect_user_error("are not finite", "NaN or infinity in model.norm.weight")
    assert "starting workers" in found.out + found.err
    assert not Path("ray-broken").exists()


def test_remarks_are_those_of_the_workers(
    ray_cluster: Any, world: Any, recipes: Any, quartet: Callable[..., Any], metrics_of: Any
) -> None:
    """A tensor that belongs nowhere, and dropout: what is said is what one process says."""
    model = AutoModelForCausalLM.from_pretrained("model", attention_dropout=0.1)
    model.save_pretrained("odd")
    AutoTokenizer.from_pretrained("model").save_pretrained("odd")
    weights = load_file("odd/model.safetensors")
    save_file({**weights, "foo.weight": torch.ones(3)}, "odd/model.safetensors", {"format": "pt"})
    said = []
    for name, section in (("odd-serial", {}), ("odd-ray", PLACED)):
        content = _grpo(recipes, name, **section)
        content["actor"]["model"] = {"path": "odd"}
        found = quartet("rl", world.recipe(name, content))
        assert found.status == 0, found.err
        said.append([line for line in (found.out + found.err).splitlines() if line.startswith("actor: ")])
    assert said[0] == said[1] and len(said[0]) == 2
    assert "foo.weight" in said[0][0] and "dropout set to 0" in said[0][1]


def test_the_reference_takes_over_weights_between_workers(
    ray_cluster: Any, world: Any, recipes: Any, same_run: Any, metrics_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iterative DPO with the reference in a pool of its own: nothing as large as a model comes to the driver. Also
    where both are in parts.
    """
    pools = {"policy": {"roles": ["rollout", "actor"]}, "frozen": {"roles": ["reference"]}}
    placed = {**PLACED, "placement": {"type": "pipelined", "pools": pools}}
    asked = RemoteGroup.call

    async def call(self: Any, method: Any, *args: Any, **options: Any) -> Any:
        assert method not in (ModelWorker.weights, ModelWorker.load_weights), "over the driver"
        return await asked(self, method, *args, **options)

    monkeypatch.setattr(RemoteGroup, "call", call)
    cut = {**placed, "placement": {"type": "pipelined", "pools": {n: {**pools[n], "processes": 2} for n in pools}}}
    for name, section in (("refresh-serial", {}), ("refresh-ray", placed), ("refresh-cut", cut)):
        content = recipes["rl"]("online_dpo", output_dir=name, steps=3, minibatches=1, **section)
        content["algorithm"]["refresh_steps"] = 2
        if section is cut:
            content["actor"]["sharding"] = content.setdefault("reference", {})["sharding"] = {"shard": 2}
        RLTrainer(RLRecipe.model_validate(content)).train()
    same_run(Path("refresh-serial"), Path("refresh-ray"))
    whole, parts = (metrics_of(Path(name))[-1] for name in ("refresh-serial", "refresh-cut"))
    figures = [name for name in whole if name.startswith(("loss/", "reward/"))]
    assert len(figures) > 2
    for name in figures:
        assert parts[name] == pytest.approx(whole[name], rel=1e-3, abs=1e-5), name


def test_an_adapter_alone_says_how_to_load_it(ray_cluster: Any, world: Any, recipes: Any) -> None:
    content = _grpo(recipes, "adapter-ray", **PLACED)
    content["actor"]["train"]["lora"] = {"rank": 2, "export": "adapter"}
    result = RLTrainer(RLRecipe.model_validate(content)).train()
    assert Path("adapter-ray/adapter/adapter_model.safetensors").is_file()
    with pytest.raises(UserError, match="was not saved as a whole"):
        result.model  # noqa: B018
