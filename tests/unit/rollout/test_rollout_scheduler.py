"""The queue, rows and slots, without a model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.config import UserError
from quartet.rollout.prefix_cache import Block
from quartet.rollout.protocol import FinishReason, Request, SamplingParams
from quartet.rollout.scheduler import Scheduler


def request(name: str, group: str | None = None, length: int = 4, **sampling: object) -> Request:
    return Request(name, group or name, tuple(range(length)), SamplingParams(**sampling))


def add(scheduler: Scheduler, *names: str, group: str | None = None, length: int = 4) -> None:
    for name in names:
        scheduler.add(request(name, group, length), max_tokens=8)


def admit(scheduler: Scheduler, count: int = 99) -> None:
    """As many of the queue as there is room for, each with a first token."""
    room = min(count, scheduler.max_running - scheduler.num_running)
    first = list(scheduler.waiting)[:room]
    scheduler.admit(first)
    for response in first:
        response.append(1, -0.5, 0)


def rows(scheduler: Scheduler) -> list[str]:
    assert [r.row for r in scheduler.rows] == list(range(len(scheduler.rows)))
    return [r.request.request_id for r in scheduler.rows]


def retire(scheduler: Scheduler, *names: str) -> None:
    scheduler.retire([scheduler.held[name] for name in names])


def test_arrivals_run_but_have_a_row_only_once_settled() -> None:
    scheduler = Scheduler(2)
    add(scheduler, "a", "b", "c")
    admit(scheduler)
    assert (scheduler.num_running, len(scheduler.waiting), rows(scheduler)) == (2, 1, [])
    placement = scheduler.place_rows()
    assert sorted(rows(scheduler)) == ["a", "b"]
    assert {r.request.request_id for r in placement.placed} == {"a", "b"}
    assert (sorted(placement.changed), placement.moves) == ([0, 1], ())
    assert scheduler.place_rows().changed == ()


def test_requests_are_admitted_in_the_order_in_which_they_wait() -> None:
    scheduler = Scheduler(4)
    add(scheduler, "a", "b")
    with pytest.raises(RuntimeError, match="order"):
        scheduler.admit([scheduler.held["b"]])


def test_gaps_are_closed_and_what_moves_brings_its_tokens() -> None:
    scheduler = Scheduler(8)
    add(scheduler, "a", "b", "c", "d", "e")
    admit(scheduler)
    scheduler.place_rows()
    names = rows(scheduler)
    retire(scheduler, names[0], names[2])
    placement = scheduler.place_rows()
    assert set(rows(scheduler)) == {names[1], names[3], names[4]}
    assert placement.placed == ()
    # Of a prompt of 4 and one token, the slot holds the prompt.
    assert sorted((target, length) for _, target, length in placement.moves) == [(0, 4), (2, 4)]
    assert sorted(source for source, _, _ in placement.moves) == [3, 4]


def test_an_arrival_that_ends_at_once_never_takes_a_row() -> None:
    scheduler = Scheduler(8)
    add(scheduler, "a", "b")
    admit(scheduler)
    retire(scheduler, "a")
    assert [r.request.request_id for r in scheduler.place_rows().placed] == ["b"]
    assert rows(scheduler) == ["b"]


def test_preempted_requests_wait_again_before_all_others_in_their_old_order() -> None:
    scheduler = Scheduler(3)
    add(scheduler, "a", "b", group="g")
    add(scheduler, "c", "d", "e")
    admit(scheduler, 2)
    scheduler.place_rows()
    admit(scheduler, 1)
    scheduler.preempt_all()
    assert [r.request.request_id for r in scheduler.waiting] == ["a", "b", "c", "d", "e"]
    assert [len(r.token_ids) for r in scheduler.waiting] == [1, 1, 1, 0, 0]
    assert (scheduler.num_running, scheduler.running) == (0, [])
    assert scheduler.groups["g"].num_waiting == 2
    assert scheduler.place_rows().changed == ()


def test_a_group_is_forgotten_with_its_last_member() -> None:
    scheduler = Scheduler(1)
    add(scheduler, "a0", "a1", group="a")
    admit(scheduler)
    scheduler.place_rows()
    retire(scheduler, "a0")
    assert scheduler.groups["a"].num_waiting == 1
    retire(scheduler, "a1")
    assert not scheduler.groups
    assert not scheduler.waiting
    assert scheduler.num_running == 0
    scheduler.check([Request("a2", "a", (9, 9), SamplingParams())])


def test_blocks_of_groups_with_members_waiting_are_wanted() -> None:
    scheduler = Scheduler(2)
    add(scheduler, "a0", "a1", "a2", group="a")
    add(scheduler, "b")
    for name, group in scheduler.groups.items():
        group.block = Block(tuple(range(4)), shared=name == "a")
    admit(scheduler)
    assert scheduler.wanted_blocks() == {scheduler.groups["a"].block, scheduler.groups["b"].block}
    retire(scheduler, "a2")
    assert scheduler.wanted_blocks() == {scheduler.groups["b"].block}


def test_one_group_one_prompt() -> None:
    scheduler = Scheduler(4)
    add(scheduler, "a0", group="a")
    with pytest.raises(UserError, match="same prompt") as error:
        scheduler.check([request("a1", "a", length=5)])
    assert "'a1'" in error.value.found
    with pytest.raises(UserError, match="same prompt"):
        scheduler.check([request("x", "n"), request("y", "n", length=5)])


def test_ids_are_unique_among_what_is_held() -> None:
    scheduler = Scheduler(4)
    add(scheduler, "a")
    for batch in ([request("a")], [request("b"), request("b")]):
        with pytest.raises(UserError, match="already in use"):
            scheduler.check(batch)
    retire(scheduler, "a")
    scheduler.check([request("a")])


def test_something_must_be_able_to_run() -> None:
    with pytest.raises(UserError, match="able to run"):
        Scheduler(0)


def test_why_a_response_ends() -> None:
    scheduler = Scheduler(4)
    scheduler.add(request("a", stop_token_ids=(7, 9)), max_tokens=2)
    response = scheduler.held["a"]
    assert response.append(3, -1.0, 0) is None
    assert response.append(4, -1.0, 0) is FinishReason.LENGTH
    response.token_ids.pop()
    # A stop token in the last place counts as a stop.
    assert response.append(9, -1.0, 0) is FinishReason.STOP


@settings(max_examples=100)
@given(
    max_running=st.integers(1, 40),
    events=st.lists(
        st.tuples(st.sampled_from(["add", "retire", "cancel", "step", "preempt"]), st.integers(0, 99)), max_size=80
    ),
)
def test_rows_stay_dense_and_slots_follow_their_requests(max_running: int, events: list[tuple[str, int]]) -> None:
    """A model of the cache (slot → owner): after every ``place_rows`` each running request owns its row."""
    scheduler = Scheduler(max_running)
    slots: dict[int, str] = {}
    order: list[str] = []
    count = 0
    for event, value in [*events, ("step", 0), ("step", 0)]:
        if event == "add":
            for _ in range(1 + value % 9):
                add(scheduler, f"r{count}", group=f"g{value % 5}", length=1 + value % 5)
                count += 1
        elif event == "retire" and scheduler.running:
            retire(scheduler, scheduler.running[value % len(scheduler.running)].request.request_id)
        elif event == "cancel" and scheduler.held:
            retire(scheduler, sorted(scheduler.held)[value % len(scheduler.held)])
        elif event == "preempt" and value < 20:
            scheduler.preempt_all()
        elif event == "step":
            placement = scheduler.place_rows()
            for source, target, _ in placement.moves:
                slots[target] = slots[source]
            for response in placement.placed:
                slots[response.row] = response.request.request_id
            names = rows(scheduler)
            assert [slots[row] for row in range(len(names))] == names
            for response in scheduler.rows:
                response.append(1, -0.5, 0)
            waiting = [r for r in scheduler.waiting if not r.token_ids]
            admit(scheduler, 1 + value % 4)
            order += [r.request.request_id for r in waiting if r.token_ids]
            assert scheduler.num_running == len(scheduler.running) <= max_running
    assert order == sorted(order, key=lambda name: int(name[1:]))
    for group in scheduler.groups.values():
        members = [r for r in scheduler.held.values() if r.group is group]
        assert group.num_members == len(members)
        assert group.num_waiting == sum(r in scheduler.waiting for r in members)
