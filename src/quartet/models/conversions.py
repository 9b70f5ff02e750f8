"""Which tensors of a model's files become which tensors of the model, as transformers converts them, one by one.

Most families' files have the model's own names. transformers keeps rules for the others (``conversion_mapping``):
names that are changed, and *conversions* of a few tensors into a few others, as the experts of a layer into one tensor.
transformers applies them to whole models; here each is a ``Conversion`` that is done when its tensors are needed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from quartet.models.attention import own_attention


@dataclass(frozen=True)
class Conversion:
    """Tensors that become others together; most often one that only has another name.

    Attributes:
        target: the name of what comes out, the first where it is several.
        sources: names of what goes in, by the pattern of the rule that they fit.
        rule: None where a name is all that changes.
        renamings: of the names of what the rule has made.
    """

    target: str
    rule: WeightConverter | None = None
    sources: dict[str, list[str]] = field(default_factory=dict)
    renamings: Sequence[WeightRenaming] = ()

    @property
    def names(self) -> list[str]:
        """Of all that goes in."""
        return [name for names in self.sources.values() for name in names]

    @property
    def stacks_rows(self) -> bool:
        """Whether row ``i`` of what comes out is made of the ``i``-th source of every pattern alone: then a range of
        rows needs only those."""
        if self.rule is None or len(self.rule.target_patterns) > 1:
            return False
        first, *others = self.rule.operations
        keeps = all(
            (isinstance(op, Concatenate) and op.dim > 0) or (isinstance(op, Transpose) and min(op.dim0, op.dim1) > 0)
            for op in others
        )
        return isinstance(first, MergeModulelist) and first.dim == 0 and keeps

    def convert(
        self, read: Callable[[str], Tensor], model: PreTrainedModel, rows: slice | None = None
    ) -> dict[str, Tensor]:
        """What comes out, by name.

        Args:
            read: gives what goes in.
            model: whose conversion it is; its contents are not looked at.
            rows: only these of what comes out; where ``stacks_rows``.
        """
        if self.rule is None:
            return {self.target: read(self.names[0])}
        rule = copy.deepcopy(self.rule)
        for pattern, names in self.sources.items():
            for name in names[rows] if rows is not None else names:
                # transformers' types know futures alone, its code takes tensors.
                tensor: Any = read(name)
                rule.add_tensor(self.target, name, pattern, tensor)
        found: dict[str, Any] = rule.convert(self.target, model=model, config=model.config)
        return {
            rename_source_key(name, list(self.renamings), [])[0]: tensor[0] if isinstance(tensor, list) else tensor
            for name, tensor in found.items()
        }


def meta_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A model like ``model`` on the meta device as its class makes it: with all modules of its own and no others."""
    config = copy.deepcopy(model.config)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return type(model)._from_config(config, dtype=torch.float32, attn_implementation=own_attention(model))


def conversions_to_load(twin: PreTrainedModel, names: Collection[str]) -> tuple[list[Conversion], list[str]]:
    """How files' tensors become the model's, and the names of those that belong nowhere.

    Args:
        twin: as ``meta_twin`` makes it.
        names: in the files.
    """
    expected, prefix = twin.state_dict(), twin.base_model_prefix
    renamings, converters = _split(get_model_conversion_mapping(twin))
    found: dict[str, Conversion] = {}
    extra = []
    for name in sorted(names, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if renamed not in expected and name in expected:
            renamed, pattern = rename_source_key(name, [], [], prefix, expected)
        if renamed in expected:
            _add(found, renamed, name, pattern, converters)
        else:
            extra.append(name)
    return list(found.values()), extra


def conversions_to_save(model: PreTrainedModel, twin: PreTrainedModel, names: Iterable[str]) -> list[Conversion]:
    """How the model's tensors become those of its files, as ``save_pretrained`` does it.

    Args:
        model: which may remember how it was loaded.
        twin: as ``meta_twin`` makes it of ``model``.
        names: in the model.
    """
    forward: list[WeightTransform] | None = getattr(model, "_weight_conversions", None)
    if forward is None:
        # Of a prefix it is not known whether the model's files had it.
        found = get_model_conversion_mapping(twin, add_legacy=False)
        forward = [transform for transform in found if not isinstance(transform, PrefixChange)]
    renamings, converters = _split([transform.reverse_transform() for transform in reversed(forward)])
    made: dict[str, Conversion] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, [], converters)
        if pattern is None:
            target, _ = rename_source_key(name, renamings, [])
        _add(made, target, name, pattern, converters)
    return [replace(c, renamings=renamings) if c.rule is not None else c for c in made.values()]


def _split(transforms: Iterable[WeightTransform]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    found = list(transforms)
    return [t for t in found if isinstance(t, WeightRenaming)], [t for t in found if isinstance(t, WeightConverter)]


def _add(
    found: dict[str, Conversion], target: str, name: str, pattern: str | None, converters: Sequence[WeightConverter]
) -> None:
    rule = next((c for c in converters if pattern in c.source_patterns), None) if pattern is not None else None
    conversion = found.setdefault(target, Conversion(target, rule))
    conversion.sources.setdefault(pattern or name, []).append(name)
