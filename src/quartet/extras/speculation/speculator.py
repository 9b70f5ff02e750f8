"""When it pays to have drafted tokens verified, and how many.

A proposer offers tokens to follow each running request's newest one; the engine verifies all of them in one forward
(``NativeEngine.step``) and keeps those that it would have drawn anyway. How many are drafted is decided by counts
alone: running rows, tokens on offer, the share of drafted tokens kept so far by their place in the tree, and what steps
cost, which was measured once. No clock runs, so a run that goes on from a checkpoint decides as it would have.

Depth 1 is the first drafted token of a row.

What engine steps cost by the number of their tokens: measured once, then numbers like any other state of a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

from torch import Tensor

from quartet.extras.speculation.config import StepCosts
from quartet.rollout.drafter import DraftTree
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Request
from quartet.rollout.scheduler import Response
from quartet.train.state import REST, tensors_of

_DRAFT = 3
"""Tokens drafted per row where the cost of drafted steps is measured; of ``StepCosts.drafted`` in a recipe, too."""
_MOST = 7
"""Tokens drafted per row up to which costs are measured where many rows run; those of more go on in a straight line."""
_PROMPT = 64
"""Most tokens of a prompt."""
_REPEATS = 5


def cost(table: Sequence[float], num: int) -> float:
    """Of ``num`` at least 1, between the powers of two in a straight line; behind the last as between the last two."""
    if not table:
        return 0.0
    if len(table) == 1:
        return table[0]
    at = min(num.bit_length() - 1, len(table) - 2)
    return table[at] + (table[at + 1] - table[at]) * (num / (1 << at) - 1)


def drafted_cost(costs: StepCosts, num_rows: int, num_tokens: int) -> float:
    """Of a step of ``num_rows`` with so many tokens: as measured with fewer or more rows, and what these cost more or
    less where each has one token.
    """
    measured_rows = min(max(1, num_tokens // (1 + _DRAFT)), 1 << (len(costs.plain) - 1))
    return cost(costs.drafted, num_tokens) + cost(costs.plain, num_rows) - cost(costs.plain, measured_rows)


def measure(
    engine: NativeEngine,
    max_running: int,
    proposer: Proposer,
    computing: Callable[[], AbstractContextManager[object]],
    like: Request,
    context: int | None,
) -> StepCosts:
    """Runs steps of an engine that holds nothing; its counts and cache are of no use afterwards.

    More rows or tokens never cost less: what was measured so is noise, from which larger sizes would be judged. On a
    CPU the clock is that of this thread's own computing, which stands still while other processes have the core.

    Args:
        max_running: rows up to which plain steps are measured.
        proposer: its drafts cost next to nothing, unless they are made from hidden states.
        computing: in which it is asked for drafts.
        like: of whose kind requests run. Each has a prompt of its own, as in the tail of a rollout.
        context: most tokens of a request, its prompt's included; None: no end.
    """
    plain, drafted, drafting = [], [], []
    tree, most_new = proposer.tree, _most_tokens(proposer.tree, max_running)
    longest, room = len(tree), _PROMPT if context is None else max(1, min(context - most_new, _PROMPT))
    like = replace(like, prompt_ids=like.prompt_ids[:room])
    begin = partial(_begin, engine, like, most_new)
    seconds = partial(_seconds, time.thread_time if engine.packed.device.type == "cpu" else time.perf_counter)

    def draft(nodes: Sequence[int]) -> None:
        with computing():
            proposer.draft(engine.running, nodes)

    def step_with(length: int) -> None:
        for response in engine.running:
            response.propose([0] * min(length, response.max_tokens - len(response.token_ids) - 1))
        engine.step()

    for power in range(max_running.bit_length()):
        begin(1 << power)
        plain.append(seconds(engine.step))
    for power in range((max_running * tree.depth).bit_length() if proposer.reads_hidden else 0):
        num_rows = -(-(1 << power) // tree.depth)
        depth = -(-(1 << power) // num_rows)
        begin(num_rows)
        nodes = [node for node, at in enumerate(tree.depths) if at <= depth]
        drafting.append(seconds(partial(draft, nodes)))
    most = max(1 + longest, max_running * (1 + min(longest, _MOST)))
    for power in range(most.bit_length()):
        num_rows = min(max(1, (1 << power) // (1 + _DRAFT)), max_running)
        length = (1 << power) // num_rows - 1
        begin(num_rows)
        drafted.append(seconds(partial(step_with, length)))
    engine.cancel([response.request.request_id for response in engine.running])
    growing = [tuple(accumulate(found, max)) for found in (plain, drafted, drafting)]
    return StepCosts(plain=growing[0], drafted=growing[1], drafting=growing[2])


def _max_waits(num_rows: int) -> int:
    """Steps in which some of so many requests still wait for their prompts."""
    return num_rows // 8


def _most_tokens(tree: DraftTree, max_running: int) -> int:
    """That a request may get while costs are measured, and while others wait for their prompts."""
    return (1 + _REPEATS) * (1 + max(len(tree), _DRAFT)) + 2 + _max_waits(max_running)


def _begin(engine: NativeEngine, like: Request, most: int, num_rows: int) -> None:
    """Has so many requests run, and no others."""
    engine.cancel([response.request.request_id for response in engine.running])
    sampling = replace(like.sampling, max_new_tokens=most, stop_token_ids=(), stop_strings=())
    for row in range(num_rows):
        prompt = (*like.prompt_ids[1:], row % engine.packed.vocab_size)
        engine.submit(
            [
                replace(
                    like, request_id=str(row), group=str(row), prompt_ids=prompt, sampling=replace(sampling, seed=row)
                )
            ]
        )
    for _ in range(1 + _max_waits(num_rows)):
        if len(engine.running) < num_rows:
            engine.step()


def _seconds(clock: Callable[[], float], work: Callable[[], object]) -> float:
    """The least of some: whatever disturbs one makes it longer."""
    work()
    found = []
    for _ in range(_REPEATS):
        began = clock()
        work()
        found.append(clock() - began)
    return min(found)


PROBE_EVERY = 256
"""Steps in which fewer tokens are drafted than could be, until one row gets all of its draft: acceptance may have
changed. Such a step may take twice as long as a plain one."""
_MARGIN = 1.02
"""By so much drafting must promise to be quicker."""
_WINDOW = 4096
"""Tokens drafted at a node from which on older ones count half."""


class Proposer(Protocol):
    """What tokens might follow, whether or not it pays to verify them.

    Attributes:
        tree: a whole draft.
        reads_hidden: drafts are made from ``Response.hidden``.
    """

    tree: DraftTree
    reads_hidden: bool

    def lengths(self, running: Sequence[Response]) -> list[int]:
        """Depth down to which it could draft for each, that of ``tree`` at most; costs little."""

    def draft(self, running: Sequence[Response], nodes: Sequence[int]) -> Sequence[Sequence[int]]:
        """Tokens for each: of these nodes of ``tree``, as far as it can."""

    def finished(self, response: Response) -> None:
        """It ended by itself, and has all its tokens."""

    def forget(self, response: Response) -> None:
        """It ended, in whatever way."""

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """What a trainer sends with the model's own weights, named."""

    def state(self) -> dict[str, Any]:
        """What it has learned, as tensors and plain values by name; not changed by what follows."""

    def load(self, state: Mapping[str, Any]) -> None: ...


