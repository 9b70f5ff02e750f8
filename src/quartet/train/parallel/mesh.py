"""The mesh of a role: how its processes hold one model between them.

The ranks of a role, and how they tell each other plain values and failures.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout

from quartet.config import UserError
from quartet.config.common import ShardingConfig

T = TypeVar("T")

_num_gathers: Counter[str] = Counter()
"""By process group: its ranks gather in the same order."""
_COMING_S = 2.0
"""A rank that lives comes to a gather so soon after another one has failed there."""


class RankFailed(Exception):
    """Another rank failed, or cannot be reached any more; this rank's model took no part in it.

    Args:
        known_to: the ranks that are not to be told again.
    """

    is_echo = True
    """Among failures of several ranks the other rank's is reported first."""

    def __init__(self, message: str, known_to: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.known_to = tuple(known_to)


def is_broken_collective(error: BaseException) -> bool:
    """Tells whether another rank is the cause: a collective failed with torch's own types of errors, or gloo's, which
    is a plain RuntimeError.
    """
    return isinstance(error, RankFailed | dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


class DataParallelGroup:
    """The data ranks of one role.

    Args:
        group: their process group; the default group where it is None.

    Attributes:
        ranks: their numbers in the default group.
        is_reporting: a failure of this rank will be told to the others by what has called what runs now.
    """

    is_reporting = False

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.process_group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.ranks = list(range(self.size)) if group is None else dist.get_process_group_ranks(group)

    @classmethod
    def of_world(cls) -> DataParallelGroup:
        """Makes the group of all ranks of the default process group."""
        return cls()

    def gather(self, value: T, *, within: timedelta | None = None) -> list[T]:
        """Gathers every rank's ``value``, in the order of the ranks.

        Args:
            within: how long the others may take to call it, too, from now on; the process group's time limit before.

        Raises:
            RankFailed: a rank is gone or does not answer.
        """
        found: list[Any] = [None] * self.size
        store, group = _get_default_store(), self.process_group or dist.group.WORLD
        assert group is not None
        # Each rank signs in the store, so that one that does not come can be named.
        number = _num_gathers[group.group_name] = _num_gathers[group.group_name] + 1
        sign, former = (f"quartet/{group.group_name}/{n}" for n in (number, number - 1))
        try:
            store.set(f"{sign}/{self.rank}", "")
            if within is not None:
                _set_pg_timeout(within, group)
            dist.all_gather_object(found, value, group=self.process_group)
            store.delete_key(f"{former}/{self.rank}")  # All have come to this one.
        except RuntimeError as error:
            raise RankFailed(f"{self._silent(sign)}: {error}", self.ranks) from error
        return found

    def _silent(self, sign: str) -> str:
        """Tells who did not come to a gather, in words."""
        store, deadline = _get_default_store(), time.monotonic() + _COMING_S
        silent: list[str] = []
        with suppress(RuntimeError):  # The process that has the store may be gone: what it said last counts.
            while (silent := [str(n) for n in range(self.size) if not store.check([f"{sign}/{n}"])]) and (
                time.monotonic() < deadline
            ):
                time.sleep(0.05)
        if silent:
            return f"no answer of rank {', '.join(silent)} of {self.size}"
        return f"the other ranks of {self.size} cannot be reached any more"


REPLICATE, SHARD, CONTEXT, TENSOR = "replicate", "shard", "context", "tensor"


@dataclass(frozen=True, eq=False)
class Mesh:
    """The processes of a role as ``replicate × shard × context × tensor``, in the order of their ranks: the last
    varies fastest.

    Those with one place along ``replicate`` hold a copy of the model between them. Those that differ along ``context``
    and ``tensor`` alone are *peers*: a *data rank* together, which computes a share of each batch of its own. The first
    of them (both 0) speaks for it.

    Attributes:
        data: all ranks, for plain values. Never used within a pass, so it works when a pass has failed.
        copy: those among them that hold this rank's copy of the model, likewise.
        device_mesh: torch's mesh, with the process groups that passes use: ``replicate``, ``shard`` (with the ranks
            along ``context``, which share out weights as well) and, where there are several, ``tensor``.
        context_group: this rank's peers along ``context``; None where it is alone.
        words: of ``context`` and ``tensor`` where there are several ranks, a gloo group of the same ranks.
        copy_words: such a one of ``replicate``.
        fixed_order: sums over ranks are taken in the order of the ranks, so their bits do not depend on a library.
        time_limit: of one collective within a pass.
    """

    data: DataParallelGroup
    copy: DataParallelGroup
    device_mesh: DeviceMesh
    context: int = 1
    context_group: dist.ProcessGroup | None = None
    words: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    copy_words: dist.ProcessGroup | None = None
    fixed_order: bool = False
    time_limit: timedelta | None = None

    @classmethod
    def of(
        cls,
        data: DataParallelGroup,
        *,
        shard: int = 1,
        context: int = 1,
        tensor: int = 1,
        fixed_order: bool = False,
        time_limit: timedelta | None = None,
    ) -> Mesh:
        """Makes the mesh of all ranks of ``data``; all of them call it.

        Args:
            shard: data ranks that hold one copy of the model between them.
            context: ranks that have the tokens of a pack between them.
            tensor: ranks that have the columns and rows of every layer between them.
            time_limit: of one collective within a pass; the group's own where it is left out.

        Raises:
            UserError: ``shard × context × tensor`` does not divide the number of ranks.
        """
        of_copy = shard * context * tensor
        if data.size % of_copy:
            raise UserError(
                "shard × context × tensor does not divide the processes of its role",
                found=f"shard: {shard}, context: {context}, tensor: {tensor}, {data.size} processes",
                remedy="choose a product among "
                f"{', '.join(str(n) for n in range(1, data.size + 1) if data.size % n == 0)}, "
                "or another number of processes",
            )
        device_type = "cuda" if "nccl" in dist.get_backend(data.process_group) else "cpu"
        ranks = torch.tensor(data.ranks, dtype=torch.int).view(-1, shard, context, tensor)
        r, s, c, t = ((ranks == data.ranks[data.rank]).nonzero())[0].tolist()
        limit = time_limit if time_limit is not None else _time_limit(data, device_type)

        def group(
            name: str, own: torch.Tensor, backend: str | None = None, limit: timedelta | None = limit
        ) -> dist.ProcessGroup:
            ranks = own.flatten().tolist()
            return dist.new_group(ranks, limit, backend, use_local_synchronization=True, group_desc=name)

        along = [(REPLICATE, ranks[:, s, c, t]), (SHARD, ranks[r, :, :, t]), (TENSOR, ranks[r, s, c])]
        along = along if tensor > 1 else along[:2]
        names, in_mesh = tuple(name for name, _ in along), ranks.flatten(1, 2) if tensor > 1 else ranks.flatten(1)
        groups = [group(name, own) for name, own in along]
        device_mesh = DeviceMesh.from_group(groups, device_type, mesh=in_mesh, mesh_dim_names=names)
        copy = data
        if of_copy < data.size:
            copy = DataParallelGroup(group("copy", ranks[r], "gloo", None))
        peers = {name: own for name, own in ((CONTEXT, ranks[r, s, :, t]), (TENSOR, ranks[r, s, c])) if len(own) > 1}
        words = {name: group(f"words of {name}", own, "gloo") for name, own in peers.items()}
        context_group = group(CONTEXT, peers[CONTEXT]) if context > 1 else None
        copy_words = group("words of copies", ranks[:, s, c, t], "gloo") if of_copy < data.size else None
        return cls(data, copy, device_mesh, context, context_group, words, copy_words, fixed_order, limit)

    @classmethod
    def cut(cls, group: DataParallelGroup, sharding: ShardingConfig) -> Mesh:
        """Makes the mesh that a recipe asks for."""
        shard, context, tensor = sharding.shard, sharding.context, sharding.tensor
        return cls.of(group, shard=shard, context=context, tensor=tensor, fixed_order=sharding.fixed_order)

    @property
    def replicate(self) -> int:
        """Copies of the model."""
        return self.device_mesh.size(0)

    @property
    def shard(self) -> int:
        """Data ranks that hold one copy between them."""
        return self.num_parts // self.context

    @property
    def num_parts(self) -> int:
        """Ranks over which FSDP shares out what a tensor rank has of the weights: ``shard × context``."""
        return self.device_mesh.size(1)

    @property
    def tensor(self) -> int:
        """Ranks that have every layer between them."""
        return self.copy.size // self.num_parts

    @property
    def place(self) -> int:
        """This rank's number among those that hold its copy."""
        return self.data.rank % self.copy.size

    @property
    def num_data_ranks(self) -> int:
        """Ranks with a share of each batch of their own, their peers not counted."""
        return self.data.size // self._num_peers

    @property
    def data_rank(self) -> int:
        """The number of the data rank that this rank is a part of."""
        return self.data.rank // self._num_peers

    @property
    def is_first_peer(self) -> bool:
        """Whether this rank speaks for its data rank."""
        return self.data.rank % self._num_peers == 0

    @property
    def first_peers(self) -> slice:
        """Of a list with an entry for each rank, those of the ranks that speak for a data rank."""
        return slice(None, None, self._num_peers)

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """``replicate × (shard × context)``, over which FSDP shares out weights."""
        return self.device_mesh[REPLICATE, SHARD] if self.tensor > 1 else self.device_mesh

    @property
    def tensor_mesh(self) -> DeviceMesh | None:
        """This rank's peers along ``tensor``; None where it is alone."""
        return self.device_mesh[TENSOR] if self.tensor > 1 else None

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        """As ``tensor_mesh``."""
        return self.group(TENSOR) if self.tensor > 1 else None

    def group(self, name: str) -> dist.ProcessGroup:
        """Returns the ranks along one dimension of ``device_mesh`` that this rank is among."""
        return self.device_mesh.get_group(name)

    @property
    def _num_peers(self) -> int:
        return self.context * self.tensor


def _time_limit(data: DataParallelGroup, device_type: str) -> timedelta | None:
    group = data.process_group if data.process_group is not None else dist.group.WORLD
    assert group is not None
    # torch has no public way to ask.
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    limit: timedelta | None = getattr(options, "_timeout", None)
    return limit
