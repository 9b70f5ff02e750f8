"""What dies is noticed within seconds and named with its own last words; what is left works again after a restart."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import distributed

from quartet.cluster import RANK_ZERO, ResourcePool, Worker, WorkerDied, WorkerError, WorkerGroup, dispatch
from quartet.config import UserError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
SOON_S = 10.0
TINY = {"cpus": 0.01}


class Trainer(Worker):
    @dispatch()
    def sum_ranks(self) -> float:
        self.init_process_group("gloo", timeout_s=120)
        value = torch.tensor(float(self.rank))
        distributed.all_reduce(value)
        return value.item()

    @dispatch()
    def stall(self, rank: int) -> float:
        """One rank hangs; the others wait for it in a collective."""
        if self.rank == rank:
            time.sleep(600)
        return self.sum_ranks()

    @dispatch()
    def stumble(self, error: type[Exception]) -> float:
        """One rank raises; the others wait for it in a collective."""
        if self.rank == 1:
            raise error("no way on") if error is ValueError else UserError("no", found="way", remedy="on")
        return self.sum_ranks()

    @dispatch(RANK_ZERO, blocking=False)
    def make(self, items: list[int], seconds: float) -> list[torch.Tensor]:
        time.sleep(seconds)
        return [torch.full((300_000,), float(item)) for item in items]

    @dispatch(blocking=False)
    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    @dispatch()
    def unpicklable(self) -> Any:
        return threading.Lock()


class Reader(Worker):
    @dispatch(RANK_ZERO)
    def means(self, tensors: list[torch.Tensor]) -> list[float]:
        return [tensor.mean().item() for tensor in tensors]


@pytest.fixture(scope="module")
def groups(ray_cluster: Any) -> tuple[WorkerGroup, WorkerGroup]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return (
        WorkerGroup(ResourcePool([2], **TINY), Trainer, name="trainer"),
        WorkerGroup(ResourcePool([1], **TINY), Reader, name="reader"),
    )


@pytest.fixture
def trainer(groups: tuple[WorkerGroup, WorkerGroup]) -> WorkerGroup:
    """Whole again, whatever the test before did to it."""
    if groups[0].dead():
        groups[0].restart()
    return groups[0]


def kill(group: WorkerGroup, rank: int, *, after_s: float = 0.0) -> None:
    pid = group.processes[rank].pid
    threading.Timer(after_s, os.kill, (pid, signal.SIGKILL)).start()


def test_a_killed_worker_is_named_not_those_that_waited_for_it(trainer: WorkerGroup) -> None:
    assert trainer.sum_ranks() == [1.0] * 2
    pid = trainer.processes[1].pid
    kill(trainer, 1, after_s=1.0)
    start = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        trainer.stall(1)
    assert time.monotonic() - start < 1.0 + SOON_S
    death = caught.value.death
    assert (death.group, death.rank, death.pid) == ("trainer", 1, pid)
    assert [d.rank for d in trainer.dead()] == [1]
    trainer.restart()
    assert trainer.sum_ranks() == [1.0] * 2, "a new process group"


@pytest.mark.parametrize("error", [ValueError, UserError])
def test_a_group_whose_ranks_wait_for_one_that_failed_is_ended(trainer: WorkerGroup, error: type[Exception]) -> None:
    """A mistake of the user comes out as it is."""
    start = time.monotonic()
    with pytest.raises(WorkerDied if error is ValueError else UserError) as caught:
        trainer.stumble(error)
    assert time.monotonic() - start < SOON_S
    assert isinstance(caught.value, UserError) or "Traceback" in str(caught.value.__cause__)
    assert [(d.rank, d.reason) for d in trainer.dead()] == [
        (1, "ValueError: no way on" if error is ValueError else "no: way")
    ]
    with pytest.raises(WorkerDied):
        trainer.sum_ranks()
    trainer.restart()
    assert trainer.sum_ranks() == [1.0] * 2


def test_an_idle_worker_that_dies_is_found(trainer: WorkerGroup) -> None:
    kill(trainer, 1)
    time.sleep(1.0)
    found = trainer.dead(timeout_s=SOON_S)
    assert [death.rank for death in found] == [1]
    with pytest.raises(WorkerDied, match="rank 1 of group 'trainer'"):
        trainer.sum_ranks()


def test_the_reader_of_a_result_names_who_should_have_made_it(
    trainer: WorkerGroup, groups: tuple[WorkerGroup, WorkerGroup]
) -> None:
    made = trainer.make([1, 2, 3], 600.0)
    kill(trainer, 0, after_s=1.0)
    start = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        groups[1].means(made)
    assert time.monotonic() - start < 1.0 + SOON_S
    assert (caught.value.death.group, caught.value.death.rank) == ("trainer", 0)


def test_what_was_made_survives_its_maker(trainer: WorkerGroup, groups: tuple[WorkerGroup, WorkerGroup]) -> None:
    made = trainer.make([1, 2, 3], 0.0)
    made.wait(timeout_s=60)
    for rank in range(2):
        kill(trainer, rank)
    time.sleep(1.0)
    assert groups[1].means(made) == [1.0, 2.0, 3.0]


def test_a_result_that_cannot_travel_fails_its_call(trainer: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match="pickle"):
        trainer.unpicklable()
    assert trainer.dead() == []


def test_a_call_that_takes_too_long_says_which_ranks(trainer: WorkerGroup) -> None:
    with pytest.raises(TimeoutError, match=r"did not end within 1 s on ranks \[0, 1\] of group 'trainer'"):
        trainer.rest(3.0).wait(timeout_s=1.0)
