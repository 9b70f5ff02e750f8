"""``generate``: several streams on one engine, early exits, and direct stepping beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from quartet.config import UserError
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Completion, FinishReason, GenerationError, Request

Make = Callable[..., Request]
RunAll = Callable[..., dict[str, Completion]]


async def collect(engine: NativeEngine, requests: Sequence[Request]) -> list[Completion]:
    return [completion async for completion in engine.generate(requests)]


def requests_of(make: Make, name: str, size: int) -> list[Request]:
    return [make(f"{name}{i}", seed=i, length=3 + i, max_new_tokens=3 + 4 * i) for i in range(size)]


def test_streams_share_the_engine_and_get_their_own(tiny: Any, make_request: Make, run_all: RunAll) -> None:
    ours, theirs = requests_of(make_request, "a", 5), requests_of(make_request, "b", 4)
    expected = run_all(tiny.engine(), [*ours, *theirs])
    engine = tiny.engine(max_running=6)

    async def both() -> list[list[Completion]]:
        return await asyncio.gather(collect(engine, ours), collect(engine, theirs))

    a, b = asyncio.run(both())
    assert {c.request_id: c for c in a} == {r.request_id: expected[r.request_id] for r in ours}
    assert {c.request_id: c for c in b} == {r.request_id: expected[r.request_id] for r in theirs}
    # As they finish, not as they were asked for or all at the end.
    assert [c.request_id for c in a] == [r.request_id for r in ours]
    assert not engine.has_work


def test_control_returns_between_steps(tiny: Any, make_request: Make) -> None:
    engine = tiny.engine()
    seen: list[int] = []

    async def watch() -> None:
        while not seen or engine.has_work:
            seen.append(engine.stats().generated_tokens)
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(collect(engine, [make_request("r", max_new_tokens=6)]), watch())

    asyncio.run(main())
    assert set(range(1, 6)) <= set(seen)


def test_direct_steps_beside_a_stream(tiny: Any, make_request: Make) -> None:
    """``step`` hands over only what was submitted directly, whoever drove the engine."""
    engine = tiny.engine()
    direct = [make_request(f"d{i}", max_new_tokens=2 + i) for i in range(3)]

    async def main() -> tuple[list[Completion], list[Completion]]:
        engine.submit(direct)
        stream = await collect(engine, [make_request("s", max_new_tokens=10)])
        return stream, engine.step()

    stream, stepped = asyncio.run(main())
    assert [c.request_id for c in stream] == ["s"]
    assert [c.request_id for c in stepped] == ["d0", "d1", "d2"]
    assert not engine.has_work


def test_closing_a_stream_cancels_its_rest(tiny: Any, make_request: Make) -> None:
    engine = tiny.engine()

    async def first_only() -> str:
        stream = engine.generate(requests_of(make_request, "r", 4))
        first = await anext(stream)
        await stream.aclose()
        return first.request_id

    assert asyncio.run(first_only()) == "r0"
    assert not engine.has_work
    assert (engine.stats().num_completed, engine.stats().num_cancelled) == (1, 3)


def test_cancel_reaches_the_stream(tiny: Any, make_request: Make) -> None:
    engine = tiny.engine()

    async def main() -> list[Completion]:
        done = []
        async for completion in engine.generate(requests_of(make_request, "r", 3)):
            done.append(completion)
            engine.cancel(["r2"])
        return done

    reasons = {c.request_id: c.finish_reason for c in asyncio.run(main())}
    assert reasons == {"r0": FinishReason.LENGTH, "r1": FinishReason.LENGTH, "r2": FinishReason.CANCELLED}


def test_a_failure_reaches_the_stream_it_belongs_to(tiny: Any, make_request: Make) -> None:
    """The other stream goes on, even if the failure shows in a step that it drives."""
    with torch.no_grad():
        tiny.packed.model.get_input_embeddings().weight[50] = float("nan")
    engine = tiny.engine()
    healthy = make_request("h", prompt=(5, 6), temperature=0.0, max_new_tokens=4)
    broken = [
        make_request("x", prompt=(50, 2)),
        make_request("y", prompt=(5, 7), temperature=0.0, max_new_tokens=90),
    ]

    async def main() -> list[list[Completion] | BaseException]:
        return await asyncio.gather(collect(engine, [healthy]), collect(engine, broken), return_exceptions=True)

    good, bad = asyncio.run(main())
    assert isinstance(bad, GenerationError)
    assert bad.request_ids == ("x",)
    assert [c.request_id for c in good] == ["h"]
    assert not engine.has_work


def test_bad_requests_raise_at_the_first_iteration(tiny: Any, make_request: Make) -> None:
    engine = tiny.engine()
    with pytest.raises(UserError, match="no room"):
        asyncio.run(collect(engine, [make_request("r", length=200)]))
    assert asyncio.run(collect(engine, [])) == []
