"""Which layers are cut in which way, and what is said of models that cannot be."""

from __future__ import annotations

import re

import pytest

from architectures import build
from quartet.config import UserError
from quartet.config.common import LoRAConfig
from quartet.models.packed_model import PackedCausalLM
from quartet.train.parallel.tensor import check_sizes, layer_styles


def packed(family: str = "llama", plan: dict[str, str] | None = None, **changed: object) -> PackedCausalLM:
    model = build(family, **changed)
    if plan is not None:
        model.config.base_model_tp_plan = plan
    return PackedCausalLM(model)


PLAN = dict(build("llama").config.base_model_tp_plan)


def test_adapted_layers_are_cut_as_their_base() -> None:
    model = packed()
    plain = layer_styles(model)
    assert len(plain) == 14 and plain["layers.1.mlp.down_proj"] == "rowwise"
    model.adapt(LoRAConfig(rank=2), seed=0)
    assert layer_styles(model) == plain
    check_sizes(model, plain, 4)


def without(name: str) -> dict[str, str]:
    return {path: style for path, style in PLAN.items() if path != name}


@pytest.mark.parametrize(
    ("family", "plan", "says"),
    [
        ("gpt_bigcode", None, "GPTBigCodeForCausalLM has no plan for.*base_model_tp_plan: None.*sharding.shard"),
        ("qwen3_moe", None, "unknown styles.*moe_tp_experts, packed_colwise.*sharding.shard"),
        ("llama", {**PLAN, "layers.*.mlp.router": "colwise"}, "does not fit LlamaForCausalLM.*no layers.*mlp.router"),
        ("llama", without("layers.*.mlp.up_proj"), "the plan does not say how mlp.up_proj is cut.*base_model_tp_plan"),
        ("llama", {**PLAN, "layers.*.input_layernorm": "colwise"}, "input_layernorm is a LlamaRMSNorm, not a linear"),
    ],
)
def test_plans_that_do_not_fit_are_refused(family: str, plan: dict[str, str] | None, says: str) -> None:
    with pytest.raises(UserError) as raised:
        layer_styles(packed(family, plan))
    assert re.search(says, str(raised.value).replace("\n", " ")), str(raised.value)


@pytest.mark.parametrize(
    ("changed", "tensor", "found", "nearest"),
    [
        ({}, 3, "4 attention heads, 32 outputs of layers.*.self_attn.q_proj", "2 or 4"),
        ({"intermediate_size": 50}, 4, "50 outputs of layers.*.mlp.gate_proj", "1 or 2"),
        ({"head_dim": 6, "num_key_value_heads": 1}, 4, "6 outputs of layers.*.self_attn.k_proj", "1 or 2"),
    ],
)
def test_sizes_that_do_not_divide_name_the_nearest_that_do(
    changed: dict[str, int], tensor: int, found: str, nearest: str
) -> None:
    model = packed(**changed)
    with pytest.raises(UserError) as raised:
        check_sizes(model, layer_styles(model), tensor)
    assert f"sharding.tensor: {tensor}; " in raised.value.found and found in raised.value.found
    assert raised.value.remedy.endswith(f"sharding.tensor {nearest}")
