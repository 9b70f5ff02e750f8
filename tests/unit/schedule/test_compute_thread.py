"""The compute thread: order, results, errors, cancellation, threads of its own, and being stopped at once."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from functools import partial

import pytest
import torch

from quartet.observe.global_state import GlobalStateGuard
from quartet.schedule.compute_thread import ComputeThread, interrupt_computing
from quartet.schedule.role_group import LocalGroup


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


class Derived(Model):
    def pass_over(self, number: int, *, seconds: float = 0.0) -> int:
        return -super().pass_over(number, seconds=seconds)


def test_calls_compute_in_their_order_on_one_thread_while_the_loop_is_free() -> None:
    compute, first, second = ComputeThread(), Model(), Model()
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
    compute.close()
    assert found == [0, 2, 4, 6, 8, 10]
    assert (first.calls, second.calls) == ([0, 2, 4], [1, 3, 5])
    assert first.threads == second.threads and threading.get_ident() not in first.threads
    assert turns > 6, "the event loop goes on meanwhile"


def test_the_worker_s_own_override_runs() -> None:
    compute = ComputeThread()
    assert asyncio.run(LocalGroup(Derived(), compute).call(Model.pass_over, 3)) == -6
    assert asyncio.run(LocalGroup(Derived()).call(Model.pass_over, 3)) == -6, "without a thread, too"
    compute.close()


def test_errors_come_out_as_they_are_and_the_thread_goes_on() -> None:
    compute, model = ComputeThread(), Model()
    group = LocalGroup(model, compute)
    with pytest.raises(OSError, match="no memory"):
        asyncio.run(group.call(Model.fail))
    assert asyncio.run(group.call(Model.pass_over, 1)) == 2, "in another event loop"
    compute.close()


def test_a_cancelled_call_is_held_until_it_has_ended() -> None:
    compute, model = ComputeThread(), Model()

    async def run() -> float:
        task = asyncio.create_task(LocalGroup(model, compute).call(Model.pass_over, 1, seconds=0.3))
        await asyncio.sleep(0.05)
        start = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return time.monotonic() - start

    assert asyncio.run(run()) > 0.2
    compute.close()


@pytest.mark.parametrize("threads", [1, 2])
def test_it_has_its_own_number_of_threads(threads: int) -> None:
    compute = ComputeThread(threads)
    assert asyncio.run(compute.run(torch.get_num_threads)) == threads
    compute.close()


def test_nothing_of_a_call_lives_on() -> None:
    compute = ComputeThread()

    class Big:
        pass

    big = Big()
    kept = weakref.ref(big)
    asyncio.run(compute.run(partial(id, big)))
    del big
    time.sleep(0.05)
    gc.collect()
    assert kept() is None
    compute.close()


def test_a_program_stopped_at_once_ends_what_computes() -> None:
    compute = ComputeThread()

    def endless() -> None:
        while True:
            time.sleep(0.001)

    async def run() -> None:
        task = asyncio.ensure_future(compute.run(endless))
        await asyncio.sleep(0.05)
        interrupt_computing()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(run(), 10))
    assert asyncio.run(compute.run(lambda: 5)) == 5
    compute.close()


def _raises(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("reason", [StopIteration("next of nothing"), asyncio.CancelledError("own")])
def test_errors_that_mean_something_to_coroutines_come_out_as_errors(reason: BaseException, threads: int) -> None:
    compute = ComputeThread(threads)
    with pytest.raises(RuntimeError, match=type(reason).__name__) as found:
        asyncio.run(asyncio.wait_for(compute.run(partial(_raises, reason)), 10))
    assert found.value.__cause__ is reason
    compute.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt("own"), SystemExit(3)])
def test_what_ends_programs_comes_out_as_it_is(error: BaseException) -> None:
    compute = ComputeThread()
    with pytest.raises(type(error)):
        asyncio.run(compute.run(partial(_raises, error)))
    assert asyncio.run(compute.run(lambda: 5)) == 5
    compute.close()


def test_modes_of_the_thread_that_waits_are_not_those_of_what_computes() -> None:
    compute = ComputeThread()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert asyncio.run(compute.run(torch.is_grad_enabled))
        assert not asyncio.run(compute.run(lambda: torch.is_autocast_enabled("cpu")))
    compute.close()


def test_user_code_and_what_computes_never_meet() -> None:
    """The default dtype belongs to the process: what computes meanwhile would make its tensors of it."""
    compute, guard = ComputeThread(), GlobalStateGuard("the reward 'x'")

    def dtypes() -> set[torch.dtype]:
        end_s, found = time.monotonic() + 0.2, set()
        while time.monotonic() < end_s:
            found.add(torch.zeros(1).dtype)
            time.sleep(0.001)
        return found

    async def reward() -> None:
        await asyncio.sleep(0.05)
        torch.set_default_dtype(torch.float64)
        time.sleep(0.1)

    async def run() -> set[torch.dtype]:
        found, _, after = await asyncio.gather(compute.run(dtypes), guard.driven(reward()), compute.run(dtypes))
        return found | after

    assert asyncio.run(run()) == {torch.float32}
    assert guard.remarks()
    compute.close()
