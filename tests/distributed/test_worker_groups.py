"""What worker groups promise: dispatch, futures, faults and pools."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quartet.batch import ColumnSet, RaggedBatch, join_columns
from quartet.cluster import (
    RANK_ZERO,
    SPLIT,
    BatchFuture,
    ClassWithArgs,
    ClusterError,
    CustomDispatch,
    OneRank,
    ResourcePool,
    Worker,
    WorkerDied,
    WorkerError,
    WorkerGroup,
    dispatch,
)
from quartet.config.errors import UserError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'quartet-rl[ray]'")
TINY = {"cpus": 0.01}


class Member(Worker):
    """Shows what it was called with."""

    def __init__(self, start: int = 0) -> None:
        self.value = self.rank + start
        self.seen = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
        self.calls = 0

    @dispatch()
    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    @dispatch()
    def where(self) -> tuple[int, dict[str, str], int]:
        return self.rank, self.seen, os.getpid()

    @dispatch(RANK_ZERO)
    def first(self, text: str, *, suffix: str = "") -> str:
        self.calls += 1
        return f"{text}{self.rank}{suffix}"

    @dispatch()
    def own(self, value: Any) -> Any:
        return self.rank, value

    @dispatch(
        CustomDispatch(
            lambda layout, n: [((n,), {}) if r % 2 else None for r in range(layout.world_size)], lambda _, r: r
        )
    )
    def odd(self, n: int) -> int:
        return n * self.rank

    def plain(self, value: int) -> int:
        return value + self.rank

    @dispatch()
    def fail_on(self, rank: int, kind: str) -> int:
        if self.rank == rank:
            if kind == "user":
                raise UserError("no room", found="3 GB", remedy="ask for less")
            if kind == "exit":
                sys.exit("this rank gives up")
            raise ValueError("this rank was told to fail")
        return self.rank

    @dispatch()
    def meet(self) -> float:
        """The sum of all ranks."""
        self.init_process_group("gloo", timeout_s=60)
        value = torch.tensor(float(self.rank))
        torch.distributed.all_reduce(value)
        return value.item()


class Scorer(Worker):
    """Scores sequences."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    @dispatch(SPLIT)
    def score(self, batch: RaggedBatch, scale: float = 1.0) -> ColumnSet:
        return ColumnSet(batch.ids, {"score": batch.input_ids.float() * scale * self.factor})

    @dispatch(RANK_ZERO, blocking=False)
    def double(self, texts: list[str]) -> list[str]:
        return [2 * text for text in texts]

    @dispatch(RANK_ZERO, blocking=False)
    def marked(self, batch: RaggedBatch) -> RaggedBatch:
        """Its column ``mark`` counts the times."""
        return batch.with_sequence(mark=batch.sequence.get("mark", torch.zeros(len(batch))) + 1)

    @dispatch(SPLIT)
    def update(self, batch: RaggedBatch, weight: float) -> Tensor:
        """Per sequence: its summed score times the weight."""
        spans = [batch.leaf_span(s) for s in range(len(batch))]
        sums = [batch.token["score"][a:b].sum() for a, b in spans]
        return torch.stack(sums) * weight if sums else torch.zeros(0)

    @dispatch()
    def count(self, batch: RaggedBatch) -> int:
        return len(batch)

    @dispatch(RANK_ZERO, blocking=False)
    def break_down(self, text: str) -> str:
        raise RuntimeError(f"cannot work on {text}")


class Broken(Worker):
    def __init__(self) -> None:
        raise OSError("no such model")


class Moody(Worker):
    """Takes a while to be made, and cannot be made where there is a file ``trouble``."""

    def __init__(self, trouble: str) -> None:
        time.sleep(0.3)
        if os.path.exists(trouble):
            raise OSError("no such model")

    @dispatch(RANK_ZERO)
    def ready(self) -> bool:
        return True


@pytest.fixture(scope="module")
def backend(ray_cluster: Any) -> Any:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no module that a worker could import
    return ray_cluster


@pytest.fixture(scope="module")
def four(backend: Any) -> WorkerGroup:
    return WorkerGroup(ResourcePool([4], **TINY), Member, name="four")


@pytest.fixture(scope="module")
def scorers(backend: Any) -> tuple[WorkerGroup, WorkerGroup]:
    """Groups with another split: two and three parts."""
    deferred = ClassWithArgs(Scorer, factor=10.0)
    return (
        WorkerGroup(ResourcePool([2], **TINY), Scorer, name="two"),
        WorkerGroup(ResourcePool([3], **TINY), deferred, name="three"),
    )


BATCH = RaggedBatch.from_groups(
    [[1, 2], [3, 4, 5], [6], [7, 8]],
    [[[10], [11, 12, 13]], [[20, 21]], [[30], [31], [32, 33]], [[40, 41, 42, 43]]],
    ["a0", "a1", "b0", "c0", "c1", "c2", "d0"],
)


