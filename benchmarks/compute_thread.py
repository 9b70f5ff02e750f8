"""Seconds of the same computation in the event loop's thread and in the compute thread, with one OpenMP pool and two.

    python benchmarks/compute_thread.py [--threads 2] [--rounds 600] [--repeats 5]

A round is two products of 64 rows, between them an activation, and an elementwise operation: several parallel parts of
some microseconds, as in a decode step. *Beside a second pool*: another thread has computed before and is idle. The
sides take turns; medians. Needs a quiet machine: threads that spin while others want the cores measure the others.
The last row is what a call costs there and back, in microseconds.
"""

from __future__ import annotations

import asyncio
import queue
import statistics
import threading
import time

import torch
import torch.nn.functional as F
from common import arguments, markdown, write_results

from quartet.observe.process import end_thread_pool
from quartet.schedule.clock import ComputeThread

_UP, _DOWN = torch.randn(1024, 256), torch.randn(256, 1024)
_ROWS, _LARGE = torch.randn(64, 256), torch.randn(200, 1000)


def seconds_of(rounds: int) -> float:
    begun, x = time.perf_counter(), _ROWS
    for _ in range(rounds):
        x = F.linear(F.silu(F.linear(x, _UP)), _DOWN) * 0.01
        _LARGE * 1.5
    return time.perf_counter() - begun


class Idle:
    """A thread that has a pool and does nothing, until it is closed."""

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        begun = threading.Event()
        self._thread = threading.Thread(target=lambda: (seconds_of(1), begun.set(), self._ended.get()))
        self._thread.start()
        begun.wait()

    def close(self) -> None:
        self._ended.put(None)
        self._thread.join()


async def measured(rounds: int, repeats: int, calls: int) -> dict[str, float]:
    """Seconds by side, and the microseconds of an empty call."""
    compute, found = ComputeThread(), {}
    for _ in range(repeats):
        found.setdefault("event loop's thread", []).append(seconds_of(rounds))
        found.setdefault("compute thread", []).append(await compute.run(lambda: seconds_of(rounds)))
        idle = Idle()
        found.setdefault("beside a second pool", []).append(await compute.run(lambda: seconds_of(rounds)))
        idle.close()
        compute.close()
        end_thread_pool()
    begun = time.perf_counter()
    for _ in range(calls):
        await compute.run(lambda: None)
    microseconds = (time.perf_counter() - begun) / calls * 1e6
    compute.close()
    return {name: statistics.median(seconds) for name, seconds in found.items()} | {"a call, µs": microseconds}


def main() -> None:
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--rounds", type=int, default=600)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rounds, repeats, calls = (2, 1, 10) if args.smoke else (args.rounds, args.repeats, 2000)
    found = asyncio.run(measured(rounds, repeats, calls))
    print(markdown(["side", "seconds"], [[name, f"{value:.3g}"] for name, value in found.items()]))
    write_results(args, {"compute_thread": [{"side": name, "seconds": value} for name, value in found.items()]})


if __name__ == "__main__":
    main()
