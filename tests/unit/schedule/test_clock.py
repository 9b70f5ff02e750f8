"""The virtual clock: jumps, whole microseconds, deadlocks.

The compute thread: order, results, errors, cancellation, threads of its own, and being stopped at once.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from quartet.extras.simulation.simulation import Deadlock, run_virtual
from quartet.observe.global_state import RandomStateGuard
from quartet.schedule.clock import ComputeThread, loop_time
from quartet.schedule.role_group import LocalGroup


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> list[tuple[str, float]]:
        log: list[tuple[str, float]] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            log.append((name, loop_time()))

        await asyncio.gather(sleeper("late", 200_000.0), sleeper("early", 0.5), sleeper("middle", 3600))
        return log

    started = time.monotonic()
    assert run_virtual(main()) == [("early", 0.5), ("middle", 3600.0), ("late", 200_000.0)]
    assert time.monotonic() - started < 5


def test_deadlock_still_runs_the_cleanup_of_tasks() -> None:
    cleaned: list[str] = []

    async def main() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1)
            cleaned.append("main")

    with pytest.raises(Deadlock):
        run_virtual(main())
    assert cleaned == ["main"]


def test_results_errors_and_timeouts_come_through() -> None:
    async def timed_out() -> str:
        try:
            async with asyncio.timeout(2.5):
                await asyncio.Event().wait()
        except TimeoutError:
            return f"timed out at {loop_time()}"
        return "no timeout"

    async def fails() -> None:
        raise KeyError("mine")

    assert run_virtual(timed_out()) == "timed out at 2.5"
    with pytest.raises(KeyError, match="mine"):
        run_virtual(fails())


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def compute(request: pytest.FixtureRequest) -> Iterator[ComputeThread]:
    found = ComputeThread(request.param)
    yield found
    found.close()


class Model:
    """Notes where and in which order it is called."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.threads: set[int] = set()

    def pass_over(self, number: int, *, seconds: float = 0.0) -> int:
        self.calls.append(number)
        self.threads.add(threading.get_ident())
        time.sleep(seconds)
        return 2 * number

    def fail(self) -> None:
        raise OSError("no memory")


def test_calls_compute_in_their_order_on_one_thread_while_the_loop_is_free(compute: ComputeThread) -> None:
    first, second = Model(), Model()
    groups = [LocalGroup(first, compute), LocalGroup(second, compute)]

    async def run() -> tuple[list[int], int]:
        turns = 0

        async def idle() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.001)

        idler = asyncio.create_task(idle())
        calls = [groups[i % 2].call(Model.pass_over, i, seconds=0.02) for i in range(6)]
        found = await asyncio.gather(*calls)
        idler.cancel()
        return found, turns

    found, turns = asyncio.run(run())
    assert found == [0, 2, 4, 6, 8, 10]
    assert (first.calls, second.calls) == ([0, 2, 4], [1, 3, 5])
    assert first.threads == second.threads and threading.get_ident() not in first.threads
    assert turns > 6, "the event loop goes on meanwhile"


def test_errors_come_out_as_they_are_and_the_thread_goes_on(compute: ComputeThread) -> None:
    model = Model()
    group = LocalGroup(model, compute)
    with pytest.raises(OSError, match="no memory"):
        asyncio.run(group.call(Model.fail))
    assert asyncio.run(group.call(Model.pass_over, 1)) == 2, "in another event loop"


def test_a_cancelled_call_is_held_until_it_has_ended(compute: ComputeThread) -> None:
    model = Model()

    async def run() -> float:
        task = asyncio.create_task(LocalGroup(model, compute).call(Model.pass_over, 1, seconds=0.3))
        await asyncio.sleep(0.05)
        start = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - start

    assert asyncio.run(run()) > 0.2


@pytest.mark.parametrize("threads", [1, 2])
def test_it_has_its_own_number_of_threads(threads: int) -> None:
    compute = ComputeThread(threads)
    assert asyncio.run(compute.run(torch.get_num_threads)) == threads
    compute.close()


def test_nothing_of_a_call_lives_on(compute: ComputeThread) -> None:

    class Big:
        pass

    big = Big()
    kept = weakref.ref(big)
    asyncio.run(compute.run(partial(id, big)))
    del big
    time.sleep(0.05)
    gc.collect()
    assert kept() is None


def _raises(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("reason", [StopIteration("next of nothing"), asyncio.CancelledError("own")])
def test_errors_that_mean_something_to_coroutines_come_out_as_errors(
    compute: ComputeThread, reason: BaseException
) -> None:
    with pytest.raises(RuntimeError, match=type(reason).__name__) as found:
        asyncio.run(asyncio.wait_for(compute.run(partial(_raises, reason)), 10))
    assert found.value.__cause__ is reason


def test_user_code_and_what_computes_never_meet(compute: ComputeThread) -> None:
    """Global generators belong to the process: what computes meanwhile would draw from those of user code."""
    guard = RandomStateGuard("the reward 'x'")

    def draws() -> list[float]:
        found = []
        for _ in range(100):
            found.append(torch.rand(()).item())
            time.sleep(0.001)
        return found

    async def reward() -> None:
        for _ in range(5):
            await asyncio.sleep(0.02)
            torch.manual_seed(5)
            time.sleep(0.02)

    async def run() -> list[float]:
        found, _, after = await asyncio.gather(compute.run(draws), guard.driven(reward()), compute.run(draws))
        return found + after

    torch.manual_seed(1)
    wanted = [torch.rand(()).item() for _ in range(200)]
    torch.manual_seed(1)
    assert asyncio.run(run()) == wanted
    assert guard.warnings()


_POOLS = """
import asyncio, os, threading, time
from contextlib import closing
import torch
from quartet.data.lazy import Prefetcher
from quartet.schedule.clock import ComputeThread
from quartet.trainers.signals import run_async

def parallel(number=0):
    torch.ones(1 << 20).mul_(2)

def num_workers():
    "OpenMP's, and the same few others as long as the process lives."
    return len(os.listdir("/proc/self/task")) - threading.active_count()

def becomes(number):
    "Threads that have ended are listed for a moment more."
    end_s = time.monotonic() + 10
    while num_workers() != number and time.monotonic() < end_s:
        time.sleep(0.01)
    return num_workers() == number

torch.set_num_threads(2)
parallel()
with_one = num_workers()

def one_pool():
    parallel()
    return becomes(with_one)

async def work(compute):
    first = await compute.run(one_pool)
    parallel()  # user code, or a large batch that is laid out
    return first, await compute.run(one_pool)

async def notebook(compute):
    parallel()
    return run_async(work(compute))

for run in (lambda compute: run_async(work(compute)), lambda compute: asyncio.run(notebook(compute))):
    compute = ComputeThread()
    assert run(compute) == (True, True)
    compute.close()
with closing(Prefetcher(parallel, ahead=1)) as batches:
    batches.start(0)
    batches._waiting[0].result()
    assert becomes(with_one - 1), "no pool idles where batches are prepared"
"""


def test_openmp_has_one_pool() -> None:
    """Also after the main thread has computed, as loading and evaluation do: idle pools slow down the others."""
    done = subprocess.run([sys.executable, "-c", _POOLS], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
