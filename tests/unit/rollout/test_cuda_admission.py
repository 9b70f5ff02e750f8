"""Who may run by the pages that are left: first come first served, no page written by two, everybody gets a turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.config import UserError
from quartet.rollout.cuda_admission import PagedAdmission, Prefill
from quartet.rollout.protocol import Request, SamplingParams
from quartet.rollout.scheduler import Response, Scheduler


def make(prompts: list[tuple[int, ...]], new: int, **options: object) -> tuple[PagedAdmission, Scheduler]:
    limits = {"page_size": 4, "max_running": 8, "max_prefill_tokens": 100, "cache_tokens": None, **options}
    admission, scheduler = PagedAdmission(**limits), Scheduler(limits["max_running"])
    for i, prompt in enumerate(prompts):
        scheduler.add(Request(f"r{i}", str(prompt), prompt, SamplingParams(max_new_tokens=new)), new)
    return admission, scheduler


def take(admission: PagedAdmission, scheduler: Scheduler) -> Prefill:
    work = admission.admit(scheduler.waiting)
    scheduler.admit(work.admitted)
    scheduler.settle()
    return work


def names(responses: list[Response]) -> list[str]:
    return [r.request.request_id for r in responses]


PROMPT = tuple(range(10))


def test_a_prompt_is_computed_once_for_its_group() -> None:
    admission, scheduler = make([PROMPT] * 3, new=5)
    work = take(admission, scheduler)
    assert names(work.admitted) == ["r0", "r1", "r2"]
    assert names(work.computed) == ["r0"]
    assert work.tokens == [PROMPT[:-1]]
    pages = [admission.runs[r].pages for r in work.admitted]
    assert len({p[:2] for p in pages}) == 1, "nine tokens fill two pages, which all share"
    assert work.copies == [(work.runs[0].pages[2], p[2]) for p in pages]


def test_a_prompt_is_found_again_until_the_weights_change() -> None:
    admission, scheduler = make([PROMPT, PROMPT], new=5, max_running=1)
    first = take(admission, scheduler)
    for response in first.admitted:
        scheduler.retire([response])
        admission.release(response)
    assert take(admission, scheduler).tokens == []
    scheduler.preempt_all()
    admission.forget()
    assert take(admission, scheduler).tokens == [PROMPT[:-1]]


def test_what_a_request_had_before_new_weights_is_computed_into_its_own_pages() -> None:
    admission, scheduler = make([PROMPT], new=5)
    (response,) = take(admission, scheduler).admitted
    response.token_ids.extend([7, 8])
    scheduler.preempt_all()
    admission.forget()
    work = take(admission, scheduler)
    assert work.tokens == [(*PROMPT, 7)]
    assert work.runs == [admission.runs[response]]
    assert work.copies == []


def test_a_prompt_of_one_token_has_nothing_to_compute() -> None:
    admission, scheduler = make([(3,)], new=5)
    work = take(admission, scheduler)
    assert (work.tokens, work.copies, names(work.admitted)) == ([], [], ["r0"])


def test_a_step_computes_so_many_tokens_or_one_long_prompt() -> None:
    prompts = [tuple(range(n, 2 * n)) for n in (6, 6, 30, 6)]
    admission, scheduler = make(prompts, new=2, max_prefill_tokens=12)
    assert [names(take(admission, scheduler).admitted) for _ in range(3)] == [["r0", "r1"], ["r2"], ["r3"]]


def test_a_request_that_can_never_fit_is_refused() -> None:
    admission, _ = make([], new=1, cache_tokens=40)
    admission.check(Request("fits", "g", PROMPT, SamplingParams()), 26)
    with pytest.raises(UserError, match="can never fit") as caught:
        admission.check(Request("large", "g", PROMPT, SamplingParams()), 27)
    assert "rollout.cache_tokens is 40" in str(caught.value)


def test_a_prompt_that_this_step_copies_from_stays_where_it_is() -> None:
    """The second prompt fits only into the first one's last page, which is still to be copied in the first step."""
    admission, scheduler = make([PROMPT, tuple(range(50, 60))], new=5, cache_tokens=36)
    work = take(admission, scheduler)
    assert names(work.admitted) == ["r0"]
    assert names(take(admission, scheduler).admitted) == ["r1"]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=25),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(10, 30)),
    st.integers(1, 40),
    st.randoms(use_true_random=False),
)
def test_everybody_runs_and_nobody_writes_into_anothers_page(
    asked: list[tuple[int, int]], page_size: int, num_pages: int | None, max_prefill: int, random: object
) -> None:
    prompts = {kind: tuple(range(100 * kind, 100 * kind + 1 + 6 * kind)) for kind in range(4)}
    cache_tokens = None if num_pages is None else max(num_pages * page_size, 40 + page_size)
    admission = PagedAdmission(
        page_size=page_size, max_running=5, max_prefill_tokens=max_prefill, cache_tokens=cache_tokens
    )
    scheduler = Scheduler(5)
    for i, (kind, new) in enumerate(asked):
        request = Request(f"r{i}", f"g{kind}", prompts[kind], SamplingParams(max_new_tokens=new))
        admission.check(request, new)
        scheduler.add(request, new)
    started: list[str] = []
    while scheduler.held:
        work = take(admission, scheduler)
        started += names(work.admitted)
        running = scheduler.rows
        assert running, "requests wait although nothing runs"
        assert len(running) <= 5
        assert work.num_tokens <= max(max_prefill, max((len(t) for t in work.tokens), default=0))
        written = [p for run in work.runs for p in run.pages[: admission.pool.pages_for(run.length)]]
        own = [set(admission.runs[r].pages[(len(r.request.prompt_ids) - 1) // page_size :]) for r in running]
        assert sum(map(len, own)) == len(set().union(*own)), "two requests write into one page"
        assert len(written) == len(set(written)), "two prompts are written into one page"
        assert not set(written) & {target for _, target in work.copies}
        for response in running:
            capacity = len(admission.runs[response].pages) * page_size
            assert capacity >= len(response.request.prompt_ids) + response.max_tokens
        for response in random.sample(running, random.randint(1, len(running))):
            scheduler.retire([response])
            admission.release(response)
    assert started == [f"r{i}" for i in range(len(asked))]
    admission.prefixes.clear()
    assert admission.pool.num_free == admission.pool.num_pages - 1
