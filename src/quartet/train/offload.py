"""A model's parts leave the device while others compute there, and come back bit for bit.

The parts of a model are its parameters with its buffers, its gradients, and what its optimizer keeps. What moves are
whole storages, so tied parameters and views of one storage move once, and strides stay as they are. The tensor objects
stay the same, with their version counters, and only ``.data`` changes: optimizers and engines hold them on. Of sharded
tensors it is this rank's shards that move, each rank by itself.

A tensor that is away lies in host memory of a store, and its ``.data`` is that memory. So states, checkpoints and
weight syncs read and write it there like any other tensor; only computing with it is refused.

All copies are made before the first tensor is pointed elsewhere: an error leaves everything as it was.

A store is pinned memory, for quick copies of a GPU's, or files on disk, where memory is short. It gives one piece of
memory, cut into parts of which each has a storage of its own.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from quartet.config import UserError
from quartet.models.memory import ALIGNMENT, storage_bytes, view_like
from quartet.models.packed_model import PackedModel
from quartet.observe.memory import held_bytes
from quartet.train.parallel.fsdp import free_gathered, gathered_from, sharded

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every device."""


class OffloadStore(ABC):
    """Gives host memory, one piece at a time."""

    _remedy: ClassVar[str]
    _where = ""

    def allocate(self, sizes: Sequence[int]) -> list[Tensor]:
        """Makes tensors ``uint8 [size]``, each with a storage of its own, which live as long as they are held.

        Raises:
            UserError: there is no room; nothing is taken then.
        """
        *starts, num_bytes = accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
        if not num_bytes:
            return []
        try:
            memory = self._memory(num_bytes)
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"no room for {num_bytes / 2**20:.1f} MiB that should leave the device",
                found=f"{error}{self._where}",
                remedy=self._remedy,
            ) from error
        return [
            torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=size)
            for start, size in zip(starts, sizes, strict=True)
        ]

    @abstractmethod
    def _memory(self, num_bytes: int) -> mmap.mmap:
        """Makes the memory for one piece. Raises OSError or RuntimeError where there is no room."""


class PinnedMemoryStore(OffloadStore):
    """Host memory that a GPU copies from and to at the full speed of its bus.

    torch's own pinned memory is rounded up to the next power of two, up to twice of what is asked for. Where the host
    does not let so much be pinned there is no room.

    Raises:
        UserError: there is no CUDA device.
    """

    _remedy = "free host memory, raise `ulimit -l`, or use MappedFileStore"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UserError(
                "pinned memory is a matter of CUDA devices",
                found="torch.cuda.is_available() is False",
                remedy="use MappedFileStore (offload.to: mapped_files) for a model on the CPU",
            )

    def _memory(self, num_bytes: int) -> mmap.mmap:
        memory = _Pinned(-1, num_bytes)
        memory.pin()
        return memory


class MappedFileStore(OffloadStore):
    """Memory-mapped files. They have no name from the beginning, so nothing of them outlives the process.

    Args:
        directory: on the file system that takes them; made if it is not there. One in memory (tmpfs) frees nothing.
    """

    _remedy = "free some space, or choose a directory on a larger disk"

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._where = f" in {directory}"

    def _memory(self, num_bytes: int) -> mmap.mmap:
        self.directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.directory) as file:
            # A full disk is an error here; in a mapping without blocks it would end the process.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            return mmap.mmap(file.fileno(), num_bytes)


class _Pinned(mmap.mmap):
    """Memory that is unpinned before it goes, which is when the last tensor in it goes."""

    _address = 0

    def pin(self) -> None:
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        code = int(_cuda().cudaHostRegister(address, len(self), _PORTABLE))
        if code != 0:
            raise RuntimeError(f"cudaHostRegister gave error {code}")
        self._address = address

    def __del__(self) -> None:
        if self._address:
            _cuda().cudaHostUnregister(self._address)


def _cuda() -> Any:
    return torch.cuda.cudart()


OffloadPart = Literal["params", "grads", "optimizer"]
PARTS: tuple[OffloadPart, ...] = get_args(OffloadPart)
Parts = Collection[OffloadPart] | tuple[OffloadPart, ...]
"""The tuple is there for type checkers, which else take a literal one for one of strings."""

_AWAY: WeakSet[nn.Module] = WeakSet()
"""What computes with parameters that are away: bodies and roots. A copy of such a module is none, and computes."""


@dataclass(frozen=True)
class MoveResult:
    """What one movement did.

    Args:
        num_bytes: of the tensors that moved.
        freed_bytes: measured on the device that they left, negative where they were taken: on a GPU what torch has
            given to tensors, else the process's memory that no file stands behind.
    """

    num_bytes: int
    freed_bytes: int
    seconds: float


