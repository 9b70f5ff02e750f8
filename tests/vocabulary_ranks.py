"""What ranks of ``test_vocab_parallel.py`` run: log-probabilities of a vocabulary in parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from quartet.models.logprobs import LogprobRule, token_logprobs
from quartet.models.work import WorkCounter
from quartet.train.parallel.pass_group import PassGroup
from quartet.train.parallel.tensor import VocabParallel

VOCAB, WIDTH = 31, 16


@dataclass(frozen=True)
class HeadCase:
    """One head; each rank has its part of the vocabulary, uneven ones among them."""

    dtype: torch.dtype = torch.float64
    compute_dtype: torch.dtype | None = None
    bias: bool = False
    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None
    chunk: int = 5
    entropy: bool = True
    entropy_grad: bool = True
    num_rows: int = 23

    @property
    def rule(self) -> LogprobRule:
        shape = self.temperature, self.scale, self.softcap, self.chunk, self.entropy, self.entropy_grad
        return LogprobRule(self.compute_dtype or self.dtype, *shape)


def inputs(case: HeadCase) -> tuple[Tensor, ...]:
    """Hidden rows, weight, bias (with logits of very different sizes), labels."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(case.num_rows, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    bias = torch.linspace(-30, 3, VOCAB, dtype=torch.float64)
    labels = torch.arange(case.num_rows) % VOCAB
    return *(x.to(case.dtype).requires_grad_() for x in (hidden, weight, bias)), labels


def run_head(case: HeadCase, part: VocabParallel | None = None) -> dict[str, Tensor]:
    """Log-probabilities, entropies and gradients: of hidden rows this rank's part of the sum."""
    hidden, weight, bias, labels = inputs(case)
    logprobs, entropies = token_logprobs(hidden, weight, bias if case.bias else None, labels, case.rule, part)
    found = {"logprobs": logprobs.detach()}
    loss = (logprobs * torch.linspace(-1, 1, case.num_rows)).sum()
    if entropies is not None:
        found["entropies"] = entropies.detach()
        if entropies.requires_grad:
            loss = loss + (entropies * torch.linspace(2, -1, case.num_rows)).sum()
    loss.backward()
    names = ("hidden", "weight", "bias") if case.bias else ("hidden", "weight")
    return {**found, **{n: x.grad for n, x in zip(names, (hidden, weight, bias), strict=False) if x.grad is not None}}


def all_heads(cases: list[HeadCase]) -> tuple[list[dict[str, Tensor]], dict[str, int]]:
    """Of this rank: every case with gradients summed over ranks, and bytes sent."""
    world = dist.group.WORLD
    assert world is not None
    work = WorkCounter()
    group = PassGroup("tensor", world, world, work)
    group.begin()
    part = VocabParallel(VOCAB, group)
    heads, before = [], dict(work.sent)
    for case in cases:
        found = run_head(case, part)
        for name in ("hidden", "weight", "bias"):
            if name in found:
                dist.all_reduce(found[name])
        heads.append(found)
    sent = {kind: size - before.get(kind, 0) for kind, size in work.sent.items()}
    group.end()
    return heads, sent