# Modes ---------------------------------------------------------------------------------------------------


def test_workers_hold_their_state(four: WorkerGroup) -> None:
    assert four.add(1) == [1, 2, 3, 4]
    assert four.add(amount=10) == [11, 12, 13, 14]


def test_workers_know_their_place_before_they_are_made(four: WorkerGroup) -> None:
    for rank, (own, seen, _) in enumerate(four.where()):
        assert own == rank and seen["RANK"] == str(rank) and seen["WORLD_SIZE"] == "4"
        assert seen["MASTER_ADDR"] == "127.0.0.1"
    assert "RANK" not in os.environ, "the driver's own environment is left alone"


def test_one_rank_and_rank_zero(four: WorkerGroup) -> None:
    assert four.first("rank ", suffix="!") == "rank 0!"
    assert four.call("first", "", mode=OneRank(2)) == "2"
    with pytest.raises(ValueError, match="no rank 4 among 4"):
        four.call("first", "", mode=OneRank(4))


def test_a_mode_made_of_two_functions(four: WorkerGroup) -> None:
    assert four.odd(10) == [None, 10, None, 30]


def test_any_method_by_name(four: WorkerGroup) -> None:
    assert four.call("plain", 10) == [10, 11, 12, 13]
    assert four.call("plain", 1, blocking=False).result() == [1, 2, 3, 4]


# Splitting -----------------------------------------------------------------------------------------------


def test_columns_of_a_split_batch_fit_the_batch(scorers: tuple[WorkerGroup, WorkerGroup]) -> None:
    for group, factor in zip(scorers, (1.0, 10.0), strict=True):
        joined = join_columns(BATCH, group.score(BATCH, scale=2.0))
        assert torch.equal(joined.token["score"], BATCH.input_ids * 2.0 * factor)


def test_fewer_items_than_parts(scorers: tuple[WorkerGroup, WorkerGroup]) -> None:
    one = BATCH.select([3])
    assert torch.equal(join_columns(one, scorers[1].score(one)).token["score"], one.input_ids * 10.0)


# Futures -------------------------------------------------------------------------------------------------


def test_a_future_has_the_blocking_calls_result(scorers: tuple[WorkerGroup, WorkerGroup]) -> None:
    future = scorers[0].call("score", BATCH, mode=SPLIT, blocking=False)
    assert isinstance(future, BatchFuture)
    assert torch.equal(join_columns(BATCH, future.result(timeout_s=60)).token["score"], BATCH.input_ids * 1.0)


