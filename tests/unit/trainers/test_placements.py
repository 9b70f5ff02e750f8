"""Every placement in one process: the same training as without one, to the bit; parts really move where budgets ask."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.algorithms import (
    GRPO,
    PPO,
    DynamicSamplingConfig,
    KLConfig,
    OffPolicyConfig,
    OnlineDPO,
    ReMax,
)
from quartet.config.common import CheckpointConfig, DataConfig, LoRAConfig, SamplingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.recipe import ActorConfig, CriticConfig, EvaluationConfig, PTXConfig, RLRecipe, RolloutConfig
from quartet.config.run import LogConfig
from quartet.observe.rollouts import read_rollout_step
from quartet.observe.trackers import read_metrics
from quartet.train.checkpoint import CheckpointShare, checkpoint_path
from quartet.train.state import REST
from quartet.trainers.checkpoints import TrainResult
from quartet.trainers.rl import RLTrainer

NOT_NUMBERS = ("throughput/", "time/", "memory/", "rollout/tokens_per_s", "overlap/", "handover/", "time_s")
BIG = 10**9
KEPT = LogConfig(tensorboard=False, rollouts_every=1)
SAVED = CheckpointConfig(every_steps=1)
ROLES = ["actor", "critic", "reference", "reward", "rollout"]
PLACEMENTS: dict[str, dict[str, Any]] = {
    "separated": {"type": "separated", **{role: {} for role in ROLES}},
    "forward_offload": {
        "type": "forward_offload",
        "rollout": {},
        "actor_reference": {"budget_bytes": BIG},
        "critic_reward": {"budget_bytes": BIG},
    },
    "homogeneous": {"type": "homogeneous", "rollout": {}, "models": {"budget_bytes": BIG}},
    "full_offload": {"type": "full_offload", "pool": {"budget_bytes": BIG}},
    "pipelined": {
        "type": "pipelined",
        "pools": {
            "policy": {"roles": ["rollout", "actor"]},
            "scores": {"roles": ["critic", "reference", "reward"], "budget_bytes": BIG},
        },
    },
}


def recipe(path: Path, **changes: Any) -> RLRecipe:
    train = TrainConfig(token_budget=512, forward_token_budget=512)
    values: dict[str, Any] = {
        "algorithm": PPO(kl=KLConfig(coef=0.05)),
        "actor": ActorConfig(train=train),
        "critic": CriticConfig(train=train),
        "rollout": RolloutConfig(
            sampling=SamplingConfig(max_new_tokens=8), engine=NativeEngineConfig(max_running=6, steps_per_lease=2)
        ),
        "steps": 3,
        "prompts_per_step": 4,
        "responses_per_prompt": 2,
        "minibatches": 2,
        "epochs": 2,
        "chunk_size": 2,
        "threads": 1,
        "output_dir": str(path),
        "log": LogConfig(tensorboard=False),
        "checkpoint": CheckpointConfig(every_steps=100),
    }
    return RLRecipe(**{**values, **changes})


def numbers(path: Path) -> list[dict[str, Any]]:
    rows = read_metrics(path / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(NOT_NUMBERS)} for row in rows]


def weights(result: TrainResult) -> list[torch.Tensor]:
    models = [result.model, *([result.critic] if result.critic is not None else [])]
    return [tensor.clone() for model in models for tensor in model.state_dict().values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def run(
    causal_lm: Any, scalar_model: Any, tokenizer: Any, prompts: Any, digits: Any, tmp_path: Path
) -> Callable[..., tuple[TrainResult, Path]]:
    given = prompts

    def go(
        name: str,
        placement: dict[str, Any] | None = None,
        resume: bool = False,
        ptx_rows: Any = None,
        prompts: list[str] = given,
        folder: Path = tmp_path,
        **changes: Any,
    ) -> Any:
        path = folder / name
        trainer = RLTrainer(
            recipe(path, placement=placement, **changes),
            model=causal_lm(),
            tokenizer=tokenizer,
            rewards=[digits, scalar_model()],
            prompts=prompts,
            evaluation_prompts=prompts[:2],
            ptx_rows=ptx_rows,
            resume=resume,
        )
        return trainer.train(), path

    return go


@pytest.fixture(scope="module")
def runs_of_module(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[list[torch.Tensor], Path]]]:
    return tmp_path_factory.mktemp("runs"), {}


@pytest.fixture
def shared_run(run: Any, runs_of_module: Any) -> Callable[..., tuple[list[torch.Tensor], Path]]:
    """As ``run``, made once for all tests that ask for it by that name: its weights and folder, not to be changed."""
    folder, made = runs_of_module

    def get(name: str, placement: dict[str, Any] | None = None, **changes: Any) -> tuple[list[torch.Tensor], Path]:
        if name not in made:
            result, path = run(name, placement, folder=folder, **changes)
            made[name] = weights(result), path
        return made[name]

    return get


@pytest.fixture
def tight(causal_lm: Any, scalar_model: Any) -> Callable[[], int]:
    """The budget that the largest role needs in training, and nothing beside it."""
    return lambda: max(4 * 4 * sum(p.numel() for p in model.parameters()) for model in (causal_lm(), scalar_model()))


def budgeted(placement: dict[str, Any], budget: int) -> dict[str, Any]:
    return json.loads(json.dumps(placement).replace(str(BIG), str(budget)))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_placement_trains_the_same_model(name: str, shared_run: Any, tight: Any) -> None:
    serial, serial_path = shared_run("serial")
    placed, path = shared_run(name, budgeted(PLACEMENTS[name], tight()))
    assert same(serial, placed)
    assert numbers(serial_path) == numbers(path)


@pytest.mark.parametrize("name", ["full_offload", "separated"])
def test_a_model_from_a_file_trains_the_same(
    name: str,
    shared_run: Any,
    causal_lm: Any,
    scalar_model: Any,
    tokenizer: Any,
    prompts: Any,
    digits: Any,
    tmp_path: Path,
    tight: Any,
    as_from_a_file: Any,
) -> None:
    """Files leave tensors where products with a vector have other bits than in the memory that moved parts come to."""

    objects = {
        "model": as_from_a_file(causal_lm()),
        "tokenizer": tokenizer,
        "rewards": [digits, as_from_a_file(scalar_model())],
        "prompts": prompts,
    }
    placed = RLTrainer(recipe(tmp_path, placement=budgeted(PLACEMENTS[name], tight())), **objects).train()
    assert same(shared_run("serial")[0], weights(placed))


def test_parts_move_where_a_budget_asks_for_it(shared_run: Any, tight: Any) -> None:
    _, path = shared_run("full_offload", budgeted(PLACEMENTS["full_offload"], tight()))
    for row in read_metrics(path / "metrics.jsonl")[1:]:
        assert row["handover/onload_bytes"] > 0 and row["handover/offload_bytes"] > 0
        assert "handover/freed_bytes" in row
    _, path = shared_run("separated", PLACEMENTS["separated"])
    assert not any(name.startswith("handover/") for row in read_metrics(path / "metrics.jsonl") for name in row)


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2, alpha=4.0)], ids=["all weights", "lora"])
def test_models_are_usable_after_a_run_that_moved_them(
    lora: LoRAConfig | None, causal_lm: Any, scalar_model: Any, tokenizer: Any, prompts: Any, tmp_path: Path, tight: Any
) -> None:
    placement = budgeted(PLACEMENTS["full_offload"], tight())
    actor = ActorConfig(train=TrainConfig(token_budget=512, lora=lora))
    judge = scalar_model()
    result = RLTrainer(
        recipe(tmp_path, placement=placement, actor=actor, steps=1),
        model=causal_lm(),
        tokenizer=tokenizer,
        rewards=[judge],
        prompts=prompts,
    ).train()
    for model in (result.model, result.critic, judge):
        assert bool(torch.isfinite(model(torch.zeros(1, 3, dtype=torch.long)).logits).all())
        model.requires_grad_(True)
        model(torch.zeros(1, 3, dtype=torch.long)).logits.sum().backward()


@pytest.mark.parametrize("name", ["homogeneous", "full_offload"])
def test_adapters_and_an_interrupted_run_under_a_budget(name: str, run: Any, shared_run: Any, tight: Any) -> None:
    """A LoRA actor's reference becomes a model of its own where parts move; a resumed run goes on to the bit."""
    changes = {"actor": ActorConfig(train=TrainConfig(token_budget=512, lora=LoRAConfig(rank=2, alpha=4.0)))}
    serial, _ = shared_run("adapters", **changes)
    placement = budgeted(PLACEMENTS[name], tight())
    _, path = run(name, placement, checkpoint=SAVED, **changes)
    shutil.rmtree(path / "checkpoints" / "step_00000003")
    resumed, _ = run(name, placement, resume=True, checkpoint=SAVED, **changes)
    assert same(serial, weights(resumed))


