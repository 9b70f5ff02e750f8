"""RL runs whose Medusa heads learn along: the policy learns as without, the heads follow it, and reach the engines."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from breaking import break_at, same_weights, untimed_rows
from quartet.config import UserError
from quartet.config.algorithms import GRPO
from quartet.config.common import CheckpointConfig, LoRAConfig, OptimConfig, SamplingConfig, ShardingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.recipe import ActorConfig, RLRecipe, RolloutConfig
from quartet.config.speculation import HeadTraining, MedusaSpeculation, StepCosts
from quartet.models.medusa import MedusaHeads
from quartet.models.packed_model import PackedCausalLM
from quartet.observe.trackers import read_metrics

COSTS = StepCosts(plain=(1.0, 1.01, 1.02), drafted=(1.0, 1.0, 1.01, 1.05, 1.15))
LEARNING = HeadTraining(tokens_per_step=200, optim=OptimConfig(lr=3e-2))
SEPARATED = {"type": "separated", "actor": {}, "rollout": {}}
TIGHT = {"type": "full_offload", "pool": {"budget_bytes": 400_000}}


@pytest.fixture
def heads(causal_lm: Any, tmp_path: Path) -> Path:
    """Of the tiny model, with LM heads of their own, not trained: each guesses that the next token comes again."""
    packed = PackedCausalLM(causal_lm())
    MedusaHeads(packed, 2, shared_head=False).save(tmp_path / "heads")
    packed.release()
    return tmp_path / "heads"


@pytest.fixture
def run(tiny_rl: Any, digits: Any, heads: Path, tmp_path: Path) -> Callable[..., Any]:
    def make(name: str, learning: HeadTraining | None = LEARNING, *, process: bool = False, **changes: Any) -> Any:
        speculation = MedusaSpeculation(path=str(heads), choose="gumbel", costs=COSTS, train=learning)
        config = NativeEngineConfig(max_running=4, steps_per_lease=2, process=process)
        sampling = SamplingConfig(max_new_tokens=8, draw="gumbel")
        values: dict[str, Any] = {
            "rollout": RolloutConfig(engine=config, sampling=sampling, speculation=speculation),
            "algorithm": GRPO(),
            "steps": 3,
            "minibatches": 2,
            "prompts_per_step": 6,
            "responses_per_prompt": 4,
            "checkpoint": CheckpointConfig(every_steps=1, keep=10),
        }
        return tiny_rl(tmp_path / name, digits, **{**values, **changes})

    return make


def of_trainer(made: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in made.roles.workers["actor"].companion.heads.weights()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_policy_learns_on_the_same_bits(run: Any, exact_processor: None) -> None:
    """With exact numerics; and what the engine drafts with is what the trainer has."""
    plain = run("plain", None, numerics="exact", steps=2).train()
    for name, placement in {"shared": None, "separated": SEPARATED, "budget": TIGHT}.items():
        made = run(name, numerics="exact", placement=placement, steps=2)
        before = of_trainer(made)
        beside = made.train()
        assert same_weights(plain.model, beside.model)
        after = of_trainer(made)
        assert not any(torch.equal(before[name], after[name]) for name in before)
        drafter = made.workers.engines[0].worker.engine.speculator.drafter
        assert same(dict(drafter._heads.weights()), after)
        assert len(tuple(drafter.weights())) == (0 if placement is None else len(after)), (
            "sent where they are not shared"
        )
        rows = read_metrics(beside.path / "metrics.jsonl")[1:]
        assert all(0 < row["heads/tokens"] <= 200 and row["heads/loss"] > 0 for row in rows)
        assert all(row["heads/skipped_steps"] == 0 for row in rows)
        assert all(f"heads/accuracy_depth_{k}" in row for row in rows for k in (1, 2))


def test_the_heads_follow_a_policy_that_moves(run: Any) -> None:
    acceptance = {}
    for name, learning in (("frozen", None), ("learning", LEARNING)):
        path = run(name, learning, steps=10).train().path
        rows = read_metrics(path / "metrics.jsonl")[1:]
        acceptance[name] = sum(row["rollout/draft_acceptance"] for row in rows[-4:]) / 4
    assert acceptance["learning"] > 1.2 * acceptance["frozen"]


@pytest.mark.parametrize("placement", [None, SEPARATED], ids=["shared", "separated"])
def test_a_resumed_run_ends_with_the_same_heads(placement: Any, run: Any) -> None:
    """Drafts are part of what is compared: their figures tell whether the engine had the same heads."""
    changes = {"placement": placement, "steps": 4}
    whole, broken = run("whole", **changes), run("broken", **changes)
    done = whole.train()
    break_at(5, broken.roles.actor)
    with pytest.raises(Exception, match="on purpose"):
        broken.train()
    path = done.path.with_name("broken")
    shutil.rmtree(path / "checkpoints" / "step_00000003", ignore_errors=True)
    resumed = run("broken", resume=True, **changes).train()
    assert same_weights(done.model, resumed.model)
    assert untimed_rows(done.path) == untimed_rows(path)
    one, other = (load_file(folder / "medusa" / "model.safetensors") for folder in (done.path, path))
    assert same(one, other)


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=2)], ids=["whole", "adapters"])
def test_the_heads_are_written_beside_the_model_that_they_belong_to(lora: Any, run: Any, causal_lm: Any) -> None:
    actor = ActorConfig(train=TrainConfig(optim=OptimConfig(lr=1e-2), lora=lora))
    made = run("whole", steps=2, actor=actor, placement=SEPARATED)
    done = made.train()
    model = causal_lm() if lora is not None else done.model
    packed = PackedCausalLM(model)
    loaded = MedusaHeads.load(done.path / "medusa", packed)
    assert same(dict(loaded.weights()), of_trainer(made))
    packed.release()


def test_an_engine_in_a_process_of_its_own_gets_them(run: Any) -> None:
    """A name that either end lacked would refuse the first weights."""
    rows = read_metrics(run("process", steps=1, process=True).train().path / "metrics.jsonl")[1:]
    assert all(row["heads/tokens"] > 0 and row["rollout/draft_acceptance"] > 0 for row in rows)


def test_heads_of_another_trunk_are_refused(run: Any, causal_lm: Any) -> None:
    with pytest.raises(UserError, match="trained on another model"):
        run("refused", model=causal_lm(seed=5))


@pytest.mark.parametrize("axis", ["context", "tensor"])
def test_states_in_parts_are_refused(axis: str) -> None:
    sharding = ShardingConfig(**{axis: 2})
    speculation = MedusaSpeculation(path="heads", train=HeadTraining())
    with pytest.raises(UserError, match=r"rollout.speculation.train learns from hidden states .* actor.sharding"):
        RLRecipe(actor=ActorConfig(sharding=sharding), rollout=RolloutConfig(speculation=speculation))
