"""Ranks of a process group for tests: processes forked from a server that has imported what they run."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

import forkserver
from quartet.cluster.worker import free_port

LIMIT_S = 120.0


def run_ranks(world: int, function: Callable[..., Any], *args: Any, limit_s: float = LIMIT_S) -> list[Any]:
    """``function(*args)`` on every rank of a gloo group of one thread each: what it returns, by rank.

    Results travel pickled. A rank that is gone without an answer gives its exit code's negative as ``Gone``.

    Raises:
        AssertionError: a rank raised, with its traceback, or took longer than the limit. No process is left.
    """
    context, port = forkserver.context(), free_port()
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(theirs, rank, world, port, limit_s, function, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _answers(pipes, limit_s)
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()


class Gone:
    """In the place of the answer of a rank that ended without one."""


def _answers(pipes: Sequence[Connection], limit_s: float) -> list[Any]:
    deadline, answers = time.monotonic() + limit_s, {}
    while len(answers) < len(pipes):
        waiting = [pipe for pipe in pipes if pipe not in answers]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {[pipes.index(pipe) for pipe in waiting]} gave no answer in {limit_s:g} s"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                failure, answers[pipe] = pickle.loads(pipe.recv_bytes())
            except EOFError:
                failure, answers[pipe] = None, Gone()
            assert failure is None, f"rank {pipes.index(pipe)}: {failure}"
    return [answers[pipe] for pipe in pipes]


def _rank(
    answer: Connection, rank: int, world: int, port: int, limit_s: float, function: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=limit_s / 2),
        )
        answer.send_bytes(pickle.dumps((None, function(*args))))
        dist.barrier()
    except BaseException:
        answer.send_bytes(pickle.dumps((traceback.format_exc(), None)))
    finally:
        answer.close()
        os._exit(0)
