"""The native engine: prompts once, every way to end, new weights under way, bad input."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from quartet.config import UserError
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Completion, FinishReason, GenerationError, Request

Make = Callable[..., Request]
RunAll = Callable[..., dict[str, Completion]]
Tolerances = dict[torch.dtype, tuple[float, float]]


def decode(ids: Sequence[int]) -> str:
    """Two letters per token, so that a stop string can end in the middle of one."""
    return "".join(chr(97 + i // 10) + chr(97 + i % 10) for i in ids)


def group_of(make: Make, name: str, size: int, length: int, **sampling: object) -> list[Request]:
    return [make(f"{name}.{i}", group=name, length=length, seed=i, **sampling) for i in range(size)]


@torch.no_grad()
def shift_weights(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("max_prefill_tokens", [24, 40, 64])
def test_long_requests_that_arrive_late_take_rows_among_short_ones(
    tiny: Any, make_request: Make, run_all: RunAll, max_prefill_tokens: int
) -> None:
    """Rows stand by length, so a short request must move to a row for which there is no slot yet."""
    requests = [make_request(f"r{i}", length=4 + i, seed=i, max_new_tokens=10) for i in range(40)]
    found = run_all(tiny.engine(max_running=64, max_prefill_tokens=max_prefill_tokens), requests)
    expected = run_all(tiny.engine(max_running=4), requests)
    assert {name: c.token_ids for name, c in found.items()} == {name: c.token_ids for name, c in expected.items()}


@pytest.mark.parametrize("max_running", [2, 5, 64])
def test_each_prompt_is_prefilled_once(tiny: Any, make_request: Make, run_all: RunAll, max_running: int) -> None:
    """Also when a group's members are admitted many steps apart."""
    lengths = (9, 3, 14)
    requests = [r for n in lengths for r in group_of(make_request, f"g{n}", 6, n, max_new_tokens=5)]
    engine = tiny.engine(max_running=max_running)
    done = run_all(engine, requests)
    stats = engine.stats()
    assert stats.prompt_tokens_prefilled == sum(lengths)
    assert stats.generated_tokens == sum(len(c.token_ids) for c in done.values()) == 18 * 5
    assert (stats.num_running, stats.num_waiting, len(done)) == (0, 0, 18)


def test_the_bytes_of_slots_and_prompts_are_counted(tiny: Any, make_request: Make, run_all: RunAll) -> None:
    engine = tiny.engine(max_running=1)
    run_all(engine, group_of(make_request, "g", 2, 20, max_new_tokens=2))
    stats = engine.stats()
    # Two layers, keys and values, 2 heads of size 8: a slot of 64 places, a prompt of 20; and its last hidden state.
    assert stats.cached_tokens == 64 + 20
    assert stats.cache_bytes == 4 * (2 * 2 * 2 * 8 * (64 + 20) + 32)


