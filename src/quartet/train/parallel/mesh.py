"""The mesh of a role: how its processes hold one model between them.

The ranks of a role, and how they tell each other plain values and failures.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from quartet.cluster.errors import raising_rank_failed
from quartet.config import UserError
from quartet.config.common import ShardingConfig

T = TypeVar("T")

TIME_LIMIT = timedelta(minutes=10)
"""Of one collective within a pass."""


class DataParallelGroup:
    """The data ranks of one role.

    Args:
        group: their process group; the default group where it is None.

    Attributes:
        ranks: their numbers in the default group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.process_group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.ranks = list(range(self.size)) if group is None else dist.get_process_group_ranks(group)

    @classmethod
    def of_world(cls) -> DataParallelGroup:
        """Makes the group of all ranks of the default process group."""
        return cls()

    def gather(self, value: T) -> list[T]:
        """Gathers every rank's ``value``, in the order of the ranks.

        Raises:
            RankFailed: a rank is gone or does not answer.
        """
        found: list[Any] = [None] * self.size
        with raising_rank_failed(self.size):
            dist.all_gather_object(found, value, group=self.process_group)
        return found

    def name(self) -> str:
        """Names this rank, for messages."""
        return f"rank {self.rank} of {self.size}"


REPLICATE, SHARD, CONTEXT, TENSOR = "replicate", "shard", "context", "tensor"


@dataclass(frozen=True, eq=False)
class Mesh:
    """The processes of a role as ``replicate × shard × context × tensor``, in the order of their ranks: the last
    varies fastest.

    Those with one place along ``replicate`` hold a copy of the model between them. Those that differ along ``context``
    and ``tensor`` alone are *peers*: a *data rank* together, which computes a share of each batch of its own. The first
    of them (both 0) speaks for it.

    Attributes:
        data: all ranks, for plain values.
        copy: those among them that hold this rank's copy of the model, likewise.
        device_mesh: torch's mesh, with the process groups that passes use: ``replicate``, ``shard`` (with the ranks
            along ``context``, which share out weights as well) and, where there are several, ``tensor``.
        context_group: this rank's peers along ``context``; None where it is alone.
        fixed_order: sums over ranks are taken in the order of the ranks, so their bits do not depend on a library.
    """

    data: DataParallelGroup
    copy: DataParallelGroup
    device_mesh: DeviceMesh
    context: int = 1
    context_group: dist.ProcessGroup | None = None
    fixed_order: bool = False

    @classmethod
    def of(
        cls,
        data: DataParallelGroup,
        *,
        shard: int = 1,
        context: int = 1,
        tensor: int = 1,
        fixed_order: bool = False,
        time_limit: timedelta = TIME_LIMIT,
    ) -> Mesh:
        """Makes the mesh of all ranks of ``data``; all of them call it.

        Args:
            shard: data ranks that hold one copy of the model between them.
            context: ranks that have the tokens of a pack between them.
            tensor: ranks that have the columns and rows of every layer between them.
            time_limit: of one collective within a pass.

        Raises:
            UserError: ``shard × context × tensor`` does not divide the number of ranks.
        """
        of_copy = shard * context * tensor
        if data.size % of_copy:
            raise UserError(
                "shard × context × tensor does not divide the processes of its role",
                found=f"shard: {shard}, context: {context}, tensor: {tensor}, {data.size} processes",
                remedy="choose a product that divides them, or another number of processes",
            )
        device_type = "cuda" if "nccl" in dist.get_backend(data.process_group) else "cpu"
        ranks = torch.tensor(data.ranks, dtype=torch.int).view(-1, shard, context, tensor)
        r, s, c, t = ((ranks == data.ranks[data.rank]).nonzero())[0].tolist()

        def group(
            name: str, own: torch.Tensor, backend: str | None = None, limit: timedelta | None = time_limit
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
        context_group = group(CONTEXT, ranks[r, s, :, t]) if context > 1 else None
        return cls(data, copy, device_mesh, context, context_group, fixed_order)

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
