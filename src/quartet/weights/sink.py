"""Where the weights go: checked before the first byte, verified as they come, served whole or not at all.

Also where they come from: ``NamedSource``, whole tensors of sharded ones by ``gather``, and a sync in one process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from quartet.weights.digest import BLOCK_BYTES, byte_view, digest_text, piece_digest, tensor_digest
from quartet.weights.manifest import TensorSpec, WeightMismatch, WeightsRefused, WeightsUnusable


class SinkStatus(StrEnum):
    EMPTY = "empty"
    """No version yet."""
    READY = "ready"
    RECEIVING = "receiving"
    """Within a sync, which changes what stands here."""
    UNUSABLE = "unusable"


class TensorSink:
    """Tensors that are refreshed in place: the parameters of an engine's model.

    A sync calls ``begin``, ``write``, ``verify``, ``commit``; ``abort`` at any point.
    One that fails after the first byte leaves the sink unusable.

    Args:
        destinations: by name; two names of one tensor are tied, and one of them is enough. May be strided.
        on_commit: called with the new version: forget what was computed from the old weights.
        version: what stands in the destinations already; None: nothing that may be served.
    """

    def __init__(
        self,
        destinations: Iterable[tuple[str, Tensor]],
        *,
        on_commit: Callable[[int], None] = lambda version: None,
        version: int | None = None,
    ) -> None:
        # Not their memory: an engine that sleeps gives it back, and gets other memory when it wakes.
        self._owners = dict(destinations)
        self._on_commit = on_commit
        self._reason: str | None = None
        self.version = version
        """What was committed last; served only while ``status`` is ready."""
        self._end()

    def _end(self) -> None:
        """Forgets the sync: none is under way."""
        self._specs: tuple[TensorSpec, ...] = ()
        self._incoming: int | None = None
        self._touched = self._overtaken = False
        self._targets: dict[str, Tensor] = {}
        self._ties: dict[str, int] = {}
        self._found: dict[int, str] = {}
        self._sums: dict[str, tuple[int, int]] = {}
        self._whole: dict[str, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Of the destinations."""
        return next(iter(self._owners.values())).device

    # What is served ---------------------------------------------------------------------------------------

    @property
    def status(self) -> SinkStatus:
        if self._reason is not None:
            return SinkStatus.UNUSABLE
        if self._incoming is not None:
            return SinkStatus.RECEIVING
        return SinkStatus.EMPTY if self.version is None else SinkStatus.READY

    def require(self, version: int | None = None) -> None:
        """Raises where the weights are not what an engine needs before it computes.

        Raises:
            WeightsUnusable: the weights are not whole, or not of ``version``.
        """
        status = self.status
        if status is SinkStatus.READY and version in (None, self.version):
            return
        found = {
            SinkStatus.EMPTY: "no weights yet",
            SinkStatus.RECEIVING: f"a sync of version {self._incoming} under way",
            SinkStatus.UNUSABLE: self._reason or "",
            SinkStatus.READY: f"version {self.version}",
        }[status]
        raise WeightsUnusable(
            f"the engine cannot compute with {'these weights' if version is None else f'version {version}'}",
            found=found,
            remedy="sync the weights again before anything is generated",
        )

    def invalidate(self, reason: str) -> None:
        """Notes that the destinations no longer hold the weights (the engine slept, say): unusable until the next sync.

        One that is under way does not count: it may have written to memory that is gone.
        """
        self._reason = reason
        self._overtaken = self._incoming is not None

    # A sync -----------------------------------------------------------------------------------------------

    def dtypes(self) -> dict[str, torch.dtype]:
        """Returns what the tensors must come in, by the names that are sent: for the other end's
        ``NamedSource(like=…)``.
        """
        return {name: tensor.dtype for name, tensor in self._views().items()}

    def begin(self, specs: Sequence[TensorSpec], version: int) -> None:
        """
        Raises:
            WeightsRefused: they do not fit; nothing has changed.
        """
        if self.version is not None and version < self.version:
            raise _refused(f"version {version} after {self.version}", "send the newest version; start a new engine")
        views = self._views()
        ties = _ties(views)
        _check_fit(specs, views, ties)
        self._end()
        self._specs, self._incoming, self._targets, self._ties = tuple(specs), version, views, ties

    def _views(self) -> dict[str, Tensor]:
        """Returns the destinations in the memory that they have now."""
        return {name: tensor.detach() for name, tensor in self._owners.items()}

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Takes the next elements, from ``start`` on, of a flattened tensor, and digests what then stands there.

        Args:
            values: flat, of the tensor's dtype, reused afterwards; ends with a block of the digest or with the tensor.
        """
        self._touched = True
        target = self._targets[name]
        if not target.is_contiguous():
            # Elements in row-major order do not lie in a row there: it is filled when all of them have come.
            target = self._whole.setdefault(name, torch.empty_like(target, memory_format=torch.contiguous_format))
            target.view(-1)[start : start + values.numel()].copy_(values)
            if start + values.numel() == target.numel():
                self._targets[name].copy_(self._whole.pop(name))
                self._found[self._ties[name]] = tensor_digest(self._targets[name])
            return
        begin, total = self._sums.get(name, (0, 0))
        assert begin == start * values.element_size(), "in order"
        piece, whole = byte_view(values), byte_view(target)
        end = begin + len(piece)
        total += piece_digest(piece, begin // BLOCK_BYTES, whole[begin:end])
        torch.autograd.graph.increment_version(target)  # which numpy does not know
        self._sums[name] = end, total
        if end == len(whole):
            # Of tied names the last one counts: it is what stands there in the end.
            self._found[self._ties[name]] = digest_text(total)

    @torch.no_grad()
    def verify(self, digests: Sequence[str]) -> None:
        """
        Args:
            digests: which the tensors were sent with.

        Raises:
            WeightMismatch: a tensor is not what was sent.
        """
        assert self._incoming is not None
        # What a transport brings has been digested as it came; tensors without elements have not.
        for spec, sent in zip(self._specs, digests, strict=True):
            number = self._ties[spec.name]
            if number not in self._found:
                self._found[number] = tensor_digest(self._targets[spec.name])
            if sent != (arrived := self._found[number]):
                raise WeightMismatch(spec.name, sent=sent, arrived=arrived, version=self._incoming)

    @torch.no_grad()
    def commit(self) -> None:
        """Serves from now on the version that has been verified."""
        version = self._incoming
        assert version is not None
        if self._overtaken:
            raise WeightsUnusable(
                "the weights came to an engine that had no more room for them",
                found=self._reason or "",
                remedy="let an engine sleep before or after a weight sync, not in it",
            )
        self._reason = f"the engine failed to take over version {version}"
        self._on_commit(version)
        self.version, self._reason = version, None
        self._end()

    def abort(self, reason: str) -> None:
        """Ends a sync that failed: back to the old version as a whole, or unusable until a sync succeeds."""
        if self._touched and self._reason is None:
            self._reason = f"the sync of version {self._incoming} broke off halfway: {reason}"
        self._end()


def _check_fit(specs: Sequence[TensorSpec], own: Mapping[str, Tensor], ties: Mapping[str, int]) -> None:
    remedy = "send every parameter of the same architecture under its own name, in the engine's dtype"
    given: dict[str, TensorSpec] = {}
    for spec in specs:
        if spec.name in given:
            raise _refused(f"{spec.name!r} twice", remedy, spec.name)
        given[spec.name] = spec
    if unknown := sorted(given.keys() - own.keys()):
        raise _refused(f"unknown names, first {unknown[0]!r} ({len(unknown)} in all)", remedy, unknown[0])
    for name, spec in given.items():
        needed = TensorSpec.of(name, own[name])
        if spec != needed:
            found = f"{name!r} {spec.dtype} {list(spec.shape)}, needed {needed.dtype} {list(needed.shape)}"
            raise _refused(found, remedy, name)
    filled = {ties[name] for name in given}
    if missing := [name for name in own if ties[name] not in filled]:
        raise _refused(f"nothing for {missing[0]!r} ({len(missing)} names missing)", remedy, missing[0])


def _ties(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Returns a number for each name, the same for all names of one piece of memory."""
    places: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
    ties = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        ties[name] = places.setdefault(place, number) if tensor.numel() else number
    return ties


