"""The running requests as columns on the device, and the way of what was sampled back to the host.

Shapes: B rows, W pages of a row.

The columns are made once and changed in place: a CUDA graph reads and writes them where they are. What changes between
two steps (arrivals, moves, departures) is written without waiting for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quartet.rollout.cuda_paged import to_device
from quartet.rollout.cuda_pages import IDLE_PAGE
from quartet.rollout.cuda_sampler import SamplingColumns
from quartet.rollout.protocol import SamplingParams


@dataclass(frozen=True)
class Entry:
    """What a row needs to know of its request.

    Attributes:
        token: the newest token, whose key and value are not stored yet.
        position: of that token.
        num_generated: index of the next token in its response.
        pages: with room for everything the request may store.
    """

    token: int
    position: int
    num_generated: int
    pages: tuple[int, ...]
    sampling: SamplingParams


class DeviceRows:
    """
    Args:
        num_rows: B, rows at most.
        table_width: W.

    Attributes:
        tokens, positions, num_generated: ``[B]`` int64 (see ``Entry``).
        active: ``[B]`` int64, 1 where a request runs. An idle row computes on the idle page and stays as it is.
        tables: ``[B, W]`` int32.
        sampling: columns of B rows.
        picked_tokens: ``[B]`` int64, and ``picked_logprobs [B]`` fp32, of the last step.
    """

    def __init__(self, num_rows: int, table_width: int, vocab_size: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.table_width = table_width
        self.device = device
        self._vocab_size = vocab_size
        self.tokens, self.positions, self.num_generated, self.active, self.picked_tokens = (
            torch.zeros(num_rows, dtype=torch.int64, device=device) for _ in range(5)
        )
        self.picked_logprobs = torch.zeros(num_rows, device=device)
        self.tables = torch.full((num_rows, table_width), IDLE_PAGE, dtype=torch.int32, device=device)
        idle = SamplingColumns.build([SamplingParams()] * num_rows, vocab_size)
        self.sampling = SamplingColumns(*(x.to(device) for x in idle.tensors()))

    def _columns(self) -> tuple[Tensor, ...]:
        """In the order of ``_table``."""
        counters = (self.tokens, self.positions, self.num_generated, self.active)
        return *counters, self.tables, *self.sampling.tensors()

    def _table(self, entries: Sequence[Entry]) -> tuple[Tensor, ...]:
        counters = torch.tensor([(e.token, e.position, e.num_generated, 1) for e in entries]).T.contiguous()
        padded = [(*e.pages, *[IDLE_PAGE] * (self.table_width - len(e.pages))) for e in entries]
        sampling = SamplingColumns.build([e.sampling for e in entries], self._vocab_size)
        return *counters, torch.tensor(padded, dtype=torch.int32), *sampling.tensors()

    def take(self, former: DeviceRows) -> None:
        """Takes over the contents of rows with narrower tables."""
        for column, values in zip(self._columns(), former._columns(), strict=True):
            if column.dim() == values.dim() and column.shape != values.shape:
                column[:, : values.shape[1]] = values
            else:
                column.copy_(values)

    def place(self, rows: Sequence[int], entries: Sequence[Entry]) -> None:
        """Writes ``entries`` into ``rows``."""
        if not rows:
            return
        index = to_device(torch.tensor(rows), self.device)
        for column, values in zip(self._columns(), self._table(entries), strict=True):
            column.index_copy_(0, index, to_device(values, self.device))

    def move(self, moves: Iterable[tuple[int, int]]) -> None:
        """Copies rows ``(source, target)``, one after the other."""
        origins: dict[int, int] = {}
        for source, target in moves:
            origins[target] = origins.get(source, source)
        if not origins:
            return
        pairs = torch.tensor([list(origins.values()), list(origins)])
        source_index, target_index = to_device(pairs, self.device)
        for column in self._columns():
            column.index_copy_(0, target_index, column.index_select(0, source_index))

    def clear(self, rows: Sequence[int]) -> None:
        """Makes ``rows`` idle."""
        if not rows:
            return
        index = to_device(torch.tensor(rows), self.device)
        for column in (self.tokens, self.positions, self.num_generated, self.active, self.tables):
            column.index_fill_(0, index, 0)

    def advance(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Takes what the first rows sampled; each token becomes its row's newest."""
        num_rows = len(tokens)
        active = self.active[:num_rows]
        self.picked_tokens[:num_rows] = tokens
        self.picked_logprobs[:num_rows] = logprobs
        self.tokens[:num_rows] = tokens * active
        self.positions[:num_rows] += active
        self.num_generated[:num_rows] += active


class Readback:
    """Copies what steps sampled to the host while the device goes on.

    Args:
        num_rows: rows at most.
        depth: steps that may be on their way at once.
    """

    def __init__(self, num_rows: int, device: torch.device, depth: int = 2) -> None:
        self._on_device = device.type == "cuda"
        self._slots = deque(
            (
                torch.zeros(num_rows, dtype=torch.int64, pin_memory=self._on_device),
                torch.zeros(num_rows, pin_memory=self._on_device),
                torch.cuda.Event() if self._on_device else None,
            )
            for _ in range(depth)
        )
        self._sent: deque[tuple[Tensor, Tensor, torch.cuda.Event | None]] = deque()

    def __len__(self) -> int:
        """Steps sent and not received."""
        return len(self._sent)

    def send(self, rows: DeviceRows, num_rows: int) -> None:
        """Starts the copy of the first rows' tokens and log-probabilities.

        Raises:
            RuntimeError: as many steps are on their way as there may be.
        """
        if not self._slots:
            raise RuntimeError("receive a step before sending another one")
        slot = self._slots.popleft()
        tokens, logprobs, event = slot
        tokens[:num_rows].copy_(rows.picked_tokens[:num_rows], non_blocking=True)
        logprobs[:num_rows].copy_(rows.picked_logprobs[:num_rows], non_blocking=True)
        if event is not None:
            event.record()
        self._sent.append(slot)

    def receive(self, num_rows: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities of the oldest step sent; waits for it."""
        slot = self._sent.popleft()
        tokens, logprobs, event = slot
        if event is not None:
            event.synchronize()
        found = tokens[:num_rows].tolist(), logprobs[:num_rows].tolist()
        self._slots.append(slot)
        return found
