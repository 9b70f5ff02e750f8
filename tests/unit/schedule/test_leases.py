"""The arbiter's rules, one scenario each, on the virtual clock.

A role's turn: its lease, its span, and work that goes on elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from quartet.config.errors import UserError
from quartet.extras.simulation.simulation import run_virtual
from quartet.observe.spans import SpanRecorder
from quartet.schedule.clock import await_uncancelled, loop_time
from quartet.schedule.leases import Arbiter, LeaseContext, LeaseMode, PoolSpec, RoleSpec, StaleVersion


class SlowMover:
    """Takes `seconds` per call and keeps a log; fails where told to."""

    def __init__(self, seconds: float, *, fail_onload: str | None = None) -> None:
        self.seconds = seconds
        self.fail_onload = fail_onload
        self.log: list[str] = []

    async def onload(self, role: str, mode: LeaseMode) -> None:
        self.log.append(f"+{role} {mode} begins")
        await asyncio.sleep(self.seconds)
        if role == self.fail_onload:
            raise OSError(f"{role} does not come in")
        self.log.append(f"+{role} {mode} ends")

    async def offload(self, role: str) -> None:
        self.log.append(f"-{role} begins")
        await asyncio.sleep(self.seconds)
        self.log.append(f"-{role} ends")


def one_pool(*names: str, budget: int | None = None, slots: int = 1, **options: Any) -> Arbiter:
    """Roles of 10 bytes in forward and generate, 40 in train, on one pool; states `actor` and `rollout`."""
    sizes: dict[LeaseMode, int] = {"forward": 10, "generate": 10, "train": 40}
    roles = [RoleSpec(name, "gpu", sizes) for name in names]
    states = {"actor": 0, "rollout": 0}
    return Arbiter([PoolSpec("gpu", slots, budget)], roles, versions=states, **options)


async def work(
    arbiter: Arbiter,
    role: str,
    mode: LeaseMode,
    seconds: float,
    log: list[tuple[str, float]] | None = None,
    name: str | None = None,
    **access: Any,
) -> None:
    async with arbiter.lease(role, mode, **access):
        if log is not None:
            log.append((name or role, loop_time()))
        await asyncio.sleep(seconds)


async def together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Starts all in this order and waits for all."""
    await asyncio.gather(*coroutines)


def test_a_role_has_one_forward_lease_at_a_time_but_shares_generation() -> None:
    async def main(mode: LeaseMode) -> float:
        arbiter = one_pool("a", slots=4)
        await together(*(work(arbiter, "a", mode, 1.0) for _ in range(3)))
        return loop_time()

    assert run_virtual(main("forward")) == 3.0
    assert run_virtual(main("generate")) == 1.0


def test_resident_roles_go_first_until_patience_ends() -> None:
    async def main(patience: int) -> list[str]:
        arbiter = one_pool("a", "b", budget=10, patience=patience)
        log: list[tuple[str, float]] = []
        await together(
            work(arbiter, "a", "forward", 1.0, log),
            work(arbiter, "b", "forward", 1.0, log),
            *(work(arbiter, "a", "forward", 1.0, log) for _ in range(5)),
        )
        return [name for name, _ in log]

    assert run_virtual(main(0)) == ["a", "b", "a", "a", "a", "a", "a"]
    assert run_virtual(main(3)) == ["a", "a", "a", "a", "b", "a", "a"]


def test_waiting_for_a_version_holds_nothing() -> None:
    async def main() -> list[tuple[str, float]]:
        arbiter = one_pool("actor", "probe")
        log: list[tuple[str, float]] = []

        async def watch(version: int) -> None:
            await arbiter.until("actor", version)
            log.append((f"version {version}", loop_time()))

        await together(
            watch(0),
            watch(2),
            work(arbiter, "actor", "train", 2.0, log, writes="actor"),
            work(arbiter, "probe", "forward", 1.0, log),
            work(arbiter, "actor", "train", 2.0, log, writes="actor"),
        )
        assert arbiter.is_idle
        return log

    expected = [("version 0", 0.0), ("actor", 0.0), ("actor", 2.0), ("version 2", 4.0), ("probe", 4.0)]
    assert sorted(run_virtual(main())) == sorted(expected)


def test_a_cancelled_watcher_leaks_nothing() -> None:
    async def main() -> None:
        arbiter = one_pool("actor")
        watcher = asyncio.create_task(arbiter.until("actor", 1))
        await asyncio.sleep(1.0)
        watcher.cancel()
        await asyncio.wait({watcher})
        assert arbiter.is_idle

    run_virtual(main())


def test_a_reader_waits_for_its_version_and_a_writer_advances_it() -> None:
    async def main() -> list[tuple[str, float]]:
        arbiter = one_pool("actor", "rollout", "probe", slots=3)
        log: list[tuple[str, float]] = []
        await together(
            work(arbiter, "probe", "forward", 1.0, log, reads={"actor": 2}),
            work(arbiter, "actor", "train", 2.0, log, reads={"actor": 0}, writes="actor"),
            work(arbiter, "actor", "train", 2.0, log, reads={"actor": 1}, writes="actor"),
            work(arbiter, "rollout", "generate", 1.0, log, reads={"actor": 2}, writes="rollout"),
        )
        assert (arbiter.version("actor"), arbiter.version("rollout")) == (2, 1)
        return log

    assert run_virtual(main()) == [("actor", 0.0), ("actor", 2.0), ("probe", 4.0), ("rollout", 4.0)]


