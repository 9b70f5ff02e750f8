"""What ranks of ``test_tensor_parallel.py`` run: passes of one pack by tensor-parallel layers, of each family; of
vision-language models on every mesh.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

import context_ranks
from architectures import build
from quartet.batch.ragged import RaggedBatch
from quartet.config.common import LoRAConfig
from quartet.config.recipe import SFTRecipe
from quartet.models.loading import load_causal_lm, scalar_model_from
from quartet.models.packed_model import PackedCausalLM, PackedModel, PackedScalarModel
from quartet.models.vision import FeatureStore
from quartet.text.pictures import Picture, PictureCodec, PictureStore
from quartet.train.forward import ForwardNeeds, forward_packed
from quartet.train.parallel import pipeline
from quartet.train.parallel.data import shard_model
from quartet.train.parallel.mesh import DataParallelGroup, Mesh
from quartet.trainers.supervised import PassedObjects, SFTWorker
from tiny_vision import picture_bytes


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
    if case.dtype == torch.float64:
        _exact_norms(model)
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


def _exact_norms(model: nn.Module) -> None:
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = context_ranks.Norm(module, 1.0 if "Gemma" in type(module).__name__ else 0.0)


def needs_of(case: TensorCase) -> ForwardNeeds:
    if case.scalar:
        return ForwardNeeds(values=True, scores=True, step_scores=True)
    return ForwardNeeds(logprobs=True, entropies=True, entropy_gradient=True, temperature=0.7)


@cache
def mesh_of(context: int, tensor: int, shard: int = 1) -> Mesh:
    return Mesh.of(DataParallelGroup.of_world(), shard=shard, context=context, tensor=tensor)


def run_pass(case: TensorCase) -> dict[str, Any]:
    """Outputs with and without gradient, and gradients."""
    packed, batch = make_model(case), context_ranks.make_batch(case.tree)
    mesh = mesh_of(case.context, case.tensor) if case.tensor else None
    return passes_of(packed, batch, needs_of(case), mesh, share=case.share)


def passes_of(
    packed: PackedModel, batch: RaggedBatch, needs: ForwardNeeds, mesh: Mesh | None, *, share: bool = True, weight=1.0
) -> dict[str, Any]:
    root = None if mesh is None else shard_model(packed, mesh)
    outputs: list[Any] = []
    make_passes = pipeline.make_passes if root is None else root.make_passes

    class Pass:
        num_rows = 0

        def forward(self, received: Tensor | None) -> Tensor:
            outputs.append(forward_packed(packed, batch, needs, 7, share=share))
            return weight * context_ranks.loss_of(outputs[-1])

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


# Pictures ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PictureCase:
    """One pass of a vision-language model; of one process where all numbers are 0.

    Attributes:
        model: its directory, in which the ranks share features.
        train: beside the language model.
    """

    model: str
    train: Literal["language", "all"] = "language"
    shard: int = 1
    context: int = 1
    tensor: int = 1


def picture_batch(pictures: PictureCodec, *, only_texts: bool = False) -> RaggedBatch:
    """Prompts with none of three pictures, one and two, and two answers to each of two."""
    parts = [{"type": "image", "image": Picture(picture_bytes(colour=(80 * n, 30, 60)))} for n in range(3)]
    placed = pictures.placed([{"role": "user", "content": parts}])
    one, two, three = ([token for row in picture.ids() for token in row] for picture in placed)
    if only_texts:
        one = two = three = [9]
    segments = [[3, 4, 5], [6, *one, 7], [*two, 9, *three, 10], [11, 12], [13, 14, 15], [16], [18, *one], [19, 20]]
    mask = [k > 2 and 2 < token < 60 for k, segment in enumerate(segments) for token in segment]
    return RaggedBatch(
        torch.tensor([token for segment in segments for token in segment]), tuple(map(len, segments)),
        (-1, -1, -1, 0, 1, 1, 2, 2), (3, 4, 5, 6, 7), tuple("abcde"), {"loss_mask": torch.tensor(mask)},
    )  # fmt: skip


def run_pictures(case: PictureCase) -> dict[str, Any]:
    """As ``run_pass``; of data ranks the first has the sequences, and the others' texts do not count."""
    model = load_causal_lm(case.model).double()
    _exact_norms(model)
    packed = PackedCausalLM(model)
    assert packed.tower is not None
    packed.tower.freeze(case.train)
    mesh = mesh_of(case.context, case.tensor, case.shard) if case.shard else None
    is_first = mesh is None or mesh.data_rank == 0
    pictures = PictureCodec.of(
        case.model, PictureStore(Path(case.model, f"run {case.train} {case.shard} {case.context} {case.tensor}"))
    )
    assert pictures is not None
    packed.tower.connect(FeatureStore.of(pictures))
    batch = picture_batch(pictures, only_texts=not is_first)
    found = passes_of(packed, batch, ForwardNeeds(logprobs=True), mesh, weight=float(is_first))
    return found | {"is_first": is_first, "computed": packed.work.pictures}


def all_pictures(cases: list[PictureCase]) -> list[dict[str, Any]]:
    return [run_pictures(case) for case in cases]


def picture_jobs(jobs: dict[str, tuple[dict[str, Any], dict[str, int]]]) -> dict[str, list[float]]:
    """Losses of three SFT updates of rows with pictures and without, of jobs: keys of the recipe and of the mesh."""
    found = {}
    for name, (section, cut) in jobs.items():
        recipe = SFTRecipe.model_validate({"examples_per_step": 3, "steps": 3, "seed": 1, **section})
        mesh = Mesh.of(DataParallelGroup.of_world(), **cut) if cut else None
        rows = []
        for n in range(6):
            image = [{"type": "image", "image": picture_bytes(colour=(40 * n, 30, 60))}] * (n % 3)
            prompt = [{"role": "user", "content": [*image, {"type": "text", "text": "what?"}]}]
            rows.append({"prompt": prompt, "completion": "hell" * (n + 1)})
        worker = SFTWorker(recipe, PassedObjects(rows=rows), torch.device("cpu"), mesh)
        found[name] = [worker.step(step)["loss/sft"] for step in range(3)]
        worker.release()
    return found