class Acceptance:
    """How many of the drafted tokens were kept; a token behind one that was not kept does not count.

    Args:
        tree: of whole drafts.

    Attributes:
        num_noted: rows that had drafts.
        drafted, kept: places at each depth with a token or several, and those of which one was kept; since the engine
            was made, for metrics.
    """

    def __init__(self, tree: DraftTree) -> None:
        self.num_noted = 0
        self.drafted = [0] * tree.depth
        self.kept = [0] * tree.depth
        self._recent = [[0, 0] for _ in range(len(tree))]

    def note(self, tree: DraftTree, kept: Sequence[int], *, ended: bool = False) -> None:
        """Of one row.

        Args:
            tree: part of the whole.
            kept: its nodes that hold, one behind the other.
            ended: the response ends with the last of them, so nothing was tried behind it.
        """
        self.num_noted += 1
        for depth, (parent, held) in enumerate(zip((-1, *kept), (*kept, None), strict=True)):
            tried = tree.children[1 + parent]
            if not tried or (ended and held is None):
                return
            self.drafted[depth] += 1
            self.kept[depth] += held is not None
            for node in tried:
                recent = self._recent[tree.nodes[node]]
                recent[0] += 1
                recent[1] += node == held
                if recent[0] >= _WINDOW:
                    recent[:] = recent[0] // 2, recent[1] // 2

    def rate(self, node: int) -> float:
        """Of tokens at ``node`` of the whole whose forerunners are kept; a half where nothing is known."""
        drafted, kept = self._recent[node]
        return (kept + 1) / (drafted + 2)

    def state(self) -> list[list[int]]:
        return [list(recent) for recent in self._recent]

    def load(self, state: Sequence[Sequence[int]]) -> None:
        for recent, saved in zip(self._recent, state, strict=False):
            recent[:] = saved


