"""The engine of CUDA devices, run on the CPU where it takes the same steps without graphs, against the native one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quartet.config import UserError
from quartet.models.packed import PackedCausalLM
from quartet.rollout import cuda_engine
from quartet.rollout.cuda_engine import CudaEngine, engine_for
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Completion, FinishReason, GenerationError, Request

MIXTURE = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.2, "top_p": 0.8, "min_p": 0.02},
)


def mixed(make_request: Callable[..., Request]) -> list[Request]:
    """Five groups of four: prompts of 1 to 29 tokens, responses of 5 to 36, some ended by a stop token."""
    return [
        make_request(
            f"{g}-{m}", group=f"g{g}", length=1 + 7 * g, max_new_tokens=5 + 9 * m + g, seed=100 * g + m,
            stop_token_ids=(3, 17), **MIXTURE[m],
        )
        for g in range(5)
        for m in range(4)
    ]  # fmt: skip


def assert_same(
    found: dict[str, Completion], expected: dict[str, Completion], tolerances: dict[torch.dtype, tuple[float, float]]
) -> None:
    atol, rtol = tolerances[torch.float32]
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        ours = found[name]
        assert (ours.token_ids, ours.finish_reason, ours.versions) == (
            theirs.token_ids,
            theirs.finish_reason,
            theirs.versions,
        )
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    "options",
    [
        {"max_running": 7, "page_size": 4},
        {"max_running": 20, "page_size": 16, "cache_tokens": 224, "max_prefill_tokens": 20},
    ],
    ids=["few rows", "few pages"],
)
def test_tokens_are_those_of_the_native_engine(
    family: object,
    options: dict[str, int],
    make_request: Callable[..., Request],
    run_all: Callable[..., dict[str, Completion]],
    tolerances: dict[torch.dtype, tuple[float, float]],
) -> None:
    requests = mixed(make_request)
    expected = run_all(NativeEngine(family.packed, max_running=7), requests)
    assert {c.finish_reason for c in expected.values()} == {FinishReason.LENGTH, FinishReason.STOP}
    assert_same(run_all(CudaEngine(family.packed, **options), requests), expected, tolerances)


def test_running_requests_go_on_with_new_weights(
    tiny: object,
    make_request: Callable[..., Request],
    run_all: Callable[..., dict[str, Completion]],
    tolerances: dict[torch.dtype, tuple[float, float]],
) -> None:
    """Tokens sampled before the update are kept, one still on its way too."""
    done: list[dict[str, Completion]] = []
    weight = tiny.packed.model.model.layers[0].mlp.up_proj.weight
    before = weight.detach().clone()
    for make in (NativeEngine, CudaEngine):
        engine = make(tiny.packed, max_running=4)
        engine.submit([make_request(f"r{i}", group="g", seed=i, length=9, max_new_tokens=12) for i in range(6)])
        for _ in range(5):
            engine.step()
        with torch.no_grad():
            weight.mul_(1.5)
        engine.update_weights(None, 1)
        done.append(run_all(engine))
        with torch.no_grad():
            weight.copy_(before)
    assert done[0]["r0"].versions == (0,) * 5 + (1,) * 7
    assert_same(done[1], done[0], tolerances)


def test_a_stop_that_the_host_sees_late_leaves_nothing_behind(
    tiny: object, make_request: Callable[..., Request], run_all: Callable[..., dict[str, Completion]]
) -> None:
    free = run_all(CudaEngine(tiny.packed), [make_request("r", seed=1, max_new_tokens=20)])["r"]
    stop = free.token_ids[8]
    end = free.token_ids.index(stop) + 1
    engine = CudaEngine(tiny.packed)
    found = run_all(engine, [make_request("r", seed=1, max_new_tokens=20, stop_token_ids=(stop,))])["r"]
    assert (found.token_ids, found.logprobs) == (free.token_ids[:end], free.logprobs[:end])
    assert found.finish_reason is FinishReason.STOP
    assert engine.stats().generated_tokens == end


def test_pages_come_back_and_prompts_are_kept(
    tiny: object, make_request: Callable[..., Request], run_all: Callable[..., dict[str, Completion]]
) -> None:
    engine = CudaEngine(tiny.packed, page_size=4, max_running=3)
    for round_ in range(3):
        run_all(engine, [make_request(f"{round_}-{i}", group="g", length=11, max_new_tokens=6) for i in range(5)])
    stats = engine.stats()
    assert stats.prompt_tokens_prefilled == 11
    assert stats.prefix_hit_tokens == 14 * 11
    assert stats.cached_tokens == 12, "the pages of ten tokens, and of no request"
    assert not engine._paged.runs
    engine.update_weights(None, 1)
    assert engine.stats().cached_tokens == 0


def test_growing_tables_and_pages_keep_what_runs(
    tiny: object, make_request: Callable[..., Request], run_all: Callable[..., dict[str, Completion]]
) -> None:
    short = make_request("short", seed=3, length=5, max_new_tokens=30)
    expected = run_all(CudaEngine(tiny.packed, page_size=4), [short])["short"]
    engine = CudaEngine(tiny.packed, page_size=4)
    engine.submit([short])
    for _ in range(4):
        engine.step()
    found = run_all(engine, [make_request(f"long {i}", length=60, max_new_tokens=40) for i in range(3)])["short"]
    assert found.token_ids == expected.token_ids


def test_rows_without_finite_logits_fail_alone(
    build_tiny: Callable[..., object],
    make_request: Callable[..., Request],
    run_all: Callable[..., dict[str, Completion]],
) -> None:
    tiny = build_tiny("llama")
    with torch.no_grad():
        tiny.packed.model.model.embed_tokens.weight[90] = torch.nan
    good = make_request("good", seed=1, prompt=(5, 6, 7), max_new_tokens=8, top_k=1)
    engine = CudaEngine(tiny.packed, page_size=4)
    expected = run_all(CudaEngine(tiny.packed, page_size=4), [good])["good"]
    engine.submit([make_request("bad", prompt=(5, 90, 7), max_new_tokens=8), good])
    with pytest.raises(GenerationError) as caught:
        for _ in range(20):
            engine.step()
    assert caught.value.request_ids == ("bad",)
    assert run_all(engine)["good"].token_ids == expected.token_ids


def test_a_request_that_never_fits_is_refused(tiny: object, make_request: Callable[..., Request]) -> None:
    engine = CudaEngine(tiny.packed, cache_tokens=64)
    with pytest.raises(UserError, match=r"raise rollout\.cache_tokens"):
        engine.submit([make_request("r", length=30, max_new_tokens=40)])
    assert not engine.has_work


def test_exact_numerics_are_refused(tiny: object) -> None:
    exact = PackedCausalLM(tiny.twin, numerics="exact")
    with pytest.raises(UserError, match="need the CPU"):
        CudaEngine(exact)


def test_the_device_decides_which_engine_runs(tiny: object, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_running": 4, "max_prefill_tokens": 100}
    assert type(engine_for(tiny.packed, **options)) is NativeEngine
    monkeypatch.setattr(cuda_engine, "CudaEngine", lambda packed, **options: ("cuda", options["max_running"]))
    monkeypatch.setattr(PackedCausalLM, "device", torch.device("cuda"))
    assert engine_for(tiny.packed, **options) == ("cuda", 4)


def test_sleep_gives_pages_back_and_wake_resumes(
    tiny: object, make_request: Callable[..., Request], run_all: Callable[..., dict[str, Completion]]
) -> None:
    request = make_request("r", seed=4, max_new_tokens=15)
    expected = run_all(CudaEngine(tiny.packed), [request])["r"]
    engine = CudaEngine(tiny.packed)
    engine.submit([request])
    for _ in range(6):
        engine.step()
    engine.sleep()
    assert engine.stats().cache_bytes == 0
    engine.wake()
    assert run_all(engine)["r"].token_ids == expected.token_ids
