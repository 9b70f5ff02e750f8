"""The rollout engine on a CUDA device: its tokens, graphs, waits and memory, and how it agrees with the trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from quartet.models.packed import PackedCausalLM, Precision
from quartet.rollout.cuda_engine import CudaEngine
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Completion, Request, SamplingParams

pytestmark = pytest.mark.gpu


def packed(model: PreTrainedModel, precision: Precision = "fp32") -> PackedCausalLM:
    return PackedCausalLM(copy.deepcopy(model), precision)


def run(engine: NativeEngine, requests: Sequence[Request]) -> dict[str, Completion]:
    engine.submit(requests)
    done: dict[str, Completion] = {}
    while engine.has_work:
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


def requests(tiny: object, num_groups: int = 6, new: int = 60, **sampling: object) -> list[Request]:
    """Groups of four; prompts of 3 to 200 tokens, responses of ``new`` / 2 to ``new`` tokens."""
    return [
        Request(
            f"{g}-{i}", f"g{g}", tiny.prompt(3 + 39 * g, g),
            SamplingParams(max_new_tokens=new // 2 + (7 * g + 5 * i) % (new // 2 + 1), seed=100 * g + i, **sampling),
        )
        for g in range(num_groups)
        for i in range(4)
    ]  # fmt: skip


@torch.no_grad()
def test_greedy_tokens_are_those_of_generate(family: str, tiny: object) -> None:
    model = tiny.model(family)
    asked = requests(tiny, temperature=0.0)[::4]
    found = run(CudaEngine(packed(model)), asked)
    for request in asked:
        ids = torch.tensor([request.prompt_ids], device=tiny.device)
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False,
            max_new_tokens=request.sampling.max_new_tokens,
        )  # fmt: skip
        assert list(found[request.request_id].token_ids) == whole[0, ids.shape[1] :].tolist()


def test_sampled_tokens_are_those_of_the_cpu(family: str, tiny: object, close: Callable[..., None]) -> None:
    """In fp32 they differ only where a number falls within rounding of a border: nowhere here."""
    asked = requests(tiny, temperature=0.9) + [
        Request(f"t{i}", "t", tiny.prompt(30, 77), SamplingParams(top_k=50, top_p=0.9, seed=i)) for i in range(4)
    ]
    expected = run(NativeEngine(packed(tiny.model(family, device=torch.device("cpu")))), asked)
    found = run(CudaEngine(packed(tiny.model(family))), asked)
    for name, theirs in expected.items():
        assert found[name].token_ids == theirs.token_ids
        close(torch.tensor(found[name].logprobs), torch.tensor(theirs.logprobs))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_graphs_replay_what_the_steps_compute(
    precision: Precision, family: str, cuda: torch.device, tiny: object
) -> None:
    model, asked = tiny.model(family), requests(tiny)
    engine = CudaEngine(packed(model, precision), max_running=20)
    found = run(engine, asked)
    assert engine.remarks == ()
    assert engine._device_runner._step.num_graphs >= 2
    expected = run(CudaEngine(packed(model, precision), max_running=20, graphs=False), asked)
    assert {n: (c.token_ids, c.logprobs) for n, c in found.items()} == {
        n: (c.token_ids, c.logprobs) for n, c in expected.items()
    }


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "plain"])
@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {}, {"top_p": 0.9, "min_p": 0.01}], ids=str)
@torch.no_grad()
def test_a_step_never_waits_for_the_device(
    kind: dict[str, float], graphs: bool, cuda: torch.device, tiny: object
) -> None:
    engine = CudaEngine(packed(tiny.model("qwen2"), "bf16"), graphs=graphs)
    engine.submit(requests(tiny, new=200, **kind))
    for _ in range(5):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine._device_runner.launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_admitting_does_not_wait_either(cuda: torch.device, tiny: object) -> None:
    """Prompts, page tables and sampling parameters go to the device while it computes."""
    engine = CudaEngine(packed(tiny.model("llama"), "bf16"))
    run(engine, requests(tiny))
    engine.submit(requests(tiny, new=200))
    for _ in range(3):
        engine.step()
    late = [Request(f"late {i}", "late", tiny.prompt(50, 5), SamplingParams(seed=i)) for i in range(4)]
    engine.submit(late)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert engine.stats().num_waiting == 0


def test_new_weights_reach_captured_graphs(cuda: torch.device, tiny: object) -> None:
    """bf16 copies are refreshed in place, where the graphs read them."""
    shared = packed(tiny.model("qwen2"), "bf16")
    engine = CudaEngine(shared)
    asked = requests(tiny)
    before = run(engine, asked)
    with torch.no_grad():
        for parameter in shared.model.parameters():
            parameter.mul_(1.1)
    engine.update_weights(None, 1)
    found = run(engine, asked)
    expected = run(CudaEngine(PackedCausalLM(copy.deepcopy(shared.release()), "bf16")), asked)
    assert {n: c.token_ids for n, c in found.items()} == {n: c.token_ids for n, c in expected.items()}
    assert {n: c.token_ids for n, c in found.items()} != {n: c.token_ids for n, c in before.items()}


def test_memory_does_not_grow_over_200_steps(cuda: torch.device, tiny: object) -> None:
    engine = CudaEngine(packed(tiny.model("qwen2"), "bf16"), max_running=16)
    allocated: list[int] = []
    for _ in range(12):
        run(engine, requests(tiny, new=40))
        allocated.append(torch.cuda.memory_allocated())
        engine.update_weights(None, engine.stats().policy_version + 1)
    assert engine.stats().num_steps >= 200
    assert max(allocated[2:]) <= max(allocated[:2])


def test_sleep_gives_the_cache_back(cuda: torch.device, tiny: object) -> None:
    engine = CudaEngine(packed(tiny.model("llama"), "bf16"))
    before = torch.cuda.memory_allocated()
    expected = run(engine, requests(tiny))
    held = engine.stats().cache_bytes
    assert torch.cuda.memory_allocated() >= before + held > before
    engine.sleep()
    assert torch.cuda.memory_allocated() <= before + 2**20
    engine.wake()
    assert run(engine, requests(tiny)) == expected


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sampler_and_trainer_agree(
    precision: Precision,
    family: str,
    tiny: object,
    tolerances: dict[torch.dtype, tuple[float, float]],
    record_property: Callable[..., None],
) -> None:
    """Log-probabilities of the engine against the trainer's forward pass over what it generated."""
    from quartet.batch.ragged import RaggedBatch
    from quartet.train.engine import Needs, forward_only

    shared = packed(tiny.model(family), precision)
    asked = requests(tiny)
    found = run(CudaEngine(shared), asked)
    prompts = [asked[g].prompt_ids for g in range(0, len(asked), 4)]
    responses = [[found[r.request_id].token_ids for r in asked[g : g + 4]] for g in range(0, len(asked), 4)]
    batch = RaggedBatch.from_groups(prompts, responses, [r.request_id for r in asked])
    action = batch.sequence_index() >= 0
    batch = batch.with_token(loss_mask=action).to(tiny.device)
    trainer = forward_only(shared, batch, Needs(logprobs=True), 4096).token["logprobs"].cpu()[action]
    engine = torch.tensor([logprob for r in asked for logprob in found[r.request_id].logprobs])
    difference = (trainer - engine).abs()
    record_property("mean", float(difference.mean()))
    record_property("largest", float(difference.max()))
    if precision == "fp32":
        assert float(difference.max()) <= 10 * tolerances[torch.float32][0]
    else:
        assert float(difference.mean()) <= tolerances[torch.bfloat16][0]