def test_a_run_is_resumed_under_another_placement(run: Any, tight: Any) -> None:
    uninterrupted, path = run("moved", checkpoint=SAVED)
    shutil.rmtree(path / "checkpoints" / "step_00000003")
    resumed, _ = run("moved", budgeted(PLACEMENTS["full_offload"], tight()), resume=True, checkpoint=SAVED)
    assert same(weights(uninterrupted), weights(resumed))


def test_a_resumed_run_does_not_need_what_its_engine_had_in_the_cache(run: Any) -> None:
    """The canary asks for the first prompt alone; the next step reads it, and a resumed one computes it with others."""
    prompts = ["3=", "4=", "12+34=", "5="]
    uninterrupted, path = run("killed", prompts=prompts, checkpoint=SAVED)
    shutil.rmtree(path / "checkpoints" / "step_00000003")
    resumed, _ = run("killed", resume=True, prompts=prompts, checkpoint=SAVED)
    assert same(weights(uninterrupted), weights(resumed))


def test_an_asynchronous_run_is_not_resumed_as_another(run: Any) -> None:
    changes = {"algorithm": GRPO(off_policy=OffPolicyConfig(), kl=KLConfig(coef=0.0)), "steps": 1}
    pools = {"rollout": {"roles": ["rollout"]}, "rest": {"roles": ["actor", "reward"]}}
    run("ahead", {"type": "asynchronous", "pools": pools}, **changes)
    with pytest.raises(UserError, match="another recipe"):
        run("ahead", {"type": "pipelined", "pools": pools}, resume=True, **changes)


