"""Model calls of the native engine: prompts in packs, running requests one token at a time.

Shapes: B running requests, R = max(B, 16) rows computed, T packed tokens, V vocabulary.

At least 16 rows go through every product: in fp32 on one thread a row's bits then do not depend on how many
there are, so a request yields the same tokens alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quartet.models.packed import PackedCausalLM
from quartet.rollout.cache import KeyValues, KVCache
from quartet.rollout.contexts import DecodeAttention, PrefillAttention
from quartet.rollout.sampler import SamplingRows
from quartet.rollout.scheduler import Response

MIN_ROWS = 16


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt's keys and values and the logits ``[V]`` that follow it."""

    key_values: KeyValues
    logits: Tensor

    def clone(self) -> PreparedPrompt:
        return PreparedPrompt(self.key_values.clone(), self.logits.clone())

    @property
    def num_bytes(self) -> int:
        return self.key_values.num_bytes + self.logits.numel() * self.logits.element_size()


class Rows:
    """The running requests as columns, updated in place while the same requests run.

    Attributes:
        tokens, positions: ``[R]`` int64, each row's newest token and its position; 0 for rows without one
            yet.
        num_generated: ``[B]`` tokens each response has, which is the index of the next.
        longest: the largest position plus one.
    """

    def __init__(self, running: Sequence[Response[PreparedPrompt]], vocab_size: int, device: torch.device) -> None:
        self.num_rows = len(running)
        padding = [0] * (MIN_ROWS - len(running))
        started = [bool(r.token_ids) for r in running]
        positions = [r.num_cached if s else 0 for r, s in zip(running, started, strict=True)]
        tokens = [r.token_ids[-1] if s else 0 for r, s in zip(running, started, strict=True)]
        self.tokens = torch.tensor(tokens + padding, dtype=torch.int64, device=device)
        self.positions = torch.tensor(positions + padding, dtype=torch.int64, device=device)
        self.num_generated: NDArray[np.uint64] = np.array([len(r.token_ids) for r in running], dtype=np.uint64)
        self.longest = max(positions) + 1
        self.sampling = SamplingRows.build([r.request.sampling for r in running], vocab_size, device)

    def advance(self, tokens: Tensor) -> None:
        """Takes ``tokens [B]`` as the newest of their rows. Not for rows that just got their first."""
        self.tokens[: self.num_rows] = tokens
        self.positions[: self.num_rows] += 1
        self.num_generated += np.uint64(1)
        self.longest += 1


class ModelRunner:
    def __init__(self, packed: PackedCausalLM) -> None:
        self.packed = packed

    def prefill(self, sequences: Sequence[Sequence[int]]) -> tuple[list[KeyValues], Tensor]:
        """One packed forward.

        Returns:
            Keys and values of each sequence (views of the pack's), and the last hidden states' rows ``[n,
            D]``.
        """
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        lengths = [len(sequences[i]) for i in order]
        tokens = [token for i in order for token in sequences[i]]
        ends = torch.tensor(lengths).cumsum(0)
        if len(tokens) < MIN_ROWS:
            lengths.append(MIN_ROWS - len(tokens))
            tokens += [0] * lengths[-1]
        device = self.packed.device
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        context = PrefillAttention(lengths)
        hidden = self.packed.hidden(torch.tensor(tokens, device=device), positions, context)
        whole = context.key_values()
        parts: list[KeyValues] = [whole] * len(order)
        for place, end in zip(order, ends.tolist(), strict=True):
            parts[place] = whole.part(end - len(sequences[place]), end)
        back = torch.tensor(order).argsort()
        return parts, hidden[(ends[back] - 1).to(device)]

    def decode(self, cache: KVCache, rows: Rows) -> Tensor:
        """Feeds every row's newest token; ``[R, V]`` logits of the next."""
        context = DecodeAttention(cache, rows.positions, rows.longest)
        return self.packed.logits(self.packed.hidden(rows.tokens, rows.positions, context))

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, D] → [n, V]``, computed on at least 16 rows."""
        num_rows = hidden.shape[0]
        if num_rows < MIN_ROWS:
            hidden = torch.cat([hidden, hidden[-1:].expand(MIN_ROWS - num_rows, -1)])
        return self.packed.logits(hidden)[:num_rows]
