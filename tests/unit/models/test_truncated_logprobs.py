"""Log-probabilities under top-k, top-p and min-p: a plain reference with loops and autograd, and the sampler's own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quartet.models.logprobs import LogprobOptions, SamplingLimits, token_logprobs
from quartet.rollout.protocol import SamplingParams
from quartet.rollout.sampler import SamplingRows, sample

LIMITS = [
    SamplingLimits(1.0, 3, 0.0),
    SamplingLimits(0.7, 0, 0.0),
    SamplingLimits(1.0, 0, 0.2),
    SamplingLimits(0.9, 5, 0.05),
    SamplingLimits(1e-6, 0, 0.0),
]
ROWS, HIDDEN, VOCAB = 7, 5, 11


def kept(row: list[float], limits: SamplingLimits) -> list[int]:
    """Token ids that stay of one row of scaled logits: top-k, then top-p of the rest, then min-p."""
    weights = [math.exp(value - max(row)) for value in row]
    ranked = sorted(range(len(row)), key=lambda v: (-weights[v], v))[: limits.top_k or len(row)]
    mass, total, chosen = 0.0, sum(weights[v] for v in ranked), []
    for v in ranked:
        if limits.top_p < 1 and chosen and mass >= limits.top_p * total:
            break
        chosen.append(v)
        mass += weights[v]
    return [v for v in chosen if weights[v] >= limits.min_p]


def reference(z: Tensor, labels: Tensor, limits: SamplingLimits) -> tuple[Tensor, Tensor]:
    """Of each row the label's log-probability among what stays, itself included, and the entropy of that."""
    found, entropies = [], []
    for row, label in zip(z, labels.tolist(), strict=True):
        stays = sorted({*kept(row.tolist(), limits), label})
        log_p = row[stays].log_softmax(-1)
        found.append(log_p[stays.index(label)])
        entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(found), torch.stack(entropies)


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, HIDDEN, generator=draw, dtype=torch.float64) for n in (ROWS, VOCAB))
    bias = torch.randn(VOCAB, generator=draw, dtype=torch.float64)
    labels = torch.randint(VOCAB, (ROWS,), generator=draw)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_values_and_gradients_are_those_of_the_plain_reference(limits: SamplingLimits) -> None:
    """Labels are drawn at random, so many are among what the limits leave out: they stay beside what is kept."""
    hidden, weight, bias, labels = problem()
    rule = LogprobOptions(torch.float64, 0.7, 1.5, 4.0, 3, entropy=True, limits=limits)
    z = 4.0 * torch.tanh(1.5 * (hidden @ weight.T + bias) / 4.0) / 0.7
    found = token_logprobs(hidden, weight, bias, labels, rule)
    expected = reference(z, labels, limits)
    grads = []
    for values, entropies in (found, expected):
        assert entropies is not None
        loss = (values * torch.arange(1, ROWS + 1)).sum() + 0.3 * entropies.square().sum()
        grads.append(torch.autograd.grad(loss, (hidden, weight, bias), retain_graph=True))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    outside = [label not in kept(row.tolist(), limits) for row, label in zip(z, labels.tolist(), strict=True)]
    assert any(outside), "a label that is left out by itself is what this is about"


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("vocab", [VOCAB, 1500])
def test_the_sampler_reports_what_the_trainer_computes_to_the_bit(limits: SamplingLimits, vocab: int) -> None:
    draw = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(9, vocab, generator=draw)
    options: dict[str, Any] = {**vars(limits), "temperature": 0.7}
    asked = [SamplingParams(seed=i, truncated_logprobs=i % 3 > 0, **options) for i in range(9)]
    rows = SamplingRows.build(asked, vocab, torch.device("cpu"))
    tokens, logprobs = sample(logits.clone(), rows, np.arange(9, dtype=np.uint64))
    # The head is the identity: the hidden rows are the logits.
    own, _ = token_logprobs(logits, torch.eye(vocab), None, tokens, LogprobOptions(torch.float32, 0.7, limits=limits))
    whole, _ = token_logprobs(logits, torch.eye(vocab), None, tokens, LogprobOptions(torch.float32, 0.7))
    for i, params in enumerate(asked):
        assert logprobs[i] == (own if params.truncated_logprobs else whole)[i]
    assert not torch.equal(own, whole)


def test_rows_that_are_no_numbers_stay_so() -> None:
    rows = SamplingRows.build([SamplingParams(top_k=2, truncated_logprobs=True)], VOCAB, torch.device("cpu"))
    logits = torch.full((1, VOCAB), math.nan)
    assert sample(logits, rows, np.zeros(1, dtype=np.uint64))[1].isnan().all()
