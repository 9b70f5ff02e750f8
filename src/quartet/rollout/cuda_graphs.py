"""CUDA graphs of a decode step, one per number of rows and kind of sampling."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_BUCKET_STEP = 128
"""Beyond the last bucket."""


def bucket(num_rows: int) -> int:
    """The number of rows that is computed for ``num_rows`` running requests."""
    for size in BUCKETS:
        if num_rows <= size:
            return size
    return -(-num_rows // _BUCKET_STEP) * _BUCKET_STEP


class GraphedStep(Generic[Key]):
    """Runs ``body(key)``: the first time of each key as it is, then captured and replayed.

    The first time is the warm-up that a capture needs, and the proof that the body never waits for the device: where
    it does (some mixture-of-experts layers count their tokens on the host), no graph can hold it, and it runs as it is
    from then on; ``obstacle`` says so.

    Args:
        body: reads and writes tensors that stay where they are; launches the same work whenever the key is the same.
        device: graphs need a CUDA device; on any other the body always runs as it is.
        enabled: False runs the body as it is.
    """

    def __init__(self, body: Callable[[Key], None], device: torch.device, *, enabled: bool = True) -> None:
        self._body = body
        self._enabled = enabled and device.type == "cuda"
        self._seen: set[Key] = set()
        self._graphs: dict[Key, torch.cuda.CUDAGraph] = {}
        self.obstacle: str | None = None

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def run(self, key: Key) -> None:
        if not self._enabled or self.obstacle is not None:
            self._body(key)
        elif key in self._graphs:
            self._graphs[key].replay()
        elif key in self._seen:
            self._graphs[key] = self._captured(key)
            self._graphs[key].replay()
        else:
            self._first(key)

    def _first(self, key: Key) -> None:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._body(key)
            self._seen.add(key)
            return
        except RuntimeError as error:
            if "synchronizing CUDA operation" not in str(error):
                raise
            self.obstacle = "the model waits for the device within a decode step, so no CUDA graph can hold it"
        finally:
            torch.cuda.set_sync_debug_mode(before)
        self._body(key)

    def _captured(self, key: Key) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Graphs replay one after the other and keep nothing between, so they share their memory.
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            self._body(key)
        return graph

    def clear(self) -> None:
        """Forgets the graphs: tensors that they use are about to move."""
        self._graphs.clear()
        self._seen.clear()
