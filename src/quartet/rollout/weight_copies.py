"""One weight, or those of one layer, in the form that products of few rows want.

Shapes: R rows, D inputs, O outputs.

A copy follows its source, the trainer's parameter, and stands in the model only within engine steps. Where an adapter
adds to the weight, the copy is of the merged one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quartet.models.lora import AdaptedLayer

Form = Callable[[Tensor], Tensor]
"""A weight in another form."""
MIN_PACKED = 2**17
"""Numbers of a weight from which on a packed product is quicker than a transposed one."""
MAX_TRANSPOSED_INPUTS = 768
"""On one thread, sums over more numbers than this take another order in a transposed product, and one that depends on
the number of rows; a request would then get other bits alone than in a batch."""


# Forms ---------------------------------------------------------------------------------------------------


def as_it_is(weight: Tensor) -> Tensor:
    return weight


def halved(weight: Tensor) -> Tensor:
    return weight.to(torch.bfloat16)


def transposed(weight: Tensor) -> Tensor:
    return weight.t().contiguous().t()


def packed_for(num_rows: int) -> Form:
    """In the blocks that oneDNN's kernel reads for products of about ``num_rows`` rows.

    A row's bits do not depend on the number of rows, from two rows on, whatever the number of threads.
    """
    return partial(torch.ops.mkldnn._reorder_linear_weight, batch_size=num_rows)


def is_packed_best(num_numbers: int) -> bool:
    """Whether a packed product of an fp32 weight on the CPU can be had and is quicker."""
    mkldnn = torch.backends.mkldnn
    return num_numbers >= MIN_PACKED and bool(mkldnn.is_available() and mkldnn.enabled)


def plain_form(num_inputs: int) -> Form:
    """Transposed where that gives a row the same bits in any batch."""
    return transposed if num_inputs <= MAX_TRANSPOSED_INPUTS or torch.get_num_threads() > 1 else as_it_is


class FormedWeight:
    """A weight ``[O, D]`` in one form, in the same memory from one version of the weight to the next.

    Attributes:
        tensor: None until ``take``, and after ``drop``.
    """

    def __init__(self, form: Form) -> None:
        self._form = form
        self.tensor: Tensor | None = None
        self.num_bytes = 0

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        if self.tensor is not None and self.tensor.is_mkldnn:
            # The library gives no way to pack into memory that is there already, so that is given back first.
            self.tensor = None
        if self.tensor is None:
            self.tensor = self._form(weight)
        elif self.tensor.is_contiguous():
            self.tensor.copy_(weight)
        else:
            # Seen from its contiguous side, a transposition is copied in blocks.
            self.tensor.t().copy_(weight.t())
        self.num_bytes = self.tensor.numel() * self.tensor.element_size()

    def drop(self) -> None:
        """Gives the memory back."""
        self.tensor, self.num_bytes = None, 0

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x Wᵀ + bias``: ``[..., D] → [..., O]``."""
        weight = self.tensor
        assert weight is not None
        if weight.is_mkldnn:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
            return out
        return F.linear(x, weight, bias)


# Copies --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CopySource:
    """A parameter, and the adapter that adds to it where one does."""

    parameter: Tensor
    layer: AdaptedLayer | None = None

    @property
    def versions(self) -> tuple[int, ...]:
        """Differ after every change in place."""
        tensors = (self.parameter,) if self.layer is None else self.layer.sources
        return tuple(tensor._version for tensor in tensors)

    @property
    def is_trained(self) -> bool:
        """An update changes it."""
        return self.parameter.requires_grad if self.layer is None else True

    def read(self) -> Tensor:
        """The weight to compute with, now."""
        return self.parameter.detach() if self.layer is None else self.layer.merged_weight()


class WeightCopy(ABC):
    """The weights of ``sources`` in forms that stand in for them while it is put in."""

    def __init__(self, sources: Sequence[CopySource], forms: Sequence[Form]) -> None:
        self._sources = sources
        self._weights = [FormedWeight(form) for form in forms]
        self._versions: list[tuple[int, ...]] | None = None
        self.refresh()

    @property
    def is_trained(self) -> bool:
        """An update makes it stale."""
        return any(source.is_trained for source in self._sources)

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self._weights)

    def refresh(self) -> None:
        """Copies the sources anew."""
        self._versions = [source.versions for source in self._sources]
        for weight, values in zip(self._weights, self._read(), strict=True):
            weight.take(values)

    def _read(self) -> Iterator[Tensor]:
        """What the forms are made of, one at a time."""
        return (source.read() for source in self._sources)

    def follow(self) -> None:
        """Copies the sources anew if one was changed in place since, or the copy was dropped."""
        if self._versions != [source.versions for source in self._sources]:
            self.refresh()

    def drop(self) -> None:
        """Gives the memory back until the copy is wanted again."""
        self._versions = None
        for weight in self._weights:
            weight.drop()

    @abstractmethod
    def put_in(self) -> None:
        """From now on the model computes with the copy."""

    @abstractmethod
    def take_out(self) -> None:
        """From now on the model computes with its own parameters."""


class ConvertedWeight(WeightCopy):
    """A dense tensor in the place of a module's parameter: in another dtype, or transposed in memory."""

    def __init__(self, module: nn.Module, name: str, source: CopySource, form: Form) -> None:
        self._module, self._name = module, name
        super().__init__([source], [form])

    def put_in(self) -> None:
        self._module._parameters[self._name] = self._weights[0].tensor  # type: ignore[assignment]

    def take_out(self) -> None:
        self._module._parameters[self._name] = self._sources[0].parameter  # type: ignore[assignment]


class PackedProduct(WeightCopy):
    """The weight of a linear layer in the blocks that oneDNN's kernel reads; the module gets another forward."""

    def __init__(self, module: nn.Linear, num_rows: int, layer: AdaptedLayer | None = None) -> None:
        self._module: Any = module
        super().__init__([CopySource(module.weight, layer)], [packed_for(num_rows)])

    def put_in(self) -> None:
        self._module.forward = self._forward

    def take_out(self) -> None:
        # The instance's attribute goes, and the class's method shows again.
        del self._module.forward

    def _forward(self, x: Tensor) -> Tensor:
        return self._weights[0].product(x, self._module.bias)
