"""Tiny random models of every architecture that the tests prove."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    GraniteConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

COMMON: dict[str, Any] = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, pad_token_id=None, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip
SHORT_SIDE = 24
"""Positions up to which ``phi3_longrope`` uses its short factors."""

_LATENT: dict[str, Any] = dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6,
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1, first_k_dense_replace=1,
)  # fmt: skip

ARCHITECTURES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    # Tied embeddings; the second of two layers sees 4 tokens.
    "qwen2": (
        Qwen2Config,
        dict(tie_word_embeddings=True, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    ),
    # Alternating windows, soft-capped scores and logits.
    "gemma2": (
        Gemma2Config,
        dict(
            head_dim=8, query_pre_attn_scalar=8, sliding_window=5, attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
    ),
    # Norms on the heads of queries and keys; a head size of its own.
    "qwen3": (Qwen3Config, dict(head_dim=16)),
    # A window in every layer.
    "mistral": (MistralConfig, dict(sliding_window=5)),
    # A local layer and a global one, each with its rotary base.
    "gemma3": (
        Gemma3TextConfig,
        dict(
            head_dim=8, query_pre_attn_scalar=8, sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
            },
        ),
    ),
    # The same behind a vision tower.
    "gemma3_multimodal": (Gemma3Config, {}),
    # Biases, layer norms, attention and MLP side by side, a quarter of each head rotates.
    "gpt_neox": (GPTNeoXConfig, dict(hidden_act="gelu")),
    # Queries, keys and values in one projection; half of each head rotates.
    "phi3": (
        Phi3Config,
        dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}),
    ),
    "phi3_longrope": (
        Phi3Config,
        dict(
            original_max_position_embeddings=SHORT_SIDE,
            rope_parameters={
                "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": SHORT_SIDE,
                "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [4.0, 5.0, 6.0, 7.0],
            },
        ),
    ),
    # Norms behind attention and MLP, and over whole queries and keys.
    "olmo2": (Olmo2Config, {}),
    # The first layer sends each token to two of four experts, the second is dense.
    "qwen3_moe": (
        Qwen3MoeConfig,
        dict(
            head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
            mlp_only_layers=[1],
        ),
    ),
    # Norms over whole queries and keys, experts in every layer.
    "olmoe": (OlmoeConfig, dict(num_experts=4, num_experts_per_tok=2)),
    # Keys and values through a narrow latent, with a rotary part for all heads; a dense layer, then experts in groups.
    "deepseek_v2": (DeepseekV2Config, dict(**_LATENT, topk_method="group_limited_greedy", n_group=2, topk_group=1)),
    "deepseek_v3": (DeepseekV3Config, dict(**_LATENT, n_group=2, topk_group=1)),
    # Rotates in the layer with a window alone; norms behind attention and MLP, and on queries and keys.
    "exaone4": (Exaone4Config, dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])),
    # Neighbouring numbers rotate together.
    "helium": (HeliumConfig, dict(head_dim=8)),
    "ernie4_5": (Ernie4_5Config, dict(head_dim=8, use_bias=True)),
    # Norms on queries and keys behind the rotation.
    "hunyuan": (HunYuanDenseV1Config, dict(head_dim=8)),
    # Learnt positions; one key and value head for all queries.
    "gpt_bigcode": (
        GPTBigCodeConfig, dict(n_inner=48, multi_query=True, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ),
    # Divides the logits.
    "granite": (
        GraniteConfig,
        dict(logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.3),
    ),
    # Multiplies the logits; attention and MLP side by side.
    "cohere": (CohereConfig, dict(logit_scale=0.25)),
}  # fmt: skip


_VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
)


def _config(architecture: str, options: dict[str, Any]) -> PreTrainedConfig:
    config_class, own = ARCHITECTURES[architecture]
    if config_class is Gemma3Config:
        text = _config("gemma3", options)
        return Gemma3Config(text_config=text, vision_config=_VISION, mm_tokens_per_image=4, image_token_index=60)
    values = {**COMMON, **own, **options}
    if config_class in (GPTNeoXConfig, GPTBigCodeConfig):
        values.pop("num_key_value_heads")
    return config_class(**values)


EXPERTS = {"qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3"}


def build(architecture: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    config = _config(architecture, options)
    torch.manual_seed(seed)
    # Soft-capped scores exist in the eager attention alone.
    attention = "eager" if architecture == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    # Norms start as ones and biases as zeros, where a mix-up would not show.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    if dtype == torch.float64 and architecture in EXPERTS:
        # The grouped product of the experts has no fp64 kernel.
        model.set_experts_implementation("eager")
    return model.to(dtype).eval()
