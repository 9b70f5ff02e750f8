"""Records short training curves of every job, to the last digit: ``python tests/golden/make_golden.py``.

A change that does not touch the computation leaves them bit for bit as they are. One that does is recorded anew, and
the commit says why the numbers moved.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from quartet.config.algorithms import (
    CISPO,
    DAPO,
    GDPO,
    GMPO,
    GPG,
    GRPO,
    GSPO,
    OPO,
    PPO,
    RLOO,
    SAPO,
    AlgorithmConfig,
    BestOfN,
    ClipCovLoss,
    Distillation,
    DrGRPO,
    KLConfig,
    KLCovLoss,
    OnlineDPO,
    OptimalTokenBaseline,
    OverlongConfig,
    PassAtK,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from quartet.config.common import LoRAConfig, OptimConfig, SamplingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.preference import (
    AOTLoss,
    BCOPairLoss,
    DiscoPOPLoss,
    DPOLoss,
    EXOPairLoss,
    HingeLoss,
    IPOLoss,
    KTOLoss,
    ORPOLoss,
    PointwisePairLoss,
    PreferenceLossConfig,
    PreferenceRecipe,
    RobustDPOLoss,
    SimPOLoss,
)
from quartet.config.recipe import (
    ActorConfig,
    CriticConfig,
    EnvironmentConfig,
    LogConfig,
    PTXConfig,
    ReferenceConfig,
    RewardModelRecipe,
    RLRecipe,
    RolloutConfig,
    SFTRecipe,
)
from quartet.envs.protocol import Item, Observation, StepResult
from quartet.extras.process_rewards.config import ProcessModelReward, ProcessRewardRecipe
from quartet.extras.process_rewards.trainer import ProcessRewardTrainer
from quartet.extras.quickstart import task
from quartet.extras.quickstart.tokenizer import build_tokenizer
from quartet.observe.memory import describe_processor
from quartet.observe.trackers import read_metrics
from quartet.trainers.preference import PreferenceTrainer
from quartet.trainers.rl import RLTrainer
from quartet.trainers.supervised import RewardModelTrainer, SFTTrainer

PATH = Path(__file__).with_name("golden.json")
TIMED = ("memory/", "throughput/", "time/", "time_s", "overlap/", "rollout/tokens_per_s")
TRAIN = TrainConfig(optim=OptimConfig(lr=3e-3, warmup_steps=2, schedule="cosine"))
ADAPTERS = TRAIN.model_copy(update={"lora": LoRAConfig(rank=4, alpha=8.0)})

Curve = list[dict[str, float]]


def _model(kind: type[Any], seed: int = 0, **changes: Any) -> Any:
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        **changes,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind(config).eval()


def digits(completions: Sequence[str], **_: Any) -> list[float]:
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def brief(completions: Sequence[str], **_: Any) -> list[float]:
    return [1.0 / (1 + len(text)) for text in completions]


class TwoTurns:
    """The second state is made of the first action alone (``rewrites``), or adds to what stood before it."""

    def __init__(self, rewrites: bool) -> None:
        self.rewrites = rewrites
        self.has_acted = False

    async def reset(self, item: Item) -> str:
        return str(item.prompt)

    async def step(self, action: str) -> StepResult:
        if self.has_acted:
            return StepResult(None, reward=digits([action])[0], done=True)
        self.has_acted = True
        return StepResult(Observation(f"{action}=" if self.rewrites else "=", rewrites=self.rewrites))


def _common(path: Path, name: str) -> dict[str, Any]:
    return {"output_dir": str(path / name), "log": LogConfig(tensorboard=False), "threads": 1}


def _sft(path: Path) -> None:
    recipe = SFTRecipe(**_common(path, "sft"), train=TRAIN, steps=6, examples_per_step=8)
    rows = task.toy_demonstrations(0, 32)
    SFTTrainer(recipe, model=_model(Qwen2ForCausalLM), tokenizer=build_tokenizer(), rows=rows).train()


def _pairs() -> list[dict[str, str]]:
    return [
        {"prompt": p, "chosen": task.work(*task.operands(p)), "rejected": task.work(*task.operands(p), "forgetful")}
        for p in task.toy_prompts(0, 40)
    ]


def _reward_model(path: Path) -> None:
    recipe = RewardModelRecipe(**_common(path, "reward-model"), train=TRAIN, steps=6, pairs_per_step=6, centring=0.01)
    RewardModelTrainer(recipe, model=_model(Qwen2ForCausalLM), tokenizer=build_tokenizer(), rows=_pairs()).train()


def _process_reward(path: Path) -> None:
    recipe = ProcessRewardRecipe(
        **_common(path, "process-reward"), train=TRAIN, steps=6, answers_per_step=6, separator=task.COLUMN_END
    )
    rows = []
    for pair in _pairs():
        right, found = (pair[side].split(task.COLUMN_END) for side in ("chosen", "rejected"))
        labels = [step == expected for step, expected in zip(found, right, strict=True)]
        rows.append({"prompt": pair["prompt"], "steps": found, "labels": labels})
    ProcessRewardTrainer(recipe, model=_model(Qwen2ForCausalLM), tokenizer=build_tokenizer(), rows=rows).train()


def _preference(loss: PreferenceLossConfig) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        recipe = PreferenceRecipe(**_common(path, loss.name), loss=loss, train=TRAIN, steps=6, pairs_per_step=6)
        PreferenceTrainer(recipe, model=_model(Qwen2ForCausalLM), tokenizer=build_tokenizer(), rows=_pairs()).train()

    return run


def _rl(
    name: str, algorithm: AlgorithmConfig, *, objects: Mapping[str, Any] | None = None, **sections: Any
) -> Callable[[Path], None]:
    """``sections`` of the recipe and ``objects`` of the trainer stand in for those that all runs share."""

    def run(path: Path) -> None:
        if isinstance(algorithm, Distillation):
            _model(Qwen2ForCausalLM, seed=1).save_pretrained(path / "teacher")
        shared = {
            "actor": ActorConfig(train=TRAIN),
            "critic": CriticConfig(train=TRAIN, warmup_steps=1),
            "reference": ReferenceConfig(path=str(path / "teacher") if isinstance(algorithm, Distillation) else None),
            "rollout": RolloutConfig(
                sampling=SamplingConfig(max_new_tokens=6), engine=NativeEngineConfig(max_running=8)
            ),
            "steps": 4,
            "prompts_per_step": 4,
            "responses_per_prompt": 2,
            "minibatches": 2,
            "chunk_size": 2,
        }
        recipe = RLRecipe(**_common(path, name), algorithm=algorithm, **{**shared, **sections})
        reward_model = _model(Qwen2ForSequenceClassification, num_labels=1)
        rewards = [digits, reward_model] if name == "ppo" else [digits]
        RLTrainer(
            recipe,
            model=_model(Qwen2ForCausalLM),
            tokenizer=build_tokenizer(),
            prompts=task.toy_prompts(0, 16),
            **{"rewards": rewards, **(objects or {})},
        ).train()

    return run


def _process_rl(path: Path) -> None:
    """Outcome and process reward together, by a process reward model that is trained first."""
    _process_reward(path)
    source = ProcessModelReward(path=str(path / "process-reward" / "model"))
    rollout = RolloutConfig(sampling=SamplingConfig(max_new_tokens=20), engine=NativeEngineConfig(max_running=8))
    _rl("ppo_process", PPO(), rewards=(source,), rollout=rollout)(path)


def _episodes(name: str, *, rewrites: bool) -> Callable[[Path], None]:
    environment = EnvironmentConfig(options={"rewrites": rewrites}, max_turns=2)
    return _rl(name, PPO(), objects={"rewards": [], "environment": TwoTurns}, environment=environment)


LOSSES = (
    *(DPOLoss(), RobustDPOLoss(), IPOLoss(), HingeLoss(), SimPOLoss(), ORPOLoss(), KTOLoss()),
    *(EXOPairLoss(), PointwisePairLoss(), DiscoPOPLoss(), BCOPairLoss(), AOTLoss()),
)
CLIP_COV = ClipCovLoss(clip_cov_ratio=0.2, clip_cov_lb=-1.0)
PTX = {"ptx": PTXConfig(coef=0.5, examples_per_minibatch=3), "objects": {"ptx_rows": task.toy_demonstrations(0, 32)}}
LORA = {"actor": ActorConfig(train=ADAPTERS), "critic": CriticConfig(train=ADAPTERS, warmup_steps=1)}


RUNS: Mapping[str, Callable[[Path], None]] = {
    "sft": _sft,
    "reward-model": _reward_model,
    "process-reward": _process_reward,
    **{loss.name: _preference(loss) for loss in LOSSES},
    "ppo": _rl("ppo", PPO(kl=KLConfig(coef=0.05))),
    "grpo": _rl("grpo", GRPO(kl=KLConfig(coef=0.05, estimator="k3", place="loss"))),
    "rloo": _rl("rloo", RLOO()),
    "dr_grpo": _rl("dr_grpo", DrGRPO()),
    "dapo": _rl("dapo", DAPO(overlong=OverlongConfig(buffer=4))),
    "gspo": _rl("gspo", GSPO()),
    "cispo": _rl("cispo", CISPO()),
    "gpg": _rl("gpg", GPG()),
    "sapo": _rl("sapo", SAPO()),
    "gmpo": _rl("gmpo", GMPO()),
    "gdpo": _rl("gdpo", GDPO(), objects={"rewards": [digits, brief]}),
    "pass_at_k": _rl("pass_at_k", PassAtK(k=2), responses_per_prompt=4),
    "optimal_token_baseline": _rl("optimal_token_baseline", OptimalTokenBaseline()),
    "clip_cov": _rl("clip_cov", GRPO(policy_loss=CLIP_COV)),
    "kl_cov": _rl("kl_cov", GRPO(policy_loss=KLCovLoss(kl_cov_ratio=0.2))),
    "opo": _rl("opo", OPO()),
    "reinforce_pp": _rl("reinforce_pp", ReinforcePlusPlus(gamma=0.9)),
    "reinforce_pp_baseline": _rl("reinforce_pp_baseline", ReinforcePlusPlusBaseline()),
    "remax": _rl("remax", ReMax()),
    "distillation": _rl("distillation", Distillation()),
    "best_of_n": _rl("best_of_n", BestOfN()),
    "online_dpo": _rl("online_dpo", OnlineDPO(refresh_steps=2)),
    "ppo_process": _process_rl,
    "ppo_ptx": _rl("ppo_ptx", PPO(), **PTX),
    "ppo_lora": _rl("ppo_lora", PPO(), **LORA),
    "two_turns_extended": _episodes("two_turns_extended", rewrites=False),
    "two_turns_rewritten": _episodes("two_turns_rewritten", rewrites=True),
}


def curve(name: str) -> Curve:
    """Every figure of every step, those that measure seconds left out; computed on one thread."""
    with tempfile.TemporaryDirectory() as path:
        RUNS[name](Path(path))
        rows = read_metrics(Path(path) / name / "metrics.jsonl")
    return [{key: value for key, value in row.items() if not key.startswith(TIMED)} for row in rows]


if __name__ == "__main__":
    recorded = {"processor": describe_processor(), "curves": {name: curve(name) for name in RUNS}}
    PATH.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"recorded {len(RUNS)} curves in {PATH}")
