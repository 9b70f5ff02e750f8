"""Ways to draw a token and its log-probability from logits, next to each other.

    python benchmarks/sampler.py --threads 1 --repeats 21

Every way gets the same logits ``[rows, V]`` in fp32 and returns one token per row, exact in distribution, with
its log-probability in the temperature-scaled distribution:

- ``quartet``: what the native engine does, one uniform number per row by blocks;
- ``quartet, gumbel``: the native engine with ``rollout.sampling.draw: gumbel``, a number per token;
- ``cumulative sum``: the same by one fp64 cumulative sum over the vocabulary;
- ``gumbel, counter``: the largest of logits plus Gumbel noise, each number a hash of (row, token), so that it
  depends on nothing else;
- ``gumbel, generator``: the same with noise from torch's generator, which depends on the batch;
- ``multinomial``: ``torch.multinomial`` of the softmax;
- ``log-sum-exp``: no token at all, only the log-probabilities' normaliser, as the floor.

Rounds take every way in turn; shown are medians in microseconds. ``--mode`` restricts the engine's tokens
(top-k, top-p, min-p), which only ``quartet`` and plain torch over a full sort do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from quartet.rollout.protocol import SamplingParams
from quartet.rollout.sampler import SamplingRows, sample

MODES = {
    "plain": SamplingParams(),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "top-k 50": SamplingParams(top_k=50),
    "top-p 0.95": SamplingParams(top_p=0.95),
    "min-p 0.05": SamplingParams(min_p=0.05),
    "greedy": SamplingParams(temperature=0.0),
}
Way = Callable[[], object]


def quartet_way(logits: Tensor, params: SamplingParams) -> Way:
    num_rows, vocab_size = logits.shape
    rows = SamplingRows.build([params] * num_rows, vocab_size, logits.device)
    positions = np.arange(num_rows, dtype=np.uint64)
    return lambda: sample(logits, rows, positions)


def with_logprob(logits: Tensor, pick: Callable[[Tensor], Tensor]) -> Way:
    """``pick`` gets log-probabilities ``[B, V]`` and returns tokens ``[B, 1]``."""

    def draw() -> tuple[Tensor, Tensor]:
        logprobs = logits - logits.logsumexp(-1, keepdim=True)
        tokens = pick(logprobs)
        return tokens, logprobs.gather(1, tokens)

    return draw


def by_cumulative_sum(logprobs: Tensor) -> Tensor:
    cumulative = logprobs.exp().double().cumsum(-1)
    target = torch.rand(len(logprobs), 1, dtype=torch.float64) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=logprobs.shape[1] - 1)


def by_generator(logprobs: Tensor) -> Tensor:
    return (logprobs - torch.empty_like(logprobs).exponential_().log_()).argmax(-1, keepdim=True)


def by_counter(logprobs: Tensor) -> Tensor:
    """Hash: the finaliser of MurmurHash3 (32 bits) in int64, so that products do not overflow."""
    num_rows, vocab_size = logprobs.shape
    keys = torch.arange(num_rows).unsqueeze(1) * 0x9E3779B1
    x = (keys + torch.arange(vocab_size)).bitwise_and_(0xFFFFFFFF)
    x.bitwise_xor_(x >> 16).mul_(0x85EBCA6B).bitwise_and_(0xFFFFFFFF)
    x.bitwise_xor_(x >> 13).mul_(0xC2B2AE35).bitwise_and_(0xFFFFFFFF)
    uniform = x.bitwise_xor_(x >> 16).float().add_(0.5).mul_(2.0**-32)
    return (logprobs - uniform.log_().neg_().log_()).argmax(-1, keepdim=True)


def by_sort(params: SamplingParams) -> Callable[[Tensor], Tensor]:
    """Truncation over the whole vocabulary in falling order."""

    def pick(logprobs: Tensor) -> Tensor:
        ranked, tokens = logprobs.exp().sort(dim=-1, descending=True)
        if params.top_k:
            ranked[:, params.top_k :] = 0.0
        before = ranked.cumsum(-1) - ranked
        ranked[before >= params.top_p * ranked.sum(-1, keepdim=True)] = 0.0
        ranked[ranked < params.min_p * ranked[:, :1]] = 0.0
        return tokens.gather(1, ranked.multinomial(1))

    return pick


def ways(logits: Tensor, mode: str) -> dict[str, Way]:
    params = MODES[mode]
    found: dict[str, Way] = {
        "log-sum-exp": lambda: logits.logsumexp(-1),
        "quartet": quartet_way(logits, params),
        "quartet, gumbel": quartet_way(logits, replace(params, draw="gumbel")),
    }
    if params.truncates:
        found["full sort"] = with_logprob(logits, by_sort(params))
    elif params.greedy:
        found["argmax"] = with_logprob(logits, lambda logprobs: logprobs.argmax(-1, keepdim=True))
    elif mode == "plain":
        found["cumulative sum"] = with_logprob(logits, by_cumulative_sum)
        found["gumbel, counter"] = with_logprob(logits, by_counter)
        found["gumbel, generator"] = with_logprob(logits, by_generator)
        found["multinomial"] = with_logprob(logits, lambda logprobs: logprobs.exp().multinomial(1))
    return found


def medians(candidates: dict[str, Way], repeats: int) -> dict[str, float]:
    """Microseconds per call; every round takes each once."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for i in range(repeats + 1):
        for name, way in candidates.items():
            start = time.perf_counter()
            way()
            if i:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e6 for name, values in seconds.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, nargs="+", default=[512, 8192, 151936])
    parser.add_argument("--mode", choices=list(MODES), nargs="+", default=list(MODES))
    parser.add_argument("--scale", type=float, default=3.0, help="standard deviation of the logits")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    table = Table("vocabulary", "mode", "way", "µs", "× log-sum-exp")
    for vocab_size in arguments.vocab:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(arguments.rows, vocab_size, generator=generator) * arguments.scale
        for mode in arguments.mode:
            found = medians(ways(logits, mode), arguments.repeats)
            for name, value in found.items():
                table.add_row(f"{vocab_size}", mode, name, f"{value:.0f}", f"{value / found['log-sum-exp']:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
