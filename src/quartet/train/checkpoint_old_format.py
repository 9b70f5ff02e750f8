"""Reads the parts of checkpoints as they were before workers wrote shares: one ``torch.save`` file per role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quartet.train.state import MODEL, OPTIMIZER, REST, model_tensors, reading


def load_part(path: Path, *, mmap: bool = False) -> Any:
    """What the file holds.

    Args:
        mmap: its tensors lie in the file until they are read; for those that are copied elsewhere at once.

    Raises:
        UserError: it cannot be loaded, although its digest was compared.
    """
    with reading(path):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def model_state(part: Mapping[str, Tensor]) -> dict[str, Any]:
    """A frozen model's part as a state of today."""
    return {**model_tensors(part), REST: {}}


def training_state(part: Mapping[str, Any], trained: Sequence[str]) -> dict[str, Any]:
    """A trained model's part as a state of today.

    Args:
        trained: names of the parameters in the optimizer's order, by whose numbers its tensors were kept.
    """
    model, optimizer = part["model"], part["optimizer"]
    has_adapters = "trained" in model and "base" in model
    moments = {
        f"{OPTIMIZER}{trained[number]}.{key}": value
        for number, values in optimizer["state"].items()
        for key, value in values.items()
    }
    rest = {key: part[key] for key in ("num_updates", "num_skipped", "budget", "forward_budget")}
    rest["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in optimizer["param_groups"]]
    if has_adapters:
        rest["base"] = model["base"]
        return {**{MODEL + name: tensor for name, tensor in model["trained"].items()}, **moments, REST: rest}
    return {**model_tensors(model), **moments, REST: rest}
