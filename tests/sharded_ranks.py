"""What ranks of ``test_sharded_training.py`` run: the cases of sharded training, on a mesh or in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from quartet.batch.partition import plan_micro_batches
from quartet.batch.ragged import RaggedBatch, Segments
from quartet.config.algorithms import GRPO, PPO, KLConfig, KLCovLoss, OffPolicyConfig
from quartet.config.common import LoRAConfig, OptimConfig, TrainConfig
from quartet.config.preference import DPOLoss, KTOLoss
from quartet.extras.process_rewards.trainer import StepObjective
from quartet.extras.speculation.config import HeadTraining
from quartet.extras.speculation.head_trainer import Companion, CompanionWorker
from quartet.extras.speculation.heads import MedusaHeads
from quartet.models.loading import scalar_model_from
from quartet.models.packed_model import PackedCausalLM, PackedScalarModel
from quartet.models.work import WorkCounter
from quartet.schedule.model_worker import OptimizerStep
from quartet.train.engine import LossTerm, Objective, TrainEngine
from quartet.train.objectives import (
    KTOObjective,
    PairwiseObjective,
    PolicyObjective,
    PreferenceObjective,
    SFTObjective,
    ValueObjective,
)
from quartet.train.parallel.mesh import DataParallelGroup, Mesh
from quartet.train.parallel.messages import AllGather, PassGroup, ReduceScatter
from tolerances import in_dtype

VOCAB = 31
RESPONSES = ((40, 2, 5), (1,), (3, 4, 6, 2), (17, 1))
"""Tokens of the responses to each prompt: one sequence is half of the batch."""
KL_LOSS = KLConfig(coef=0.2, estimator="k3", place="loss")
UPDATES = 3


# Models and batches --------------------------------------------------------------------------------------


def make_model(
    kind: str, dtype: torch.dtype = torch.float64, *, tied: bool = False, num_layers: int = 3
) -> PreTrainedModel:
    """The same tiny model on every call; in fp64 its norms are, too."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=num_layers, num_attention_heads=8,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=64, initializer_range=0.2, pad_token_id=None,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=tied,
    )  # fmt: skip
    model: PreTrainedModel = LlamaForCausalLM(config).eval()
    if kind == "scalar":
        model = scalar_model_from(model, seed=0)
        nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(1))
    return in_dtype(model, dtype)


def make_batch(*, deep: bool = False) -> RaggedBatch:
    """Ten sequences of four prompts with everything that an objective reads.

    Args:
        deep: responses to the third prompt share more than it, and the last three of them more again: prefixes are
            three segments deep.
    """
    generator = torch.Generator().manual_seed(7)

    def tokens(n: int) -> list[int]:
        return torch.randint(VOCAB, (n,), generator=generator).tolist()

    segments, leaves = Segments(), []
    responses = [[tokens(n) for n in of_prompt] for of_prompt in RESPONSES]
    for prompt, of_prompt in zip([tokens(3), tokens(1), tokens(5), tokens(2)], responses, strict=True):
        parent = segments.add(prompt, -1)
        for i, response in enumerate(of_prompt):
            if deep and len(of_prompt) == 4 and i < 2:
                parent = segments.add(tokens(2 + i), parent)
            leaves.append(segments.add(response, parent))
    batch = segments.batch(leaves, [f"r{i}" for i in range(10)])
    action = batch.sequence_index() >= 0

    def normal(shift: float = 0.0) -> Tensor:
        return (shift + torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64)) * action

    names = ("old_logprobs", "rollout_logprobs", "ref_logprobs")
    return batch.with_token(
        action_mask=action,
        loss_mask=action & (torch.rand(batch.num_tokens, generator=generator) < 0.8),
        step_mask=action & (torch.rand(batch.num_tokens, generator=generator) < 0.5),
        step_labels=torch.rand(batch.num_tokens, generator=generator, dtype=torch.float64),
        **{name: normal(-3.0) for name in names},
        **{name: normal() for name in ("advantages", "values", "returns")},
        **{name: normal() > 0 for name in ("high_entropy", "high_covariance")},
    ).with_sequence(
        trajectory=torch.tensor([0, 1, 1, 2, 3, 4, 5, 6, 7, 8]),
        pair=torch.arange(5).repeat_interleave(2),
        chosen=torch.tensor([True, False] * 5),
        margin=torch.linspace(0, 1, 5, dtype=torch.float64).repeat_interleave(2),
        kl=torch.full((10,), 0.3, dtype=torch.float64),
        ref_logprobs=torch.linspace(-9, -5, 10, dtype=torch.float64),
    )


def policy(algorithm: Any = None, **config: Any) -> PolicyObjective:
    chosen = algorithm if algorithm is not None else PPO(**config)
    return PolicyObjective(chosen, 9, 0.9, kl_coef=0.2, is_first=False, max_new_tokens=40)


