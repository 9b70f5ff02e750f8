"""One attention function for unmodified transformers models; what it attends to is decided by a context object.

Shapes: T packed tokens, N segments, H query heads, Hk key/value heads, D head size, L tokens of one segment, n segments
of one run, C blocks of 128 tokens.

``install_attention(model)`` switches a model to the registered function. A forward pass then hands a context through
the model's keyword arguments (``quartet_attention=context``); the context's ``attend`` is called once per attention
layer. Training packs whole sequences (``PackedAttention``), the rollout engine brings contexts that read and write its
KV cache. The name is registered for attention only, not for masks: transformers then builds no mask at all.

On a CUDA device attention over a packed tree of segments runs, forward and backward, by torch's own kernels:

=========================================== ======================================================================
packs of roots, fp16 or bf16, no soft cap   flash attention over sequences of varying length (``varlen_attn``)
trees, soft caps, fp32                      flex attention, compiled, under a block mask made from the tree
fp64 (gradient checks)                      the formula over a dense ``[T, T]`` mask
=========================================== ======================================================================

In depth-first order the tokens of a segment and of all its descendants are one interval, so "token i sees token j" is
``j <= i < end[j]``, where ``end[j]`` is where the descendants of j's segment end. Windows count true positions.

On the CPU a token attends to its own segment causally and to every ancestor wholly. Each of these parts is one call of
torch's flash kernel, and parts are joined through their log-sum-exps: with ``o_i`` and ``l_i`` of part i the whole
is ``Σ exp(l_i − l) o_i``, ``l = logsumexp(l_i)``. A parent's part takes the queries of all its descendants in one call,
so a prompt is read once for its whole group. The flash backward of a part needs nothing but the joined output and
log-sum-exp (Dao et al. 2022, "FlashAttention", §B.2: they enter only through ``P = exp(s − l)`` and
``rowsum(dO ∘ O)``), so it is exact for each part, and the parts' gradients add up.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from operator import add
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from quartet.config import UserError
from quartet.models.memory import to_device

cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class SiblingRun:
    """Neighbouring segments of one length and one parent; a segment with children is a run of its own.

    Attributes:
        num: segments.
        length: tokens of each.
        depth: tokens of their ancestors.
        ancestors: the runs of their ancestors, root first.
    """

    num: int
    length: int
    depth: int
    ancestors: tuple[int, ...]


@dataclass(frozen=True)
class InnerSegment:
    """A segment with descendants: its tokens ``start`` to ``end``, theirs from ``end`` to ``stop``."""

    start: int
    end: int
    stop: int


class SegmentTree:
    """Segments in depth-first order: the descendants of each follow it directly.

    An only child simply continues its parent: the two are joined into one segment, unless ``join`` is off.

    Args:
        lengths: tokens per segment.
        parents: index of each one's parent, -1 for a root. None: all are roots.

    Raises:
        ValueError: lengths or order are not as described.
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int] | None = None, *, join: bool = True) -> None:
        parents = tuple(parents) if parents is not None else (-1,) * len(lengths)
        if len(parents) != len(lengths):
            raise ValueError(f"{len(parents)} parents for {len(lengths)} segments")
        if any(length < 1 for length in lengths):
            raise ValueError(f"a segment needs at least one token, found lengths {tuple(lengths)}")
        self.chains = _chains(parents)
        self.lengths, self.parents = tuple(lengths), parents
        if join:
            self.lengths, self.parents = _join_only_children(lengths, parents)
            self.chains = _chains(self.parents)

    def in_blocks(self, size: int) -> SegmentTree:
        """Returns the same tokens with every segment as a chain of blocks of at most ``size``."""
        lengths: list[int] = []
        parents: list[int] = []
        ends: list[int] = []
        for length, parent in zip(self.lengths, self.parents, strict=True):
            before = ends[parent] if parent >= 0 else -1
            for start in range(0, length, size):
                lengths.append(min(size, length - start))
                parents.append(before)
                before = len(lengths) - 1
            ends.append(before)
        return SegmentTree(lengths, parents, join=False)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """``[N + 1]`` where each segment starts."""
        return tuple(accumulate(self.lengths, initial=0))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """``[N]`` tokens of each segment's ancestors: the position of its first token."""
        return tuple(sum(self.lengths[a] for a in chain) for chain in self.chains)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest chain."""
        return max(map(add, self.depths, self.lengths), default=0)

    @cached_property
    def sibling_runs(self) -> tuple[SiblingRun, ...]:
        inner = set(self.parents)
        runs: list[SiblingRun] = []
        run_of: dict[int, int] = {}
        for i, (length, parent) in enumerate(zip(self.lengths, self.parents, strict=True)):
            if i > 0 and i not in inner and parent == self.parents[i - 1] and length == self.lengths[i - 1]:
                last = runs[-1]
                runs[-1] = SiblingRun(last.num + 1, length, last.depth, last.ancestors)
            else:
                ancestors = tuple(run_of[a] for a in self.chains[i])
                runs.append(SiblingRun(1, length, self.depths[i], ancestors))
            run_of[i] = len(runs) - 1
        return tuple(runs)

    @cached_property
    def equal_runs(self) -> tuple[tuple[int, int], ...]:
        """``(segments, tokens of each)`` of neighbours of one length, whatever their parents."""
        return tuple((len(list(run)), length) for length, run in groupby(self.lengths))

    @cached_property
    def stops(self) -> dict[int, int]:
        """Where the last descendant of each segment ends that has any."""
        stops: dict[int, int] = {}
        for chain, stop in zip(self.chains, self.offsets[1:], strict=True):
            for a in chain:
                stops[a] = stop
        return stops

    @cached_property
    def inner(self) -> tuple[InnerSegment, ...]:
        return tuple(InnerSegment(self.offsets[a], self.offsets[a + 1], stop) for a, stop in sorted(self.stops.items()))


def _join_only_children(lengths: Sequence[int], parents: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    num_children = Counter(parents)
    place: list[int] = []
    kept: list[tuple[int, int]] = []
    for i, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
        if parent == i - 1 and parent >= 0 and num_children[parent] == 1:
            former, grandparent = kept[-1]
            kept[-1] = (former + length, grandparent)
        else:
            kept.append((length, place[parent] if parent >= 0 else -1))
        place.append(len(kept) - 1)
    return tuple(length for length, _ in kept), tuple(parent for _, parent in kept)


def _chains(parents: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the ancestors of each segment, root first."""
    chains: list[tuple[int, ...]] = []
    open_chain: tuple[int, ...] = ()
    for i, parent in enumerate(parents):
        if parent == -1:
            chain: tuple[int, ...] = ()
        elif parent in open_chain:
            chain = open_chain[: open_chain.index(parent) + 1]
        else:
            raise ValueError(f"segment {i} must follow the descendants of its parent {parent} directly")
        chains.append(chain)
        open_chain = (*chain, i)
    return tuple(chains)


