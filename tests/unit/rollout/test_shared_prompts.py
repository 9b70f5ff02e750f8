"""Prompts read from their block by all members, reused by later requests, filled in pieces beside decoding.

What holds to the bit (fp32, one thread): a request's tokens and log-probabilities whatever *other* groups run, and
however many of its own group do. What holds up to rounding: reading a prompt in place against a copy of it, pieces
against a whole prompt, prompt and tokens computed again against decoded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from quartet.rollout import scheduler
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Completion, FinishReason, Request

Make = Callable[..., Request]
RunAll = Callable[..., dict[str, Completion]]
Tolerances = dict[torch.dtype, tuple[float, float]]


@pytest.fixture(autouse=True)
def share_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of any length are shared by groups of two and more."""
    monkeypatch.setattr(scheduler, "MIN_SHARED_TOKENS", 1)


def group_of(make: Make, name: str, size: int, length: int, **sampling: object) -> list[Request]:
    return [make(f"{name}.{i}", group=name, length=length, seed=i, **sampling) for i in range(size)]


def mixed(make: Make) -> list[Request]:
    """Three groups and two loners; prompts of 1 to 50 tokens, responses of 3 to 24."""
    groups = [r for n in (1, 21, 50) for r in group_of(make, f"g{n}", 5, n)]
    loners = [make(f"s{n}", length=n, seed=n) for n in (4, 33)]
    requests = [*groups[:7], *loners, *groups[7:]]
    return [make(r.request_id, group=r.group, prompt=r.prompt_ids, seed=r.sampling.seed, max_new_tokens=3 + 5 * i % 22)
            for i, r in enumerate(requests)]  # fmt: skip


def assert_right(tiny: Any, requests: Sequence[Request], done: dict[str, Completion], tolerances: Tolerances) -> None:
    """Every log-probability is that of one full forward of the unmodified model."""
    atol, rtol = tolerances[torch.float32]
    for request in requests:
        ours = done[request.request_id]
        expected = tiny.logprobs(request.prompt_ids, ours.token_ids)
        torch.testing.assert_close(torch.tensor(ours.logprobs), expected, atol=atol, rtol=rtol)


