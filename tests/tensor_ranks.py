"""What ranks of ``test_tensor_parallel.py`` run: passes of one pack by tensor-parallel layers, of each family."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

import context_ranks
from architectures import build
from quartet.config.common import LoRAConfig
from quartet.models.loading import scalar_model_from
from quartet.models.packed_model import PackedCausalLM, PackedModel, PackedScalarModel
from quartet.train.forward import ForwardNeeds, forward_packed
from quartet.train.parallel import pipeline
from quartet.train.parallel.data import shard_model
from quartet.train.parallel.mesh import DataParallelGroup, Mesh


@dataclass(frozen=True)
class TensorCase:
    """One pass of a family; ``tensor`` is 0 in one process.

    Attributes:
        changed: what the configuration has otherwise than ``architectures`` says, as pairs.
    """

    family: str
    tensor: int = 2
    context: int = 1
    tree: str = "depth 1"
    scalar: bool = False
    lora: bool = False
    recompute: Any = False
    share: bool = True
    precision: str = "fp32"
    dtype: torch.dtype = torch.float64
    changed: tuple[tuple[str, Any], ...] = field(default=())


def make_model(case: TensorCase) -> PackedModel:
    """The same on every call; in fp64 its norms compute in fp64, too."""
    model: PreTrainedModel = build(case.family, vocab_size=context_ranks.VOCAB, **dict(case.changed))
    if case.scalar:
        model = scalar_model_from(model, seed=0)
        nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
    model = model.to(case.dtype)
    for module in model.modules():
        if case.dtype == torch.float64 and type(module).__name__.endswith("RMSNorm"):
            module.forward = context_ranks.Norm(module, 1.0 if "Gemma" in type(module).__name__ else 0.0)
    holder = PackedScalarModel if case.scalar else PackedCausalLM
    packed = holder(model, case.precision, activation_checkpointing=case.recompute)
    if case.lora:
        packed.adapt(LoRAConfig(rank=2, alpha=4.0), seed=1)
        for layer in packed.adapters.layers:
            # As after some training: with B at 0 the gradient of A would be 0.
            nn.init.normal_(layer.factors[1], std=0.1, generator=torch.Generator().manual_seed(2))
            layer.adapted.to(case.dtype)
        packed.adapters.take_up_parameters()
    return packed


def needs_of(case: TensorCase) -> ForwardNeeds:
    if case.scalar:
        return ForwardNeeds(values=True, scores=True, step_scores=True)
    return ForwardNeeds(logprobs=True, entropies=True, entropy_gradient=True, temperature=0.7)


@cache
def mesh_of(context: int, tensor: int) -> Mesh:
    return Mesh.of(DataParallelGroup.of_world(), context=context, tensor=tensor)


def run_pass(case: TensorCase) -> dict[str, Any]:
    """Outputs with and without gradient, and gradients."""
    packed, batch, needs = make_model(case), context_ranks.make_batch(case.tree), needs_of(case)
    root = shard_model(packed, mesh_of(case.context, case.tensor)) if case.tensor else None
    outputs: list[Any] = []
    make_passes = pipeline.make_passes if root is None else root.make_passes

    class Pass:
        num_rows = 0

        def forward(self, received: Tensor | None) -> Tensor:
            outputs.append(forward_packed(packed, batch, needs, 7, share=case.share))
            return context_ranks.loss_of(outputs[-1])

    with torch.no_grad():
        make_passes([Pass], gradients=False)
    make_passes([Pass], gradients=True)
    if root is not None:
        root.sum_gradients()
    return {
        "outputs": outputs[0].fields(),
        "with_gradient": {name: values.detach() for name, values in outputs[1].fields().items()},
        "gradients": {
            name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            for name, p in packed.model.named_parameters()
            if p.grad is not None
        },
    }


def all_passes(cases: list[TensorCase]) -> list[dict[str, Any]]:
    return [run_pass(case) for case in cases]
