"""Copies of a model's weights in the form that its products want, used only inside engine steps.

The trainer's master weights are fp32. Under bf16 autocast every product would cast its weight again at every step, so
the engine keeps the cast weights. In fp32 on a CPU a product of few rows spends much of its time bringing the weight
into the order its kernel reads; the engine keeps large weights in that order and small ones transposed
(``benchmarks/products.py`` compares the three), and runs layers of the common kind as fewer operations
(``merged_layers.py``).

A model with adapters computes with merged weights here: plain layers again, without the adapters' products in every
step. Exact numerics keep the trainer's own products instead, whose bits a merged weight does not give.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quartet.models.lora import AdaptedLayer
from quartet.models.memory import note_derived
from quartet.models.packed_model import PackedCausalLM, decoder_layers
from quartet.rollout.merged_layers import MergedLayers
from quartet.rollout.weight_copies import (
    ConvertedWeight,
    CopySource,
    Form,
    PackedProduct,
    WeightCopy,
    as_it_is,
    halved,
    is_packed_best,
    plain_form,
)


class ComputeWeights:
    """
    Args:
        packed: whose linear layers are copied at the first use. Copies follow the weights: those changed in place since
            the last use are copied again.
        num_rows: rows that most products have.
        in_place: nothing else uses the model, so weights that are cast or transposed singly change their own form and
            are not held twice; but for those under adapters, which the next ones are added to.
    """

    def __init__(self, packed: PackedCausalLM, *, num_rows: int = 64, in_place: bool = False) -> None:
        self._packed = packed
        self._num_rows = num_rows
        self._in_place = in_place
        self._copies: list[WeightCopy] | None = None
        note_derived(packed.model, self)

    @property
    def num_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self._copies or ())

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within, the model computes with the copies.

        Raises:
            RuntimeError: the model's adapters are out: it serves as a reference now.
        """
        adapters = self._packed.adapters
        if adapters is not None:
            adapters.check_in()
        copies = self._current()
        merges = adapters is not None and self._packed.numerics != "exact"
        with self._packed.without_adapters() if merges else contextlib.nullcontext():
            for copy in copies:
                copy.put_in()
            try:
                yield
            finally:
                for copy in copies:
                    copy.take_out()

    def prepare(self) -> None:
        """Makes the copies now: weights that change their own form have their final layout afterwards."""
        self._current()

    def refresh(self) -> None:
        """Copies all weights anew."""
        for copy in self._copies or ():
            copy.refresh()

    def drop(self) -> None:
        """Gives back the memory of copies whose sources are trained; the next use copies these again."""
        for copy in self._copies or ():
            if copy.is_trained:
                copy.drop()

    def release(self) -> None:
        """Gives the memory back; the next use copies again."""
        self._copies = None

    def _current(self) -> list[WeightCopy]:
        if self._copies is None:
            self._copies = list(self._make())
        for copy in self._copies:
            copy.follow()
        return self._copies

    def _make(self) -> Iterator[WeightCopy]:
        packed = self._packed
        if packed.numerics == "exact":
            return
        adapters = packed.adapters.layers if packed.adapters is not None else []
        adapted: dict[nn.Module, AdaptedLayer] = {layer.base: layer for layer in adapters}
        merged: set[nn.Module] = set()
        if packed.precision == "fp32" and packed.device.type == "cpu":
            kinds = MergedLayers()
            with packed.without_adapters():
                for module in decoder_layers(packed.body):
                    layer = kinds.merge(module, self._num_rows, adapted)
                    if layer is not None:
                        merged.update(layer.linears)
                        yield layer
        yield from self._single_weights(adapted, merged)

    def _single_weights(self, adapted: dict[nn.Module, AdaptedLayer], done: set[nn.Module]) -> Iterator[WeightCopy]:
        packed = self._packed
        uses = Counter(p for m in packed.model.modules() for p in m._parameters.values() if p is not None)
        factors = {id(factor) for layer in adapted.values() for factor in layer.factors}
        in_bf16 = packed.precision == "bf16"
        kinds = (nn.Linear, Conv1D) if in_bf16 else (nn.Linear,)
        for module in packed.model.modules():
            layer = adapted.get(module)
            if module in done or (type(module) not in kinds and layer is None):
                continue
            if not in_bf16 and isinstance(module, nn.Linear) and id(module.weight) not in factors and _packs(module):
                yield PackedProduct(module, self._num_rows, layer)
                continue
            for name, parameter in module._parameters.items():
                if parameter is None or id(parameter) in factors:
                    continue
                merged_by = layer if name == "weight" else None
                # Conv1D keeps its weight turned around already.
                form = _form(parameter, in_bf16) if in_bf16 or isinstance(module, nn.Linear) else as_it_is
                if form is as_it_is and merged_by is None:
                    continue
                if self._in_place and merged_by is None and uses[parameter] == 1:
                    parameter.data = form(parameter.detach())
                else:
                    yield ConvertedWeight(module, name, CopySource(parameter, merged_by), form)


def _form(parameter: nn.Parameter, in_bf16: bool) -> Form:
    """The form in which products of few rows run fastest, or under autocast without a cast."""
    if parameter.dtype != torch.float32:
        return as_it_is
    if in_bf16:
        return halved
    if parameter.dim() != 2 or parameter.device.type != "cpu":
        return as_it_is
    return plain_form(parameter.shape[1])


def _packs(module: nn.Linear) -> bool:
    """Whether a packed product can be had and is quicker."""
    weight = module.weight
    return (
        "forward" not in vars(module)
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and is_packed_best(weight.numel())
    )
