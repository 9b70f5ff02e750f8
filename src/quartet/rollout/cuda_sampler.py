"""Sampling without the host: the draws of ``quartet.rollout.sampler``, with columns and random numbers on the device.

Shapes: B rows, V vocabulary, N blocks of 128 tokens.

The same inversion of the distribution function: a block is picked from the sums of the weights of 128 tokens each, a
token from the weights inside that block. Peaks and sums of the blocks come from one pass over the logits. Shapes and
branches depend on nothing but ``Kind``, so that a CUDA graph can hold the whole of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from quartet.rollout.protocol import SamplingParams

BLOCK = 128
_BELOW_ONE = 1 - 2**-53


def _signed(value: int) -> int:
    """The int64 with the bits of a uint64."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


class Kind(Enum):
    """What the rows of a batch ask of the sampler."""

    GREEDY = "greedy"
    FREE = "free"
    """Every row draws from its whole distribution."""
    MIXED = "mixed"

    @classmethod
    def of(cls, params: Iterable[SamplingParams]) -> Kind:
        kinds = {cls.GREEDY if p.greedy else cls.MIXED if p.truncates else cls.FREE for p in params}
        return kinds.pop() if len(kinds) == 1 else cls.MIXED


@dataclass(frozen=True)
class SamplingColumns:
    """Sampling parameters of B rows.

    Attributes:
        temperature: ``[B, 1]`` fp32, 1 where greedy.
        greedy: ``[B, 1]`` bool.
        seeds: ``[B]`` int64 with the bits of the request's unsigned seed.
        top_k: ``[B, 1]`` int64, V where all are kept.
        top_p: ``[B, 1]`` fp64.
        min_p: ``[B, 1]`` fp32.
    """

    temperature: Tensor
    greedy: Tensor
    seeds: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def build(cls, params: Sequence[SamplingParams], vocab_size: int) -> SamplingColumns:
        """On the CPU."""
        return cls(
            temperature=torch.tensor([p.temperature or 1.0 for p in params]).unsqueeze(1),
            greedy=torch.tensor([p.greedy for p in params]).unsqueeze(1),
            seeds=torch.tensor([_signed(p.seed) for p in params], dtype=torch.int64),
            top_k=torch.tensor([min(p.top_k or vocab_size, vocab_size) for p in params]).unsqueeze(1),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64).unsqueeze(1),
            min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32).unsqueeze(1),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        return self.temperature, self.greedy, self.seeds, self.top_k, self.top_p, self.min_p

    def head(self, num_rows: int) -> SamplingColumns:
        """Views of the first rows."""
        return SamplingColumns(*(x[:num_rows] for x in self.tensors()))


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """The numbers of ``quartet.rollout.seeds`` to the bit, in int64 arithmetic: ``[B]`` fp64 in [0, 1)."""
    mixed = _splitmix(_splitmix(seeds) + positions * _GOLDEN)
    return _shifted(mixed, 11).double() * 2.0**-53


def _splitmix(x: Tensor) -> Tensor:
    x = x + _GOLDEN
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """To the right, zeros following from the left: a shift of int64 would bring its sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def sample_rows(logits: Tensor, columns: SamplingColumns, positions: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Picks one token per row.

    Args:
        logits: ``[B, V]`` fp32, left as they are.
        positions: ``[B]`` int64, index of each token in its response; with the row's seed it decides the draw.
        kind: of all rows; ``MIXED`` serves any.

    Returns:
        ``tokens [B]`` int64 and their ``logprobs [B]`` fp32 under the temperature-scaled, untruncated distribution;
        a log-probability is NaN where the row's logits are not usable (NaN or +inf among them, or all -inf).
    """
    peaks, sums = block_statistics(logits, columns.temperature)
    # Largest scaled logit and log-sum-exp of each row, ``[B, 1]``.
    peak = peaks.amax(-1, keepdim=True).nan_to_num(nan=torch.nan, posinf=0.0, neginf=0.0)
    blocks = sums * (peaks - peak).exp()
    normaliser = blocks.sum(-1, keepdim=True).log() + peak
    if kind is Kind.GREEDY:
        tokens = logits.argmax(-1, keepdim=True)
    else:
        kept = None
        if kind is Kind.MIXED:
            kept = truncated(_weights(logits, columns.temperature, peak), columns.top_k, columns.top_p, columns.min_p)
            blocks = F.pad(kept, (0, -logits.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK)).sum(-1)
        draws = uniforms(columns.seeds, positions).unsqueeze(1)
        tokens = _invert(blocks, logits, columns.temperature, peak, draws, kept)
        if kind is Kind.MIXED:
            tokens = torch.where(columns.greedy, logits.argmax(-1, keepdim=True), tokens)
    picked = logits.gather(1, tokens) / columns.temperature
    # The last difference is 0, or NaN where the normaliser is infinite.
    logprobs = picked - normaliser + (normaliser - normaliser)
    return tokens.squeeze(1), logprobs.squeeze(1)


