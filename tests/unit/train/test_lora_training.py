"""Training adapters: gradients by the chain rule, what the optimizer holds, checkpoints of adapters alone."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quartet.config import UserError
from quartet.config.common import LoRAConfig, OptimConfig, TrainConfig
from quartet.models.packed_model import PackedCausalLM, PackedScalarModel
from quartet.train.engine import TrainEngine
from quartet.train.objectives import PairwiseObjective, SFTObjective
from train_fixtures import load_state

LORA = LoRAConfig(rank=3, alpha=7.0)


@pytest.fixture
def lora_engine(make_model: Callable[..., Any]) -> Callable[..., TrainEngine[Any]]:
    """``lora_engine(kind, dtype, lora=…, learned=…, model=…, **config)``; gradients are not clipped."""

    def make(
        kind: str = "causal",
        dtype: torch.dtype = torch.float64,
        lora: LoRAConfig = LORA,
        learned: bool = True,
        model: Any = None,
        **config: Any,
    ) -> TrainEngine[Any]:
        settings = TrainConfig(optim=OptimConfig(lr=1e-2, max_grad_norm=1e6), lora=lora, **config)
        holder = PackedCausalLM if kind == "causal" else PackedScalarModel
        packed = holder(
            make_model(kind, dtype) if model is None else model,
            settings.precision,
            activation_checkpointing=settings.activation_checkpointing,
        )
        packed.adapt(lora, seed=1)
        if learned:
            generator = torch.Generator().manual_seed(4)
            with torch.no_grad():
                for layer in packed.adapters.layers:
                    b = layer.factors[1]
                    b.copy_(0.1 * torch.randn(b.shape, generator=generator))
        return TrainEngine(packed, settings, total_steps=10)

    return make


def trained(engine: TrainEngine[Any]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.weights()}


def first_gradients(engine: TrainEngine[Any]) -> dict[str, Tensor]:
    """Of an engine's first update, read from AdamW's first moment."""
    beta, state = engine.config.optim.betas[0], engine.optimizer.state
    return {name: state[p]["exp_avg"] / (1 - beta) for name, p in engine.packed.adapters.trained.items()}


def objective(kind: str) -> Any:
    return SFTObjective() if kind == "causal" else PairwiseObjective()


@pytest.mark.parametrize("kind", ["causal", "scalar"])
def test_gradients_follow_from_those_of_the_merged_weights(
    kind: str, lora_engine: Any, batch: Any, pairs: Any, make_engine: Any, gradients: Any, same: Any
) -> None:
    """With ``W' = W + s B A``: ``dA = s Bᵀ dW'`` and ``dB = s dW' Aᵀ``."""
    data = batch if kind == "causal" else pairs
    engine = lora_engine(kind)
    layers, scale = engine.packed.adapters.layers, LORA.alpha / LORA.rank
    merged = make_engine(kind)
    factors = {layer.path: [f.detach().clone() for f in layer.factors] for layer in layers}
    with torch.no_grad():
        for path, (a, b) in factors.items():
            merged.packed.model.get_submodule(path).weight.add_(scale * b @ a)
    engine.train_step(data, objective(kind))
    merged.train_step(data, objective(kind))
    whole, expected = gradients(merged), {}
    for path, (a, b) in factors.items():
        weight = whole[f"{path}.weight"]
        expected[f"{path}.lora_A.default.weight"] = scale * b.T @ weight
        expected[f"{path}.lora_B.default.weight"] = scale * weight @ a.T
    if kind == "scalar":
        expected["score.weight"] = whole["score.weight"]
    found = first_gradients(engine)
    assert found.keys() == expected.keys()
    same(found, expected)


@pytest.mark.parametrize(
    "config",
    [{"share_prefixes": False}, {"token_budget": 22, "activation_checkpointing": True, "logprob_chunk": 2}],
)
def test_updates_do_not_depend_on_how_they_are_computed(config: Any, lora_engine: Any, batch: Any, same: Any) -> None:
    engines = [lora_engine(), lora_engine(**config)]
    for engine in engines:
        for _ in range(2):
            engine.train_step(batch, SFTObjective())
    same(trained(engines[1]), trained(engines[0]))


def test_the_base_stays_and_the_optimizer_holds_factors_alone(lora_engine: Any, pairs: Any) -> None:
    engine = lora_engine("scalar", torch.float32)
    adapters = engine.packed.adapters
    before = {n: p.clone() for n, p in engine.packed.model.named_parameters() if n not in adapters.trained}
    values = trained(engine)
    metrics = engine.train_step(pairs, PairwiseObjective())
    after = dict(engine.packed.model.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(not torch.equal(after[name], value) for name, value in values.items())
    assert all(after[name].grad is None for name in before)
    held = sum(t.nbytes for state in engine.optimizer.state.values() for t in state.values() if t.dim())
    assert held == 2 * sum(value.nbytes for value in values.values())
    norms = [float(g.norm()) for g in first_gradients(engine).values()]
    assert metrics["grad_norm"] == pytest.approx(sum(n * n for n in norms) ** 0.5, rel=1e-5)


# Checkpoints ---------------------------------------------------------------------------------------------


def stored(engine: TrainEngine[Any]) -> dict[str, Any]:
    """The state through a file, as a checkpoint keeps it."""
    file = io.BytesIO()
    torch.save(engine.state(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("kind", ["causal", "scalar"])
def test_resumed_training_has_the_same_bits(kind: str, lora_engine: Any, batch: Any, pairs: Any) -> None:
    data = batch if kind == "causal" else pairs
    whole = lora_engine(kind, torch.float32, learned=False)
    for _ in range(2):
        whole.train_step(data, objective(kind))
    state = stored(whole)
    saved = {name.removeprefix("model.") for name in state if name.startswith("model.")}
    assert saved == whole.packed.adapters.trained.keys(), "nothing of the base"
    for _ in range(2):
        whole.train_step(data, objective(kind))
    resumed = lora_engine(kind, torch.float32, learned=False)
    load_state(resumed, state)
    for _ in range(2):
        resumed.train_step(data, objective(kind))
    assert resumed.num_updates == 4
    for name, value in trained(whole).items():
        assert torch.equal(value, trained(resumed)[name]), name


def test_another_base_or_other_adapters_are_refused(lora_engine: Any, make_model: Any) -> None:
    engine = lora_engine()
    state = engine.state()
    other = make_model("causal", torch.float64)
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-9
    moved = lora_engine(model=other, learned=False)
    before = trained(moved)
    with pytest.raises(UserError, match="trained on another base model") as caught:
        load_state(moved, state)
    assert engine.packed.adapters.base_digest[:16] in caught.value.found
    assert all(torch.equal(value, before[name]) for name, value in trained(moved).items()), "nothing was changed"
    for lora in (LoRAConfig(rank=2), LoRAConfig(rank=3, target_modules="q_proj")):
        with pytest.raises(UserError, match="does not fit the model"):
            load_state(lora_engine(lora=lora), state)
