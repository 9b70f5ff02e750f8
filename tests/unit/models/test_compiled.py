"""Compiled decoder layers compute what plain ones do; with the compiler's graphs run as they are, for speed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quartet.config import UserError
from quartet.models.attention import NAME, PackedAttention
from quartet.models.packed_model import CompiledLayers, PackedCausalLM, decoder_layers

PACKS = (((5, 3, 4), (-1, 0, 0)), ((9,), (-1,)), ((3, 6, 2, 7), (-1, -1, -1, 2)))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_outputs_and_gradients_are_those_of_plain_layers(
    checkpointing: bool, make_model: Callable[..., nn.Module], close: Callable[..., None]
) -> None:
    model = make_model("qwen2")
    plain = PackedCausalLM(copy.deepcopy(model))
    plain.unfuse()
    fused = PackedCausalLM(copy.deepcopy(model), activation_checkpointing=checkpointing)
    names = set(fused.model.state_dict())
    compiled = CompiledLayers(fused, backend="eager")
    for lengths, parents in PACKS:
        num_tokens = sum(lengths)
        ids, positions = torch.arange(num_tokens) * 7 % 61, torch.arange(num_tokens)
        before = counters["frames"]["ok"]
        with compiled.active():
            hidden = [p.hidden(ids, positions, PackedAttention(lengths, parents)) for p in (plain, fused)]
            close(hidden[1], hidden[0])
            for packed, h in zip((plain, fused), hidden, strict=True):
                packed.model.zero_grad()
                h.square().sum().backward()
        assert (lengths, parents) != PACKS[0] or counters["frames"]["ok"] > before
        for ours, theirs in zip(fused.model.parameters(), plain.model.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None and theirs.grad is not None:
                close(ours.grad, theirs.grad)
    assert set(fused.model.state_dict()) == names
    assert all(("forward" in vars(layer)) == checkpointing for layer in decoder_layers(fused.body))


def test_new_packs_compile_nothing_new(make_model: Callable[..., nn.Module]) -> None:
    """What differs between packs is their attention, which stays outside."""
    packed = PackedCausalLM(make_model("llama"))
    compiled = CompiledLayers(packed, backend="eager")

    def run(first: int) -> None:
        lengths, parents = (first, 4, 4, 6), (-1, 0, 0, -1)
        num_tokens = sum(lengths)
        with compiled.active():
            packed.hidden(torch.arange(num_tokens), torch.arange(num_tokens), PackedAttention(lengths, parents))

    for first in (5, 9):
        run(first)
    before = counters["stats"]["unique_graphs"]
    for first in (7, 11, 20):
        run(first)
    assert before > 0
    assert ALL_ATTENTION_FUNCTIONS[NAME]._torchdynamo_disable
    assert counters["stats"]["unique_graphs"] == before


def test_a_model_without_decoder_layers_is_refused(make_model: Callable[..., nn.Module]) -> None:
    packed = PackedCausalLM(make_model("llama", num_hidden_layers=0))
    with pytest.raises(UserError, match="cannot be compiled"):
        CompiledLayers(packed)
