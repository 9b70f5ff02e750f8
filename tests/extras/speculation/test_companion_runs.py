"""RL runs whose Medusa heads learn along: the policy learns as without, the heads follow it, and reach the engines."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from breaking import break_at, same_weights, untimed_rows
from quartet.config import UserError
from quartet.config.algorithms import GRPO, PPO, KLConfig
from quartet.config.common import CheckpointConfig, LoRAConfig, OptimConfig, SamplingConfig, ShardingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.recipe import ActorConfig, RLRecipe, RolloutConfig
from quartet.extras.speculation.config import HeadTraining, MedusaSpeculation, StepCosts
from quartet.extras.speculation.heads import MedusaHeads
from quartet.models.packed_model import PackedCausalLM
from quartet.observe.spans import Span, read_spans
from quartet.observe.trackers import read_metrics
from quartet.schedule.role_group import LocalGroup

COSTS = StepCosts(plain=(1.0, 1.01, 1.02), drafted=(1.0, 1.0, 1.01, 1.05, 1.15), drafting=(0.0,))
LEARNING = HeadTraining(tokens_per_step=200, optim=OptimConfig(lr=3e-2))
SEPARATED = {"type": "separated", "actor": {}, "rollout": {}}
TIGHT = {"type": "full_offload", "pool": {"budget_bytes": 400_000}}
TWO_POOLS = {
    "type": "pipelined",
    "pools": {"policy": {"roles": ["rollout", "actor", "heads"]}, "scores": {"roles": ["critic", "reference"]}},
}
PLACEMENTS: dict[str, Any] = {
    "forward_offload": {
        "type": "forward_offload",
        "rollout": {},
        "actor_reference": {"budget_bytes": 400_000},
        "critic_reward": {},
    },
    "full_offload": TIGHT,
    "pipelined": TWO_POOLS,
}
PPO_RUN: dict[str, Any] = {"algorithm": PPO(kl=KLConfig(coef=0.05)), "steps": 2, "epochs": 2, "chunk_size": 3}
LEARNING_STAGES = ("train_critic", "train_actor", "train_heads", "publish", "canary")


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
        speculation = MedusaSpeculation(path=str(heads), costs=COSTS, train=learning)
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
        drafter = made.workers.engines[0].worker.engine.drafter
        assert same(dict(drafter._heads.weights()), after)
        assert len(tuple(drafter.weights())) == (0 if placement is None else len(after)), (
            "sent where they are not shared"
        )
        rows = read_metrics(beside.path / "metrics.jsonl")[1:]
        assert all(0 < row["heads/tokens"] <= 200 and row["heads/loss"] > 0 for row in rows)
        assert all(row["heads/skipped_steps"] == 0 for row in rows)
        assert all(f"heads/accuracy_depth_{k}" in row for row in rows for k in (1, 2))


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


@pytest.mark.parametrize("axis", ["pipeline", "context", "tensor"])
def test_states_in_parts_are_refused(axis: str) -> None:
    sharding = ShardingConfig(**{axis: 2})
    speculation = MedusaSpeculation(path="heads", train=HeadTraining())
    with pytest.raises(
        UserError, match=rf"rollout.speculation.train learns from hidden states .*{axis} 2.*shard alone"
    ):
        RLRecipe(actor=ActorConfig(sharding=sharding), rollout=RolloutConfig(speculation=speculation))


# A stage of its own ----------------------------------------------------------------------------------------


def order_of(spans: Sequence[Span], step: int, stages: Sequence[str] = LEARNING_STAGES) -> list[str]:
    """The stages in the order in which they began in a step."""
    found = [span for span in spans if span.step == step and span.name in stages]
    return [span.name for span in sorted(found, key=lambda span: span.start_s)]


def test_heads_and_policy_are_the_same_under_every_placement(run: Any) -> None:
    """PPO with a critic: bits and every figure, drafts among them."""
    plain = run("none", **PPO_RUN)
    expected, rows = plain.train(), {}
    for name, placement in PLACEMENTS.items():
        made = run(name, placement=placement, **PPO_RUN)
        assert made.workers.placement.pool_of["heads"] == made.workers.placement.pool_of["actor"]
        done = made.train()
        assert same_weights(expected.model, done.model), name
        assert same(of_trainer(plain), of_trainer(made)), name
        rows[name] = [
            {key: value for key, value in row.items() if not key.startswith("handover/")}
            for row in untimed_rows(done.path)
        ]
        for step in range(2):
            order = order_of(read_spans(done.path / "spans.jsonl"), step)
            assert sorted(order) == sorted(LEARNING_STAGES)
            assert order.index("train_actor") < order.index("train_heads") < order.index("publish"), (name, order)
        assert all(row["time/train_heads_s"] > 0 for row in read_metrics(done.path / "metrics.jsonl")[1:])
    assert all(of_run == untimed_rows(expected.path) for of_run in rows.values())


def test_heads_train_while_the_critic_does(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The critic's updates begin, and end only when the heads have been trained and the new weights have left: a
    schedule in which either waited for the critic would not come to an end.
    """
    plain, made = run("plain", **PPO_RUN), run("held", placement=TWO_POOLS, **PPO_RUN)
    expected, call, events, step = plain.train(), LocalGroup.call, [], 0

    async def held(self: LocalGroup[Any], method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        nonlocal step
        is_critic = self.worker is made.roles.workers["critic"] and method.__name__ == "update"
        if is_critic:
            step += 1
            events.append("critic begins")
            async with asyncio.timeout(60):
                engine = made.workers.engines[0].worker.engine
                while events.count("heads") < step or engine.stats().policy_version < step:
                    await asyncio.sleep(0.001)
        found = await call(self, method, *args, **named)
        if is_critic or method.__name__ == "train_drafter":
            events.append("critic ends" if is_critic else "heads")
        return found

    monkeypatch.setattr(LocalGroup, "call", held)
    done = made.train()
    assert events == ["critic begins", "heads", "critic ends"] * 2
    assert same_weights(expected.model, done.model) and same(of_trainer(plain), of_trainer(made))
