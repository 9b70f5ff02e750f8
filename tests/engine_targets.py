"""What runs inside of engine processes in tests: the native engine with tiny models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from quartet.config.common import LoRAConfig
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.engine import NativeEngine
from quartet.rollout.process import EngineSpec

VOCAB = 61
CONTEXT = 96


def build_model(seed: int = 0, *, is_tied: bool = False) -> PreTrainedModel:
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
        tie_word_embeddings=is_tied,
    )
    return LlamaForCausalLM(config).eval()


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(ord("A") + i) for i in ids)


def spec(
    target: str = "engine_targets:native", *, environment: dict[str, str] | None = None, **options: Any
) -> EngineSpec:
    """Of a function of this folder's modules, which the process finds beside the package."""
    kwargs = options.pop("kwargs", {})
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environment or {})}
    return EngineSpec(target, kwargs, environment=variables, **{"start_timeout_s": 120.0, **options})


def native(
    seed: int = 0,
    *,
    is_tied: bool = False,
    lora: dict[str, Any] | None = None,
    version: int | None = None,
    **options: Any,
) -> NativeEngine:
    packed = PackedCausalLM(build_model(seed, is_tied=is_tied))
    if lora is not None:
        packed.adapt(LoRAConfig(**lora), seed=0)
    options = {"max_running": 8, **options}
    return NativeEngine(packed, owns_weights=True, decode=lambda _, ids: decode(ids), version=version, **options)
