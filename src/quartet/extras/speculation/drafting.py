"""Drafts by Medusa heads, and the drafters that recipes name.

Shapes: B rows, D hidden, K depth, V vocabulary, R ranks.

Drafts from history: what followed the newest tokens in the prompt, in finished answers to it, in those of before.

Answers of one policy to one prompt repeat each other, those of a policy that was trained on the prompt before even more
so. The answers are kept as tokens (``Answers``, of bounded size); a suffix automaton of a prompt and its answers exists
while requests with that prompt run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from quartet.extras.speculation.config import HistorySpeculation, MedusaSpeculation
from quartet.extras.speculation.heads import MedusaHeads
from quartet.extras.speculation.speculator import Speculator
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.drafter import DraftTree, chain
from quartet.rollout.protocol import Draw
from quartet.rollout.sampler import SamplingRows, largest, sample_tokens
from quartet.rollout.scheduler import Response

MAX_AUTOMATON_TOKENS = 8192
"""Of an automaton, some 500 bytes each: half of them the prompt's at most, the last quarter for this step's answers."""
_JOINT = 8
"""Tokens of the prompt that an answer is added with, so that the answer's beginning is found, too."""
_MOST_LINKS = 32
"""Suffixes of a text that count a new token. In text that repeats itself there would be as many as tokens."""


Prompt = tuple[int, ...]


class SuffixAutomaton:
    """All substrings of several texts, and how often each token follows each of them (Blumer et al. 1985).

    State 0 is the empty string; a state is the set of places where its substrings end.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]

    def add(self, tokens: Iterable[int]) -> None:
        """One more text."""
        last = 0
        for token in tokens:
            last = self._extended(last, token)
            self.num_tokens += 1
            state = last
            for _ in range(_MOST_LINKS):
                self._count[state] += 1
                state = self._link[state]
                if state <= 0:
                    break

    def _extended(self, last: int, token: int) -> int:
        """The state of the text so far, at ``last``, with one more token."""
        following, link, length = self._next, self._link, self._length
        known = following[last].get(token)
        if known is not None:
            return known if length[known] == length[last] + 1 else self._split(last, token, known)
        new = self._state({}, length[last] + 1, 0)
        state = last
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = link[state]
        if state >= 0:
            known = following[state][token]
            link[new] = known if length[known] == length[state] + 1 else self._split(state, token, known)
        return new

    def _split(self, state: int, token: int, known: int) -> int:
        """A state of its own for the substrings of ``known`` that are no longer than those of ``state`` and token."""
        copy = self._state(dict(self._next[known]), self._length[state] + 1, self._link[known])
        self._count[copy] = self._count[known]
        self._link[known] = copy
        while state >= 0 and self._next[state].get(token) == known:
            self._next[state][token] = copy
            state = self._link[state]
        return copy

    def _state(self, following: dict[int, int], length: int, link: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        self._count.append(0)
        return len(self._next) - 1

    def follow(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """The state of the longest suffix that stands in the texts, after one more token, and its length.

        Texts may have been added since ``state`` was found for the suffix of ``matched`` tokens.
        """
        while state > 0 and self._length[self._link[state]] >= matched:
            state = self._link[state]
        while state > 0 and token not in self._next[state]:
            state = self._link[state]
            matched = self._length[state]
        found = self._next[state].get(token)
        return (0, 0) if found is None else (found, matched + 1)

    def likeliest(self, state: int, min_match: int, num: int) -> list[int]:
        """Up to ``num`` tokens, each that which followed most often; the one that did so first of equals.

        They follow the longest suffix that does not only end a text, if it has ``min_match`` tokens.
        """
        while state > 0 and not self._next[state]:
            state = self._link[state]
        if self._length[state] < min_match:
            return []
        found: list[int] = []
        while len(found) < num and (following := self._next[state]):
            token = max(following, key=lambda t: self._count[following[t]])
            found.append(token)
            state = following[token]
        return found


class Answers:
    """Finished answers by prompt, of ``kept_tokens`` together with their prompts: the oldest of the prompt that was
    answered least lately go first, and of one prompt those that its automaton would have no room for.
    """

    def __init__(self, kept_tokens: int) -> None:
        self.kept_tokens = kept_tokens
        self.num_tokens = 0
        self._of: OrderedDict[Prompt, list[Tensor]] = OrderedDict()  # int32: of the prompt, then of its answers

    def of(self, prompt: Prompt) -> list[list[int]]:
        """The oldest first."""
        return [answer.tolist() for answer in self._of.get(prompt, [])[1:]]

    def add(self, prompt: Prompt, answer: Tensor) -> None:
        """``[n]`` int32."""
        if prompt not in self._of:
            self._of[prompt] = [torch.tensor(prompt, dtype=torch.int32)]
            self.num_tokens += len(prompt)
        texts = self._of[prompt]
        texts.append(answer)
        self._of.move_to_end(prompt)
        self.num_tokens += len(answer)
        while len(texts) > 2 and sum(map(len, texts[1:])) > MAX_AUTOMATON_TOKENS:
            self.num_tokens -= len(texts.pop(1))
        while self.num_tokens > self.kept_tokens:
            first, texts = next(iter(self._of.items()))
            self.num_tokens -= len(texts.pop(1))
            if len(texts) == 1:
                del self._of[first]
                self.num_tokens -= len(first)

    def state(self) -> dict[str, Any]:
        """Tokens and lengths of all texts as tensors: of each prompt, then of its answers."""
        texts = [text for of_prompt in self._of.values() for text in of_prompt]
        return {
            "tokens": torch.cat([torch.empty(0, dtype=torch.int32), *texts]),
            "lengths": torch.tensor([len(text) for text in texts], dtype=torch.int64),
            "num_answers": torch.tensor([len(of_prompt) - 1 for of_prompt in self._of.values()], dtype=torch.int64),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        tokens: Tensor = state["tokens"]
        texts = iter([text.clone() for text in tokens.split(state["lengths"].tolist())])
        self._of.clear()
        self.num_tokens = 0
        for num in state["num_answers"].tolist():
            prompt = tuple(next(texts).tolist())
            for _ in range(num):
                self.add(prompt, next(texts))


@dataclass
class _Place:
    """Where a running request's text stands in the automaton of its prompt, after ``num_read`` of its tokens."""

    automaton: SuffixAutomaton
    state: int
    matched: int
    num_read: int = -1
    draft: Sequence[int] = ()


