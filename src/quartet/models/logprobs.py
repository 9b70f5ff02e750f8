"""Log-probabilities and entropies of selected rows, by chunks, with a hand-written backward.

Shapes: M selected rows, D hidden, V vocabulary, C rows of a chunk, B rows of a block.

With raw logits ``r = h Wᵀ + b``, capped ones ``c = cap · tanh(scale · r / cap)`` and tempered ones
``z = c / temperature``, the log-sum-exp ``lse`` over the vocabulary, ``log p = z − lse`` and the entropy
``H = −Σ p log p``:

    ∂ logprob / ∂z_v = [v = label] − p_v                  ∂H / ∂z_v = −p_v (log p_v + H)
    ∂z / ∂r = (1 − (c / cap)²) · scale / temperature      ∂h = ∂r W     ∂W = ∂rᵀ h     ∂b = Σ ∂r

With ``limits`` all of this is of the tokens that top-k, top-p and min-p keep, which are taken as given: logits of the
others have no gradient.

Only hidden rows, weights, labels and ``[M]`` numbers are kept for the backward, which computes each chunk's logits
again: no ``[M, V]`` array exists in either direction.

Where ranks have parts r of the vocabulary, each computes this of its part, and only ``[M]`` numbers are exchanged:
``lse = logsumexp lse_r``, and with ``m_r = lse_r − lse``, the log-probability of part r, ``log p = log p_r + m_r`` of
the part that has the label and ``H = Σ exp(m_r) (H_r − m_r)``. The backward needs the joined numbers and no exchange.

Rounding: the product runs in the compute dtype and is rounded to it, as ``F.linear`` does (under autocast: bf16);
everything after it is fp32 (fp64 stays). In the backward ``∂r`` is rounded to the compute dtype before the two
products; the sum of ``∂W`` over chunks is fp32 whatever the compute dtype.

Two sizes matter. Products, and above all the sum of ``∂W``, want many rows (a *chunk*); what follows a product is bound
by memory, so it takes as many rows at a time as stay in the cache (a *block*). Blocks do not change a row's bits.

What top-k, top-p and min-p leave of a distribution, for the sampler and for log-probabilities.

Shapes: R rows, V vocabulary, C candidates of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from quartet.models.memory import to_device

# Candidates looked at before a whole vocabulary is sorted for top-p.
_CANDIDATES = 256


@dataclass(frozen=True)
class SamplingLimits:
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
    def build(cls, asked: Mapping[int, SamplingLimits], vocab_size: int, device: torch.device) -> Truncation | None:
        """Makes the truncation of the rows with these indices, as each of them asks."""
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
def truncation_mask(z: Tensor, labels: Tensor, limits: SamplingLimits | Truncation) -> Tensor:
    """Finds what ``limits`` leave out, ``[R, V]`` from scaled logits ``z [R, V]``; tokens of ``labels [R]`` stay.

    A label was sampled from what was kept, if not to the last bit of these logits: where rounding would leave it out,
    it is one more that is kept.
    """
    if isinstance(limits, SamplingLimits):
        found = Truncation.build(dict.fromkeys(range(len(z)), limits), z.shape[-1], z.device)
        assert found is not None, "there is no block without rows"
        limits = found
    outside = truncate_probs((z - z.amax(-1, keepdim=True)).exp_(), limits) <= 0
    return outside.scatter_(-1, labels.unsqueeze(-1), False)


def truncate_probs(weights: Tensor, truncation: Truncation) -> Tensor:
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
    """Returns the smallest weight that top-k and top-p keep ``[R, 1]``, and how many tokens they keep ``[R, 1]``."""
    top_k, top_p, size, vocab_size = truncation.top_k, truncation.top_p, truncation.num_candidates, weights.shape[1]
    total = weights.sum(-1, dtype=torch.float64)
    if weights.device.type != "cpu" and truncation.open_ended:
        # Asking which rows need more would wait for the device.
        size = vocab_size
    if not truncation.open_ended or size == vocab_size:
        return _ranked_limits(top_k_values(weights, size), top_k, top_p, total)
    threshold = weights.new_zeros(len(weights), 1)
    count = torch.full_like(threshold, vocab_size, dtype=torch.int64)

    def settle(which: Tensor, num: int) -> Tensor:
        """Takes the limits from the ``num`` most likely tokens; the rows for which those are too few."""
        ranked = top_k_values(weights[which], num)
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
    """Computes ``_last_kept`` from weights in falling order ``[R, C]`` and the sums of whole rows ``[R]``."""
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


def top_k_values(weights: Tensor, count: int) -> Tensor:
    """Picks ``[R, V] → [R, count]``, the largest in falling order."""
    if weights.device.type != "cpu":
        return weights.topk(count, dim=-1).values
    # numpy's vectorised selection and sort of bare values take a twentieth of torch's, which carry indices along.
    values = weights.numpy()
    if count < values.shape[1]:
        values = np.partition(values, -count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


_CHUNK_BYTES = {"cpu": 1 << 28, "other": 1 << 30}
"""Most bytes of a chunk's logits, by kind of device."""
_BLOCK_BYTES = {"cpu": 1 << 19, "other": 1 << 25}
"""Bytes of a block's logits: half of a common second-level cache, and of an accelerator's."""
LEAST = -1e30
"""Log-probabilities are at least this before they meet their probability: 0 · -inf is no number, 0 times this is 0."""


