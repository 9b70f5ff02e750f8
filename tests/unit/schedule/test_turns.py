"""A role's turn: its lease, its span, and work that goes on elsewhere."""

from __future__ import annotations

import asyncio

import pytest

from quartet.observe.spans import SpanRecorder
from quartet.schedule.clock import drained, now, run_virtual
from quartet.schedule.leases import Arbiter, LeaseContext, PoolSpec, RoleSpec


def worker_on_one_pool() -> LeaseContext:
    roles = [RoleSpec(name, "pool", {"forward": 0, "train": 0}) for name in ("actor", "critic")]
    return LeaseContext(Arbiter([PoolSpec("pool")], roles, versions={"actor": 3}), SpanRecorder(clock=now))


def test_a_span_covers_the_work_and_not_the_wait() -> None:
    async def main() -> None:
        worker = worker_on_one_pool()

        async def turn(role: str) -> int | None:
            async with worker.turn(
                role, "forward", f"{role}_pass", step=7, chunk=1, tokens=5, reads={"actor": None}
            ) as (lease, span):
                await asyncio.sleep(2.0)
                span.nbytes = 9
                return lease.versions["actor"]

        assert await asyncio.gather(turn("actor"), turn("critic")) == [3, 3]
        found = [(s.name, s.start_s, s.end_s, s.step, s.chunk, s.tokens, s.nbytes) for s in worker.recorder.spans()]
        assert found == [("actor_pass", 0, 2, 7, 1, 5, 9), ("critic_pass", 2, 4, 7, 1, 5, 9)]

    run_virtual(main())


@pytest.mark.parametrize("fails", [False, True])
def test_a_cancelled_turn_keeps_its_lease_until_the_work_elsewhere_has_ended(fails: bool) -> None:
    async def main() -> float:
        worker = worker_on_one_pool()

        async def elsewhere() -> None:
            await asyncio.sleep(5.0)
            if fails:
                raise OSError("nobody is there to hear it")

        async def turn() -> None:
            async with worker.turn("actor", "forward", "pass", step=0):
                await drained(elsewhere())

        first = asyncio.create_task(turn())
        for seconds in (1.0, 2.0):  # the second finds it already cancelled
            await asyncio.sleep(seconds)
            first.cancel()
        async with worker.turn("critic", "forward", "pass", step=0):
            began_s = now()
        assert first.cancelled()
        return began_s

    assert run_virtual(main()) == 5.0