def tree_attention(q: Tensor, k: Tensor, v: Tensor, tree: SegmentTree, scaling: float) -> Tensor:
    """Computes attention of every segment to its ancestors and, causally, to itself; differentiable once.

    Args:
        q: ``[1, H, T, D]``, any strides; fp64, fp32, bf16 or fp16, as ``k`` and ``v``.
        k, v: ``[1, Hk, T, D]``; H is a multiple of Hk.

    Returns:
        ``[1, H, T, D]`` in the dtype of ``q``; parts are joined in fp32 (fp64 stays) and rounded once.
    """
    out: Tensor = _TreeAttention.apply(_dense_rows(q), _dense_rows(k), _dense_rows(v), tree, scaling)
    return out


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tree: SegmentTree, scaling: float) -> Tensor:
        pieces = zip(*(_pieces(x, tree) for x in (q, k, v)), strict=True)
        parts, part_lses = zip(*(cpu_flash(*piece, 0.0, True, scale=scaling) for piece in pieces), strict=True)
        out, lse = _joined(parts, _accumulator(q, tree)), _joined(part_lses)
        if tree.inner and len(parts) == 1:
            # Written into below, and what the kernel gave may be kept for a recomputation.
            out, lse = out.clone(), lse.clone()
        del parts, part_lses
        for node in tree.inner:
            _add_ancestor(out, lse, q, k, v, node, scaling)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tree, ctx.scaling = tree, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        tree, scaling = ctx.tree, ctx.scaling
        grad = _dense_rows(grads[0])
        pieces = zip(*(_pieces(x, tree) for x in (grad, q, k, v, out, lse)), strict=True)
        parts = zip(*(_flash_backward(*piece, 0.0, True, scale=scaling) for piece in pieces), strict=True)
        dq, dk, dv = (_joined(part, _accumulator(q, tree)) for part in parts)
        for node in tree.inner:
            grad_below, q_below, *joined = (x[:, :, node.end : node.stop] for x in (grad, q, out, lse))
            k_node, v_node = (x[:, :, node.start : node.end] for x in (k, v))
            found = _flash_backward(grad_below, q_below, k_node, v_node, *joined, 0.0, False, scale=scaling)
            dq[:, :, node.end : node.stop] += found[0]
            dk[:, :, node.start : node.end] += found[1]
            dv[:, :, node.start : node.end] += found[2]
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _add_ancestor(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, node: InnerSegment, scaling: float
) -> None:
    """Joins to all descendants of ``node``, in place, what they see of its tokens."""
    below = slice(node.end, node.stop)
    k_node, v_node = k[:, :, node.start : node.end], v[:, :, node.start : node.end]
    part, part_lse = cpu_flash(q[:, :, below], k_node, v_node, 0.0, False, scale=scaling)
    former = lse[:, :, below]
    out[:, :, below].lerp_(part.to(out.dtype), torch.sigmoid(part_lse - former).unsqueeze(-1))
    former.copy_(torch.logaddexp(former, part_lse))


