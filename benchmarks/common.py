"""What the benchmarks share: the two models, prompts and response lengths, medians, the machine, tables."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

MODELS = ("tiny", "small")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def model_config(name: str) -> Qwen2Config:
    """Qwen2-style: ``tiny`` 1.8 M parameters with 512 tokens, ``small`` 27.8 M with 8192 tokens."""
    sizes = {
        "tiny": {
            "vocab_size": 512,
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
        },
        "small": {
            "vocab_size": 8192,
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
    }
    # The first ids serve as padding, beginning and end of text; no benchmark ends a response by a token.
    return Qwen2Config(max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes[name])


def build_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(model_config(name)).to(dtype).eval()


@dataclass(frozen=True)
class Group:
    """A prompt's length and those of its responses, in tokens."""

    prompt: int
    responses: tuple[int, ...]


def varied_lengths(num: int, longest: int, *, seed: int = 0) -> list[int]:
    """``num`` lengths spread evenly from an eighth of ``longest`` to ``longest``, shuffled."""
    shortest = max(1, longest // 8)
    steps = max(1, num - 1)
    lengths = [round(shortest + (longest - shortest) * i / steps) for i in range(num)]
    random.Random(seed).shuffle(lengths)
    return lengths


def step_groups(
    num_prompts: int = 8, num_responses: int = 8, longest: int = 64, prompt: int | None = None
) -> list[Group]:
    """Groups of one RL step; prompts have 16 to 30 tokens unless ``prompt`` gives their length."""
    lengths = varied_lengths(num_prompts * num_responses, longest)
    return [
        Group(
            prompt if prompt is not None else 16 + 2 * (i % 8),
            tuple(lengths[i * num_responses : (i + 1) * num_responses]),
        )
        for i in range(num_prompts)
    ]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
