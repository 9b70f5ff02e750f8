"""Tokens and log-probabilities from logits.

Shapes: B requests, V vocabulary.

Log-probabilities are those of the temperature-scaled, untruncated distribution in fp32, computed as the
trainer does (``logits / temperature`` minus its log-sum-exp); top-k and top-p only decide which tokens may
be picked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from quartet.rollout.protocol import SamplingParams
from quartet.rollout.seeds import uniforms


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters of a batch as columns ``[B]``; rebuilt only when the batch changes.

    Attributes:
        temperature: 1 where greedy.
        greedy: bool, or None where no row is.
        truncated: indices of the rows with top-k or top-p, with their parameters; empty where none has them.
        all_greedy: no row draws at random.
    """

    temperature: Tensor
    greedy: Tensor | None
    all_greedy: bool
    seeds: NDArray[np.uint64]
    truncated: Tensor
    top_k: Tensor
    top_p: Tensor

    @classmethod
    def build(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> SamplingRows:
        greedy = [p.greedy for p in params]
        truncated = [i for i, p in enumerate(params) if p.truncates]
        top_k = [min(params[i].top_k or vocab_size, vocab_size) for i in truncated]
        return cls(
            temperature=torch.tensor([p.temperature or 1.0 for p in params], device=device),
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            all_greedy=all(greedy),
            seeds=np.array([p.seed for p in params], dtype=np.uint64),
            truncated=torch.tensor(truncated, dtype=torch.int64, device=device),
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
            top_p=torch.tensor([params[i].top_p for i in truncated], dtype=torch.float64, device=device),
        )


def sample(logits: Tensor, rows: SamplingRows, positions: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
    """Picks one token per row.

    Args:
        logits: ``[B, V]`` fp32.
        positions: ``[B]`` index of each token in its response; with the row's seed it decides the draw.

    Returns:
        ``tokens [B]`` int64 and their ``logprobs [B]`` fp32; a log-probability is NaN where the row's logits
        are not usable (NaN or +inf among them, or all -inf).
    """
    scaled = logits / rows.temperature.unsqueeze(1)
    logprobs = scaled - scaled.logsumexp(-1, keepdim=True)
    if rows.all_greedy:
        tokens = logits.argmax(-1)
    else:
        probabilities = logprobs.exp().double()
        if len(rows.truncated):
            kept = truncate(probabilities[rows.truncated], rows.top_k, rows.top_p)
            probabilities[rows.truncated] = kept
        draws = torch.from_numpy(uniforms(rows.seeds, positions)).to(logits.device)
        tokens = draw(probabilities, draws)
        if rows.greedy is not None:
            tokens = torch.where(rows.greedy, logits.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def truncate(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zeroes what top-k, then top-p of the rest, leave out; at least one token stays. ``[B, V]``, not
    renormalised.

    The last token kept by top-p is the one whose probability makes the sum reach ``top_p`` (Holtzman et al.,
    The Curious Case of Neural Text Degeneration, 2020). Equal probabilities rank by token id.
    """
    ranked, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ranked.shape[1], device=ranked.device)
    ranked = ranked.masked_fill(rank >= top_k.unsqueeze(1), 0.0)
    cumulative = ranked.cumsum(-1)
    before = F.pad(cumulative[:, :-1], (1, 0))
    # A row with top_p = 1 keeps everything; its rounded sums must not decide otherwise.
    limit = torch.where(top_p < 1, top_p * cumulative[:, -1], torch.inf)
    ranked = ranked.masked_fill(before >= limit.unsqueeze(1), 0.0)
    return torch.zeros_like(probabilities).scatter_(1, tokens, ranked)


def draw(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Inverse distribution function: ``[B, V]`` fp64 weights and ``[B]`` numbers in [0, 1) → ``[B]`` tokens.

    A token without weight is never picked: the first cumulative sum *above* the target belongs to one that
    has some.
    """
    cumulative = probabilities.cumsum(-1)
    total = cumulative[:, -1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1)
    return tokens.clamp_(max=probabilities.shape[1] - 1)
