"""An engine's own copy of the weights: made from the actor's, given back, made anew."""

from __future__ import annotations

import copy

from torch import nn

from quartet.models.packed import PackedCausalLM


def own_copy(packed: PackedCausalLM) -> PackedCausalLM:
    """An independent copy for an engine of its own in the same process: weights, adapters, precision, numerics.

    What was found out about the model (shared prompts, the logits' scale) is taken over, not found out again. Gradients
    stay behind, and the copy takes none.
    """
    if packed.adapters is not None:
        packed.adapters.check_in()
    copied = copy.deepcopy(packed)
    copied.model.requires_grad_(False)
    return copied


def num_bytes_of(model: nn.Module) -> int:
    """Of all parameters, each once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


class DiscardedWeights:
    """Frees the storage of every parameter; ``restore`` allocates it again in the same layout, without contents."""

    def __init__(self, model: nn.Module) -> None:
        self._layouts = [(parameter, parameter.shape, parameter.stride()) for parameter in model.parameters()]
        for parameter, *_ in self._layouts:
            parameter.data = parameter.data.new_empty(0)

    def restore(self) -> None:
        for parameter, shape, stride in self._layouts:
            parameter.data = parameter.data.new_empty_strided(shape, stride).zero_()