@dataclass(eq=False)
class _Home:
    """Host memory of one storage.

    Args:
        memory: ``uint8 [n]``.
        copied_to: the storage on the device that was filled from here, and the versions of its tensors then.
    """

    memory: Tensor
    copied_to: tuple[StorageWeakRef, tuple[int, ...]] | None = None


@dataclass(frozen=True, eq=False)
class _Piece:
    """One storage, and the tensors that lie in it."""

    name: str
    storage: torch.UntypedStorage
    tensors: list[Tensor]
    is_frozen: bool
    """Whether whatever writes here counts versions up. Fused optimizers and running statistics do not."""

    @property
    def key(self) -> int:
        """Identity of the storage that the tensors were found in."""
        return int(self.storage._cdata)

    @property
    def num_bytes(self) -> int:
        return self.storage.nbytes()

    def state(self) -> tuple[StorageWeakRef, tuple[int, ...]]:
        """Returns what compares equal until a tensor is changed in place or lies elsewhere."""
        return StorageWeakRef(self.storage), tuple(t._version for t in self.tensors)


class Offload:
    """Moves the parts of one model between its device and a store.

    A frozen parameter that has not changed since it came back is not written to the store again.

    Args:
        packed: the model, wholly on its device. Nothing else may move it.
        store: where parts go; it keeps the host memory of everything that was away once.
        optimizer: of the model, where it is trained.
    """

    def __init__(
        self, packed: PackedModel, store: OffloadStore, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.packed = packed
        self.store = store
        self.optimizer = optimizer
        self.device = packed.device
        self._away: set[OffloadPart] = set()
        self._homes: dict[str, _Home] = {}
        root = sharded(packed)
        # The root of a sharded model, too: before it gathers anything.
        self._guarded: list[nn.Module] = [packed.body, *([] if root is None else [root])]
        self._hooks = [module.register_forward_pre_hook(_refuse, prepend=True) for module in self._guarded]

    def offload(self, parts: Parts = PARTS) -> MoveResult:
        """Moves parts off the device; those that are away stay there.

        Raises:
            UserError: the store has no room; everything stays where it is.
            RuntimeError: the adapters are switched off.
        """
        return self._move(parts, away=True)

    def onload(self, parts: Parts = PARTS) -> MoveResult:
        """Brings parts back; those that are there stay.

        Raises:
            RuntimeError: the device has no room, then everything stays where it is; or the adapters are switched off.
        """
        return self._move(parts, away=False)

    def release(self) -> None:
        """Gives the model back to its owner, to compute with as they like; afterwards nothing here moves it.

        Parameters come back; where the device has no room they stay in host memory, as those of a model on the CPU.
        Gradients and the optimizer's part stay where they are.
        """
        with contextlib.suppress(torch.OutOfMemoryError, MemoryError):
            self.onload(("params",))
        _AWAY.discard(self.packed.model)
        for hook in self._hooks:
            hook.remove()

    def settle(self) -> None:
        """Brings tensors that were made anew, as by loading an optimizer's state, to where their part is."""
        self.offload(tuple(self._away))
        self.onload([part for part in PARTS if part not in self._away])

    def is_resident(self, parts: Parts) -> bool:
        """Tells whether all of ``parts`` may be computed with."""
        return self._away.isdisjoint(_checked(parts))

    def require(self, parts: Parts) -> None:
        """Raises where a part is away.

        Raises:
            RuntimeError: it names them.
        """
        missing = [part for part in _checked(parts) if part in self._away]
        if missing:
            raise _away_error(self.packed.model, missing)

    # Moving ----------------------------------------------------------------------------------------------

    def _move(self, parts: Parts, *, away: bool) -> MoveResult:
        chosen = _checked(parts)
        self._check_switch()
        free_gathered(self.packed)
        started_s, before_bytes = time.perf_counter(), held_bytes(self.device)
        # What the device held is free as soon as this returns, and nothing here refers to it.
        num_bytes = self._point_elsewhere(chosen, away=away)
        self._away = self._away.union(chosen) if away else self._away.difference(chosen)
        self._guard()
        if away and self.device.type == "cuda":
            # Other processes on the device can have it too.
            torch.cuda.empty_cache()
        freed_bytes = before_bytes - held_bytes(self.device)
        return MoveResult(num_bytes, freed_bytes, time.perf_counter() - started_s)

    # Tensors made in inference mode could never be trained again.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _point_elsewhere(self, parts: Sequence[OffloadPart], *, away: bool) -> int:
        """Returns the bytes of what moved."""
        homes = self._home_keys()
        pieces = [piece for part in parts for piece in self._pieces(part)]
        if away:
            moving = [piece for piece in pieces if piece.key not in homes]
            targets = self._stored(moving)
        else:
            moving = [p for p in pieces if p.key in homes or p.storage.device != self.device]
            targets = [torch.empty(piece.num_bytes, dtype=torch.uint8, device=self.device) for piece in moving]
            self._copy([(storage_bytes(piece.storage), target) for piece, target in zip(moving, targets, strict=True)])
        pointed = [
            (tensor, view_like(tensor, target))
            for piece, target in zip(moving, targets, strict=True)
            for tensor in piece.tensors
        ]
        for tensor, elsewhere in pointed:
            tensor.data = elsewhere
        if not away:
            self._remember(moving)
        return sum(piece.num_bytes for piece in moving)

    def _stored(self, pieces: Sequence[_Piece]) -> list[Tensor]:
        """Returns copies of ``pieces`` in their homes."""
        known = {name: home.memory.numel() for name, home in self._homes.items()}
        homeless = [piece for piece in pieces if known.get(piece.name) != piece.num_bytes]
        fresh = self.store.allocate([piece.num_bytes for piece in homeless]) if homeless else []
        for piece, memory in zip(homeless, fresh, strict=True):
            self._homes[piece.name] = _Home(memory)
        homes = [self._homes[piece.name] for piece in pieces]
        changed = []
        for piece, home in zip(pieces, homes, strict=True):
            if piece.is_frozen and home.copied_to == piece.state():
                continue
            home.copied_to = None
            changed.append((storage_bytes(piece.storage), home.memory))
        self._copy(changed)
        return [home.memory for home in homes]

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copies the first tensor of each pair to the second, all at once, and waits."""
        for source, target in pairs:
            target.copy_(source, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _remember(self, moved: Sequence[_Piece]) -> None:
        """Notes what came back from its home: it needs not be written there again until it changes."""
        for old in moved:
            home = self._homes.get(old.name)
            if home is not None and _key(home.memory) == old.key:
                new = replace(old, storage=old.tensors[0].untyped_storage())
                home.copied_to = new.state() if new.is_frozen else None

    # What there is ---------------------------------------------------------------------------------------

    def _pieces(self, part: OffloadPart) -> list[_Piece]:
        found: dict[int, _Piece] = {}
        for name, whole in self._tensors(part):
            # Not a copy or a detached one: what is pointed elsewhere must be the shard that the DTensor holds.
            tensor = whole._local_tensor if isinstance(whole, DTensor) else whole
            storage, is_frozen = tensor.untyped_storage(), isinstance(whole, nn.Parameter) and not whole.requires_grad
            if storage.nbytes():
                piece = found.setdefault(_key(tensor), _Piece(f"{part}/{name}", storage, [], is_frozen))
                piece.tensors.append(tensor)
                if not is_frozen:
                    found[piece.key] = replace(piece, is_frozen=False)
        if part == "params":
            for tensor in gathered_from(self.packed):
                if (key := _key(tensor)) in found:
                    found[key].tensors.append(tensor)
        return list(found.values())

    def _tensors(self, part: OffloadPart) -> Iterator[tuple[str, Tensor]]:
        model = self.packed.model
        if part == "params":
            yield from chain(model.named_parameters(), model.named_buffers())
        elif part == "grads":
            yield from ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
        elif self.optimizer is not None:
            # Not by asking for a parameter's state: that would make an empty one.
            for number, values in enumerate(self.optimizer.state.values()):
                yield from ((f"{number}/{key}", value) for key, value in values.items() if isinstance(value, Tensor))

    def _home_keys(self) -> set[int]:
        return {_key(home.memory) for home in self._homes.values()}

    # Guards ----------------------------------------------------------------------------------------------

    def _check_switch(self) -> None:
        """Checks that adapters are in: while they are out, their factors are no parameters of the model and would be
        missed.
        """
        if self.packed.adapters is not None:
            self.packed.adapters.check_in()

    def _guard(self) -> None:
        """Has the model refuse to compute while its parameters are offloaded."""
        change = _AWAY.add if "params" in self._away else _AWAY.discard
        for module in self._guarded:
            change(module)


def _refuse(module: nn.Module, _: Any) -> None:
    # A function of the module, so that models are copied and pickled with it.
    if module in _AWAY:
        raise _away_error(module, ["params"])


def _away_error(model: nn.Module, parts: Sequence[OffloadPart]) -> RuntimeError:
    return RuntimeError(
        f"{', '.join(parts)} of {type(model).__name__} are offloaded; onload({list(parts)}) before computing with them"
    )


def _checked(parts: Parts) -> list[OffloadPart]:
    """Returns known parts, in their order, each once."""
    return [part for part in PARTS if part in parts]


def _key(tensor: Tensor) -> int:
    """Returns the identity of a tensor's storage, while that lives."""
    return int(tensor.untyped_storage()._cdata)
