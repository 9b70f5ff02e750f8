"""Drafts from history: the automaton against plain search, the bound of what is kept, and how it is brought back."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch

from quartet.extras.speculation import drafting
from quartet.extras.speculation.config import StepCosts
from quartet.extras.speculation.drafting import MAX_AUTOMATON_TOKENS, Answers, HistoryDrafter, SuffixAutomaton
from quartet.rollout.protocol import Request
from quartet.rollout.scheduler import RequestGroup, Response


def longest_suffix(texts: Sequence[Sequence[int]], text: Sequence[int]) -> int:
    """Tokens of the longest suffix of ``text`` that stands in one of ``texts``, by trying all."""
    for size in range(len(text), 0, -1):
        suffix = list(text[-size:])
        if any(list(t[i : i + size]) == suffix for t in texts for i in range(len(t) - size + 1)):
            return size
    return 0


def followers(texts: Sequence[Sequence[int]], suffix: Sequence[int]) -> Counter[int]:
    """How often each token follows ``suffix``."""
    n = len(suffix)
    return Counter(t[i + n] for t in texts for i in range(len(t) - n) if list(t[i : i + n]) == list(suffix))


def test_the_automaton_finds_what_plain_search_finds() -> None:
    """Texts are added while another is followed; few letters, so that suffixes are long and branch."""
    draw = random.Random(0)
    branched = 0
    for _ in range(60):
        automaton, texts, state, matched = SuffixAutomaton(), list[list[int]](), 0, 0
        own: list[int] = []
        for _ in range(6):
            texts.append([draw.randrange(3) for _ in range(draw.randrange(1, 14))])
            automaton.add(texts[-1])
            for _ in range(4):
                own.append(draw.randrange(3))
                state, matched = automaton.follow(state, matched, own[-1])
                assert matched <= longest_suffix(texts, own)
                assert matched == 0 or longest_suffix(texts, own[-matched:]) == matched
                suffix = own[len(own) - matched :]
                if matched and (counts := followers(texts, suffix)):
                    (token,) = automaton.likeliest(state, 1, 1)
                    assert counts[token] == max(counts.values())
                    branched += len(counts) > 1
    assert branched > 100


def test_a_suffix_that_ends_a_text_gives_way_to_a_shorter_one() -> None:
    automaton = SuffixAutomaton()
    automaton.add([1, 2, 3, 9, 9])
    automaton.add([7, 1, 2, 3])
    state = matched = 0
    for token in (7, 1, 2, 3):
        state, matched = automaton.follow(state, matched, token)
    assert matched == 4
    assert automaton.likeliest(state, 3, 5) == [9, 9]
    assert automaton.likeliest(state, 4, 5) == []


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


def response_of(request: Request) -> Response:
    return Response(request, 100, RequestGroup(request.prompt_ids), 0)


@pytest.fixture
def of_prompt(make_request: Callable[..., Request]) -> Callable[[str], Response]:
    return lambda name: response_of(make_request(name, group="g", prompt=(1, 2, 3, 4)))


def test_drafts_come_from_the_prompt_finished_siblings_and_answers_of_before(
    of_prompt: Callable[[str], Response],
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
    assert not drafter._automata
    third = of_prompt("c")
    third.token_ids = [1]
    assert drafter.draft([third], range(3)) == [[2, 5, 6]], "from the prompt's end on"
    other = HistoryDrafter(min_match=2, max_draft=3, costs=StepCosts())
    other.load(drafter.state())
    fourth = of_prompt("d")
    fourth.token_ids = [1]
    assert other.draft([fourth], range(3)) == [[2, 5, 6]], "from the saved state"


def test_answers_of_before_leave_room_for_those_of_now(of_prompt: Callable[[str], Response]) -> None:
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
    (automaton,) = drafter._automata.values()
    assert automaton.num_tokens <= MAX_AUTOMATON_TOKENS
