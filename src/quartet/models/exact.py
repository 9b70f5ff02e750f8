"""Arithmetic whose bits do not depend on what else is computed: for ``numerics: exact`` on the CPU in fp32, one thread.

Shapes: T packed tokens, N segments, n rows of a call (sequences or requests), H query heads, Hk key/value heads,
G = H / Hk, D head size, R query rows, K keys.

A kernel sums in an order that it picks by the sizes it is given, so one and the same token comes out with other bits
alone, in a batch, in the trainer's pack and in the engine's decode step. Three rules take the choice away; they are
measured, not promised by the kernels (``benchmarks/bit_invariance.py`` prints what a processor does, ``check_exact``
refuses one that does otherwise):

* **Rows.** A row of an fp32 product has the same bits for any number of rows from 16 on. Activations are computed 32
  numbers at a time and what is left over one by one, with other bits: so the numbers of a layer are a multiple of 32.
* **Query rows.** The same holds inside attention: at least 16 query rows per key/value head.
* **Keys.** The flash kernel of the CPU takes keys in blocks of 512, and inside a block it splits sums by the block's
  length once that is above some length. So a last block has a multiple of 32 keys up to there
  (``max_keys_summed_at_once``), else all 512, whatever a query still sees of it: masked keys add zeros at the end of
  every sum.

Then a query's output depends on itself and on the keys up to it alone: trainer, prefill and decode call the same two
functions below with any cut of rows and any larger number of keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quartet.models.attention import AttentionContext, AttentionParams, cpu_flash, visibility_mask

MIN_ROWS = 16
"""Rows of every product, and query rows of every attention call, at least."""
VECTOR = 32
"""Numbers that an activation computes at a time; also the step of rows and keys inside attention."""
KEY_BLOCK = 512
"""Keys that the flash kernel takes at a time."""
CALL_ROWS = 256
"""Query rows of one call at most; also the keys over which a soft-capped product sums at a time."""


@cache
@torch.no_grad()
def max_keys_summed_at_once() -> int:
    """Counts the keys of a last block up to which this processor sums as in a whole block; a multiple of 32, at most
    256.

    Measured once with a few head sizes: a shorter block is cheaper, and ``check_exact`` finds where it was no good.
    """
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(3, 1, 1, KEY_BLOCK, size, generator=generator) for size in (16, 64, 128)]
    for num_keys in range(VECTOR, CALL_ROWS + 1, VECTOR):
        mask = torch.zeros(1, 1, 1, KEY_BLOCK)
        mask[..., num_keys:] = float("-inf")
        for q, k, v in samples:
            rows = q[:, :, :MIN_ROWS]
            whole = cpu_flash(rows, k, v, 0.0, False, attn_mask=mask)[0]
            if not torch.equal(cpu_flash(rows, k[:, :, :num_keys], v[:, :, :num_keys], 0.0, False)[0], whole):
                return num_keys - VECTOR
    return CALL_ROWS


def padded_key_length(num_keys: int) -> int:
    """Returns the number of keys to hand to a kernel, of which the first ``num_keys`` are wanted."""
    whole, rest = divmod(num_keys, KEY_BLOCK)
    if rest > max_keys_summed_at_once():
        return (whole + 1) * KEY_BLOCK
    return whole * KEY_BLOCK + _round_up(rest, VECTOR)


def row_multiple(body: nn.Module) -> int:
    """Returns the number of which a pack's tokens must be a multiple, so that the numbers of every layer are one of 32.

    Args:
        body: the model without its head, whose outputs no activation takes.
    """
    widths = [module.out_features for module in body.modules() if isinstance(module, nn.Linear)]
    return VECTOR // math.gcd(VECTOR, *widths)


def padded_rows(num_rows: int, step: int = 1) -> int:
    """Returns how many rows to compute for ``num_rows`` wanted ones."""
    return _round_up(max(num_rows, MIN_ROWS), step)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


# Kernels ---------------------------------------------------------------------------------------------------


def additive_mask(query_positions: Tensor, num_keys: int, rule: AttentionParams, dtype: torch.dtype) -> Tensor:
    """Makes the mask ``[..., R] → [..., R, K]``: 0 where a query sees a key (positions 0 to ``num_keys - 1``), else
    -inf.
    """
    allowed = visibility_mask(query_positions, torch.arange(num_keys), rule)
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill_(~allowed, float("-inf"))


def exact_masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rule: AttentionParams) -> Tensor:
    """Attends with ``q [n, H, R, D]``, ``k, v [n, Hk, K, D]``, additive ``mask [n | 1, 1, R | 1, K]`` →
    ``[n, H, R, D]``.

    At least 16 rows, and as many keys as ``padded_key_length`` says. Differentiable.
    """
    if rule.softcap is None:
        out: Tensor = cpu_flash(q, k, v, 0.0, False, attn_mask=mask, scale=rule.scaling)[0]
        return out
    return _soft_capped(q, k, v, mask, rule.scaling, rule.softcap)


def _soft_capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, softcap: float) -> Tensor:
    """Does what ``exact_masked_attention`` does, by plain products: no fused kernel of the CPU caps scores."""
    n, num_kv, num_keys, size = k.shape
    share, num_rows = q.shape[1] // num_kv, q.shape[2]
    scores = q.reshape(n, num_kv, share * num_rows, size) @ k.transpose(-1, -2) * scaling
    scores = (softcap * torch.tanh(scores / softcap)).view(n, num_kv, share, num_rows, num_keys)
    weights = (scores + mask.unsqueeze(2)).softmax(-1).flatten(2, 3)
    out = weights[..., :CALL_ROWS] @ v[:, :, :CALL_ROWS]
    for start in range(CALL_ROWS, num_keys, CALL_ROWS):
        part = slice(start, start + CALL_ROWS)
        out = out + weights[..., part] @ v[:, :, part]
    return out.view(n, num_kv, share, num_rows, size).flatten(1, 2)


def decode_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rule: AttentionParams) -> Tensor:
    """Attends with one query per request: ``q [n, H, D]``, ``k, v [n, Hk, K, D]``, ``mask [n, 1, 1, K]`` →
    ``[n, H, D]``.
    """
    n, num_heads, size = q.shape
    share = num_heads // k.shape[1]
    # Query heads of one key/value head stand as rows; rows of zeros fill up.
    rows = q.view(n, k.shape[1], share, size)
    out = exact_masked_attention(F.pad(rows, (0, 0, 0, max(0, MIN_ROWS - share))), k, v, mask, rule)
    return out[:, :, :share].reshape(n, num_heads, size)


# Contexts --------------------------------------------------------------------------------------------------


class ExactContext(AttentionContext):
    """A context whose ``attend`` takes rows behind the wanted ones, which fill a forward up to ``padded_rows``."""


@dataclass
class _Call:
    """One kernel call: of n segments ``num_rows`` query rows each, from position ``start`` on, over ``num_keys`` keys.

    Attributes:
        rows: packed tokens of each segment's queries, ``[R]`` at most.
        keys: packed tokens of each segment's keys, from the chain's first on, ``[K]`` at most.
    """

    start: int
    num_rows: int
    num_keys: int
    rows: list[Tensor]
    keys: list[Tensor]


class ExactPackedAttention(ExactContext):
    """As ``PackedAttention``: each segment of a pack sees its ancestors wholly and itself causally.

    Queries run in calls of at most 256 rows, together with those of other segments at the same positions. A prompt
    shared by several responses is computed once; its keys are gathered for each of them.

    Args:
        lengths: tokens per segment, in packed order.
        parents: the segment that each one continues, -1 for a root; every parent stands before its children.
    """

    def __init__(self, lengths: Sequence[int], parents: Sequence[int] | None = None) -> None:
        self.num_tokens = sum(lengths)
        calls: dict[tuple[int, int, int], _Call] = {}
        chains: list[Tensor] = []
        first = 0
        for length, parent in zip(lengths, parents or [-1] * len(lengths), strict=True):
            own = torch.arange(first, first + length)
            chains.append(own if parent < 0 else torch.cat([chains[parent], own]))
            depth = len(chains[-1]) - length
            for offset in range(0, length, CALL_ROWS):
                rows = own[offset : offset + CALL_ROWS]
                start, stop = depth + offset, depth + offset + len(rows)
                key = (start, _round_up(len(rows), VECTOR), padded_key_length(stop))
                call = calls.setdefault(key, _Call(*key, [], []))
                call.rows.append(rows)
                call.keys.append(chains[-1][:stop])
            first += length
        self._calls = [
            (call, _filled(call.rows, call.num_rows), _filled(call.keys, call.num_keys)) for call in calls.values()
        ]
        # Where each packed token's row stands in the calls' outputs, one after the other.
        self._back = torch.empty(self.num_tokens, dtype=torch.int64)
        end = 0
        for call in calls.values():
            for rows in call.rows:
                self._back[rows] = torch.arange(end, end + len(rows))
                end += call.num_rows
        self._masks: dict[tuple[int, int, int, int | None], Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams) -> Tensor:
        queries, keys, values = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
        pieces = []
        for call, rows, places in self._calls:
            q_call = _gathered(queries, rows, call.num_rows)
            k_call, v_call = _gathered(keys, places, call.num_keys), _gathered(values, places, call.num_keys)
            whole = rule.softcap is None and (rule.window is None or rule.window >= call.num_rows)
            if whole and call.start == 0 and call.num_keys == call.num_rows:
                out = cpu_flash(q_call, k_call, v_call, 0.0, True, scale=rule.scaling)[0]
            else:
                out = exact_masked_attention(q_call, k_call, v_call, self._mask(call, rule, q.dtype), rule)
            pieces.append(out.transpose(1, 2).flatten(0, 1))
        # Rows that only fill the pack up take any output.
        back = F.pad(self._back, (0, q.shape[2] - self.num_tokens))
        return torch.cat(pieces).index_select(0, back).transpose(0, 1).unsqueeze(0)

    def _mask(self, call: _Call, rule: AttentionParams, dtype: torch.dtype) -> Tensor:
        """Returns the mask ``[1, 1, R, K]``, made once for all layers."""
        key = (call.start, call.num_rows, call.num_keys, rule.window)
        mask = self._masks.get(key)
        if mask is None:
            positions = torch.arange(call.start, call.start + call.num_rows)
            mask = self._masks[key] = additive_mask(positions, call.num_keys, rule, dtype)[None, None]
        return mask


def _filled(parts: Sequence[Tensor], length: int) -> Tensor:
    """Joins the parts one after the other, each filled up to ``length`` with its first token."""
    return torch.cat([torch.cat([part, part[:1].expand(length - len(part))]) for part in parts])


def _gathered(x: Tensor, places: Tensor, length: int) -> Tensor:
    """Gathers ``[T, H, D] → [n, H, length, D]``."""
    return x.index_select(0, places).unflatten(0, (-1, length)).transpose(1, 2)