def test_who_awaits_a_future_does_not_poll(
    backend: Any, four: WorkerGroup, scorers: tuple[WorkerGroup, WorkerGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.arange(100_000)

    async def several() -> list[Any]:
        once = scorers[0].double(["a", "b"])
        batch = scorers[1].ask("score", BATCH, mode=SPLIT)
        large = four.call("own", value, blocking=False)
        return [*await asyncio.gather(once, once, batch, four.ask("plain", 10), large), await once]

    monkeypatch.setattr(backend, "wait", None)
    first, second, columns, everyone, large, again = asyncio.run(several())
    assert first == second == again == ["aa", "bb"] and everyone == [10, 11, 12, 13]
    assert torch.equal(join_columns(BATCH, columns).token["score"], BATCH.input_ids * 10.0)
    assert [own for own, _ in large] == [0, 1, 2, 3] and all(torch.equal(got, value) for _, got in large)


def test_an_awaited_call_fails_as_one_that_blocks(four: WorkerGroup) -> None:
    async def fails() -> Any:
        return await four.ask("fail_on", 2, "value")

    with pytest.raises(WorkerError, match="fail_on raised in rank 2 of group 'four'") as caught:
        asyncio.run(fails())
    assert str(caught.value).count("Traceback (most recent call last)") == 1


def test_a_split_calls_tensors_come_back_in_order(scorers: tuple[WorkerGroup, WorkerGroup]) -> None:
    scored = join_columns(BATCH, scorers[1].score(BATCH))
    sums = [scored.token["score"][slice(*scored.leaf_span(s))].sum() for s in range(len(BATCH))]
    assert torch.equal(scorers[1].update(scored, 2.0), torch.stack(sums) * 2.0)


def test_a_result_of_one_rank_goes_from_group_to_group(scorers: tuple[WorkerGroup, WorkerGroup]) -> None:
    first, second = scorers
    made = first.marked(BATCH)
    again = second.marked(made)
    assert second.count(again) == [len(BATCH)] * 3, "every rank gets the whole"
    assert again.result().sequence["mark"].tolist() == [2] * len(BATCH)


def test_a_future_is_not_split_and_only_one_ranks_is_passed_on(
    four: WorkerGroup, scorers: tuple[WorkerGroup, WorkerGroup]
) -> None:
    with pytest.raises(ValueError, match="one ragged batch among its arguments"):
        scorers[1].score(scorers[0].marked(BATCH))
    with pytest.raises(ValueError, match=r"4 ranks leave a result of four\.plain: only one's can be passed on"):
        four.own(four.call("plain", 5, blocking=False))


def test_a_future_inside_another_value_is_refused(scorers: tuple[WorkerGroup, WorkerGroup]) -> None:
    with pytest.raises(TypeError, match="an argument by itself"):
        scorers[1].call("count", [scorers[0].double(["a"])])


# Faults --------------------------------------------------------------------------------------------------


def test_a_worker_that_throws_fails_its_call_once_and_lives_on(four: WorkerGroup) -> None:
    with pytest.raises(WorkerError) as caught:
        four.fail_on(2, "value")
    text = str(caught.value)
    assert text.count("Traceback (most recent call last)") == 1
    assert text.count("ValueError: this rank was told to fail") == 2, "in the first line and in the traceback"
    assert "four.fail_on raised in rank 2 of group 'four'" in text
    assert 'raise ValueError("this rank was told to fail")' in text, "the worker's own line"
    assert four.fail_on(9, "value") == [0, 1, 2, 3]


def test_a_mistake_of_the_user_stays_one(four: WorkerGroup) -> None:
    with pytest.raises(UserError) as caught:
        four.fail_on(1, "user")
    assert caught.value.problem == "no room"
    assert caught.value.found == "3 GB (rank 1 of group 'four')"


def test_a_library_that_gives_up_fails_its_call(four: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match="SystemExit: this rank gives up"):
        four.fail_on(1, "exit")
    assert four.fail_on(9, "exit") == [0, 1, 2, 3], "and the worker lives on"


def test_a_failed_call_fails_what_works_on_its_result(scorers: tuple[WorkerGroup, WorkerGroup]) -> None:
    broken = scorers[0].break_down("x")
    after = scorers[1].call("count", broken, blocking=False)
    with pytest.raises(WorkerError) as caught:
        after.result()
    assert "two.break_down raised in rank 0" in str(caught.value)
    assert str(caught.value).count("Traceback (most recent call last)") == 1


def test_a_class_that_cannot_be_made_names_itself(backend: Any) -> None:
    with pytest.raises(WorkerError) as caught:
        WorkerGroup(ResourcePool([1], **TINY), Broken, name="broken")
    assert str(caught.value).startswith("broken.__init__ raised in rank 0 of group 'broken'")
    assert "OSError: no such model" in str(caught.value)


def test_a_process_that_was_ended_is_dead_until_the_group_is_restarted(backend: Any) -> None:
    group = WorkerGroup(ResourcePool([2], **TINY), ClassWithArgs(Member, 10), name="actor")
    assert group.add(1) == [11, 12]
    assert group.dead() == []
    backend.stop(group.handles[1:])
    deadline = time.monotonic() + 30
    # Ray ends a process some time after it was asked to.
    while not (deaths := group.dead()):
        assert time.monotonic() < deadline
    assert [death.rank for death in deaths] == [1]
    with pytest.raises(WorkerDied, match="rank 1 of group 'actor'"):
        group.add(1)
    group.restart()
    assert group.dead() == []
    assert group.add(0) == [10, 11], "made anew"
    group.stop()
    with pytest.raises(ClusterError, match="was stopped"):
        group.add(1)


def test_a_call_while_its_group_is_made_anew_says_that_its_worker_died(backend: Any, tmp_path: Path) -> None:
    """The thread that completes checkpoints asks on while a run replaces workers."""
    group = WorkerGroup(ResourcePool([1], **TINY), Moody, str(tmp_path / "trouble"))
    restarting = threading.Thread(target=group.restart)
    restarting.start()
    found: list[Exception] = []
    while restarting.is_alive():
        try:
            group.ready()
        except Exception as error:
            found.append(error)
        time.sleep(0.001)
    assert found and {type(error) for error in found} == {WorkerDied}
    assert group.ready() and not group.dead()
    group.stop()


def test_who_cannot_be_made_anew_is_dead(backend: Any, tmp_path: Path) -> None:
    group = WorkerGroup(ResourcePool([1], **TINY), Moody, str(tmp_path / "trouble"))
    (tmp_path / "trouble").touch()
    for _ in range(2):
        with pytest.raises(WorkerError, match="OSError: no such model"):
            group.restart()
        assert [(death.rank, death.reason[-22:]) for death in group.dead()] == [(0, "OSError: no such model")]
        with pytest.raises(WorkerDied, match="OSError: no such model"):
            group.ready()
    (tmp_path / "trouble").unlink()
    group.restart()
    assert group.ready() and not group.dead()
    group.stop()


def test_workers_meet(four: WorkerGroup) -> None:
    assert four.meet() == [6.0] * 4