def _pieces(x: Tensor, tree: SegmentTree) -> list[Tensor]:
    """Returns the views ``[n, H, L, ...]`` of the runs of ``x [1, H, T, ...]``."""
    pieces = x.split([num * length for num, length in tree.equal_runs], 2)
    return [
        piece if num == 1 else piece[0].unflatten(1, (num, length)).transpose(0, 1)
        for (num, length), piece in zip(tree.equal_runs, pieces, strict=True)
    ]


def _joined(parts: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Joins ``[n, H, L, ...]`` of every run → ``[1, H, T, ...]`` over memory in token order, as the kernel
    leaves it.
    """
    rows = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    joined = rows[0] if len(rows) == 1 else torch.cat(rows)
    return joined.to(dtype or joined.dtype).transpose(0, 1).unsqueeze(0)


def _dense_rows(x: Tensor) -> Tensor:
    """Copies ``x`` where its rows are not dense, as the kernel assumes them whatever the other strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _accumulator(x: Tensor, tree: SegmentTree) -> torch.dtype:
    """Returns the dtype that parts are added up in: fp32 for half precision, which is rounded once."""
    return torch.float32 if tree.inner and x.dtype != torch.float64 else x.dtype


NAME = "quartet"
_FORMER = "_quartet_former_attention"
_SMALLEST_BLOCK = 128
"""Tokens; below it a kernel call costs more than the keys it saves."""


@dataclass(frozen=True)
class AttentionParams:
    """What one attention layer asks of the kernel."""

    scaling: float
    window: int | None = None
    """Token i sees j with ``j > i - window``."""
    softcap: float | None = None


class AttentionContext(Protocol):
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams) -> Tensor:
        """Attends with ``q [1, H, T, D]``, ``k, v [1, Hk, T, D]`` of the new tokens → ``[1, H, T, D]``."""


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

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams) -> Tensor:
        tree = self.tree
        if q.is_cuda:
            return cuda_tree_attention(q, k, v, rule, tree, self._cache)
        whole = rule.window is None or rule.window >= tree.longest
        if whole and rule.softcap is None and q.shape[-1] == v.shape[-1] and q.device.type == "cpu":
            return tree_attention(q, k, v, tree, rule.scaling)
        return self._by_run(q, k, v, rule)

    def _by_run(self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams) -> Tensor:
        """Attends under any rule: the queries of each run of equal siblings against their ancestors' keys and their
        own.
        """
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
        """Cuts long segments where there is a window, so that no query meets many keys that it cannot see."""
        if window is None or max(self.tree.lengths) <= (size := max(window, _SMALLEST_BLOCK)):
            return self.tree
        if size not in self._cut:
            self._cut[size] = self.tree.in_blocks(size)
        return self._cut[size]

    def _one_run(self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams) -> Tensor:
        """Attends with ``q [n, H, L, D]`` at the end of ``k, v [n, Hk, K, D]``; the fused kernel where it can express
        the rule.
        """
        length, num_keys = q.shape[2], k.shape[2]
        windowed = rule.window is not None and rule.window < num_keys
        if rule.softcap is None and not windowed and length == num_keys:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=rule.scaling, enable_gqa=True)
        key = (length, num_keys, rule.window if windowed else None)
        mask = self._masks.get(key)
        if mask is None:
            positions = torch.arange(num_keys, device=q.device)
            mask = self._masks[key] = visibility_mask(positions[num_keys - length :], positions, rule)
        return masked_attention(q, k, v, mask, rule)


