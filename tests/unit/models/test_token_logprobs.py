"""Log-probabilities and entropies of selected rows, whole and in chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quartet.models import logprobs as logprobs_module
from quartet.models.logprobs import LogprobOptions, token_logprobs

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


class Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for found in tree_leaves(out):
            if isinstance(found, torch.Tensor):
                self.numel = max(self.numel, found.numel())
        return out


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_tensor_of_all_rows_and_the_vocabulary(precision, entropy, make_twins):
    """64 rows, 4096 ids: logits of 8 rows at a time, both ways; the head's gradient is the largest tensor."""
    packed = make_twins("llama", vocab_size=4096).packed
    packed.precision = precision
    hidden = torch.randn(64, 32, requires_grad=True)
    labels = torch.arange(64)
    with Largest() as forward:
        logprobs, entropies = packed.token_logprobs(hidden, labels, chunk=8, entropy=entropy)
        total = logprobs.sum() + (entropies.sum() if entropy else 0.0)
    with Largest() as backward:
        total.backward()
    assert forward.numel <= packed.head.weight.numel() < 64 * 4096
    assert backward.numel <= packed.head.weight.numel()


# Gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (1.0, 1.5), (0.6, 1.5), (1.7, None)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_backward_by_finite_differences(temperature, scale, softcap, entropy):
    generator = torch.Generator().manual_seed(4)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((7, 5), (11, 5), (11,))
    )
    labels = torch.tensor([0, 10, 3, 3, 5, 1, 9])
    rule = LogprobOptions(torch.float64, temperature, scale, softcap, chunk=3, entropy=entropy)

    def run(hidden, weight, bias):
        logprobs, entropies = token_logprobs(hidden, weight, bias, labels, rule)
        return (logprobs, entropies) if entropy else logprobs

    assert torch.autograd.gradcheck(run, (hidden, weight, bias))


def _plain(packed, hidden, labels, temperature):
    """The formula without chunks, through autograd."""
    log_p = (packed.logits(hidden) / temperature).log_softmax(-1)
    return log_p.gather(1, labels.unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float64, "fp32"), (torch.float32, "fp32"), (torch.float32, "bf16")]
)
def test_gradients_of_the_plain_formula(family, dtype, precision, rows, make_twins, close):
    hidden, labels = rows
    packed = make_twins(family, dtype, initializer_range=0.05).packed
    packed.precision = precision
    weights = torch.linspace(-1, 1, ROWS, dtype=dtype)
    found = []
    for run in (
        lambda h: packed.token_logprobs(h, labels, temperature=0.8, chunk=9, entropy=True),
        lambda h: _plain(packed, h, labels, 0.8),
    ):
        packed.model.zero_grad()
        h = hidden.to(dtype).requires_grad_()
        logprobs, entropies = run(h)
        ((logprobs * weights).sum() + (entropies * weights.cos()).sum()).backward()
        found.append((logprobs.detach(), entropies.detach(), h.grad, packed.head.weight.grad.clone()))
    for ours, plain in zip(*found, strict=True):
        scale = max(1.0, float(plain.abs().max()))
        close(ours / scale, plain / scale, torch.bfloat16 if precision == "bf16" else dtype)


def test_the_gradient_of_the_head_adds_up_in_fp32(make_twins):
    """Many equal chunks in bf16: a bf16 sum would stop growing at 256 times the first part."""
    packed = make_twins("llama").packed
    packed.precision = "bf16"
    hidden, labels = torch.ones(600, 32), torch.full((600,), 5)
    grads = []
    for repeats in (1, 600):
        packed.model.zero_grad()
        logprobs, _ = packed.token_logprobs(hidden[:repeats], labels[:repeats], chunk=1)
        logprobs.sum().backward()
        grads.append(packed.head.weight.grad.clone())
    torch.testing.assert_close(grads[1], 600 * grads[0], atol=0, rtol=1e-5)