def _refused(found: str, remedy: str, tensor: str | None = None) -> WeightsRefused:
    return WeightsRefused("the new weights do not fit the engine", found=found, remedy=remedy, tensor=tensor)


Place = tuple[int, ...]
"""A rank's coordinates in a mesh."""


def slices_at(tensor: DTensor, place: Sequence[int]) -> tuple[slice, ...]:
    """Returns which part of the whole tensor is on the rank at ``place`` of its mesh.

    For a dimension that is cut twice torch's own answer is only right where it divides.
    """
    slices = [slice(0, size) for size in tensor.shape]
    # From the last on: FSDP cuts what tensor parallelism has cut, and has the dimension of the mesh before it.
    for index, kind, size in reversed([*zip(place, tensor.placements, tensor.device_mesh.shape, strict=True)]):
        if not kind.is_replicate():
            dim: int = kind.dim  # type: ignore[attr-defined]
            cut = slices[dim]
            step = -(-(cut.stop - cut.start) // size)
            slices[dim] = slice(*(min(cut.start + step * i, cut.stop) for i in (index, index + 1)))
    return tuple(slices)


@torch.no_grad()
def gather(tensor: Tensor, *, everywhere: bool = False) -> Tensor | None:
    """Gathers the whole tensor on the first rank of its mesh, None on the others; a plain tensor as it is. Collective.

    All ranks of the mesh make the same calls in the same order. The first one holds one whole tensor at a time beside
    its own shards. The others hold nothing, or where a tensor is cut along two dimensions of the mesh, as by FSDP and
    tensor parallelism, some of them what they pass on: one part of it by the first of these. Ranks with replicas of
    what the first one has take no part.

    Args:
        everywhere: on all ranks of the mesh; those that hold a copy between them gather from each other.
    """
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    place = tuple(coordinate)
    cut = [dim for dim, kind in enumerate(tensor.placements) if not kind.is_replicate()]
    if not everywhere and any(index for dim, index in enumerate(place) if dim not in cut):
        return None  # a replica
    here = tensor.to_local().contiguous()
    if here.device.type != mesh.device_type:
        here = here.to(mesh.device_type)  # it is offloaded
    if not cut:
        return here
    parts, whole = {place: here}, None
    if everywhere or not any(place):
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=here.device)
        parts[place] = whole[slices_at(tensor, place)]
        if here.numel():
            parts[place].copy_(here)
        del here
    for dim in reversed(cut):
        parts = _joined(tensor, parts, dim, whole, everywhere=everywhere)
    return whole