def _unpack(x: Tensor, run: SiblingRun) -> Tensor:
    """Maps ``[1, H, n L, D] → [n, H, L, D]``."""
    return x.view(x.shape[1], run.num, run.length, x.shape[3]).transpose(0, 1)


def _nearest(runs: Sequence[int], sizes: Sequence[int], reach: int) -> list[tuple[int, int]]:
    """Returns the last ``reach`` tokens of a chain of runs, as ``(run, tokens from its end)``, first to last."""
    spans: list[tuple[int, int]] = []
    for run, size in zip(reversed(runs), reversed(sizes), strict=True):
        if reach <= 0:
            break
        spans.append((run, min(size, reach)))
        reach -= size
    return spans[::-1]


def _behind(pieces: Sequence[Tensor], spans: Sequence[tuple[int, int]], own: Tensor) -> Tensor:
    """Puts ``own [n, Hk, L, D]`` behind the spans of its ancestors' pieces ``[1, Hk, *, D]``."""
    prefix = [pieces[i][:, :, -size:].expand(own.shape[0], -1, -1, -1) for i, size in spans]
    return torch.cat([*prefix, own], dim=2)


class RecordedAttention(PackedAttention):
    """Sequences side by side; keeps what layers asked: ``(layer, k, v, rule)``, in the order of the calls."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.calls: list[tuple[int, Tensor, Tensor, AttentionParams]] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams) -> Tensor:
        self.calls.append((layer, k, v, rule))
        return super().attend(layer, q, k, v, rule)


def visibility_mask(query_positions: Tensor, key_positions: Tensor, rule: AttentionParams) -> Tensor:
    """Returns ``[..., Q, K]`` bool: causal, and inside the window where the layer has one."""
    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
    allowed = distance >= 0
    return allowed if rule.window is None else allowed & (distance < rule.window)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rule: AttentionParams) -> Tensor:
    """Attends under a boolean mask that broadcasts to ``[n, H, Q, K]``; soft-capped scores run unfused."""
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


def packed_attention(
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
    rule = AttentionParams(scaling if scaling is not None else query.shape[-1] ** -0.5, sliding_window, softcap)
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise RuntimeError(f"{type(module).__name__} has no layer_idx")
    out = quartet_attention.attend(layer, query, key, value, rule)
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, packed_attention)


def language_model(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the part of a vision-language model that runs packed; of a text model, the model itself."""
    if getattr(model.config, "vision_config", None) is None:
        return model
    found: PreTrainedModel = model.get_decoder()
    return found


def install_attention(model: PreTrainedModel) -> None:
    """Switches ``model`` to the packed attention; a vision tower keeps its own."""
    if is_attention_installed(model):
        return
    former = original_attention(model)
    found = "it does not use transformers' attention interface"
    try:
        language_model(model).set_attn_implementation(NAME)
    except ValueError as error:
        found = str(error).splitlines()[0]
    # Families without the interface only log a warning and stay as they were.
    if not is_attention_installed(model):
        raise UserError(
            f"{type(model).__name__} cannot run on packed sequences",
            found=found,
            remedy="use an architecture that goes through transformers' attention interface (Llama, Qwen2, Gemma-2, …)",
        )
    # On the model, not only with its holder: copies of a held model know it too.
    setattr(model, _FORMER, former)


def is_attention_installed(model: PreTrainedModel) -> bool:
    return bool(language_model(model).config._attn_implementation == NAME)


