"""Updates at micro-batches of 8192 tokens: model FLOPs utilisation, and the share of the measured GEMM rate."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from machine import median_seconds, peak_memory
from shapes import Group, build, config_of, training_flops

from quartet.batch.ragged import RaggedBatch
from quartet.config.algorithms import GRPO
from quartet.config.common import OptimConfig, TrainConfig
from quartet.models.packed_model import PackedCausalLM
from quartet.train.engine import Objective, TrainEngine
from quartet.train.objectives import PolicyObjective, SFTObjective

TOKENS = 8192
MICRO_BATCHES = 4


def layouts(smoke: bool) -> dict[str, list[Group]]:
    """One update's sequences: independent ones, and groups of eight responses that share a prompt.

    Every eight sequences, and every two groups, fill one micro-batch.
    """
    scale = 64 if smoke else 1
    num = 2 if smoke else MICRO_BATCHES
    return {
        "sequences of 1024": [Group(1024 // scale)] * 8 * num,
        "prompt 512, 8 x 448": [Group(512 // scale, (448 // scale,) * 8)] * 2 * num,
    }


def batch_of(groups: Sequence[Group], vocab_size: int, device: torch.device) -> RaggedBatch:
    """Random tokens; all that is predicted carries loss."""
    lengths: list[int] = []
    parents: list[int] = []
    leaves: list[int] = []
    for group in groups:
        root = len(lengths)
        lengths += [group.prompt, *group.responses]
        parents += [-1, *[root] * len(group.responses)]
        leaves += range(root + 1, len(lengths)) if group.responses else [root]
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(lengths)
    batch = RaggedBatch(
        torch.randint(2, vocab_size, (num_tokens,), generator=generator),
        tuple(lengths),
        tuple(parents),
        tuple(leaves),
        tuple(str(s) for s in range(len(leaves))),
    )
    action = batch.sequence_index() >= 0
    if not groups[0].responses:
        # Nothing predicts the first token of a sequence.
        action[torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)] = False
    numbers = torch.randn(num_tokens, generator=generator) * action
    batch = batch.with_token(
        loss_mask=action, action_mask=action, advantages=numbers, rollout_logprobs=torch.zeros(num_tokens)
    )
    return batch.with_sequence(trajectory=torch.arange(len(leaves))).to(device)


def objective_of(groups: Sequence[Group], num_sequences: int) -> Objective:
    if not groups[0].responses:
        return SFTObjective()
    longest = max(max(group.responses) for group in groups)
    return PolicyObjective(GRPO(), num_sequences, 1.0, kl_coef=0.0, is_first=True, max_new_tokens=longest)


def settings_of(name: str, *, fused: bool, smoke: bool) -> TrainConfig:
    tokens = TOKENS // 64 if smoke else TOKENS
    return TrainConfig(
        precision="bf16",
        token_budget=tokens,
        forward_token_budget=4 * tokens,
        optim=OptimConfig(lr=1e-6),
        compile=fused and not smoke,
        # What all layers keep of 8192 tokens is 38 GB at 3B and 53 GB at 7B.
        activation_checkpointing=name in ("3B", "7B"),
    )


def engine_of(name: str, device: torch.device, *, fused: bool, smoke: bool) -> TrainEngine[PackedCausalLM]:
    settings = settings_of(name, fused=fused, smoke=smoke)
    recompute = settings.activation_checkpointing
    packed = PackedCausalLM(build(name, device), "bf16", activation_checkpointing=recompute)
    return TrainEngine(packed, settings, total_steps=1000)


def measure(
    name: str, device: torch.device, *, peak: float | None, gemm: float, smoke: bool, repeats: int
) -> list[dict[str, Any]]:
    """One entry per layout, with plain and with fused layers."""
    found = []
    for fused in (False, True):
        engine = engine_of(name, device, fused=fused, smoke=smoke)
        for layout, groups in layouts(smoke).items():
            seconds = update_seconds(engine, groups, device, repeats)
            flops = training_flops(config_of(name), groups)
            found.append(
                {
                    "model": name,
                    "layout": layout,
                    "fused": fused,
                    "useful_tokens": sum(g.num_tokens for g in groups),
                    "seconds": seconds,
                    "flops": flops,
                    "mfu": flops / seconds / peak if peak else None,
                    "share_of_gemm_rate": flops / seconds / gemm,
                    "peak_bytes": peak_memory(device),
                }
            )
        del engine
        gc.collect()
    return found


def update_seconds(
    engine: TrainEngine[PackedCausalLM], groups: Sequence[Group], device: torch.device, repeats: int
) -> float:
    """Median of one update: forward, backward and optimizer."""
    batch = batch_of(groups, engine.packed.vocab_size, device)
    objective = objective_of(groups, len(batch))
    peak_memory(device)
    return median_seconds(lambda: engine.train_step(batch, objective), device, repeats=repeats)
