"""Which form each weight of an engine has: in fp32 on the CPU large ones in the order that kernels read, small ones
transposed (``benchmarks/products.py`` compares), and layers of the common kind as fewer operations.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quartet.extras.cpu_kernels.merged_layers import MergedLayers
from quartet.extras.cpu_kernels.products import PackedProduct, is_packed_best, plain_form
from quartet.models.packed_model import PackedCausalLM, decoder_layers
from quartet.rollout.compute_dtype_weights import Adapted, Form, WeightCopy, as_it_is, converted


def copies(packed: PackedCausalLM, adapted: Adapted, num_rows: int, in_place: bool) -> Iterator[WeightCopy]:
    """The copies of what computes in fp32 on the CPU.

    Args:
        adapted: adapters by the layer that they add to.
        num_rows: rows that most products have.
        in_place: nothing else uses the model.
    """
    if packed.precision != "fp32":
        return
    done: set[nn.Module] = set()
    if packed.device.type == "cpu":
        kinds = MergedLayers()
        with packed.without_adapters():
            for module in decoder_layers(packed.body):
                layer = kinds.merge(module, num_rows, adapted)
                if layer is not None:
                    done.update(layer.modules)
                    yield layer
    factors = {id(factor) for layer in adapted.values() for factor in layer.factors}
    for module in packed.model.modules():
        is_single = module not in done and (type(module) is nn.Linear or module in adapted)
        if is_single and isinstance(module, nn.Linear) and id(module.weight) not in factors and _packs(module):
            done.add(module)
            yield PackedProduct(module, num_rows, adapted.get(module))

    def form_of(module: nn.Module, parameter: nn.Parameter) -> Form:
        is_linear = type(module) is nn.Linear or (isinstance(module, nn.Linear) and module in adapted)
        is_plain = parameter.dtype == torch.float32 and parameter.dim() == 2 and parameter.device.type == "cpu"
        return plain_form(parameter.shape[1]) if is_linear and is_plain else as_it_is

    yield from converted(packed, adapted, done, form_of, in_place=in_place)


def _packs(module: nn.Linear) -> bool:
    """Whether a packed product can be had and is quicker."""
    weight = module.weight
    return (
        "forward" not in vars(module)
        and weight.dtype == torch.float32
        and weight.device.type == "cpu"
        and is_packed_best(weight.numel())
    )
