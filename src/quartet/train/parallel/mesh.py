"""The mesh of a role: how its processes hold one model between them.

The ranks of a role, and how they tell each other plain values and failures.
"""

from __future__ import annotations

from collections.abc import Mapping
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


REPLICATE, SHARD, PIPELINE, CONTEXT, TENSOR = "replicate", "shard", "pipeline", "context", "tensor"


@dataclass(frozen=True, eq=False)
class Mesh:
    """The processes of a role as ``replicate × shard × pipeline × context × tensor``, in the order of their ranks: the
    last varies fastest.

    Those with one place along ``replicate`` hold a copy of the model between them. Those that differ along
    ``pipeline``, ``context`` and ``tensor`` alone are *peers*: a *data rank* together, which computes a share of each
    batch of its own. The first of its last stage speaks for it, since losses and outputs are there.

    Attributes:
        data: all ranks, for plain values.
        copy: those among them that hold this rank's copy of the model, likewise.
        groups: this rank's ranks along each dimension in which there are several, for what passes exchange.
        device_mesh: torch's mesh of this stage of this copy: ``shard`` (with the ranks along ``context``, which share
            out weights as well) and, where there are several, ``tensor``.
        stage: this rank's, along ``pipeline``.
        fixed_order: sums over ranks are taken in the order of the ranks, so their bits do not depend on a library.
    """

    data: DataParallelGroup
    copy: DataParallelGroup
    replicate: int
    shard: int
    pipeline: int
    context: int
    tensor: int
    stage: int
    groups: Mapping[str, dist.ProcessGroup]
    device_mesh: DeviceMesh
    fixed_order: bool = False

    @classmethod
    def of(
        cls,
        data: DataParallelGroup,
        *,
        shard: int = 1,
        pipeline: int = 1,
        context: int = 1,
        tensor: int = 1,
        fixed_order: bool = False,
        time_limit: timedelta = TIME_LIMIT,
    ) -> Mesh:
        """Makes the mesh of all ranks of ``data``; all of them call it.

        Args:
            shard: data ranks that hold one copy of the model between them.
            pipeline: ranks that have some neighbouring layers each.
            context: ranks that have the tokens of a pack between them.
            tensor: ranks that have the columns and rows of every layer between them.
            time_limit: of one collective within a pass.

        Raises:
            UserError: ``shard × pipeline × context × tensor`` does not divide the number of ranks.
        """
        of_copy = shard * pipeline * context * tensor
        if data.size % of_copy:
            raise UserError(
                "shard × pipeline × context × tensor does not divide the processes of its role",
                found=f"shard: {shard}, pipeline: {pipeline}, context: {context}, tensor: {tensor}, "
                f"{data.size} processes",
                remedy="choose a product that divides them, or another number of processes",
            )
        device_type = "cuda" if "nccl" in dist.get_backend(data.process_group) else "cpu"
        ranks = torch.tensor(data.ranks, dtype=torch.int).view(-1, shard, pipeline, context, tensor)
        r, s, p, c, t = ((ranks == data.ranks[data.rank]).nonzero())[0].tolist()

        def group(
            name: str, own: torch.Tensor, backend: str | None = None, limit: timedelta | None = time_limit
        ) -> dist.ProcessGroup:
            ranks = own.flatten().tolist()
            return dist.new_group(ranks, limit, backend, use_local_synchronization=True, group_desc=name)

        along = {
            REPLICATE: ranks[:, s, p, c, t],
            SHARD: ranks[r, :, p, :, t].flatten(),
            PIPELINE: ranks[r, s, :, c, t],
            CONTEXT: ranks[r, s, p, :, t],
            TENSOR: ranks[r, s, p, c],
        }
        groups = {name: group(name, own) for name, own in along.items() if name == SHARD or len(own) > 1}
        names = (SHARD, TENSOR) if tensor > 1 else (SHARD,)
        parts = ranks[r, :, p].flatten(0, 1) if tensor > 1 else ranks[r, :, p].flatten()
        device_mesh = DeviceMesh.from_group(
            [groups[name] for name in names], device_type, mesh=parts, mesh_dim_names=names
        )
        copy = data
        if of_copy < data.size:
            copy = DataParallelGroup(group("copy", ranks[r], "gloo", None))
        sizes = (len(ranks), shard, pipeline, context, tensor)
        return cls(data, copy, *sizes, p, groups, device_mesh, fixed_order)

    @classmethod
    def cut(cls, group: DataParallelGroup, sharding: ShardingConfig) -> Mesh:
        """Makes the mesh that a recipe asks for."""
        sizes: dict[str, Any] = {"shard": sharding.shard, **sharding.peers}
        return cls.of(group, **sizes, fixed_order=sharding.fixed_order)

    @property
    def num_parts(self) -> int:
        """Ranks over which FSDP shares out what a tensor rank of a stage has of the weights: ``shard × context``."""
        return self.shard * self.context

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
        return self.data.rank % self._num_peers == self._speaker

    @property
    def first_peers(self) -> slice:
        """Of a list with an entry for each rank, those of the ranks that speak for a data rank."""
        return slice(self._speaker, None, self._num_peers)

    @property
    def _num_peers(self) -> int:
        return self.pipeline * self.context * self.tensor

    @property
    def _speaker(self) -> int:
        return (self.pipeline - 1) * self.context * self.tensor

    @property
    def is_first_of_stage(self) -> bool:
        """Whether this rank is the first that has its stage: it writes, and gets, what is whole."""
        of_stage = self.context * self.tensor
        return self.data.rank < self._num_peers and self.data.rank % of_stage == 0
