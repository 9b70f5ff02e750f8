"""A tiny model in a train engine, and one batch that holds every awkward shape at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from quartet.batch.ragged import RaggedBatch
from quartet.config.common import OptimConfig, TrainConfig
from quartet.models.loading import scalar_model_from
from quartet.models.packed_model import Numerics, PackedCausalLM, PackedScalarModel
from quartet.train.engine import TrainEngine
from quartet.train.forward import ForwardNeeds
from quartet.train.parallel.tensors import write_part
from quartet.train.state import REST, state_tensors, tensor_shapes
from tolerances import in_dtype

VOCAB = 31


@pytest.fixture(scope="session")
def models() -> dict[str, PreTrainedModel]:
    """A causal and a scalar model in fp32; copy before use."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, pad_token_id=None,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    causal = LlamaForCausalLM(config).eval()
    scalar = scalar_model_from(causal, seed=0)
    torch.nn.init.normal_(scalar.score.weight, generator=torch.Generator().manual_seed(1))
    return {"causal": causal, "scalar": scalar}


@pytest.fixture(scope="session")
def make_model(models: dict[str, PreTrainedModel]) -> Callable[[str, torch.dtype], PreTrainedModel]:
    """A copy of one of the models; in fp64 its norms run in fp64 too."""
    return lambda kind, dtype: in_dtype(copy.deepcopy(models[kind]), dtype)


@pytest.fixture(scope="session")
def make_engine(make_model: Callable[[str, torch.dtype], PreTrainedModel]) -> Callable[..., TrainEngine[Any]]:
    """``make_engine(kind, dtype, total_steps=…, optim={…}, **config)``; gradients are not clipped unless asked."""

    def make(
        kind: str = "causal",
        dtype: torch.dtype = torch.float64,
        total_steps: int = 10,
        optim: dict[str, Any] | None = None,
        name: str = "train",
        numerics: Numerics = "fast",
        **config: Any,
    ) -> TrainEngine[Any]:
        model = make_model(kind, dtype)
        settings = TrainConfig(optim=OptimConfig(**{"lr": 1e-2, "max_grad_norm": 1e6, **(optim or {})}), **config)
        holder = PackedCausalLM if kind == "causal" else PackedScalarModel
        packed = holder(
            model, settings.precision, activation_checkpointing=settings.activation_checkpointing, numerics=numerics
        )
        return TrainEngine(packed, settings, total_steps=total_steps, name=name)

    return make


@pytest.fixture(scope="session")
def batch(make_engine: Callable[..., TrainEngine[Any]]) -> RaggedBatch:
    """Three prompts with 3, 2 and 2 responses of 1 to 8 tokens, in seven sequences and six trajectories.

    Sequences 1 and 2 are turns of trajectory 1. Trajectory 3 has no loss token. Old and reference log-probabilities
    lie around the model's own, so some ratios are clipped and some are not.
    """
    generator = torch.Generator().manual_seed(7)

    def tokens(n: int) -> list[int]:
        return torch.randint(VOCAB, (n,), generator=generator).tolist()

    prompts = [tokens(3), tokens(1), tokens(5)]
    responses = [[tokens(4), tokens(2), tokens(5)], [tokens(8), tokens(3)], [tokens(1), tokens(4)]]
    shared = RaggedBatch.from_groups(prompts, responses, [f"r{i}" for i in range(7)])
    owner = shared.sequence_index()

    def normal() -> Tensor:
        return torch.randn(shared.num_tokens, generator=generator, dtype=torch.float64)

    action = owner >= 0
    keep = torch.rand(shared.num_tokens, generator=generator) < 0.8
    keep[shared.leaf_span(5)[0]] = True
    found = shared.with_sequence(
        trajectory=torch.tensor([0, 1, 1, 2, 3, 4, 5]),
    ).with_token(action_mask=action, loss_mask=action & keep & (owner != 4))
    engine = make_engine("causal")
    own = engine.forward(found, ForwardNeeds(logprobs=True, mask="action_mask", temperature=0.9)).token["logprobs"]
    values = make_engine("scalar").forward(found, ForwardNeeds(values=True, mask="action_mask")).token["values"]
    return found.with_token(
        old_logprobs=own + 0.3 * normal() * action,
        rollout_logprobs=own + 0.1 * normal() * action,
        ref_logprobs=own + 0.5 * normal() * action,
        advantages=normal() * action,
        high_entropy=torch.rand(shared.num_tokens, generator=torch.Generator().manual_seed(8)) < 0.5,
        high_covariance=torch.rand(shared.num_tokens, generator=torch.Generator().manual_seed(9)) < 0.3,
        values=values + 0.3 * normal() * action,
        returns=values + normal() * action,
    )


@pytest.fixture(scope="session")
def pairs() -> RaggedBatch:
    """Five preference pairs over shared prompts, chosen first or second, with margins."""
    generator = torch.Generator().manual_seed(9)

    def tokens(n: int) -> list[int]:
        return torch.randint(VOCAB, (n,), generator=generator).tolist()

    lengths = [(4, 2), (1, 6), (3, 3), (5, 1), (2, 2)]
    found = RaggedBatch.from_groups(
        [tokens(n) for n in (2, 4, 1, 3, 2)],
        [[tokens(a), tokens(b)] for a, b in lengths],
        [f"{p}{side}" for p in range(5) for side in "ab"],
    )
    return found.with_sequence(
        pair=torch.arange(5).repeat_interleave(2),
        chosen=torch.tensor([True, False, False, True, True, False, True, False, False, True]),
        margin=torch.tensor([0.5, 0.1, 0.3, 0.0, 1.0], dtype=torch.float64).repeat_interleave(2),
    )


@pytest.fixture(scope="session")
def gradients() -> Callable[[TrainEngine[Any]], dict[str, Tensor]]:
    """The gradients of an engine's first update, read from AdamW's first moment."""

    def read(engine: TrainEngine[Any]) -> dict[str, Tensor]:
        beta = engine.config.optim.betas[0]
        state = engine.optimizer.state
        return {name: state[p]["exp_avg"] / (1 - beta) for name, p in engine.packed.model.named_parameters()}

    return read


@pytest.fixture(scope="session")
def weights() -> Callable[[TrainEngine[Any]], dict[str, Tensor]]:
    """A copy of an engine's parameters."""

    def read(engine: TrainEngine[Any]) -> dict[str, Tensor]:
        return {name: values.clone() for name, values in engine.weights()}

    return read


@pytest.fixture(scope="session")
def same(tolerances: dict[torch.dtype, tuple[float, float]]) -> Callable[..., None]:
    """Two dictionaries of tensors agree within the table, each on the scale of its largest entry where that is
    above 1.
    """

    def check(actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> None:
        atol, rtol = tolerances[dtype]
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            scale = max(1.0, float(value.abs().max()))
            torch.testing.assert_close(
                actual[name] / scale,
                value / scale,
                atol=atol,
                rtol=rtol,
                check_dtype=False,
                msg=lambda m, n=name: f"{n}: {m}",
            )

    return check


def load_state(engine: TrainEngine[Any], state: dict[str, Any]) -> None:
    """Takes up what ``engine.state`` gave."""
    with engine.loading(tensor_shapes(state_tensors(state)), state[REST]) as live, torch.no_grad():
        for name, tensor in live.items():
            write_part(tensor, state[name])