@pytest.mark.parametrize(("start", "end"), [(11, 13), (12, 16), (13, 17)], ids=["across", "whole tokens", "ragged"])
def test_stop_strings_may_span_tokens(tiny: Any, make_request: Make, run_all: RunAll, start: int, end: int) -> None:
    """Characters ``start`` to ``end`` of the text that would come; a neighbour is not touched."""
    engine = tiny.engine(decode=lambda _, ids: decode(ids))
    free = run_all(
        engine,
        [make_request("r", seed=4, max_new_tokens=24), make_request("other", seed=5, max_new_tokens=24)],
    )
    text = decode(free["r"].token_ids)
    stop = text[start:end]
    place = text.find(stop)
    done = run_all(
        engine,
        [
            make_request("r", seed=4, max_new_tokens=24, stop_strings=("zzz", stop)),
            make_request("other", seed=5, max_new_tokens=24),
        ],
    )
    assert done["r"].finish_reason is FinishReason.STOP_STRING
    assert done["r"].text_end == place
    # The token that completes the stop string is the last.
    assert done["r"].token_ids == free["r"].token_ids[: (place + len(stop) + 1) // 2]
    assert done["other"] == free["other"]


def test_generation_ends_with_the_models_context(tiny: Any, make_request: Make, run_all: RunAll) -> None:
    """A context of 160: 150 prompt tokens leave ten."""
    done = run_all(tiny.engine(), [make_request("r", length=150, max_new_tokens=500)])["r"]
    assert (len(done.token_ids), done.finish_reason) == (10, FinishReason.LENGTH)


# ---- new weights ----


def test_new_weights_in_the_middle_carry_their_version_and_their_numbers(
    family: Any, make_request: Make, tolerances: Tolerances
) -> None:
    """Each token's log-probability is what a full forward with the weights of its version gives.

    Running requests therefore cannot keep keys and values of the old weights, nor waiting ones the prompt's.
    """
    twins = [family.twin, copy.deepcopy(family.twin)]
    shift_weights(twins[1], seed=9)
    engine = family.engine(max_running=3, version=4)
    requests = group_of(make_request, "g", 5, 6, max_new_tokens=9)
    engine.submit(requests)
    done: dict[str, Completion] = {}
    for _ in range(5):
        done |= {c.request_id: c for c in engine.step()}
    shift_weights(family.packed.model, seed=9)
    engine.update_weights(None, 5)
    while engine.has_work:
        done |= {c.request_id: c for c in engine.step()}
    assert done["g.0"].versions == (4,) * 5 + (5,) * 4
    assert done["g.4"].versions == (5,) * 9
    atol, rtol = tolerances[torch.float32]
    for request in requests:
        ours = done[request.request_id]
        for version, twin in zip((4, 5), twins, strict=True):
            family.twin = twin
            expected = family.logprobs(request.prompt_ids, ours.token_ids)
            mine = torch.tensor([v == version for v in ours.versions])
            torch.testing.assert_close(torch.tensor(ours.logprobs)[mine], expected[mine], atol=atol, rtol=rtol)
    stats = engine.stats()
    assert stats.policy_version == 5
    assert stats.prompt_tokens_prefilled == 12  # again for the two that waited


def own_engine(tiny: Any) -> NativeEngine:
    tiny.packed.release()
    return NativeEngine(PackedCausalLM(copy.deepcopy(tiny.packed.model)), owns_weights=True, version=0)


def test_wrong_weights_leave_the_engine_as_it_was(tiny: Any, make_request: Make, run_all: RunAll) -> None:
    engine = own_engine(tiny)
    request = make_request("r", max_new_tokens=6)
    old = run_all(engine, [request])
    pairs = list(tiny.twin.named_parameters())
    pairs[0] = (pairs[0][0], torch.zeros(2, 2))
    with pytest.raises(UserError, match="do not fit"):
        engine.update_weights(pairs, 1)
    assert engine.stats().policy_version == 0
    assert run_all(engine, [request]) == old


# ---- room for others ----


def test_the_cache_is_given_back_and_requests_go_on(tiny: Any, make_request: Make, run_all: RunAll) -> None:
    requests = group_of(make_request, "g", 6, 7, max_new_tokens=10)
    expected = run_all(tiny.engine(), requests)
    engine = tiny.engine(max_running=4)
    engine.submit(requests)
    for _ in range(4):
        engine.step()
    assert engine.release_cache() > 0 == engine.stats().cache_bytes
    assert engine.release_cache() == 0
    done = run_all(engine)
    assert {n: c.token_ids for n, c in done.items()} == {n: c.token_ids for n, c in expected.items()}


# ---- bad input ----


def test_bad_requests_are_refused_whole(tiny: Any, make_request: Make) -> None:
    engine = tiny.engine()
    good = make_request("good")
    cases = {
        "no room": make_request("long", length=160),
        "does not have": make_request("alien", prompt=(1, 97)),
        "stop strings need": make_request("text", stop_strings=("x",)),
        "in use": make_request("good"),
        "same prompt": make_request("other", group="good", prompt=(1, 2)),
    }
    for problem, bad in cases.items():
        with pytest.raises(UserError, match=problem):
            engine.submit([good, bad])
        assert not engine.has_work
    with pytest.raises(UserError) as error:
        engine.submit([cases["no room"]])
    assert "160 tokens, a context of 160" in error.value.found
    with pytest.raises(UserError, match="does not have"):
        engine.submit([make_request("negative", prompt=(-1,))])


def test_non_finite_logits_name_the_request_and_spare_the_others(
    tiny: Any, make_request: Make, run_all: RunAll
) -> None:
    """Only requests that meet a broken embedding fail, and their slots leave nothing behind."""
    others = [make_request(f"r{i}", prompt=(5 + i, 6, 7), temperature=0.0, max_new_tokens=8) for i in range(3)]
    expected = run_all(tiny.engine(), others)
    assert all(50 not in c.token_ids for c in expected.values())
    with torch.no_grad():
        tiny.packed.model.get_input_embeddings().weight[50] = float("nan")
    engine = tiny.engine()
    engine.submit([*others[:1], make_request("broken", prompt=(1, 50, 2)), *others[1:]])
    with pytest.raises(GenerationError, match="'broken'") as error:
        engine.step()
    assert error.value.request_ids == ("broken",)
    assert run_all(engine) == expected
    assert run_all(engine, others) == expected
