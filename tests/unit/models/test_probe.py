"""Architectures that cannot be trusted are refused by name, and stay usable; held models come back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GptOssConfig,
    GraniteConfig,
    PreTrainedModel,
    StableLmConfig,
)

from quartet.config import UserError
from quartet.models import attention
from quartet.models.attention import PackedAttention
from quartet.models.loading import packed_causal_lm, packed_scalar_model, scalar_model_from
from quartet.models.packed import PackedCausalLM
from quartet.models.probe import probe

SIZES = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
REFUSED = {
    # Attention of their own.
    "Falcon": (lambda: FalconConfig(**SIZES), "attention interface"),
    "Bloom": (lambda: BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4), "attention interface"),
    # Keeps keyword arguments from its layers.
    "StableLm": (lambda: StableLmConfig(**SIZES, intermediate_size=48, num_key_value_heads=2), "context"),
    # Adds a learnt column to every softmax.
    "GptOss": (
        lambda: GptOssConfig(
            **SIZES, intermediate_size=16, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1
        ),
        "sinks",
    ),
    # Divides the logits after its head.
    "Granite": (
        lambda: GraniteConfig(**SIZES, intermediate_size=48, num_key_value_heads=2, logits_scaling=8.0),
        "logits differ",
    ),
}


def _usable(model: PreTrainedModel) -> bool:
    ids = torch.tensor([[3, 4, 5]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0)
    return out.shape[1] > 3


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_proven_families_pass(family, make_model):
    packed = packed_causal_lm(make_model(family))
    assert probe(packed) < 1e-5
    packed.release()
    scalar = packed_scalar_model(scalar_model_from(packed.model, seed=0))
    assert probe(scalar) < 1e-5


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_by_name(name):
    build, found = REFUSED[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(build()).eval()
    own = model.config._attn_implementation
    with pytest.raises(UserError) as refused:
        packed_causal_lm(model)
    assert name in refused.value.problem
    assert found in refused.value.found
    assert model.config._attn_implementation == own
    assert _usable(model)


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_rope_that_follows_the_longest_sequence_is_refused(rope_type, make_model):
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    model = make_model("llama", rope_parameters=rope)
    with pytest.raises(UserError, match="Llama") as refused:
        packed_causal_lm(model)
    assert rope_type in refused.value.found
    assert _usable(model)


def _one_long_sequence(lengths):
    return [(1, sum(lengths))]


@pytest.mark.parametrize("initializer_range", [0.2, 0.02, 0.002])
@pytest.mark.parametrize("kind", ["causal", "scalar"])
def test_bleeding_sequences_are_refused(kind, initializer_range, make_model, monkeypatch):
    """Whatever the scale of the outputs: a fresh head is near 0."""
    attend = PackedAttention.attend

    def bleeding(self, layer, q, k, v, rule):
        self.runs = _one_long_sequence([n * length for n, length in self.runs])
        return attend(self, layer, q, k, v, rule)

    model = make_model("llama", initializer_range=initializer_range)
    model = scalar_model_from(model, seed=0) if kind == "scalar" else model
    monkeypatch.setattr(PackedAttention, "attend", bleeding)
    with pytest.raises(UserError, match="hidden states differ"):
        (packed_scalar_model if kind == "scalar" else packed_causal_lm)(model)
    assert model.config._attn_implementation == "sdpa"


def test_an_attention_that_is_never_called_is_refused(make_model):
    """A layer that accepts the attention's name and goes its own way."""
    model = make_model("llama")

    def own_way(hidden_states, **_):
        return hidden_states, None

    model.model.layers[1].self_attn.forward = own_way
    with pytest.raises(UserError) as refused:
        packed_causal_lm(model)
    assert "called 1 times for 2 layers" in refused.value.found


def test_a_forgotten_logit_cap_is_refused(make_model):
    packed = PackedCausalLM(make_model("gemma2"))
    packed._softcap = None
    with pytest.raises(UserError, match="logits differ"):
        probe(packed)


def test_probe_leaves_the_model_held_at_its_precision(make_model):
    packed = packed_causal_lm(make_model("llama"), "bf16")
    assert packed.precision == "bf16"
    assert attention.is_installed(packed.model)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_release_gives_the_model_back(family, make_model):
    model = make_model(family)
    twin = copy.deepcopy(model)
    packed = packed_causal_lm(model)
    assert packed.release() is model
    ids = torch.tensor([[7, 8, 9, 10, 11, 12]])
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(model.generate(ids, **options), twin.generate(ids, **options))
    assert packed_causal_lm(model).release() is model, "it can be taken over again"


def test_release_puts_dropout_back(make_model):
    model = make_model("llama", attention_dropout=0.25)
    extra = nn.Dropout(0.5)
    model.model.add_module("extra", extra)
    layer = model.model.layers[1].self_attn
    packed = PackedCausalLM(model)
    assert (extra.p, layer.attention_dropout) == (0.0, 0.0)
    names = {dropout.name: dropout.rate for dropout in packed.disabled_dropout}
    assert names == {
        "model.extra.p": 0.5,
        "model.layers.0.self_attn.attention_dropout": 0.25,
        "model.layers.1.self_attn.attention_dropout": 0.25,
    }
    assert packed.remarks == (
        "dropout set to 0 in 3 places (first model.layers.0.self_attn.attention_dropout, was 0.25)",
    )
    packed.release()
    assert (extra.p, layer.attention_dropout) == (0.5, 0.25)


def test_a_copy_of_a_held_model_knows_its_own_attention(make_model):
    """Critics start as copies of held reward models, and bodies are taken from held actors."""
    packed = packed_causal_lm(make_model("gemma2"))
    other = packed_causal_lm(copy.deepcopy(packed.model))
    assert other.release().config._attn_implementation == "eager"
    scalar = packed_scalar_model(scalar_model_from(packed.model, seed=0))
    assert scalar.release().config._attn_implementation == "eager"
    assert packed.release().config._attn_implementation == "eager"


def test_calling_a_held_model_says_what_to_do(make_model):
    packed = packed_causal_lm(make_model("llama"))
    with pytest.raises(RuntimeError, match=r"call release\(\)"):
        packed.model(input_ids=torch.tensor([[1, 2, 3]]))


def test_running_a_released_model_packed_says_so(make_model):
    packed = packed_causal_lm(make_model("llama"))
    packed.release()
    with pytest.raises(RuntimeError, match="was released"):
        packed.hidden(torch.tensor([1, 2]), torch.tensor([0, 1]), PackedAttention([2]))


def test_wrong_heads_are_refused(make_model):
    model = make_model("llama")
    with pytest.raises(UserError, match="no language-model head"):
        packed_causal_lm(model.model)
    with pytest.raises(UserError, match="no scalar head"):
        packed_scalar_model(model)
    with pytest.raises(UserError, match="no scalar head"):
        scalar = scalar_model_from(model, seed=0)
        scalar.score = nn.Linear(32, 2, bias=False)
        packed_scalar_model(scalar)
    assert model.config._attn_implementation == "sdpa"
