"""What top-k, top-p and min-p leave of a distribution, for the sampler and for log-probabilities.

Shapes: R rows, V vocabulary, C candidates of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quartet.models.memory import to_device

# Candidates looked at before a whole vocabulary is sorted for top-p.
_CANDIDATES = 256


@dataclass(frozen=True)
class Limits:
    """What is cut off from a row of log-probabilities, as sampling parameters have it."""

    top_p: float
    top_k: int
    min_p: float


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
    def build(cls, asked: Mapping[int, Limits], vocab_size: int, device: torch.device) -> Truncation | None:
        """Of the rows with these indices, as each of them asks."""
        if not asked:
            return None
        rows, params = list(asked), list(asked.values())
        top_k = [min(p.top_k or vocab_size, vocab_size) for p in params]
        min_p = [p.min_p for p in params]
        limits = [k for k in top_k if k < vocab_size]
        ranks = bool(limits) or any(p.top_p < 1 for p in params)
        open_ended = ranks and len(limits) < len(params)
        return cls(
            rows=to_device(torch.tensor(rows), device),
            top_k=to_device(torch.tensor(top_k), device),
            top_p=to_device(torch.tensor([p.top_p for p in params], dtype=torch.float64), device),
            min_p=to_device(torch.tensor(min_p), device).unsqueeze(1) if any(min_p) else None,
            ranks=ranks,
            num_candidates=min(max([*limits, _CANDIDATES if open_ended else 1]), vocab_size),
            open_ended=open_ended,
        )


@torch.no_grad()
def left_out(z: Tensor, labels: Tensor, limits: Limits | Truncation) -> Tensor:
    """Which tokens ``limits`` leave out, ``[R, V]`` from scaled logits ``z [R, V]``; those of ``labels [R]`` stay.

    A label was sampled from what was kept, if not to the last bit of these logits: where rounding would leave it out,
    it is one more that is kept.
    """
    if isinstance(limits, Limits):
        found = Truncation.build(dict.fromkeys(range(len(z)), limits), z.shape[-1], z.device)
        assert found is not None, "there is no block without rows"
        limits = found
    outside = truncate((z - z.amax(-1, keepdim=True)).exp_(), limits) <= 0
    return outside.scatter_(-1, labels.unsqueeze(-1), False)


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