def block_statistics(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Of every 128 scaled logits of a row their largest, ``[B, N]``, and the sum of ``exp(scaled - largest)``."""
    if logits.is_cuda:
        # Triton comes with torch for CUDA only.
        from quartet.rollout.cuda_kernel import block_statistics as one_pass

        return one_pass(logits, temperature)
    padding = (0, -logits.shape[1] % BLOCK)
    blocks = F.pad(logits / temperature, padding, value=-torch.inf).unflatten(1, (-1, BLOCK))
    peaks = blocks.amax(-1)
    # A block of -inf alone has no weight; without this it would be NaN.
    return peaks, (blocks - peaks.clamp(min=torch.finfo(torch.float32).min).unsqueeze(2)).exp().sum(-1)


def _weights(logits: Tensor, temperature: Tensor, peak: Tensor) -> Tensor:
    return (logits / temperature - peak).exp()


def _invert(
    blocks: Tensor, logits: Tensor, temperature: Tensor, peak: Tensor, uniform: Tensor, kept: Tensor | None
) -> Tensor:
    """Numbers in [0, 1) ``[B, 1]`` → tokens ``[B, 1]``; ``kept [B, V]``: weights to use in place of the logits'."""
    cumulative = blocks.cumsum(-1, dtype=torch.float64)
    target = cumulative[:, -1:] * uniform
    block = _first_above(cumulative, target)
    # Where the number fell inside its block, again in [0, 1): the weights inside may sum otherwise.
    rest = ((target - cumulative.gather(1, block)) / blocks.gather(1, block) + 1).clamp(0.0, _BELOW_ONE)
    place = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    inside = place.clamp(max=logits.shape[1] - 1)
    weights = _weights(logits.gather(1, inside), temperature, peak) if kept is None else kept.gather(1, inside)
    cumulative = weights.masked_fill(place >= logits.shape[1], 0.0).cumsum(-1, dtype=torch.float64)
    return inside.gather(1, _first_above(cumulative, cumulative[:, -1:] * rest))


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first place ``[B, 1]`` whose sum is above the target: one that has weight."""
    return torch.searchsorted(cumulative, target, right=True).clamp(max=cumulative.shape[1] - 1)


def truncated(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """``weights [B, V]``, the largest of each row 1, without what top-k, then top-p of the rest, then min-p leave out.

    The rules of ``quartet.rollout.sampler.truncate`` for every row, by one sort of the whole vocabulary.
    """
    ranked = weights.sort(dim=-1, descending=True).values
    rank = torch.arange(ranked.shape[1], device=ranked.device)
    cumulative = ranked.double().masked_fill(rank >= top_k, 0.0).cumsum(-1)
    before = F.pad(cumulative[:, :-1], (1, 0))
    # A row with top_p = 1 keeps everything; its rounded sums must not decide otherwise.
    limit = torch.where(top_p < 1, top_p * cumulative[:, -1:], torch.inf)
    count = ((before < limit) & (rank < top_k)).sum(-1, keepdim=True)
    threshold = ranked.gather(1, (count - 1).clamp(min=0))
    above, equal = weights > threshold, weights == threshold
    num_equal = count - above.sum(-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(-1) <= num_equal))
    return weights.masked_fill(~kept | (weights < min_p), 0.0)
