"""Copies of a model's weights in the form that its products want, used only inside engine steps.

Shapes: D inputs, O outputs.

The trainer's master weights are fp32. Under bf16 autocast every product would cast its weight again at every step, so
the engine keeps the cast weights. Plug-ins may have other forms (``weight_form``, docs/plugins.md).

A copy follows its source, the trainer's parameter, and stands in the model only within engine steps. A model with
adapters computes with merged weights here: plain layers again, without the adapters' products in every step. Exact
numerics keep the trainer's own products instead, whose bits a merged weight does not give.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quartet.config.plugins import load_object, weight_forms
from quartet.models.lora import AdaptedLayer
from quartet.models.memory import register_derived
from quartet.models.packed_model import PackedCausalLM

Adapted = Mapping[nn.Module, AdaptedLayer]
Form = Callable[[Tensor], Tensor]
"""A weight in another form."""


# Forms ---------------------------------------------------------------------------------------------------


def keep_dtype(weight: Tensor) -> Tensor:
    return weight


def to_bf16(weight: Tensor) -> Tensor:
    return weight.to(torch.bfloat16)


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
        """Returns the weight to compute with, now."""
        return self.parameter.detach() if self.layer is None else self.layer.merged_weight()


class WeightCopy(ABC):
    """The weights of ``sources`` in forms that stand in for them while it is put in.

    Args:
        modules: those whose weights it has.

    Attributes:
        tensors: ``[O, D]`` one of each form, in the same memory from one version of the weights to the next; None after
            ``drop``.
    """

    def __init__(self, modules: Sequence[nn.Module], sources: Sequence[CopySource], forms: Sequence[Form]) -> None:
        self.modules = modules
        self._sources, self._forms = sources, forms
        self.tensors: list[Tensor | None] = [None] * len(forms)
        self._versions: list[tuple[int, ...]] | None = None
        self.refresh()

    @property
    def is_trained(self) -> bool:
        """An update makes it stale."""
        return any(source.is_trained for source in self._sources)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors if tensor is not None)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the sources anew."""
        self._versions = [source.versions for source in self._sources]
        for i, weight in enumerate(self._read()):
            tensor = self.tensors[i]
            if tensor is None or tensor.is_mkldnn:
                # oneDNN gives no way to pack into memory that is there already, so that is given back first.
                self.tensors[i] = tensor = None
                self.tensors[i] = self._forms[i](weight)
            elif tensor.is_contiguous():
                tensor.copy_(weight)
            else:
                # Seen from its contiguous side, a transposition is copied in blocks.
                tensor.t().copy_(weight.t())

    def _read(self) -> Iterator[Tensor]:
        """Reads what the forms are made of, one at a time."""
        return (source.read() for source in self._sources)

    def follow(self) -> None:
        """Copies the sources anew if one was changed in place since, or the copy was dropped."""
        if self._versions != [source.versions for source in self._sources]:
            self.refresh()

    def drop(self) -> None:
        """Gives the memory back until the copy is wanted again."""
        self._versions, self.tensors = None, [None] * len(self._forms)

    @abstractmethod
    def put_in(self) -> None:
        """Makes the model compute from now on with the copy."""

    @abstractmethod
    def take_out(self) -> None:
        """Makes the model compute from now on with its own parameters."""


class ConvertedWeight(WeightCopy):
    """A dense tensor in the place of a module's parameter: in another dtype, or transposed in memory."""

    def __init__(self, module: nn.Module, name: str, source: CopySource, form: Form) -> None:
        self._module, self._name = module, name
        super().__init__([module], [source], [form])

    def put_in(self) -> None:
        assert self.tensors[0] is not None
        setattr(self._module, self._name, nn.Parameter(self.tensors[0], requires_grad=False))

    def take_out(self) -> None:
        setattr(self._module, self._name, self._sources[0].parameter)


# Of a whole model -----------------------------------------------------------------------------------------


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
        register_derived(packed.model, self)

    @property
    def num_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self._copies or ())

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes the model compute with the copies inside the block.

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
        adapted: Adapted = {layer.base: layer for layer in adapters}
        # A tower computes features for all roles, whose digest is of its own weights.
        done: set[nn.Module] = set() if packed.tower is None else set(packed.tower.modules())
        for form in weight_forms():
            for one in load_object(form.copies)(packed, adapted, self._num_rows, self._in_place):
                done.update(one.modules)
                yield one
        kinds = (nn.Linear, Conv1D) if packed.precision == "bf16" else ()

        def form_of(module: nn.Module, parameter: nn.Parameter) -> Form:
            """Chooses the form in which autocast uses a parameter without a cast."""
            is_cast = packed.precision == "bf16" and parameter.dtype == torch.float32
            return to_bf16 if is_cast and (type(module) in kinds or module in adapted) else keep_dtype

        yield from convert_parameters(packed, adapted, done, form_of, in_place=self._in_place)


def convert_parameters(
    packed: PackedCausalLM,
    adapted: Adapted,
    done: Collection[nn.Module],
    form_of: Callable[[nn.Module, nn.Parameter], Form],
    *,
    in_place: bool,
) -> Iterator[WeightCopy]:
    """Copies of single parameters that have another form, or that an adapter adds to.

    Args:
        adapted: adapters by the layer that they add to.
        done: modules that have copies already.
        in_place: as for ``ComputeWeights``.
    """
    uses = Counter(p for m in packed.model.modules() for p in m.parameters(recurse=False))
    factors = {id(factor) for layer in adapted.values() for factor in layer.factors}
    for module in packed.model.modules():
        for name, parameter in module.named_parameters(recurse=False) if module not in done else ():
            if id(parameter) in factors:
                continue
            merged_by = adapted.get(module) if name == "weight" else None
            form = form_of(module, parameter)
            if form is keep_dtype and merged_by is None:
                continue
            if in_place and merged_by is None and uses[parameter] == 1:
                parameter.data = form(parameter.detach())
            else:
                yield ConvertedWeight(module, name, CopySource(parameter, merged_by), form)
