"""What ranks of ``test_pipeline_stages.py`` run: one update's gradients and a forward-only pass, in stages or whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma3TextConfig, GPT2Config, LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from context_ranks import Norm
from quartet.config.common import LoRAConfig
from quartet.models.loading import scalar_model_from
from quartet.models.packed_model import PackedCausalLM, PackedModel, PackedScalarModel
from quartet.train.engine import LossTerm
from quartet.train.forward import PackedPass
from quartet.train.metrics import MetricSums
from quartet.train.parallel.pipeline import Pipeline, Stage
from sharded_ranks import VOCAB, make_batch, objectives
from tolerances import in_dtype

WIDTH = 16
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, initializer_range=0.2, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    num_hidden_layers=5,
)  # fmt: skip
_GEMMA: dict[str, Any] = dict(head_dim=8, query_pre_attn_scalar=8, sliding_window=3)
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, dict(head_dim=4)),
    "gemma2": (Gemma2Config, {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": (Gemma3TextConfig, _GEMMA),
    "gpt2": (GPT2Config, {}),
}
"""Those of Gemma have windows in some layers; both and GPT-2 have one parameter for embedding and head by default."""


@dataclass(frozen=True)
class Case:
    """One way to compute an update; ``stages`` is 1 in one process."""

    objective: str
    stages: int = 1
    family: str = "llama"
    recompute: Any = False
    share: bool = True
    tied: bool | None = None
    lora: bool = False
    dtype: torch.dtype = torch.float64
    precision: str = "fp32"
    numerics: str = "fast"

    @property
    def alone(self) -> Case:
        return replace(self, stages=1)

    def __str__(self) -> str:
        return "-".join(str(v) for f in fields(self) if (v := getattr(self, f.name)) != f.default)


def make_packed(case: Case) -> PackedModel:
    """The same whole model on every call; in fp64 its norms compute in fp64, too."""
    torch.manual_seed(0)
    make, options = CONFIGS[case.family]
    tied = {} if case.tied is None else {"tie_word_embeddings": case.tied}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(make(**SIZES, **options, **tied)).eval()
    scalar = objectives()[case.objective][0] == "scalar"
    if scalar:
        model = scalar_model_from(model, seed=0)
    for name, parameter in model.named_parameters():
        if "norm" in name or "score" in name:
            nn.init.normal_(parameter, 0.5, 0.3, generator=torch.Generator().manual_seed(1))
    model = in_dtype(model, case.dtype)
    for module in model.modules() if case.dtype == torch.float64 else ():
        if type(module).__name__ in ("Qwen3RMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"):
            module.forward = Norm(module, 1.0 if "Gemma" in type(module).__name__ else 0.0)
    packed = (PackedScalarModel if scalar else PackedCausalLM)(
        model, case.precision, numerics=case.numerics, activation_checkpointing=case.recompute
    )
    if case.lora:
        packed.adapt(LoRAConfig(rank=2, alpha=4.0), seed=1)
        assert packed.adapters is not None
        for layer in packed.adapters.layers:
            # As after some training: with B at 0 the gradient of A would be 0.
            nn.init.normal_(layer.factors[1], std=0.1, generator=torch.Generator().manual_seed(2))
            layer.adapted.to(case.dtype)
        packed.adapters.take_up_parameters()
    return packed


def parts_of(case: Case) -> list[tuple[LossTerm, Any, list[int]]]:
    """Micro-batches of all losses of an update, of one sequence to six, with the denominators of the whole batch."""
    _, objective, also = objectives()[case.objective]
    found = []
    for term in (LossTerm(make_batch(deep=case.share), objective), *also):
        atoms = term.objective.atoms(term.batch)
        for start, stop in pairwise((0, 1, 3, 4, 8, len(atoms))):
            if indices := [s for atom in atoms[start:stop] for s in atom]:
                found.append((term, term.objective.denominators(term.batch), indices))
    return found


class Part:
    """A micro-batch, for ``Pipeline`` or as a whole.

    Attributes:
        alive: of each micro-batch whose graph this rank has.
        most: of these at a time.
    """

    alive: ClassVar[weakref.WeakSet[_Mark]] = weakref.WeakSet()
    most = 0

    def __init__(
        self, case: Case, packed: PackedModel, part: tuple[LossTerm, Any, list[int]], found: dict[str, Any]
    ) -> None:
        term, self._denominators, indices = part
        self._term, self._batch, self._packed, self._found = term, term.batch.select(indices), packed, found
        self._pass = PackedPass(packed, self._batch, term.objective.needs, 7, share=case.share)
        self.num_rows = self._pass.num_rows

    def forward(self, received: Tensor | None) -> Tensor:
        stage, found = self._packed.stage, self._found
        if stage is not None and stage.index + 1 < stage.stages:
            return self._marked(self._pass.hidden(received))
        outputs = self._pass.outputs(received)
        found["outputs"] += [values.detach() for values in outputs.fields().values()]
        if not torch.is_grad_enabled():
            return torch.zeros(())
        loss = self._term.objective.loss(outputs, self._batch, self._denominators, found["sums"])
        return self._marked(loss * self._term.weight)

    @classmethod
    def _marked(cls, made: Tensor) -> Tensor:
        if made.grad_fn is not None:
            mark = made.grad_fn.metadata["mark"] = _Mark()
            cls.alive.add(mark)
            cls.most = max(cls.most, len(cls.alive))
        return made


class _Mark:
    """Lives as long as a graph."""


def computed(case: Case, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Outputs without gradient and with, gradients, their norm and metrics: of this rank's stage, or of the whole."""
    packed, parts, stage, pipeline = make_packed(case), parts_of(case), None, None
    if group is not None:
        stage = Stage.cut(packed, dist.get_rank(group), case.stages)
        pipeline = Pipeline(packed, stage, group)
    found: dict[str, Any] = {"outputs": [], "sums": MetricSums()}
    Part.most = 0

    def run(*, gradients: bool) -> None:
        micro_batches: list[Callable[[], Part]] = [lambda p=part: Part(case, packed, p, found) for part in parts]
        if pipeline is not None:
            pipeline.make_passes(micro_batches, gradients=gradients)
            return
        for make in micro_batches:
            loss = make().forward(None)
            if gradients:
                loss.backward()

    with torch.no_grad():
        run(gradients=False)
    run(gradients=True)
    named = {name: p for name, p in packed.model.named_parameters() if p.grad is not None}
    if pipeline is not None and stage is not None:
        pipeline.sum_tied([named[name].grad for name in stage.tied if name in named])
    sent, weights = packed.work.sent["pipeline"], packed.complete_trained().items()
    if pipeline is not None:
        own = dict(packed.model.named_parameters())
        weights = [(name, pipeline.bring(tensor, own.get(name), is_first=True)) for name, tensor in weights]
    counted = [p.grad for name, p in named.items() if stage is None or stage.counts(name)]
    return {
        "outputs": found["outputs"],
        "metrics": found["sums"].results() if stage is None or stage.index + 1 == case.stages else {},
        "gradients": {name: p.grad for name, p in named.items()},
        "norm": float(nn.utils.get_total_norm(counted)),
        "parameters": [name for name, _ in packed.model.named_parameters()],
        "weights": [(name, None if tensor is None else tensor.detach()) for name, tensor in weights],
        "most": Part.most,
        "num_parts": len(parts),
        "sent": sent,
        "rows": sum(Part(case, packed, part, found).num_rows for part in parts),
    }


def all_computed(cases: Sequence[Case]) -> list[list[dict[str, Any]]]:
    """Of every case twice, on a group of its first ranks."""
    groups = {size: dist.new_group(range(size)) for size in sorted({case.stages for case in cases})}
    return [
        [computed(case, groups[case.stages]) for _ in range(2)] if dist.get_rank() < case.stages else []
        for case in cases
    ]