def test_shared_and_copied_prompts_give_the_same_tokens(
    family: Any, make_request: Make, run_all: RunAll, tolerances: Tolerances, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = mixed(make_request)
    shared = run_all(family.engine(max_running=6), requests)
    assert_right(family, requests, shared, tolerances)
    monkeypatch.setattr(scheduler, "MIN_SHARED_TOKENS", 10**9)
    copied = run_all(family.engine(max_running=6), requests)
    assert {n: c.token_ids for n, c in shared.items()} == {n: c.token_ids for n, c in copied.items()}


def test_other_requests_in_the_batch_change_no_bit(tiny: Any, make_request: Make, run_all: RunAll) -> None:
    """Each group on its own, with its members admitted a few at a time, against all groups at once."""
    requests = mixed(make_request)
    together = run_all(tiny.engine(), requests)
    for group in {r.group for r in requests}:
        members = [r for r in requests if r.group == group]
        for max_running in (2, 64):
            alone = run_all(tiny.engine(max_running=max_running), members)
            assert alone == {r.request_id: together[r.request_id] for r in members}


def test_a_shared_prompt_is_computed_and_stored_once(tiny: Any, make_request: Make, run_all: RunAll) -> None:
    engine = tiny.engine()
    run_all(engine, group_of(make_request, "g", 16, 100, max_new_tokens=9))
    stats = engine.stats()
    assert stats.prompt_tokens_prefilled == 100
    # Slots for 9 new tokens each, rounded up to 64.
    assert stats.cached_tokens == 100 + 16 * 64
    # Two layers, keys and values, 2 heads of size 8; and the prompt's last hidden state.
    assert stats.cache_bytes == 4 * (2 * 2 * 2 * 8 * stats.cached_tokens + 32)


def test_prompts_are_reused_until_the_weights_change(tiny: Any, make_request: Make, run_all: RunAll) -> None:
    engine = tiny.engine()
    first = run_all(engine, group_of(make_request, "g", 3, 40, max_new_tokens=6))
    requests = group_of(make_request, "g", 3, 40, max_new_tokens=6)
    assert run_all(engine, requests) == first
    assert engine.stats().prompt_tokens_prefilled == 40
    with torch.no_grad():
        for parameter in tiny.packed.model.parameters():
            parameter.mul_(1.3)
    engine.update_weights(None, 1)
    assert engine.stats().cached_tokens == engine._cache.num_tokens
    second = run_all(engine, requests)
    assert engine.stats().prompt_tokens_prefilled == 80
    fresh = run_all(NativeEngine(tiny.packed, version=1), requests)
    assert second == fresh
    assert second["g.0"].logprobs != first["g.0"].logprobs


def test_idle_prompts_do_not_pile_up(tiny: Any, make_request: Make, run_all: RunAll) -> None:
    """Without ``cache_tokens`` idle prompts hold at most as many tokens as the slots."""
    engine = tiny.engine(max_running=4)
    for i in range(40):
        run_all(engine, [make_request(f"r{i}", length=20 + i, max_new_tokens=4)])
    assert 0 < engine._scheduler.prefixes.idle_tokens <= engine._cache.num_tokens + 60


# ---- pieces ----


@pytest.mark.parametrize("budget", [7, 64])
def test_prompts_in_pieces_equal_whole_ones(
    family: Any, make_request: Make, run_all: RunAll, tolerances: Tolerances, budget: int
) -> None:
    requests = mixed(make_request)
    whole = run_all(family.engine(max_running=6), requests)
    engine = family.engine(max_running=6, max_prefill_tokens=budget)
    pieces = run_all(engine, requests)
    assert_right(family, requests, pieces, tolerances)
    assert {n: c.token_ids for n, c in pieces.items()} == {n: c.token_ids for n, c in whole.items()}
    assert engine.stats().prompt_tokens_prefilled == sum({r.group: len(r.prompt_ids) for r in requests}.values())


def test_decoding_goes_on_beside_a_long_prompt(tiny: Any, make_request: Make) -> None:
    engine = tiny.engine(max_prefill_tokens=10)
    engine.submit([make_request("short", length=5, max_new_tokens=30)])
    engine.step()
    engine.submit([make_request("long", length=45, max_new_tokens=30)])
    seen = []
    for _ in range(6):
        before = engine.stats()
        engine.step()
        after = engine.stats()
        prefilled = after.prompt_tokens_prefilled - before.prompt_tokens_prefilled
        seen.append((prefilled, after.generated_tokens - before.generated_tokens))
    assert seen == [(10, 1)] * 4 + [(5, 2), (0, 2)]


def interrupted(engine: NativeEngine, requests: Sequence[Request], steps: int, act: Callable[[], None]) -> Any:
    engine.submit(requests)
    done = {c.request_id: c for _ in range(steps) for c in engine.step()}
    act()
    while engine.has_work:
        done |= {c.request_id: c for c in engine.step()}
    return done


@pytest.mark.parametrize("steps", range(9))
@pytest.mark.parametrize("how", ["update", "release"])
def test_new_weights_and_a_lost_cache_at_any_moment(
    tiny: Any, make_request: Make, run_all: RunAll, tolerances: Tolerances, steps: int, how: str
) -> None:
    """In the middle of a prompt, right after its last piece, between first token and row, while decoding."""
    requests = [
        *group_of(make_request, "g", 3, 25, max_new_tokens=7),
        make_request("s", length=33, seed=5, max_new_tokens=7),
    ]
    engine = tiny.engine(max_running=3, max_prefill_tokens=10)

    def act() -> None:
        if how == "update":
            engine.update_weights(None, 0)
        else:
            engine.release_cache()
        assert engine.stats().num_running == 0

    done = interrupted(engine, requests, steps, act)
    assert_right(tiny, requests, done, tolerances)
    expected = run_all(tiny.engine(), requests)
    assert {n: c.token_ids for n, c in done.items()} == {n: c.token_ids for n, c in expected.items()}


@pytest.mark.parametrize("steps", range(9))
def test_cancelling_at_any_moment_spares_the_others(tiny: Any, make_request: Make, run_all: RunAll, steps: int) -> None:
    requests = [
        *group_of(make_request, "g", 3, 25, max_new_tokens=7),
        make_request("s", length=33, seed=5, max_new_tokens=7),
        make_request("t", length=3, seed=6, max_new_tokens=7),
    ]
    expected = run_all(tiny.engine(max_prefill_tokens=10), requests)
    for victims in (["g.0"], ["g.0", "g.1", "g.2"], ["s"], ["g.2", "t"]):
        engine = tiny.engine(max_running=3, max_prefill_tokens=10)
        done = interrupted(engine, requests, steps, lambda e=engine, v=victims: e.cancel(v))
        assert len(done) == len(requests)
        for name, completion in done.items():
            if completion.finish_reason is FinishReason.CANCELLED:
                assert name in victims
                assert completion.token_ids == expected[name].token_ids[: len(completion.token_ids)]
            else:
                assert completion == expected[name]
        prefixes = engine._scheduler.prefixes
        assert prefixes.num_tokens == prefixes.idle_tokens
        assert engine.stats().num_running == engine.stats().num_waiting == 0
