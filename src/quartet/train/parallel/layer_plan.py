"""How a model's layers are cut over tensor ranks, and which models cannot be cut over context and tensor ranks.

All of it is seen from names and shapes: a driver asks of a model on the meta device before any process starts, and the
workers ask the same of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from quartet.config import UserError
from quartet.models.packed_model import PackedCausalLM, PackedModel, decoder_layers
from quartet.train.parallel.pipeline import ModelParts

COLUMN, GATHERED_COLUMN, ROW, SPLIT_ROW = "colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"
WHOLE = "replicated_with_grad_allreduce"
_EXAMPLE = "{'layers.*.self_attn.q_proj': 'colwise', …, 'layers.*.mlp.down_proj': 'rowwise'}"


def check_cut(packed: PackedModel, *, pipeline: int = 1, context: int, tensor: int) -> None:
    """
    Raises:
        UserError: the model cannot be computed by ``pipeline × context × tensor`` ranks together, and what can be done.
    """
    if pipeline > 1:
        ModelParts.of(packed).split(pipeline)
    if context * tensor == 1:
        return
    if packed.numerics == "exact":
        raise UserError(
            "numerics: exact needs every sum in one process, in the order of the engine's",
            found=f"sharding.tensor {tensor} × sharding.context {context}, which cut sums of a layer",
            remedy="use sharding.shard or sharding.pipeline, or numerics: fast",
        )
    config, kind = packed.model.config.get_text_config(), type(packed.model).__name__
    heads, ranks = int(config.num_attention_heads), tensor * context
    if heads % context:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        raise UserError(
            f"{kind} cannot share its attention out over so many ranks",
            found=f"{heads} heads, sharding.tensor {tensor} × sharding.context {context} = {ranks}",
            remedy=f"choose tensor × context among {', '.join(map(str, fitting))}; sharding.shard has no such limit",
        )
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type") for rope in (ropes, *ropes.values()) if isinstance(rope, dict)}
    if context > 1 and (chosen := kinds & {"dynamic", "longrope"}):
        raise UserError(
            f"{kind} cannot be cut over context ranks",
            found=f"rotary embedding of kind {chosen.pop()}, whose angles depend on the longest sequence of a pack",
            remedy="set sharding.context to 1, or give the model a rotary embedding of another kind",
        )
    if tensor > 1:
        _check_sizes(packed, layer_styles(packed), context, tensor)
        if isinstance(packed, PackedCausalLM) and type(packed.head) is not nn.Linear:
            raise UserError(
                f"the head of {kind} cannot be shared out",
                found=f"a {type(packed.head).__name__}",
                remedy="use sharding.shard or sharding.context",
            )


def layer_styles(packed: PackedModel) -> dict[str, str]:
    """Returns how each linear layer of the body is cut, by its path there.

    Raises:
        UserError: transformers has no plan for the model, or it has styles or layers that do not fit.
    """
    kind, config = type(packed.model).__name__, packed.body.config
    plan: Mapping[str, str] | None = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise UserError(
            f"{kind} has no plan for tensor parallelism",
            found=f"{type(config).__name__}.base_model_tp_plan: {plan}",
            remedy=f"use sharding.shard or sharding.context, or set it before the model is loaded: {_EXAMPLE}",
        )
    known = {COLUMN, GATHERED_COLUMN, ROW, SPLIT_ROW, WHOLE}
    if unknown := {style for style in plan.values() if style not in known}:
        raise UserError(
            f"the plan of {kind} for tensor parallelism has unknown styles",
            found=f"{', '.join(sorted(unknown))} in {type(config).__name__}.base_model_tp_plan",
            remedy=f"use sharding.shard or sharding.context, or set a plan with {', '.join(sorted(known))} alone",
        )
    modules = dict(packed.body.named_modules())
    styles: dict[str, str] = {}
    for pattern, style in plan.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        found = [name for name in modules if expression.fullmatch(name)]
        if not found:
            raise _unfit(packed, f"it has no {pattern}")
        styles.update(dict.fromkeys(found, style) if style != WHOLE else {})
    _check_layers(packed, modules, styles)
    return styles


def _check_layers(packed: PackedModel, modules: Mapping[str, nn.Module], styles: Mapping[str, str]) -> None:
    """Raises UserError where layers are no linear ones, stand alone, or are not in the plan."""
    ways: dict[str, dict[bool, str]] = {}
    for name, style in styles.items():
        parent = name.rpartition(".")[0]
        if not isinstance(modules[name], nn.Linear) and not hasattr(modules[name], "base_layer"):
            raise _unfit(packed, f"{name} is a {type(modules[name]).__name__}, not a linear layer")
        if isinstance(modules[parent], GradientCheckpointingLayer):
            raise _unfit(packed, f"{name} stands in no attention or MLP module of its own")
        ways.setdefault(parent, {})[style in (ROW, SPLIT_ROW)] = name
    for parent, of_parent in ways.items():
        if len(of_parent) == 1:
            # Rows are gathered for column layers, and scattered behind row layers: one without the other is wrong.
            ((by_rows, name),) = of_parent.items()
            cut, missing = ("rows", "columns") if by_rows else ("columns", "rows")
            raise _unfit(packed, f"{name} is cut in {cut}, and no layer of {parent} in {missing}")
    named = {part for name in styles for part in modules[name].modules()}
    for layer in decoder_layers(packed.body):
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and module not in named:
                raise _unfit(packed, f"the plan does not say how {name} is cut")


def _unfit(packed: PackedModel, found: str) -> UserError:
    config = type(packed.body.config).__name__
    return UserError(
        f"the plan for tensor parallelism does not fit {type(packed.model).__name__}",
        found=found,
        remedy=f"set {config}.base_model_tp_plan to one that names its layers: {_EXAMPLE}",
    )


def _check_sizes(packed: PackedModel, styles: Mapping[str, str], context: int, tensor: int) -> None:
    """Raises UserError where heads, columns or rows cannot be cut into equal parts, or a rank would have no
    vocabulary."""
    heads = int(packed.model.config.get_text_config().num_attention_heads) // context
    sizes = {"attention heads" + (f" for each of {context} context ranks" if context > 1 else ""): heads}
    vocabulary = packed.model.get_input_embeddings().num_embeddings
    for path, style in styles.items():
        layer, name = of_adapted(packed.body.get_submodule(path), "")[0], re.sub(r"\.\d+\.", ".*.", path)
        by_rows = style in (ROW, SPLIT_ROW)
        sizes[f"{'inputs' if by_rows else 'outputs'} of {name}"] = layer.in_features if by_rows else layer.out_features

    found = [f"{size} {name}" for name, size in sizes.items() if size % tensor]
    if -(-vocabulary // tensor) * (tensor - 1) >= vocabulary:  # the last rank's part is what is left
        found.append(f"{vocabulary} tokens of the vocabulary, of which a rank would have none")
    if found:
        raise UserError(
            f"{type(packed.model).__name__} cannot be cut over so many tensor ranks",
            found=f"sharding.tensor: {tensor}; {', '.join(found)}",
            remedy="choose a divisor of all of these",
        )


def of_adapted(module: Any, factor: str) -> list[Any]:
    """Returns the linear layer, and of its LoRA adapter, where it has one, the layer called ``factor``."""
    if not hasattr(module, "base_layer"):
        return [module]
    return [module.base_layer, *(getattr(module, factor).values() if factor else ())]
