"""Which layers are cut in which way, and what is said of models that cannot be."""

from __future__ import annotations

import re

import pytest
from torch import nn

from architectures import build
from quartet.config import UserError
from quartet.config.common import LoRAConfig
from quartet.models.packed_model import PackedCausalLM
from quartet.train.parallel.layer_plan import check_cut, layer_styles


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
    check_cut(model, context=1, tensor=4)


@pytest.mark.parametrize(
    ("family", "plan", "says"),
    [
        ("gpt_bigcode", None, "GPTBigCodeForCausalLM has no plan for.*base_model_tp_plan: None.*sharding.shard"),
        ("qwen3_moe", None, "unknown styles.*moe_tp_experts, packed_colwise.*sharding.shard"),
        ("llama", {**PLAN, "layers.*.mlp.router": "colwise"}, "does not fit LlamaForCausalLM.*no layers.*mlp.router"),
        ("llama", {**PLAN, "layers.*.input_layernorm": "colwise"}, "input_layernorm is a LlamaRMSNorm, not a linear"),
        (
            "llama",
            {**PLAN, "layers.*.self_attn.o_proj": "colwise"},
            "self_attn.o_proj is cut in columns, and no layer of layers.0.self_attn in rows",
        ),
    ],
)
def test_plans_that_do_not_fit_are_refused(family: str, plan: dict[str, str] | None, says: str) -> None:
    with pytest.raises(UserError) as raised:
        layer_styles(packed(family, plan))
    assert re.search(says, str(raised.value).replace("\n", " ")), str(raised.value)


@pytest.mark.parametrize(
    ("changed", "sizes", "found"),
    [
        ({}, (1, 3), "3; 4 attention heads, 32 outputs of layers.*.self_attn.q_proj"),
        ({"intermediate_size": 50}, (1, 4), "4; 50 outputs of layers.*.mlp.gate_proj"),
        ({"vocab_size": 5}, (1, 4), "4; 5 tokens of the vocabulary, of which a rank would have none"),
    ],
)
def test_sizes_that_do_not_divide_are_named(changed: dict[str, int], sizes: tuple[int, int], found: str) -> None:
    context, tensor = sizes
    with pytest.raises(UserError) as raised:
        check_cut(packed(**changed), context=context, tensor=tensor)
    assert f"sharding.tensor: {found}" in raised.value.found, raised.value.found


def test_more_context_ranks_than_heads_and_heads_that_they_do_not_divide() -> None:
    for context in (3, 8):
        with pytest.raises(UserError, match="cannot share its attention out") as raised:
            check_cut(packed(), context=context, tensor=1)
        assert f"4 heads, sharding.tensor 1 × sharding.context {context} = {context}" in raised.value.found
        assert "choose tensor × context among 1, 2, 4" in raised.value.remedy


def test_exact_numerics_are_refused() -> None:
    exact = packed()
    exact.numerics = "exact"
    check_cut(exact, context=1, tensor=1)
    for sizes in ({"context": 2, "tensor": 1}, {"context": 1, "tensor": 2}):
        with pytest.raises(UserError, match="exact needs every sum in one process"):
            check_cut(exact, **sizes)


def test_angles_that_depend_on_the_longest_position_are_refused() -> None:
    turning = packed(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    check_cut(turning, context=1, tensor=2)
    with pytest.raises(UserError, match="rotary"):
        check_cut(turning, context=2, tensor=1)


def test_a_head_of_another_class_cannot_be_shared_out() -> None:
    class Head(nn.Linear):
        """Which may compute anything."""

    model = packed()
    model.head = Head(32, 61)
    check_cut(model, context=2, tensor=1)
    with pytest.raises(UserError, match="the head of LlamaForCausalLM"):
        check_cut(model, context=1, tensor=2)
