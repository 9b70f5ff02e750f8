"""Copies of a model's weights in the form that its products want, used only inside engine steps.

The trainer's master weights are fp32. Under bf16 autocast every product would cast its weight again at every step, so
the engine keeps the cast weights. In fp32 on a CPU it keeps them transposed: with few rows a product then runs 1.3 to
2 times as fast (``benchmarks/step_floors.py``), because the library need not turn the weight around each time.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quartet.models.packed import PackedCausalLM

MAX_TRANSPOSED_INPUTS = 768
"""On one thread, sums over more numbers than this take another order in a transposed product, and one that depends on
the number of rows; a request would then get other bits alone than in company."""


@dataclass
class _Copy:
    """A weight or bias: ``module.name`` is ``source`` outside and ``copy`` inside engine steps."""

    module: nn.Module
    name: str
    source: nn.Parameter
    copy: Tensor
    version: int


class ComputeWeights:
    """
    Args:
        packed: whose linear layers are copied at the first use. Copies follow the weights: those changed in place since
            the last use are copied again.
        in_place: nobody else uses the model, so its own weights change their form and nothing is held twice.
    """

    def __init__(self, packed: PackedCausalLM, *, in_place: bool = False) -> None:
        self._packed = packed
        self._in_place = in_place
        self._copies: list[_Copy] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(c.copy.numel() * c.copy.element_size() for c in self._copies or ())

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within, the model computes with the copies."""
        copies = self._current()
        for c in copies:
            c.module._parameters[c.name] = c.copy  # type: ignore[assignment]
        try:
            yield
        finally:
            for c in copies:
                c.module._parameters[c.name] = c.source

    def refresh(self) -> None:
        """Copies all weights anew, in place."""
        for c in self._copies or ():
            _copy_into(c)

    def release(self) -> None:
        """Gives the memory back; the next use copies again."""
        self._copies = None

    def _current(self) -> list[_Copy]:
        if self._copies is None:
            self._copies = []
            for module, name, parameter in self._weights():
                converted = self._converted(parameter)
                if self._in_place and self._uses[parameter] == 1:
                    parameter.data = converted
                else:
                    self._copies.append(_Copy(module, name, parameter, converted, parameter._version))
        for c in self._copies:
            if c.source._version != c.version:
                _copy_into(c)
        return self._copies

    def _weights(self) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        packed = self._packed
        self._uses = Counter(p for m in packed.model.modules() for p in m._parameters.values() if p is not None)
        halved = packed.precision == "bf16"
        if packed.numerics == "exact":
            return
        for module in packed.model.modules():
            kinds = (nn.Linear, Conv1D) if halved else (nn.Linear,)
            if type(module) not in kinds:
                continue
            for name, parameter in module._parameters.items():
                if parameter is None or parameter.dtype != torch.float32:
                    continue
                if halved or self._is_faster_transposed(parameter):
                    yield module, name, parameter

    @staticmethod
    def _is_faster_transposed(weight: Tensor) -> bool:
        if weight.dim() != 2 or weight.device.type != "cpu":
            return False
        return weight.shape[1] <= MAX_TRANSPOSED_INPUTS or torch.get_num_threads() > 1

    def _converted(self, parameter: nn.Parameter) -> Tensor:
        if self._packed.precision == "bf16":
            return parameter.detach().to(torch.bfloat16)
        return parameter.detach().t().contiguous().t()


@torch.no_grad()
def _copy_into(copy: _Copy) -> None:
    copy.copy.copy_(copy.source)
    copy.version = copy.source._version
