"""What a packed model is told: to compute layers again in the backward, not to share prompts, to be exact."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from quartet.models.packed_model import PackedCausalLM


def _gradients(packed, hidden):
    packed.model.zero_grad()
    weights = torch.linspace(-1, 1, hidden.numel(), dtype=hidden.dtype).view_as(hidden)
    (hidden * weights).sum().backward()
    # The head takes no part.
    return {name: p.grad for name, p in packed.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float64, "fp32"), (torch.float32, "fp32"), (torch.float32, "bf16")]
)
def test_gradients_stay_the_same_bit_for_bit(family, dtype, precision, make_model, sequences, packed_hidden):
    found = []
    for recompute in (False, True, "selective"):
        packed = PackedCausalLM(make_model(family, dtype), precision, activation_checkpointing=recompute)
        hidden = packed_hidden(packed, sequences)
        found.append((hidden.detach(), _gradients(packed, hidden)))
    (plain, plain_grads), *others = found
    for hidden, grads in others:
        assert torch.equal(hidden, plain)
        assert len(grads) > 10 and grads.keys() == plain_grads.keys()
        assert all(torch.equal(grads[name], grad) for name, grad in plain_grads.items())


class _Counted(TorchDispatchMode):
    """Counts products and attention kernels."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.found[func] += 1
        return func(*args, **(kwargs or {}))


def test_selective_recomputation_computes_no_product_again(make_model, sequences, packed_hidden):
    costly = (torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
    counts = []
    for recompute in (False, True, "selective"):
        packed = PackedCausalLM(make_model("llama"), activation_checkpointing=recompute)
        hidden = packed_hidden(packed, sequences)
        with _Counted() as counted:
            hidden.sum().backward()
        counts.append({op: counted.found[op] for op in costly} | {"silu": counted.found[torch.ops.aten.silu.default]})
    plain, full, selective = counts
    assert all(full[op] > plain[op] for op in costly) and full["silu"] > plain["silu"]
    assert all(selective[op] == plain[op] for op in costly)
    assert selective["silu"] == full["silu"], "what lies between them is computed again"


@pytest.mark.parametrize("in_training_mode", [False, True])
def test_a_layer_keeps_its_input_alone(in_training_mode, make_model, sequences, packed_hidden):
    kept = []
    for recompute in (False, True):
        packed = PackedCausalLM(make_model("llama", num_hidden_layers=6), activation_checkpointing=recompute)
        packed.model.train(in_training_mode)
        sizes: dict[int, int] = {}
        weights = {p.untyped_storage().data_ptr() for p in packed.model.parameters()}

        def note(tensor, sizes=sizes, weights=weights):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            hidden = packed_hidden(packed, sequences)
        kept.append(sum(sizes.values()))
        assert hidden.requires_grad
    assert kept[1] < kept[0] / 4


def _count_calls(model):
    calls = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    return calls


def test_only_where_gradients_are_enabled(make_model, sequences, packed_hidden):
    packed = PackedCausalLM(make_model("llama"), activation_checkpointing=True)
    calls = _count_calls(packed.model)
    with torch.no_grad():
        packed_hidden(packed, sequences)
    assert len(calls) == 2
    packed_hidden(packed, sequences).sum().backward()
    assert len(calls) == 6, "two layers, each twice"


def test_released_it_is_off(make_model, sequences):
    model = make_model("llama")
    PackedCausalLM(model, activation_checkpointing=True).release()
    calls = _count_calls(model)
    model(input_ids=torch.tensor(sequences[:1])).logits.sum().backward()
    assert len(calls) == 2
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_copy_runs_its_own_layers(make_model, sequences, packed_hidden):
    """A reference is copied from an actor that is held already."""
    held = PackedCausalLM(make_model("llama"), activation_checkpointing=True)
    twin = PackedCausalLM(copy.deepcopy(held.model))
    before = packed_hidden(twin, sequences)
    for parameter in held.model.parameters():
        torch.nn.init.zeros_(parameter)
    assert torch.equal(packed_hidden(twin, sequences), before)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_what_a_token_costs_is_counted_in_products(family, make_model):
    """Against torch's count of the unmodified model's operations: products of weights and products of attention."""
    model = make_model(family)
    model.set_attn_implementation("eager")
    packed = PackedCausalLM(copy.deepcopy(model))
    body, num_tokens = getattr(model, model.base_model_prefix), 8
    with FlopCounterMode(display=False) as counter:
        body(torch.zeros(1, num_tokens, dtype=torch.int64))
    flops = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    of_attention = flops["aten.bmm"] / num_tokens**2
    of_weights = sum(flops.get(name, 0) for name in ("aten.mm", "aten.addmm")) / num_tokens
    assert packed.token_cost == pytest.approx(of_weights / of_attention, abs=0.5)
