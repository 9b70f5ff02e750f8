"""Keys and values in pages, and the two attention contexts that write and read them.

Shapes: N pages, P tokens per page, Hk key/value heads, D head size, B rows, W pages of a row, T packed tokens.

On a CUDA device decoding runs the kernel of ``cuda_kernel``; elsewhere the plain formula over gathered pages, which is
also what the kernel is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quartet.models.attention import LayerRule, PackedAttention, masked_attention
from quartet.rollout.cuda_pages import PageRun


class PagedCache:
    """Pages ``[N, Hk, P, D]`` of keys and of values per layer; dtype and heads are those of the first keys that arrive.

    Args:
        num_pages: of every layer.
        page_size: tokens per page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for pages in self._layers.values() for x in pages)

    def layer(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's pages of keys and of values, made like ``k, v [1, Hk, T, D]`` at the first call."""
        pages = self._layers.get(layer)
        if pages is None:
            k_pages, v_pages = (x.new_zeros(self.num_pages, x.shape[1], self.page_size, x.shape[3]) for x in (k, v))
            pages = self._layers[layer] = (k_pages, v_pages)
        return pages

    def grow(self, num_pages: int) -> None:
        """Makes room for ``num_pages``; what is stored stays, in other tensors."""
        for layer, pages in self._layers.items():
            grown = [x.new_zeros(num_pages, *x.shape[1:]) for x in pages]
            for new, old in zip(grown, pages, strict=True):
                new[: self.num_pages] = old
            self._layers[layer] = (grown[0], grown[1])
        self.num_pages = num_pages

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies whole pages, ``(source, target)``; no page is both."""
        if not copies or not self._layers:
            return
        device = next(iter(self._layers.values()))[0].device
        source, target = to_device(torch.tensor(copies).T.contiguous(), device)
        for pages in self._layers.values():
            for x in pages:
                x.index_copy_(0, target, x.index_select(0, source))


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies to the device without waiting for it."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class Places:
    """Where tokens are stored: ``offset [T]`` of ``page [T]``, both int64; the same for all layers."""

    def __init__(self, page: Tensor, offset: Tensor, page_size: int) -> None:
        self._page, self._offset, self._page_size = page, offset, page_size
        self._rows: dict[int, Tensor] = {}

    def store(self, pages: Tensor, new: Tensor) -> None:
        """Writes ``new [1, Hk, T, D]`` into ``pages [N, Hk, P, D]``."""
        num_kv, size = pages.shape[1], pages.shape[3]
        rows = self._rows.get(num_kv)
        if rows is None:
            head = torch.arange(num_kv, device=pages.device)
            rows = (self._page.unsqueeze(1) * num_kv + head) * self._page_size + self._offset.unsqueeze(1)
            rows = self._rows[num_kv] = rows.flatten()
        pages.view(-1, size).index_copy_(0, rows, new.squeeze(0).transpose(0, 1).reshape(-1, size))


class PagedPrefill(PackedAttention):
    """The training forward's attention over whole sequences; stores every layer's keys and values in their pages.

    Args:
        cache: where they go.
        runs: pages of each sequence, which begins at their first token.
    """

    def __init__(self, cache: PagedCache, runs: Sequence[PageRun], device: torch.device) -> None:
        super().__init__([run.length for run in runs])
        self._pages = cache
        size = cache.page_size
        used = [run.pages[: -(-run.length // size)] for run in runs]
        token = torch.cat([torch.arange(run.length) for run in runs])
        page = torch.cat(
            [torch.tensor(p).repeat_interleave(size)[: run.length] for p, run in zip(used, runs, strict=True)]
        )
        page, offset = to_device(torch.stack((page, token % size)), device)
        self._places = Places(page, offset, size)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        k_pages, v_pages = self._pages.layer(layer, k, v)
        self._places.store(k_pages, k)
        self._places.store(v_pages, v)
        return super().attend(layer, q, k, v, rule)


class PagedDecode:
    """One new token per row: stores its key and value, then attends to what the row's pages hold up to it.

    Args:
        tables: ``[B, W]`` int32, pages of each row.
        positions: ``[B]`` int64 of the new tokens.
    """

    def __init__(self, cache: PagedCache, tables: Tensor, positions: Tensor) -> None:
        self._cache = cache
        self._tables = tables
        self._positions = positions
        size = cache.page_size
        page = tables.gather(1, (positions // size).unsqueeze(1)).squeeze(1).long()
        self._places = Places(page, positions % size, size)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: LayerRule) -> Tensor:
        k_pages, v_pages = self._cache.layer(layer, k, v)
        self._places.store(k_pages, k)
        self._places.store(v_pages, v)
        decode = _paged_decode if q.is_cuda else gathered_decode
        out = decode(q.squeeze(0).transpose(0, 1), k_pages, v_pages, self._tables, self._positions, rule)
        return out.transpose(0, 1).unsqueeze(0)


def _paged_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, positions: Tensor, rule: LayerRule
) -> Tensor:
    # Triton comes with torch for CUDA only.
    from quartet.rollout.cuda_kernel import paged_decode

    return paged_decode(q, k_pages, v_pages, tables, positions, rule)


def gathered_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, positions: Tensor, rule: LayerRule
) -> Tensor:
    """The same as ``cuda_kernel.paged_decode``, with every row's pages laid out one after the other first."""
    num_keys = tables.shape[1] * k_pages.shape[2]
    distance = positions.unsqueeze(1) - torch.arange(num_keys, device=q.device)
    seen = distance >= 0
    if rule.window is not None:
        seen &= distance < rule.window
    rows = tables.long()
    k, v = (x[rows].transpose(1, 2).flatten(2, 3) for x in (k_pages, v_pages))
    # A page may hold anything behind its last token, and 0 · NaN is NaN.
    k, v = (x.masked_fill(~seen[:, None, :, None], 0.0) for x in (k, v))
    return masked_attention(q.unsqueeze(2), k, v, seen[:, None, None], rule).squeeze(2)
