"""GRPO on the real stories model with vLLM's engine: every placement, adapters, a killed engine, a resumed run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quartet.config import UserError
from quartet.config.algorithms import GRPO, KLConfig, OffPolicyConfig
from quartet.config.common import (
    CheckpointConfig,
    LogConfig,
    LoRAConfig,
    ModelConfig,
    OptimConfig,
    RayCluster,
    SamplingConfig,
    ShardingConfig,
)
from quartet.config.common import TrainConfig as Train
from quartet.config.engines import VLLMEngineConfig
from quartet.config.recipe import ActorConfig, RLRecipe, RolloutConfig
from quartet.extras.speculation.config import HeadTraining, MedusaSpeculation
from quartet.extras.speculation.heads import MedusaHeads
from quartet.models.loading import load_causal_lm
from quartet.models.packed_model import PackedCausalLM
from quartet.observe.trackers import read_metrics
from quartet.rollout.process import EngineProcess
from quartet.rollout.protocol import Request
from quartet.trainers.rl import RLTrainer

STEPS = 10
PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
PROMPTS = ["Once upon a time", "One day, a little girl", "Tom had a big", "The cat sat"]
APART = {"engine": {"roles": ["rollout"]}, "models": {"roles": ["actor", "reference"]}}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "colocated": {"type": "full_offload", "pool": {"budget_bytes": 4_600_000}},
    "separated": {"type": "separated", "actor": {}, "reference": {}, "rollout": {}},
    "pipelined": {"type": "pipelined", "pools": APART},
    "asynchronous": {"type": "asynchronous", "max_staleness": 1, "pools": APART},
}


def vowels(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


@pytest.fixture
def trainer(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RLTrainer]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def make(name: str, *, resume: bool = False, **changes: Any) -> RLTrainer:
        sampling, own = changes.pop("sampling", {}), changes.pop("engine", {})
        speculation = changes.pop("speculation", None)
        engine = VLLMEngineConfig(
            python=str(PYTHON), enforce_eager=True, cache_bytes=1 << 26, max_num_seqs=16, max_model_len=128, **own
        )
        values: dict[str, Any] = {
            "algorithm": GRPO(kl=KLConfig(coef=0.01), off_policy=OffPolicyConfig()),
            "actor": ActorConfig(model=ModelConfig(path=str(stories)), train=Train(optim=OptimConfig(lr=1e-3))),
            "rollout": RolloutConfig(
                engine=engine, sampling=SamplingConfig(max_new_tokens=24, **sampling), speculation=speculation
            ),
            "steps": STEPS,
            "prompts_per_step": 4,
            "responses_per_prompt": 4,
            "chunk_size": 2,
            "threads": 1,
            "placement": PLACEMENTS[name],
            "output_dir": str(tmp_path / "run"),
            "log": LogConfig(tensorboard=False),
            "checkpoint": CheckpointConfig(every_steps=5),
        }
        return RLTrainer(RLRecipe(**{**values, **changes}), rewards=[vowels], prompts=PROMPTS, resume=resume)

    return make


def checked(trainer: RLTrainer, *, steps: int = STEPS) -> list[dict[str, Any]]:
    """Trains; every update reached the engine, which agrees with the trainer about what it sampled."""
    trainer.train()
    rows = [row for row in read_metrics(trainer.path / "metrics.jsonl") if row["step"] > 0]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert row["agreement/canary_diff"] < 1e-4
        assert row["throughput/weight_sync_bytes"] > 0
        if row.get("staleness/max", 0) == 0:
            assert row["agreement/logprob_diff_max"] < 1e-3
    assert rows[-1]["kl/ref"] > 1e-3, "the policy has moved, and the engine with it"
    return rows


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_trains(trainer: Callable[..., RLTrainer], placement: str) -> None:
    rows = checked(trainer(placement))
    assert rows[-1]["engine/restarts"] == 0
    if placement == "colocated":
        assert all(row["handover/offload_bytes"] > 0 for row in rows), "the actor's training leaves no room for weights"
    if placement == "asynchronous":
        assert max(row["staleness/max"] for row in rows) == 1


def test_adapters_and_truncated_sampling(trainer: Callable[..., RLTrainer], stories: Path) -> None:
    adapted = Train(optim=OptimConfig(lr=1e-2), lora=LoRAConfig(rank=4))
    actor = ActorConfig(model=ModelConfig(path=str(stories)), train=adapted)
    truncated = {"top_p": 0.8, "top_k": 20, "truncated_logprobs": True}
    made = trainer("pipelined", actor=actor, sampling=truncated)
    checked(made)


@pytest.mark.parametrize("shared", [True, False])
def test_heads_learn_along_and_draft(
    trainer: Callable[..., RLTrainer], stories: Path, tmp_path: Path, shared: bool
) -> None:
    """They come beside the weights of every version, and start worthless: what is kept is what they learned."""
    path = tmp_path / "heads"
    MedusaHeads(PackedCausalLM(load_causal_lm(str(stories))), 2, layers=2, shared_head=shared).save(path)
    learn = HeadTraining(optim=OptimConfig(lr=1e-2))
    made = trainer("separated", speculation=MedusaSpeculation(path=str(path), train=learn))
    rows = checked(made)
    assert all(0 <= row["rollout/draft_acceptance"] <= 1 for row in rows)
    assert all("heads/loss" in row for row in rows)
    early, late = (sum(row["rollout/draft_acceptance"] for row in part) / len(part) for part in (rows[:3], rows[-3:]))
    assert late > early + 0.05, (early, late)
    assert rows[-1]["rollout/tokens_per_forward"] > rows[0]["rollout/tokens_per_forward"]


def test_a_killed_engine_and_a_resumed_run(trainer: Callable[..., RLTrainer], monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[str] = []
    submit = EngineProcess.submit

    def kill_then(self: EngineProcess, requests: Sequence[Request]) -> None:
        submit(self, requests)
        if requests[0].group == "9" and not killed:
            killed.append(requests[0].group)
            os.kill(self._child.pid, signal.SIGKILL)  # type: ignore[union-attr]

    monkeypatch.setattr(EngineProcess, "submit", kill_then)
    first = trainer("separated")
    step = first._step

    async def stopped(number: int, attempt: Any) -> int:
        if number == 5:
            raise UserError("enough", found="five steps", remedy="go on")
        return await step(number, attempt)

    first._step = stopped  # type: ignore[method-assign]
    with pytest.raises(UserError, match="enough"):
        first.train()
    assert killed
    assert read_metrics(first.path / "metrics.jsonl")[-1]["engine/restarts"] == 1
    checked(trainer("separated", resume=True))


def test_on_ray_each_worker_starts_its_engine(trainer: Callable[..., RLTrainer], shared_ray: Any) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
    shared_ray.start()
    cluster = RayCluster(cpus_per_process=0.1)
    checked(trainer("separated", cluster=cluster, steps=4), steps=4)


def test_an_actor_cut_by_tensor_beside_an_engine_cut_otherwise(
    trainer: Callable[..., RLTrainer], stories: Path, shared_ray: Any
) -> None:
    """Its weights come together on their way, and the engine's two workers cut them anew."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
    shared_ray.start()
    cut = ActorConfig(
        model=ModelConfig(path=str(stories)),
        train=Train(optim=OptimConfig(lr=1e-3)),
        sharding=ShardingConfig(tensor=2, shard=2),
    )
    pools = {"engine": {"roles": ["rollout"]}, "models": {"roles": ["actor", "reference"], "processes": 4}}
    made = trainer(
        "pipelined",
        actor=cut,
        engine={"tensor_parallel_size": 2},
        cluster=RayCluster(cpus_per_process=0.1),
        placement={"type": "pipelined", "pools": pools},
        steps=3,
    )
    checked(made, steps=3)
