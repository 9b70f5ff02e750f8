"""The mesh of a role: how its processes hold one model between them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from quartet.config import UserError
from quartet.train.parallel.group import DataParallelGroup

REPLICATE, SHARD = "replicate", "shard"


@dataclass(frozen=True, eq=False)
class Mesh:
    """The processes of a role as ``replicate × shard``, in the order of their ranks.

    Ranks ``shard · i`` to ``shard · (i + 1) - 1`` hold copy ``i`` of the model between them. Every rank computes a
    share of each batch of its own, so all of them are data ranks. Context, tensor and pipeline dimensions are
    dimensions of ``device_mesh`` beside these two.

    Attributes:
        data: all data ranks, for plain values. Never used within a pass, so it works when a pass has failed.
        copy: those among them that hold this rank's copy of the model, likewise.
        device_mesh: torch's mesh, with the process groups that passes use.
        fixed_order: sums over ranks are taken in the order of the ranks, so their bits do not depend on a library.
        time_limit: of one collective within a pass.
    """

    data: DataParallelGroup
    copy: DataParallelGroup
    device_mesh: DeviceMesh
    fixed_order: bool = False
    time_limit: timedelta | None = None

    @classmethod
    def of(
        cls,
        data: DataParallelGroup,
        *,
        shard: int = 1,
        device_type: str | None = None,
        fixed_order: bool = False,
        time_limit: timedelta | None = None,
    ) -> Mesh:
        """The mesh of all ranks of ``data``; all of them call it.

        Args:
            shard: ranks that hold one copy of the model between them.
            device_type: ``cpu`` or ``cuda``; what the group's backend is for where it is left out.
            time_limit: of one collective within a pass; the group's own where it is left out.

        Raises:
            UserError: ``shard`` does not divide the number of ranks.
        """
        if data.size % shard:
            raise UserError(
                "sharding.shard does not divide the processes of its role",
                found=f"shard: {shard}, {data.size} processes",
                remedy=f"choose one of {', '.join(str(n) for n in range(1, data.size + 1) if data.size % n == 0)}, "
                "or another number of processes",
            )
        if device_type is None:
            device_type = "cuda" if "nccl" in dist.get_backend(data.process_group) else "cpu"
        ranks = torch.tensor(data.ranks, dtype=torch.int).view(-1, shard)
        replica, place = divmod(data.rank, shard)
        limit = time_limit if time_limit is not None else _time_limit(data, device_type)
        groups = [
            dist.new_group(own.tolist(), timeout=limit, use_local_synchronization=True, group_desc=name)
            for name, own in ((REPLICATE, ranks[:, place]), (SHARD, ranks[replica]))
        ]
        device_mesh = DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=(REPLICATE, SHARD))
        copy = data
        if shard < data.size:
            own = ranks[replica].tolist()
            copy = DataParallelGroup(dist.new_group(own, backend="gloo", use_local_synchronization=True))
        return cls(data, copy, device_mesh, fixed_order, limit)

    @property
    def replicate(self) -> int:
        """Copies of the model."""
        return self.device_mesh.size(0)

    @property
    def shard(self) -> int:
        """Ranks that hold one copy between them."""
        return self.device_mesh.size(1)

    @property
    def place(self) -> int:
        """This rank's number among those that hold its copy."""
        return self.device_mesh.get_local_rank(SHARD)

    def group(self, name: str) -> dist.ProcessGroup:
        """The ranks along one dimension that this rank is among."""
        return self.device_mesh.get_group(name)


def _time_limit(data: DataParallelGroup, device_type: str) -> timedelta | None:
    group = data.process_group if data.process_group is not None else dist.group.WORLD
    assert group is not None
    # torch has no public way to ask.
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    limit: timedelta | None = getattr(options, "_timeout", None)
    return limit
