"""vLLM's engine behind process and router, against transformers: tokens, log-probabilities, weights, versions."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.engine import NativeEngine

TOLERANCE = 1e-4
LONG = 430


@pytest.fixture(scope="module")
def tied(start: Callable[..., Any]) -> Any:
    return start(2)


def test_a_seed_decides_alone_and_among_others(tied: Any) -> None:
    among = tied.generate(tied.requests(8))
    alone = [tied.generate([request])[0] for request in tied.requests(8)]
    assert [c.token_ids for c in alone] == [c.token_ids for c in among]
    upper = tied.generate(tied.requests(1, seed=3 + (1 << 40)))[0]
    assert upper.token_ids != among[3].token_ids, "all 64 bits of a seed count"


def test_seeds_draw_what_the_native_engine_draws(tied: Any) -> None:
    """All but a draw that falls within rounding of the boundary between two tokens."""
    native = NativeEngine(PackedCausalLM(copy.deepcopy(tied.model)))
    options: list[dict[str, Any]] = [
        {}, {"temperature": 0.004}, {"temperature": 3.0}, {"temperature": 0.0}, {"top_p": 0.7},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.9}, {"min_p": 0.1, "top_p": 0.8}, {"seed": 3 + (1 << 40)},
        {"draw": "gumbel"}, {"draw": "gumbel", "temperature": 0.7, "top_p": 0.8},
    ]  # fmt: skip
    requests = [request for each in options for request in tied.requests(6, **each)]
    native.submit(requests)
    drawn: dict[str, tuple[int, ...]] = {}
    while native.has_work:
        drawn |= {completion.request_id: completion.token_ids for completion in native.step()}
    others = [c for c in tied.generate(requests) if c.token_ids != drawn[c.request_id]]
    assert len(others) <= 1


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_updates_are_seen_by_every_engine(kind: str, tied: Any, start: Callable[..., Any]) -> None:
    """The same long prompt each time: what a cache keeps of old weights would show."""
    sides = tied if kind == "tied" else start(1, tied=False)
    last = None
    for _ in range(6):
        sides.change()
        requests = [*sides.requests(4), *sides.requests(4)]
        completions = sides.generate(requests)
        assert sides.error(completions, requests) < TOLERANCE
        assert {v for c in completions for v in c.versions} == {sides.version}
        assert completions[0].logprobs != last
        last = completions[0].logprobs


def submit_and_wait(sides: Any, requests: Any) -> None:
    """Until an engine is in the middle of it."""
    sides.router.submit(requests)
    ids, until = [r.request_id for r in requests], time.monotonic() + 60
    while not any(len(g.token_ids) > 2 for g in sides.router.generated(ids).values()):
        assert time.monotonic() < until, f"never seen in the middle: {sides.router.stats()}"
        time.sleep(0.01)


def tied_collect(sides: Any, requests: Any) -> Any:
    found: dict[str, Any] = {}
    while len(found) < len(requests):
        found |= {c.request_id: c for c in sides.router.completed(1.0)}
    return [found[r.request_id] for r in requests]


def test_a_killed_engine_loses_nothing(tied: Any) -> None:
    requests = [r for _ in range(4) for r in tied.requests(4, max_new_tokens=LONG)]
    submit_and_wait(tied, requests)
    os.kill(tied.engines[0]._child.pid, signal.SIGKILL)
    completions = tied_collect(tied, requests)
    assert tied.error(completions, requests) < TOLERANCE
    assert tied.router.restarts == 1 and tied.router.rerouted > 0
    while not tied.engines[0].is_ready():
        time.sleep(0.2)
    tied.change()
    requests = [r for _ in range(4) for r in tied.requests(4)]
    assert tied.error(tied.generate(requests), requests) < TOLERANCE
