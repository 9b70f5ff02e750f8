"""Engines apart from the trainer's process: the training of a run with them is that of one without, to the bit.

Episodes of several turns by an engine in a process: tokens, versions, log-probabilities and rewards are those of the
engine in the trainer's process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.config.algorithms import GRPO, KLConfig, OffPolicyConfig
from quartet.config.choices import EngineConfig
from quartet.config.common import CheckpointConfig, LoRAConfig, OptimConfig, SamplingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.recipe import ActorConfig, EvaluationConfig, RLRecipe, RolloutConfig
from quartet.config.run import LogConfig
from quartet.extras.doctor.examine import examine
from quartet.observe.trackers import read_metrics
from quartet.rollout.engine import load_engine
from quartet.rollout.process import EngineProcess
from quartet.rollout.protocol import Request, SteppedEngine
from quartet.trainers import engines
from quartet.trainers.engines import EnginePolicy
from quartet.trainers.rl import RLTrainer
from served_episodes import check_episodes, run  # noqa: F401 - a fixture

NOT_NUMBERS = ("throughput/", "time/", "memory/", "overlap/", "handover/", "time_s", "engine/")
NOT_OF_ENGINES = (*NOT_NUMBERS, "rollout/tokens", "rollout/prefill")  # what an engine does twice counts twice
ROLES = ["actor", "reference", "rollout"]
APART = {"engine": {"roles": ["rollout"]}, "models": {"roles": ["actor", "reference"]}}
PLACEMENTS: dict[str, Any] = {
    "shared": None,
    "separated": {"type": "separated", **{role: {} for role in ROLES}},
    "full_offload": {"type": "full_offload", "pool": {}},
    "pipelined": {"type": "pipelined", "pools": APART},
    "nothing stale": {"type": "asynchronous", "max_staleness": 0, "pools": APART},
}


class Beside(SteppedEngine):
    """An engine that takes staged weights as a process does, and computes in the thread that waits for it."""

    def __init__(self, policy: EnginePolicy, **options: Any) -> None:
        lora = None if policy.lora is None else policy.lora.model_dump()
        native = load_engine(policy.path, numerics=policy.numerics, lora=lora, seed=policy.seed, **options)
        super().__init__(native)
        assert policy.staging is not None
        self._staging = policy.staging
        self._staging.attach(self.take_weights)

    def take_weights(self, version: int) -> None:
        self.engine.update_weights(self._staging.handle, version)  # type: ignore[arg-type]

    def weight_sink(self) -> Any:
        return self._staging.weight_sink()


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines, which start at once."""

    def two(config: EngineConfig, policy: EnginePolicy) -> list[Beside]:
        return [Beside(policy, max_running=6) for _ in range(2)]

    monkeypatch.setattr(engines, "_engines", two)


def recipe(path: Path, *, process: bool, **changes: Any) -> RLRecipe:
    values: dict[str, Any] = {
        "algorithm": GRPO(kl=KLConfig(coef=0.05)),
        "actor": ActorConfig(train=TrainConfig(optim=OptimConfig(lr=1e-2))),
        "rollout": RolloutConfig(
            sampling=SamplingConfig(max_new_tokens=8), engine=NativeEngineConfig(max_running=6, process=process)
        ),
        "evaluation": EvaluationConfig(every_steps=2, sampling=SamplingConfig(temperature=0.0, max_new_tokens=4)),
        "steps": 3,
        "prompts_per_step": 4,
        "responses_per_prompt": 4,
        "chunk_size": 2,
        "numerics": "exact",
        "output_dir": str(path),
        "log": LogConfig(tensorboard=False),
        "checkpoint": CheckpointConfig(every_steps=1),
    }
    return RLRecipe(**{**values, **changes})


@pytest.fixture
def trainer(causal_lm: Any, tokenizer: Any, prompts: Any, digits: Any, tmp_path: Path) -> Callable[..., RLTrainer]:
    def make(name: str, *, process: bool = True, resume: bool = False, **changes: Any) -> RLTrainer:
        model, placement = causal_lm(), changes.get("placement")
        if placement == PLACEMENTS["full_offload"]:
            # The actor trains with four numbers for each weight, and leaves no room for the engine's.
            budget = int(4.5 * sum(parameter.nbytes for parameter in model.parameters()))
            changes["placement"] = {**placement, "pool": {"budget_bytes": budget}}
        objects = {"model": model, "tokenizer": tokenizer, "rewards": [digits], "prompts": prompts}
        made = recipe(tmp_path / name, process=process, **changes)
        return RLTrainer(made, evaluation_prompts=prompts[:2], resume=resume, **objects)

    return make


