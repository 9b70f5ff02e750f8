"""One weight, or those of one layer, in the form that products of few rows want.

Shapes: R rows, D inputs, O outputs.

A copy follows its source, the trainer's parameter, and stands in the model only within engine steps. Where an adapter
adds to the weight, the copy is of the merged one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """Something computed from ``sources`` that stands in for them while it is put in."""

    def __init__(self, *sources: CopySource) -> None:
        self._sources = sources
        self._versions: tuple[tuple[int, ...], ...] | None = None
        self.refresh()

    @property
    def is_trained(self) -> bool:
        """An update makes it stale."""
        return any(source.is_trained for source in self._sources)

    def refresh(self) -> None:
        """Copies the sources anew."""
        self._versions = self._current_versions
        self._take([source.read() for source in self._sources])

    def follow(self) -> None:
        """Copies the sources anew if one was changed in place since, or the copy was dropped."""
        if self._versions != self._current_versions:
            self.refresh()

    def drop(self) -> None:
        """Gives the memory back until the copy is wanted again."""
        self._versions = None
        self._give_back()

    @property
    def _current_versions(self) -> tuple[tuple[int, ...], ...]:
        return tuple(source.versions for source in self._sources)

    @property
    @abstractmethod
    def num_bytes(self) -> int: ...

    @abstractmethod
    def _take(self, weights: list[Tensor]) -> None: ...

    @abstractmethod
    def _give_back(self) -> None: ...

    @abstractmethod
    def put_in(self) -> None:
        """From now on the model computes with the copy."""

    @abstractmethod
    def take_out(self) -> None:
        """From now on the model computes with its own parameters."""


class ConvertedWeight(WeightCopy):
    """A dense tensor in the place of a module's parameter: in another dtype, or transposed in memory."""

    def __init__(self, module: nn.Module, name: str, source: CopySource, form: Form) -> None:
        self._module = module
        self._name = name
        self._form = form
        self._copy: Tensor | None = None
        super().__init__(source)

    @property
    def num_bytes(self) -> int:
        return 0 if self._copy is None else self._copy.numel() * self._copy.element_size()

    @torch.no_grad()
    def _take(self, weights: list[Tensor]) -> None:
        self._copy = into(self._copy, weights[0], self._form)

    def _give_back(self) -> None:
        self._copy = None

    def put_in(self) -> None:
        self._module._parameters[self._name] = self._copy  # type: ignore[assignment]

    def take_out(self) -> None:
        self._module._parameters[self._name] = self._sources[0].parameter  # type: ignore[assignment]


class ProductCopy(WeightCopy):
    """Weights in the forms of their products, for another forward of a module."""

    def __init__(self, products: Sequence[Product], *sources: CopySource) -> None:
        self._products = products
        super().__init__(*sources)

    @property
    def num_bytes(self) -> int:
        return sum(product.num_bytes for product in self._products)

    def _give_back(self) -> None:
        for product in self._products:
            product.drop()


class PackedProduct(ProductCopy):
    """The weight of a linear layer in the blocks that oneDNN's kernel reads; the module gets another forward."""

    def __init__(self, module: nn.Linear, num_rows: int, layer: AdaptedLayer | None = None) -> None:
        self._module: Any = module
        super().__init__([BlockedProduct(num_rows)], CopySource(module.weight, layer))

    def _take(self, weights: list[Tensor]) -> None:
        self._products[0].take(weights[0])

    def put_in(self) -> None:
        self._module.forward = self._forward

    def take_out(self) -> None:
        # The instance's attribute goes, and the class's method shows again.
        del self._module.forward

    def _forward(self, x: Tensor) -> Tensor:
        return self._products[0](x, self._module.bias)


# Products without a module -------------------------------------------------------------------------------


class Product(ABC):
    """``x Wᵀ + bias`` of a weight ``[O, D]`` that ``take`` brings into its form."""

    num_bytes = 0
    _weight: Tensor | None = None

    @abstractmethod
    def take(self, weight: Tensor) -> None: ...

    def drop(self) -> None:
        """Gives the memory back; ``take`` comes before the next product."""
        self._weight, self.num_bytes = None, 0

    @abstractmethod
    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``[..., D] → [..., O]``"""


class BlockedProduct(Product):
    """In the blocks that oneDNN's kernel reads.

    A row's bits do not depend on the number of rows, from two rows on, whatever the number of threads.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def take(self, weight: Tensor) -> None:
        # The library gives no way to pack into memory that is there already, so that is given back first.
        self._weight = None
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, self._num_rows)
        self.num_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, bias, "none", [], "")
        return out


class DenseProduct(Product):
    """A plain tensor, transposed in memory where that is quicker."""

    def __init__(self, form: Form) -> None:
        self._form = form

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        self._weight = into(self._weight, weight, self._form)
        self.num_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        assert self._weight is not None
        return F.linear(x, self._weight, bias)


def product_for(num_numbers: int, num_inputs: int, num_rows: int) -> Product:
    """The quickest product of an fp32 weight on the CPU."""
    if num_numbers >= MIN_PACKED and blocks_are_at_hand():
        return BlockedProduct(num_rows)
    return DenseProduct(transposed if transposes(num_inputs) else as_it_is)


def into(copy: Tensor | None, weight: Tensor, form: Form) -> Tensor:
    """``weight`` in its form, in the memory of ``copy`` where there is one."""
    if copy is None:
        return form(weight)
    if copy.is_contiguous():
        copy.copy_(weight)
    else:
        # Seen from its contiguous side, a transposition is copied in blocks.
        copy.t().copy_(weight.t())
    return copy


# Forms ---------------------------------------------------------------------------------------------------


def as_it_is(weight: Tensor) -> Tensor:
    return weight


def halved(weight: Tensor) -> Tensor:
    return weight.to(torch.bfloat16)


def transposed(weight: Tensor) -> Tensor:
    return weight.t().contiguous().t()


def transposes(num_inputs: int) -> bool:
    """Whether a transposed product gives a row the same bits in any batch."""
    return num_inputs <= MAX_TRANSPOSED_INPUTS or torch.get_num_threads() > 1


def blocks_are_at_hand() -> bool:
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)
