"""The drafters that recipes name: what they propose, and when it pays to have it verified.

Shapes: B rows, D hidden, K depth, V vocabulary, R ranks.

Drafts from history: what followed the newest tokens in the prompt, in finished answers to it, in those of before.

Answers of one policy to one prompt repeat each other, those of a policy that was trained on the prompt before even more
so. The answers are kept as tokens (``Answers``, of bounded size); an index of a prompt and its answers (``Texts``)
exists while requests with that prompt run.

A drafter offers tokens to follow each running request's newest one; the engine verifies all of them in one forward
(``NativeEngine.step``) and keeps those that it would have drawn anyway. How many are drafted is decided by counts
alone: running rows, tokens on offer, the share of drafted tokens kept so far by their place in the tree, and what the
recipe says that steps cost. No clock runs, so that a run repeats.

Depth 1 is the first drafted token of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quartet.extras.speculation.config import HistorySpeculation, MedusaSpeculation, StepCosts
from quartet.extras.speculation.heads import MedusaHeads
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.drafter import DraftTree, chain_tree
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import SamplingParams
from quartet.rollout.sampler import SamplingRows, sample_tokens
from quartet.rollout.scheduler import EngineRequest
from quartet.train.state import REST, state_tensors

_DRAFT = 3
"""Tokens drafted per row in the steps that ``StepCosts.drafted`` has the cost of."""


def cost(table: Sequence[float], num: int) -> float:
    """Reads the cost of ``num`` at least 1: between the powers of two in a straight line; behind the last as between
    the last two.
    """
    if len(table) == 1:
        return table[0]
    at = min(num.bit_length() - 1, len(table) - 2)
    return table[at] + (table[at + 1] - table[at]) * (num / (1 << at) - 1)


def drafted_cost(costs: StepCosts, num_rows: int, num_tokens: int) -> float:
    """Returns the cost of a step of ``num_rows`` with so many tokens: as measured with fewer or more rows, and what
    these cost more or less where each has one token.
    """
    measured_rows = min(max(1, num_tokens // (1 + _DRAFT)), 1 << (len(costs.plain) - 1))
    return cost(costs.drafted, num_tokens) + cost(costs.plain, num_rows) - cost(costs.plain, measured_rows)


_MARGIN = 1.02
"""By so much drafting must promise to be quicker."""
_WINDOW = 4096
"""Tokens drafted at a node from which on older ones count half."""


class Acceptance:
    """How many of the drafted tokens were kept; a token behind one that was not kept does not count.

    Args:
        tree: of whole drafts.

    Attributes:
        recent: of each node how often it was tried and kept, older times counting less.
        drafted, kept: places at each depth with a token or several, and those of which one was kept; since the engine
            was made, for metrics.
    """

    def __init__(self, tree: DraftTree) -> None:
        self.drafted = [0] * tree.depth
        self.kept = [0] * tree.depth
        self.recent = [[0, 0] for _ in range(len(tree))]

    def note(self, tree: DraftTree, kept: Sequence[int], *, ended: bool = False) -> None:
        """Notes what became of one row.

        Args:
            tree: part of the whole.
            kept: its nodes that hold, one behind the other.
            ended: the response ends with the last of them, so nothing was tried behind it.
        """
        for depth, (parent, held) in enumerate(zip((-1, *kept), (*kept, None), strict=True)):
            tried = tree.children[1 + parent]
            if not tried or (ended and held is None):
                return
            self.drafted[depth] += 1
            self.kept[depth] += held is not None
            for node in tried:
                recent = self.recent[tree.nodes[node]]
                recent[0] += 1
                recent[1] += node == held
                if recent[0] >= _WINDOW:
                    recent[:] = recent[0] // 2, recent[1] // 2

    def rate(self, node: int) -> float:
        """Returns how often tokens at ``node`` of the whole are kept where their forerunners are; a half where nothing
        is known.
        """
        drafted, kept = self.recent[node]
        return (kept + 1) / (drafted + 2)


class Speculator(ABC):
    """A ``Drafter`` that has as many of its tokens verified as pay.

    Args:
        tree: a whole draft.
        costs: of steps.

    Attributes:
        reads_hidden: drafts are made from ``Response.hidden``.
    """

    reads_hidden = False

    def __init__(self, tree: DraftTree, costs: StepCosts) -> None:
        self.tree = tree
        self.costs = costs
        self.acceptance = Acceptance(tree)
        self._marked: dict[str, Any] | None = None

    @abstractmethod
    def lengths(self, running: Sequence[EngineRequest]) -> list[int]:
        """Returns the depth down to which it could draft for each, that of ``tree`` at most; costs little."""

    @abstractmethod
    def draft(self, running: Sequence[EngineRequest], nodes: Sequence[int]) -> Sequence[Sequence[int]]:
        """Drafts tokens for each: of these nodes of ``tree``, as far as it can."""

    def finished(self, response: EngineRequest) -> None:  # noqa: B027 (most need not know)
        """Is told that a response ended by itself, and has all its tokens."""

    def forget(self, response: EngineRequest) -> None:  # noqa: B027
        """Is told that a response ended, in whatever way."""

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Returns what a trainer sends with the model's own weights, named."""
        return ()

    def learned(self) -> dict[str, Tensor]:
        """Returns what it has learned, by name; not changed by what follows."""
        return {}

    def load_learned(self, learned: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Takes up what ``learned`` gave."""

    def propose(
        self, engine: NativeEngine, computing: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        running, tree = engine.running, self.tree
        # Behind a draft one token more is sampled.
        room = [min(tree.depth, r.max_tokens - len(r.token_ids) - 1) for r in running]
        # What is on offer need not be looked at where even whole drafts of all would not pay.
        if not any(n > 0 for n in room) or not self.nodes(room):
            return
        room = [min(n, m) for n, m in zip(room, self.lengths(running), strict=True)]
        if not (nodes := self.nodes(room)):
            return
        tree = tree.only(nodes)
        with computing():
            drafts = self.draft(running, nodes)
        for response, draft, n in zip(running, drafts, room, strict=True):
            fitting = [i for i, depth in enumerate(tree.depths) if depth <= n]
            response.propose([draft[i] for i in fitting], tree.only(fitting))

    def verified(self, response: EngineRequest, kept: Sequence[int], *, ended: bool) -> None:
        self.acceptance.note(response.tree, kept, ended=ended)

    def by_depth(self) -> tuple[Sequence[int], Sequence[int]]:
        return self.acceptance.drafted, self.acceptance.kept

    def nodes(self, lengths: Sequence[int]) -> list[int]:
        """Decides what to draft of the tree, for the most tokens per second; nothing where plain decoding
        has that.

        Nodes are taken by their chance of being kept, as many as pay: parents come before their children by themselves.

        Args:
            lengths: depth on offer for each running request.
        """
        tree, num_rows = self.tree, len(lengths)
        reaching = [sum(n >= depth for n in lengths) for depth in range(1 + tree.depth)]
        chances: list[float] = []
        for node, parent in enumerate(tree.parents):
            chances.append(self.acceptance.rate(node) * (chances[parent] if parent >= 0 else 1.0))
        order = [node for node in range(len(tree)) if reaching[tree.depths[node]]]
        order.sort(key=lambda node: -chances[node])
        best, least = 0, cost(self.costs.plain, num_rows) / num_rows / _MARGIN
        gained, num_tokens, depth = float(num_rows), num_rows, 0
        for i, node in enumerate(order):
            depth = max(depth, tree.depths[node])
            gained += reaching[tree.depths[node]] * chances[node]
            num_tokens += reaching[tree.depths[node]]
            making = cost(self.costs.drafting, num_rows * depth) if self.reads_hidden else 0.0
            seconds = (drafted_cost(self.costs, num_rows, num_tokens) + making) / gained
            if seconds < least:
                best, least = i + 1, seconds
        return sorted(order[:best])

    # ---- checkpoints ----

    def mark(self) -> dict[str, Any]:
        """Makes ``state`` from now on that of this moment, and returns it."""
        self._marked = self._state()
        return self._marked

    def state(self) -> dict[str, Any]:
        """Returns the state as of the last ``mark``: what was learned, and the acceptance as ``REST``."""
        return self._state() if self._marked is None else self._marked

    def _state(self) -> dict[str, Any]:
        return {**self.learned(), REST: {"acceptance": [list(recent) for recent in self.acceptance.recent]}}

    def load(self, state: Mapping[str, Any]) -> None:
        self.acceptance.recent = [list(recent) for recent in state[REST]["acceptance"]]
        self.load_learned(state_tensors(state))
        self._marked = None


MAX_TOKENS = 8192
"""Of a prompt and its answers: half of them the prompt's at most, the last quarter for this step's answers."""
_JOINT = 8
"""Tokens of the prompt that an answer is added with, so that the answer's beginning is found, too."""
_LONGEST, _MOST = 16, 32
"""Newest tokens that are compared at most, and places at which they are: the latest of those that have the first."""


Prompt = tuple[int, ...]


class Texts:
    """What followed each run of ``min_match`` tokens in several texts."""

    def __init__(self, min_match: int) -> None:
        self.num_tokens = 0
        self._min_match = min_match
        self._texts: list[Sequence[int]] = []
        self._places: dict[Sequence[int], list[tuple[int, int]]] = {}  # text, and the token behind

    def add(self, tokens: Prompt) -> None:
        """Adds one more text."""
        for end in range(self._min_match, len(tokens)):
            place = len(self._texts), end
            self._places.setdefault(tokens[end - self._min_match : end], []).append(place)
        self._texts.append(tokens)
        self.num_tokens += len(tokens)

    def after(self, tokens: Prompt, num: int) -> list[int]:
        """Returns up to ``num`` tokens, each that which followed most often what stands before it: the longest suffix
        that is in a text before another token.
        """
        found: list[int] = []
        while len(found) < num and (token := self._likeliest((*tokens, *found)[-_LONGEST:])) is not None:
            found.append(token)
        return found

    def _likeliest(self, tokens: Prompt) -> int | None:
        """Returns the latest of those that followed most often."""
        places = self._places.get(tokens[-self._min_match :], [])[-_MOST:]
        if not places:
            return None
        sizes = [self._matched(tokens, *place) for place in places]
        longest = max(sizes)
        followed = [self._texts[text][end] for (text, end), n in zip(places, sizes, strict=True) if n == longest]
        return Counter(reversed(followed)).most_common(1)[0][0]

    def _matched(self, tokens: Prompt, text: int, end: int) -> int:
        """Counts the newest of ``tokens`` that stand in a text before ``end``."""
        before = self._texts[text][max(0, end - len(tokens)) : end]
        pairs = zip(reversed(tokens), reversed(before), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


KEPT_TOKENS = 1_000_000
"""Of prompts and answers that history remembers."""


class Answers:
    """Finished answers by prompt, of ``KEPT_TOKENS`` together with their prompts: the oldest of the prompt that was
    answered least lately go first, and of one prompt those that an index would have no room for.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._of: OrderedDict[Prompt, list[Tensor]] = OrderedDict()  # int32: of the prompt, then of its answers

    def of(self, prompt: Prompt) -> list[list[int]]:
        """Returns the answers to a prompt, the oldest first."""
        return [answer.tolist() for answer in self._of.get(prompt, [])[1:]]

    def add(self, prompt: Prompt, answer: Tensor) -> None:
        """Adds an answer ``[n]`` int32."""
        if prompt not in self._of:
            self._of[prompt] = [torch.tensor(prompt, dtype=torch.int32)]
            self.num_tokens += len(prompt)
        texts = self._of[prompt]
        texts.append(answer)
        self._of.move_to_end(prompt)
        self.num_tokens += len(answer)
        while len(texts) > 2 and sum(map(len, texts[1:])) > MAX_TOKENS:
            self.num_tokens -= len(texts.pop(1))
        while self.num_tokens > KEPT_TOKENS:
            first, texts = next(iter(self._of.items()))
            self.num_tokens -= len(texts.pop(1))
            if len(texts) == 1:
                del self._of[first]
                self.num_tokens -= len(first)

    def state(self) -> dict[str, Tensor]:
        """Returns the tokens and lengths of all texts as tensors: of each prompt, then of its answers."""
        texts = [text for of_prompt in self._of.values() for text in of_prompt]
        return {
            "tokens": torch.cat([torch.empty(0, dtype=torch.int32), *texts]),
            "lengths": torch.tensor([len(text) for text in texts], dtype=torch.int64),
            "num_answers": torch.tensor([len(of_prompt) - 1 for of_prompt in self._of.values()], dtype=torch.int64),
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        texts = iter([text.clone() for text in state["tokens"].split(state["lengths"].tolist())])
        self._of.clear()
        self.num_tokens = 0
        for num in state["num_answers"].tolist():
            prompt = tuple(next(texts).tolist())
            for _ in range(num):
                self.add(prompt, next(texts))


def _narrow(prompt: Prompt) -> Prompt:
    """Returns a prompt in 32 bits: places of pictures, of which none is ever drafted, by what their ids end in."""
    return prompt if min(prompt) >= 0 else tuple(max(token, -1 - (-token & 0xFFFFFF)) for token in prompt)


class HistoryDrafter(Speculator):
    """
    Args:
        min_match: newest tokens that must stand in the texts.
        max_draft: tokens of a draft.
    """

    def __init__(self, min_match: int, max_draft: int, costs: StepCosts) -> None:
        super().__init__(chain_tree(max_draft), costs)
        self.answers = Answers()
        self._min_match = min_match
        self._texts: dict[Prompt, Texts] = {}
        self._drafts: dict[EngineRequest, tuple[int, Sequence[int]]] = {}  # by tokens so far

    def lengths(self, running: Sequence[EngineRequest]) -> list[int]:
        return [len(self._read(response)) for response in running]

    def draft(self, running: Sequence[EngineRequest], nodes: Sequence[int]) -> list[Sequence[int]]:
        return [self._read(response)[: len(nodes)] for response in running]

    def _read(self, response: EngineRequest) -> Sequence[int]:
        """Returns the whole draft behind the newest token."""
        prompt, tokens = response.request.prompt_ids, response.token_ids
        num, draft = self._drafts.get(response, (-1, ()))
        if num != len(tokens):
            newest = (*prompt[-_LONGEST:], *tokens[-_LONGEST:])[-_LONGEST:]
            draft = [*takewhile(lambda token: token >= 0, self._texts_of(prompt).after(newest, len(self.tree)))]
            self._drafts[response] = len(tokens), draft
        return draft

    def _texts_of(self, prompt: Prompt) -> Texts:
        prompt = _narrow(prompt)
        if prompt not in self._texts:
            texts = self._texts[prompt] = Texts(self._min_match)
            texts.add(prompt[-MAX_TOKENS // 2 :])
            for answer in reversed(self.answers.of(prompt)):
                _add(texts, prompt, answer, MAX_TOKENS * 3 // 4)
        return self._texts[prompt]

    def finished(self, response: EngineRequest) -> None:
        prompt, tokens = _narrow(response.request.prompt_ids), response.token_ids
        self.answers.add(prompt, torch.tensor(tokens, dtype=torch.int32))
        if prompt in self._texts:
            _add(self._texts[prompt], prompt, tokens, MAX_TOKENS)

    def forget(self, response: EngineRequest) -> None:
        if self._drafts.pop(response, None) is None:
            return
        prompt = response.request.prompt_ids
        if all(other.request.prompt_ids != prompt for other in self._drafts):
            self._texts.pop(_narrow(prompt), None)

    def learned(self) -> dict[str, Tensor]:
        return self.answers.state()

    def load_learned(self, learned: Mapping[str, Tensor]) -> None:
        self.answers.load(learned)


def _add(texts: Texts, prompt: Prompt, answer: Sequence[int], limit: int) -> None:
    """Adds an answer, so that what follows the prompt's last tokens is known, too; of a long one as much as there is
    room for below ``limit``.
    """
    room = limit - texts.num_tokens
    if room > _JOINT:
        texts.add((*prompt[-_JOINT:], *answer)[:room])


_LIKELIEST = SamplingParams(temperature=0.0)


def branching(paths: Sequence[Sequence[int]]) -> DraftTree:
    """Makes a node per path, which ends in it.

    Args:
        paths: of ranks among a head's tokens: ``(0, 2)`` is the third of the second head's behind the likeliest of the
            first's. Shorter ones first; each continues another by one.
    """
    place = {tuple(path): i for i, path in enumerate(paths)}
    parents = tuple(place[tuple(path[:-1])] if len(path) > 1 else -1 for path in paths)
    return DraftTree(parents, tuple(range(len(paths))))


class HeadDrafter(Speculator):
    """The likeliest tokens of each head, or, of requests that race (``draw: gumbel``), those that their own noise would
    draw there first.

    Args:
        heads: hidden states ``[B, D]`` and a depth K to logits ``[B, K, V]``; of depth 1 is the token after the newest.
        paths: a draft's nodes by ranks among the heads' tokens (``branching``).
        sent: weights of the heads that a trainer sends, named.
    """

    reads_hidden = True

    def __init__(
        self,
        heads: Callable[[Tensor, int], Tensor],
        paths: Sequence[Sequence[int]],
        costs: StepCosts,
        sent: Sequence[tuple[str, Tensor]] = (),
    ) -> None:
        super().__init__(branching(paths), costs)
        self._ranks = [path[-1] for path in paths]
        self._sent = sent
        self._heads = heads

    def lengths(self, running: Sequence[EngineRequest]) -> list[int]:
        return [self.tree.depth] * len(running)

    @torch.no_grad()
    def draft(self, running: Sequence[EngineRequest], nodes: Sequence[int]) -> list[list[int]]:
        depths, ranks = [self.tree.depths[node] - 1 for node in nodes], [self._ranks[node] for node in nodes]
        depth = 1 + max(depths)
        flat = self._heads(torch.stack([r.hidden for r in running if r.hidden is not None]), depth).flatten(0, 1)
        num = 1 + max(ranks)
        how = [r.request.sampling if r.request.sampling.draw == "gumbel" else _LIKELIEST for r in running]
        rows = SamplingRows.build([params for params in how for _ in range(depth)], flat.shape[1], flat.device)
        places = np.array([len(r.token_ids) + i for r in running for i in range(depth)], dtype=np.uint64)
        tokens = sample_tokens(flat, rows, places, num)
        found: list[list[int]] = tokens.view(len(running), depth, num)[:, depths, ranks].tolist()
        return found

    def weights(self) -> Sequence[tuple[str, Tensor]]:
        return self._sent


def history(config: HistorySpeculation, packed: PackedCausalLM, model: None) -> Speculator:
    return HistoryDrafter(config.min_match, config.max_draft, config.costs)


def medusa(config: MedusaSpeculation, packed: PackedCausalLM, heads: MedusaHeads | None) -> Speculator:
    """
    Args:
        heads: those of the trainer, whose model the engine shares; else they are loaded, and sent where they learn.

    Raises:
        UserError: heads that are not there, or are another trunk's.
    """
    sent: Sequence[tuple[str, Tensor]] = ()
    if heads is None:
        heads = load_heads(config, packed)
        sent = tuple(heads.weights()) if config.learns else ()
    paths = config.tree or [(0,) * depth for depth in range(1, heads.depth + 1)]
    return HeadDrafter(heads, paths, config.costs, sent)


def load_heads(config: MedusaSpeculation, packed: PackedCausalLM) -> MedusaHeads:
    return MedusaHeads.load(config.path, packed, config.num_heads)
