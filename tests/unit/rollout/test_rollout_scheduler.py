"""Whose turn it is, rows and slots, in which chunks prompts are filled, and when there is room; without a model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quartet.config import UserError
from quartet.rollout.prefix_cache import MIN_SHARED_TOKENS, round_up
from quartet.rollout.protocol import FinishReason, Request, SamplingParams
from quartet.rollout.scheduler import PrefillPlan, Scheduler


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


def tokens_of(request: Request) -> int:
    return request.sampling.max_new_tokens


def rows(scheduler: Scheduler) -> list[str]:
    assert [r.row for r in scheduler.rows] == list(range(len(scheduler.rows)))
    return [r.request.request_id for r in scheduler.rows]


def retire(scheduler: Scheduler, *names: str) -> None:
    scheduler.retire([scheduler.held[name] for name in names])


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


def test_one_group_one_prompt() -> None:
    scheduler = Scheduler(4)
    add(scheduler, "a0", group="a")
    with pytest.raises(UserError, match="same prompt") as error:
        scheduler.check([request("a1", "a", length=5)], tokens_of)
    assert "'a1'" in error.value.found
    with pytest.raises(UserError, match="same prompt"):
        scheduler.check([request("x", "n"), request("y", "n", length=5)], tokens_of)


def test_ids_are_unique_among_what_is_held() -> None:
    scheduler = Scheduler(4)
    add(scheduler, "a")
    for batch in ([request("a")], [request("b"), request("b")]):
        with pytest.raises(UserError, match="in use"):
            scheduler.check(batch, tokens_of)
    retire(scheduler, "a")
    scheduler.check([request("a")], tokens_of)


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


# What a step fills -------------------------------------------------------------------------------------------


class Queue:
    """A scheduler whose plans are carried out as the engine would, but for the numbers."""

    def __init__(
        self, max_running: int = 64, max_prefill: int = 100, cache_tokens: int | None = None, shares: bool = True
    ) -> None:
        self.scheduler = Scheduler(
            max_running,
            max_prefill_tokens=max_prefill,
            cache_tokens=cache_tokens,
            shares_prefixes=shares,
            round_up=round_up,
        )

    def add(self, *names: str, length: int = 4, group: str | None = None, new: int = 8) -> None:
        for name in names:
            prompt = tuple(range(length))
            self.scheduler.add(Request(name, group or name, prompt, SamplingParams()), max_tokens=new)

    def step(self) -> PrefillPlan:
        plan = self.scheduler.plan()
        for prefill in plan.prefills:
            prefill.block.done = prefill.end
        self.scheduler.admit(plan.admitted)
        for response in plan.admitted:
            first = response.block.chain[0] if response.block else None
            response.prefix = first if first and first.shared else None
            response.token_ids.append(0)
        for response in self.scheduler.place_rows().placed:
            if response.block is not response.prefix:
                if response.prefix:
                    self.scheduler.prefixes.hold(response.prefix)
                self.scheduler.prefixes.drop(response.block)
            response.block = None
        return plan

    def retire(self, *names: str) -> None:
        retire(self.scheduler, *names)


def names(plan: PrefillPlan) -> list[str]:
    return [r.request.request_id for r in plan.admitted]


def pieces(plan: PrefillPlan) -> list[tuple[int, int, int]]:
    return [(len(prefill.block), prefill.start, prefill.end) for prefill in plan.prefills]


def test_a_prompt_is_filled_once_for_all_who_have_it() -> None:
    queue = Queue()
    queue.add("a0", "a1", group="a", length=9)
    queue.add("b", length=9)
    plan = queue.step()
    assert (names(plan), pieces(plan)) == (["a0", "a1", "b"], [(9, 0, 9)])
    queue.add("c", length=9)
    plan = queue.step()
    assert (names(plan), pieces(plan)) == (["c"], [])


def test_a_long_prompt_is_filled_in_pieces_of_its_own() -> None:
    """Pieces begin at multiples of the bound, whatever else is filled; what is left of a step goes to others."""
    queue = Queue(max_prefill=10)
    queue.add("a", length=3)
    queue.add("long", length=24)
    queue.add("b", length=5)
    found = [queue.step() for _ in range(4)]
    assert [pieces(plan) for plan in found] == [[(3, 0, 3)], [(24, 0, 10)], [(24, 10, 20)], [(24, 20, 24), (5, 0, 5)]]
    assert [names(plan) for plan in found] == [["a"], [], [], ["long", "b"]]


def test_preempted_requests_fill_prompt_and_tokens() -> None:
    queue = Queue(max_prefill=5000)
    queue.add("a", length=7)
    queue.add(*[f"g{i}" for i in range(9)], group="g", length=200)
    queue.step()
    queue.scheduler.preempt_all()
    plan = queue.step()
    # The copied prompt again with the token it has; the shared one once, and each member's token behind it.
    assert pieces(plan) == [(8, 0, 8), (200, 0, 200), *[(1, 0, 1)] * 9]
    assert all(prefill.block.again for prefill in plan.prefills)
    assert {f.block.parent for f in plan.prefills[2:]} == {plan.prefills[1].block}


@pytest.mark.parametrize(("members", "length"), [(1, 10 * MIN_SHARED_TOKENS), (2, MIN_SHARED_TOKENS - 1), (9, 100)])
def test_short_prompts_and_small_groups_are_copied(members: int, length: int) -> None:
    queue = Queue(max_prefill=length)
    queue.add(*[f"r{i}" for i in range(members)], group="g", length=length)
    queue.step()
    assert [r.prefix for r in queue.scheduler.rows] == [None] * members


def test_long_prompts_of_groups_are_shared_unless_the_contexts_cannot() -> None:
    for shares in (True, False):
        queue = Queue(max_prefill=MIN_SHARED_TOKENS, shares=shares)
        queue.add("a", "b", group="g", length=MIN_SHARED_TOKENS)
        queue.step()
        assert [r.prefix is not None for r in queue.scheduler.rows] == [shares] * 2
        stored = [queue.scheduler.slot_tokens(r) for r in queue.scheduler.rows]
        assert stored == [round_up(8 if shares else MIN_SHARED_TOKENS + 8)] * 2


# ---- a bounded cache ----


def test_admission_waits_for_room() -> None:
    """Slots of 64 places (4 prompt tokens and 8 new ones, rounded up) and prompts of 4."""
    queue = Queue(cache_tokens=3 * 64 + 4)
    queue.add("a", "b", "c", "d", group="g")
    assert names(queue.step()) == ["a", "b", "c"]
    assert names(queue.step()) == []
    queue.retire("b")
    assert names(queue.step()) == ["d"]


def test_idle_prompts_make_room_and_wanted_ones_last() -> None:
    queue = Queue(max_running=1, cache_tokens=100)
    queue.add("a0", "a1", group="a", length=10)
    queue.add("b", length=11)
    queue.step()
    queue.retire("a0")
    assert queue.scheduler.prefixes.idle_tokens == 10
    queue.add("c", length=30, new=20)
    assert names(queue.step()) == ["a1"]
    queue.retire("a1")
    queue.step()
    queue.retire("b")
    # A slot of 64 and a prompt of 30 leave 6: both idle prompts go.
    assert names(queue.step()) == ["c"]
    assert queue.scheduler.prefixes.num_tokens == 30


def test_a_request_that_can_never_fit_is_refused_by_the_keys_name() -> None:
    scheduler = Queue(cache_tokens=104).scheduler
    fits = Request("r", "r", tuple(range(30)), SamplingParams())
    scheduler.check([fits], lambda _: 10)
    with pytest.raises(UserError, match="never fit") as error:
        scheduler.check([fits], lambda _: 40)
    assert "rollout.cache_tokens is 104" in error.value.found
    assert "rollout.cache_tokens" in error.value.remedy
