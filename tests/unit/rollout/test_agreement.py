"""Sampler and trainer agree: three chained equalities, on one thread in fp32.

Batch invariance: a request's tokens and log-probabilities are the same alone and among others.
Trainer forward = engine prefill. Engine decode = engine prefill.

Exact numerics hold them to the bit, for the dense architectures; fast numerics within the table of tolerances.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch
from quartet.models.attention import AttentionParams
from quartet.models.exact import exact_masked_attention, row_multiple
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout import step_attention
from quartet.rollout.engine import NativeEngine, choose_attention_backend
from quartet.rollout.protocol import Completion, Request
from quartet.rollout.step_attention import AttentionBackend
from quartet.train.forward import ForwardNeeds, forward_only, forward_packed

Tolerances = dict[torch.dtype, tuple[float, float]]
Make = Callable[..., Request]
RunAll = Callable[..., dict[str, Completion]]

DENSE = (
    "llama", "qwen2", "gemma2", "qwen3", "mistral", "gemma3", "gpt_neox", "phi3", "olmo2", "granite", "cohere",
)  # fmt: skip


@pytest.fixture
def build_exact(exact_processor: None, build_architecture: Callable[..., Any]) -> Callable[..., PackedCausalLM]:
    def build(name: str, **options: Any) -> PackedCausalLM:
        model = build_architecture(name, **{"vocab_size": 97, "max_position_embeddings": 2048, **options})
        return PackedCausalLM(model, numerics="exact")

    return build


@pytest.fixture(params=DENSE)
def exact(request: pytest.FixtureRequest, build_exact: Callable[..., PackedCausalLM]) -> PackedCausalLM:
    return build_exact(request.param)


def grouped(requests: Sequence[Request], done: dict[str, Completion]) -> RaggedBatch:
    """Prompts with their responses, of which every token is under the mask."""
    groups: dict[str, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.group, []).append(request)
    batch = RaggedBatch.from_groups(
        [members[0].prompt_ids for members in groups.values()],
        [[done[r.request_id].token_ids for r in members] for members in groups.values()],
        [r.request_id for members in groups.values() for r in members],
    )
    mask = torch.zeros(batch.num_tokens, dtype=torch.bool)
    for s in range(len(batch)):
        start, end = batch.leaf_span(s)
        mask[start:end] = True
    return batch.with_token(loss_mask=mask)


def rollout_column(batch: RaggedBatch, done: dict[str, Completion]) -> Tensor:
    column = torch.zeros(batch.num_tokens)
    for s, request_id in enumerate(batch.ids):
        start, end = batch.leaf_span(s)
        column[start:end] = torch.tensor(done[request_id].logprobs)
    return column


# Exact numerics --------------------------------------------------------------------------------------------


def mixed_requests(make_request: Make) -> list[Request]:
    """Five pairs with prompts of 1 to about 300 tokens and all kinds of sampling."""
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 1.4, "top_k": 12},
        {"temperature": 0.8, "top_p": 0.85},
    ]
    lengths = (1, 7, 40, 300, 31)
    return [
        make_request(
            f"r{i}", group=f"g{i // 2}", length=lengths[i // 2], seed=1000 + i, max_new_tokens=2 + (11 * i) % 19,
            stop_token_ids=(3, 11), **options[i % 4],
        )
        for i in range(10)
    ]  # fmt: skip


def test_requests_yield_to_the_bit_what_each_yields_alone(
    exact: PackedCausalLM, make_request: Make, run_all: RunAll
) -> None:
    """Staggered arrivals, few rows, prompts in pieces beside decoding, against one request at a time."""
    requests = mixed_requests(make_request)
    engine = NativeEngine(exact, max_running=4, max_prefill_tokens=48)
    together: dict[str, Completion] = {}
    for wave in range(0, len(requests), 3):
        engine.submit(requests[wave : wave + 3])
        for _ in range(2):
            together |= {c.request_id: c for c in engine.step()}
    together |= run_all(engine)
    alone = NativeEngine(exact)
    for request in requests:
        assert together[request.request_id] == run_all(alone, [request])[request.request_id]


def test_rollout_and_trainer_give_the_same_log_probabilities_to_the_bit(
    exact: PackedCausalLM, make_request: Make, run_all: RunAll
) -> None:
    """In any order, cut into micro-batches and chunks in any way, prompts shared or not, with gradient or without."""
    temperature = 0.8
    lengths = (1, 5, 60, 290)
    requests = [
        make_request(
            f"r{i}", group=f"g{i // 3}", length=lengths[i // 3], seed=i, temperature=temperature,
            max_new_tokens=3 + 2 * i,
        )
        for i in range(12)
    ]  # fmt: skip
    done = run_all(NativeEngine(exact, max_running=5, max_prefill_tokens=100), requests)
    shuffle = random.Random(0)
    for budget, chunk, share in ((10_000, 1024, True), (10_000, 33, False), (400, 20, True), (360, 64, False)):
        order = shuffle.sample(requests, len(requests))
        batch = grouped(order, done)
        needs = ForwardNeeds(logprobs=True, temperature=temperature)
        found = forward_only(exact, batch, needs, budget, chunk, share=share).token["logprobs"]
        assert torch.equal(found, rollout_column(batch, done)), (budget, chunk, share)
    trained = forward_packed(exact, batch, needs, 50).logprobs
    assert trained is not None
    assert trained.requires_grad
    assert torch.equal(trained.detach(), rollout_column(batch, done))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("qwen2", {"sliding_window": 600}),
        ("gemma2", {"sliding_window": 300, "attn_logit_softcapping": 10.0}),
        ("qwen3", {"head_dim": 128, "hidden_size": 64}),
    ],
)
def test_long_prompts_and_responses(
    name: str, options: dict[str, Any], build_exact: Callable[..., PackedCausalLM], make_request: Make, run_all: RunAll
) -> None:
    """Several blocks of 512 keys, entered by prefill and by decode; temperature 1."""
    packed = build_exact(name, **options)
    cases = ((1400, 4), (1020, 10), (500, 30), (240, 40), (2, 34))
    requests = [
        make_request(f"r{i}", length=length, seed=i, max_new_tokens=limit) for i, (length, limit) in enumerate(cases)
    ]
    done = run_all(NativeEngine(packed, max_prefill_tokens=700), requests)
    batch = grouped(requests[::-1], done)
    found = forward_only(packed, batch, ForwardNeeds(logprobs=True), 2000).token["logprobs"]
    assert torch.equal(found, rollout_column(batch, done))


def test_each_token_has_the_bits_of_the_weights_that_sampled_it(
    build_exact: Callable[..., PackedCausalLM], make_request: Make, run_all: RunAll
) -> None:
    """New weights come while requests run: their keys are computed anew in one pass, and decoding goes on."""
    actor = build_exact("qwen2")
    requests = [make_request(f"r{i}", length=3 + 50 * i, seed=i, max_new_tokens=30 + i) for i in range(6)]
    engine = NativeEngine(actor, max_running=4, max_prefill_tokens=64)
    engine.submit(requests)
    done: dict[str, Completion] = {}
    for _ in range(18):
        done |= {c.request_id: c for c in engine.step()}
    before = {name: parameter.clone() for name, parameter in actor.model.named_parameters()}
    with torch.no_grad():
        for parameter in actor.model.parameters():
            parameter.mul_(1.01)
    engine.update_weights(None, version=1)
    done |= run_all(engine)
    batch = grouped(requests, done)
    needs = ForwardNeeds(logprobs=True)
    new = forward_only(actor, batch, needs, 4000).token["logprobs"]
    actor.model.load_state_dict(before, strict=False)
    old = forward_only(actor, batch, needs, 4000).token["logprobs"]
    versions = torch.zeros(batch.num_tokens, dtype=torch.int64)
    for s, request_id in enumerate(batch.ids):
        start, end = batch.leaf_span(s)
        versions[start:end] = torch.tensor(done[request_id].versions)
    assert {(0, 1)} <= {tuple(sorted(set(c.versions))) for c in done.values()}, "no request saw both weights"
    assert torch.equal(torch.where(versions == 1, new, old), rollout_column(batch, done))


def unfilled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rule: AttentionParams) -> Tensor:
    """Attention of single queries without rows of zeros that fill up."""
    rows = q.view(len(q), k.shape[1], -1, q.shape[-1])
    return exact_masked_attention(rows, k, v, mask, rule).reshape(q.shape)


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "rows of attention": ("decode_attention", unfilled),
    "rows of products": ("padded_rows", lambda num_rows, step: num_rows),
    "keys": ("key_length", lambda num_keys: -(-num_keys // 32) * 32),
}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_fault_in_decoding_shows(
    fault: str | None,
    sensitive_kernels: None,
    build_exact: Callable[..., PackedCausalLM],
    make_request: Make,
    run_all: RunAll,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = build_exact("llama", hidden_size=256, intermediate_size=352)
    if fault is not None:
        monkeypatch.setattr(step_attention, *FAULTS[fault])
    requests = [make_request(f"r{i}", length=270 + 40 * i, seed=i, max_new_tokens=20) for i in range(4)]
    done = run_all(NativeEngine(packed), requests)
    batch = grouped(requests, done)
    found = forward_only(packed, batch, ForwardNeeds(logprobs=True), 4000).token["logprobs"]
    expected = rollout_column(batch, done)
    assert torch.equal(found, expected) == (fault is None)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_model_chooses_the_contexts(build_exact: Callable[..., PackedCausalLM]) -> None:
    packed = build_exact("llama")
    contexts = choose_attention_backend(packed)
    assert isinstance(contexts, step_attention.ExactAttentionBackend)
    assert not contexts.shares_prefixes
    assert contexts.padded_rows(3) == max(16, row_multiple(packed.body))
    packed.numerics = "fast"
    assert type(choose_attention_backend(packed)) is AttentionBackend


# Fast numerics ---------------------------------------------------------------------------------------------


def test_engine_equals_the_packed_training_forward(
    family: Any, make_request: Make, run_all: RunAll, tolerances: Tolerances
) -> None:
    """The chain's ends: log-probabilities written while decoding against those the trainer computes."""
    temperature = 0.8
    requests = [
        make_request(
            f"r{i}", group=f"g{i // 4}", length=2 + 5 * (i // 4), seed=i, temperature=temperature, max_new_tokens=5 + i
        )
        for i in range(20)
    ]
    done = run_all(family.engine(max_running=7), requests)
    batch = grouped(requests, done)
    needs = ForwardNeeds(logprobs=True, temperature=temperature)
    found = forward_only(family.packed, batch, needs, 4000).token["logprobs"]
    atol, rtol = tolerances[torch.float32]
    torch.testing.assert_close(rollout_column(batch, done), found, atol=atol, rtol=rtol)
