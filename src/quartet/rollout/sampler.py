"""Tokens and log-probabilities from logits.

Shapes: B requests, V vocabulary, N blocks of 128 tokens, R rows that truncate.

A token is a function of its row's logits, its request's seed and its position, whatever else is in the batch.
It is found by inverting the distribution function with one uniform number: weights ``exp(scaled - max)`` are
summed by blocks in fp32, the block is picked from fp64 sums over the blocks, the token from fp64 sums inside
that one block. Every block and every token keeps its share to fp32 rounding, as a softmax in fp32 would.

The weights are those that the log-sum-exp needs anyway, so drawing adds one cheap pass; a plain cumulative sum would
be a serial one over fp64 numbers.

Requests may ask for Gumbel noise instead (``draw: gumbel``), one number per token that depends on seed, position and
token alone. The largest sum of logit and noise is found as the winner of an exponential race, the same draw with one
logarithm less: the largest ``weight / -log(1 - v)`` with uniform ``v``. It costs about as much again as the rest
(``benchmarks/sampler.py``), and two distributions that overlap mostly give the same token: drafts couple by it.

Log-probabilities are those of the temperature-scaled, untruncated distribution in fp32, to the bit what
``scaled - scaled.logsumexp(-1)`` gives with ``scaled = logits / temperature``; top-k, top-p and min-p only
decide which tokens may be picked, unless a request asks for ``truncated_logprobs``.

Randomness as a function of what a token is, never of when or with whom it was computed.

A run's seed and a response's place give the request's seed; the request's seed and a token's position give
the uniform number that picks the token, or with the token's id the number that it races with.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quartet.models.logprobs import SamplingLimits, Truncation, truncate_probs, truncation_mask
from quartet.models.memory import to_device
from quartet.rollout.protocol import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_RACE = np.uint64(0xD1B54A32D192ED03)
_MIX_32 = 0x297A2D39


def sample_seed(run_seed: int, step: int, prompt_id: str | int, response_index: int, turn: int = 0) -> int:
    """Makes a 63-bit seed, the same on every machine and in every process."""
    place = f"{run_seed}\x1f{step}\x1f{prompt_id}\x1f{response_index}" + (f"\x1f{turn}" if turn else "")
    digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_keys(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns what ``uniform_numbers`` takes, from seeds ``[B]``; computed once for all positions."""
    return _splitmix(seeds.copy())