def test_a_method_without_critic_and_reference(run: Any) -> None:
    changes = {"algorithm": GRPO(kl=KLConfig(coef=0.0))}
    serial, _ = run("serial", **changes)
    apart = {role: PLACEMENTS["separated"][role] for role in ("actor", "rollout", "reward")}
    placed, _ = run("separated", {"type": "separated", **apart}, **changes)
    assert same(weights(serial), weights(placed))


@pytest.mark.parametrize("in_flight", ["pick_up", "finish_old"])
def test_asynchronous_training_keeps_to_its_staleness(in_flight: str, run: Any) -> None:
    method = GRPO(off_policy=OffPolicyConfig(), kl=KLConfig(coef=0.05))
    placement = {
        "type": "asynchronous",
        "max_staleness": 1,
        "in_flight": in_flight,
        "pools": {"rollout": {"roles": ["rollout"]}, "rest": {"roles": ["actor", "reference", "reward"]}},
    }
    _, path = run("run", placement, algorithm=method, steps=4)
    rows = read_metrics(path / "metrics.jsonl")[1:]
    assert len(rows) == 4 and max(row["staleness/max"] for row in rows) <= 1


@pytest.mark.parametrize("placement", [None, "asynchronous"])
def test_every_token_sampled_for_training_is_counted_once(placement: str | None, run: Any, tmp_path: Path) -> None:
    """Those too that an engine samples while the learners work, and none of evaluations and canaries."""
    rows = [json.dumps({"prompt": f"{n}+{n}="}) for n in range(10, 14)]
    (tmp_path / "held_out.jsonl").write_text("\n".join(rows))
    held_out = DataConfig(path=str(tmp_path / "held_out.jsonl"))
    changes = {"algorithm": GRPO(off_policy=OffPolicyConfig(), kl=KLConfig(coef=0.0)), "steps": 4, "log": KEPT}
    changes |= {"evaluation": EvaluationConfig(data=held_out, every_steps=2, alarm=None)}
    pools = {"rollout": {"roles": ["rollout"]}, "rest": {"roles": ["actor", "reward"]}}
    apart = {"type": placement, "max_staleness": 1, "pools": pools} if placement is not None else None
    _, path = run("run", apart, **changes)
    metrics = read_metrics(path / "metrics.jsonl")[1:]
    records = [record for step in range(1, 5) for record in read_rollout_step(path / "rollouts", step)]
    num = sum(len(record.response_ids) for record in records)
    of_spans = sum(row.get("rollout/tokens_per_s", 0.0) * row.get("time/generate_s", 0.0) for row in metrics)
    # An engine that is ahead has begun what would follow the last step.
    assert num <= sum(row["rollout/tokens"] for row in metrics) <= of_spans + 0.5
    assert placement is not None or of_spans == pytest.approx(num)