@dataclass(frozen=True)
class LogprobOptions:
    """What is computed from a head's product, and in which portions.

    Attributes:
        compute_dtype: of the product.
        temperature: logits are divided by it, last.
        scale: logits are multiplied by it (Cohere, Granite), before the cap.
        softcap: logits are kept in ``(-softcap, softcap)`` by a tanh (Gemma-2); None for no cap.
        limits: tokens that these leave out have no probability; the labels always have one.
        chunk: most rows whose logits exist at a time; a large vocabulary lowers it.
        entropy: compute entropies too; with ``entropy_grad`` they carry gradient.
    """

    compute_dtype: torch.dtype
    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None
    chunk: int = 1024
    entropy: bool = False
    entropy_grad: bool = True
    limits: SamplingLimits | None = None


class VocabShard(Protocol):
    """The rows of a head that this rank has, where several have them between them."""

    def local(self, weight: Tensor) -> Tensor:
        """Returns this rank's rows of a head's weight or bias ``[V, …]``."""

    def own(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Finds ``labels [M]`` among these rows, and whether they are (bool; else the number stands for nothing)."""

    def join(self, labels: Tensor, logprobs: Tensor, normaliser: Tensor, entropies: Tensor | None) -> None:
        """Replaces ``[M]`` results over this rank's rows alone by those over the whole vocabulary. Collective."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    rule: LogprobOptions,
    part: VocabShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Computes log-probabilities of ``labels [M]`` after ``hidden [M, D]`` under the head ``weight [V, D], bias [V]``.

    Args:
        part: what this rank has of the head; then the gradient of ``hidden`` is this rank's part of a sum over ranks.

    Returns:
        ``logprobs [M]`` and, where asked for, ``entropies [M]`` in nats (else None); fp32 (fp64 stays).
    """
    if part is not None:
        if rule.limits is not None:
            raise ValueError("limits of sampling need the logits of the whole vocabulary, of which ranks have parts")
        weight, bias = part.local(weight), None if bias is None else part.local(bias)
    logprobs, entropies = _TokenLogprobs.apply(hidden, weight, bias, labels, rule, part)
    return logprobs, entropies if rule.entropy else None


def _kept(z: Tensor, labels: Tensor, rule: LogprobOptions) -> Tensor:
    """Returns ``z [B, V]`` with -inf in place where tokens are left out."""
    return z if rule.limits is None else z.masked_fill_(truncation_mask(z, labels, rule.limits), -math.inf)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        rule: LogprobOptions,
        part: VocabShard | None,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(weight, bias, rule)
        num_rows = hidden.shape[0]
        normaliser = torch.empty(num_rows, dtype=head.sum_dtype, device=hidden.device)
        logprobs = torch.empty_like(normaliser)
        entropies = torch.empty_like(normaliser) if rule.entropy else normaliser.new_empty(0)
        whole, (labels, owned) = labels, (labels, None) if part is None else part.own(labels)
        for _, _, logits, blocks in head.chunks(hidden):
            for here, there in blocks:
                _reduce(
                    _kept(head.tempered(logits[there]), labels[here], rule),
                    labels[here],
                    logprobs[here],
                    normaliser[here],
                    entropies[here] if rule.entropy else None,
                )
        if part is not None:
            part.join(whole, logprobs, normaliser, entropies if rule.entropy else None)
        keeps_entropies = rule.entropy and rule.entropy_grad
        ctx.save_for_backward(hidden, weight, bias, labels, owned, normaliser, entropies if keeps_entropies else None)
        ctx.rule = rule
        ctx.set_materialize_grads(False)
        if not keeps_entropies:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropies: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, bias, labels, owned, normaliser, entropies = ctx.saved_tensors
        rule: LogprobOptions = ctx.rule
        head = _Head(weight, bias, rule)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normaliser)
        grads = _HeadGradients(ctx, hidden, head)
        for span, rows, logits, blocks in head.chunks(hidden):
            for here, there in blocks:
                raw = logits[there]
                gradient = _logit_gradient(
                    raw,
                    head,
                    labels[here],
                    normaliser[here],
                    grad_logprobs[here],
                    None if entropies is None or grad_entropies is None else (entropies[here], grad_entropies[here]),
                    None if owned is None else owned[here],
                )
                if gradient.dtype != raw.dtype:
                    raw.copy_(gradient)
            grads.add(span, rows, logits)
        return grads.hidden, grads.weight, grads.bias, None, None, None


class _Head:
    """A linear head in its compute dtype, and how its rows are cut."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rule: LogprobOptions) -> None:
        self.rule = rule
        self.weight = weight.to(rule.compute_dtype)
        self.bias = None if bias is None else bias.to(rule.compute_dtype)
        self.sum_dtype = torch.float64 if rule.compute_dtype == torch.float64 else torch.float32
        row_bytes = weight.shape[0] * self.sum_dtype.itemsize
        device = "cpu" if weight.device.type == "cpu" else "other"
        self.chunk = max(1, min(rule.chunk, _CHUNK_BYTES[device] // row_bytes))
        self.block = max(1, _BLOCK_BYTES[device] // row_bytes)

    def chunks(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, list[tuple[slice, slice]]]]:
        """Yields per chunk where it lies in ``hidden [M, D]``, its rows ``[C, D]`` in the compute dtype, its raw logits
        ``[C, V]`` (one buffer, written anew for each chunk), and its blocks as (rows of all, rows of the chunk).

        Chunks differ by at most one row, so none is too small for a fast product.
        """
        num_rows = hidden.shape[0]
        if num_rows == 0:
            return
        num_chunks = -(-num_rows // self.chunk)
        buffer = self.weight.new_empty(-(-num_rows // num_chunks), self.weight.shape[0])
        start = 0
        for part in hidden.tensor_split(num_chunks):
            rows, logits = part.to(self.rule.compute_dtype), buffer[: len(part)]
            if self.bias is None:
                torch.mm(rows, self.weight.T, out=logits)
            else:
                torch.addmm(self.bias, rows, self.weight.T, out=logits)
            stops = [min(first + self.block, len(part)) for first in range(0, len(part), self.block)]
            there = [slice(first, stop) for first, stop in zip([0, *stops], stops, strict=False)]
            blocks = [(slice(start + s.start, start + s.stop), s) for s in there]
            yield slice(start, start + len(part)), rows, logits, blocks
            start += len(part)

    def tempered(self, raw: Tensor) -> Tensor:
        """Turns raw logits ``[B, V]`` into ``z`` in the dtype of the sums, in place where that is theirs."""
        rule = self.rule
        logits = raw.to(self.sum_dtype)
        if rule.scale != 1.0:
            logits.mul_(rule.scale)
        if rule.softcap is not None:
            logits.div_(rule.softcap).tanh_().mul_(rule.softcap)
        return logits if rule.temperature == 1.0 else logits.div_(rule.temperature)


def _reduce(z: Tensor, labels: Tensor, logprobs: Tensor, normaliser: Tensor, entropies: Tensor | None) -> None:
    """Fills the ``[B]`` results of one block; overwrites ``z [B, V]``."""
    picked = z.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    largest = z.amax(-1, keepdim=True)
    z.sub_(largest)
    weights = z.exp_() if entropies is None else z.exp()
    total = weights.sum(-1)
    torch.log(total, out=normaliser)
    if entropies is not None:
        torch.sub(normaliser, weights.mul_(z.clamp_(min=LEAST)).sum(-1) / total, out=entropies)
    normaliser.add_(largest.squeeze(-1))
    torch.sub(picked, normaliser, out=logprobs)


def _logit_gradient(
    raw: Tensor,
    head: _Head,
    labels: Tensor,
    normaliser: Tensor,
    grad_logprobs: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    owned: Tensor | None = None,
) -> Tensor:
    """Returns ``∂r [B, V]`` of one block in the dtype of the sums, from its raw logits, which it may overwrite.

    Args:
        entropy: entropies ``[B]`` and their gradients, or None where they carry none.
        owned: ``[B]`` whether a label is among these columns; None where all are.
    """
    rule = head.rule
    factor = rule.scale / rule.temperature
    z = head.tempered(raw)
    slope = None if rule.softcap is None else z.mul(rule.temperature / rule.softcap).square_().neg_().add_(1.0)
    grad = (grad_logprobs * factor).unsqueeze(-1)
    log_p = _kept(z, labels, rule).sub_(normaliser.unsqueeze(-1))
    if entropy is None:
        result = log_p.exp_().mul_(-grad)
    else:
        entropies, grad_entropies = entropy
        p = log_p.exp()
        coefficient = (grad_entropies * -factor).unsqueeze(-1)
        result = log_p.clamp_(min=LEAST).add_(entropies.unsqueeze(-1)).mul_(coefficient).sub_(grad).mul_(p)
    result.scatter_add_(-1, labels.unsqueeze(-1), grad if owned is None else grad * owned.unsqueeze(-1))
    return result if slope is None else result.mul_(slope)


class _HeadGradients:
    """Collects the gradients that are asked for; those of the head in the dtype of the sums."""

    def __init__(self, ctx: FunctionCtx, hidden: Tensor, head: _Head) -> None:
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]  # type: ignore[attr-defined]
        self._head = head
        self.hidden = torch.empty_like(hidden) if for_hidden else None
        self.weight = torch.zeros_like(head.weight, dtype=head.sum_dtype) if for_weight else None
        self.bias = None
        if for_bias and head.bias is not None:
            self.bias = torch.zeros_like(head.bias, dtype=head.sum_dtype)

    def add(self, span: slice, rows: Tensor, gradient: Tensor) -> None:
        """Adds one chunk: ``gradient [C, V]`` of its raw logits, in the compute dtype."""
        if self.hidden is not None:
            self.hidden[span] = gradient @ self._head.weight
        if self.weight is not None:
            if self.weight.dtype == gradient.dtype:
                self.weight.addmm_(gradient.T, rows)
            else:
                self.weight.add_(gradient.T @ rows)
        if self.bias is not None:
            self.bias.add_(gradient.sum(0, dtype=self.bias.dtype))
