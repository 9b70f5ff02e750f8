"""Contents for a sharded model: every rank reads its slices of the files, and none ever holds the whole model.

::

    model = load_causal_lm(path, empty=True)      on the meta device; says what is missing, or does not fit
    packed = packed_causal_lm(model, …)           still without contents
    shard_model(packed, mesh)                     every parameter a DTensor
    load_shares(packed, path)                     contents: this rank's slice of each tensor, one tensor at a time

Beside its shard of the model a rank holds the slice that it is reading, in the file's dtype; where transformers makes a
tensor of several others (``models/conversions``), those of that one conversion.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quartet.config import UserError
from quartet.models.directories import (
    StoredTensor,
    WeightConversion,
    conversions_to_load,
    format_names,
    meta_twin,
    naming_load_errors,
    stored_tensors,
)
from quartet.models.loading import init_scalar_head
from quartet.models.lora import named_tensors_digest
from quartet.models.packed_model import PackedModel, PackedScalarModel
from quartet.train.parallel.data import sharded
from quartet.train.parallel.tensors import local, local_slices, write_part


def load_shares(
    packed: PackedModel, source: str | Mapping[str, Tensor], *, device: torch.device | None = None, seed: int = 0
) -> None:
    """Gives a model that was made on the meta device, and sharded there, its contents.

    All ranks of the model call it.

    Args:
        source: a model directory or hub name; or whole tensors by the names that files would have.
        device: where the model computes; its parameters go there, too, unless ``shard_model`` left them on the host.
        seed: of what the files do not have: fresh adapters, and a scalar head beside the body of a causal LM, which
            has the bits that ``scalar_model_from`` gives it.

    Raises:
        UserError: a tensor is missing or of another shape, or has numbers that are not finite; or the files cannot be
            read.
    """
    model = packed.model
    twin = meta_twin(model)
    with torch.no_grad():
        if next(model.parameters()).is_meta:
            _allocate(packed, device or torch.device("cpu"))
        # Adapters have no place in the files: without them the model has the files' names.
        with packed.without_adapters():
            tensors = model.state_dict(keep_vars=True)
            if isinstance(source, str):
                with naming_load_errors(source, "model"), stored_tensors(source) as stored:
                    read = _fill(tensors, stored, twin, source)
            else:
                read = _fill(tensors, {n: StoredTensor.of(t) for n, t in source.items()}, twin, "the given model")
            _check_complete(packed, tensors, read, seed, source if isinstance(source, str) else "the given model")
            _make_buffers(model, twin)
        if packed.adapters is not None:
            packed.adapters.digest = partial(_gathered_digest, packed)
            packed.adapters.reset(seed, write_part)


def _allocate(packed: PackedModel, device: torch.device) -> None:
    """Makes memory for what is on the meta device: parameters of this rank's shards, and buffers."""
    root = sharded(packed)
    on_host = root is not None and root.stays_on_host
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    # So that parameters stay the same objects: tied, and known to adapters. Those of DTensors always do.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        # The root, since torch notes there which memory it gathers from.
        (root or packed.model).to_empty(device=torch.device("cpu") if on_host else device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapped)
    for module in packed.model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    if device.type != "cpu":
        packed.unfuse()


def _gathered_digest(packed: PackedModel, named: Iterable[tuple[str, Tensor]]) -> str:
    """Returns ``named_tensors_digest`` the whole tensors, on all ranks. Collective."""
    whole_of = packed.gather.whole
    digest = named_tensors_digest((name, whole) for name, tensor in named if (whole := whole_of(tensor)) is not None)
    root = sharded(packed)
    return digest if root is None else root.mesh.data.gather(digest)[0]


# Reading -------------------------------------------------------------------------------------------------