def test_a_queued_reader_of_the_current_version_goes_before_the_writer() -> None:
    async def main() -> list[str]:
        arbiter = one_pool("actor", "probe", slots=1)
        log: list[tuple[str, float]] = []
        await together(
            work(arbiter, "probe", "train", 1.0, log, "holder"),
            work(arbiter, "actor", "train", 1.0, log, writes="actor"),
            work(arbiter, "probe", "forward", 1.0, log, reads={"actor": 0}),
        )
        return [name for name, _ in log]

    assert run_virtual(main()) == ["holder", "probe", "actor"]


def test_a_late_reader_gets_a_clear_error_and_a_reservation_prevents_it() -> None:
    async def main() -> None:
        arbiter = one_pool("actor", "probe", slots=2)
        await work(arbiter, "actor", "train", 1.0, writes="actor")
        with pytest.raises(StaleVersion, match=r"version 0 is gone: reserve\('actor', 0"):
            await work(arbiter, "probe", "forward", 1.0, reads={"actor": 0})
        with pytest.raises(StaleVersion), arbiter.reserve("actor", 0, "probe"):
            pass
        log: list[tuple[str, float]] = []

        async def read_later() -> None:
            await asyncio.sleep(10)
            await work(arbiter, "probe", "forward", 1.0, log, reads={"actor": 2})
            await work(arbiter, "probe", "forward", 1.0, log, reads={"actor": 2})

        async def train_twice() -> None:
            await work(arbiter, "actor", "train", 1.0, log, writes="actor")
            await work(arbiter, "actor", "train", 1.0, log, writes="actor")

        with arbiter.reserve("actor", 2, "probe"), arbiter.reserve("actor", 2, "probe"):
            await together(read_later(), train_twice())
        assert log == [("actor", 1.0), ("probe", 11.0), ("probe", 12.0), ("actor", 13.0)]
        assert arbiter.is_idle

    run_virtual(main())


def test_a_queued_reader_that_misses_its_window_is_told() -> None:
    async def main() -> None:
        arbiter = one_pool("actor", "probe", slots=2)
        both = {"actor": 0, "rollout": 1}
        late = asyncio.create_task(work(arbiter, "probe", "forward", 1.0, reads=both))
        await asyncio.sleep(1)
        await work(arbiter, "actor", "train", 1.0, writes="actor")
        with pytest.raises(StaleVersion):
            await late
        assert arbiter.is_idle

    run_virtual(main())


def test_a_lease_that_can_never_be_granted_fails_at_once() -> None:
    async def main() -> None:
        pools = [PoolSpec("small", 1, 4_000), PoolSpec("large", 1, 6_000), PoolSpec("larger", 1, 9_000)]
        arbiter = Arbiter(pools, [RoleSpec("actor", "small", {"forward": 1, "train": 5_000})], versions={"actor": 0})
        with pytest.raises(UserError) as error:
            await work(arbiter, "actor", "train", 1.0)
        assert error.value.found == "it needs 5,000 bytes, the pool has 4,000"
        assert "budget of at least 5,000 bytes" in error.value.remedy
        assert arbiter.is_idle

    run_virtual(main())


def test_a_cancelled_holder_waits_until_the_step_of_its_move_has_ended() -> None:
    async def main() -> tuple[list[str], float]:
        offloader = SlowMover(4.0)
        arbiter = one_pool("a", "b", budget=10, offloader=offloader)
        await work(arbiter, "a", "forward", 0.0)
        victim = asyncio.create_task(work(arbiter, "b", "forward", 1.0))
        await asyncio.sleep(1)
        victim.cancel()
        await asyncio.sleep(1)
        victim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await victim
        assert arbiter.is_idle
        assert arbiter.resident_bytes("gpu") == 0
        return offloader.log[2:], loop_time()

    assert run_virtual(main()) == (["-a begins", "-a ends"], 8.0)


def test_a_move_that_fails_leaves_the_accounts_right() -> None:
    async def main() -> None:
        offloader = SlowMover(1.0, fail_onload="b")
        arbiter = one_pool("a", "b", budget=10, offloader=offloader)
        await work(arbiter, "a", "forward", 0.0)
        with pytest.raises(OSError, match="b does not come in"):
            await work(arbiter, "b", "forward", 1.0)
        assert arbiter.is_idle
        assert arbiter.resident_bytes("gpu") == 0
        await work(arbiter, "a", "forward", 0.0)
        assert arbiter.resident_bytes("gpu") == 10

    run_virtual(main())


def worker_on_one_pool() -> LeaseContext:
    roles = [RoleSpec(name, "pool", {"forward": 0, "train": 0}) for name in ("actor", "critic")]
    return LeaseContext(Arbiter([PoolSpec("pool")], roles, versions={"actor": 3}), SpanRecorder(clock=loop_time))


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
                await await_uncancelled(elsewhere())

        first = asyncio.create_task(turn())
        for seconds in (1.0, 2.0):  # the second finds it already cancelled
            await asyncio.sleep(seconds)
            first.cancel()
        async with worker.turn("critic", "forward", "pass", step=0):
            began_s = loop_time()
        assert first.cancelled()
        return began_s

    assert run_virtual(main()) == 5.0
