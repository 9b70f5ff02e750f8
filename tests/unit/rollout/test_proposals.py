"""Several tokens per row in one step: proposals that hold are kept, those that do not leave nothing behind."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from quartet.models.packed_model import PackedCausalLM
from quartet.rollout import scheduler
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Completion, FinishReason, Request
from quartet.rollout.scheduler import EngineRequest

Make = Callable[..., Request]
RunAll = Callable[..., dict[str, Completion]]


def requests_of(make_request: Make) -> list[Request]:
    """Three groups of three, of which the last responses end with a stop token."""
    return [
        make_request(
            f"{g}-{m}", group=f"g{g}", length=3 + 13 * g, max_new_tokens=12 + 9 * m, seed=10 * g + m,
            stop_token_ids=tuple(range(0, 97, 9)) if m == 2 else (), temperature=0.0 if m == 0 else 0.8,
        )
        for g in range(3)
        for m in range(3)
    ]  # fmt: skip


def propose(response: EngineRequest, tokens: list[int]) -> None:
    """As a drafter does: the last token that a response may get is sampled behind what is proposed."""
    response.propose(tokens[: response.max_tokens - len(response.token_ids) - 1])


def run_with_proposals(
    engine: NativeEngine, asked: list[Request], known: Mapping[str, Completion], wrong: float
) -> dict[str, Completion]:
    """Proposes, to each request in each step, 0 to 4 of the tokens that are known to follow, some of them falsified."""
    draw = random.Random(0)
    engine.submit(asked)
    done: dict[str, Completion] = {}
    while engine.has_work:
        for response in engine.running:
            name, have = response.request.request_id, len(response.token_ids)
            follow = [*known[name].token_ids[have : have + draw.randint(0, 4)]]
            propose(response, [t if draw.random() >= wrong else (t + 1) % 97 for t in follow])
        done |= {c.request_id: c for c in engine.step()}
        assert engine.stats().cached_tokens <= (engine._scheduler.cache_tokens or math.inf)
    return done


@pytest.mark.parametrize("wrong", [0.0, 0.4], ids=["true", "partly false"])
@pytest.mark.parametrize("shares", [False, True], ids=["copied", "read in place"])
def test_completions_are_those_of_one_token_at_a_time(
    family: Any,
    shares: bool,
    wrong: float,
    make_request: Make,
    run_all: RunAll,
    tolerances: dict[torch.dtype, tuple[float, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "MIN_SHARED_TOKENS", 20 if shares else 10**9)
    asked = requests_of(make_request)
    plain = NativeEngine(family.packed, max_running=7)
    expected = run_all(plain, asked)
    assert {c.finish_reason for c in expected.values()} == {FinishReason.LENGTH, FinishReason.STOP}
    engine = NativeEngine(family.packed, max_running=7)
    found = run_with_proposals(engine, asked, expected, wrong)
    atol, rtol = tolerances[torch.float32]
    for name, theirs in expected.items():
        ours = found[name]
        assert (ours.token_ids, ours.versions, ours.finish_reason) == (
            theirs.token_ids, theirs.versions, theirs.finish_reason,
        )  # fmt: skip
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=atol, rtol=rtol)
    assert engine.stats().generated_tokens == plain.stats().generated_tokens
    assert engine.stats().num_steps < (0.9 if wrong else 0.6) * plain.stats().num_steps


def test_exact_numerics_give_the_same_bits(family: Any, make_request: Make, run_all: RunAll) -> None:
    packed = PackedCausalLM(family.packed.release(), numerics="exact")
    asked = requests_of(make_request)
    expected = run_all(NativeEngine(packed, max_running=7), asked)
    assert run_with_proposals(NativeEngine(packed, max_running=7), asked, expected, 0.3) == expected


def test_the_cache_keeps_to_its_limit_and_the_response_to_its_length(
    tiny: Any, make_request: Make, run_all: RunAll
) -> None:
    asked = [make_request(f"r{i}", length=20, max_new_tokens=30, seed=i) for i in range(4)]
    expected = run_all(NativeEngine(tiny.packed), asked)
    engine = NativeEngine(tiny.packed, cache_tokens=256)
    assert run_with_proposals(engine, asked, expected, 0.0).keys() == expected.keys()


def test_rejected_tokens_leave_the_slot(tiny: Any, make_request: Make) -> None:
    engine = NativeEngine(tiny.packed)
    engine.submit([make_request("r", length=4, temperature=0.0, max_new_tokens=30)])
    engine.step()
    (response,) = engine.running
    propose(response, [(response.token_ids[-1] + 1) % 97] * 5)
    engine.step()
    assert len(response.token_ids) < 2 + 5, "the tokens were not wrong"
    stored = engine._cache.keys[0][response.row]
    assert bool(stored[:, : response.num_stored].any(-1).all())
    assert not bool(stored[:, response.num_stored :].any())
