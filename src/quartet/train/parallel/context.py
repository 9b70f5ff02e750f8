"""How the ranks of one data rank share a pack: spans of rows, and attention over heads.

Shapes: P packed tokens, M selected rows, H query heads, Hk key/value heads, t rows of a span, D head size.

The pack's rows are cut over context ranks into spans of like cost, each span over tensor ranks into nearly equal parts.
Between layers a rank has its own rows alone; within attention and the MLP the rows of its span. Attention needs all
rows of a pack, but each head by itself: an all-to-all over the context ranks turns *all heads of a span* into *all rows
of some heads*, and another one turns the result back (DeepSpeed-Ulysses, Jacobs et al. 2023). What happens between the
two is one process's attention with fewer heads: a tree of segments, windows and soft caps need nothing of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from quartet.batch.ragged import to_device_async
from quartet.models.attention import AttentionContext, AttentionParams
from quartet.models.packed_model import PackedModel
from quartet.train.parallel.pass_group import PassGroup, near_equal


@dataclass(frozen=True)
class ModelParallel:
    """The ranks that compute one data rank's part between them; with neither group one process computes alone.

    Attributes:
        tensor, context: the groups of this rank; None where they would be of size 1.
        num_heads, num_kv_heads: of the whole model.
        row_cost: what the head takes per selected row, in tokens through the layers.
    """

    tensor: PassGroup | None = None
    context: PassGroup | None = None
    num_heads: int = 1
    num_kv_heads: int = 1
    row_cost: float = 0.0

    @classmethod
    def of(cls, packed: PackedModel, *, tensor: PassGroup | None, context: PassGroup | None) -> ModelParallel:
        """Makes the split for the model as a whole, before its weights are shared out or after."""
        config = packed.model.config.get_text_config()
        heads = int(config.num_attention_heads)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return cls(tensor, context, heads, int(kv_heads), packed.flops.row / packed.flops.token)

    @property
    def num_ranks(self) -> int:
        """Also the rows that a pack needs: with fewer a rank would have none."""
        return _size(self.tensor) * _size(self.context)

    def split(self, num_tokens: int, selected: Tensor | None) -> TokenSplit:
        """Decides how ``num_tokens`` rows are cut.

        Args:
            selected: ``[M]`` rows that the head reads, on the host.

        Raises:
            ValueError: fewer tokens than ranks.
        """
        if num_tokens < self.num_ranks:
            raise ValueError(f"{num_tokens} tokens cannot be cut over {self.num_ranks} ranks")
        num_spans, least = _size(self.context), _size(self.tensor)
        if num_spans == 1:
            return TokenSplit(self, (0, num_tokens))
        costs = torch.ones(num_tokens, dtype=torch.float64)
        if selected is not None:
            costs += self.row_cost * torch.bincount(selected, minlength=num_tokens)
        done = costs.cumsum(0)
        aims = done[-1] * torch.arange(1, num_spans, dtype=torch.float64) / num_spans
        bounds = [0]
        for i, cut in enumerate((torch.searchsorted(done, aims) + 1).tolist(), 1):
            bounds.append(min(max(cut, bounds[-1] + least), num_tokens - (num_spans - i) * least))
        return TokenSplit(self, (*bounds, num_tokens))


ALONE = ModelParallel()
"""One process has all of a pack."""


@dataclass(frozen=True)
class TokenSplit:
    """Which rows of one pack are whose.

    Attributes:
        bounds: ``[context + 1]`` where the spans of the context ranks begin and end.
    """

    parallel: ModelParallel
    bounds: tuple[int, ...]

    @property
    def span(self) -> slice:
        """This context rank's rows of the pack."""
        place = _rank(self.parallel.context)
        return slice(self.bounds[place], self.bounds[place + 1])

    @property
    def span_sizes(self) -> tuple[int, ...]:
        """Rows of every context rank."""
        return tuple(stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False))

    @cached_property
    def row_sizes(self) -> tuple[int, ...]:
        """Rows of every tensor rank within this rank's span."""
        return near_equal(self.span.stop - self.span.start, _size(self.parallel.tensor))

    @property
    def num_own(self) -> int:
        """Rows of this rank alone."""
        return self.row_sizes[_rank(self.parallel.tensor)]

    def attention(self, inner: AttentionContext) -> AttentionContext:
        """Returns what this rank's layers are given in the place of ``inner``, which knows the whole pack."""
        return inner if self.parallel.num_ranks == 1 else SplitAttention(inner, self)

    def read(self, rows: Tensor, device: torch.device) -> RowRead:
        """Finds which of ``rows [M]``, in any order and on the host, this rank has."""
        if self.parallel.num_ranks == 1:
            return RowRead(self, to_device_async(rows, device))
        sizes = [size for span in self.span_sizes for size in near_equal(span, _size(self.parallel.tensor))]
        ends = torch.tensor(list(accumulate(sizes)))
        owners = torch.bucketize(rows, ends, right=True)
        order = owners.argsort(stable=True)
        counts = torch.bincount(owners, minlength=len(sizes)).view(len(self.span_sizes), -1)
        place, span = _rank(self.parallel.tensor), _rank(self.parallel.context)
        index = span * counts.shape[1] + place
        of_rank = order.split(counts.flatten().tolist())
        return RowRead(
            self,
            to_device_async(rows[of_rank[index]] - (int(ends[index]) - sizes[index]), device),
            to_device_async(order.split(counts.sum(1).tolist())[span], device),
            to_device_async(order.argsort(), device),
            tuple(counts[span].tolist()),
            tuple(counts.sum(1).tolist()),
        )


