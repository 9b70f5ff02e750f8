"""Packed training on a CUDA device: against the CPU in fp32, in bf16, checkpointed, fused, and without growing."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from quartet.batch.ragged import RaggedBatch
from quartet.models.packed_model import PackedCausalLM, Precision

pytestmark = pytest.mark.gpu


def groups(seed: int = 0, num_groups: int = 4) -> RaggedBatch:
    """Prompts of 20 to 60 tokens with five responses of 5 to 80; advantages and rollout log-probabilities at random."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(1, 1000) for _ in range(draw.randint(20, 60))] for _ in range(num_groups)]
    responses = [[[draw.randrange(1, 1000) for _ in range(draw.randint(5, 80))] for _ in "abcde"] for _ in prompts]
    ids = [f"{g}-{i}" for g in range(num_groups) for i in range(5)]
    batch = RaggedBatch.from_groups(prompts, responses, ids)
    action = batch.sequence_index() >= 0
    generator = torch.Generator().manual_seed(seed)
    numbers = [torch.randn(batch.num_tokens, generator=generator) * action for _ in range(2)]
    return batch.with_token(
        loss_mask=action, action_mask=action, advantages=numbers[0], rollout_logprobs=numbers[1]
    ).with_sequence(trajectory=torch.arange(len(batch)))


def trained(
    model: PreTrainedModel,
    batch: RaggedBatch,
    precision: Precision = "fp32",
    num_steps: int = 1,
    checkpointing: bool = False,
    fuse: bool = False,
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics of the last update of a copy of ``model``, and how far all updates moved each parameter, per unit of
    the learning rate.

    AdamW's epsilon is so large that an update is as good as proportional to the gradient: by itself it makes steps of
    one size out of gradients that differ by rounding alone.
    """
    from quartet.config.algorithms import GRPO
    from quartet.config.common import OptimConfig, TrainConfig
    from quartet.train.engine import TrainEngine
    from quartet.train.objectives import PolicyObjective

    packed = PackedCausalLM(copy.deepcopy(model), precision, activation_checkpointing=checkpointing)
    optim = OptimConfig(lr=1.0, eps=1e3, weight_decay=0.0, warmup_steps=0, schedule="constant", max_grad_norm=1e9)
    config = TrainConfig(token_budget=600, precision=precision, optim=optim, compile=fuse)
    engine = TrainEngine(packed, config, total_steps=100)
    objective = PolicyObjective(GRPO(), len(batch), 1.0, kl_coef=0.0, is_first=True, max_new_tokens=80)
    for _ in range(num_steps):
        metrics = engine.train_step(batch.to(packed.device), objective)
    before = {n: p.detach() for n, p in model.named_parameters()}
    moved = {n: (p.detach() - before[n].to(p.device)) * 1e3 for n, p in packed.model.named_parameters()}
    return metrics, moved


def assert_same_update(
    found: tuple[dict[str, float], dict[str, Tensor]],
    expected: tuple[dict[str, float], dict[str, Tensor]],
    tolerance: float,
) -> None:
    for name, value in expected[0].items():
        assert found[0][name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    for name, theirs in expected[1].items():
        largest = float(theirs.abs().max())
        assert float((found[1][name].cpu() - theirs.cpu()).abs().max()) <= tolerance * max(largest, 1e-3), name


def test_an_update_in_fp32_is_that_of_the_cpu(
    family: str, tiny: object, tolerances: dict[torch.dtype, tuple[float, float]]
) -> None:
    batch = groups()
    expected = trained(tiny.model(family, device=torch.device("cpu")), batch)
    found = trained(tiny.model(family), batch)
    # Gradients are sums over hundreds of tokens and differ by their order.
    assert_same_update(found, expected, 10 * tolerances[torch.float32][0])


@pytest.mark.parametrize("options", [{"checkpointing": True}, {"fuse": True}], ids=["checkpointed", "fused"])
def test_other_ways_to_the_same_update(
    options: dict[str, bool], cuda: torch.device, tiny: object, tolerances: dict[torch.dtype, tuple[float, float]]
) -> None:
    model, batch = tiny.model("qwen2"), groups()
    assert_same_update(trained(model, batch, **options), trained(model, batch), 10 * tolerances[torch.float32][0])


def test_bf16_log_probabilities_are_near_those_of_fp32(
    family: str, tiny: object, tolerances: dict[torch.dtype, tuple[float, float]], record_property: Callable[..., None]
) -> None:
    from quartet.train.forward import ForwardNeeds, forward_only

    batch = groups().to(tiny.device)
    fp32, bf16 = (
        forward_only(PackedCausalLM(tiny.model(family), p), batch, ForwardNeeds(logprobs=True), 600).token["logprobs"]
        for p in ("fp32", "bf16")
    )
    difference = (fp32 - bf16).abs()[batch.token["loss_mask"]]
    record_property("largest", float(difference.max()))
    assert float(difference.max()) > 0, "bf16 was not used"
    assert float(difference.mean()) <= tolerances[torch.bfloat16][0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_does_not_grow_over_200_updates(precision: Precision, cuda: torch.device, tiny: object) -> None:
    from quartet.config.algorithms import GRPO
    from quartet.config.common import OptimConfig, TrainConfig
    from quartet.train.engine import TrainEngine
    from quartet.train.objectives import PolicyObjective

    packed = PackedCausalLM(tiny.model("qwen2"), precision)
    engine = TrainEngine(packed, TrainConfig(token_budget=600, optim=OptimConfig(lr=1e-5)), total_steps=300)
    batches = [groups(seed).to(cuda) for seed in range(4)]
    allocated: list[int] = []
    for step in range(220):
        batch = batches[step % 4]
        objective = PolicyObjective(GRPO(), len(batch), 1.0, kl_coef=0.0, is_first=True, max_new_tokens=80)
        engine.train_step(batch, objective)
        allocated.append(torch.cuda.memory_allocated())
    assert max(allocated[200:]) <= max(allocated[4:20])
