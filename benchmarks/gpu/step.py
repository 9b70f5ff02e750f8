"""Whole RL steps by ``RLTrainer``, GRPO and PPO, on random models and a real one; beside TRL's GRPO where it is there.

Ours and TRL's have the same model, prompts, responses per prompt, most new tokens and precision (fp32 weights, bf16
products), one update per step and no reference model.
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from machine import peak_memory, synchronize
from shapes import build, config_of
from tokenizers import Tokenizer, models, pre_tokenizers
from training import settings_of
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

import quartet
from quartet.observe.callbacks import Callback
from quartet.observe.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
WARM_UPS = 1
"""Steps in which kernels are compiled and memory is first taken."""
METHODS = ("grpo", "ppo")
STAGES = {"generate_s": "time/generate_s", "update_s": "time/train_actor_s", "update_critic_s": "time/train_critic_s"}


@dataclass(frozen=True)
class Task:
    """What is trained, and on what.

    Attributes:
        prompts: of one step; every step has them again.
        score: of completions, between 0 and 1.
    """

    name: str
    model: Callable[[torch.device], PreTrainedModel]
    tokenizer: PreTrainedTokenizerFast
    prompts: Sequence[str]
    per_prompt: int
    new: int
    score: Callable[[Sequence[str]], list[float]]
    smoke: bool

    @property
    def num_samples(self) -> int:
        return len(self.prompts) * self.per_prompt


def random_task(name: str, *, smoke: bool) -> Task:
    """Random tokens and weights: what is measured does not depend on what they say; hardly any answer ends early."""
    num_prompts, per_prompt, length, new = (2, 4, 10, 8) if smoke else (32, 8, 256, 128)
    vocab_size = config_of(name).vocab_size
    words = {"<pad>": 0, "<end>": 1} | {f"w{i}": i for i in range(2, vocab_size)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", unk_token="<pad>", padding_side="left"
    )
    ids = torch.randint(2, vocab_size, (num_prompts, length), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [" ".join(f"w{token}" for token in tokens) for tokens in ids]
    return Task(name, partial(build, name), tokenizer, prompts, per_prompt, new, lower_half(vocab_size), smoke)


def lower_half(vocab_size: int) -> Callable[[Sequence[str]], list[float]]:
    """Scores the share of tokens from the lower half of the vocabulary: cheap, and different between responses."""

    def score(completions: Sequence[str]) -> list[float]:
        words = [[int(word[1:]) for word in text.split() if word[0] == "w"] for text in completions]
        return [sum(token < vocab_size // 2 for token in tokens) / max(1, len(tokens)) for tokens in words]

    return score


def story_task(path: Path, *, smoke: bool) -> Task:
    """A pretrained model of 260,000 parameters that ends its stories where it likes."""
    num_prompts, per_prompt, new = (2, 2, 16) if smoke else (32, 8, 256)
    rows = [json.loads(line) for line in (ROOT / "examples/story_prompts.jsonl").read_text("utf-8").splitlines()]

    def model(device: torch.device) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)

    def score(completions: Sequence[str]) -> list[float]:
        return [float(text.rstrip().endswith((".", '."', '!"'))) for text in completions]

    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    prompts = [row["prompt"] for row in rows[:num_prompts]]
    return Task("story", model, tokenizer, prompts, per_prompt, new, score, smoke)


class _Enough(Callback):
    """Ends the process's run after so many steps, before anything is exported or saved."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.steps, self.device = steps, device
        self.rows: list[dict[str, float]] = []

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == WARM_UPS:
            peak_memory(self.device)
        if step > WARM_UPS:
            self.rows.append(dict(metrics))
        if step >= self.steps:
            raise SystemExit


