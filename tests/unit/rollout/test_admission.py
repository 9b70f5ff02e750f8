"""Whose turn it is, in which pieces prompts are filled, and when the cache has room; without a model."""

from __future__ import annotations

import pytest

from quartet.config import UserError
from quartet.rollout.prefix_cache import MIN_SHARED_TOKENS, round_up
from quartet.rollout.protocol import Request, SamplingParams
from quartet.rollout.scheduler import Admission, Scheduler, StepPlan


class Queue:
    """An admission whose plans are carried out as the engine would, but for the numbers."""

    def __init__(
        self, max_running: int = 64, max_prefill: int = 100, cache_tokens: int | None = None, shares: bool = True
    ) -> None:
        self.scheduler = Scheduler(max_running)
        self.admission = Admission(
            self.scheduler,
            max_prefill_tokens=max_prefill,
            cache_tokens=cache_tokens,
            shares_prefixes=shares,
            round_up=round_up,
        )

    def add(self, *names: str, length: int = 4, group: str | None = None, new: int = 8) -> None:
        for name in names:
            prompt = tuple(range(length))
            self.scheduler.add(Request(name, group or name, prompt, SamplingParams()), max_tokens=new)

    def step(self) -> StepPlan:
        plan = self.admission.plan()
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
                    self.admission.prefixes.hold(response.prefix)
                self.admission.prefixes.drop(response.block)
            response.block = None
        return plan

    def retire(self, *names: str) -> None:
        responses = [self.scheduler.held[name] for name in names]
        self.scheduler.retire(responses)
        for response in responses:
            self.admission.release(response)


def names(plan: StepPlan) -> list[str]:
    return [r.request.request_id for r in plan.admitted]


def pieces(plan: StepPlan) -> list[tuple[int, int, int]]:
    return [(len(prefill.block), prefill.start, prefill.end) for prefill in plan.prefills]


def test_first_come_first_served_up_to_max_running() -> None:
    queue = Queue(max_running=2)
    queue.add("a", "b", "c", "d")
    assert names(queue.step()) == ["a", "b"]
    assert names(queue.step()) == []
    queue.retire("a")
    assert names(queue.step()) == ["c"]


def test_a_prompt_is_filled_once_for_all_who_have_it() -> None:
    queue = Queue()
    queue.add("a0", "a1", group="a", length=9)
    queue.add("b", length=9)
    plan = queue.step()
    assert (names(plan), pieces(plan), plan.prefix_hits) == (["a0", "a1", "b"], [(9, 0, 9)], 18)
    queue.add("c", length=9)
    plan = queue.step()
    assert (names(plan), pieces(plan), plan.prefix_hits) == (["c"], [], 9)


def test_the_steps_tokens_are_bounded_and_requests_keep_their_order() -> None:
    queue = Queue(max_prefill=10)
    queue.add("a", length=6)
    queue.add("b", length=5)
    queue.add("c", length=1)
    assert names(queue.step()) == ["a"]
    assert names(queue.step()) == ["b", "c"]


def test_a_long_prompt_is_filled_in_pieces_of_its_own() -> None:
    """Pieces begin at multiples of the bound, whatever else is filled; what is left of a step goes to others."""
    queue = Queue(max_prefill=10)
    queue.add("a", length=3)
    queue.add("long", length=24)
    queue.add("b", length=5)
    found = [queue.step() for _ in range(4)]
    assert [pieces(plan) for plan in found] == [[(3, 0, 3)], [(24, 0, 10)], [(24, 10, 20)], [(24, 20, 24), (5, 0, 5)]]
    assert [names(plan) for plan in found] == [["a"], [], [], ["long", "b"]]


def test_cancelling_during_the_pieces_forgets_them() -> None:
    queue = Queue(max_prefill=10)
    queue.add("long", length=24)
    queue.step()
    queue.retire("long")
    assert (queue.admission.prefixes.num_tokens, len(queue.admission.prefixes)) == (0, 0)
    queue.add("again", length=24)
    assert pieces(queue.step()) == [(24, 0, 10)]


def test_preempted_requests_fill_prompt_and_tokens() -> None:
    queue = Queue(max_prefill=5000)
    queue.add("a", length=7)
    queue.add(*[f"g{i}" for i in range(9)], group="g", length=200)
    queue.step()
    queue.scheduler.preempt_all()
    queue.admission.prefixes.clear()
    plan = queue.step()
    # The copied prompt again with the token it has; the shared one once, and each member's token behind it.
    assert pieces(plan) == [(8, 0, 8), (200, 0, 200), *[(1, 0, 1)] * 9]
    assert all(prefill.block.again for prefill in plan.prefills)
    assert plan.prefix_hits == 0
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
        stored = [queue.admission.slot_tokens(r) for r in queue.scheduler.rows]
        assert stored == [round_up(8 if shares else MIN_SHARED_TOKENS + 8)] * 2


def test_a_copied_prompt_is_shared_by_a_group_that_comes_later() -> None:
    queue = Queue(max_prefill=MIN_SHARED_TOKENS)
    queue.add("alone", length=MIN_SHARED_TOKENS)
    queue.step()
    queue.add("a", "b", group="g", length=MIN_SHARED_TOKENS)
    plan = queue.step()
    assert (plan.prefills, plan.prefix_hits) == ([], 2 * MIN_SHARED_TOKENS)
    assert [r.prefix is not None for r in sorted(queue.scheduler.rows, key=lambda r: r.order)] == [False, True, True]


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
    assert queue.admission.prefixes.idle_tokens == 10
    queue.add("c", length=30, new=20)
    assert names(queue.step()) == ["a1"]
    queue.retire("a1")
    queue.step()
    queue.retire("b")
    # A slot of 64 and a prompt of 30 leave 6: both idle prompts go.
    assert names(queue.step()) == ["c"]
    assert queue.admission.prefixes.num_tokens == 30


def test_a_request_that_can_never_fit_is_refused_by_the_keys_name() -> None:
    admission = Queue(cache_tokens=104).admission
    fits = Request("r", "r", tuple(range(30)), SamplingParams())
    admission.check(fits, max_tokens=10)
    with pytest.raises(UserError, match="never fit") as error:
        admission.check(fits, max_tokens=40)
    assert "rollout.cache_tokens is 104" in error.value.found
    assert "rollout.cache_tokens" in error.value.remedy
    Queue().admission.check(fits, max_tokens=10**9)