def uniform_numbers(keys: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Computes one number in [0, 1) per (key, position), both ``[B]``: splitmix64 over a mixed seed, 53 bits kept."""
    mixed = _splitmix(positions * _GOLDEN + keys)
    mixed >>= np.uint64(11)
    return mixed.astype(np.float64) * 2.0**-53


def noise_keys(keys: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.int32]:
    """Returns ``[B, 2]`` of each (key, position): what is added to the hashes of tokens, and what they are multiplied
    by."""
    mixed = _splitmix((positions * _GOLDEN + keys) ^ _RACE).view(np.int32).reshape(-1, 2)
    mixed[:, 1] |= 1
    return mixed


@lru_cache(maxsize=4)
def token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """Returns a hash of each token, ``[V]`` int32, each another: tokens with one hash would have the same noise
    everywhere.

    The last steps of MurmurHash3 (Appleby), every one of which can be undone.
    """
    x = np.arange(vocab_size, dtype=np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(16)
    return torch.from_numpy(x.view(np.int32)).to(device)


def noise_values(hashes: Tensor, keys: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Computes one number in (0, 1] per row of ``keys [B, 2]`` and token: ``[B, V]`` fp32, precise where it is small.

    Two rounds of multiplication and shift in 32 bits. A shift of signed numbers copies the sign, which the exclusive or
    then takes out: 31 bits are left.

    Args:
        scratch: ``[2, B, V]`` int32 to compute in, the second of which becomes the result.
    """
    x, shifted = hashes.new_empty(2, len(keys), len(hashes)) if scratch is None else scratch
    torch.add(hashes, keys[:, :1], out=x)
    x.mul_(keys[:, 1:])
    x.bitwise_xor_(torch.bitwise_right_shift(x, 15, out=shifted)).mul_(_MIX_32)
    x.bitwise_xor_(torch.bitwise_right_shift(x, 16, out=shifted))
    return shifted.view(torch.float32).copy_(x).add_(0.5).mul_(2.0**-31)


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies the output function of splitmix64, in place (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, 2014).
    """
    x += _GOLDEN
    x ^= x >> np.uint64(30)
    x *= _MIX_1
    x ^= x >> np.uint64(27)
    x *= _MIX_2
    x ^= x >> np.uint64(31)
    return x


_BLOCK = 128
# A vocabulary up to this size is not cut into blocks: one cumulative sum costs less than a dozen small operations.
_FLAT = 1024
_BELOW_ONE = 1 - 2.0**-53
# Numbers that stay in a core's second-level cache while several passes go over them.
_CACHED_NUMEL = 128 * 1024


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of a batch as columns; rebuilt only when the batch changes.

    Attributes:
        temperature: ``[B, 1]`` fp32, 1 where greedy; None where all are 1.
        greedy: indices of the greedy rows.
        all_greedy: no row draws at random.
        racing: ``[B, 1]`` rows that draw by Gumbel noise; None where none does.
        all_racing: no row draws otherwise.
        keys: ``[B]`` hashed seeds.
        places: ``[128]`` numbers of the tokens in a block.
        truncation: of the rows that ask for it, or None.
        reported: of those whose log-probabilities are to be of what it keeps.
    """

    temperature: Tensor | None
    greedy: Tensor
    all_greedy: bool
    racing: Tensor | None
    all_racing: bool
    keys: NDArray[np.uint64]
    places: Tensor
    truncation: Truncation | None
    reported: Truncation | None = None

    @classmethod
    def build(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> SamplingRows:
        temperature = [p.temperature or 1.0 for p in params]
        greedy = [i for i, p in enumerate(params) if p.greedy]
        scales = any(t != 1 for t in temperature)
        truncating = {i: SamplingLimits(p.top_p, p.top_k, p.min_p) for i, p in enumerate(params) if p.truncates}
        reported = {i: limits for i, limits in truncating.items() if params[i].truncated_logprobs}
        racing = [p.draw == "gumbel" for p in params]
        return cls(
            temperature=to_device(torch.tensor(temperature), device).unsqueeze(1) if scales else None,
            greedy=to_device(torch.tensor(greedy, dtype=torch.int64), device),
            all_greedy=len(greedy) == len(params),
            racing=to_device(torch.tensor(racing), device).unsqueeze(1) if any(racing) else None,
            all_racing=all(p.greedy or races for p, races in zip(params, racing, strict=True)),
            keys=seed_keys(np.array([p.seed for p in params], dtype=np.uint64)),
            places=torch.arange(_BLOCK, device=device),
            truncation=Truncation.build(truncating, vocab_size, device),
            reported=Truncation.build(reported, vocab_size, device),
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
    tokens = _pick(logits, rows, sums, positions)
    picked = logits.gather(1, tokens)
    if rows.temperature is not None:
        picked = picked / rows.temperature
    # The last difference is 0, or NaN where the normaliser is infinite.
    logprobs = (picked - sums.normaliser).add_(sums.normaliser - sums.normaliser)
    if (reported := rows.reported) is not None:
        which = reported.rows
        scaled = logits[which] if rows.temperature is None else logits[which] / rows.temperature[which]
        kept = scaled.masked_fill(truncation_mask(scaled, tokens[which].squeeze(1), reported), -torch.inf)
        found = kept.gather(1, tokens[which]) - kept.logsumexp(-1, keepdim=True)
        logprobs[which] = found + (logprobs[which] - logprobs[which])
    return tokens.squeeze(1), logprobs.squeeze(1)


def sample_tokens(logits: Tensor, rows: SamplingRows, positions: NDArray[np.uint64], num: int = 1) -> Tensor:
    """Returns ``[B, num]`` tokens: that of ``sample``, and those that would come next were it left out.

    Rows that invert their distribution function give one token.
    """
    return _pick(logits, rows, _sums(logits, rows.temperature), positions, num)


@dataclass(frozen=True)
class _Sums:
    """The sums over the scaled logits of a batch's rows.

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
    """Sums by the steps of ``torch.logsumexp``, so that its bits come out, some rows at a time in one small buffer."""
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
    """Returns ``exp(scaled - shift)``, at most 1."""
    if temperature is None:
        return torch.sub(logits, shift, out=out).exp_()
    return torch.div(logits, temperature, out=out).sub_(shift).exp_()


def _block_sums(weights: Tensor) -> Tensor:
    """Sums weights by blocks, ``[B, V] → [B, N]``; the last block may be shorter. A small vocabulary is not cut."""
    if weights.shape[1] <= _FLAT:
        return weights
    num_blocks, rest = divmod(weights.shape[1], _BLOCK)
    sums = weights[:, : num_blocks * _BLOCK].unflatten(1, (num_blocks, _BLOCK)).sum(-1)
    if not rest:
        return sums
    return torch.cat([sums, weights[:, num_blocks * _BLOCK :].sum(-1, keepdim=True)], 1)


def _pick(logits: Tensor, rows: SamplingRows, sums: _Sums, positions: NDArray[np.uint64], num: int = 1) -> Tensor:
    """Picks ``[B, num]`` tokens."""
    if rows.all_greedy:
        return top_indices(logits, num)
    truncation, kept = rows.truncation, None
    if truncation is not None:
        scale = None if rows.temperature is None else rows.temperature[truncation.rows]
        kept = truncate_probs(_weights(logits[truncation.rows], scale, sums.shift[truncation.rows]), truncation)
    if rows.racing is None:
        tokens = _invert(logits, rows, sums, kept, positions)
    elif rows.all_racing:
        tokens = _race(logits, rows, sums, kept, positions, num)
    else:
        one, other = _race(logits, rows, sums, kept, positions), _invert(logits, rows, sums, kept, positions)
        tokens = torch.where(rows.racing, one, other)
    if len(rows.greedy):
        tokens[rows.greedy] = top_indices(logits[rows.greedy], num)
    return tokens


def _race(
    logits: Tensor, rows: SamplingRows, sums: _Sums, kept: Tensor | None, positions: NDArray[np.uint64], num: int = 1
) -> Tensor:
    """Returns the tokens of the largest sums of scaled logit and Gumbel noise, ``[B, num]``, some rows at a time."""
    num_rows, vocab_size = logits.shape
    keys = to_device(torch.from_numpy(noise_keys(rows.keys, positions)), logits.device)
    hashes = token_hashes(vocab_size, logits.device)
    whole: Tensor | None = None
    if kept is not None and rows.truncation is not None:
        whole = _weights(logits, rows.temperature, sums.shift).index_copy_(0, rows.truncation.rows, kept)
    step = max(_CACHED_NUMEL // vocab_size, 1) if logits.device.type == "cpu" else num_rows
    # Allocating would cost as much as computing.
    scratch = hashes.new_empty(2, min(step, num_rows), vocab_size)
    buffer = logits.new_empty(scratch.shape[1:]) if whole is None else None
    tokens = []
    for first in range(0, num_rows, step):
        part = slice(first, first + step)
        size = len(keys[part])
        if buffer is not None:
            scale = None if rows.temperature is None else rows.temperature[part]
            weights = _weights(logits[part], scale, sums.shift[part], out=buffer[:size])
        elif whole is not None:
            weights = whole[part]
        # A number that wins is small, and 1 less it would be rounded.
        times = noise_values(hashes, keys[part], scratch[:, :size]).neg_().log1p_().neg_()
        tokens.append(top_indices(torch.div(weights, times, out=times), num))
    return torch.cat(tokens)


def _invert(
    logits: Tensor, rows: SamplingRows, sums: _Sums, kept: Tensor | None, positions: NDArray[np.uint64]
) -> Tensor:
    """Inverts each row's distribution function at its uniform number: ``[B, 1]`` tokens.

    Args:
        kept: weights of the rows that truncate.
    """
    uniform = to_device(torch.from_numpy(uniform_numbers(rows.keys, positions)), logits.device).unsqueeze(1)
    blocks, truncation, vocab_size = sums.blocks, rows.truncation, logits.shape[1]
    if truncation is not None and kept is not None:
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
    """Returns the first place ``[B, 1]`` whose sum is above the target: one that has weight.

    The target is the last sum times a number of at most 1 - 2⁻⁵³, and such a product is below the sum in
    fp64; where the row is NaN or without any weight the place is the last.
    """
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)


def top_indices(logits: Tensor, num: int) -> Tensor:
    """Returns the places of the largest, falling: ``[B, V] → [B, num]``."""
    return first_argmax(logits) if num == 1 else logits.topk(num).indices


def first_argmax(logits: Tensor) -> Tensor:
    """Returns the place of the first of the largest, ``[B, V] → [B, 1]``: the first block of the largest maximum, then
    inside it."""
    num_blocks, rest = divmod(logits.shape[1], _BLOCK)
    if rest or logits.shape[1] <= _FLAT:
        return logits.argmax(-1, keepdim=True)
    blocks = logits.unflatten(1, (num_blocks, _BLOCK))
    block = blocks.amax(-1).argmax(-1)
    inside = blocks[torch.arange(len(block), device=logits.device), block].argmax(-1)
    return (block * _BLOCK + inside).unsqueeze(1)
