"""What the probe finds of a whole model it finds of its small random twin, too: every architecture that is proven,
passes or is refused; and a twin of a model of real size is small and has each of its kinds of layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_packing_probe import PASSING, REFUSED
from transformers import (
    AutoModelForCausalLM,
    Exaone4Config,
    Gemma3Config,
    GptOssConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from quartet.config import UserError
from quartet.config.common import LoRAConfig
from quartet.models import directories
from quartet.models.loading import packed_causal_lm, packed_scalar_model, scalar_model_from
from quartet.models.packed_model import PackedCausalLM
from quartet.models.packing_probe import (
    MAX_PARAMETERS,
    check_decoding,
    model_context_length,
    probe_packing,
    tiny_random_model,
)


def _others(name: str) -> PreTrainedModel:
    build = PASSING[name] if name in PASSING else REFUSED[name][0]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(build()).eval()


def on_meta(model: PreTrainedModel) -> PreTrainedModel:
    return directories.copy_to_meta([model])[0]


def _facts(packed: PackedCausalLM) -> tuple[Any, ...]:
    return (
        packed.shares_prefixes,
        packed.relative_positions,
        packed.logit_scale,
        packed.vocab_size,
        model_context_length(packed.model),
        packed.warnings,
    )


def test_proven_architectures(architecture, make_model):
    model = make_model(architecture)
    twin, empty = tiny_random_model(model), on_meta(model)
    small = packed_causal_lm(twin)
    assert probe_packing(small) < 1e-5 and check_decoding(small) < 1e-5
    assert _facts(packed_causal_lm(empty)) == _facts(packed_causal_lm(model))
    assert {t.device.type for t in (*empty.parameters(), *empty.buffers())} == {"meta"}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused_by_name_without_weights(name):
    with pytest.raises(UserError) as whole:
        packed_causal_lm(_others(name))
    with pytest.raises(UserError) as empty:
        packed_causal_lm(on_meta(_others(name)))
    assert empty.value.problem == whole.value.problem
    if name == "FalconH1":  # of larger weights it shows before the sharper check is made
        assert "hidden states differ" in empty.value.found
    else:
        assert empty.value.found == whole.value.found


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 48, "long_factor": [2.0] * 48,
}  # fmt: skip
REAL = {
    # Two layers are the least, of equal ones too.
    "Qwen2 of 0.5 B": (
        lambda: Qwen2Config(
            hidden_size=896, num_attention_heads=14, num_key_value_heads=2, num_hidden_layers=24,
            intermediate_size=4864, vocab_size=151936, tie_word_embeddings=True,
        ),
        2,
    ),
    "Qwen3 with experts": (Qwen3MoeConfig, 2),
    "Phi-3 long": (lambda: Phi3Config(rope_parameters=LONGROPE, original_max_position_embeddings=4096), 2),
    # Windows in all layers but every fourth, or sixth.
    "EXAONE 4": (Exaone4Config, 4),
    "Gemma 3 with images": (Gemma3Config, 6),
}  # fmt: skip
REAL_REFUSED = {
    "Qwen3Next": (Qwen3NextConfig, "called 1 times for 4 layers"),
    "GptOss": (GptOssConfig, "sinks"),
}


def _empty(build: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(build())


@pytest.mark.parametrize("name", list(REAL))
def test_of_a_model_of_real_size(name):
    build, num_layers = REAL[name]
    model = _empty(build)
    packed = packed_causal_lm(model)
    twin = tiny_random_model(model)
    own, small = model.config.get_text_config(), twin.config.get_text_config()
    assert small.num_hidden_layers == num_layers
    assert sum(p.numel() for p in twin.parameters()) < MAX_PARAMETERS
    heads, groups = own.num_attention_heads, getattr(own, "num_key_value_heads", own.num_attention_heads)
    twin_groups = getattr(small, "num_key_value_heads", small.num_attention_heads)
    assert small.num_attention_heads // twin_groups == heads // groups
    if (window := getattr(own, "sliding_window", None)) is not None:
        assert small.sliding_window == 4 < window
    assert packed.shares_prefixes and packed.warnings == ()


@pytest.mark.parametrize("name", list(REAL_REFUSED))
def test_refused_of_real_size(name):
    build, found = REAL_REFUSED[name]
    with pytest.raises(UserError, match=name) as refused:
        packed_causal_lm(_empty(build))
    assert found in refused.value.found


def test_a_window_shows_in_the_twin_alone(make_model, monkeypatch):
    """An attention without windows is right for the probe's few tokens, unless windows are as small as the twin's."""
    from quartet.models import attention

    rule = attention.AttentionParams
    monkeypatch.setattr(attention, "AttentionParams", lambda scaling, window, softcap: rule(scaling, None, softcap))
    model = make_model("mistral", sliding_window=32)
    packed_causal_lm(model).release()
    with pytest.raises(UserError, match="differ"):
        packed_causal_lm(on_meta(model))


def test_scalar_models_and_adapters(make_model):
    lora = LoRAConfig(rank=4)
    for model in (make_model("llama"), scalar_model_from(make_model("llama"), seed=0)):
        build = packed_causal_lm if model.can_generate() else packed_scalar_model
        empty, whole = (build(found, lora=lora) for found in (on_meta(model), model))
        shapes = [{n: p.shape for n, p in packed.adapters.trained.items()} for packed in (empty, whole)]
        assert shapes[0] == shapes[1] and empty.warnings == whole.warnings
        assert empty.release().device.type == "meta"