def original_attention(model: PreTrainedModel) -> str:
    """Returns the attention implementation that ``model`` has when it is not taken over."""
    config = language_model(model).config
    name = getattr(model, _FORMER, None) if is_attention_installed(model) else config._attn_implementation
    return str(name or "sdpa")


def uninstall_attention(model: PreTrainedModel) -> None:
    language_model(model).set_attn_implementation(original_attention(model))


BLOCK = 128
"""Tokens of one side of a block of the mask; flex attention's default."""
_SMALLEST_FLEX_HEAD = 16
_LARGEST_FLASH_HEAD = 256
_MAX_FLEX_KERNELS = 64
_FLASH_EXPANDS_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Since torch 2.12; before, every query head needs its own key/value head."""

Cache = MutableMapping[object, object]
_T = TypeVar("_T")


def cuda_tree_attention(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams, tree: SegmentTree, cache: Cache
) -> Tensor:
    """Computes differentiable attention of a pack.

    Args:
        q: ``[1, H, T, D]``.
        k, v: ``[1, Hk, T, D]``.
        cache: of this pack; index tensors and block masks are made once and shared by all layers.

    Returns:
        ``[1, H, T, D]``.
    """
    window = rule.window if rule.window is not None and rule.window < tree.longest else None
    if q.dtype == torch.float64:
        mask = _cached(cache, ("dense", window), lambda: to_device(dense_mask(tree, window), q.device))
        return masked_attention(q, k, v, mask, rule)
    if q.is_cuda and _flash_takes(q, v, rule, tree.parents):
        return _flash(q, k, v, rule.scaling, window, tree, cache)
    return _flex(q, k, v, rule, window, tree, cache)


def _cached(cache: Cache, key: object, make: Callable[[], _T]) -> _T:
    if key not in cache:
        cache[key] = make()
    return cast(_T, cache[key])


# The tree, on the host ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TreeIndex:
    """``positions [T]`` and ``ends [T]`` (see the module's docstring), int32 on the CPU."""

    positions: Tensor
    ends: Tensor


def tree_index(tree: SegmentTree) -> TreeIndex:
    ends = list(tree.offsets[1:])
    for segment, stop in tree.stops.items():
        ends[segment] = stop
    sizes = torch.tensor(tree.lengths)
    starts, depths = torch.tensor(tree.offsets[:-1]), torch.tensor(tree.depths)
    positions = torch.arange(tree.offsets[-1]) - (starts - depths).repeat_interleave(sizes)
    return TreeIndex(positions.int(), torch.tensor(ends).repeat_interleave(sizes).int())


def dense_mask(tree: SegmentTree, window: int | None) -> Tensor:
    """Returns ``[T, T]`` bool, query by key."""
    index = tree_index(tree)
    token = torch.arange(len(index.positions))
    mask = (token <= token[:, None]) & (token[:, None] < index.ends)
    return mask if window is None else mask & (index.positions[:, None] - index.positions < window)


def block_masks(index: TreeIndex, window: int | None) -> tuple[Tensor, Tensor]:
    """Finds which blocks of 128 queries by 128 keys hold something visible.

    Returns:
        ``partial [C, C]`` and ``full [C, C]`` bool: blocks to compute under the mask, and blocks all of whose pairs
        are visible. With a window some partial blocks may turn out empty; without one none does.
    """
    num_tokens = len(index.ends)
    ragged = -num_tokens % BLOCK

    def blocks(x: Tensor, filler: int) -> Tensor:
        return F.pad(x, (0, ragged), value=filler).view(-1, BLOCK)

    highest_end = blocks(index.ends, 0).amax(1)
    lowest_end = blocks(index.ends, 0).amin(1)
    block = torch.arange(len(highest_end))
    first = block * BLOCK
    last = torch.clamp(first + BLOCK, max=num_tokens) - 1
    before = block[None, :] < block[:, None]
    some = (before & (highest_end[None, :] > first[:, None])) | torch.eye(len(block), dtype=torch.bool)
    full = before & (lowest_end[None, :] > last[:, None])
    if ragged:
        full[-1] = False
    if window is not None:
        low, high = blocks(index.positions, 2**30).amin(1), blocks(index.positions, -1).amax(1)
        some &= low[:, None] - high[None, :] < window
        full &= high[:, None] - low[None, :] < window
    return some & ~full, full


# Flash attention over roots -------------------------------------------------------------------------------


def _flash_takes(q: Tensor, v: Tensor, rule: AttentionParams, parents: Sequence[int]) -> bool:
    size = q.shape[-1]
    fits = size % 8 == 0 and size <= _LARGEST_FLASH_HEAD and v.shape[-1] == size
    half = q.dtype in (torch.float16, torch.bfloat16)
    return half and fits and rule.softcap is None and all(parent < 0 for parent in parents)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None, tree: SegmentTree, cache: Cache
) -> Tensor:
    cu_seqlens = _cached(
        cache, "cu_seqlens", lambda: to_device(torch.tensor(tree.offsets, dtype=torch.int32), q.device)
    )
    share = q.shape[1] // k.shape[1]
    options: dict[str, Any] = {}
    if _FLASH_EXPANDS_HEADS:
        options["enable_gqa"] = share > 1
    elif share > 1:
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    packed_q, packed_k, packed_v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
    longest = max(tree.lengths)
    # (left, right): the keys before and after the query's own.
    reach = (-1 if window is None else window - 1, 0)
    out = varlen_attn(
        packed_q, packed_k, packed_v, cu_seqlens, cu_seqlens, longest, longest,
        scale=scaling, window_size=reach, **options,
    )  # fmt: skip
    return cast(Tensor, out).transpose(0, 1).unsqueeze(0)