def measure_ours(task: Task, method: str, device: torch.device, *, repeats: int) -> dict[str, Any]:
    train = settings_of(task.name, fused=False, smoke=task.smoke).model_dump()
    algorithm = {"name": method} if method == "ppo" else {"name": method, "kl": {"coef": 0.0}}
    recipe = quartet.RLRecipe(
        output_dir=str(Path(tempfile.mkdtemp()) / "run"),
        device=str(device),
        actor={"train": train},
        **({"critic": {"train": train}} if method == "ppo" else {}),
        algorithm=algorithm,
        rollout={"sampling": {"max_new_tokens": task.new}, "engine": {"max_running": task.num_samples}},
        steps=10_000,
        prompts_per_step=len(task.prompts),
        responses_per_prompt=task.per_prompt,
        checkpoint={"every_steps": 10_000},
        log={"tensorboard": False, "rollouts_every": 10_000},
    )  # type: ignore[arg-type]
    enough = _Enough(WARM_UPS + repeats, device)
    trainer = quartet.RLTrainer(
        recipe,
        model=task.model(device),
        tokenizer=task.tokenizer,
        rewards=[lambda completions, **_: task.score(completions)],
        prompts=list(task.prompts),
        callbacks=[enough],
        progress=Progress(),
    )
    begun = time.perf_counter()
    with contextlib.suppress(SystemExit):
        trainer.train()
    middle = {key: statistics.median(row.get(key, 0.0) for row in enough.rows) for key in enough.rows[0]}
    return {
        "model": task.name,
        "method": method,
        "seconds": middle["time/step_s"],
        **{key: middle.get(stage) for key, stage in STAGES.items()},
        "samples_per_s": middle["throughput/samples_per_s"],
        "tokens_per_s": middle["throughput/tokens_per_s_per_device"],
        "new_tokens": middle["rollout/tokens"],
        "mfu": middle.get("throughput/mfu/actor"),
        "logprob_diff_mean": middle["agreement/logprob_diff_mean"],
        "logprob_diff_max": middle["agreement/logprob_diff_max"],
        "canary_diff": middle.get("agreement/canary_diff"),
        "warm_up_s": time.perf_counter() - begun - sum(row["time/step_s"] for row in enough.rows),
        "peak_bytes": peak_memory(device),
        "metrics": middle,
    }


def measure_trl(task: Task, device: torch.device, *, repeats: int) -> dict[str, Any]:
    """TRL's GRPO step, without a KL term; generation by transformers, as TRL has it without vLLM."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ends: list[float] = []
    lengths: list[int] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize(device)
            ends.append(time.perf_counter())

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        lengths.append(sum(map(len, completion_ids)))
        return task.score(completions)

    parts = 1 if task.smoke else 8
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=task.num_samples // parts,
        gradient_accumulation_steps=parts, num_generations=task.per_prompt, max_completion_length=task.new,
        beta=0.0, bf16=True, gradient_checkpointing=False, max_steps=WARM_UPS + repeats, learning_rate=1e-6,
        shuffle_dataset=False, save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=10_000,
        use_cpu=device.type == "cpu",
    )  # fmt: skip
    peak_memory(device)
    trainer = GRPOTrainer(
        task.model(device), reward, args=config, processing_class=task.tokenizer, callbacks=[Clock()],
        train_dataset=Dataset.from_list([{"prompt": text} for text in task.prompts] * (WARM_UPS + repeats)),
    )  # fmt: skip
    trainer.train()
    seconds = statistics.median(b - a for a, b in zip(ends[WARM_UPS - 1 :], ends[WARM_UPS:], strict=False))
    return {
        "model": task.name, "method": "TRL grpo", "seconds": seconds, "samples_per_s": task.num_samples / seconds,
        "new_tokens": statistics.median(lengths[WARM_UPS:]), "peak_bytes": peak_memory(device),
    }  # fmt: skip


def measure(
    name: str, device: torch.device, *, smoke: bool, repeats: int, story: Path | None = None
) -> list[dict[str, Any]]:
    """One entry per method of ours, and one of TRL.

    Args:
        name: ``story``, or one of ``shapes.SIZES``.
    """
    task = story_task(story, smoke=smoke) if story is not None else random_task(name, smoke=smoke)
    found = []
    for method in METHODS:
        found.append(measure_ours(task, method, device, repeats=repeats))
        _release(device)
    missing = [package for package in ("trl", "datasets") if find_spec(package) is None]
    if missing:
        return [*found, {"model": name, "method": f"TRL: {' and '.join(missing)} cannot be imported here"}]
    theirs = measure_trl(task, device, repeats=repeats)
    _release(device)
    # Responses end where they like: time per response token is what both can be compared by.
    rate = theirs["new_tokens"] / theirs["seconds"]
    for ours in found:
        if ours["method"] == "grpo":
            ours["times_trl"] = ours["new_tokens"] / ours["seconds"] / rate
    return [*found, theirs]


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
