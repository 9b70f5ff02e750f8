"""Gathers and sums over ranks: gloo's own, and those by messages from rank to rank that FSDP2 is given on CPUs.

    python benchmarks/collectives.py [--mib 64] [--processes 2]

A tensor of ``--mib`` MiB in fp32, of which every rank has one part (a gather) or is to have one (a sum). The ways take
turns in the same processes; a time is the median of rank 0's, and needs as many idle cores as processes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import arguments, markdown, write_results
from torch import Tensor

from quartet.cluster.worker import free_port
from quartet.models.work import WorkCounter
from quartet.train.parallel.messages import AllGather, ReduceScatter

Seconds = dict[str, list[tuple[float, float]]]


def rank_process(rank: int, world: int, port: int, num_numbers: int, repeats: int, answer: mp.SimpleQueue) -> None:
    """Rank 0 answers with seconds, and seconds of its processor, by way."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    group = dist.group.WORLD
    assert group is not None
    whole, part = torch.ones(num_numbers), torch.ones(num_numbers // world)
    work = WorkCounter()
    gather, add = AllGather(work, direct=True), ReduceScatter(work, direct=True)
    ways: dict[str, Callable[[], object]] = {
        "gather, gloo": lambda: dist.all_gather_single(whole, part),
        "gather, messages": lambda: gather(whole, part, group),
        "sum, gloo": lambda: dist.reduce_scatter_single(part, whole),
        "sum, messages": lambda: add(part, whole, group, dist.ReduceOp.SUM),
    }
    found: Seconds = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, way in ways.items():
            _filled(whole, part)
            dist.barrier()
            begun, busy = time.perf_counter(), time.process_time()
            way()
            if turn:  # The first one connects the ranks.
                found[name].append((time.perf_counter() - begun, time.process_time() - busy))
    if rank == 0:
        answer.put(found)
    dist.barrier()
    dist.destroy_process_group()


def _filled(*tensors: Tensor) -> None:
    """What is summed does not grow from turn to turn."""
    for tensor in tensors:
        tensor.fill_(1.0)


def main() -> None:
    parser = arguments(__doc__, repeats=15)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--processes", type=int, default=2)
    parser.set_defaults(threads=1)
    args = parser.parse_args()
    mib = 1 if args.smoke else args.mib
    answer: mp.SimpleQueue = mp.get_context("spawn").SimpleQueue()
    given = (args.processes, free_port(), mib * 2**18 // args.processes * args.processes, args.repeats, answer)
    ranks = mp.spawn(rank_process, given, nprocs=args.processes, join=False)
    found: Seconds = answer.get()
    ranks.join()
    medians = {way: [statistics.median(column) for column in zip(*turns, strict=True)] for way, turns in found.items()}
    write_results(args, {"collectives": {"mib": mib, "processes": args.processes, "seconds": medians}})
    rows = [[name, *(f"{1000 * value:.1f}" for value in values)] for name, values in medians.items()]
    print(markdown(["way", "ms", "processor ms"], rows))


if __name__ == "__main__":
    main()
