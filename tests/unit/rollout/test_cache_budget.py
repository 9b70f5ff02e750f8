"""``cache_tokens``: never exceeded, nobody starves, and results do not depend on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quartet.config import UserError
from quartet.rollout import scheduler
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Completion, Request

Make = Callable[..., Request]
RunAll = Callable[..., dict[str, Completion]]


def stored(engine: NativeEngine) -> int:
    """Places of all tensors that exist, counted from the tensors."""
    slots = max((x.shape[0] * x.shape[2] for x in engine._cache.keys.values()), default=0)
    prefixes = engine._scheduler.prefixes
    blocks = list(prefixes._blocks)
    return slots + sum(max((x.shape[1] for x in b.keys.values()), default=0) for b in blocks)


def random_requests(make: Make, rng: random.Random, count: int) -> list[Request]:
    requests = []
    for g in range(count):
        length, size = rng.choice((1, 5, 17, 40, 70)), rng.choice((1, 1, 2, 6))
        for i in range(size):
            new = rng.randrange(1, 40)
            requests.append(make(f"{g}.{i}", group=f"g{g}", length=length, seed=rng.randrange(99), max_new_tokens=new))
    return requests


@pytest.mark.parametrize("seed", range(4))
def test_the_budget_is_never_exceeded(
    tiny: Any, make_request: Make, run_all: RunAll, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Random groups, arrivals, cancellations and new weights; after every step all invariants."""
    monkeypatch.setattr(scheduler, "MIN_SHARED_TOKENS", 40)
    rng = random.Random(seed)
    requests = random_requests(make_request, rng, 14)
    expected = run_all(tiny.engine(), requests)
    limit = rng.choice((260, 400, 700))
    engine = tiny.engine(max_running=rng.choice((3, 8)), max_prefill_tokens=rng.choice((16, 64)), cache_tokens=limit)
    waiting, done, cancelled, largest = list(requests), {}, set(), 0
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.3:
            group = [r for r in waiting if r.group == waiting[0].group]
            engine.submit(group)
            waiting = waiting[len(group) :]
        if rng.random() < 0.03:
            victim = rng.choice(requests).request_id
            cancelled.add(victim)
            engine.cancel([victim])
        if rng.random() < 0.03:
            engine.update_weights(None, 0)
        for completion in engine.step():
            done[completion.request_id] = completion
        largest = max(largest, engine.stats().cached_tokens)
        assert stored(engine) <= engine.stats().cached_tokens <= limit
    assert largest > limit / 2
    for name in expected.keys() - cancelled:
        assert done[name].token_ids == expected[name].token_ids


def test_reused_prompts_give_way_to_running_requests(tiny: Any, make_request: Make, run_all: RunAll) -> None:
    engine = tiny.engine(cache_tokens=200)
    for i in range(12):
        run_all(engine, [make_request(f"r{i}", length=20 + i, max_new_tokens=4)])
    assert engine.stats().cached_tokens <= 200
    before = engine.stats().prompt_tokens_prefilled
    run_all(engine, [make_request("r11", length=31, max_new_tokens=4)])
    assert engine.stats().prompt_tokens_prefilled == before
    run_all(engine, [make_request("r0", length=20, max_new_tokens=4)])
    assert engine.stats().prompt_tokens_prefilled == before + 20


def test_a_broken_request_leaves_the_budget_as_it_was(tiny: Any, make_request: Make, run_all: RunAll) -> None:
    with torch.no_grad():
        tiny.packed.model.get_input_embeddings().weight[50] = float("nan")
    engine = tiny.engine(cache_tokens=120)
    engine.submit([make_request("broken", prompt=(50,) * 20, max_new_tokens=5)])
    with pytest.raises(UserError, match="not finite"):
        engine.step()
    assert engine._scheduler.prefixes.num_tokens == 0
    good = make_request("good", prompt=(5, 6, 7), temperature=0.0, max_new_tokens=5)
    assert len(run_all(engine, [good])["good"].token_ids) == 5
