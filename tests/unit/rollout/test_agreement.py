"""Sampler and trainer agree: three chained equalities, in fp32 on one thread.

Batch invariance: a request's tokens and log-probabilities have the same bits alone and among others.
Trainer forward = engine prefill. Engine decode = engine prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from quartet.batch.ragged import RaggedBatch
from quartet.models.packing import pack
from quartet.rollout.protocol import Completion, Request

Tolerances = dict[torch.dtype, tuple[float, float]]


def mixed_requests(make_request: Callable[..., Request]) -> list[Request]:
    """64 requests: groups of four, prompts of 1 to 31 tokens, all kinds of sampling."""
    options = [
        {},
        {"temperature": 0.0},
        {"temperature": 1.4, "top_k": 12},
        {"temperature": 0.8, "top_p": 0.85},
    ]
    return [
        make_request(
            f"r{i}", group=f"g{i // 4}", length=1 + 2 * (i // 4), seed=1000 + i,
            max_new_tokens=1 + (7 * i) % 19, stop_token_ids=(3, 11), **options[i % 4],
        )
        for i in range(64)
    ]  # fmt: skip


def test_64_staggered_requests_yield_what_each_yields_alone(
    build_tiny: Callable[..., Any],
    make_request: Callable[..., Request],
    run_all: Callable[..., dict[str, Completion]],
) -> None:
    """Batch invariance to the bit: staggered arrival, fewer rows than requests, slots moved and reused."""
    requests = mixed_requests(make_request)
    tiny = build_tiny("llama")
    engine = tiny.engine(max_running=24, max_prefill_tokens=40)
    together: dict[str, Completion] = {}
    for wave in range(0, 64, 6):
        engine.submit(requests[wave : wave + 6])
        together |= {c.request_id: c for c in engine.step()}
    together |= run_all(engine)
    assert engine.stats().peak_running == 24
    alone_engine = tiny.engine()
    for request in requests:
        alone = run_all(alone_engine, [request])[request.request_id]
        assert together[request.request_id] == alone
    assert len(together) == 64
    assert {c.finish_reason for c in together.values()} == {"stop", "length"}


def test_gemma2_is_batch_invariant_too(
    build_tiny: Callable[..., Any],
    make_request: Callable[..., Request],
    run_all: Callable[..., dict[str, Completion]],
) -> None:
    requests = mixed_requests(make_request)[:24]
    tiny = build_tiny("gemma2")
    together = run_all(tiny.engine(), requests)
    alone_engine = tiny.engine()
    for request in requests:
        alone = run_all(alone_engine, [request])[request.request_id]
        assert together[request.request_id].token_ids == alone.token_ids


def trainer_logprobs(tiny: Any, batch: RaggedBatch, temperature: float) -> list[list[float]]:
    """Of every response token, by the training forward over one pack of the whole batch."""
    layout = pack(batch)
    mask = torch.zeros(batch.num_tokens)
    for s in range(len(batch)):
        start, end = batch.leaf_span(s)
        mask[start:end] = 1
    rows, labels, targets = layout.predicted(mask)
    with torch.no_grad():
        hidden = tiny.packed.hidden(layout.input_ids, layout.position_ids, layout.attention())
        logprobs, _ = tiny.packed.token_logprobs(hidden[rows], labels, temperature=temperature)
    column = layout.scatter(logprobs, targets)
    spans = [batch.leaf_span(s) for s in range(len(batch))]
    return [column[start:end].tolist() for start, end in spans]


def grouped(requests: Sequence[Request], done: dict[str, Completion]) -> RaggedBatch:
    groups: dict[str, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.group, []).append(request)
    return RaggedBatch.from_groups(
        [members[0].prompt_ids for members in groups.values()],
        [[done[r.request_id].token_ids for r in members] for members in groups.values()],
        [r.request_id for members in groups.values() for r in members],
    )


def test_engine_equals_the_packed_training_forward(
    family: Any,
    make_request: Callable[..., Request],
    run_all: Callable[..., dict[str, Completion]],
    tolerances: Tolerances,
) -> None:
    """The chain's ends: log-probabilities written while decoding against those the trainer computes."""
    temperature = 0.8
    requests = [
        make_request(
            f"r{i}",
            group=f"g{i // 4}",
            length=2 + 5 * (i // 4),
            seed=i,
            temperature=temperature,
            max_new_tokens=5 + i,
        )
        for i in range(20)
    ]
    done = run_all(family.engine(max_running=7), requests)
    trainer = trainer_logprobs(family, grouped(requests, done), temperature)
    atol, rtol = tolerances[torch.float32]
    for request, theirs in zip(requests, trainer, strict=True):
        ours = done[request.request_id].logprobs
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), atol=atol, rtol=rtol)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_prefill_has_the_trainers_bits(
    name: str,
    build_tiny: Callable[..., Any],
    make_request: Callable[..., Request],
    run_all: Callable[..., dict[str, Completion]],
) -> None:
    """First tokens come from the prefill, which runs the trainer's own fused kernel over the same rows.

    Soft-capped attention (Gemma-2) runs as plain products whose bits depend on the sequence's length.
    """
    family = build_tiny(name)
    requests = [
        make_request(f"r{i}", group=f"g{i // 4}", length=2 + 5 * (i // 4), seed=i, max_new_tokens=1) for i in range(20)
    ]
    done = run_all(family.engine(), requests)
    trainer = trainer_logprobs(family, grouped(requests, done), 1.0)
    assert [list(done[r.request_id].logprobs) for r in requests] == trainer


def test_decode_equals_prefill(
    family: Any,
    make_request: Callable[..., Request],
    run_all: Callable[..., dict[str, Completion]],
    tolerances: Tolerances,
) -> None:
    """Every decoded token again as the first token after a longer prompt."""
    start = make_request("whole", length=6, temperature=0.0, max_new_tokens=24)
    engine = family.engine()
    whole = run_all(engine, [start])["whole"]
    again = [
        make_request(f"r{t}", prompt=start.prompt_ids + whole.token_ids[:t], temperature=0.0, max_new_tokens=1)
        for t in range(24)
    ]
    done = run_all(engine, again)
    assert tuple(done[f"r{t}"].token_ids[0] for t in range(24)) == whole.token_ids
    atol, rtol = tolerances[torch.float32]
    prefilled = torch.tensor([done[f"r{t}"].logprobs[0] for t in range(24)])
    torch.testing.assert_close(torch.tensor(whole.logprobs), prefilled, atol=atol, rtol=rtol)
