"""Tensor parallelism: layers whose columns and rows several ranks have between them, with sequence parallelism.

Shapes: N rows of a span, n_r those of rank r between layers; D hidden.

Which layers are cut in which way stands in transformers' own plans (``base_model_tp_plan``); what is done with them
does not come from there. A module whose layers are cut in columns (attention, MLP) gathers the rows of all ranks at its
door, each of its column layers computes some features of them, and a row layer gives addends of all rows, of whose sum
every rank keeps its own rows: two exchanges per module, and norms and residuals of own rows alone in between.

Parameters are DTensors of the mesh's ``tensor`` dimension. While a module's forward runs it has this rank's parts of
them as plain tensors in their place, so the modules' own code runs as it is. Those that are not cut get gradients of
this rank's rows or heads alone, which ``ShardedModel.sum_gradients`` adds up.

How many rows each rank has is told by the attention context, which attention modules are given; they note it for the
MLP behind them. A layer that is computed again notes it again, so nothing is left of another micro-batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from quartet.config import UserError
from quartet.models.packed_model import PackedCausalLM, PackedModel, PackedScalarModel, decoder_layers
from quartet.train.parallel.pass_group import PassGroup, near_equal
from quartet.train.parallel.vocabulary import VocabParallel, parallelize_vocabulary

COLUMN, GATHERED_COLUMN, ROW, SPLIT_ROW = "colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"
WHOLE = "replicated_with_grad_allreduce"
_EXAMPLE = "{'layers.*.self_attn.q_proj': 'colwise', …, 'layers.*.mlp.down_proj': 'rowwise'}"

Forward = Callable[..., Any]


class _Rows:
    """The rows of a span among the tensor ranks, in the layer that is computed now."""

    def __init__(self, group: PassGroup) -> None:
        self.group = group
        self.sizes: Sequence[int] = ()

    def gather(self, x: Tensor) -> Tensor:
        """``[1, n_r, D] → [1, N, D]``"""
        return self.group.gather_rows(x[0], self.sizes).unsqueeze(0)

    def scatter(self, x: Tensor) -> Tensor:
        """Addends ``[1, N, D] → [1, n_r, D]``"""
        return self.group.scatter_rows(x[0], self.sizes).unsqueeze(0)


def parallelize_layers(packed: PackedModel, mesh: DeviceMesh, group: PassGroup) -> None:
    """Cuts the parameters of ``packed`` over the ranks of ``group``, whose mesh is ``mesh``; all of them call it, with
    equal weights or on the meta device.

    Raises:
        UserError: the model has no plan, or one that does not fit it; sizes that cannot be cut.
    """
    styles = layer_styles(packed)
    check_sizes(packed, styles, group.size)
    rows, cuts = _Rows(group), dict[int, Placement]()
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    doors: dict[nn.Module, None] = {}
    for path, style in styles.items():
        module, door = packed.body.get_submodule(path), packed.body.get_submodule(path.rpartition(".")[0])
        if style in (COLUMN, GATHERED_COLUMN):
            doors[door] = None
            gathers = style == GATHERED_COLUMN or not _cuts_heads(module, door, group.size)
            for layer in _of_adapted(module, "lora_B"):
                cuts.update({id(p): Shard(0) for p in layer.parameters()})
                forwards[layer] = partial(_column, gather=group.gather_columns if gathers else None)
        else:
            for layer in _of_adapted(module, "lora_A"):
                cuts[id(layer.weight)] = Shard(1)
                forwards[layer] = partial(_row, rows=rows)
    for door in doors:
        door.register_forward_pre_hook(partial(_enter, rows=rows), with_kwargs=True)
    embedding: Any = packed.model.get_input_embeddings()
    cuts[id(embedding.weight)] = Shard(0)
    forwards[embedding] = partial(_embed, vocabulary=VocabParallel(embedding.num_embeddings, group), group=group)
    if isinstance(packed, PackedCausalLM):
        parallelize_vocabulary(packed, group)
        cuts.update({id(p): Shard(0) for p in packed.head.parameters()})
    elif isinstance(packed, PackedScalarModel):
        packed.plain = _here
    _distribute(packed.model, mesh, cuts)
    for module in packed.body.modules():
        if module._parameters:
            module.forward = partial(forwards.get(module, _with_local), module, module.forward)


def _distribute(model: nn.Module, mesh: DeviceMesh, cuts: Mapping[int, Placement]) -> None:
    """Parameters become DTensors, cut or whole; tied ones stay one."""
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in known:
                cut = cuts.get(id(parameter), Replicate())
                shared = distribute_tensor(parameter.detach(), mesh, [cut], src_data_rank=None)
                known[id(parameter)] = nn.Parameter(shared, parameter.requires_grad)
            if parameter is not None:
                module._parameters[name] = known[id(parameter)]


# Forwards ------------------------------------------------------------------------------------------------


def _with_local(module: nn.Module, forward: Forward, *args: Any, without: str = "", **kwargs: Any) -> Any:
    """The module's own forward, on this rank's parts of its parameters."""
    whole = module._parameters
    here = {name: None if p is None or name == without else _here(p) for name, p in whole.items()}
    vars(module)["_parameters"] = here
    try:
        return forward(*args, **kwargs)
    finally:
        vars(module)["_parameters"] = whole


def _column(module: nn.Module, forward: Forward, x: Tensor, gather: Callable[[Tensor], Tensor] | None) -> Tensor:
    """``[1, N, in] → [1, N, out of this rank]``, or of all ranks."""
    found: Tensor = _with_local(module, forward, x)
    return found if gather is None else gather(found)


def _row(module: nn.Linear, forward: Forward, x: Tensor, rows: _Rows) -> Tensor:
    """``[1, N, in of this rank] → [1, n_r, out]``; of an ``x`` with all features it takes this rank's."""
    if x.shape[-1] == module.in_features:
        x = x.chunk(rows.group.size, -1)[rows.group.rank]
    found = rows.scatter(_with_local(module, forward, x, without="bias"))
    bias = module.bias
    return found if bias is None else found + _here(bias).to(found.dtype)


