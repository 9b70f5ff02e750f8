"""Figures of what passes compute, by hand: a model of 5,760 weights in products, six tokens."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quartet.batch.ragged import RaggedBatch
from quartet.config.common import LoRAConfig, OptimConfig, TrainConfig
from quartet.models.packed_model import PackedCausalLM
from quartet.models.work import WorkTotals, attended_pairs
from quartet.schedule.model_worker import ScoreWorker
from quartet.train.engine import TrainEngine
from quartet.train.forward import ForwardNeeds
from quartet.train.objectives import SFTObjective
from quartet.train.parallel.mesh import DataParallelGroup, Mesh
from quartet.train.token_budget import TokenBudget
from quartet.trainers.devices import throughput
from rank_forks import run_ranks

# A layer: queries and output 16 · 16, keys and values 16 · 8, three of 16 · 24; of these three layers.
TOKEN, PAIR, ROW = 2 * 3 * (2 * 256 + 2 * 128 + 3 * 384), 4 * 3 * 16, 2 * 16 * 31
PAIRS = 6 + (2 * 3 + 3) + (1 * 3 + 1)
FORWARD = 6 * TOKEN + PAIRS * PAIR + 3 * ROW
"""A prompt of 3 tokens with responses of 2 and 1."""
OUTSIDE = 2 * 31 * 16 + 16
"""Weights outside the layers: embedding, head, norm. A layer has two norms."""


def model(**lora: Any) -> PackedCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    packed = PackedCausalLM(LlamaForCausalLM(config))
    if lora:
        packed.adapt(LoRAConfig(**lora), seed=0)
    return packed


def batch() -> RaggedBatch:
    found = RaggedBatch.from_groups([[1, 2, 3]], [[[4, 5], [6]]], ["a", "b"])
    return found.with_token(loss_mask=found.sequence_index() >= 0)


def engine(packed: PackedCausalLM, mesh: Mesh | None = None, **config: Any) -> TrainEngine[PackedCausalLM]:
    settings = TrainConfig(optim=OptimConfig(lr=1e-3), **config)
    return TrainEngine(packed, settings, total_steps=9, mesh=mesh)


def taken(packed: PackedCausalLM) -> WorkTotals:
    return packed.work.take(packed.device, packed.precision)


def test_a_pass_and_an_update_by_hand() -> None:
    assert attended_pairs(batch()) == PAIRS == 19
    packed = model()
    worker = ScoreWorker(packed, TokenBudget(64, "budget"))
    worker.forward(batch(), ForwardNeeds(logprobs=True))
    found = worker.stats().work
    assert (found.computed_tokens, found.useful_tokens, found.flops) == (6, 6, FORWARD) and FORWARD == 75_744
    assert found.seconds > 0 and found.possible_flops is None and found.sent_bytes == 0
    assert found.host_peak_bytes > 2**26 and found.device_peak_bytes == 0
    assert worker.stats().work.flops == 0  # since the last call
    trained = engine(packed, activation_checkpointing=True)
    trained.train_step(batch(), SFTObjective())
    assert (found := taken(packed)).flops == 3 * FORWARD and found.computed_tokens == 6


def test_frozen_weights_have_no_gradients_to_compute() -> None:
    packed = model(rank=2)
    adapters = sum(p.numel() for p in packed.adapters.trained.values()) if packed.adapters is not None else 0
    engine(packed, lora=LoRAConfig(rank=2)).train_step(batch(), SFTObjective())
    forward = FORWARD + 6 * 2 * adapters
    assert taken(packed).flops == 2 * forward + PAIRS * PAIR + 6 * 2 * adapters


def of_rank(shard: int) -> WorkTotals:
    packed = model()
    trained = engine(packed, Mesh.of(DataParallelGroup.of_world(), shard=shard))
    trained.train_step(batch(), SFTObjective())
    return taken(packed)


def test_ranks_together_need_what_one_process_does() -> None:
    layers = 3 * (TOKEN // 6 + 2 * 16)
    # Each rank sends its half. Layers are gathered twice and the rest once; all gradients are summed. Halves of
    # embedding and head have 16 rows each.
    halves = 4 * (3 * layers + 2 * (OUTSIDE + 2 * 16))
    found = WorkTotals.joined(run_ranks(2, of_rank, 2))
    assert (found.useful_tokens, found.flops, found.sent_bytes) == (6, 3 * FORWARD, halves)
    assert found.computed_tokens == 9  # a response each, with the prompt


def test_metrics_of_a_step_by_hand() -> None:
    works = {
        "actor": WorkTotals(90, 81, 6e12, 3.0, 24e12, 100, 7, 2),
        "critic": WorkTotals(10, 9, 2e12, 4.0, None, 11, 5, 3),
        "reference": WorkTotals(),
    }
    assert throughput(2.0, samples=8, tokens=40, devices=4, works=works) == {
        "throughput/samples_per_s": 4.0,
        "throughput/samples_per_s_per_device": 1.0,
        "throughput/tokens_per_s_per_device": 5.0,
        "throughput/collective_bytes": 111.0,
        "throughput/useful_token_share": 0.9,
        "throughput/tflops/actor": 2.0,
        "throughput/mfu/actor": 0.25,
        "throughput/tflops/critic": 0.5,
        "memory/host_peak_bytes": 7.0,
        "memory/device_peak_bytes": 3.0,
    }
