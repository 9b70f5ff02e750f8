"""The engine with adapters: merged weights that follow them, agreement with the trainer, adapters alone as update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch
from quartet.config.common import LoRAConfig
from quartet.models.attention import PackedAttention
from quartet.models.loading import packed_causal_lm
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.compute_dtype_weights import ComputeWeights
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Completion, Request
from quartet.train.forward import ForwardNeeds, forward_only

LORA = LoRAConfig(rank=4, alpha=6.0)
TOKENS = torch.arange(3, 43)
Build = Callable[..., PackedCausalLM]
Make = Callable[..., Request]
RunAll = Callable[..., dict[str, Completion]]


@pytest.fixture
def adapted(build_architecture: Callable[..., Any]) -> Build:
    """``adapted(architecture, precision, learned=…, numerics=…)``: every call gives the same model."""

    def build(name: str = "llama", precision: Any = "fp32", *, size: float = 0.1, **options: Any) -> PackedCausalLM:
        # Weights as large as trained ones: steeper ones would make bf16's rounding the whole of what is compared.
        model = build_architecture(name, vocab_size=97, max_position_embeddings=256, initializer_range=0.05)
        packed = packed_causal_lm(model, precision, lora=LORA, **options)
        learn(packed, size)
        return packed

    return build


def learn(packed: PackedCausalLM, size: float, seed: int = 11) -> None:
    """Moves the factors as an update does: in place."""
    generator = torch.Generator().manual_seed(seed)
    assert packed.adapters is not None
    with torch.no_grad():
        for parameter in packed.adapters.trained.values():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def logits(packed: PackedCausalLM) -> Tensor:
    with torch.no_grad():
        return packed.logits(packed.hidden(TOKENS, torch.arange(40), PackedAttention([40])))


def requests(make_request: Make) -> list[Request]:
    return [
        make_request(f"r{i}", group=f"g{i // 2}", length=5 + 3 * (i // 2), seed=i, max_new_tokens=4 + 2 * i)
        for i in range(6)
    ]


def trained_logprobs(packed: PackedCausalLM, sent: list[Request], done: dict[str, Completion]) -> tuple[Tensor, Tensor]:
    """The trainer's log-probabilities of all sampled tokens, and the engine's."""
    batch = RaggedBatch.from_groups(
        [r.prompt_ids for r in sent[::2]],
        [[done[r.request_id].token_ids for r in sent[i : i + 2]] for i in range(0, len(sent), 2)],
        [r.request_id for r in sent],
    )
    mask = batch.sequence_index() >= 0
    found = forward_only(packed, batch.with_token(loss_mask=mask), ForwardNeeds(logprobs=True), 10_000).token[
        "logprobs"
    ]
    return found[mask], torch.tensor([lp for r in sent for lp in done[r.request_id].logprobs])


# Agreement -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt_neox"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sampler_and_trainer_agree(
    name: str, precision: Any, adapted: Build, make_request: Make, run_all: RunAll, tolerances: Any
) -> None:
    """Merged products against products side by side, within the table."""
    packed = adapted(name, precision)
    engine, sent = NativeEngine(packed, max_running=4), requests(make_request)
    done = run_all(engine, sent)
    trained, sampled = trained_logprobs(packed, sent, done)
    atol, rtol = tolerances[torch.float32 if precision == "fp32" else torch.bfloat16]
    torch.testing.assert_close(sampled, trained, atol=atol, rtol=rtol)
    with packed.without_adapters():
        base, _ = trained_logprobs(packed, sent, done)
    assert float((base - trained).abs().max()) > 0.1, "these adapters do something"


@pytest.mark.usefixtures("exact_processor")
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "gpt_neox"])
def test_exact_numerics_agree_to_the_bit(name: str, adapted: Build, make_request: Make, run_all: RunAll) -> None:
    """The engine then computes with the adapters beside the weights, as the trainer does."""
    packed = adapted(name, numerics="exact")
    sent = requests(make_request)
    engine = NativeEngine(packed, max_running=4, max_prefill_tokens=16)
    trained, sampled = trained_logprobs(packed, sent, run_all(engine, sent))
    assert torch.equal(sampled, trained)
    assert engine._weights.num_bytes == 0


# Copies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["in place", "behind autograd's back", "released"])
def test_copies_follow_the_adapters(adapted: Build, tolerances: Any, how: str) -> None:
    packed = adapted()
    weights = ComputeWeights(packed)
    with weights.active():
        old = logits(packed)
    assert packed.adapters is not None
    if how == "behind autograd's back":
        for parameter in packed.adapters.trained.values():
            parameter.data.mul_(1.5)
        weights.refresh()
    else:
        learn(packed, 0.1, seed=12)
    if how == "released":
        weights.release()
    with packed.with_merged_adapters():
        expected = logits(packed)
    with weights.active():
        found = logits(packed)
    atol, rtol = tolerances[torch.float32]
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol)
    assert not torch.allclose(old, expected, atol=1e-3)


# An engine of its own ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_adapters_alone_update_an_engines_own_copy(
    name: str, precision: Any, adapted: Build, make_request: Make, run_all: RunAll
) -> None:
    trainer = adapted(name, precision)
    own = adapted(name, precision, size=0.0)
    shared, apart = NativeEngine(trainer), NativeEngine(own, owns_weights=True)
    sent = requests(make_request)
    assert trainer.adapters is not None
    for version in (1, 2):
        source = [(n, p.detach().clone()) for n, p in trainer.adapters.trained.items()]
        apart.update_weights(source, version)
        shared.update_weights(None, version)
        assert run_all(apart, sent) == run_all(shared, sent)
        if version == 1:
            apart.release_cache()
        learn(trainer, 0.1, seed=version)
    assert run_all(apart, sent) != run_all(shared, sent), "the last change was not sent"
    sizes = [sum(t.nbytes for _, t in pairs) for pairs in (source, trainer.model.named_parameters())]
    assert sizes[0] < sizes[1] / 2


# Exclusive -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_no_engine_step_while_the_model_serves_as_a_reference(
    numerics: Any, exact_processor: None, adapted: Build, make_request: Make, run_all: RunAll
) -> None:
    packed = adapted(numerics=numerics)
    engine, sent = NativeEngine(packed), requests(make_request)
    expected = run_all(NativeEngine(packed), sent)
    engine.submit(sent)
    engine.step()
    with packed.without_adapters(), pytest.raises(RuntimeError, match="switched off"):
        engine.step()
    found = run_all(engine)
    assert {i: c.token_ids for i, c in found.items()} == {i: c.token_ids for i, c in expected.items()}