# Flex attention over trees --------------------------------------------------------------------------------


def _flex(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams, window: int | None, tree: SegmentTree, cache: Cache
) -> Tensor:
    index = _cached(cache, "index", lambda: tree_index(tree))
    mask = _cached(cache, ("blocks", window), lambda: block_mask(index, window, q.device))
    size = v.shape[-1]
    # The kernel's smallest product has 16 columns; zeros change no score and add columns that are cut off again.
    q, k, v = (F.pad(x, (0, max(0, _SMALLEST_FLEX_HEAD - x.shape[-1]))) for x in (q, k, v))
    kernel = _compiled_flex() if q.is_cuda else cast(Callable[..., Tensor], flex_attention)
    score_mod = None if rule.softcap is None else _soft_cap(rule.softcap, q.device)
    out = kernel(q, k, v, score_mod=score_mod, block_mask=mask, scale=rule.scaling, enable_gqa=True)
    return out[..., :size]


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    # One kernel per kind of mask, cap, dtype, head shape and gradient mode; several models share the process.
    torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, _MAX_FLEX_KERNELS)
    # fullgraph: past that limit it raises, where it would otherwise quietly build [T, T] scores.
    return cast(Callable[..., Tensor], torch.compile(flex_attention, dynamic=True, fullgraph=True))


@functools.cache
def _soft_cap(cap: float, device: torch.device) -> Callable[..., Tensor]:
    # A tensor: with dynamic shapes the compiler cannot take a captured Python float.
    limit = torch.tensor(cap, device=device)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    return score_mod


def block_mask(index: TreeIndex, window: int | None, device: torch.device) -> BlockMask:
    """Makes the tree's mask for flex attention, on the host without a ``[T, T]`` array."""
    num_tokens = len(index.ends)
    ends = to_device(index.ends, device)
    if window is None:

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i) & (i < ends[j])
    else:
        positions = to_device(index.positions, device)
        # A tensor, not a number: windows of any size share one compiled kernel.
        floors = to_device(index.positions - window, device)

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i) & (i < ends[j]) & (positions[j] > floors[i])

    partial, full = block_masks(index, window)
    num_partial, where_partial = _listed(partial, device)
    num_full, where_full = _listed(full, device)
    return BlockMask.from_kv_blocks(
        num_partial, where_partial, num_full, where_full,
        BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(num_tokens, num_tokens),
    )  # fmt: skip


def _listed(blocks: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lists of ``[C, C]`` bool the number ``[1, 1, C]`` and indices ``[1, 1, C, C]`` of the blocks of each row, those
    first.
    """
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return to_device(blocks.sum(-1).int()[None, None], device), to_device(order.int()[None, None], device)
