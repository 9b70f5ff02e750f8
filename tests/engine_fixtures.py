"""Tiny random models of three families, each with an unmodified twin to compare against."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Completion, Request, SamplingParams

VOCAB = 97
CONTEXT = 160


def _llama() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _qwen2() -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=CONTEXT, initializer_range=0.2,
        tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def _gemma2() -> PreTrainedModel:
    """Alternating windows of 7 tokens, soft-capped scores and logits."""
    config = Gemma2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8, sliding_window=7,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=6.0, max_position_embeddings=CONTEXT, initializer_range=0.2,
        attn_implementation="eager",
    )  # fmt: skip
    return Gemma2ForCausalLM(config)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {"llama": _llama, "qwen2": _qwen2, "gemma2": _gemma2}


@dataclass
class Tiny:
    """A packed model and its unmodified twin of equal weights."""

    packed: PackedCausalLM
    twin: PreTrainedModel

    def engine(self, **options: object) -> NativeEngine:
        return NativeEngine(self.packed, **options)

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """Of ``tokens`` after ``prompt``, by one full forward of the twin."""
        ids = torch.tensor([[*prompt, *tokens]])
        logits = self.twin(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)


def build(family: str, seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    return Tiny(PackedCausalLM(copy.deepcopy(model)), model)


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Tiny:
    """Each family in turn."""
    return build(request.param)


@pytest.fixture
def tiny() -> Tiny:
    """One model, for tests of the engine rather than of attention."""
    return build("llama")


@pytest.fixture
def build_tiny() -> Callable[..., Tiny]:
    return build


def random_prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """``make_request(id, length=…, group=…, prompt=…, **sampling)``; a group's name decides its prompt."""

    def make(
        request_id: str,
        *,
        group: str | None = None,
        length: int = 6,
        prompt: Sequence[int] | None = None,
        **sampling: object,
    ) -> Request:
        group = request_id if group is None else group
        ids = tuple(prompt) if prompt is not None else random_prompt(length, sum(group.encode()) * 31 + length)
        return Request(request_id, group, ids, SamplingParams(**sampling))

    return make


def drain(engine: NativeEngine, requests: Sequence[Request] = (), limit: int = 5000) -> dict[str, Completion]:
    if requests:
        engine.submit(requests)
    done: dict[str, Completion] = {}
    for _ in range(limit):
        if not engine.has_work:
            return done
        for completion in engine.step():
            assert completion.request_id not in done, "handed over twice"
            done[completion.request_id] = completion
    raise AssertionError(f"still work after {limit} steps")


@pytest.fixture
def run_all() -> Callable[..., dict[str, Completion]]:
    """Steps an engine until nothing is left; completions by request id."""
    return drain
