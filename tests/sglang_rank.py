"""A tensor-parallel worker of the stand-in for SGLang: does what the ``ModelRunner`` does when it is told to join a
group and to receive weights. Reads a request a line, answers a line; ``python sglang_rank.py TP_RANK``.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from safetensors.torch import save_file

LIMIT = timedelta(seconds=30)
groups: dict[str, Any] = {}


def join(
    tp_rank: int,
    *,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: str,
) -> None:
    rank = rank_offset + tp_rank
    store, rank, size = next(dist.rendezvous(f"tcp://{master_address}:{master_port}", rank, world_size, timeout=LIMIT))
    store = dist.PrefixStore(group_name, store)
    made, _ = c10d._new_process_group_helper(
        size, rank, [], dist.Backend(backend), store, group_name=c10d.GroupName(group_name), timeout=LIMIT
    )
    c10d._world.pg_group_ranks[made] = {n: n for n in range(size)}
    groups[group_name] = made


def receive(path: str, *, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str) -> None:
    tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in zip(dtypes, shapes, strict=True)]
    for handle in [dist.broadcast(each, src=0, group=groups[group_name], async_op=True) for each in tensors]:
        handle.wait()
    save_file(dict(zip(names, tensors, strict=True)), path)


def destroy(*, group_name: str) -> None:
    dist.destroy_process_group(groups.pop(group_name))


def main() -> None:
    tp_rank = int(sys.argv[1])
    for line in sys.stdin:
        what, path, body = json.loads(line)
        try:
            if what == "init":
                join(tp_rank, **body)
            elif what == "update":
                receive(path, **body)
            else:
                destroy(**body)
            answer = {"success": True, "message": "Succeeded."}
        except (RuntimeError, KeyError, ValueError) as error:
            answer = {"success": False, "message": repr(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
