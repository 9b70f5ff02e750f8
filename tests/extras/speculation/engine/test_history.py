"""Drafts from history: the index against plain search, the bound of what is kept, and how it is brought back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch

from quartet.extras.speculation import drafting
from quartet.extras.speculation.config import StepCosts
from quartet.extras.speculation.drafting import MAX_TOKENS, Answers, HistoryDrafter, Texts
from quartet.rollout.protocol import Request
from quartet.rollout.scheduler import EngineRequest, RequestGroup


def followers(texts: Sequence[Sequence[int]], text: Sequence[int], least: int) -> Counter[int]:
    """How often each token follows the longest suffix of ``text`` that stands in a text before another token."""
    for n in range(len(text), least - 1, -1):
        found = Counter(t[i + n] for t in texts for i in range(len(t) - n) if list(t[i : i + n]) == list(text[-n:]))
        if found:
            return found
    return Counter()


def test_the_index_finds_what_plain_search_finds() -> None:
    """Texts are added while another is followed; few letters, so that suffixes are long and branch."""
    draw = random.Random(0)
    branched = 0
    for _ in range(60):
        index, texts, own = Texts(2), list[tuple[int, ...]](), ()
        for _ in range(6):
            texts.append(tuple(draw.randrange(3) for _ in range(draw.randrange(1, 14))))
            index.add(texts[-1])
            for _ in range(4):
                own = (*own, draw.randrange(3))
                draft = index.after(own, 3)
                assert draft or not followers(texts, own, 2)
                for n, token in enumerate(draft):
                    counts = followers(texts, (*own, *draft[:n])[-16:], 2)
                    assert counts[token] == max(counts.values())
                    branched += len(counts) > 1
    assert branched > 100


def text(token: int, length: int) -> torch.Tensor:
    return torch.full((length,), token, dtype=torch.int32)


def test_answers_keep_to_their_bound_and_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "KEPT_TOKENS", 30)
    answers = Answers()
    prompts = [(1, 2, i) for i in range(3)]
    for round_ in range(4):
        for prompt in prompts:
            answers.add(prompt, text(round_, 4))
            assert answers.num_tokens <= 30
    assert [len(answers.of(prompt)) for prompt in prompts] == [1, 2, 2]
    assert answers.of(prompts[2]) == [[2] * 4, [3] * 4]
    again = Answers()
    again.load(answers.state())
    assert again.num_tokens == answers.num_tokens
    for new in (answers, again):
        new.add(prompts[1], text(8, 9))
    assert [again.of(prompt) for prompt in prompts] == [answers.of(prompt) for prompt in prompts]
    answers.add((5,), text(1, 100))
    assert answers.num_tokens == 0


def response_of(request: Request) -> EngineRequest:
    return EngineRequest(request, 100, RequestGroup(request.prompt_ids), 0)


@pytest.fixture
def of_prompt(make_request: Callable[..., Request]) -> Callable[[str], EngineRequest]:
    return lambda name: response_of(make_request(name, group="g", prompt=(1, 2, 3, 4)))


def test_drafts_come_from_the_prompt_finished_siblings_and_answers_of_before(
    of_prompt: Callable[[str], EngineRequest],
) -> None:
    drafter = HistoryDrafter(min_match=2, max_draft=3, costs=StepCosts())
    first, second = of_prompt("a"), of_prompt("b")
    first.token_ids = [1, 2]
    assert drafter.draft([first], range(3)) == [[3, 4]], "the prompt"
    first.token_ids += [5, 6, 7, 8]
    drafter.finished(first)
    drafter.forget(first)
    second.token_ids = [5, 6]
    assert drafter.draft([second], range(3)) == [[7, 8]], "a sibling that finished first"
    assert drafter.lengths([second]) == [2]
    assert drafter.draft([second], range(1)) == [[7]]
    drafter.finished(second)
    drafter.forget(second)
    assert not drafter._texts
    third = of_prompt("c")
    third.token_ids = [1]
    assert drafter.draft([third], range(3)) == [[2, 5, 6]], "from the prompt's end on"
    other = HistoryDrafter(min_match=2, max_draft=3, costs=StepCosts())
    other.load(drafter.state())
    fourth = of_prompt("d")
    fourth.token_ids = [1]
    assert other.draft([fourth], range(3)) == [[2, 5, 6]], "from the saved state"


def test_answers_of_before_leave_room_for_those_of_now(of_prompt: Callable[[str], EngineRequest]) -> None:
    drafter = HistoryDrafter(min_match=2, max_draft=3, costs=StepCosts())
    for number in range(3):
        drafter.answers.add(of_prompt("old").request.prompt_ids, text(50 + number, 4000))
    first, second = of_prompt("a"), of_prompt("b")
    first.token_ids = [1, 2]
    drafter.lengths([first])
    first.token_ids = [20, *range(100, 2000)]
    second.token_ids = [700, 701]
    drafter.finished(first)
    assert drafter.draft([second], range(3)) == [[702, 703, 704]]
    (texts,) = drafter._texts.values()
    assert texts.num_tokens <= MAX_TOKENS
