"""The rollout engine on a CUDA device: its tokens, waits and memory, and how it agrees with the trainer.

make test-gpu
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from quartet.models.packed_model import PackedCausalLM, Precision
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
    found = run(NativeEngine(packed(model)), asked)
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
    found = run(NativeEngine(packed(tiny.model(family))), asked)
    for name, theirs in expected.items():
        assert found[name].token_ids == theirs.token_ids
        close(torch.tensor(found[name].logprobs), torch.tensor(theirs.logprobs))


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {}, {"top_p": 0.9, "min_p": 0.01}], ids=str)
def test_a_step_waits_for_its_tokens_alone(
    kind: dict[str, float], cuda: torch.device, tiny: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = NativeEngine(packed(tiny.model("qwen2"), "bf16"))
    engine.submit(requests(tiny, new=200, **kind))
    for _ in range(5):
        engine.step()
    read = engine._read
    reads = []

    def allowed(*columns: torch.Tensor) -> list[list[float]]:
        torch.cuda.set_sync_debug_mode("default")
        reads.append(len(columns[0]))
        found = read(*columns)
        torch.cuda.set_sync_debug_mode("error")
        return found

    monkeypatch.setattr(engine, "_read", allowed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert reads == [24]


def test_new_weights_reach_the_bf16_copies(cuda: torch.device, tiny: object) -> None:
    shared = packed(tiny.model("qwen2"), "bf16")
    engine = NativeEngine(shared)
    asked = requests(tiny)
    before = run(engine, asked)
    with torch.no_grad():
        for parameter in shared.model.parameters():
            parameter.mul_(1.1)
    engine.update_weights(None, 1)
    found = run(engine, asked)
    expected = run(NativeEngine(PackedCausalLM(copy.deepcopy(shared.release()), "bf16")), asked)
    assert {n: c.token_ids for n, c in found.items()} == {n: c.token_ids for n, c in expected.items()}
    assert {n: c.token_ids for n, c in found.items()} != {n: c.token_ids for n, c in before.items()}


def test_memory_does_not_grow_over_200_steps(cuda: torch.device, tiny: object) -> None:
    engine = NativeEngine(packed(tiny.model("qwen2"), "bf16"), max_running=16)
    allocated: list[int] = []
    for _ in range(12):
        run(engine, requests(tiny, new=40))
        allocated.append(torch.cuda.memory_allocated())
        engine.update_weights(None, engine.stats().policy_version + 1)
    assert engine.stats().num_steps >= 200
    assert max(allocated[2:]) <= max(allocated[:2])


def test_the_cache_is_given_back(cuda: torch.device, tiny: object) -> None:
    engine = NativeEngine(packed(tiny.model("llama"), "bf16"))
    before = torch.cuda.memory_allocated()
    expected = run(engine, requests(tiny))
    held = engine.stats().cache_bytes
    assert torch.cuda.memory_allocated() >= before + held > before
    engine.release_cache()
    assert torch.cuda.memory_allocated() <= before + 2**20
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
    from quartet.train.forward import ForwardNeeds, forward_only

    shared = packed(tiny.model(family), precision)
    asked = requests(tiny)
    found = run(NativeEngine(shared), asked)
    prompts = [asked[g].prompt_ids for g in range(0, len(asked), 4)]
    responses = [[found[r.request_id].token_ids for r in asked[g : g + 4]] for g in range(0, len(asked), 4)]
    batch = RaggedBatch.from_groups(prompts, responses, [r.request_id for r in asked])
    action = batch.sequence_index() >= 0
    batch = batch.with_token(loss_mask=action).to(tiny.device)
    trainer = forward_only(shared, batch, ForwardNeeds(logprobs=True), 4096).token["logprobs"].cpu()[action]
    engine = torch.tensor([logprob for r in asked for logprob in found[r.request_id].logprobs])
    difference = (trainer - engine).abs()
    record_property("mean", float(difference.mean()))
    record_property("largest", float(difference.max()))
    if precision == "fp32":
        assert float(difference.max()) <= 10 * tolerances[torch.float32][0]
    else:
        assert float(difference.mean()) <= tolerances[torch.bfloat16][0]
