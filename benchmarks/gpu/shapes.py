"""The models of the GPU benchmarks, and what their computations cost by formula.

Random weights of Qwen2.5's shapes: what is measured does not depend on what the weights say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

SIZES = {
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                 num_key_value_heads=2, vocab_size=151_936),
    "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
                 num_key_value_heads=2, vocab_size=151_936),
    "3B": dict(hidden_size=2048, intermediate_size=11_008, num_hidden_layers=36, num_attention_heads=16,
               num_key_value_heads=2, vocab_size=151_936),
    "7B": dict(hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28,
               num_key_value_heads=4, vocab_size=152_064, tie_word_embeddings=False),
    "smoke": dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, vocab_size=300),
}  # fmt: skip


@dataclass(frozen=True)
class Group:
    """A prompt's length and those of its responses, in tokens; no responses: the prompt itself is trained on."""

    prompt: int
    responses: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.prompt + sum(self.responses)

    @property
    def num_predicted(self) -> int:
        return sum(self.responses) or self.prompt - 1

    @property
    def num_pairs(self) -> int:
        """Query-key pairs: each token sees itself and what stands before it; the prompt's own pairs count once."""
        return sum(r * self.prompt + r * (r + 1) // 2 for r in self.responses) + self.prompt * (self.prompt + 1) // 2


def config_of(name: str) -> Qwen2Config:
    special = dict(pad_token_id=0, bos_token_id=None, eos_token_id=1)
    return Qwen2Config(**{**dict(max_position_embeddings=32_768, tie_word_embeddings=True), **special, **SIZES[name]})


def build(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(config_of(name))
    return model.to(device, dtype).eval()


def layer_weights(config: Qwen2Config) -> int:
    """Weights in the products of all layers."""
    size = config.hidden_size // config.num_attention_heads
    heads, kv = config.num_attention_heads * size, config.num_key_value_heads * size
    per_layer = config.hidden_size * (2 * heads + 2 * kv) + 3 * config.hidden_size * config.intermediate_size
    return config.num_hidden_layers * per_layer


def num_weights(config: Qwen2Config) -> int:
    """Of products and embeddings; norms and biases are a thousandth of these."""
    return layer_weights(config) + config.hidden_size * config.vocab_size * (1 if config.tie_word_embeddings else 2)


def training_bytes(config: Qwen2Config) -> int:
    """What one process needs to train before a token is computed: fp32 weights, gradients and two moments, and bf16
    copies of the weights in products."""
    return 16 * num_weights(config) + 2 * layer_weights(config)


def training_flops(config: Qwen2Config, groups: Sequence[Group]) -> float:
    """Of forward and backward on useful tokens: twice the weights per token for each of three passes, the head only
    where a token is predicted, and attention's two products over visible pairs. Nothing that is computed again counts.
    """
    tokens, predicted = sum(g.num_tokens for g in groups), sum(g.num_predicted for g in groups)
    products = 2 * layer_weights(config) * tokens + 2 * config.hidden_size * config.vocab_size * predicted
    attention = 4 * config.num_hidden_layers * config.hidden_size * sum(g.num_pairs for g in groups)
    return 3.0 * (products + attention)


def decode_bytes(config: Qwen2Config, num_rows: int, context: float, dtype: torch.dtype = torch.bfloat16) -> float:
    """Read from memory by one decode step: every weight once, and the keys and values of each row's own context."""
    size = config.hidden_size // config.num_attention_heads
    weights = layer_weights(config) + config.hidden_size * config.vocab_size
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * size
    return dtype.itemsize * (weights + num_rows * context * per_token)
