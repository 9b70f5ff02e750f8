"""What the rollout engine computes on a CUDA device: prompts into pages, and decode steps that never wait for the host.

Shapes: B running requests, R rows computed (the bucket of B).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quartet.models.packed import PackedCausalLM
from quartet.rollout.compute_weights import ComputeWeights
from quartet.rollout.cuda_admission import PagedAdmission, Prefill
from quartet.rollout.cuda_graphs import GraphedStep, bucket
from quartet.rollout.cuda_paged import PagedCache, PagedDecode, PagedPrefill, to_device
from quartet.rollout.cuda_pages import PageRun
from quartet.rollout.cuda_rows import DeviceRows, Entry, Readback
from quartet.rollout.cuda_sampler import Kind, sample_rows
from quartet.rollout.scheduler import Response, Settled


@dataclass(frozen=True)
class Sampled:
    """What one step sampled, for the requests that ran when it was launched."""

    responses: Sequence[Response]
    tokens: Sequence[int]
    logprobs: Sequence[float]


class CudaRunner:
    """
    Args:
        packed: the model.
        weights: what its products compute with.
        admission: whose pages the cache has.
        graphs: replay decode steps as CUDA graphs. Without, or on another device, every step runs as it is.
    """

    def __init__(
        self, packed: PackedCausalLM, weights: ComputeWeights, admission: PagedAdmission, *, graphs: bool = True
    ) -> None:
        self.packed = packed
        self._weights = weights
        self._admission = admission
        self._num_allocated = bucket(admission.max_running)
        self._step = GraphedStep(self._decode, packed.device, enabled=graphs)
        self._readback = Readback(self._num_allocated, packed.device)
        self._launched: deque[Sequence[Response]] = deque()
        self._running: Sequence[Response] = ()
        self._kind = Kind.GREEDY
        self._allocate()

    def _allocate(self) -> None:
        pool = self._admission.pool
        self._cache = PagedCache(pool.num_pages, pool.page_size)
        self._rows = self._make_rows()

    def _make_rows(self) -> DeviceRows:
        return DeviceRows(self._num_allocated, self._admission.widest, self.packed.vocab_size, self.packed.device)

    @property
    def num_bytes(self) -> int:
        return self._cache.num_bytes

    @property
    def num_launched(self) -> int:
        """Steps whose tokens were not received yet."""
        return len(self._launched)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What runs otherwise than asked for, in words."""
        return (f"decoding without CUDA graphs: {self._step.obstacle}",) if self._step.obstacle else ()

    # ---- between two steps ----

    def prefill(self, work: Prefill) -> None:
        """Computes what ``work`` asks for, into pages."""
        self._follow_growth()
        if work.tokens:
            self._fill(work.tokens, work.runs)
        self._cache.copy(work.copies)

    def _follow_growth(self) -> None:
        num_pages, width = self._admission.pool.num_pages, self._admission.widest
        if (num_pages, width) == (self._cache.num_pages, self._rows.table_width):
            return
        # Graphs know the tensors that now are replaced.
        self._step.clear()
        if num_pages > self._cache.num_pages:
            self._cache.grow(num_pages)
        if width > self._rows.table_width:
            former, self._rows = self._rows, self._make_rows()
            self._rows.take(former)

    def _fill(self, tokens: Sequence[tuple[int, ...]], runs: Sequence[PageRun]) -> None:
        # Equal lengths side by side: where attention runs by lengths, they share a call.
        order = sorted(range(len(runs)), key=lambda i: runs[i].length)
        device = self.packed.device
        context = PagedPrefill(self._cache, [runs[i] for i in order], device)
        ids = torch.tensor([token for i in order for token in tokens[i]])
        positions = torch.cat([torch.arange(runs[i].length) for i in order])
        with self._weights.active():
            self.packed.hidden(to_device(ids, device), to_device(positions, device), context)

    def settle(self, settled: Settled, running: Sequence[Response]) -> None:
        """Brings the rows on the device to ``running``, in row order."""
        if not settled.changed and len(running) == len(self._running):
            return
        self._rows.move([(source, target) for source, target, _ in settled.moves])
        self._rows.place([r.row for r in settled.placed], [self._entry(r) for r in settled.placed])
        self._rows.clear(range(len(running), len(self._running)))
        self._running = tuple(running)
        self._kind = Kind.of(r.request.sampling for r in running)

    def _entry(self, response: Response) -> Entry:
        newest = response.token_ids or response.request.prompt_ids
        run = self._admission.runs[response]
        return Entry(newest[-1], response.position, len(response.token_ids), run.pages, response.request.sampling)

    # ---- a step ----

    def launch(self) -> None:
        """Starts a decode step of all rows: each stores its newest token and samples the next."""
        num_rows = len(self._running)
        with self._weights.active():
            self._step.run((bucket(num_rows), self._kind))
        self._readback.send(self._rows, num_rows)
        self._launched.append(self._running)

    def _decode(self, key: tuple[int, Kind]) -> None:
        num_rows, kind = key
        rows, packed = self._rows, self.packed
        tokens, positions = rows.tokens[:num_rows], rows.positions[:num_rows]
        hidden = packed.hidden(tokens, positions, PagedDecode(self._cache, rows.tables[:num_rows], positions))
        logits = packed.logits(hidden)
        rows.advance(*sample_rows(logits, rows.sampling.head(num_rows), rows.num_generated[:num_rows], kind))

    def receive(self) -> Sampled:
        """What the oldest step on its way sampled; waits for it."""
        responses = self._launched.popleft()
        return Sampled(responses, *self._readback.receive(len(responses)))

    # ---- weights and memory ----

    def forget(self) -> None:
        """Makes all rows idle; what they had was computed with other weights."""
        self._rows.clear(range(len(self._running)))
        self._running = ()

    def release(self) -> None:
        """Gives the memory back."""
        self._step.clear()
        self._running = ()
        self._allocate()
