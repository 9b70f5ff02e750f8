"""Every architecture of docs/models.md in the engine, against ``generate`` and full forwards of unmodified models."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import quartet as q
from quartet.config import UserError
from quartet.extras.quickstart.tokenizer import build_tokenizer
from quartet.models.loading import packed_causal_lm
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Completion, Request

VOCAB = 61
NEW_TOKENS = 10
PROMPT_LENGTHS = (1, 2, 4, 6, 9, 9, 13)
"""With what follows, on both sides of the windows of 4 and 5 tokens; none leaves the short side of the long rope."""

Tolerances = dict[torch.dtype, tuple[float, float]]
RunAll = Callable[..., dict[str, Completion]]


def _prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(VOCAB, (length,), generator=generator).tolist())


@pytest.fixture
def packed(architecture: str, build_architecture: Callable[..., PreTrainedModel]) -> PackedCausalLM:
    return packed_causal_lm(build_architecture(architecture))


@pytest.fixture
def plain(architecture: str, build_architecture: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return build_architecture(architecture)


@torch.no_grad()
def _logprobs(plain: PreTrainedModel, request: Request, completion: Completion) -> torch.Tensor:
    """Of the completion's tokens, by one full forward."""
    tokens = list(completion.token_ids)
    ids = torch.tensor([[*request.prompt_ids, *tokens]])
    logits = plain(input_ids=ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
    logits = logits / (request.sampling.temperature or 1.0)
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)


def _generate(plain: PreTrainedModel, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    """Greedy continuations by ``generate``, in one batch padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0, eos_token_id=[])
    found: list[list[int]] = plain.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()
    return found


def test_greedy_equals_generate_token_for_token(
    packed: PackedCausalLM, plain: PreTrainedModel, make_request: Callable[..., Request], run_all: RunAll,
    tolerances: Tolerances,
) -> None:  # fmt: skip
    prompts = [_prompt(length, seed) for seed, length in enumerate(PROMPT_LENGTHS)]
    requests = [
        make_request(f"r{i}", prompt=prompt, temperature=0.0, max_new_tokens=NEW_TOKENS)
        for i, prompt in enumerate(prompts)
    ]
    done = run_all(NativeEngine(packed, max_running=4), requests)
    assert [list(done[r.request_id].token_ids) for r in requests] == _generate(plain, prompts)
    atol, rtol = tolerances[torch.float32]
    for request in requests:
        ours = torch.tensor(done[request.request_id].logprobs)
        torch.testing.assert_close(ours, _logprobs(plain, request, done[request.request_id]), atol=atol, rtol=rtol)


def test_sampled_groups_equal_a_full_forward(
    packed: PackedCausalLM, plain: PreTrainedModel, make_request: Callable[..., Request], run_all: RunAll,
    tolerances: Tolerances,
) -> None:  # fmt: skip
    """Members of a group share their prompt's keys and values."""
    requests = [
        make_request(
            f"r{g}.{i}", group=f"g{g}", prompt=_prompt(length, 40 + g), seed=10 * g + i, temperature=0.8,
            max_new_tokens=NEW_TOKENS - i,
        )
        for g, length in enumerate((3, 8, 12))
        for i in range(3)
    ]  # fmt: skip
    done = run_all(NativeEngine(packed, max_running=5), requests)
    assert len({done[r.request_id].token_ids for r in requests}) == len(requests)
    atol, rtol = tolerances[torch.float32]
    for request in requests:
        ours = torch.tensor(done[request.request_id].logprobs)
        torch.testing.assert_close(ours, _logprobs(plain, request, done[request.request_id]), atol=atol, rtol=rtol)


def test_the_long_rope_ends_generation_at_its_short_side(
    build_architecture: Callable[..., PreTrainedModel], make_request: Callable[..., Request], run_all: RunAll,
    short_side: int,
) -> None:  # fmt: skip
    """Beyond it the model would read its own past with other frequencies than it was written with."""
    engine = NativeEngine(packed_causal_lm(build_architecture("phi3_longrope")), max_running=2)
    request = make_request("r", prompt=_prompt(short_side - 4, 0), temperature=0.0, max_new_tokens=NEW_TOKENS)
    assert len(run_all(engine, [request])["r"].token_ids) == 4
    with pytest.raises(UserError, match="context"):
        engine.submit([make_request("s", prompt=_prompt(short_side, 0), max_new_tokens=1)])


def test_a_model_that_ignores_position_ids_is_not_sampled(
    build_architecture: Callable[..., PreTrainedModel],
) -> None:
    """It trains, unshared; its next token alone would stand at position 0."""
    model = copy.deepcopy(build_architecture("llama"))
    rotary = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: rotary(x, torch.arange(x.shape[1]).unsqueeze(0))
    packed = packed_causal_lm(model)
    assert not packed.shares_prefixes
    with pytest.raises(UserError, match="cannot be sampled"):
        NativeEngine(packed)


def _answered(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "granite"])
def test_a_whole_step_of_reinforcement_learning(
    name: str, build_architecture: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    """Sampler and trainer agree, the update changes the weights, and the model is saved as what it is."""
    tokenizer = build_tokenizer()
    model = build_architecture(name, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    before = copy.deepcopy(model.state_dict())
    recipe = q.RLRecipe(
        algorithm=q.GRPO(), prompts_per_step=4, responses_per_prompt=4, steps=1, output_dir=str(tmp_path / "run"),
        rollout={"sampling": {"max_new_tokens": 6}},
    )  # fmt: skip
    prompts = [f"{n:02d}=" for n in range(8)]
    result = q.RLTrainer(recipe, model=model, tokenizer=tokenizer, rewards=[_answered], prompts=prompts).train()
    lines = (result.path / "metrics.jsonl").read_text().splitlines()
    found = {name: value for line in lines for name, value in json.loads(line).items() if name.startswith("agreement")}
    assert 0 <= found["agreement/logprob_diff_max"] < 1e-4
    saved = AutoModelForCausalLM.from_pretrained(result.path / "model")
    assert type(saved) is type(model)
    moved = [name for name, values in saved.state_dict().items() if not torch.equal(values, before[name])]
    assert any("q_proj" in name for name in moved) and any("mlp" in name for name in moved)