def _embed(
    module: nn.Embedding, forward: Forward, tokens: Tensor, vocabulary: VocabParallel, group: PassGroup
) -> Tensor:
    """``tokens [1, N] → [1, n_r, D]``, scaled as the module scales."""
    index, owned = vocabulary.own(tokens)
    padding = module.padding_idx
    if padding is not None:
        module.padding_idx = padding - vocabulary.start if vocabulary.start <= padding < vocabulary.stop else None
    try:
        found = _with_local(module, forward, index)
    finally:
        module.padding_idx = padding
    sizes = near_equal(tokens.shape[1], group.size)
    return group.scatter_rows((found * owned.unsqueeze(-1))[0], sizes).unsqueeze(0)


def _enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, rows: _Rows) -> tuple[Any, dict[str, Any]]:
    """Attention and MLP modules are given the rows of all ranks."""
    context = kwargs.get("quartet_attention")
    if context is not None:
        rows.sizes = context.row_sizes
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": rows.gather(kwargs["hidden_states"])}
    return (rows.gather(args[0]), *args[1:]), kwargs


def _here(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# Plans ---------------------------------------------------------------------------------------------------


def layer_styles(packed: PackedModel) -> dict[str, str]:
    """How each linear layer of the body is cut, by its path there.

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
    for name in styles:
        door = modules[name.rpartition(".")[0]]
        if not isinstance(modules[name], nn.Linear) and not hasattr(modules[name], "base_layer"):
            raise _unfit(packed, f"{name} is a {type(modules[name]).__name__}, not a linear layer")
        if isinstance(door, GradientCheckpointingLayer):
            raise _unfit(packed, f"{name} stands in no attention or MLP module of its own")
    cut = {part for name in styles for part in modules[name].modules()}
    for layer in decoder_layers(packed.body):
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear) and module not in cut:
                raise _unfit(packed, f"the plan does not say how {name} is cut")
    return styles


def _unfit(packed: PackedModel, found: str) -> UserError:
    config = type(packed.body.config).__name__
    return UserError(
        f"the plan for tensor parallelism does not fit {type(packed.model).__name__}",
        found=found,
        remedy=f"set {config}.base_model_tp_plan to one that names its layers: {_EXAMPLE}",
    )


def check_sizes(packed: PackedModel, styles: Mapping[str, str], tensor: int) -> None:
    """Raises UserError where columns or rows cannot be cut into equal parts."""
    sizes = {"attention heads": int(packed.model.config.get_text_config().num_attention_heads)}
    for path, style in styles.items():
        layer, name = _of_adapted(packed.body.get_submodule(path), "")[0], re.sub(r"\.\d+\.", ".*.", path)
        is_row = style in (ROW, SPLIT_ROW)
        sizes[f"{'inputs' if is_row else 'outputs'} of {name}"] = layer.in_features if is_row else layer.out_features
    unfit = [f"{size} {name}" for name, size in sizes.items() if size % tensor]
    if unfit:
        fitting = [n for n in range(1, 2 * max(sizes.values())) if all(size % n == 0 for size in sizes.values())]
        nearest = sorted(fitting, key=lambda n: abs(n - tensor))[:2]
        raise UserError(
            f"{type(packed.model).__name__} cannot be cut over so many tensor ranks",
            found=f"sharding.tensor: {tensor}; {', '.join(unfit)}",
            remedy=f"the nearest that divide all of them: sharding.tensor {' or '.join(map(str, sorted(nearest)))}",
        )


def _cuts_heads(module: nn.Module, door: nn.Module, tensor: int) -> bool:
    """Whether a column layer's heads can be dealt out; else, as with few key/value heads, its output is gathered, and
    the attention context takes the own ones."""
    size = getattr(door, "head_dim", None)
    features: int = _of_adapted(module, "")[0].out_features
    return size is None or features % size != 0 or (features // size) % tensor == 0


def _of_adapted(module: Any, factor: str) -> list[Any]:
    """The linear layer, and of its LoRA adapter, where it has one, the layer called ``factor``."""
    if not hasattr(module, "base_layer"):
        return [module]
    return [module.base_layer, *(getattr(module, factor).values() if factor else ())]
