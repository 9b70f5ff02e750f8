"""Tokens and log-probabilities from logits.

Shapes: B requests, V vocabulary, N blocks of 128 tokens, R rows that truncate, C candidates of a row.

A token is a function of its row's logits, its request's seed and its position, whatever else is in the batch.
It is found by inverting the distribution function with one uniform number: weights ``exp(scaled - max)`` are
summed by blocks in fp32, the block is picked from fp64 sums over the blocks, the token from fp64 sums inside
that one block. Every block and every token keeps its share to fp32 rounding, as a softmax in fp32 would.

The weights are those that the log-sum-exp needs anyway, so drawing adds one cheap pass. The alternatives need
more over ``[B, V]``: Gumbel noise (and the exponential race of ``torch.multinomial``, which is the same draw)
one random number per token, each with a hash and two logarithms; a plain cumulative sum one serial pass over
fp64 numbers. ``benchmarks/sampler.py`` compares them.

Log-probabilities are those of the temperature-scaled, untruncated distribution in fp32, to the bit what
``scaled - scaled.logsumexp(-1)`` gives with ``scaled = logits / temperature``; top-k, top-p and min-p only
decide which tokens may be picked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from quartet.models.memory import to_device
from quartet.rollout.protocol import SamplingParams
from quartet.rollout.seeds import seed_keys, uniforms

_BLOCK = 128
# A vocabulary up to this size is not cut into blocks: one cumulative sum costs less than a dozen small operations.
_FLAT = 1024
_BELOW_ONE = 1 - 2.0**-53
# Numbers that stay in a core's second-level cache while several passes go over them.
_CACHED_NUMEL = 128 * 1024
# Candidates looked at before a whole vocabulary is sorted for top-p.
_CANDIDATES = 256


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of a batch as columns; rebuilt only when the batch changes.

    Attributes:
        temperature: ``[B, 1]`` fp32, 1 where greedy; None where all are 1.
        greedy: indices of the greedy rows.
        all_greedy: no row draws at random.
        keys: ``[B]`` hashed seeds.
        places: ``[128]`` numbers of the tokens in a block.
        truncation: of the rows that ask for it, or None.
    """

    temperature: Tensor | None
    greedy: Tensor
    all_greedy: bool
    keys: NDArray[np.uint64]
    places: Tensor
    truncation: Truncation | None

    @classmethod
    def build(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> SamplingRows:
        temperature = [p.temperature or 1.0 for p in params]
        greedy = [i for i, p in enumerate(params) if p.greedy]
        scales = any(t != 1 for t in temperature)
        return cls(
            temperature=to_device(torch.tensor(temperature), device).unsqueeze(1) if scales else None,
            greedy=to_device(torch.tensor(greedy, dtype=torch.int64), device),
            all_greedy=len(greedy) == len(params),
            keys=seed_keys(np.array([p.seed for p in params], dtype=np.uint64)),
            places=torch.arange(_BLOCK, device=device),
            truncation=Truncation.build(params, vocab_size, device),
        )


@dataclass(frozen=True)
class Truncation:
    """Which tokens may be picked: top-k, then top-p of the rest, then min-p, as in transformers.

    (vLLM applies min-p first; the two differ where both top-p and min-p are asked for, because top-p then
    counts less mass.)

    Attributes:
        rows: ``[R]`` indices into the batch.
        top_k: ``[R]`` int64, V where all are kept.
        top_p: ``[R]`` fp64, 1 where all are kept.
        min_p: ``[R, 1]`` fp32, 0 where all are kept; None where no row has one.
        ranks: some row has top-k or top-p.
        num_candidates: most likely tokens of a row to look at first.
        open_ended: some row may need more: it has top-p without top-k, or keeps all while others rank.
    """

    rows: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor | None
    ranks: bool
    num_candidates: int
    open_ended: bool

    @classmethod
    def build(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> Truncation | None:
        rows = [i for i, p in enumerate(params) if p.truncates]
        if not rows:
            return None
        asked = [params[i] for i in rows]
        top_k = [min(p.top_k or vocab_size, vocab_size) for p in asked]
        min_p = [p.min_p for p in asked]
        limits = [k for k in top_k if k < vocab_size]
        ranks = bool(limits) or any(p.top_p < 1 for p in asked)
        open_ended = ranks and len(limits) < len(asked)
        return cls(
            rows=to_device(torch.tensor(rows), device),
            top_k=to_device(torch.tensor(top_k), device),
            top_p=to_device(torch.tensor([p.top_p for p in asked], dtype=torch.float64), device),
            min_p=to_device(torch.tensor(min_p), device).unsqueeze(1) if any(min_p) else None,
            ranks=ranks,
            num_candidates=min(max([*limits, _CANDIDATES if open_ended else 1]), vocab_size),
            open_ended=open_ended,
        )


def sample(logits: Tensor, rows: SamplingRows, positions: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
    """Picks one token per row.

    Args:
        logits: ``[B, V]`` fp32, left as they are.
        positions: ``[B]`` index of each token in its response; with the row's seed it decides the draw.

    Returns:
        ``tokens [B]`` int64 and their ``logprobs [B]`` fp32; a log-probability is NaN where the row's logits
        are not usable (NaN or +inf among them, or all -inf).
    """
    sums = _sums(logits, rows.temperature)
    if rows.all_greedy:
        tokens = argmax(logits)
    else:
        draws = to_device(torch.from_numpy(uniforms(rows.keys, positions)), logits.device)
        tokens = _draw(logits, rows, sums, draws.unsqueeze(1))
        if len(rows.greedy):
            tokens[rows.greedy] = argmax(logits[rows.greedy])
    picked = logits.gather(1, tokens)
    if rows.temperature is not None:
        picked = picked / rows.temperature
    # The last difference is 0, or NaN where the normaliser is infinite.
    logprobs = (picked - sums.normaliser).add_(sums.normaliser - sums.normaliser)
    return tokens.squeeze(1), logprobs.squeeze(1)


@dataclass(frozen=True)
class _Sums:
    """Of a batch's rows.

    Attributes:
        normaliser: ``[B, 1]`` log-sum-exp of the scaled logits.
        shift: ``[B, 1]`` what weights ``exp(scaled - shift)`` are taken relative to: the largest scaled logit, or
            the normaliser.
        blocks: ``[B, N]`` sums of 128 weights each; of a small vocabulary the weights themselves.
    """

    normaliser: Tensor
    shift: Tensor
    blocks: Tensor


def _sums(logits: Tensor, temperature: Tensor | None) -> _Sums:
    if logits.shape[1] > _FLAT:
        return _sums_by_blocks(logits, temperature)
    scaled = logits if temperature is None else logits / temperature
    normaliser = scaled.logsumexp(-1, keepdim=True)
    return _Sums(normaliser, normaliser, (scaled - normaliser).exp_())


def _sums_by_blocks(logits: Tensor, temperature: Tensor | None) -> _Sums:
    """The steps of ``torch.logsumexp``, so that its bits come out, some rows at a time in one small buffer."""
    num_rows, vocab_size = logits.shape
    step = max(_CACHED_NUMEL // vocab_size, 1) if logits.device.type == "cpu" else num_rows
    scratch = logits.new_empty(min(step, num_rows), vocab_size)
    peaks, totals, blocks = [], [], []
    for first in range(0, num_rows, step):
        part = logits[first : first + step]
        scale = None if temperature is None else temperature[first : first + step]
        peak = part.amax(-1, keepdim=True)
        if scale is not None:
            # Rounding keeps the order, so this is the largest scaled logit to the bit.
            peak = peak / scale
        peak.nan_to_num_(nan=torch.nan, posinf=0.0, neginf=0.0)
        weights = _weights(part, scale, peak, out=scratch[: len(part)])
        peaks.append(peak)
        totals.append(weights.sum(-1, keepdim=True))
        blocks.append(_block_sums(weights))
    if len(peaks) == 1:
        return _Sums(totals[0].log_().add_(peaks[0]), peaks[0], blocks[0])
    peak = torch.cat(peaks)
    return _Sums(torch.cat(totals).log_().add_(peak), peak, torch.cat(blocks))


def _weights(logits: Tensor, temperature: Tensor | None, shift: Tensor, out: Tensor | None = None) -> Tensor:
    """``exp(scaled - shift)``, at most 1."""
    if temperature is None:
        return torch.sub(logits, shift, out=out).exp_()
    return torch.div(logits, temperature, out=out).sub_(shift).exp_()


def _block_sums(weights: Tensor) -> Tensor:
    """``[B, V] → [B, N]``; the last block may be shorter. A small vocabulary is not cut."""
    if weights.shape[1] <= _FLAT:
        return weights
    num_blocks, rest = divmod(weights.shape[1], _BLOCK)
    sums = weights[:, : num_blocks * _BLOCK].unflatten(1, (num_blocks, _BLOCK)).sum(-1)
    if not rest:
        return sums
    return torch.cat([sums, weights[:, num_blocks * _BLOCK :].sum(-1, keepdim=True)], 1)


def _draw(logits: Tensor, rows: SamplingRows, sums: _Sums, uniform: Tensor) -> Tensor:
    """Inverts each row's distribution function: ``[B, 1]`` numbers in [0, 1) → ``[B, 1]`` tokens."""
    blocks, truncation, vocab_size = sums.blocks, rows.truncation, logits.shape[1]
    kept: Tensor | None = None
    if truncation is not None:
        scale = None if rows.temperature is None else rows.temperature[truncation.rows]
        kept = truncate(_weights(logits[truncation.rows], scale, sums.shift[truncation.rows]), truncation)
        blocks = blocks.index_copy(0, truncation.rows, _block_sums(kept))
    cumulative = blocks.cumsum(-1, dtype=torch.float64)
    target = cumulative[:, -1:] * uniform
    block = _first_above(cumulative, target)
    if vocab_size <= _FLAT:
        return block
    # Where the number fell inside its block, again in [0, 1): the block's own sum may round otherwise.
    rest = (target - cumulative.gather(1, block)).div_(blocks.gather(1, block)).add_(1.0).clamp_(0.0, _BELOW_ONE)
    first = block * _BLOCK
    tokens = first + rows.places
    if vocab_size % _BLOCK:
        tokens.clamp_(max=vocab_size - 1)
    weights = _weights(logits.gather(1, tokens), rows.temperature, sums.shift)
    if truncation is not None and kept is not None:
        weights[truncation.rows] = kept.gather(1, tokens[truncation.rows])
    if vocab_size % _BLOCK:
        weights.masked_fill_(first + rows.places >= vocab_size, 0.0)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    return tokens.gather(1, _first_above(cumulative, cumulative[:, -1:] * rest))


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first place ``[B, 1]`` whose sum is above the target: one that has weight.

    The target is the last sum times a number of at most 1 - 2⁻⁵³, and such a product is below the sum in
    fp64; where the row is NaN or without any weight the place is the last.
    """
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)


def truncate(weights: Tensor, truncation: Truncation) -> Tensor:
    """Zeroes what top-k, then top-p of the rest, then min-p leave out, in place; at least one token stays.

    The last token kept by top-p is the one whose probability makes the sum reach ``top_p`` (Holtzman et al.,
    The Curious Case of Neural Text Degeneration, 2020). min-p keeps what is at least that share of the most
    likely token (Nguyen et al., Turning Up the Heat: Min-p Sampling, 2024). Equal weights rank by token id.

    Args:
        weights: ``[R, V]``, in proportion to the probabilities and at most 1.
    """
    if truncation.ranks:
        threshold, count = _last_kept(weights, truncation)
        _keep_first(weights, threshold, count)
    if truncation.min_p is not None:
        weights.masked_fill_(weights < truncation.min_p * weights.amax(-1, keepdim=True), 0.0)
    return weights


def _last_kept(weights: Tensor, truncation: Truncation) -> tuple[Tensor, Tensor]:
    """The smallest weight that top-k and top-p keep ``[R, 1]``, and how many tokens they keep ``[R, 1]``."""
    top_k, top_p, size, vocab_size = truncation.top_k, truncation.top_p, truncation.num_candidates, weights.shape[1]
    total = weights.sum(-1, dtype=torch.float64)
    if weights.device.type != "cpu" and truncation.open_ended:
        # Asking which rows need more would wait for the device.
        size = vocab_size
    if not truncation.open_ended or size == vocab_size:
        return _ranked_limits(largest(weights, size), top_k, top_p, total)
    threshold = weights.new_zeros(len(weights), 1)
    count = torch.full_like(threshold, vocab_size, dtype=torch.int64)

    def settle(which: Tensor, num: int) -> Tensor:
        """Takes the limits from the ``num`` most likely tokens; the rows for which those are too few."""
        ranked = largest(weights[which], num)
        threshold[which], count[which] = _ranked_limits(ranked, top_k[which], top_p[which], total[which])
        enough = (top_k[which] <= num) | (ranked.sum(-1, dtype=torch.float64) >= top_p[which] * total[which])
        return which[~enough]

    ranking = (top_k < vocab_size) | (top_p < 1)
    # No weight is above 1, so ``size`` tokens reach no larger sum.
    few = (top_k <= size) | (top_p * total <= size)
    wide = torch.cat([settle((ranking & few).nonzero().squeeze(1), size), (ranking & ~few).nonzero().squeeze(1)])
    if len(wide):
        settle(wide, vocab_size)
    return threshold, count


def _ranked_limits(ranked: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """``_last_kept`` from weights in falling order ``[R, C]`` and the sums of whole rows ``[R]``."""
    rank = torch.arange(ranked.shape[1], device=ranked.device)
    inside = ranked.double().masked_fill_(rank >= top_k.unsqueeze(1), 0.0)
    cumulative = inside.cumsum(-1)
    before = F.pad(cumulative[:, :-1], (1, 0))
    mass = torch.where(top_k <= ranked.shape[1], cumulative[:, -1], total)
    # A row with top_p = 1 keeps everything; its rounded sums must not decide otherwise.
    limit = torch.where(top_p < 1, top_p * mass, torch.inf)
    count = ((before < limit.unsqueeze(1)) & (inside > 0)).sum(-1, keepdim=True)
    return ranked.gather(1, (count - 1).clamp_(min=0)), count


def _keep_first(weights: Tensor, threshold: Tensor, count: Tensor) -> None:
    """Zeroes all but the ``count`` largest, the smallest of which is ``threshold``; equal ones by token id."""
    above = weights >= threshold
    if weights.device.type == "cpu" and bool((above.sum(-1, keepdim=True) <= count).all()):
        weights.masked_fill_(~above, 0.0)
        return
    equal = weights == threshold
    num_equal = count - (above & ~equal).sum(-1, keepdim=True)
    weights.masked_fill_(~above | (equal & (equal.cumsum(-1) > num_equal)), 0.0)


def largest(weights: Tensor, count: int) -> Tensor:
    """``[R, V] → [R, count]``, the largest in falling order."""
    if weights.device.type != "cpu":
        return weights.topk(count, dim=-1).values
    # numpy's vectorised selection and sort of bare values take a twentieth of torch's, which carry indices along.
    values = weights.numpy()
    if count < values.shape[1]:
        values = np.partition(values, -count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def argmax(logits: Tensor) -> Tensor:
    """``[B, V] → [B, 1]``, the first of the largest: the first block of the largest maximum, then inside it."""
    num_blocks, rest = divmod(logits.shape[1], _BLOCK)
    if rest or logits.shape[1] <= _FLAT:
        return logits.argmax(-1, keepdim=True)
    blocks = logits.unflatten(1, (num_blocks, _BLOCK))
    block = blocks.amax(-1).argmax(-1)
    inside = blocks[torch.arange(len(block), device=logits.device), block].argmax(-1)
    return (block * _BLOCK + inside).unsqueeze(1)