def test_a_resumed_run_trains_on_the_groups_that_were_ahead(run: Any) -> None:
    """Killed after a step whose checkpoint holds the next step's groups, some of which were being scored."""
    changes = {
        "algorithm": GRPO(off_policy=OffPolicyConfig(), kl=KLConfig(coef=0.05)),
        "log": KEPT,
        "checkpoint": SAVED,
    }
    pools = {"rollout": {"roles": ["rollout"]}, "rest": {"roles": ["actor", "reference", "reward"]}}
    placement = {"type": "asynchronous", "max_staleness": 1, "pools": pools}
    _, path = run("run", placement, **changes)
    saved = CheckpointShare(checkpoint_path(path / "checkpoints", 2) / "ahead").state()
    parts = {name: value for name, value in saved[REST]["batch"].items() if name != "objects"}
    ahead = RaggedBatch(input_ids=saved["input_ids"], **parts)
    expected = {name: ahead.input_ids[slice(*ahead.leaf_span(s))].tolist() for s, name in enumerate(ahead.ids)}
    assert expected, "or nothing is tested here"
    shutil.rmtree(path / "checkpoints" / "step_00000003")
    run("run", placement, resume=True, **changes)
    trained = {record.sequence_id: record.response_ids for record in read_rollout_step(path / "rollouts", 3)}
    common = expected.keys() & trained.keys()
    assert len(trained) == 8 and common
    assert all(trained[name] == expected[name] for name in common)


FEATURES: dict[str, dict[str, Any]] = {
    "demonstrations": {"ptx": PTXConfig(coef=0.5, examples_per_minibatch=2)},
    "dynamic sampling": {
        "algorithm": GRPO(dynamic_sampling=DynamicSamplingConfig(max_prompts_factor=10.0), kl=KLConfig(coef=0.05))
    },
    "greedy baseline": {"algorithm": ReMax(kl=KLConfig(coef=0.05)), "responses_per_prompt": 1},
    "iterative dpo": {"algorithm": OnlineDPO(refresh_steps=1), "epochs": 1},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_what_else_a_run_may_have(feature: str, run: Any, demonstrations: Any) -> None:
    """An engine with weights of its own changes nothing about it."""
    changes = FEATURES[feature]
    rows = demonstrations if feature == "demonstrations" else None
    placement = dict(PLACEMENTS["separated"])
    if "algorithm" in changes:
        placement.pop("critic")
    serial, serial_path = run("serial", ptx_rows=rows, **changes)
    placed, path = run("separated", placement, ptx_rows=rows, **changes)
    assert same(weights(serial), weights(placed))
    assert numbers(serial_path) == numbers(path)


# What cannot work ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "reason"),
    [
        ({"type": "separated", "actor": {}, "rollout": {}, "critic": {}, "reward": {}}, "reference.*has no pool"),
        ({"type": "full_offload", "pool": {"processes": 2}}, "more processes than there are"),
        ({"type": "full_offload", "pool": {"budget_bytes": 1000}}, "can never work"),
    ],
)
def test_what_cannot_work_is_refused(placement: dict[str, Any], reason: str, run: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reason):
        run("bad", placement)
    assert not (tmp_path / "bad" / "metrics.jsonl").exists() or not numbers(tmp_path / "bad")


def test_stale_answers_need_a_correction(tmp_path: Path) -> None:
    pools = {"all": {"roles": ["rollout", "actor", "reference", "critic", "reward"]}}
    with pytest.raises(UserError, match=r"algorithm\.off_policy"):
        recipe(tmp_path, placement={"type": "asynchronous", "pools": pools})


def test_evaluation_is_the_same_under_every_placement(run: Any) -> None:
    changes = {"evaluation": EvaluationConfig(every_steps=1)}
    _, serial = run("serial", **changes)
    _, placed = run("separated", PLACEMENTS["separated"], **changes)
    kept = [{k: v for k, v in row.items() if k.startswith("eval/")} for row in numbers(serial)]
    assert kept == [{k: v for k, v in row.items() if k.startswith("eval/")} for row in numbers(placed)]
    assert any(kept)
