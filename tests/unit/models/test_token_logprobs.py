"""Log-probabilities and entropies of selected rows, whole and in chunks."""

from __future__ import annotations

import pytest
import torch

ROWS = 23


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, 32, generator=generator, dtype=torch.float64)
    return hidden, torch.randint(61, (ROWS,), generator=generator)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_equals_log_softmax(family, temperature, rows, make_twins, close):
    hidden, labels = rows
    twins = make_twins(family, torch.float64)
    logprobs, entropies = twins.packed.token_logprobs(hidden, labels, temperature=temperature, entropy=True)
    logits = twins.plain.get_output_embeddings()(hidden)
    cap = twins.plain.config.final_logit_softcapping if family == "gemma2" else None
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    every = (logits / temperature).log_softmax(-1)
    close(logprobs, every[torch.arange(ROWS), labels])
    close(entropies, -(every.exp() * every).sum(-1))


def test_entropy_by_hand(make_twins):
    """Equal logits over 61 tokens: log 61 nats, each log-probability its negative, at every temperature."""
    packed = make_twins("llama").packed
    torch.nn.init.zeros_(packed.head.weight)
    logprobs, entropies = packed.token_logprobs(torch.ones(2, 32), torch.tensor([0, 60]), temperature=0.3, entropy=True)
    expected = torch.full((2,), 61.0).log()
    torch.testing.assert_close(entropies, expected)
    torch.testing.assert_close(logprobs, -expected)


def test_entropy_only_when_asked(rows, make_twins):
    hidden, labels = rows
    assert make_twins("llama", torch.float64).packed.token_logprobs(hidden, labels)[1] is None


@pytest.mark.parametrize("chunk", [1, 7, 23])
@pytest.mark.parametrize("entropy", [False, True])
def test_chunks_change_nothing(chunk, entropy, rows, make_twins, close):
    hidden, labels = rows
    packed = make_twins("gemma2", torch.float64).packed
    found = []
    for size in (1000, chunk):
        packed.model.zero_grad()
        h = hidden.clone().requires_grad_()
        logprobs, entropies = packed.token_logprobs(h, labels, temperature=0.8, chunk=size, entropy=entropy)
        weights = torch.linspace(-1, 1, ROWS, dtype=torch.float64)
        total = (logprobs * weights).sum() + (0 if entropies is None else (entropies * weights.cos()).sum())
        total.backward()
        found.append((logprobs.detach(), h.grad, packed.head.weight.grad.clone()))
    for whole, chunked in zip(*found, strict=True):
        close(chunked, whole)


def test_chunks_keep_no_logits(rows, make_twins):
    """Several chunks are recomputed in the backward: nothing of size [rows, vocabulary] is saved."""
    hidden, labels = rows
    packed = make_twins("llama", torch.float64).packed
    saved: dict[int, int] = {}
    for chunk in (1000, 8):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: (sizes.append(t.numel()), t)[1], lambda t: t
        ):
            packed.token_logprobs(hidden.clone().requires_grad_(), labels, chunk=chunk)
        saved[chunk] = max(sizes, default=0)
    assert saved[1000] >= ROWS * 61
    assert saved[8] < 8 * 61


def test_no_rows_give_none(make_twins):
    packed = make_twins("llama").packed
    logprobs, entropies = packed.token_logprobs(torch.zeros(0, 32), torch.zeros(0, dtype=torch.int64), entropy=True)
    assert logprobs.shape == entropies.shape == (0,)


def test_bf16_reduces_in_fp32(rows, make_twins, close):
    """Only the product runs in bf16: the probabilities of its fp32 logits add up to 1."""
    hidden, labels = rows
    twins = make_twins("llama", initializer_range=0.02)
    twins.packed.precision = "bf16"
    logprobs, _ = twins.packed.token_logprobs(hidden.float(), labels)
    assert logprobs.dtype == torch.float32
    exact = twins.plain.get_output_embeddings()(hidden.float()).log_softmax(-1)
    close(logprobs, exact[torch.arange(ROWS), labels], torch.bfloat16)
    rounded = (hidden.bfloat16() @ twins.plain.get_output_embeddings().weight.bfloat16().T).float().log_softmax(-1)
    close(logprobs, rounded[torch.arange(ROWS), labels])