def trained(trainer: RLTrainer) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """Figures of all steps that no clock and no engine decides, and the weights."""
    result = trainer.train()
    rows = read_metrics(trainer.path / "metrics.jsonl")
    kept = [{k: v for k, v in row.items() if not k.startswith(NOT_OF_ENGINES)} for row in rows]
    return kept, [tensor.clone() for tensor in result.model.state_dict().values()]


def assert_equal(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


# In this process -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("beside", "exact_processor")
def test_every_placement_trains_as_with_the_engine_in_the_process(trainer: Callable[..., RLTrainer]) -> None:
    correction = GRPO(kl=KLConfig(coef=0.05), off_policy=OffPolicyConfig())
    here = trained(trainer("here", process=False))
    corrected = trained(trainer("corrected", process=False, algorithm=correction))
    for name, placement in PLACEMENTS.items():
        ahead = name == "nothing stale"
        changes = {"algorithm": correction} if ahead else {}
        found = trained(trainer(name, placement=placement, **changes))
        if ahead:
            found = [{k: v for k, v in row.items() if not k.startswith("staleness/")} for row in found[0]], found[1]
        assert_equal(found, corrected if ahead else here)


@pytest.mark.usefixtures("beside", "exact_processor")
def test_adapters_alone_are_sent(trainer: Callable[..., RLTrainer]) -> None:
    lora = ActorConfig(train=TrainConfig(optim=OptimConfig(lr=1e-2), lora=LoRAConfig(rank=2)))
    here = trained(trainer("here", process=False, actor=lora))
    there = trainer("there", actor=lora)
    assert_equal(trained(there), here)
    sent = read_metrics(there.path / "metrics.jsonl")[-1]["throughput/weight_sync_bytes"]
    adapters = there.roles.actor.packed.adapters
    assert adapters is not None
    assert sent == sum(tensor.nbytes for tensor in adapters.trained.values())


# The doctor ----------------------------------------------------------------------------------------------


def test_the_doctor_finds_old_weights_in_the_second_of_two_engines(
    causal_lm: Any, tokenizer: Any, prompts: Any, digits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Second(Beside):
        def take_weights(self, version: int) -> None:
            if version == 0:
                super().take_weights(version)

    def two(config: EngineConfig, policy: EnginePolicy) -> list[Beside]:
        return [Beside(policy, max_running=6), Second(policy, max_running=6)]

    monkeypatch.setattr(engines, "_engines", two)
    objects = {"model": causal_lm(), "tokenizer": tokenizer, "rewards": [digits], "prompts": prompts}
    made = recipe(tmp_path / "run", process=True, numerics="fast", evaluation=None)
    assert [finding.name for finding in examine(made, **objects) if finding.status == "failure"] == ["weight_update"]


# In processes --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("exact_processor")
def test_a_killed_engine_costs_nothing_but_time(
    trainer: Callable[..., RLTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed with requests of the second step in it; on the way it sleeps and wakes."""
    killed: list[str] = []
    submit = EngineProcess.submit

    def kill_then(self: EngineProcess, requests: Sequence[Request]) -> None:
        submit(self, requests)
        group = requests[0].group
        if group == "5" and not killed:
            killed.append(group)
            os.kill(self._child.pid, signal.SIGKILL)  # type: ignore[union-attr]

    here = trained(trainer("here", process=False))
    monkeypatch.setattr(EngineProcess, "submit", kill_then)
    there = trainer("there", placement=PLACEMENTS["full_offload"])
    assert_equal(trained(there), here)
    last = read_metrics(there.path / "metrics.jsonl")[-1]
    assert last["engine/restarts"] == len(killed) == 1
    assert last["handover/offload_bytes"] > 0
    assert last["engine/rerouted"] >= 4


@pytest.mark.usefixtures("exact_processor")
def test_a_native_engine_in_a_process_to_the_bit(run: Any) -> None:  # noqa: F811
    here, here_model, _ = run("here", NativeEngineConfig(max_running=5), "exact")
    there, there_model, rows = run("there", NativeEngineConfig(max_running=5, process=True), "exact")
    check_episodes(here)
    assert there == here
    assert all(torch.equal(a, b) for a, b in zip(here_model.parameters(), there_model.parameters(), strict=True))
    assert rows[-1]["agreement/logprob_diff_max"] == 0.0
