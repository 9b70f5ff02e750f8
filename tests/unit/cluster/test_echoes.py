"""Of several ranks that fail in one call, the one is named that the others only speak of."""

from __future__ import annotations

import pytest

from quartet.cluster import ResourcePool, Worker, WorkerError, WorkerGroup, connect, dispatch


class RankLeft(Exception):
    is_echo = True


class Member(Worker):
    @dispatch()
    def fail(self, cause: int) -> None:
        if self.rank == cause:
            raise ValueError("no such token")
        raise RankLeft(f"rank {cause} has failed")


@pytest.mark.parametrize("cause", [0, 1])
def test_the_cause_is_told_before_its_echoes(cause: int) -> None:
    with connect("local"):
        group = WorkerGroup(ResourcePool([2], cpus=0.01), Member)
        with pytest.raises(WorkerError, match=rf"rank {cause} of group .*no such token") as raised:
            group.fail(cause)
    assert any("RankLeft" in line for line in raised.value.also)
