"""The state of a model and of its training, flat: tensors by name, and everything else under ``rest``.

==========================================  ============================================================
``model.<parameter>``                       weights and buffers; tied ones once, under their first name
``optimizer.state.<parameter>.exp_avg``     what the optimizer keeps of each trained parameter
``rest``                                    plain values: counters, the optimizer's groups
==========================================  ============================================================

The names are those that ``torch.distributed.checkpoint`` gives the same tensors, whole or sharded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quartet.config import UserError
from quartet.models.memory import storage_bytes, view_like
from quartet.models.packed_model import PackedModel
from quartet.train.parallel.tensors import MODEL, OPTIMIZER, local, parameter_name, with_local

REST = "rest"
Shape = tuple[tuple[int, ...], torch.dtype]


def state_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns everything but the rest."""
    return {name: value for name, value in state.items() if name != REST}


def tensor_shapes(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def model_tensors(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors under their names in a state; of those that are one (tied weights) only the first."""
    found: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in named.items():
        here = local(tensor)
        place = (here.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        # Of a small tensor that is sharded some ranks have nothing: its object tells what is one.
        place = place if here.numel() else (id(tensor), *place[1:])
        if not tensor.numel() or place not in seen:
            found[MODEL + name] = tensor.detach()
        seen.add(place)
    return found


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the optimizer's tensors under their names in a state; of a parameter that was never updated there are
    none.
    """
    return {
        f"{OPTIMIZER}{name}.{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def make_optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], saved: Mapping[str, Shape]
) -> None:
    """Gives the optimizer the tensors that ``saved`` names and no others, new ones with any values, to be
    loaded into.
    """
    wanted: dict[str, dict[str, Shape]] = {}
    for full, shape in saved.items():
        if full.startswith(OPTIMIZER):
            name, _, key = full.removeprefix(OPTIMIZER).rpartition(".")
            wanted.setdefault(name, {})[key] = shape
    for name, parameter in parameters.items():
        there = optimizer.state.pop(parameter, {})
        if name in wanted:
            optimizer.state[parameter] = {
                key: there[key]
                if key in there and tensor_shapes({"": there[key]})[""] == shape
                else _like(parameter, shape)
                for key, shape in wanted[name].items()
            }


def _like(parameter: Tensor, shape: Shape) -> Tensor:
    size, dtype = shape
    if size == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(size, dtype=dtype, device=parameter.device)


def check_state_fits(live: Mapping[str, Shape], saved: Mapping[str, Shape], remedy: str) -> None:
    """
    Raises:
        UserError: there are other tensors than ``saved`` has, or of other shapes.
    """
    if differing := sorted(name for name in live.keys() | saved.keys() if live.get(name) != saved.get(name)):
        name = differing[0]
        raise UserError(
            "the checkpoint does not fit the model",
            found=f"{len(differing)} tensors differ, first {name}: {_said(saved.get(name))} in the checkpoint, "
            f"{_said(live.get(name))} now",
            remedy=remedy,
        )


def saved_here(saved: Mapping[str, Shape], packed: PackedModel) -> dict[str, Shape]:
    """Returns what a rank reads of a saved state: all but what other stages have."""
    if packed.stage is None:
        return dict(saved)
    gone = packed.stage.elsewhere(packed.model.state_dict())
    return {name: shape for name, shape in saved.items() if parameter_name(name) not in gone}


def _said(shape: Shape | None) -> str:
    return "none" if shape is None else f"{list(shape[0])} {str(shape[1]).removeprefix('torch.')}"


@contextmanager
def naming_state_errors(path: Path) -> Iterator[None]:
    """Turns into a UserError what the ``with`` block fails with as it reads the saved state at ``path``, although its
    digest was compared.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # The content decides what an unpickler raises.
        raise UserError(
            f"checkpoint {path} is as it was written, but cannot be loaded",
            found=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            remedy="free memory if that is what is missing, or use the version of torch that the run was started with",
        ) from error


# Copies ----------------------------------------------------------------------------------------------------


def copy_to_host(value: Any) -> Any:
    """Copies a state to host memory, where later updates do not change it: what ``torch.save`` takes, nested.

    Tensors that share a storage share one in the copy, so that it takes its room once. Of sharded ones this rank's part
    is copied.
    """
    storages: dict[tuple[torch.device, int], Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return copy.deepcopy(leaf)
        here = local(leaf)
        source = here.untyped_storage()
        place = (source.device, source.data_ptr())
        if place not in storages:
            storages[place] = torch.empty(source.nbytes(), dtype=torch.uint8).copy_(storage_bytes(source))
        return with_local(leaf, view_like(here, storages[place]))

    return _mapped(copied, value)


def state_bytes(value: Any) -> int:
    """Counts the bytes that ``copy_to_host`` takes."""
    storages: dict[tuple[torch.device, int], int] = {}

    def measured(leaf: Any) -> None:
        if isinstance(leaf, Tensor):
            source = local(leaf).untyped_storage()
            storages[source.device, source.data_ptr()] = source.nbytes()

    _mapped(measured, value)
    return sum(storages.values())


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies the function to all that is no dict, list or tuple."""
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(function, item) for item in value)
    return function(value)
