"""What every rollout engine must do, whatever runs inside. A new engine joins by one entry in ``ENGINES``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from quartet.config import UserError
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Completion, FinishReason, Request, SamplingParams, StepEngine
from quartet.rollout.step_attention import Contexts, PlainContexts

VOCAB = 61
CONTEXT = 96


def build_model(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(ord("A") + i) for i in ids)


@dataclass
class Case:
    """An engine and how to give it the weights of another model."""

    engine: StepEngine
    set_weights: Callable[[PreTrainedModel, int], None]


def native_shared(model: PreTrainedModel, contexts: Contexts | None = None) -> Case:
    packed = PackedCausalLM(copy.deepcopy(model))
    engine = NativeEngine(packed, max_running=8, decode=lambda _, ids: decode(ids), contexts=contexts)

    def set_weights(other: PreTrainedModel, version: int) -> None:
        with torch.no_grad():
            for parameter, new in zip(packed.model.parameters(), other.parameters(), strict=True):
                parameter.copy_(new)
        engine.update_weights(None, version)

    return Case(engine, set_weights)


def native_plain(model: PreTrainedModel) -> Case:
    """The operations of devices other than the CPU."""
    return native_shared(model, PlainContexts())


def native_own(model: PreTrainedModel) -> Case:
    packed = PackedCausalLM(copy.deepcopy(model))
    engine = NativeEngine(packed, owns_weights=True, max_running=8, decode=lambda _, ids: decode(ids), version=0)
    return Case(engine, lambda other, version: engine.update_weights(other.named_parameters(), version))


ENGINES: dict[str, Callable[[PreTrainedModel], Case]] = {
    "native shared": native_shared,
    "native own": native_own,
    "native plain": native_plain,
}


@pytest.fixture
def model() -> PreTrainedModel:
    return build_model()


@pytest.fixture(params=list(ENGINES))
def case(request: pytest.FixtureRequest, model: PreTrainedModel) -> Case:
    return ENGINES[request.param](model)


def ask(name: str, prompt: Sequence[int] = (5, 9, 2), group: str | None = None, **sampling: object) -> Request:
    return Request(name, group or name, tuple(prompt), SamplingParams(**sampling))


def run(engine: StepEngine, requests: Sequence[Request]) -> dict[str, Completion]:
    done: list[Completion] = []
    engine.submit(requests)
    while engine.has_work:
        done += engine.step()
    assert len(done) == len({c.request_id for c in done}) == len(requests)
    return {c.request_id: c for c in done}


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, request: Request, completion: Completion) -> torch.Tensor:
    tokens = torch.tensor(completion.token_ids)
    logits = model(torch.tensor([[*request.prompt_ids, *completion.token_ids]])).logits[0]
    scaled = logits[len(request.prompt_ids) - 1 : -1].float() / (request.sampling.temperature or 1.0)
    return scaled.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)


def test_columns_of_a_completion_are_equally_long(case: Case) -> None:
    done = run(case.engine, [ask(f"r{i}", seed=i, max_new_tokens=1 + i) for i in range(12)])
    for i in range(12):
        completion = done[f"r{i}"]
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions) == 1 + i
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.group == f"r{i}"
        assert set(completion.versions) == {0}


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 4, "top_p": 0.9}, {"temperature": 0.0}],
)
def test_logprobs_are_of_the_scaled_untruncated_distribution(
    case: Case,
    model: PreTrainedModel,
    options: dict[str, float],
    tolerances: dict[torch.dtype, tuple[float, float]],
) -> None:
    request = ask("r", seed=3, max_new_tokens=20, **options)
    completion = run(case.engine, [request])["r"]
    atol, rtol = tolerances[torch.float32]
    expected = reference_logprobs(model, request, completion)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=atol, rtol=rtol)


def test_greedy_is_argmax(case: Case, model: PreTrainedModel) -> None:
    request = ask("r", temperature=0.0, max_new_tokens=15)
    tokens = run(case.engine, [request])["r"].token_ids
    with torch.no_grad():
        logits = model(torch.tensor([[*request.prompt_ids, *tokens]])).logits[0]
    assert logits[len(request.prompt_ids) - 1 : -1].argmax(-1).tolist() == list(tokens)


def test_seeds_decide_and_other_requests_do_not(case: Case) -> None:
    group = [ask(f"r{i}", group="g", seed=i % 10, max_new_tokens=12) for i in range(20)]
    together = run(case.engine, group)
    assert together["r0"].token_ids == together["r10"].token_ids
    assert len({c.token_ids for c in together.values()}) == 10
    assert run(case.engine, [group[7]])["r7"].token_ids == together["r7"].token_ids


def test_stop_token_is_kept_stop_string_is_located(case: Case) -> None:
    free = run(case.engine, [ask("r", seed=1, max_new_tokens=30)])["r"]
    token = free.token_ids[9]
    first = free.token_ids.index(token)
    stopped = run(case.engine, [ask("r", seed=1, max_new_tokens=30, stop_token_ids=(token,))])["r"]
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[: first + 1], FinishReason.STOP)
    text = decode(free.token_ids)
    found = run(case.engine, [ask("r", seed=1, max_new_tokens=30, stop_strings=(text[9:12],))])["r"]
    place = text.index(text[9:12])
    assert (found.text_end, found.finish_reason) == (place, FinishReason.STOP_STRING)
    assert found.token_ids == free.token_ids[: place + 3]


def test_cancelled_requests_come_back_with_what_they_have(case: Case) -> None:
    case.engine.submit([ask("r", max_new_tokens=50), ask("s", max_new_tokens=6)])
    for _ in range(3):
        assert case.engine.step() == []
    case.engine.cancel(["r", "never heard of"])
    done: dict[str, Completion] = {}
    while case.engine.has_work:
        done |= {c.request_id: c for c in case.engine.step()}
    assert (done["r"].finish_reason, len(done["r"].token_ids)) == (FinishReason.CANCELLED, 3)
    assert (done["s"].finish_reason, len(done["s"].token_ids)) == (FinishReason.LENGTH, 6)


def test_tokens_follow_the_weights_and_name_their_version(
    case: Case, model: PreTrainedModel, tolerances: dict[torch.dtype, tuple[float, float]]
) -> None:
    other = build_model(seed=1)
    request = ask("r", seed=2, max_new_tokens=9)
    case.engine.submit([request])
    for _ in range(4):
        case.engine.step()
    case.set_weights(other, 7)
    (completion,) = [c for _ in range(5) for c in case.engine.step()]
    assert completion.versions == (0,) * 4 + (7,) * 5
    expected = torch.cat(
        [reference_logprobs(m, request, completion)[part] for m, part in ((model, slice(4)), (other, slice(4, 9)))]
    )
    atol, rtol = tolerances[torch.float32]
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=atol, rtol=rtol)
    assert case.engine.stats().policy_version == 7


def test_stats_count_what_happened(case: Case) -> None:
    run(case.engine, [ask(f"r{i}", group=f"g{i % 2}", seed=i, max_new_tokens=5) for i in range(6)])
    stats = case.engine.stats()
    assert stats.generated_tokens == 30
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.prompt_tokens_prefilled <= 6  # two groups of one prompt


@pytest.mark.parametrize(
    "bad",
    [
        ask("r", prompt=[1] * CONTEXT),
        ask("r", prompt=[VOCAB]),
        ask("r", prompt=[-1]),
        ask("r0"),
        ask("r", group="r0", prompt=[1]),
    ],
    ids=["too long", "no such token", "negative token", "id in use", "another prompt"],
)
def test_bad_requests_raise_and_change_nothing(case: Case, bad: Request) -> None:
    case.engine.submit([ask("r0", max_new_tokens=2)])
    with pytest.raises(UserError):
        case.engine.submit([ask("fine"), bad])
    assert case.engine.stats().num_waiting == 1