class Speculator:
    """The ``Drafter`` of a proposer: running requests get drafts of as many of its tokens as pay.

    Args:
        costs: None: the engine measures them before its first step.
    """

    def __init__(self, proposer: Proposer, costs: StepCosts | None = None) -> None:
        self.proposer = proposer
        self.reads_hidden = proposer.reads_hidden
        self.costs = costs
        self.acceptance = Acceptance(proposer.tree)
        self._num_shortened = 0
        self._marked: dict[str, Any] | None = None
        self._chosen: tuple[object, list[int]] = (None, [])

    def propose(
        self, engine: NativeEngine, computing: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        if self.costs is None:
            like = next(iter(engine.held.values())).request
            self.costs = measure(engine.empty(), engine.max_running, self.proposer, computing, like, engine.context)
        if engine.running:
            self.draft(engine.running, computing)

    def verified(self, response: Response, kept: Sequence[int], *, ended: bool) -> None:
        self.acceptance.note(response.tree, kept, ended=ended)

    def finished(self, response: Response) -> None:
        self.proposer.finished(response)

    def forget(self, response: Response) -> None:
        self.proposer.forget(response)

    def by_depth(self) -> tuple[Sequence[int], Sequence[int]]:
        return self.acceptance.drafted, self.acceptance.kept

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        return self.proposer.weights()

    def draft(
        self, running: Sequence[Response], computing: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """Sets ``draft`` of each.

        Args:
            computing: in which the proposer is asked for drafts.
        """
        room = self._room(running)
        if not any(n > 0 for n in room):
            return
        # What is on offer need not be looked at where even whole drafts of all would not pay.
        nodes = self.nodes(room)
        whole = len(self.proposer.tree)
        probes = len(nodes) < whole and self._num_shortened >= PROBE_EVERY
        if nodes:
            room = [min(n, m) for n, m in zip(room, self.proposer.lengths(running), strict=True)]
            nodes = self.nodes(room)
        with computing() if nodes or probes else nullcontext():
            if nodes:
                self._draft(running, nodes, room)
            if probes:
                longest = [max(running, key=lambda r: r.max_tokens - len(r.token_ids))]
                lengths = self.proposer.lengths(longest)
                self._draft(
                    longest, range(whole), [min(*both) for both in zip(self._room(longest), lengths, strict=True)]
                )
        self._num_shortened = 0 if probes else self._num_shortened + (len(nodes) < whole)

    def _room(self, running: Sequence[Response]) -> list[int]:
        """Depth down to which drafts may go: behind them one token more is sampled."""
        return [min(self.proposer.tree.depth, r.max_tokens - len(r.token_ids) - 1) for r in running]

    def _draft(self, running: Sequence[Response], nodes: Sequence[int], room: Sequence[int]) -> None:
        """These nodes for each, down to the depth that it has room for."""
        tree = self.proposer.tree.only(nodes)
        for response, draft, n in zip(running, self.proposer.draft(running, nodes), room, strict=True):
            fitting = [i for i, depth in enumerate(tree.depths) if depth <= n]
            response.propose([draft[i] for i in fitting], tree.only(fitting))

    def nodes(self, lengths: Sequence[int]) -> list[int]:
        """What to draft of the proposer's tree, for the most tokens per second; nothing where plain decoding has that.

        Nodes are taken by their chance of being kept, as many as pay: parents come before their children by themselves.

        Args:
            lengths: depth on offer for each running request.
        """
        assert self.costs is not None, "measured before the first step"
        tree, num_rows = self.proposer.tree, len(lengths)
        reaching = [sum(n >= depth for n in lengths) for depth in range(1 + tree.depth)]
        # While nothing is drafted the answer stays the same.
        question = num_rows, reaching, self.acceptance.num_noted, self.costs
        if question == self._chosen[0]:
            return self._chosen[1]
        self._chosen = question, self._worth(num_rows, reaching)
        return self._chosen[1]

    def _worth(self, num_rows: int, reaching: Sequence[int]) -> list[int]:
        """As ``nodes``, by the number of rows that a draft may reach each depth in."""
        assert self.costs is not None
        tree = self.proposer.tree
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
            making = cost(self.costs.drafting, num_rows * depth)
            seconds = (drafted_cost(self.costs, num_rows, num_tokens) + making) / gained
            if seconds < least:
                best, least = i + 1, seconds
        return sorted(order[:best])

    # ---- checkpoints ----

    def mark(self) -> dict[str, Any]:
        """``state`` from now on is that of this moment, which is returned."""
        self._marked = self._state()
        return self._marked

    def state(self) -> dict[str, Any]:
        """As of the last ``mark``: the proposer's tensors by name, and all plain values as ``REST``."""
        return self._state() if self._marked is None else self._marked

    def _state(self) -> dict[str, Any]:
        own = {"acceptance": self.acceptance.state(), "shortened": self._num_shortened}
        costs = None if self.costs is None else self.costs.model_dump()
        proposers = self.proposer.state()
        tensors = {name: value for name, value in proposers.items() if isinstance(value, Tensor)}
        plain = {name: value for name, value in proposers.items() if name not in tensors}
        return {**tensors, REST: {**own, "costs": costs, "drafter": plain}}

    def load(self, state: Mapping[str, Any]) -> None:
        rest = state[REST]
        self.acceptance.load(rest["acceptance"])
        self._num_shortened = rest["shortened"]
        if rest["costs"] is not None:
            self.costs = StepCosts(**rest["costs"])
        self.proposer.load({**tensors_of(state), **rest["drafter"]})
        self._marked, self._chosen = None, (None, [])
