"""Weights within one process: where they come from, and how they come to an engine that is there, too."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from quartet.weights.digest import tensor_digest
from quartet.weights.gather import gather
from quartet.weights.manifest import TensorSpec, WeightManifest
from quartet.weights.sink import TensorSink


class NamedSource:
    """Whole tensors under the names that they are sent by, one at a time.

    A trainer that shards its weights takes part with all its ranks: rank 0 sends, the others ask for every tensor, too.
    Every gather is a collective, so all ranks do the same ones in the same order and nothing between them, to the end,
    even where the sync fails halfway.

    Args:
        named: gives ``(name, tensor)`` anew for every sync, ``model.named_parameters`` say; DTensors are gathered.
        like: the dtype of each tensor by its name, where they differ (``TensorSink.dtypes`` of an engine).
        everywhere: every rank that holds a part gets the tensors, not only the first.
    """

    def __init__(
        self,
        named: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        like: Mapping[str, torch.dtype] | None = None,
        everywhere: bool = False,
    ) -> None:
        self._gather = partial(gather, everywhere=everywhere)
        self._named = named
        self._like = dict(like or {})

    def specs(self) -> tuple[TensorSpec, ...]:
        """What will be sent, in order. No collective."""
        return tuple(TensorSpec.of(name, tensor, self._like.get(name)) for name, tensor in self._named())

    @torch.no_grad()
    def tensors(self) -> Iterator[Tensor]:
        """Their contents in that order, each whole and contiguous, valid until the next one is asked for.

        Collective where the weights are sharded: all ranks go through them to the end, and the first one gets them.
        """
        for name, tensor in self._named():
            whole = self._gather(tensor)
            if whole is not None:
                yield whole.to(dtype=self._like.get(name)).contiguous()


def sync_in_process(source: NamedSource, sinks: Sequence[TensorSink], version: int) -> WeightManifest:
    """Brings ``source`` to sinks of this process as ``version``, one tensor after the other.

    Raises:
        WeightSyncError: names the tensor; no sink serves a mixture.
    """
    tensors, digests = source.tensors(), list[str]()
    try:
        specs = source.specs()
        for sink in sinks:
            sink.begin(specs, version)
        for spec, tensor in zip(specs, tensors, strict=True):
            digests.append(tensor_digest(tensor))
            for sink in sinks:
                sink.write(spec.name, 0, tensor.view(-1))
        manifest = WeightManifest(version, specs, tuple(digests))
        for sink in sinks:
            sink.verify(manifest)
        for sink in sinks:
            sink.commit()
    except BaseException as error:
        for sink in sinks:
            sink.abort(f"{type(error).__name__}: {error}")
        if isinstance(error, Exception):
            deque(tensors, maxlen=0)  # the other ranks wait in their gathers for this one, to the last tensor
        raise
    return manifest


def write_into(sink: TensorSink, named: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Brings ``(name, tensor)`` pairs to one sink of this process, in its dtypes; raises as ``sync_in_process``."""
    pairs = list(named)
    sync_in_process(NamedSource(lambda: pairs, like=sink.dtypes()), [sink], version)
