"""Gradients between passes and the optimizer: sums over copies and tensor ranks, and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from quartet.train.parallel.pass_group import PassGroup
from quartet.train.parallel.tensors import is_first_of_tensor_ranks, is_whole_on_tensor_ranks, local


def sum_copies(group: Any, copies: PassGroup | None, *, in_order: bool) -> None:
    """Leaves in a group's parameters the sums over copies of what the passes have left of their gradients.

    torch would do it within the last backward, where a rank that failed could not follow.

    Args:
        group: of FSDP's.
        copies: None where there is one.
    """
    total, group._partial_reduce_output = group._partial_reduce_output, None
    if total is None:
        return
    if copies is not None:
        copies.sum_up(total, in_order=in_order)
    trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    of_each = total.split([p._sharded_param_data.numel() for p in trained])
    for parameter, values in zip(trained, of_each, strict=True):
        shard = parameter.sharded_param
        own = values[: parameter.sharded_size.numel()].view(parameter.sharded_size)
        shard.grad = parameter.to_sharded_dtensor(own.to(shard.device, shard.dtype))


def sum_over_tensor_ranks(parameters: Iterable[nn.Parameter], ranks: PassGroup, device_type: str) -> None:
    """Sums up gradients of parameters that tensor ranks do not cut: each rank has those of its rows or heads."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None and is_whole_on_tensor_ranks(p)]
    if not gradients:
        return
    total = torch.cat([gradient.flatten().to(device_type) for gradient in gradients])
    ranks.sum_up(total, in_order=True)
    for gradient, values in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(values.view_as(gradient))


@torch.no_grad()
def clip_sharded_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, total_norm: Callable[[float], float]
) -> float:
    """Clips gradients of which every rank has its part, as ``clip_gradients`` does; all ranks return the same number.

    Args:
        total_norm: of all ranks' parts, from this one's.
    """
    found = [p.grad for p in parameters if p.grad is not None]
    gradients = [local(gradient) for gradient in found]
    # What tensor ranks have alike counts on the first of them.
    own_parts = [part for part, whole in zip(gradients, found, strict=True) if is_first_of_tensor_ranks(whole)]
    counted = [part for part in own_parts if part.numel()]
    own = nn.utils.get_total_norm(counted) if counted else torch.zeros(())
    norm = total_norm(float(own))
    if math.isfinite(norm) and norm + 1e-6 > max_norm:
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))
    return norm
