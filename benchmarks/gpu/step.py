"""Whole GRPO steps: generate, score, one update, publish; beside TRL's where TRL can be imported."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from importlib.util import find_spec
from typing import Any

import torch
from machine import peak_memory, synchronize
from shapes import Group, build, config_of
from training import engine_of, objective_of

from quartet.algorithms.advantages import group_relative
from quartet.algorithms.segments import gather_owner
from quartet.batch.ragged import RaggedBatch
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Request, SamplingParams
from quartet.train.engine import TrainEngine

PROMPTS, PER_PROMPT, PROMPT, NEW = 32, 8, 256, 256


def sizes(smoke: bool) -> tuple[int, int, int, int]:
    return (2, 4, 10, 8) if smoke else (PROMPTS, PER_PROMPT, PROMPT, NEW)


def prompts(vocab_size: int, seed: int, *, smoke: bool) -> list[list[int]]:
    num_prompts, _, length, _ = sizes(smoke)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocab_size, (num_prompts, length), generator=generator).tolist()


def score(tokens: tuple[int, ...], vocab_size: int) -> float:
    """Share of tokens from the lower half of the vocabulary: cheap, and different from response to response."""
    return sum(token < vocab_size // 2 for token in tokens) / len(tokens)


class Steps:
    """One model, one engine that shares it, and steps over fresh prompts."""

    def __init__(self, name: str, device: torch.device, *, fused: bool, smoke: bool) -> None:
        self.device, self.smoke = device, smoke
        self.vocab_size = config_of(name).vocab_size
        self.trainer: TrainEngine[PackedCausalLM] = engine_of(name, device, fused=fused, smoke=smoke)
        num_prompts, per_prompt, _, _ = sizes(smoke)
        self.engine = NativeEngine(self.trainer.packed, max_running=num_prompts * per_prompt)
        self.num_steps = 0

    def generate(self) -> RaggedBatch:
        _, per_prompt, _, new = sizes(self.smoke)
        asked = prompts(self.vocab_size, self.num_steps, smoke=self.smoke)
        ids = [(f"{g}-{i}", g, i) for g in range(len(asked)) for i in range(per_prompt)]
        self.engine.submit(
            [
                Request(n, str(g), tuple(asked[g]), SamplingParams(max_new_tokens=new, seed=self.num_steps * 10**6 + s))
                for s, (n, g, _) in enumerate(ids)
            ]
        )
        done = {}
        while self.engine.has_work:
            done |= {completion.request_id: completion for completion in self.engine.step()}
        ordered = [done[n] for n, _, _ in ids]
        responses = [[c.token_ids for c in ordered[g * per_prompt :][:per_prompt]] for g in range(len(asked))]
        batch = RaggedBatch.from_groups(asked, responses, [n for n, _, _ in ids])
        owner = batch.sequence_index()
        action = owner >= 0
        scores = torch.tensor([score(c.token_ids, self.vocab_size) for c in ordered])
        advantages = group_relative(scores, torch.tensor([g for _, g, _ in ids]), True)
        logprobs = torch.zeros(batch.num_tokens)
        logprobs[action] = torch.tensor([logprob for c in ordered for logprob in c.logprobs])
        batch = batch.with_token(
            loss_mask=action,
            action_mask=action,
            advantages=gather_owner(advantages, owner),
            rollout_logprobs=logprobs,
        )
        return batch.with_sequence(trajectory=torch.arange(len(batch))).to(self.device)

    def step(self) -> dict[str, float]:
        _, per_prompt, prompt, new = sizes(self.smoke)
        synchronize(self.device)
        begun = time.perf_counter()
        batch = self.generate()
        synchronize(self.device)
        middle = time.perf_counter()
        objective = objective_of([Group(prompt, (new,) * per_prompt)], len(batch))
        metrics = self.trainer.train_step(batch, objective)
        self.num_steps += 1
        self.engine.update_weights(None, self.num_steps)
        synchronize(self.device)
        end = time.perf_counter()
        return {
            "seconds": end - begun,
            "generate_s": middle - begun,
            "update_s": end - middle,
            "logprob_diff_mean": metrics["agreement/logprob_diff_mean"],
            "logprob_diff_max": metrics["agreement/logprob_diff_max"],
        }


def measure_ours(name: str, device: torch.device, *, fused: bool, smoke: bool, repeats: int) -> dict[str, Any]:
    steps = Steps(name, device, fused=fused, smoke=smoke)
    for _ in range(3):
        steps.step()
    peak_memory(device)
    taken = [steps.step() for _ in range(repeats)]
    found: dict[str, Any] = {key: statistics.median(t[key] for t in taken) for key in taken[0]}
    num_prompts, per_prompt, _, _ = sizes(smoke)
    samples = num_prompts * per_prompt
    return found | {
        "model": name, "fused": fused, "samples_per_s": samples / found["seconds"], "peak_bytes": peak_memory(device),
    }  # fmt: skip


def measure(name: str, device: torch.device, *, smoke: bool, repeats: int) -> dict[str, Any]:
    ours = []
    for fused in (False, True):
        ours.append(measure_ours(name, device, fused=fused, smoke=smoke, repeats=repeats))
        gc.collect()
    missing = [package for package in ("trl", "datasets") if find_spec(package) is None]
    if missing:
        return {"ours": ours, "trl": {"model": name, "not_run": f"{' and '.join(missing)} cannot be imported here"}}
    theirs = measure_trl(name, device, smoke=smoke, repeats=repeats)
    for found in ours:
        found["times_trl"] = found["samples_per_s"] / theirs["samples_per_s"]
    return {"ours": ours, "trl": theirs}


def measure_trl(name: str, device: torch.device, *, smoke: bool, repeats: int) -> dict[str, Any]:
    """TRL's GRPO step on the same prompts lengths, response lengths, precision and model; no KL term on either side."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    num_prompts, per_prompt, _, new = sizes(smoke)
    vocab_size, warm_ups = config_of(name).vocab_size, 2
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="w0", eos_token="w1", unk_token="w0", padding_side="left"
    )
    texts = [
        " ".join(f"w{token}" for token in tokens)
        for seed in range(warm_ups + repeats)
        for tokens in prompts(vocab_size, seed, smoke=smoke)
    ]
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize(device)
            ends.append(time.perf_counter())

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [score(tuple(tokens), vocab_size) for tokens in completion_ids]

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=num_prompts * per_prompt // (1 if smoke else 8),
        gradient_accumulation_steps=1 if smoke else 8, num_generations=per_prompt, max_completion_length=new,
        generation_kwargs={"min_new_tokens": new}, beta=0.0, bf16=True, gradient_checkpointing=False,
        max_steps=warm_ups + repeats, learning_rate=1e-6, shuffle_dataset=False, save_strategy="no", report_to="none",
        disable_tqdm=True, logging_steps=10_000, use_cpu=device.type == "cpu",
    )  # fmt: skip
    peak_memory(device)
    trainer = GRPOTrainer(
        build(name, device), reward, args=config, processing_class=tokenizer, callbacks=[Clock()],
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
    )  # fmt: skip
    trainer.train()
    seconds = statistics.median(b - a for a, b in zip(ends[warm_ups - 1 :], ends[warm_ups:], strict=False))
    samples = num_prompts * per_prompt
    return {
        "model": name, "seconds": seconds, "samples_per_s": samples / seconds, "peak_bytes": peak_memory(device),
    }  # fmt: skip
