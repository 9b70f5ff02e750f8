"""Outcome and process rewards on the quickstart's task: what they say of right and wrong answers, and what is learned.

    python benchmarks/process_rewards.py [--seed 0] [--work DIR] [--smoke]

A model of demonstrators who are mostly wrong (as in `quartet quickstart`) answers prompts; each step of its answers is
labelled by the rule of the task, one label in ten the wrong way round. A process reward model learns from these labels.

PPO then starts three times from the same model: with the outcome alone (the final answer is right), with the process
reward alone (the worst step), and with both. The source that is not trained on has weight 0, so that every run reports
both gaps. Another table shows how far process reward models put right held-out answers above wrong ones, before PPO and
after it, when the mistakes are others: one with labels on the first policy's answers, and one that has also seen
labels on the trained policy's.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from common import arguments, markdown, write_results
from transformers import Qwen2Config, Qwen2ForCausalLM

from quartet.config.algorithms import PPO, KLConfig
from quartet.config.common import ModelConfig, OptimConfig, SamplingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.recipe import (
    ActorConfig,
    CheckpointConfig,
    CriticConfig,
    LogConfig,
    RLRecipe,
    RolloutConfig,
    SFTRecipe,
)
from quartet.config.rewards import FunctionReward
from quartet.extras.process_rewards.config import MinSteps, ProcessModelReward, ProcessRewardRecipe
from quartet.extras.process_rewards.data import split_steps, step_reader
from quartet.extras.process_rewards.trainer import (
    CombinationRule,
    ProcessRewardTrainer,
    mean_gap,
    process_rewards,
    score_steps,
)
from quartet.extras.quickstart import recipes, task
from quartet.extras.quickstart.checker import is_correct
from quartet.extras.quickstart.tokenizer import build_tokenizer
from quartet.models.loading import load_causal_lm, load_scalar_model, packed_causal_lm, packed_scalar_model
from quartet.observe.trackers import read_metrics
from quartet.rollout.protocol import SamplingParams
from quartet.text.tokenizer import TextCodec
from quartet.train.engine import TrainEngine
from quartet.trainers.evaluation import generate
from quartet.trainers.input_sources import read_data
from quartet.trainers.rl import RLTrainer
from quartet.trainers.supervised import SFTTrainer

WEIGHTS = {"outcome": (1.0, 0.0), "process": (0.0, 1.0), "both": (1.0, 1.0)}
"""Of the outcome and of the process reward."""
LABEL_ERROR_RATE = 0.1
RULES: dict[CombinationRule, float] = {"min": 1.0, "sum": 1.0, "discounted": 0.9}
"""What combines the scores of steps, and its discount."""


@dataclass(frozen=True)
class Size:
    demonstrations: int
    sft_steps: int
    labelled_prompts: int
    held_out: int
    rl_steps: int


FULL = Size(demonstrations=20_000, sft_steps=312, labelled_prompts=1_200, held_out=300, rl_steps=20)
SMOKE = Size(demonstrations=400, sft_steps=3, labelled_prompts=8, held_out=8, rl_steps=1)


def correct(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """The outcome: whether the final answer is right."""
    return [float(is_correct(p, c)) for p, c in zip(prompts, completions, strict=True)]


def right_steps(prompt: str, completion: str) -> list[bool]:
    """Per step whether it is the one that careful work has at this place."""
    expected = [step.text for step in split_steps(task.work(*task.operands(prompt)), task.COLUMN_END)]
    found = [step.text for step in split_steps(completion, task.COLUMN_END)]
    return [k < len(expected) and text == expected[k] for k, text in enumerate(found)]


def labelled(prompts: Sequence[str], answers: Sequence[Sequence[str]], seed: int, error_rate: float) -> list[Any]:
    draw = random.Random(seed)
    return [
        {
            "prompt": prompt,
            "completion": text,
            "labels": [right != (draw.random() < error_rate) for right in right_steps(prompt, text)],
        }
        for prompt, texts in zip(prompts, answers, strict=True)
        for text in texts
        if text.strip()
    ]


def sampled(path: Path, prompts: Sequence[str], temperature: float, num: int, seed: int) -> list[list[str]]:
    packed, codec = packed_causal_lm(load_causal_lm(str(path))), TextCodec.from_pretrained(path)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=recipes.MAX_NEW_TOKENS)
    found = generate(packed, codec, prompts, sampling, num_responses=num, seed=seed, max_running=256)
    packed.release()
    return [[answer.text for answer in group] for group in found]


def train_policy(path: Path, size: Size, seed: int) -> Path:
    tokenizer = build_tokenizer()
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen2Config(vocab_size=len(tokenizer), tie_word_embeddings=True, **ids, **recipes.MODEL)
    torch.manual_seed(seed)
    recipe = SFTRecipe(
        seed=seed,
        output_dir=str(path / "sft"),
        train=TrainConfig(optim=OptimConfig(lr=3e-3, warmup_steps=20, schedule="cosine")),
        steps=size.sft_steps,
        examples_per_step=64,
        log=LogConfig(tensorboard=False),
    )
    rows = task.toy_demonstrations(seed, size.demonstrations)
    SFTTrainer(recipe, model=Qwen2ForCausalLM(config).eval(), tokenizer=tokenizer, rows=rows).train()
    return path / "sft" / "model"


def step_rows(policy: Path, size: Size, seed: int, split: task.TaskSplit) -> list[Any]:
    """Answers of a policy with labels for their steps; those of the training split have errors."""
    num, error_rate = (size.labelled_prompts, LABEL_ERROR_RATE) if split == "train" else (size.held_out, 0.0)
    prompts = task.toy_prompts(seed + 1, num, split)
    return labelled(prompts, sampled(policy, prompts, 1.0, 4, seed), seed, error_rate)


def train_process_model(path: Path, policy: Path, rows: Sequence[Any], seed: int) -> Path:
    """A process reward model on the body of ``policy``."""
    recipe = ProcessRewardRecipe(
        seed=seed,
        output_dir=str(path),
        model=ModelConfig(path=str(policy)),
        separator=task.COLUMN_END,
        train=TrainConfig(optim=OptimConfig(lr=1e-3, warmup_steps=10, schedule="cosine")),
        answers_per_step=64,
        epochs=3,
        log=LogConfig(tensorboard=False),
    )
    ProcessRewardTrainer(recipe, rows=rows).train()
    return path / "model"


def told_apart(model: Path, rows: Sequence[Any]) -> dict[str, Any]:
    """What a process reward model, and the labels themselves, say of right and wrong answers."""
    codec = TextCodec.from_pretrained(model)
    engine = TrainEngine(packed_scalar_model(load_scalar_model(str(model))), TrainConfig(), total_steps=1)
    context = recipes.MODEL["max_position_embeddings"]
    data = read_data(None, rows, codec, context, "answers", step_reader(task.COLUMN_END))
    logits_M, labels_M = score_steps(engine, data)
    lengths = torch.tensor([len(item.labels) for item in data.items])
    owner_M = torch.arange(len(lengths)).repeat_interleave(lengths)
    steps_M = torch.ones_like(owner_M, dtype=torch.bool)
    right_N = torch.tensor([is_correct(row["prompt"], row["completion"]) for row in rows])
    found: dict[str, Any] = {
        "right": int(right_N.sum()),
        "wrong": int((~right_N).sum()),
        "step_accuracy": float(((logits_M > 0) == (labels_M > 0.5)).double().mean()),
    }
    for rule, gamma in RULES.items():
        by_model_N, by_labels_N = (
            process_rewards(scores_M, steps_M, owner_M, len(rows), rule, gamma)
            for scores_M in (logits_M.sigmoid(), labels_M)
        )
        found[rule] = {
            "gap": float(mean_gap(by_model_N, right_N, torch.ones_like(right_N))),
            "gap_of_labels": float(mean_gap(by_labels_N, right_N, torch.ones_like(right_N))),
            "ranked": ranked(by_model_N[right_N], by_model_N[~right_N]),
        }
    return found


def ranked(right_R: torch.Tensor, wrong_W: torch.Tensor) -> float:
    """Share of pairs of a right and a wrong answer in which the right one has the larger reward; half where equal."""
    difference_RW = right_R[:, None] - wrong_W[None, :]
    return float(((difference_RW > 0).double() + 0.5 * (difference_RW == 0).double()).mean())


def train_rl(path: Path, name: str, policy: Path, size: Size, seed: int) -> dict[str, Any]:
    """One PPO run and what became of it."""
    outcome, process = WEIGHTS[name]
    recipe = RLRecipe(
        seed=seed,
        output_dir=str(path / name),
        actor=ActorConfig(
            model=ModelConfig(path=str(policy)),
            train=TrainConfig(optim=OptimConfig(lr=3e-4, warmup_steps=6, schedule="cosine", min_lr_ratio=0.1)),
        ),
        critic=CriticConfig(train=TrainConfig(optim=OptimConfig(lr=1e-3)), warmup_steps=2),
        rewards=(
            FunctionReward(target=f"{__file__}:correct", name="outcome", weight=outcome),
            ProcessModelReward(
                path=str(path / "process_reward" / "model"), name="process", weight=process, combine=MinSteps()
            ),
        ),
        algorithm=PPO(kl=KLConfig(coef=0.05), missing_eos_penalty=1.0),
        rollout=RolloutConfig(
            sampling=SamplingConfig(max_new_tokens=recipes.MAX_NEW_TOKENS), engine=NativeEngineConfig(steps_per_lease=4)
        ),
        steps=size.rl_steps,
        prompts_per_step=64,
        responses_per_prompt=4,
        minibatches=2,
        chunk_size=16,
        log=LogConfig(tensorboard=False, rollouts_every=1000),
        checkpoint=CheckpointConfig(every_steps=1000),
    )
    prompts = [{"prompt": p} for p in task.toy_prompts(seed + 2, 320)]
    RLTrainer(recipe, prompts=prompts).train()
    rows = [row for row in read_metrics(path / name / "metrics.jsonl") if "process/gap_process" in row]
    return {
        "rewards": name,
        "gaps": [[row["process/gap_outcome"], row["process/gap_process"]] for row in rows],
        **measured(path / name / "model", size, seed),
    }


def measured(model: Path, size: Size, seed: int) -> dict[str, float]:
    """Shares of right final answers and of right steps among greedy answers to held-out prompts."""
    prompts = task.toy_prompts(seed, size.held_out, "held_out")
    answers = [group[0] for group in sampled(model, prompts, 0.0, 1, seed)]
    steps = [right for p, text in zip(prompts, answers, strict=True) for right in right_steps(p, text)]
    return {"exact_match": sum(correct(prompts, answers)) / len(prompts), "right_steps": sum(steps) / len(steps)}


def measure(path: Path, size: Size, seed: int) -> dict[str, Any]:
    start = train_policy(path, size, seed)
    rows = step_rows(start, size, seed, "train")
    model = train_process_model(path / "process_reward", start, rows, seed)
    return {
        "before": measured(start, size, seed),
        "answers": len(rows),
        "runs": [train_rl(path, name, start, size, seed) for name in WEIGHTS],
        "models": models(path, start, model, rows, size, seed),
    }


def models(path: Path, start: Path, first: Path, rows: Sequence[Any], size: Size, seed: int) -> dict[str, Any]:
    """The model of step labels on the first policy's answers, and one that has labels on the trained policy's, too."""
    trained = path / "process" / "model"
    early, late = (step_rows(policy, size, seed, "held_out") for policy in (start, trained))
    fresh = step_rows(trained, size, seed, "train")
    renewed = train_process_model(path / "process_reward_renewed", start, [*rows, *fresh], seed)
    return {
        "first policy | first policy": told_apart(first, early),
        "policy after PPO with process | first policy": told_apart(first, late),
        "policy after PPO with process | both": told_apart(renewed, late),
    }


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def models_table(found: dict[str, Any]) -> str:
    head = ["answers of", "labels on answers of", "right, wrong", "steps told", "gap, min", "the labels' own gap, min"]
    rows = []
    for name, figures in found.items():
        gaps = [f"{figures['min'][key]:.2f}" for key in ("gap", "gap_of_labels")]
        above = [share(figures[rule]["ranked"]) for rule in RULES]
        counts = f"{figures['right']}, {figures['wrong']}"
        rows.append([*name.split(" | "), counts, share(figures["step_accuracy"]), *gaps, *above])
    return markdown([*head, *(f"right above wrong, {rule}" for rule in RULES)], rows)


def runs_table(found: dict[str, Any]) -> str:
    before = found["before"]
    rows = [["before", "", "", share(before["exact_match"]), share(before["right_steps"])]]
    for run in found["runs"]:
        # Both rewards lie in [0, 1]. In the first two steps only the critic learns; few wrong answers are left at last.
        gaps = [f"{fmean(gap[:2]):.2f} → {fmean(gap[-5:]):.2f}" for gap in zip(*run["gaps"], strict=True)] or ["", ""]
        rows.append([run["rewards"], *gaps, share(run["exact_match"]), share(run["right_steps"])])
    head = ["PPO with", "gap, outcome", "gap, process", "right answers, greedy", "right steps, greedy"]
    return markdown(head, rows)


def main() -> None:
    parser = arguments(__doc__, repeats=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="keep the runs in this folder")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args.work or Path(folder), SMOKE if args.smoke else FULL, args.seed)
    print(f"{found['answers']} answers with labelled steps\n\n{models_table(found['models'])}\n")
    print(runs_table(found))
    write_results(args, {"process_rewards": found})


if __name__ == "__main__":
    main()
