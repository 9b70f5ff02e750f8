"""Architectures that cannot be trusted are refused by name, and stay usable; held models come back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    FalconConfig,
    FalconH1Config,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GPTJConfig,
    GptOssConfig,
    GraniteMoeConfig,
    Llama4TextConfig,
    MinistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo3Config,
    OPTConfig,
    PhiConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.common import TrainConfig
from quartet.models.attention import PackedAttention
from quartet.models.loading import packed_causal_lm, packed_scalar_model, scalar_model_from
from quartet.models.packed_model import PackedCausalLM
from quartet.models.packing_probe import check_decoding, model_context_length, probe_packing
from quartet.train.engine import TrainEngine
from quartet.train.forward import ForwardNeeds

SIZES = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
DENSE = dict(**SIZES, intermediate_size=48, num_key_value_heads=2, pad_token_id=None, eos_token_id=None)
GPT = dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64)
MAMBA = dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8)
LINEAR = dict(
    layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4, linear_num_key_heads=2,
    linear_key_head_dim=8, linear_value_head_dim=8,
)  # fmt: skip
EXPERTS = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, shared_expert_intermediate_size=16)
REFUSED = {
    # Attention of their own.
    "Falcon": (lambda: FalconConfig(**SIZES), "attention interface"),
    "Bloom": (lambda: BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4), "attention interface"),
    "GPTJ": (lambda: GPTJConfig(**GPT, rotary_dim=4), "attention interface"),
    # Some layers are no attention, and carry a state from one sequence to the next.
    "Qwen3Next": (lambda: Qwen3NextConfig(**DENSE, **LINEAR, **EXPERTS, head_dim=8), "called 1 times for 2 layers"),
    "FalconH1": (lambda: FalconH1Config(**DENSE, **MAMBA), "moves its neighbours"),
    # Keep keyword arguments from their attention.
    "StableLm": (lambda: StableLmConfig(**SIZES, intermediate_size=48, num_key_value_heads=2), "layers keep the"),
    "Nemotron": (lambda: NemotronConfig(**DENSE), "layers keep the"),
    # Says nothing of its hidden states, and attends within chunks.
    "Llama4": (
        lambda: Llama4TextConfig(**DENSE, head_dim=8, intermediate_size_mlp=48, num_local_experts=2, moe_layers=[]),
        "gives no last_hidden_state, but a MoeCausalLMOutputWithPast",
    ),
    # Adds a learnt column to every softmax.
    "GptOss": (
        lambda: GptOssConfig(
            **SIZES, intermediate_size=16, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1
        ),
        "sinks",
    ),
}
PASSING = {
    "Cohere2": lambda: Cohere2Config(**DENSE, sliding_window=4),
    "GPT2": lambda: GPT2Config(**GPT),
    "Gemma": lambda: GemmaConfig(**DENSE, head_dim=8),
    "Glm4": lambda: Glm4Config(**DENSE, head_dim=8),
    "GraniteMoe": lambda: GraniteMoeConfig(**DENSE, logits_scaling=4.0, num_local_experts=4),
    "Ministral": lambda: MinistralConfig(**DENSE, head_dim=8, sliding_window=4),
    "Mixtral": lambda: MixtralConfig(**DENSE, num_local_experts=4),
    "OPT": lambda: OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32),
    "Olmo3": lambda: Olmo3Config(**DENSE, sliding_window=4),
    "Phi": lambda: PhiConfig(**DENSE),
    "SmolLM3": lambda: SmolLM3Config(**DENSE),
    "Starcoder2": lambda: Starcoder2Config(**DENSE, sliding_window=4),
}


def _usable(model: PreTrainedModel) -> bool:
    ids = torch.tensor([[3, 4, 5]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0)
    return out.shape[1] > 3


def test_proven_architectures_pass(architecture, make_model):
    packed = packed_causal_lm(make_model(architecture))
    assert probe_packing(packed) < 1e-5
    assert packed.shares_prefixes
    assert packed.warnings == ()


@pytest.mark.parametrize("name", list(PASSING))
def test_others_that_pass(name):
    torch.manual_seed(0)
    packed = packed_causal_lm(AutoModelForCausalLM.from_config(PASSING[name](), attn_implementation="sdpa").eval())
    assert name.lower() in type(packed.model).__name__.lower()
    assert packed.shares_prefixes
    assert probe_packing(packed) < 1e-5


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


FAILURES = {
    "no module": lambda model: delattr(model.model, "norm"),
    "a message of lines": lambda model: setattr(model.model.norm, "forward", _raises(ValueError("\nfirst\nsecond"))),
}


def _raises(error):
    def forward(*_, **__):
        raise error

    return forward


@pytest.mark.parametrize("failure", list(FAILURES))
@pytest.mark.parametrize("build", [packed_causal_lm, packed_scalar_model])
def test_whatever_a_forward_pass_runs_into_refuses_by_name(failure, build, make_model):
    model = make_model() if build is packed_causal_lm else scalar_model_from(make_model(), seed=0)
    FAILURES[failure](model)
    with pytest.raises(UserError, match=type(model).__name__) as refused:
        build(model)
    assert "\n" not in refused.value.found and "failed with" in refused.value.found
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyboardInterrupt()])
def test_what_says_nothing_about_the_model_passes(error, make_model):
    model = make_model()
    model.model.norm.forward = _raises(error)
    with pytest.raises(type(error)):
        packed_causal_lm(model)
    assert model.config._attn_implementation == "sdpa", "given back all the same"


# Rotary embeddings that follow the longest sequence -------------------------------------------------------


def _dynamic(make_model):
    """Stretches its base beyond its context of 24."""
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    return make_model("llama", rope_parameters=rope, max_position_embeddings=24)


FOLLOWING = {"longrope": lambda make_model: make_model("phi3_longrope"), "dynamic": _dynamic}


def _hidden(packed, *lengths):
    ids = torch.arange(sum(lengths)) % 61
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.no_grad():
        return packed.hidden(ids, positions, PackedAttention(lengths))


@pytest.mark.parametrize("rope_type", list(FOLLOWING))
def test_within_the_bound_it_is_right(rope_type, make_model, short_side, close):
    packed = packed_causal_lm(FOLLOWING[rope_type](make_model))
    plain = FOLLOWING[rope_type](make_model)
    assert model_context_length(packed.model) == short_side
    ids = (torch.arange(short_side + 5) % 61).unsqueeze(0)
    with torch.no_grad():
        ours = packed.logits(_hidden(packed, short_side, 5))
        theirs = [plain(input_ids=part, use_cache=False).logits[0] for part in ids.split([short_side, 5], 1)]
        close(ours, torch.cat(theirs))


@pytest.mark.parametrize("rope_type", list(FOLLOWING))
def test_beyond_the_bound_it_is_refused(rope_type, make_model, short_side):
    packed = packed_causal_lm(FOLLOWING[rope_type](make_model))
    with pytest.raises(UserError, match=f"{short_side + 1} tokens") as refused:
        _hidden(packed, 5, short_side + 1)
    assert f"up to {short_side} tokens" in refused.value.found
    with pytest.raises(UserError, match="tokens"):
        _hidden(packed_causal_lm(copy.deepcopy(packed.model)), short_side + 1)


@pytest.mark.parametrize("rope_type", list(FOLLOWING))
def test_beyond_the_bound_a_released_model_runs(rope_type, make_model, short_side):
    model = packed_causal_lm(FOLLOWING[rope_type](make_model)).release()
    plain = FOLLOWING[rope_type](make_model)
    ids = torch.arange(short_side + 3).unsqueeze(0)
    with torch.no_grad():
        long = plain(input_ids=ids, use_cache=False).logits
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, long)
        short = plain(input_ids=ids[:, :10], use_cache=False).logits
    assert not torch.allclose(long[:, :10], short, atol=1e-2), "the bound is where the frequencies change"
    assert len(packed_causal_lm(model).body._forward_pre_hooks) == 1, "taken over again, it is bounded once"


def test_other_rotary_embeddings_are_bounded_by_the_context_alone(make_model):
    model = make_model("gemma3")
    assert model_context_length(model) == 64
    assert not packed_causal_lm(model).body._forward_pre_hooks


# Sequences that bleed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("initializer_range", [0.2, 0.002])
@pytest.mark.parametrize("kind", ["causal", "scalar"])
def test_bleeding_sequences_are_refused(kind, initializer_range, make_model, monkeypatch):
    """Whatever the scale of the outputs: a fresh head is near 0."""
    build = PackedAttention.__init__

    def one_long_sequence(self, lengths, parents=None):
        build(self, [sum(lengths)])

    model = make_model("llama", initializer_range=initializer_range)
    model = scalar_model_from(model, seed=0) if kind == "scalar" else model
    monkeypatch.setattr(PackedAttention, "__init__", one_long_sequence)
    with pytest.raises(UserError, match="hidden states differ"):
        (packed_scalar_model if kind == "scalar" else packed_causal_lm)(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_faint_convolution_over_the_pack_is_refused(make_model):
    """It reaches one token back with so little weight that packed and single runs agree within the tolerance."""
    model = make_model("llama")
    mlp = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: mlp(x) + 1e-4 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
    with pytest.raises(UserError, match="moves its neighbours"):
        packed_causal_lm(model)


def test_learnt_positions_in_the_order_of_the_input_are_refused(make_model):
    """Every sequence but the first would get the positions of another place."""
    model = make_model("llama")
    table = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: out + table[: out.shape[1]])
    with pytest.raises(UserError, match="hidden states differ"):
        packed_causal_lm(model)


# Prefixes that cannot be shared --------------------------------------------------------------------------


def _rotary_in_the_order_of_the_input(model):
    """Distances inside a sequence stay right, so roots do; a second child is further from its parent."""
    rotary = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: rotary(x, torch.arange(x.shape[1]).unsqueeze(0))
    return model


def test_rotary_positions_in_the_order_of_the_input_unshare(make_model):
    packed = packed_causal_lm(_rotary_in_the_order_of_the_input(make_model("llama")))
    assert not packed.shares_prefixes
    (warning,) = packed.warnings
    assert "LlamaForCausalLM" in warning and "of the largest" in warning
    with pytest.raises(UserError, match="cannot be sampled") as refused:
        check_decoding(packed)
    assert "position_ids" in refused.value.found


@pytest.mark.parametrize("share", [True, False], ids=["asked to share", "not asked to"])
def test_an_unshared_model_trains_right(share, make_model, close):
    """Where the probe says so, the engine copies the prompt to every response."""
    batch = RaggedBatch.from_groups([[3, 4, 5]], [[[6, 7], [8, 9, 10]]], ids=["a", "b"])
    batch = batch.with_token(loss_mask=torch.tensor([False] * 3 + [True] * 5))
    needs = ForwardNeeds(logprobs=True)
    broken = packed_causal_lm(_rotary_in_the_order_of_the_input(make_model("llama")))
    sound = packed_causal_lm(make_model("llama"))
    assert (broken.shares_prefixes, sound.shares_prefixes) == (False, True)
    with torch.no_grad():
        found, expected = (
            TrainEngine(packed, TrainConfig(share_prefixes=share), total_steps=1).forward(batch, needs)
            for packed in (broken, sound)
        )
    close(found.token["logprobs"], expected.token["logprobs"])


# What is refused, and what comes back ---------------------------------------------------------------------


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
        probe_packing(packed)


def test_a_factor_of_the_logits_is_taken_from_the_config(make_model):
    assert packed_causal_lm(make_model("granite")).logit_scale == 0.25, "it divides by 4"
    assert packed_causal_lm(make_model("cohere")).logit_scale == 0.25, "it multiplies by a quarter"
    assert packed_causal_lm(make_model("llama")).logit_scale == 1.0


def test_a_factor_that_no_config_states_is_refused(make_model):
    model = make_model("granite")
    forward = model.forward

    def scaled(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 3.0
        return out

    model.forward = scaled
    with pytest.raises(UserError, match="logits differ"):
        packed_causal_lm(model)


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
    assert packed.warnings == (
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
    with pytest.raises(UserError, match="no linear language-model head"):
        packed_causal_lm(model.model)
    with pytest.raises(UserError, match="no scalar head"):
        packed_scalar_model(model)
    with pytest.raises(UserError, match="no scalar head"):
        scalar = scalar_model_from(model, seed=0)
        scalar.score = nn.Linear(32, 2, bias=False)
        packed_scalar_model(scalar)
    assert model.config._attn_implementation == "sdpa"
