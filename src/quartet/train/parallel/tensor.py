"""Tensor parallelism: layers whose columns and rows several ranks have between them, with sequence parallelism.

Shapes: N rows of a span, n_r those of rank r between layers; D hidden.

Which layers are cut in which way stands in transformers' own plans (``layer_plan.py``); what is done with them does not
come from there. A module whose layers are cut in columns (attention, MLP) gathers the rows of all ranks at its
door, each of its column layers computes some features of them, and a row layer gives addends of all rows, of whose sum
every rank keeps its own rows: two exchanges per module, and norms and residuals of own rows alone in between.

Parameters are DTensors of the mesh's ``tensor`` dimension. While a module's forward runs it has this rank's parts of
them as plain tensors in their place, so the modules' own code runs as it is. Those that are not cut get gradients of
this rank's rows or heads alone, which ``ShardedModel.sum_gradients`` adds up.

How many rows each rank has is told by the attention context, which attention modules are given; they note it for the
MLP behind them. A layer that is computed again notes it again, so nothing is left of another micro-batch.

A vocabulary in parts: of an embedding and a head, whose rows tensor ranks have between them.

Shapes: M selected rows, V vocabulary, D hidden. Rank r has rows ``r · width`` to ``(r + 1) · width - 1``, the last one
what is left, as a DTensor's ``Shard(0)`` lies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from quartet.models.logprobs import LEAST
from quartet.models.packed_model import PackedCausalLM, PackedModel, PackedScalarModel
from quartet.train.parallel.layer_plan import COLUMN, GATHERED_COLUMN, of_adapted
from quartet.train.parallel.messages import PassGroup, near_equal


class VocabParallel:
    """The vocabulary's rows of this rank, for ``models.logprobs.VocabShard``.

    Args:
        size: V; large enough for every rank to have some.
    """

    def __init__(self, size: int, group: PassGroup) -> None:
        self._group = group
        self.width = -(-size // group.size)
        self.start = self.width * group.rank
        self.stop = min(size, self.start + self.width)

    def local(self, weight: Tensor) -> Tensor:
        """Returns this rank's rows of ``[V, …]``."""
        return weight.to_local() if isinstance(weight, DTensor) else weight[self.start : self.stop]

    def own(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Finds ``tokens`` among these rows, and whether they are (bool; else the number is 0)."""
        owned = (tokens >= self.start) & (tokens < self.stop)
        return (tokens - self.start).where(owned, 0), owned

    def join(self, labels: Tensor, logprobs: Tensor, normaliser: Tensor, entropies: Tensor | None) -> None:
        """Replaces ``[M]`` results over this rank's rows by those over all; see ``models.logprobs``. Collective."""
        own = [logprobs, normaliser] if entropies is None else [logprobs, normaliser, entropies]
        parts = self._group.stack(torch.stack(own))
        normaliser.copy_(parts[:, 1].logsumexp(0))
        masses = (parts[:, 1] - normaliser).clamp_(min=LEAST)
        holders = labels.div(self.width, rounding_mode="floor").unsqueeze(0)
        logprobs.copy_((parts[:, 0] + masses).gather(0, holders).squeeze(0))
        if entropies is not None:
            entropies.copy_((masses.exp() * (parts[:, 2] - masses)).sum(0))


Forward = Callable[..., Any]


class _Rows:
    """The rows of a span among the tensor ranks, in the layer that is computed now."""

    def __init__(self, group: PassGroup) -> None:
        self.group = group
        self.sizes: Sequence[int] = ()

    def gather(self, x: Tensor) -> Tensor:
        """Gathers ``[1, n_r, D] → [1, N, D]``."""
        return self.group.gather_rows(x[0], self.sizes).unsqueeze(0)

    def scatter(self, x: Tensor) -> Tensor:
        """Sums addends ``[1, N, D] → [1, n_r, D]``."""
        return self.group.scatter_rows(x[0], self.sizes).unsqueeze(0)


def apply_tensor_parallel(packed: PackedModel, mesh: DeviceMesh, group: PassGroup, styles: Mapping[str, str]) -> None:
    """Cuts the parameters of ``packed`` over the ranks of ``group``, whose mesh is ``mesh``; all of them call it, with
    equal weights or on the meta device, once ``check_cut`` has passed it.

    Args:
        styles: of the whole model's layers, as ``layer_styles`` tells.
    """
    rows, cuts = _Rows(group), dict[int, Placement]()
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    doors: dict[nn.Module, None] = {}
    here = dict(packed.body.named_modules())
    for path, style in styles.items():
        if path not in here:
            continue  # another stage has it
        module, door = here[path], here[path.rpartition(".")[0]]
        if style in (COLUMN, GATHERED_COLUMN):
            doors[door] = None
            gathers = style == GATHERED_COLUMN or not _cuts_heads(module, door, group.size)
            for layer in of_adapted(module, "lora_B"):
                cuts.update({id(p): Shard(0) for p in layer.parameters()})
                forwards[layer] = partial(_column, gather=group.gather_columns if gathers else None)
        else:
            for layer in of_adapted(module, "lora_A"):
                cuts[id(layer.weight)] = Shard(1)
                forwards[layer] = partial(_row, rows=rows)
    for door in doors:
        door.register_forward_pre_hook(partial(_enter, rows=rows), with_kwargs=True)
    embedding: Any = packed.model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        cuts[id(embedding.weight)] = Shard(0)
        forwards[embedding] = partial(_embed, vocabulary=VocabParallel(embedding.num_embeddings, group), group=group)
    if isinstance(packed, PackedCausalLM) and isinstance(packed.head, nn.Linear):  # both may be on other stages
        packed.vocabulary = VocabParallel(packed.head.out_features, group)
        cuts.update({id(p): Shard(0) for p in packed.head.parameters()})
    elif isinstance(packed, PackedScalarModel):
        packed.plain = _here
    if packed.tower is not None:
        packed.tower.own_rows = lambda n: slice(n * group.rank // group.size, n * (group.rank + 1) // group.size)
    _distribute(packed.model, mesh, cuts)
    for module in packed.body.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.forward = partial(forwards.get(module, _with_local), module, module.forward)


def _distribute(model: nn.Module, mesh: DeviceMesh, cuts: Mapping[int, Placement]) -> None:
    """Makes the parameters DTensors, cut or whole; tied ones stay one."""
    known: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in known:
                cut = cuts.get(id(parameter), Replicate())
                shared = distribute_tensor(parameter.detach(), mesh, [cut], src_data_rank=None)
                known[id(parameter)] = nn.Parameter(shared, parameter.requires_grad)
            setattr(module, name, known[id(parameter)])


# Forwards ------------------------------------------------------------------------------------------------


def _with_local(module: nn.Module, forward: Forward, *args: Any, without: str = "", **kwargs: Any) -> Any:
    """Runs the module's own forward, on this rank's parts of its parameters."""
    whole = module.named_parameters(recurse=False, remove_duplicate=False)
    # An attribute of the object itself goes before its parameter of the same name.
    here = {name: None if name == without else _here(parameter) for name, parameter in whole}
    vars(module).update(here)
    try:
        return forward(*args, **kwargs)
    finally:
        for name in here:
            del vars(module)[name]


def _column(module: nn.Module, forward: Forward, x: Tensor, gather: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Maps ``[1, N, in] → [1, N, out of this rank]``, or of all ranks."""
    found: Tensor = _with_local(module, forward, x)
    return found if gather is None else gather(found)


def _row(module: nn.Linear, forward: Forward, x: Tensor, rows: _Rows) -> Tensor:
    """Maps ``[1, N, in of this rank] → [1, n_r, out]``; of an ``x`` with all features it takes this rank's."""
    if x.shape[-1] == module.in_features:
        x = x.chunk(rows.group.size, -1)[rows.group.rank]
    found = rows.scatter(_with_local(module, forward, x, without="bias"))
    bias = module.bias
    return found if bias is None else found + _here(bias).to(found.dtype)


def _embed(
    module: nn.Embedding, forward: Forward, tokens: Tensor, vocabulary: VocabParallel, group: PassGroup
) -> Tensor:
    """Embeds ``tokens [1, N] → [1, n_r, D]``, scaled as the module scales."""
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
    """Gives attention and MLP modules the rows of all ranks."""
    context = kwargs.get("quartet_attention")
    if context is not None:
        rows.sizes = context.row_sizes
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": rows.gather(kwargs["hidden_states"])}
    return (rows.gather(args[0]), *args[1:]), kwargs


def _here(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _cuts_heads(module: nn.Module, door: nn.Module, tensor: int) -> bool:
    """Tells whether a column layer's heads can be dealt out; else, as with few key/value heads, its output is gathered,
    and the attention context takes the own ones.
    """
    size = getattr(door, "head_dim", None)
    features: int = of_adapted(module, "")[0].out_features
    return size is None or features % size != 0 or (features // size) % tensor == 0
