"""vLLM's engine behind process and router, against transformers: tokens, log-probabilities, weights, versions."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quartet.config import UserError
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import FinishReason

TOLERANCE = 1e-4
LONG = 430


@pytest.fixture(scope="module")
def tied(start: Callable[..., Any]) -> Any:
    return start(2)


def test_logprobs_are_those_of_the_scaled_distribution(tied: Any) -> None:
    requests = [*tied.requests(6), *tied.requests(6, temperature=0.7), *tied.requests(2, temperature=0.0)]
    completions = tied.generate(requests)
    assert tied.error(completions, requests) < TOLERANCE
    assert all(c.finish_reason is FinishReason.LENGTH and len(c.token_ids) == 16 for c in completions)
    assert len({c.token_ids for c in completions[:6]}) > 1


def test_a_seed_decides_alone_and_among_others(tied: Any) -> None:
    among = tied.generate(tied.requests(8))
    alone = [tied.generate([request])[0] for request in tied.requests(8)]
    assert [c.token_ids for c in alone] == [c.token_ids for c in among]
    upper = tied.generate(tied.requests(1, seed=3 + (1 << 40)))[0]
    assert upper.token_ids != among[3].token_ids, "all 64 bits of a seed count"


def test_stop_tokens_stop_strings_and_the_contexts_end(tied: Any) -> None:
    (plain,) = tied.generate(tied.requests(1))
    stop = plain.token_ids[5]
    (stopped,) = tied.generate(tied.requests(1, stop_token_ids=(stop,)))
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == plain.token_ids[: plain.token_ids.index(stop) + 1]
    word = f"w{stop}"
    (cut,) = tied.generate(tied.requests(1, stop_strings=(word,)))
    assert cut.finish_reason is FinishReason.STOP_STRING and cut.token_ids == stopped.token_ids
    (filled,) = tied.generate(tied.requests(1, prompt=PROMPT_OF_500, max_new_tokens=64))
    assert filled.finish_reason is FinishReason.LENGTH and len(filled.token_ids) == 12


PROMPT_OF_500 = tuple(3 + i % 500 for i in range(500))


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
def test_twenty_updates_are_seen_by_every_engine(kind: str, tied: Any, start: Callable[..., Any]) -> None:
    """The same long prompt each time: what a cache keeps of old weights would show."""
    sides = tied if kind == "tied" else start(1, tied=False)
    last = None
    for _ in range(20):
        sides.change()
        requests = [*sides.requests(4), *sides.requests(4)]
        completions = sides.generate(requests)
        assert sides.error(completions, requests) < TOLERANCE
        assert {v for c in completions for v in c.versions} == {sides.version}
        assert completions[0].logprobs != last
        last = completions[0].logprobs


def test_what_runs_goes_on_under_new_weights(tied: Any) -> None:
    requests = tied.requests(6, max_new_tokens=LONG)
    submit_and_wait(tied, requests)
    before = tied.version
    tied.change()
    for completion in tied_collect(tied, requests):
        assert set(completion.versions) == {before, tied.version}
        begun = completion.versions.index(tied.version)
        assert completion.versions == (before,) * begun + (tied.version,) * (LONG - begun)
        ids = torch.tensor([[*requests[0].prompt_ids, *completion.token_ids]])
        with torch.no_grad():
            scores = torch.log_softmax(tied.model(ids).logits[0, len(requests[0].prompt_ids) - 1 : -1], -1)
        found = scores.gather(1, torch.tensor(completion.token_ids)[:, None])[begun:, 0]
        torch.testing.assert_close(found, torch.tensor(completion.logprobs)[begun:], atol=TOLERANCE, rtol=0)


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


def test_cancelled_requests_keep_their_tokens(tied: Any) -> None:
    requests = tied.requests(2, max_new_tokens=LONG)
    submit_and_wait(tied, requests)
    tied.router.cancel([requests[0].request_id])
    cancelled, whole = tied_collect(tied, requests)
    assert cancelled.finish_reason is FinishReason.CANCELLED and 0 < len(cancelled.token_ids) < LONG
    assert whole.finish_reason is FinishReason.LENGTH and len(whole.token_ids) == LONG
    (again,) = tied.generate(requests[:1])
    assert again.token_ids[: len(cancelled.token_ids)] == cancelled.token_ids


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(tied: Any, level: int) -> None:
    """On CPUs vLLM keeps its memory: calls, version and log-probabilities are what can be seen there."""
    requests = tied.requests(4, max_new_tokens=LONG)
    submit_and_wait(tied, requests)
    tied.router.pause()
    tied.router.sleep(level)
    tied.router.wake()
    tied.router.resume()
    if level == 2:
        tied.send()
    completions = tied_collect(tied, requests)
    assert tied.error(completions, requests) < TOLERANCE
    assert {c.versions[-1] for c in completions} == {tied.version}


def test_bad_requests_are_refused_before_they_start(tied: Any) -> None:
    for bad in ({"prompt": (1,) * 512}, {"prompt": (1, 512)}):
        with pytest.raises(UserError):
            tied.router.submit(tied.requests(1, **bad))
    assert len(tied.generate(tied.requests(1))) == 1


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
