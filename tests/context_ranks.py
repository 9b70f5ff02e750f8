"""What ranks of ``test_context_parallel.py`` run: passes of one pack that are cut over context ranks, weights whole."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Gemma2Config, LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from quartet.batch.ragged import RaggedBatch
from quartet.models.loading import scalar_model_from
from quartet.models.packed_model import PackedCausalLM, PackedModel, PackedScalarModel
from quartet.observe.memory import held_bytes, peak_resident_bytes
from quartet.train.forward import ForwardNeeds, ForwardOutputs, forward_packed
from quartet.train.parallel.context import ModelParallel
from quartet.train.parallel.mesh import DataParallelGroup, Mesh
from quartet.train.parallel.pass_group import PassGroup
from tolerances import in_dtype

VOCAB = 31
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, pad_token_id=None, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, dict(sliding_window=5)),
    "gemma2": (
        Gemma2Config,
        dict(
            head_dim=8, query_pre_attn_scalar=8, sliding_window=5, attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
    ),
}  # fmt: skip
TREES: dict[str, tuple[list[int], list[int], list[int]]] = {
    "depth 1": ([9, 20, 3, 1, 4, 12, 6], [-1, 0, 0, 0, -1, 4, 4], [1, 2, 3, 5, 6]),
    "depth 3": ([7, 5, 3, 11, 2, 8, 6, 4, 9], [-1, 0, 1, 2, 2, 1, 0, 6, -1], [3, 4, 5, 7, 8]),
    "one token": ([1], [-1], [0]),
    "two tokens": ([2], [-1], [0]),
}
"""Lengths, parents and leaves."""


@dataclass(frozen=True)
class PassCase:
    """One pass; ``context`` is 1 in one process."""

    context: int
    family: str = "llama"
    tree: str = "depth 1"
    scalar: bool = False
    entropy_gradient: bool = True
    share: bool = True
    recompute: Any = False
    dtype: torch.dtype = torch.float64
    precision: str = "fp32"
    kv_heads: int = 2


def make_model(case: PassCase) -> PackedModel:
    """The same on every call; in fp64 its norms compute in fp64, too."""
    torch.manual_seed(0)
    make, options = FAMILIES[case.family]
    config = make(**{**SIZES, **options, "num_key_value_heads": case.kv_heads})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    if case.scalar:
        model = scalar_model_from(model, seed=0)
    for name, parameter in model.named_parameters():
        if "norm" in name or "score" in name:
            nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(1))
    model = in_dtype(model, case.dtype)
    for module in model.modules():
        if case.dtype == torch.float64 and type(module).__name__ in ("MistralRMSNorm", "Gemma2RMSNorm"):
            shift = 1.0 if "Gemma" in type(module).__name__ else 0.0
            module.forward = Norm(module, shift)
    holder = PackedScalarModel if case.scalar else PackedCausalLM
    return holder(model, case.precision, activation_checkpointing=case.recompute)


class Norm:
    """In the place of a norm that rounds to fp32 whatever the dtype."""

    def __init__(self, module: nn.Module, shift: float) -> None:
        self._module, self._shift = module, shift

    def __call__(self, x: Tensor) -> Tensor:
        eps = getattr(self._module, "eps", None) or self._module.variance_epsilon
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (self._module.weight + self._shift)


def make_batch(tree: str) -> RaggedBatch:
    lengths, parents, leaves = TREES[tree]
    generator, num_tokens = torch.Generator().manual_seed(7), sum(lengths)
    mask = torch.rand(num_tokens, generator=generator) < 0.8
    for start, parent, length in zip(torch.tensor([0, *lengths]).cumsum(0).tolist(), parents, lengths, strict=False):
        if parent < 0:
            mask[start] = False
            mask[start + 1 : start + length] |= length == 2
    return RaggedBatch(
        torch.randint(VOCAB, (num_tokens,), generator=generator),
        tuple(lengths), tuple(parents), tuple(leaves), tuple(f"s{i}" for i in leaves), {"loss_mask": mask},
    )  # fmt: skip


def needs_of(case: PassCase) -> ForwardNeeds:
    if case.scalar:
        # A mask may name the first token where values are not asked for.
        return ForwardNeeds(values=True, scores=True, step_scores=True)
    return ForwardNeeds(logprobs=True, entropies=True, entropy_gradient=case.entropy_gradient, temperature=0.7)


def loss_of(outputs: ForwardOutputs) -> Tensor:
    """Weighs every number of it differently."""
    loss = torch.zeros((), dtype=torch.float64)
    for i, values in enumerate(outputs.fields().values()):
        if values.requires_grad:
            weights = torch.linspace(-1, 2 + i, len(values), dtype=values.dtype)
            loss = loss + (values * weights).sum() + values.square().sum() * 0.3
    return loss


@cache
def mesh_of(context: int) -> Mesh:
    return Mesh.of(DataParallelGroup.of_world(), context=context)


def run_pass(case: PassCase) -> dict[str, Any]:
    """Outputs with and without gradient, gradients summed over the ranks, bytes sent by kind without gradient."""
    packed, batch, needs = make_model(case), make_batch(case.tree), needs_of(case)
    context = None
    if case.context > 1:
        mesh = mesh_of(case.context)
        assert mesh.context_group is not None
        context = PassGroup(mesh.context_group, packed.work)
        packed.parallel = ModelParallel.of(packed, tensor=None, context=context)
    with torch.no_grad():
        outputs = forward_packed(packed, batch, needs, 7, share=case.share)
    sent = dict(packed.work.sent)
    with_gradient = forward_packed(packed, batch, needs, 7, share=case.share)
    loss_of(with_gradient).backward()
    gradients = {}
    for name, parameter in packed.model.named_parameters():
        assert parameter.grad is not None, name
        if context is not None:
            dist.all_reduce(parameter.grad, group=mesh.context_group)
        gradients[name] = parameter.grad
    return {
        "outputs": outputs.fields(),
        "with_gradient": {n: values.detach() for n, values in with_gradient.fields().items()},
        "gradients": gradients,
        "sent": sent,
        "computed": packed.work.computed_tokens,
    }


def all_passes(cases: list[PassCase]) -> list[dict[str, Any]]:
    return [run_pass(case) for case in cases]


def peak_bytes(context: int, num_tokens: int) -> int:
    """The most that is resident within a pass with gradients over one sequence, above what was before."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed is given back at once
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4})
    packed = PackedCausalLM(AutoModelForCausalLM.from_config(config).eval(), activation_checkpointing=True)
    group = None
    if context > 1:
        mesh = mesh_of(context)
        assert mesh.context_group is not None
        group = PassGroup(mesh.context_group, packed.work)
        packed.parallel = ModelParallel.of(packed, tensor=None, context=group)
    found = 0
    for length in (16, num_tokens):
        mask = {"loss_mask": torch.arange(length) > 0}
        batch = RaggedBatch.from_sequences([torch.arange(length).remainder(VOCAB).tolist()], ["0"], token=mask)
        held_bytes(torch.device("cpu"))
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the kernel begins to look anew
        before = peak_resident_bytes()
        loss_of(forward_packed(packed, batch, ForwardNeeds(logprobs=True), 256)).backward()
        found = peak_resident_bytes() - before
    return found
