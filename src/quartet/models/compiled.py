"""Decoder layers compiled by torch, so that what lies between two products runs as one kernel instead of many.

On a GPU a norm, a rotary embedding or a gate of an unmodified model is five to ten kernels that each read and write the
whole activation. Attention stays outside of what is compiled: its context objects change from call to call.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quartet.config import UserError
from quartet.models.attention import NAME
from quartet.models.packed_model import PackedModel, decoder_layers

_MIN_VARIANTS = 64
"""Compiled forms of one function that are kept: kinds of context x gradient mode x precision x architectures."""


class CompiledLayers:
    """The decoder layers of ``packed``, compiled for all shapes by their first calls, which take a minute or so.

    Parameters, their names and the model's class stay as they are; an engine that shares the model runs plain layers.

    Args:
        backend: torch's name of the compiler.

    Raises:
        UserError: the model has no decoder layers that transformers marks as such, or there is nothing to compile with.
    """

    def __init__(self, packed: PackedModel, *, backend: str = "inductor") -> None:
        self._layers = decoder_layers(packed.body)
        if not self._layers:
            raise UserError(
                f"the layers of {type(packed.model).__name__} cannot be compiled",
                found="none of its modules is a transformers decoder layer",
                remedy="leave train.compile out",
            )
        if backend == "inductor":
            _check_compiler(packed.device)
        packed.unfuse()
        # Attention stays outside of what is compiled, for all models of the process.
        function = ALL_ATTENTION_FUNCTIONS[NAME]
        if not getattr(function, "_torchdynamo_disable", False):
            AttentionInterface.register(NAME, torch.compiler.disable(function))
        torch.compiler.config.recompile_limit = max(torch.compiler.config.recompile_limit, _MIN_VARIANTS)
        self._calls = []
        for layer in self._layers:
            # On a GPU torch would otherwise time several forms of a kernel and keep the fastest.
            options = {"deterministic": True} if backend == "inductor" else None
            layer.compile(dynamic=True, backend=backend, options=options)
            self._calls.append(layer._compiled_call_impl)
            layer._compiled_call_impl = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within, the model runs its compiled layers."""
        for layer, call in zip(self._layers, self._calls, strict=True):
            layer._compiled_call_impl = call
        try:
            yield
        finally:
            for layer in self._layers:
                layer._compiled_call_impl = None


def _check_compiler(device: torch.device) -> None:
    """Refuses now what the first step would end with."""
    found = None
    if device.type == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            found = "no C++ compiler (g++ or clang++, or the one that CXX names)"
    elif importlib.util.find_spec("triton") is None:
        found = "no Triton"
    if found is not None:
        raise UserError("layers cannot be compiled here", found=found, remedy="install it, or leave train.compile out")
