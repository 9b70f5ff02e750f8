"""Where the weights go: checked before the first byte, verified as they come, served whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum

import torch
from torch import Tensor

from quartet.weights.digest import BLOCK_BYTES, as_text, bytes_of, piece_digest, tensor_digest
from quartet.weights.errors import WeightMismatch, WeightsRefused, WeightsUnusable
from quartet.weights.manifest import TensorSpec, WeightManifest


class Status(StrEnum):
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
        """No sync is under way."""
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
    def status(self) -> Status:
        if self._reason is not None:
            return Status.UNUSABLE
        if self._incoming is not None:
            return Status.RECEIVING
        return Status.EMPTY if self.version is None else Status.READY

    def require(self, version: int | None = None) -> None:
        """What an engine asks before it computes.

        Raises:
            WeightsUnusable: the weights are not whole, or not of ``version``.
        """
        status = self.status
        if status is Status.READY and version in (None, self.version):
            return
        found = {
            Status.EMPTY: "no weights yet",
            Status.RECEIVING: f"a sync of version {self._incoming} under way",
            Status.UNUSABLE: self._reason or "",
            Status.READY: f"version {self.version}",
        }[status]
        raise WeightsUnusable(
            f"the engine cannot compute with {'these weights' if version is None else f'version {version}'}",
            found=found,
            remedy="sync the weights again before anything is generated",
        )

    def invalidate(self, reason: str) -> None:
        """The destinations no longer hold the weights (the engine slept, say): unusable until the next sync.

        One that is under way does not count: it may have written to memory that is gone.
        """
        self._reason = reason
        self._overtaken = self._incoming is not None

    # A sync -----------------------------------------------------------------------------------------------

    def dtypes(self) -> dict[str, torch.dtype]:
        """What the tensors must come in, by the names that are sent: for ``NamedSource(like=…)`` at the other end."""
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
        """The destinations in the memory that they have now."""
        return {name: tensor.detach() for name, tensor in self._owners.items()}

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Takes the next elements, from ``start`` on, of a flattened tensor. ``values`` is flat, of its dtype, and
        reused afterwards.
        """
        self._touched = True
        target = self._targets[name]
        if not target.is_contiguous():
            # Elements in row-major order do not lie in a row there: it is filled when all of them have come.
            target = self._whole.setdefault(name, torch.empty_like(target, memory_format=torch.contiguous_format))
        target.view(-1)[start : start + values.numel()].copy_(values)
        self.arrived(name, start + values.numel())

    def arrived(self, name: str, stop: int) -> None:
        """All elements of the flattened tensor before ``stop`` are there: they are digested while others come."""
        target = self._targets[name]
        if not target.is_contiguous():
            if stop == target.numel():
                target.copy_(self._whole.pop(name))
                self._found[self._ties[name]] = tensor_digest(target)
            return
        done, total = self._sums.get(name, (0, 0))
        data, end = bytes_of(target), stop * target.element_size()
        if end < len(data):
            end -= end % BLOCK_BYTES
        if end > done:
            total += piece_digest(data[done:end], done // BLOCK_BYTES)
            self._sums[name] = end, total
        if end == len(data):
            # Of tied names the last one counts: it is what stands there in the end.
            self._found[self._ties[name]] = as_text(total)

    @torch.no_grad()
    def verify(self, manifest: WeightManifest) -> None:
        """
        Raises:
            WeightMismatch: a tensor is not what was sent.
        """
        if manifest.version != self._incoming or manifest.tensors != self._specs:
            raise _refused(
                f"a manifest of version {manifest.version} with {len(manifest.tensors)} tensors after the announcement "
                f"of version {self._incoming} with {len(self._specs)}",
                "sync again",
            )
        # What a transport brings has been digested as it came; tensors without elements have not.
        for spec, sent in zip(manifest.tensors, manifest.digests, strict=True):
            number = self._ties[spec.name]
            if number not in self._found:
                self._found[number] = tensor_digest(self._targets[spec.name])
            if sent != (arrived := self._found[number]):
                raise WeightMismatch(spec.name, sent=sent, arrived=arrived, version=manifest.version)

    @torch.no_grad()
    def commit(self) -> None:
        """From now on the version that has been verified is served."""
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
        """The sync failed: back to the old version as a whole, or unusable until a sync succeeds."""
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
    """A number for each name, the same for all names of one piece of memory."""
    places: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
    ties = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        ties[name] = places.setdefault(place, number) if tensor.numel() else number
    return ties


def _refused(found: str, remedy: str, tensor: str | None = None) -> WeightsRefused:
    return WeightsRefused("the new weights do not fit the engine", found=found, remedy=remedy, tensor=tensor)
