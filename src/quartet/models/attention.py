"""One attention function for unmodified transformers models; what it attends to is decided by a context object.

Shapes: T packed tokens, H query heads, Hk key/value heads, D head size, L tokens of one sequence, n sequences in a run.

``install_attention(model)`` switches a model to the registered function. A forward pass then hands a context through
the model's keyword arguments (``quartet_attention=context``); the context's ``attend`` is called once per attention
layer. Training packs whole sequences (``PackedAttention``), the rollout engine brings contexts that read and write its
KV cache. The name is registered for attention only, not for masks: transformers then builds no mask at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from quartet.config import UserError
from quartet.models.tree_attention import SegmentTree, SiblingRun, tree_attention

NAME = "quartet"
_FORMER = "_quartet_former_attention"
_SMALLEST_BLOCK = 128
"""Tokens; below it a kernel call costs more than the keys it saves."""


@dataclass(frozen=True)
class LayerRule:
    """What one attention layer asks of the kernel."""

    scaling: float
    window: int | None = None
    """Token i sees j with ``j > i - window``."""
    softcap: float | None = None


class AttentionContext(Protocol):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        """``q [1, H, T, D]``, ``k, v [1, Hk, T, D]`` of the new tokens → ``[1, H, T, D]``."""


class PackedAttention:
    """Causal attention over a pack of segments: each sees its ancestors wholly and itself causally.

    Args:
        lengths: tokens per segment, in packed order.
        parents: the segment that each one continues, -1 for a root; the descendants of a segment follow it directly.
            None: all are roots. Neighbours of equal length run as one kernel call.

    Raises:
        ValueError: a segment does not follow its parent's descendants.
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int] | None = None) -> None:
        self.tree = SegmentTree(lengths, parents)
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}
        self._cut: dict[int, SegmentTree] = {}
        self._cache: dict[object, object] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        tree = self.tree
        if q.is_cuda:
            from quartet.models import cuda_attention

            return cuda_attention.cuda_tree_attention(q, k, v, rule, tree, self._cache)
        whole = rule.window is None or rule.window >= tree.longest
        if whole and rule.softcap is None and q.shape[-1] == v.shape[-1] and q.device.type == "cpu":
            return tree_attention(q, k, v, tree, rule.scaling)
        return self._by_run(q, k, v, rule)

    def _by_run(self, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        """Any rule: the queries of each run of equal siblings against their ancestors' keys and their own."""
        runs = self._blocks(rule.window).sibling_runs
        sizes = [run.num * run.length for run in runs]
        # Split once: the gradient of a slice is as large as what it was cut from.
        queries, keys, values = q.split(sizes, 2), k.split(sizes, 2), v.split(sizes, 2)
        out = []
        for i, run in enumerate(runs):
            own_k, own_v = _unpack(keys[i], run), _unpack(values[i], run)
            reach = run.depth if rule.window is None else min(run.depth, rule.window - 1)
            if reach:
                spans = _nearest(run.ancestors, [sizes[a] for a in run.ancestors], reach)
                own_k, own_v = _behind(keys, spans, own_k), _behind(values, spans, own_v)
            piece = self._one_run(_unpack(queries[i], run), own_k, own_v, rule)
            out.append(piece.transpose(0, 1).flatten(1, 2))
        return torch.cat(out, dim=1).unsqueeze(0)

    def _blocks(self, window: int | None) -> SegmentTree:
        """Under a window long segments are cut, so that no query meets many keys that it cannot see."""
        if window is None or max(self.tree.lengths) <= (size := max(window, _SMALLEST_BLOCK)):
            return self.tree
        if size not in self._cut:
            self._cut[size] = self.tree.in_blocks(size)
        return self._cut[size]

    def _one_run(self, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        """``q [n, H, L, D]`` at the end of ``k, v [n, Hk, K, D]``; the fused kernel where it can express the rule."""
        length, num_keys = q.shape[2], k.shape[2]
        windowed = rule.window is not None and rule.window < num_keys
        if rule.softcap is None and not windowed and length == num_keys:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=rule.scaling, enable_gqa=True)
        key = (length, num_keys, rule.window if windowed else None)
        mask = self._masks.get(key)
        if mask is None:
            positions = torch.arange(num_keys, device=q.device)
            mask = self._masks[key] = visible(positions[num_keys - length :], positions, rule)
        return masked_attention(q, k, v, mask, rule)


def _unpack(x: Tensor, run: SiblingRun) -> Tensor:
    """``[1, H, n L, D] → [n, H, L, D]``"""
    return x.view(x.shape[1], run.num, run.length, x.shape[3]).transpose(0, 1)


def _nearest(runs: Sequence[int], sizes: Sequence[int], reach: int) -> list[tuple[int, int]]:
    """The last ``reach`` tokens of a chain of runs, as ``(run, tokens from its end)``, first to last."""
    spans: list[tuple[int, int]] = []
    for run, size in zip(reversed(runs), reversed(sizes), strict=True):
        if reach <= 0:
            break
        spans.append((run, min(size, reach)))
        reach -= size
    return spans[::-1]


def _behind(pieces: Sequence[Tensor], spans: Sequence[tuple[int, int]], own: Tensor) -> Tensor:
    """``own [n, Hk, L, D]`` behind the spans of its ancestors' pieces ``[1, Hk, *, D]``."""
    prefix = [pieces[i][:, :, -size:].expand(own.shape[0], -1, -1, -1) for i, size in spans]
    return torch.cat([*prefix, own], dim=2)


class RecordedAttention(PackedAttention):
    """Sequences side by side; keeps what layers asked: ``(layer, k, v, rule)``, in the order of the calls."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.calls: list[tuple[int, Tensor, Tensor, LayerRule]] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        self.calls.append((layer, k, v, rule))
        return super().attend(layer, q, k, v, rule)


def visible(query_positions: Tensor, key_positions: Tensor, rule: LayerRule) -> Tensor:
    """``[..., Q, K]`` bool: causal, and inside the window where the layer has one."""
    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
    allowed = distance >= 0
    return allowed if rule.window is None else allowed & (distance < rule.window)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rule: LayerRule) -> Tensor:
    """Attention under a boolean mask that broadcasts to ``[n, H, Q, K]``; soft-capped scores run unfused."""
    if rule.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=rule.scaling, enable_gqa=True)
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = q @ k.transpose(-1, -2)
    scores = (scores if scores.dtype == torch.float64 else scores.float()) * rule.scaling
    scores = rule.softcap * torch.tanh(scores / rule.softcap)
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype) @ v


class NoContextError(RuntimeError):
    """A held model was called directly, or keeps keyword arguments from its attention layers."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    quartet_attention: AttentionContext | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if quartet_attention is None:
        raise NoContextError(
            f"{type(module).__name__} was called without an attention context: the model is held by a Quartet "
            "engine; call release() on its owner before using the model directly"
        )
    if s_aux is not None:
        raise RuntimeError(f"{type(module).__name__} uses attention sinks, which the packed attention does not have")
    # Under autocast the rotary embedding leaves q and k in fp32 while v is bf16.
    query, key = query.to(value.dtype), key.to(value.dtype)
    rule = LayerRule(scaling if scaling is not None else query.shape[-1] ** -0.5, sliding_window, softcap)
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise RuntimeError(f"{type(module).__name__} has no layer_idx")
    out = quartet_attention.attend(layer, query, key, value, rule)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, _attention)


def install_attention(model: PreTrainedModel) -> None:
    """Switches ``model`` to the packed attention."""
    if is_installed(model):
        return
    former = own_attention(model)
    found = "it does not use transformers' attention interface"
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        found = str(error).splitlines()[0]
    # Families without the interface only log a warning and stay as they were.
    if not is_installed(model):
        raise UserError(
            f"{type(model).__name__} cannot run on packed sequences",
            found=found,
            remedy="use an architecture that goes through transformers' attention interface (Llama, Qwen2, Gemma-2, …)",
        )
    # On the model, not only with its holder: copies of a held model know it too.
    setattr(model, _FORMER, former)


def is_installed(model: PreTrainedModel) -> bool:
    return bool(model.config._attn_implementation == NAME)


def own_attention(model: PreTrainedModel) -> str:
    """The attention implementation that ``model`` has when it is not taken over."""
    name = getattr(model, _FORMER, None) if is_installed(model) else model.config._attn_implementation
    return str(name or "sdpa")


def restore(model: PreTrainedModel) -> None:
    model.set_attn_implementation(own_attention(model))