class HistoryDrafter:
    """
    Args:
        min_match: newest tokens that must stand in the texts.
        max_draft: tokens of a draft.
        kept_tokens: of prompts and answers together.
    """

    reads_hidden = False

    def __init__(self, min_match: int, max_draft: int, kept_tokens: int) -> None:
        self.tree = chain(max_draft)
        self.answers = Answers(kept_tokens)
        self._min_match = min_match
        self._automata: dict[Prompt, SuffixAutomaton] = {}
        self._places: dict[Response, _Place] = {}

    def lengths(self, running: Sequence[Response]) -> list[int]:
        return [len(self._read(response).draft) for response in running]

    def draft(self, running: Sequence[Response], nodes: Sequence[int]) -> list[Sequence[int]]:
        return [self._read(response).draft[: len(nodes)] for response in running]

    def _read(self, response: Response) -> _Place:
        """Goes on to the newest token."""
        place = self._places.get(response)
        if place is None:
            place = self._places[response] = self._begin(response.request.prompt_ids)
        automaton, num_tokens = place.automaton, len(response.token_ids)
        if place.num_read < num_tokens:
            for token in response.token_ids[max(place.num_read, 0) :]:
                place.state, place.matched = automaton.follow(place.state, place.matched, token)
            place.num_read = num_tokens
            place.draft = ()
            if place.matched >= self._min_match:
                place.draft = automaton.likeliest(place.state, self._min_match, len(self.tree))
        return place

    def _begin(self, prompt: Prompt) -> _Place:
        """The end of the prompt; its automaton is made where there is none."""
        automaton = self._automata.get(prompt)
        if automaton is None:
            automaton = self._automata[prompt] = SuffixAutomaton()
            automaton.add(prompt[-MAX_AUTOMATON_TOKENS // 2 :])
            for answer in reversed(self.answers.of(prompt)):
                _add(automaton, prompt, answer, MAX_AUTOMATON_TOKENS * 3 // 4)
        state = matched = 0
        for token in prompt[-MAX_AUTOMATON_TOKENS // 2 :]:
            state, matched = automaton.follow(state, matched, token)
        return _Place(automaton, state, matched)

    def finished(self, response: Response) -> None:
        prompt, tokens = response.request.prompt_ids, response.token_ids
        self.answers.add(prompt, torch.tensor(tokens, dtype=torch.int32))
        if prompt in self._automata:
            _add(self._automata[prompt], prompt, tokens, MAX_AUTOMATON_TOKENS)

    def weights(self) -> tuple[()]:
        return ()

    def forget(self, response: Response) -> None:
        if self._places.pop(response, None) is None:
            return
        prompt = response.request.prompt_ids
        if all(other.request.prompt_ids != prompt for other in self._places):
            del self._automata[prompt]

    def state(self) -> dict[str, Any]:
        return self.answers.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self.answers.load(state)


def _add(automaton: SuffixAutomaton, prompt: Prompt, answer: Sequence[int], limit: int) -> None:
    """What follows the prompt's last tokens, too; of a long answer as much as there is room for below ``limit``."""
    room = limit - automaton.num_tokens
    if room > _JOINT:
        automaton.add((*prompt[-_JOINT:], *answer)[:room])


Choice = Literal["top", "uniform", "gumbel"]
_DRAWS: dict[Choice, Draw] = {"uniform": "inverse", "gumbel": "gumbel"}


def branching(paths: Sequence[Sequence[int]]) -> DraftTree:
    """A node per path, which ends in it.

    Args:
        paths: of ranks among a head's tokens: ``(0, 2)`` is the third of the second head's behind the likeliest of the
            first's. Shorter ones first; each continues another by one.
    """
    place = {tuple(path): i for i, path in enumerate(paths)}
    parents = tuple(place[tuple(path[:-1])] if len(path) > 1 else -1 for path in paths)
    return DraftTree(parents, tuple(range(len(paths))))


class HeadDrafter:
    """Tokens from each head's distribution: the likeliest, or those that the request itself would draw there first.

    Args:
        heads: hidden states ``[B, D]`` and a depth K to logits ``[B, K, V]``; of depth 1 is the token after the newest.
        paths: a draft's nodes by ranks among the heads' tokens (``branching``).
        learned: weights of the heads that a trainer sends, named.
    """

    reads_hidden = True

    def __init__(
        self,
        heads: Callable[[Tensor, int], Tensor],
        paths: Sequence[Sequence[int]],
        choose: Choice = "top",
        learned: Sequence[tuple[str, Tensor]] = (),
    ) -> None:
        self.tree = branching(paths)
        self._ranks = [path[-1] for path in paths]
        self._learned = learned
        self._heads = heads
        self._choose: Choice = choose

    def lengths(self, running: Sequence[Response]) -> list[int]:
        return [self.tree.depth] * len(running)

    @torch.no_grad()
    def draft(self, running: Sequence[Response], nodes: Sequence[int]) -> list[list[int]]:
        depths, ranks = [self.tree.depths[node] - 1 for node in nodes], [self._ranks[node] for node in nodes]
        depth = 1 + max(depths)
        flat = self._heads(torch.stack([r.hidden for r in running if r.hidden is not None]), depth).flatten(0, 1)
        # Of a vocabulary with fewer tokens than ranks the last one has the ranks behind it, too.
        num = min(1 + max(ranks), flat.shape[1])
        ranks = [min(rank, num - 1) for rank in ranks]
        if self._choose == "top":
            tokens = largest(flat, num)
        else:
            draw = _DRAWS[self._choose]
            sampling = [replace(r.request.sampling, draw=draw) for r in running]
            rows = SamplingRows.build([params for params in sampling for _ in range(depth)], flat.shape[1], flat.device)
            places = np.array([len(r.token_ids) + i for r in running for i in range(depth)], dtype=np.uint64)
            tokens = sample_tokens(flat, rows, places, num)
        found: list[list[int]] = tokens.view(len(running), depth, num)[:, depths, ranks].tolist()
        return found

    def finished(self, response: Response) -> None:
        """Heads learn elsewhere."""

    def forget(self, response: Response) -> None:
        """Nothing is kept."""

    def weights(self) -> Sequence[tuple[str, Tensor]]:
        return self._learned

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """There is none."""


def history(config: HistorySpeculation, packed: PackedCausalLM, model: None) -> Speculator:
    return Speculator(HistoryDrafter(config.min_match, config.max_draft, config.kept_tokens), config.costs)


def medusa(config: MedusaSpeculation, packed: PackedCausalLM, heads: MedusaHeads | None) -> Speculator:
    """
    Args:
        heads: those of the trainer, whose model the engine shares; else they are loaded, and sent where they learn.

    Raises:
        UserError: heads that are not there, or are another trunk's.
    """
    learned: Sequence[tuple[str, Tensor]] = ()
    if heads is None:
        heads = load_heads(config, packed)
        learned = tuple(heads.weights()) if config.learns else ()
    paths = config.tree or [(0,) * depth for depth in range(1, heads.depth + 1)]
    return Speculator(HeadDrafter(heads, paths, config.choose, learned), config.costs)


def load_heads(config: MedusaSpeculation, packed: PackedCausalLM) -> MedusaHeads:
    return MedusaHeads.load(config.path, packed, config.num_heads)