@dataclass(frozen=True)
class RowRead:
    """Selected rows ``[M]`` of a pack, of which every rank reads its own.

    Attributes:
        local: among this rank's hidden rows.
        of_span: which of the M the span has, by tensor ranks; None where there is one rank.
        back: where each of the M stands among those of all ranks, one rank after the other.
        tensor_sizes: of the M, those of every tensor rank of this span.
        context_sizes: those of every span.
    """

    split: TokenSplit
    local: Tensor
    of_span: Tensor | None = None
    back: Tensor | None = None
    tensor_sizes: tuple[int, ...] = ()
    context_sizes: tuple[int, ...] = ()

    def own(self, hidden: Tensor) -> Tensor:
        """Picks the rows that are read from this rank's hidden rows ``[t, D]``."""
        return hidden.index_select(0, self.local)

    def of_tensor_ranks(self, own: Tensor) -> Tensor:
        """Gathers the span's rows, from what ``own`` gave on each of its ranks. Gradients are summed over them."""
        tensor = self.split.parallel.tensor
        return own if tensor is None else tensor.gather_rows(own, self.tensor_sizes)

    def labels(self, labels: Tensor) -> Tensor:
        """Picks the span's labels from all ``[M]``."""
        return labels if self.of_span is None else labels[self.of_span]

    def join(self, values: Tensor, *, by_tensor: bool) -> Tensor:
        """Joins every rank's results ``[m]`` → ``[M]`` on all of them, which then go on in the same way.

        Args:
            by_tensor: tensor ranks have results of rows of their own; else each has all of its span's.
        """
        parallel = self.split.parallel
        if by_tensor and parallel.tensor is not None:
            values = parallel.tensor.join_rows(values, self.tensor_sizes)
        if parallel.context is not None:
            values = parallel.context.join_rows(values, self.context_sizes)
        return values if self.back is None else values.index_select(0, self.back)


class SplitAttention:
    """Attention of one rank's rows and heads by ``inner``, which sees all rows of some heads.

    Attributes:
        row_sizes: rows of every tensor rank within this rank's span, for what gathers and scatters them.
    """

    def __init__(self, inner: AttentionContext, split: TokenSplit) -> None:
        self._inner = inner
        self._parallel = split.parallel
        self._span_sizes = split.span_sizes
        self.row_sizes = split.row_sizes

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams) -> Tensor:
        """Attends with ``q [1, H, t, D]``, ``k, v [1, Hk, t, D]`` of the span: heads of this tensor rank, or all of
        them where a projection had to be gathered → ``[1, H / tensor, t, D]``.
        """
        tensor, context = self._parallel.tensor, self._parallel.context
        if tensor is not None:
            q = _own_heads(q, self._parallel.num_heads, tensor)
            k, v = (_own_heads(x, self._parallel.num_kv_heads, tensor) for x in (k, v))
        if context is None:
            return self._inner.attend(layer, q, k, v, rule)
        of_ranks = [x.chunk(context.size, 1) for x in (q, _repeated(k, context.size), _repeated(v, context.size))]
        # One exchange for the three: every rank's heads of each stand together.
        own = context.to_heads(
            torch.cat([x for of_rank in zip(*of_ranks, strict=True) for x in of_rank], 1), self._span_sizes
        )
        q, k, v = own.split([parts[0].shape[1] for parts in of_ranks], 1)
        return context.to_tokens(self._inner.attend(layer, q, k, v, rule), self._span_sizes)


def _own_heads(x: Tensor, num_heads: int, group: PassGroup) -> Tensor:
    """Returns this rank's heads of ``x [1, heads, t, D]``, which has them or all of them.

    Raises:
        RuntimeError: neither; a layer has another number of heads than the model.
    """
    if x.shape[1] * group.size == num_heads:
        return x
    if x.shape[1] != num_heads:
        raise RuntimeError(f"a layer has {x.shape[1]} heads on one of {group.size} ranks, the model {num_heads} in all")
    return _repeated(x, group.size).chunk(group.size, 1)[group.rank]


def _repeated(x: Tensor, ranks: int) -> Tensor:
    """Repeats every head of ``x [1, heads, t, D]`` so often that each rank gets equally many, those of its
    query heads.
    """
    times = ranks // math.gcd(x.shape[1], ranks)
    return x if times == 1 else x.repeat_interleave(times, 1)


def _size(group: PassGroup | None) -> int:
    return 1 if group is None else group.size


def _rank(group: PassGroup | None) -> int:
    return 0 if group is None else group.rank
