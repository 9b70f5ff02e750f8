"""Admission, rows and moves, without a model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.config import UserError
from quartet.rollout.protocol import FinishReason, Request, SamplingParams
from quartet.rollout.scheduler import Scheduler


def request(name: str, group: str | None = None, length: int = 4, **sampling: object) -> Request:
    return Request(name, group or name, tuple(range(length)), SamplingParams(**sampling))


def add(scheduler: Scheduler[str], *names: str, group: str | None = None, length: int = 4) -> None:
    for name in names:
        scheduler.add(request(name, group, length), max_tokens=8)


def rows(scheduler: Scheduler[str]) -> list[str]:
    running = scheduler.running
    assert [r.row for r in running] == list(range(len(running)))
    return [r.request.request_id for r in running]


def retire(scheduler: Scheduler[str], *names: str) -> None:
    scheduler.retire([scheduler.held[name] for name in names])


def test_first_come_first_served_up_to_max_running() -> None:
    scheduler: Scheduler[str] = Scheduler(2, 100)
    add(scheduler, "a", "b", "c", "d")
    scheduler.schedule()
    assert rows(scheduler) == ["a", "b"]
    retire(scheduler, "a")
    scheduler.schedule()
    assert rows(scheduler) == ["c", "b"]
    assert [r.request.request_id for r in scheduler.waiting] == ["d"]


def test_gaps_are_closed_by_the_last_rows_and_only_full_slots_are_copied() -> None:
    scheduler: Scheduler[str] = Scheduler(8, 100)
    add(scheduler, "a", "b", "c", "d", "e")
    scheduler.schedule()
    for response in scheduler.running:
        response.cached = response.request.request_id != "d"
        response.append(1, -0.1, 0)
    retire(scheduler, "a", "b", "e")
    schedule = scheduler.schedule()
    assert rows(scheduler) == ["d", "c"]
    # "d" moved to row 0 with nothing to copy, then "c" from row 2 to row 1.
    assert schedule.moves == ((2, 1, 4),)
    assert schedule.changed
    assert not scheduler.schedule().changed


def test_prefill_budget_counts_each_group_once_and_lets_a_long_prompt_in_alone() -> None:
    scheduler: Scheduler[str] = Scheduler(10, 10)
    add(scheduler, "a0", "a1", "a2", group="a", length=6)
    add(scheduler, "b", length=5)
    add(scheduler, "c", length=50)
    scheduler.schedule()
    assert rows(scheduler) == ["a0", "a1", "a2"]
    scheduler.schedule()
    assert rows(scheduler) == ["a0", "a1", "a2", "b"]
    scheduler.schedule()
    assert rows(scheduler) == ["a0", "a1", "a2", "b", "c"]


def test_members_of_a_prepared_prompt_cost_nothing() -> None:
    scheduler: Scheduler[str] = Scheduler(10, 10)
    add(scheduler, "a0", group="a", length=9)
    add(scheduler, "b0", group="b", length=9)
    add(scheduler, "a1", group="a", length=9)
    scheduler.groups["a"].prepared = "computed"
    scheduler.groups["b"].prepared = "computed"
    add(scheduler, "c0", length=10)
    scheduler.schedule()
    assert rows(scheduler) == ["a0", "b0", "a1", "c0"]
    assert scheduler.groups["a"].num_waiting == 0
    assert scheduler.groups["a"].num_members == 2


def test_a_group_is_forgotten_with_its_last_member() -> None:
    scheduler: Scheduler[str] = Scheduler(1, 10)
    add(scheduler, "a0", "a1", group="a")
    scheduler.schedule()
    retire(scheduler, "a0")
    assert scheduler.groups["a"].num_waiting == 1
    retire(scheduler, "a1")
    assert not scheduler.groups
    assert not scheduler.waiting
    assert scheduler.num_running == 0
    scheduler.check([Request("a2", "a", (9, 9), SamplingParams())])


def test_one_group_one_prompt() -> None:
    scheduler: Scheduler[str] = Scheduler(4, 10)
    add(scheduler, "a0", group="a")
    with pytest.raises(UserError, match="same prompt") as error:
        scheduler.check([request("a1", "a", length=5)])
    assert "'a1'" in error.value.found
    with pytest.raises(UserError, match="same prompt"):
        scheduler.check([request("x", "n"), request("y", "n", length=5)])


def test_ids_are_unique_among_what_is_held() -> None:
    scheduler: Scheduler[str] = Scheduler(4, 10)
    add(scheduler, "a")
    for batch in ([request("a")], [request("b"), request("b")]):
        with pytest.raises(UserError, match="already in use"):
            scheduler.check(batch)
    retire(scheduler, "a")
    scheduler.check([request("a")])


@pytest.mark.parametrize(("max_running", "max_prefill"), [(0, 1), (1, 0)])
def test_limits_must_be_positive(max_running: int, max_prefill: int) -> None:
    with pytest.raises(UserError, match="able to run"):
        Scheduler(max_running, max_prefill)


def test_why_a_response_ends() -> None:
    scheduler: Scheduler[str] = Scheduler(4, 10)
    scheduler.add(request("a", stop_token_ids=(7, 9)), max_tokens=2)
    response = scheduler.held["a"]
    assert response.append(3, -1.0, 0) is None
    assert response.append(4, -1.0, 0) is FinishReason.LENGTH
    response.token_ids.pop()
    # A stop token in the last place counts as a stop.
    assert response.append(9, -1.0, 0) is FinishReason.STOP


@settings(deadline=None, max_examples=100)
@given(
    max_running=st.integers(1, 6),
    budget=st.integers(1, 12),
    events=st.lists(st.tuples(st.sampled_from(["add", "retire", "cancel", "step"]), st.integers(0, 99)), max_size=60),
)
def test_rows_stay_dense_and_slots_follow_their_requests(
    max_running: int, budget: int, events: list[tuple[str, int]]
) -> None:
    """A model of the cache (slot → owner): after every schedule each running request owns its row."""
    scheduler: Scheduler[str] = Scheduler(max_running, budget)
    slots: dict[int, str] = {}
    order: list[str] = []
    count = 0
    for event, value in [*events, ("step", 0), ("step", 0)]:
        if event == "add":
            add(scheduler, f"r{count}", group=f"g{value % 5}", length=1 + value % 5)
            count += 1
        elif event == "retire" and scheduler.running:
            retire(scheduler, scheduler.running[value % len(scheduler.running)].request.request_id)
        elif event == "cancel" and scheduler.held:
            retire(scheduler, sorted(scheduler.held)[value % len(scheduler.held)])
        elif event == "step":
            before = {r.request.request_id for r in scheduler.running}
            waiting = [r.request.request_id for r in scheduler.waiting]
            for source, target, _ in scheduler.schedule().moves:
                slots[target] = slots[source]
            admitted = [r for r in scheduler.running if r.request.request_id not in before]
            for response in admitted:
                slots[response.row] = response.request.request_id
                response.cached = True
            order += [name for name in waiting if name not in {r.request.request_id for r in scheduler.waiting}]
            names = rows(scheduler)
            assert [slots[row] for row in range(len(names))] == names
            assert len(names) <= max_running
            assert scheduler.num_running == len(names)
            assert bool(names) or not scheduler.held
    assert order == sorted(order, key=lambda name: int(name[1:]))
    for group in scheduler.groups.values():
        members = [r for r in scheduler.held.values() if r.group is group]
        assert group.num_members == len(members)
        assert group.num_waiting == sum(r.row < 0 for r in members)
