"""Bytes of tensors at the peak of an update, whatever the C library keeps beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from quartet.batch.ragged import RaggedBatch
from quartet.config.common import TrainConfig
from quartet.models.packed_model import PackedCausalLM
from quartet.train.engine import TrainEngine
from quartet.train.objectives import SFTObjective
from quartet.train.parallel.mesh import DataParallelGroup, Mesh
from quartet.train.parallel.tensors import local

Way = tuple[dict[str, Any], int, Any, bool]
"""Sizes of a Llama as ``LlamaConfig`` takes them, tokens of a sequence, ``activation_checkpointing``, bf16."""


def peaks_of_updates(sizes: dict[str, int], ways: list[Way], chunk: int) -> list[int]:
    """Bytes that a second update takes at most, weights and moments included, in each way. It has as many micro-batches
    as there are pipeline stages, of one sequence each.

    Args:
        sizes: of the mesh.
        chunk: rows whose logits exist at a time.
    """
    mesh = Mesh.of(DataParallelGroup.of_world(), **sizes)
    return [peak_of_update(mesh, way, chunk) for way in ways]


def peak_of_update(mesh: Mesh, way: Way, chunk: int) -> int:
    shape, tokens, recompute, bf16 = way
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=tokens, pad_token_id=None)).eval()
    packed = PackedCausalLM(model, "bf16" if bf16 else "fp32", activation_checkpointing=recompute)
    config = TrainConfig(token_budget=tokens, logprob_chunk=chunk, activation_checkpointing=recompute)
    engine = TrainEngine(packed, config, total_steps=10, mesh=mesh)
    num = mesh.pipeline * mesh.num_data_ranks
    ids = torch.randint(shape["vocab_size"], (num, tokens), generator=torch.Generator().manual_seed(0)).tolist()
    mask = torch.arange(num * tokens) % tokens > 0
    batch = RaggedBatch.from_sequences(ids, [*map(str, range(num))], token={"loss_mask": mask})
    engine.train_step(batch, SFTObjective())  # makes the moments; gradients are given up behind it
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        engine.train_step(batch, SFTObjective())
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    taken = torch.tensor([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
    weights = sum(local(parameter).nbytes for parameter in packed.model.parameters())
    return 3 * weights + int(taken.cumsum(0).max())
