"""Pages of the KV cache: none leaks, none is given back twice, nobody writes into what others read."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from quartet.rollout.cuda_pages import IDLE_PAGE, OutOfPages, PagePool, PageRun, PrefixStore


def test_a_fork_shares_full_pages_and_copies_the_last() -> None:
    pool = PagePool(num_pages=12, page_size=4)
    prompt = pool.open(10)
    member, copied = pool.fork(prompt, capacity=15)
    assert member.pages[:2] == prompt.pages[:2]
    assert copied == (prompt.pages[2], member.pages[2])
    assert len(member.pages) == 4
    assert not set(member.pages[2:]) & set(prompt.pages)
    assert [pool.holders(page) for page in prompt.pages] == [2, 2, 1]
    pool.close(prompt)
    assert [pool.holders(page) for page in member.pages] == [1, 1, 1, 1]
    assert pool.num_free == 11 - 4


def test_a_full_prompt_needs_no_copy() -> None:
    pool = PagePool(num_pages=8, page_size=4)
    prompt = pool.open(8)
    member, copied = pool.fork(prompt, capacity=9)
    assert copied is None
    assert member.pages[:2] == prompt.pages
    assert pool.fork_cost(prompt, 9) == 1
    assert pool.fork_cost(prompt, 8) == 0


def test_an_empty_prompt_forks_into_fresh_pages() -> None:
    pool = PagePool(num_pages=4, page_size=4)
    prompt = pool.open(0)
    assert prompt.pages == ()
    member, copied = pool.fork(prompt, capacity=5)
    assert copied is None
    assert len(member.pages) == 2


def test_what_does_not_fit_takes_nothing() -> None:
    pool = PagePool(num_pages=4, page_size=2)
    prompt = pool.open(3)
    with pytest.raises(OutOfPages, match="5 pages were asked for, 1 of 4 are free"):
        pool.fork(prompt, capacity=12)
    assert pool.num_free == 1
    assert [pool.holders(page) for page in prompt.pages] == [1, 1]


def test_giving_back_twice_is_an_error() -> None:
    pool = PagePool(num_pages=4, page_size=2)
    run = pool.open(3)
    pool.close(run)
    with pytest.raises(RuntimeError, match="given back twice"):
        pool.close(run)
    assert pool.num_free == 3


def test_growing_adds_free_pages_only() -> None:
    pool = PagePool(num_pages=3, page_size=2)
    held = pool.open(4)
    pool.grow(6)
    assert (pool.num_pages, pool.num_free) == (6, 3)
    assert not set(pool.open(6).pages) & set(held.pages)


def test_the_store_forgets_the_least_recently_used_first() -> None:
    pool = PagePool(num_pages=7, page_size=1)
    store = PrefixStore(pool)
    first, second = store.add((1, 2)), store.add((3, 4))
    assert store.find((1, 2)) is first
    assert store.make_room(4)
    assert store.find((3, 4)) is None
    assert store.find((1, 2)) is first
    assert pool.holders(second.pages[0]) == 0


def test_the_store_forgets_nothing_in_vain() -> None:
    pool = PagePool(num_pages=5, page_size=1)
    store = PrefixStore(pool)
    run = store.add((1, 2))
    pool.fork(run, capacity=3)
    assert not store.make_room(3)
    assert store.find((1, 2)) is run
    assert not store.make_room(2, keep={(1, 2)})


class Requests(RuleBasedStateMachine):
    """Random opening, forking and closing, with a second book of who may read and write which page."""

    runs = Bundle("runs")

    @initialize(num_pages=st.integers(1, 24), page_size=st.integers(1, 5))
    def start(self, num_pages: int, page_size: int) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.held: list[PageRun] = []

    @rule(target=runs, length=st.integers(0, 20), room=st.integers(0, 10))
    def open(self, length: int, room: int) -> PageRun | None:
        free = self.pool.num_free
        try:
            run = self.pool.open(length, length + room)
        except OutOfPages:
            assert self.pool.pages_for(length + room) > free
            assert self.pool.num_free == free
            return None
        self.held.append(run)
        return run

    @rule(target=runs, run=runs, room=st.integers(0, 10))
    def fork(self, run: PageRun | None, room: int) -> PageRun | None:
        if run is None or run not in self.held:
            return None
        free, cost = self.pool.num_free, self.pool.fork_cost(run, run.length + room)
        try:
            member, copied = self.pool.fork(run, run.length + room)
        except OutOfPages:
            assert cost > free
            return None
        assert self.pool.num_free == free - cost
        full = run.length // self.pool.page_size
        own = set(member.pages[full:])
        assert not any(own & set(other.pages) for other in self.held), "a request writes where another one reads"
        assert (copied is not None) == (run.length % self.pool.page_size > 0)
        if copied is not None:
            assert copied == (run.pages[full], member.pages[full])
        assert len(member.pages) * self.pool.page_size >= run.length + room
        self.held.append(member)
        return member

    @rule(run=consumes(runs))
    def close(self, run: PageRun | None) -> None:
        if run is not None and run in self.held:
            self.held.remove(run)
            self.pool.close(run)

    @rule(more=st.integers(0, 5))
    def grow(self, more: int) -> None:
        self.pool.grow(self.pool.num_pages + more)

    @invariant()
    def every_page_is_held_or_free(self) -> None:
        if not hasattr(self, "pool"):
            return
        counts = [0] * self.pool.num_pages
        for run in self.held:
            for page in run.pages:
                counts[page] += 1
        assert counts == [self.pool.holders(page) for page in range(self.pool.num_pages)]
        assert counts[IDLE_PAGE] == 0
        assert self.pool.num_free == counts[1:].count(0)


Requests.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRequests = Requests.TestCase
