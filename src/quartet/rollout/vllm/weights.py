"""New weights inside of vLLM's workers. Imported only where vLLM is installed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from quartet.rollout.vllm.head_padding import HeadPadding
from quartet.rollout.vllm.sampling import SeededSampler, SeededVerifier
from quartet.weights.manifest import WeightsRefused

Shapes = dict[str, tuple[int, ...]]


class WorkerMethods:
    """What vLLM's worker class can do besides (its ``worker_extension_cls``); methods are called on every rank."""

    model_runner: Any
    model_config: Any

    def quartet_replace_sampler(self) -> None:
        """Also where drafts are verified, and gives heads that share the model's LM head the one that serves."""
        runner = self.model_runner
        runner.sampler = SeededSampler(runner)
        if runner.speculative_config is None:
            return
        runner.rejection_sampler = SeededVerifier(runner.sampler)
        heads = getattr(runner.drafter, "model", None)
        if heads is not None and heads.config.original_lm_head:
            del heads.lm_head
            heads.lm_heads = [runner.get_model().lm_head] * len(heads.blocks)

    def quartet_update_weights(
        self, source: Iterable[tuple[str, Tensor]], shapes: Shapes, heads: Shapes, padding: HeadPadding | None
    ) -> None:
        """Replaces every weight, and those of the heads that draft where they are sent.

        Args:
            source: under the checkpoint's names; maybe with ``ties``, pairs of another name and the one that it has.
            shapes, heads: of the checkpoint, and of the heads that are sent beside it, as ``Drafts.shapes``.

        Raises:
            WeightsRefused: names, shapes or dtypes are not the checkpoint's; nothing has changed.
        """
        tensors = dict(source if padding is None else padding(source))
        of_heads = {n: tensors.pop(n) for n in heads if n in tensors}
        named = _checked(tensors, dict(getattr(source, "ties", ())), shapes, self.model_config.dtype)
        of_heads = _checked(of_heads, {}, heads, self.model_config.dtype)
        load(self.model_runner.get_model(), named, self.model_config)
        if of_heads:
            of_heads = {name.partition(".")[2]: tensor for name, tensor in of_heads.items()}
            load(self.model_runner.drafter.model, of_heads, self.model_runner.drafter.spec_config.draft_model_config)


@torch.no_grad()
def load(model: Any, tensors: Mapping[str, Tensor], model_config: Any) -> None:
    """Writes ``tensors`` into a model that serves, in place: graphs that were captured stay valid."""
    initialize_layerwise_reload(model)
    model.load_weights(tensors.items())
    finalize_layerwise_reload(model, model_config)
    for module in model.modules():
        # A tied head keeps a packed copy of its own on CPUs, which the reload knows nothing of.
        if isinstance(module, ParallelLMHead):
            quant_method: Any = module.quant_method
            quant_method.process_weights_after_loading(module)
    # A layer that got no weights is left without memory.
    empty = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if empty:
        raise RuntimeError(f"vLLM put no weights into {empty[0]!r} ({len(empty)} in all)")


def _checked(
    tensors: Mapping[str, Tensor], ties: Mapping[str, str], shapes: Shapes, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors in the checkpoint's order, a tied one under each name that the checkpoint has of it.

    Raises:
        WeightsRefused: one is missing, unknown, or has another shape or dtype.
    """
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        tensor = tensors.get(name, tensors.get(ties.get(name, name)))
        if tensor is None:
            raise _refused(f"nothing for {name!r}", name)
        if tuple(tensor.shape) != shape:
            raise _refused(f"{name!r} of shape {list(tensor.shape)}, needed {list(shape)}", name)
        if tensor.dtype != dtype:
            raise _refused(f"{name!r} in {tensor.dtype}, the engine computes in {dtype}", name)
        found[name] = tensor
    used = {tensor.data_ptr() for tensor in found.values()}
    for name, tensor in tensors.items():
        if tensor.data_ptr() not in used:
            raise _refused(f"an unknown name {name!r}", name)
    return found


def save_adapter(named: Iterable[tuple[str, Tensor]], path: Path, lora: Mapping[str, Any]) -> None:
    """Writes trained factors as the adapter directory that vLLM loads."""
    tensors = {f"base_model.model.{name.replace('.default.weight', '.weight')}": t for name, t in named}
    modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    config = {"r": lora["rank"], "lora_alpha": lora["alpha"], "target_modules": modules, "peft_type": "LORA"}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def _refused(found: str, name: str) -> WeightsRefused:
    return WeightsRefused(
        "the new weights do not fit the vLLM engine",
        found=found,
        remedy="send every tensor of the checkpoint that the engine was started from, in the engine's dtype",
        tensor=name,
    )
