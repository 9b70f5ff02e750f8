"""What engine steps cost by the number of their tokens: measured once, then numbers like any other state of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from quartet.extras.speculation.config import StepCosts
from quartet.rollout.drafter import DraftTree
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Request

if TYPE_CHECKING:
    from quartet.extras.speculation.speculator import Proposer

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
    like = replace(like, prompt_ids=like.prompt_ids[:room], content_digests=())
    begin = partial(_begin, engine, like, most_new)
    seconds = partial(_seconds, time.thread_time if engine.packed.device.type == "cpu" else time.perf_counter)

    def draft(nodes: Sequence[int]) -> None:
        with computing():
            proposer.draft(engine.running, nodes)

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
        ids = begin(num_rows)
        proposed = {request_id: [0] * length for request_id in ids}
        drafted.append(seconds(partial(engine.step, proposed)))
    engine.cancel([response.request.request_id for response in engine.running])
    growing = [tuple(accumulate(found, max)) for found in (plain, drafted, drafting)]
    return StepCosts(plain=growing[0], drafted=growing[1], drafting=growing[2])


def _max_waits(num_rows: int) -> int:
    """Steps in which some of so many requests still wait for their prompts."""
    return num_rows // 8


def _most_tokens(tree: DraftTree, max_running: int) -> int:
    """That a request may get while costs are measured, and while others wait for their prompts."""
    return (1 + _REPEATS) * (1 + max(len(tree), _DRAFT)) + 2 + _max_waits(max_running)


def _begin(engine: NativeEngine, like: Request, most: int, num_rows: int) -> list[str]:
    """Has so many requests run, and no others."""
    engine.cancel([response.request.request_id for response in engine.running])
    ids = [str(row) for row in range(num_rows)]
    sampling = replace(like.sampling, max_new_tokens=most, stop_token_ids=(), stop_strings=())
    for i in ids:
        prompt = (*like.prompt_ids[1:], int(i) % engine.packed.vocab_size)
        engine.submit(
            [replace(like, request_id=i, group=i, prompt_ids=prompt, sampling=replace(sampling, seed=int(i)))]
        )
    for _ in range(1 + _max_waits(num_rows)):
        if len(engine.running) < num_rows:
            engine.step()
    return ids


def _seconds(clock: Callable[[], float], work: Callable[[], object]) -> float:
    """The least of some: whatever disturbs one makes it longer."""
    work()
    found = []
    for _ in range(_REPEATS):
        began = clock()
        work()
        found.append(clock() - began)
    return min(found)
