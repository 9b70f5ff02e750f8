"""A program that trains and scores tiny models on an accelerator that is not there, and says what would wait for it.

    python tests/fake_accelerator.py

Tensors on the device ``accel`` have shapes, dtypes and a device, and no contents; those on the CPU are real. A tensor
on the wrong device is an error, and so is every question to the host that needs a content (``.item()``, ``if tensor``,
``nonzero``): on a GPU these wait for it. Copies from the device are counted, since they wait, too.

Prints one JSON line per case: its name, the error or None, and the lines of this project that copied from the device.
"""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

import quartet
from quartet.batch.ragged import RaggedBatch
from quartet.config.algorithms import GRPO, PPO
from quartet.config.common import TrainConfig
from quartet.models.packed_model import PackedCausalLM, PackedScalarModel
from quartet.train.engine import TrainEngine
from quartet.train.forward import ForwardNeeds, forward_only
from quartet.train.objectives import PolicyObjective, SFTObjective, ValueObjective

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "head_dim": 8,
}
KEPT: list[Any] = []
"""Registrations, which end with their objects."""
FAKE = FakeTensorMode(allow_non_fake_inputs=True)
PACKAGE = os.path.join(os.path.dirname(quartet.__file__), "")


class Accelerator(TorchDispatchMode):
    """Runs what concerns ``accel`` without contents; ``copies`` collects who copied from it."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        target = kwargs.get("device")
        if not any(isinstance(x, FakeTensor) for x in inputs):
            if target is None or torch.device(target).type != "accel":
                return func(*args, **kwargs)
            args, kwargs = tree_map(_faked, (args, kwargs))
            with FAKE:
                return func(*args, **kwargs)
        devices = {x.device.type for x in inputs}
        if func.overloadpacket is torch.ops.aten.index and len(devices) > 1:
            raise RuntimeError(f"an index on another device than what it indexes: {devices}")
        if target is not None and torch.device(target).type == "cpu" and "accel" in devices:
            stack = [f for f in traceback.extract_stack() if f.filename.startswith(PACKAGE)]
            self.copies.append(f"{stack[-1].filename.removeprefix(PACKAGE)}: {stack[-1].line}" if stack else "?")
        return func(*args, **kwargs)


def _faked(value: Any) -> Any:
    return FAKE.from_tensor(value) if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else value


def on_accelerator(model: Any) -> Any:
    """``model``, made on the meta device, with parameters and buffers on the accelerator."""
    with FAKE:
        return model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device="accel"))


def batch() -> RaggedBatch:
    prompts, responses = [[5, 6, 7], [8, 9]], [[[3, 4, 5], [1, 2, 3, 4]], [[7], [9, 9]]]
    found = RaggedBatch.from_groups(prompts, responses, ["a", "b", "c", "d"])
    mask, zeros = found.sequence_index() >= 0, torch.zeros(found.num_tokens)
    names = ("advantages", "rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "returns")
    columns = {**dict.fromkeys(names, zeros), **dict.fromkeys(("loss_mask", "action_mask", "step_mask"), mask)}
    return found.with_token(**columns).with_sequence(trajectory=torch.arange(4))


def engine(packed: Any, precision: Any = "fp32", **changes: Any) -> TrainEngine[Any]:
    return TrainEngine(packed, TrainConfig(token_budget=12, precision=precision, **changes), total_steps=3)


def cases() -> dict[str, Callable[[], Any]]:
    with torch.device("meta"):
        config = LlamaConfig(**SIZES)
        llama, gemma = LlamaForCausalLM(config), Gemma2ForCausalLM(Gemma2Config(**SIZES))
        scalar = LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1))
    causal, capped = on_accelerator(llama), on_accelerator(gemma)
    value = PackedScalarModel(on_accelerator(scalar))
    objectives = {"grpo": PolicyObjective(GRPO(), 4, 1.0, 0.1, True, 8), "sft": SFTObjective()}
    found: dict[str, Callable[[], Any]] = {}
    steps = ForwardNeeds(step_scores=True, mask="step_mask")
    everything = ForwardNeeds(logprobs=True, entropies=True)
    for precision in ("fp32", "bf16"):
        found[f"score {precision}"] = lambda p=precision: forward_only(
            PackedCausalLM(causal, p), batch(), everything, 12
        ).token["logprobs"]
        for name, objective in objectives.items():
            found[f"train {name} {precision}"] = lambda p=precision, o=objective: engine(
                PackedCausalLM(causal, p), p
            ).train_step(batch(), o)
    found["train sft soft-capped"] = lambda: engine(PackedCausalLM(capped)).train_step(batch(), SFTObjective())
    found["train sft checkpointed"] = lambda: engine(
        PackedCausalLM(causal, activation_checkpointing=True), activation_checkpointing=True
    ).train_step(batch(), SFTObjective())
    found["train value"] = lambda: engine(value).train_step(batch(), ValueObjective(PPO(), 4))
    found["score sequences"] = lambda: forward_only(value, batch(), ForwardNeeds(scores=True), 12).sequence["scores"]
    found["score steps"] = lambda: forward_only(value, batch(), steps, 12).token["step_scores"]
    return found


def tensor_on(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.tensor`` of a list, made on the host and copied, as on every device."""

    def made(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        return plain(data, **options) if device is None else plain(data, **options).to(device)

    return made


def main() -> None:
    _setup_privateuseone_for_python_backend("accel")
    torch.accel.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
    _cast_linear_layers()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    # What an update ends with: its norm decides whether it counts, and its figures are read. Both wait, once.
    with (
        mock.patch("torch.tensor", tensor_on(torch.tensor)),
        mock.patch("quartet.train.engine.clip_gradients", lambda parameters, norm: _norm(parameters, norm)),
        mock.patch("quartet.train.metrics.MetricSums.results", lambda sums: {}),
    ):
        for name, work in cases().items():
            error = None
            with Accelerator() as accelerator:
                try:
                    work()
                except Exception as raised:
                    stack = [f for f in traceback.extract_tb(raised.__traceback__) if f.filename.startswith(PACKAGE)]
                    where = f"{stack[-1].filename}:{stack[-1].lineno} {stack[-1].line}" if stack else "?"
                    error = f"{type(raised).__name__} at {where}: {str(raised)[:200]}"
            print(json.dumps({"case": name, "error": error, "copies": accelerator.copies}), flush=True)


def _cast_linear_layers() -> None:
    """Autocast of this device: linear layers in bf16, everything else as it comes."""
    rules = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    rules.fallback(torch.library.fallthrough_kernel)
    products = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        with torch.autocast("accel", enabled=False):
            half = [None if t is None else t.to(torch.bfloat16) for t in (x, weight, bias)]
            return torch.nn.functional.linear(*half)  # type: ignore[arg-type]

    products.impl("linear", linear)
    KEPT.extend((rules, products))


def _norm(parameters: Any, max_norm: float) -> float:
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return 1.0


if __name__ == "__main__":
    main()