def test_entropy_without_gradient(rows, make_twins, close):
    """The values are the same; the gradient is that of the log-probabilities alone."""
    hidden, labels = rows
    packed = make_twins("gemma2", torch.float64).packed
    grads = []
    for options in ({"entropy": True, "entropy_grad": False}, {"entropy": False}):
        packed.model.zero_grad()
        h = hidden.clone().requires_grad_()
        logprobs, entropies = packed.token_logprobs(h, labels, **options)
        if entropies is not None:
            assert not entropies.requires_grad
            close(entropies, packed.token_logprobs(h, labels, entropy=True)[1].detach())
        logprobs.sum().backward()
        grads.append((h.grad, packed.head.weight.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


# One head for sampler and trainer ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("temperature", "scale"), [(1.0, 1.0), (0.7, 1.0), (0.7, 0.3)])
def test_log_probabilities_are_those_of_the_logits_bit_for_bit(
    temperature, scale, precision, dtype, family, rows, make_twins
):
    """As the sampler takes them: logits over the temperature minus their log-sum-exp."""
    hidden, labels = rows
    packed = make_twins(family, dtype).packed
    packed.precision, packed.logit_scale = precision, scale
    with torch.no_grad():
        logprobs, _ = packed.token_logprobs(hidden.to(dtype), labels, temperature=temperature)
        scaled = packed.logits(hidden.to(dtype)) / temperature
    expected = scaled - scaled.logsumexp(-1, keepdim=True)
    assert torch.equal(logprobs, expected[torch.arange(ROWS), labels])


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_blocks_change_no_bit(softcap, rows, monkeypatch):
    hidden, labels = rows
    weight = torch.randn(61, 32, generator=torch.Generator().manual_seed(1))
    rule = LogprobOptions(torch.float32, 0.7, softcap=softcap, entropy=True)
    found = []
    for size in (1, 7 * 61 * 4, 1 << 20):
        monkeypatch.setattr(logprobs_module, "_BLOCK_BYTES", {"cpu": size})
        h = hidden.float().requires_grad_()
        logprobs, entropies = token_logprobs(h, weight, None, labels, rule)
        (logprobs.sum() + entropies.sum()).backward()
        found.append((logprobs, entropies, h.grad))
    assert all(torch.equal(a, b) for others in found[1:] for a, b in zip(found[0], others, strict=True))


def test_no_rows_give_none(make_twins):
    packed = make_twins("llama").packed
    logprobs, entropies = packed.token_logprobs(torch.zeros(0, 32), torch.zeros(0, dtype=torch.int64), entropy=True)
    assert logprobs.shape == entropies.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_token_that_cannot_be_drawn_is_as_one_that_is_not_there(dtype: torch.dtype) -> None:
    """A head bias of -inf, as for ids that only fill the vocabulary up: finite entropies and gradients."""
    stored = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, dtype=stored, generator=generator) for n in (6, 5))
    labels, kept = torch.tensor([0, 1, 2, 4, 0, 1]), [0, 1, 2, 4]
    bias = torch.tensor([0.0, 0.3, -0.2, float("-inf"), 0.1], dtype=stored)
    rule = LogprobOptions(dtype, temperature=0.7, entropy=True, entropy_grad=True)
    factors = torch.arange(6, dtype=stored)

    def run(rows: list[int], own_labels: Tensor) -> list[Tensor]:
        h, w = hidden.clone().requires_grad_(), weight[rows].clone().requires_grad_()
        logprobs, entropies = token_logprobs(h, w, bias[rows], own_labels, rule)
        assert entropies is not None
        ((logprobs + 3 * entropies) * factors).sum().backward()
        assert h.grad is not None and w.grad is not None
        return [logprobs.detach(), entropies.detach(), h.grad, w.grad]

    expected = run(kept, torch.tensor([kept.index(int(y)) for y in labels]))
    *found, grad_weight = run(list(range(5)), labels)
    assert not grad_weight[3].any()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    for one, other in zip([*found, grad_weight[kept]], expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