def _joined(
    tensor: DTensor, parts: dict[Place, Tensor], dim: int, whole: Tensor | None, *, everywhere: bool
) -> dict[Place, Tensor]:
    """Joins ``parts``, by place, with those that the other ranks along ``dim`` of the mesh have, on the first of them
    or on all; nothing on those that have given theirs away. In ``whole``, if it is here, they come to their place.
    """
    group, index = tensor.device_mesh.get_group(dim), tensor.device_mesh.get_local_rank(dim)
    ranks, found = dist.get_process_group_ranks(group), dict(parts)
    for distance in range(1, len(ranks)):
        target, source = (index + distance) % len(ranks), (index - distance) % len(ranks)
        exchanged, arriving = [], []
        if everywhere or target == 0:
            sent = (part.contiguous() for part in parts.values() if part.numel())
            exchanged += [dist.P2POp(dist.isend, part, ranks[target], group) for part in sent]
        for place, part in parts.items() if everywhere or index == 0 else ():
            other = (*place[:dim], source, *place[dim + 1 :])
            slices = slices_at(tensor, other)
            new = whole[slices] if whole is not None else part.new_empty([s.stop - s.start for s in slices])
            found[other] = new
            if new.numel():
                # Columns of the whole are not in one piece.
                arriving.append((new, new if new.is_contiguous() else new.new_empty(new.shape)))
        exchanged += [dist.P2POp(dist.irecv, arrived, ranks[source], group) for _, arrived in arriving]
        for work in dist.batch_isend_irecv(exchanged) if exchanged else []:
            work.wait()
        for new, arrived in arriving:
            if arrived is not new:
                new.copy_(arrived)
    return found if everywhere or index == 0 else {}


class NamedSource:
    """Whole tensors under the names that they are sent by, one at a time.

    A trainer that shards its weights takes part with all its ranks: rank 0 sends, the others ask for every tensor, too.
    Every gather is a collective, so all ranks do the same ones in the same order and nothing between them, to the end,
    even where the sync fails halfway.

    Args:
        named: gives ``(name, tensor)`` anew for every sync, ``model.named_parameters`` say; DTensors are gathered.
        like: the dtype of each tensor by its name, where they differ (``TensorSink.dtypes`` of an engine).
        whole: makes a tensor whole, on the first rank or on all.
    """

    def __init__(
        self,
        named: Callable[[], Iterable[tuple[str, Tensor]]],
        *,
        like: Mapping[str, torch.dtype] | None = None,
        whole: Callable[[Tensor], Tensor | None] = gather,
    ) -> None:
        self._whole = whole
        self._named = named
        self._like = dict(like or {})

    def specs(self) -> tuple[TensorSpec, ...]:
        """Describes what will be sent, in order. No collective."""
        return tuple(TensorSpec.of(name, tensor, self._like.get(name)) for name, tensor in self._named())

    @torch.no_grad()
    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors' contents in that order, each whole and contiguous, valid until the next one is asked for.

        Collective where the weights are sharded: all ranks go through them to the end, and the first one gets them.
        """
        for name, tensor in self._named():
            whole = self._whole(tensor)
            if whole is not None:
                yield whole.to(dtype=self._like.get(name)).contiguous()


def sync_in_process(source: NamedSource, sink: TensorSink, version: int) -> None:
    """Brings ``source`` to a sink of this process as ``version``, one tensor after the other.

    Raises:
        WeightSyncError: names the tensor; the sink serves no mixture.
    """
    tensors, digests = source.tensors(), list[str]()
    try:
        specs = source.specs()
        sink.begin(specs, version)
        for spec, tensor in zip(specs, tensors, strict=True):
            digests.append(tensor_digest(tensor))
            sink.write(spec.name, 0, tensor.view(-1))
        sink.verify(digests)
        sink.commit()
    except BaseException as error:
        sink.abort(f"{type(error).__name__}: {error}")
        if isinstance(error, Exception):
            deque(tensors, maxlen=0)  # the other ranks wait in their gathers for this one, to the last tensor
        raise


def write_weights(sink: TensorSink, named: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Brings ``(name, tensor)`` pairs to one sink of this process, in its dtypes; raises as ``sync_in_process``."""
    pairs = list(named)
    sync_in_process(NamedSource(lambda: pairs, like=sink.dtypes()), sink, version)
