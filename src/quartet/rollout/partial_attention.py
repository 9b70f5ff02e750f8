"""Attention over several places: each gives a partial output and its log-sum-exp, and ``join`` puts them together.

Shapes: b calls, Hk key/value heads, r query rows of each, K keys, D head size.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor
from torch.amp.autocast_mode import is_autocast_available

from quartet.models.attention import LayerRule

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def has_kernel(q: Tensor, v: Tensor, rule: LayerRule) -> bool:
    """Whether the fused kernel of the CPU can express the layer."""
    return rule.softcap is None and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Of tokens to those among them that are no later: ``q [1, H, t, D]``, ``k, v [1, Hk, t, D]``."""
    out, lse = _flash(q, k, v, 0.0, True, scale=scaling)
    return out, lse


def partial_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: LayerRule) -> tuple[Tensor, Tensor]:
    """``q [b, Hk, r, D]``, ``k, v [b, Hk, K, D]`` → outputs ``[b, Hk, r, D]`` and log-sum-exps ``[b, Hk, r]``.

    Args:
        mask: additive, fp32, broadcasts to ``[b, Hk, r, K]``. With the window already in it.
    """
    if has_kernel(q, v, rule):
        out, lse = _flash(q, k, v, 0.0, False, attn_mask=mask, scale=rule.scaling)
        return out, lse
    return _by_formula(q, k, v, mask, rule)


def _by_formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: LayerRule) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(-1, -2)
    scores = (scores if scores.dtype == torch.float64 else scores.float()) * rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if mask is not None:
        scores = scores + mask
    lse = scores.logsumexp(-1)
    # Rows that see nothing get zeros rather than NaN.
    finite = lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)
    return (scores - finite).exp().to(v.dtype) @ v, lse


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: LayerRule) -> tuple[Tensor, Tensor]:
    """As ``partial_attention`` by the formula, in fp32 at least whatever the dtypes, under autocast too."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    device = q.device.type
    whole = torch.autocast(device, enabled=False) if is_autocast_available(device) else contextlib.nullcontext()
    with whole:
        return _by_formula(q.to(dtype), k.to(dtype), v.to(dtype), mask, rule)


def join(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """One output from two partial ones ``[..., D]`` with log-sum-exps ``[...]``; -inf contributes nothing."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    # In fp64, because how fp32 exponentials round depends on how many there are.
    share = torch.sigmoid((other_lse - lse).double()).to(dtype).unsqueeze(-1)
    return out.to(dtype).lerp(other.to(dtype), share).to(out.dtype)
