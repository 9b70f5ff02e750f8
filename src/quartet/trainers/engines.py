"""From what a recipe says of an engine to the engine."""

from __future__ import annotations

from quartet.config.engines import EngineConfig, NativeEngineConfig
from quartet.models.packed_model import PackedCausalLM
from quartet.rollout.engine import NativeEngine
from quartet.rollout.stop_strings import Decode


def native_engine(
    packed: PackedCausalLM, config: EngineConfig, decode: Decode, *, owns_weights: bool = False
) -> NativeEngine:
    """The native engine in this process, which computes with ``packed``; where it owns the weights they are yet to
    come.
    """
    assert isinstance(config, NativeEngineConfig)
    return NativeEngine(
        packed,
        owns_weights=owns_weights,
        max_running=config.max_running,
        max_prefill_tokens=config.max_prefill_tokens,
        cache_tokens=config.cache_tokens,
        decode=decode,
    )