def objectives() -> dict[str, tuple[str, Objective, tuple[LossTerm, ...]]]:
    """Kind of model, objective, and losses that are added."""
    weights = OffPolicyConfig(level="sequence", floor=0.5, batch_normalize=True)
    grpo = GRPO(policy_loss=KLCovLoss(), off_policy=weights, top_entropy_quantile=0.5)
    shown = LossTerm(make_batch().select([1, 3]), SFTObjective("loss/ptx"), 0.3)
    return {
        "sft": ("causal", SFTObjective(), ()),
        "ppo-actor": ("causal", policy(kl=KL_LOSS, entropy_coef=0.1), (shown,)),
        "ppo-critic": ("scalar", ValueObjective(PPO(), 9), ()),
        "grpo": ("causal", policy(grpo), ()),
        "dpo": ("causal", PreferenceObjective(DPOLoss(beta=0.5, label_smoothing=0.1)), ()),
        "kto": ("causal", KTOObjective(KTOLoss()), ()),
        "reward": ("scalar", PairwiseObjective(0.01, 1.0), ()),
        "process-reward": ("scalar", StepObjective(), ()),
    }


# Cases ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One way to train; ``shard`` and ``replicate`` are 0 in one process without a mesh.

    ``adds``: whether the losses that ``objectives`` adds are trained on, too.
    """

    objective: str
    shard: int = 0
    replicate: int = 0
    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    recompute: Any = False
    share: bool = True
    deep: bool = False
    tied: bool = False
    lora: bool = False
    fixed_order: bool = False
    dtype: torch.dtype = torch.float64
    precision: str = "fp32"
    token_budget: int = 50
    num_layers: int = 3
    adds: bool = True

    @property
    def world(self) -> int:
        return self.shard * self.replicate * self.pipeline * self.context * self.tensor

    @property
    def alone(self) -> Case:
        """The same in one process."""
        return replace(self, shard=0, replicate=0, pipeline=1, context=1, tensor=1, fixed_order=False)

    def __str__(self) -> str:
        extras = [n for n in ("share", "deep", "tied", "lora", "fixed_order") if getattr(self, n)]
        if self.recompute:
            extras.append("recompute")
        mesh = "-".join(
            f"{name}{getattr(self, name)}" for name in ("replicate", "shard", "pipeline", "context", "tensor")
        )
        return f"{self.objective}-{mesh}-{'-'.join(extras)}"


def make_engine(case: Case, mesh: Mesh | None, **config: Any) -> TrainEngine[Any]:
    """An engine with the model of a case."""
    kind = objectives()[case.objective][0]
    settings = TrainConfig(
        **{
            "optim": OptimConfig(lr=1e-2, max_grad_norm=0.5, weight_decay=0.1),
            "token_budget": case.token_budget,
            "forward_token_budget": case.token_budget,
            "share_prefixes": case.share,
            "activation_checkpointing": case.recompute,
            "precision": case.precision,
            "lora": LoRAConfig(rank=2, alpha=4.0) if case.lora else None,
            **config,
        }
    )
    model = make_model(kind, case.dtype, tied=case.tied and kind == "causal", num_layers=case.num_layers)
    holder = PackedCausalLM if kind == "causal" else PackedScalarModel
    packed = holder(model, case.precision, activation_checkpointing=settings.activation_checkpointing)
    if settings.lora is not None:
        packed.adapt(settings.lora, seed=1)
        for layer in packed.adapters.layers:
            # As after some training: with B at 0 the gradient of A would be 0.
            nn.init.normal_(layer.factors[1], std=0.1, generator=torch.Generator().manual_seed(2))
            if case.dtype == torch.float64:
                layer.adapted.to(torch.float64)
        packed.adapters.take_up_parameters()
    return TrainEngine(packed, settings, total_steps=10, mesh=mesh)


def full(engine: TrainEngine[Any], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole copies on every rank of what belongs to the parameters that train."""
    packed = engine.packed
    named = own if packed.stage is None else packed.stage.complete(packed.stage.trained, own)
    return {name: packed.gather.whole(tensor, everywhere=True).detach().clone() for name, tensor in named.items()}


def trained(case: Case, mesh: Mesh | None = None) -> dict[str, Any]:
    """Log-probabilities or scalars before, metrics of three updates, gradients of the first, weights after all."""
    engine, batch = make_engine(case, mesh), make_batch(deep=case.deep)
    _, objective, added = objectives()[case.objective]
    also = added if case.adds else ()
    columns = engine.forward(batch, objective.needs)
    found: dict[str, Any] = {"outputs": {**columns.token, **columns.sequence}, "metrics": []}
    for update in range(UPDATES):
        found["metrics"].append(engine.train_step(batch, objective, also))
        if update == 0:
            beta, state = engine.config.optim.betas[0], engine.optimizer.state
            means = full(engine, {n: state[p]["exp_avg"] for n, p in engine.trained.items() if p in state})
            found["gradients"] = {name: mean / (1 - beta) for name, mean in means.items()}
    found["weights"] = full(engine, engine.trained)
    return found


