"""The native engine for a process of its own: ``EngineSpec("quartet.rollout.process_native:make", {…})``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from quartet.config.common import LoRAConfig
from quartet.config.plugins import added, load
from quartet.models.loading import load_causal_lm, packed_causal_lm
from quartet.models.packed_model import Numerics, PackedCausalLM, Precision
from quartet.rollout.drafter import make_drafter
from quartet.rollout.engine import NativeEngine
from quartet.text.tokenizer import TextCodec


class NativeProcessEngine(NativeEngine):
    """A native engine that sleeps: its cache is destroyed, its weights move to the host."""

    def __init__(self, packed: PackedCausalLM, **options: Any) -> None:
        super().__init__(packed, **options)
        self._device = packed.device

    def sleep(self, level: Literal[1, 2]) -> None:
        """Level 2 keeps the weights on the host, too (frozen ones are never sent again), but uses them no more."""
        self.release_cache()
        self.packed.model.to("cpu")
        if level == 2:
            self.weight_sink().invalidate("it slept, and takes new weights")

    def wake(self) -> None:
        self.packed.model.to(self._device)


def make(
    path: str,
    *,
    device: str = "cpu",
    precision: Precision = "fp32",
    numerics: Numerics = "fast",
    lora: Mapping[str, Any] | None = None,
    seed: int = 0,
    version: int | None = None,
    speculation: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> NativeProcessEngine:
    """
    Args:
        path: a model's directory with its tokenizer.
        lora, seed: of the trainer's adapters, which alone are sent then.
        version: None: it computes once weights were sent.
        speculation: the section of a recipe.
        trust_remote_code: run Python code that comes with the model, where it needs that.
        options: of ``NativeEngine``.
    """
    model = load_causal_lm(path, trust_remote_code=trust_remote_code).to(torch.device(device))
    adapters = None if lora is None else LoRAConfig(**lora)
    packed = packed_causal_lm(model, precision, numerics=numerics, lora=adapters, seed=seed)
    packed.model.requires_grad_(False)
    section = None if speculation is None else load(added("drafters")[speculation["type"]].section)(**speculation)
    drafter = make_drafter(section, packed)
    decode = TextCodec.from_pretrained(path, trust_remote_code=trust_remote_code).decode_completion
    options |= {"decode": decode, "version": version, "drafter": drafter}
    return NativeProcessEngine(packed, owns_weights=True, **options)