def _fill(
    tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor], twin: PreTrainedModel, where: str
) -> set[int]:
    """Reads this rank's part of every tensor that the files have; ids of the tensors that were read.

    Raises:
        UserError: one has another shape, or is not finite.
    """
    conversions, _ = conversions_to_load(twin, stored)
    read: set[int] = set()
    broken = []
    for conversion in conversions:
        if conversion.target not in tensors:
            continue  # another stage has it
        for name, part in _parts(conversion, tensors, stored, twin, where):
            here = local(tensors[name])
            here.copy_(part)
            if here.is_floating_point() and not bool(here.sum().isfinite()):
                broken.append(name)
            read.add(id(tensors[name]))
    if broken:
        raise UserError(
            f"the weights of {where!r} are not finite",
            found=f"NaN or infinity in {format_names(broken)}",
            remedy="use a checkpoint from before its training diverged, or download it again",
        )
    return read


def _parts(
    conversion: WeightConversion,
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, StoredTensor],
    twin: PreTrainedModel,
    where: str,
) -> Iterator[tuple[str, Tensor]]:
    """Yields this rank's part of what the conversion makes, by the model's names."""
    target = tensors[conversion.target]
    mine = local_slices(target)
    if conversion.rule is None:
        (name,) = conversion.names
        _check_shape(conversion.target, stored[name].shape, target, where)
        yield conversion.target, stored[name].read(mine)
    elif conversion.stacks_rows and all(len(names) == len(target) for names in conversion.sources.values()):
        if mine[0].start < mine[0].stop:
            made = conversion.convert(lambda name: stored[name].read(), twin, mine[0])[conversion.target]
            _check_shape(conversion.target, (len(target), *made.shape[1:]), target, where)
            yield conversion.target, made[(slice(None), *mine[1:])]
        else:
            yield conversion.target, torch.empty(local(target).shape)
    else:
        for name, made in conversion.convert(lambda name: stored[name].read(), twin).items():
            _check_shape(name, tuple(made.shape), tensors[name], where)
            yield name, made[local_slices(tensors[name])]


def _check_shape(name: str, found: tuple[int, ...], target: Tensor, where: str) -> None:
    if found != tuple(target.shape):
        raise UserError(
            f"the weights of {where!r} do not fit its config.json",
            found=f"{name} is {list(found)}, by the config {list(target.shape)}",
            remedy="restore the config.json that these weights were saved with",
        )


def _check_complete(
    packed: PackedModel, tensors: Mapping[str, Tensor], read: Collection[int], seed: int, where: str
) -> None:
    """Checks that everything was read; draws a scalar head that was not.

    Raises:
        UserError: something else was not read, under any name.
    """
    missing = {name: tensor for name, tensor in tensors.items() if id(tensor) not in read}
    if isinstance(packed, PackedScalarModel):
        heads = [name for name, tensor in missing.items() if tensor is packed.head.weight]
        for name in heads:
            head = missing.pop(name)
            write_part(head, init_scalar_head(head.shape, seed))
    if missing:
        raise UserError(
            f"{where!r} is not a whole {type(packed.model).__name__}",
            found=f"its weights lack {format_names(missing)}",
            remedy="download the directory again, or correct its config.json",
        )


def _make_buffers(model: PreTrainedModel, twin: PreTrainedModel) -> None:
    """Fills buffers that no file has, as those of rotary embeddings, with what the model's own code puts there."""
    kept = twin.state_dict().keys()
    here = dict(model.named_buffers())
    wanted = [name for name, _ in twin.named_buffers() if name not in kept and name in here]
    if not wanted:
        return
    for name in wanted:
        parent, _, last = name.rpartition(".")
        module = twin.get_submodule(parent)
        setattr(module, last, torch.zeros_like(module.get_buffer(last), device="cpu"))
    for module in twin.modules():
        vars(module).pop("_is_hf_initialized", None)
    with torch.random.fork_rng(devices=[]):
        twin.initialize_weights()
    for name in wanted:
        model.get_buffer(name).copy_(twin.get_buffer(name))