def check(case: Case, found: dict[str, Any], expected: dict[str, Any], atol: float, rtol: float) -> dict[str, float]:
    """The largest difference of each part from one process's, none of which is above the tolerance."""
    largest = {}
    for part in ("outputs", "gradients", "weights"):
        assert found[part].keys() == expected[part].keys(), case
        for name, values in expected[part].items():
            torch.testing.assert_close(
                found[part][name], values, atol=atol, rtol=rtol, msg=lambda m, n=name, p=part: f"{case} {p} {n}: {m}"
            )
        largest[part] = max(float((found[part][n] - values).abs().max()) for n, values in expected[part].items())
    for metrics, of_one in zip(found["metrics"], expected["metrics"], strict=True):
        assert metrics.keys() == of_one.keys()
        for name, value in of_one.items():
            assert abs(metrics[name] - value) <= atol + rtol * abs(value), f"{case} {name}"
    return largest


def heads_beside(case: Case, shared: bool, mesh: Mesh | None = None) -> dict[str, Any]:
    """Heads that learned beside four updates, and what these said."""
    engine, batch = make_engine(case, mesh), make_batch(deep=case.deep)
    heads = MedusaHeads(engine.packed, 2, shared_head=shared)
    for n, parameter in enumerate(heads.parameters()):
        with torch.no_grad():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(n))
    learning = HeadTraining(tokens_per_step=23, optim=OptimConfig(lr=1e-2))
    worker = CompanionWorker(engine, None, Companion(engine, heads, learning, seed=3))
    _, objective, _ = objectives()[case.objective]
    updates = [
        [OptimizerStep((0, 1, 2, 3, 4, 5), objective, 2 * step), OptimizerStep((6, 7, 8, 9), objective, 2 * step + 1)]
        for step in range(2)
    ]
    figures = [worker.update(batch, of_step)[-1] | worker.train_drafter() for of_step in updates]
    return {
        "weights": dict(heads.weights()),
        "metrics": figures,
        "sent": len(list(worker.sent_weights())),
    }


def all_heads_beside(cases: list[tuple[Case, bool]]) -> list[dict[str, Any]]:
    return [heads_beside(case, shared, mesh_of(case)) for case, shared in cases]


_MESHES: dict[tuple[Any, ...], Mesh] = {}


def mesh_of(case: Case) -> Mesh:
    """One mesh for all cases of a shape: process groups are not given back."""
    sizes = {"shard": case.shard, "pipeline": case.pipeline, "context": case.context, "tensor": case.tensor}
    key = *sizes.values(), case.fixed_order
    if key not in _MESHES:
        _MESHES[key] = Mesh.of(DataParallelGroup.of_world(), fixed_order=case.fixed_order, **sizes)
    return _MESHES[key]


def all_trained(cases: list[Case]) -> dict[Case, dict[str, Any]]:
    """The results of all cases on this rank; whole gradients and weights from rank 0 alone."""
    results = {}
    for case in cases:
        found = trained(case, mesh_of(case))
        if DataParallelGroup.of_world().rank:
            del found["gradients"]
        results[case] = found
    return results


def all_trained_twice(cases: list[Case]) -> list[Any]:
    """The weights of each case, trained twice on this rank."""
    return [[trained(case, mesh_of(case))["weights"] for _ in range(2)] for case in cases]


def passes_of_two_ranks(batches: Any, budget: int, *, num_ranks: int, **options: Any) -> list[Any]:
    """In the place of ``plan_micro_batches`` in one process: updates make the passes of two ranks, one by one."""
    assert num_ranks == 1
    if "forward" in options["budget_key"]:
        return plan_micro_batches(batches, budget, num_ranks=1, **options)
    both = plan_micro_batches(batches, budget, num_ranks=2, **options)
    return [[[part for part in (*one, *other) if part] for one, other in zip(*both, strict=True)]]


def summed_in_order() -> list[tuple[Tensor, Tensor]]:
    """Sums over all ranks by each of our collectives, and the same addends added here from the left."""
    mesh = Mesh.of(DataParallelGroup.of_world(), shard=dist.get_world_size(), fixed_order=True)
    world, group, work = mesh.shard, mesh.groups["shard"], WorkCounter()

    def addend(rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        scale = 10.0 ** torch.randint(-6, 6, (8 * world,), generator=generator)
        return scale * torch.randn(8 * world, generator=generator)

    expected = addend(0)
    for rank in range(1, world):
        expected = expected + addend(rank)
    whole, part = addend(mesh.place), torch.empty(8)
    ReduceScatter(work, direct=True)(part, whole, group, dist.ReduceOp.SUM)
    PassGroup(group, work).sum_up(whole, in_order=True)
    gathered = torch.zeros(8 * world)
    own = gathered.chunk(world)[mesh.place].copy_(part)
    AllGather(work, direct=True)(gathered, own, group)
    return [(whole, expected), (part, expected.chunk(world)[mesh.place]), (gathered, expected)]
