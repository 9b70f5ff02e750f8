"""Adapters in a model: the same forward as added weights, taken out to the bit, saved for transformers and for peft."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from quartet.config import UserError
from quartet.config.common import LoRAConfig
from quartet.models.loading import (
    adapter_path,
    load_causal_lm,
    packed_causal_lm,
    packed_scalar_model,
    save_causal_lm,
    save_scalar_model,
    scalar_model_from,
)
from quartet.models.packed_model import PackedCausalLM, PackedModel

LORA = LoRAConfig(rank=4, alpha=6.0)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
BESIDE_EXPERTS = {"qwen3_moe": ATTENTION, "deepseek_v2": _LATENT, "deepseek_v3": _LATENT}
"""Layers that peft adapts where dense layers have the names of experts."""
Make = Callable[..., PreTrainedModel]


def learn(packed: PackedModel, size: float = 0.1) -> None:
    """Factors as after some training."""
    generator = torch.Generator().manual_seed(11)
    assert packed.adapters is not None
    with torch.no_grad():
        for parameter in packed.adapters.trained.values():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def added(plain: PreTrainedModel, packed: PackedModel) -> PreTrainedModel:
    """A copy of the plain model with the products of the factors added to its weights, one by one."""
    model = copy.deepcopy(plain)
    assert packed.adapters is not None
    with torch.no_grad():
        for layer in packed.adapters.layers:
            a, b = layer.factors
            module = model.get_submodule(layer.path)
            delta = (LORA.alpha / LORA.rank) * (b.double() @ a.double())
            module.weight.add_((delta.T if isinstance(module, Conv1D) else delta).to(module.weight.dtype))
    return model


def one_logits(model: torch.nn.Module, sequences: list[list[int]]) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([s]), use_cache=False).logits[0] for s in sequences])


def packed_logits(packed: PackedCausalLM, packed_hidden: Any, sequences: list[list[int]]) -> Tensor:
    with torch.no_grad():
        return packed.logits(packed_hidden(packed, sequences))


# The forward ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "gpt_neox", "phi3", *BESIDE_EXPERTS])
def test_the_forward_is_that_of_added_weights(
    architecture: str, make_model: Make, sequences: Any, packed_hidden: Any, close: Any
) -> None:
    plain = make_model(architecture)
    named = BESIDE_EXPERTS.get(architecture)
    lora = LORA if named is None else LORA.model_copy(update={"target_modules": named})
    packed = packed_causal_lm(copy.deepcopy(plain), lora=lora, seed=1)
    base = one_logits(plain, sequences)
    close(packed_logits(packed, packed_hidden, sequences), base)
    learn(packed)
    found = packed_logits(packed, packed_hidden, sequences)
    expected = one_logits(added(plain, packed), sequences)
    scale = expected.abs().max()
    close(found / scale, expected / scale)
    assert float((found - base).abs().max()) > 1e-2, "these adapters do something"


def test_layers_that_keep_their_weight_turned_around(sequences: Any, packed_hidden: Any, close: Any) -> None:
    """GPT-2's Conv1D stores ``[in, out]``."""
    config = GPT2Config(vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=None)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    packed = packed_causal_lm(copy.deepcopy(plain), lora=LORA)
    assert packed.adapters is not None
    assert {layer.name for layer in packed.adapters.layers} == {"c_attn", "c_proj", "c_fc"}
    learn(packed)
    found = packed_logits(packed, packed_hidden, sequences)
    expected = one_logits(added(plain, packed), sequences)
    close(found, expected)
    with packed.with_merged_adapters():
        close(packed_logits(packed, packed_hidden, sequences), expected)


def test_fresh_adapters_change_no_bit(make_model: Make, sequences: Any, packed_hidden: Any) -> None:
    plain = PackedCausalLM(make_model())
    expected = packed_logits(plain, packed_hidden, sequences)
    assert torch.equal(packed_logits(packed_causal_lm(make_model(), lora=LORA), packed_hidden, sequences), expected)


def test_first_factors_come_from_the_seed_alone(make_model: Make) -> None:
    def factors(seed: int) -> list[Tensor]:
        packed = packed_causal_lm(make_model(), lora=LORA, seed=seed)
        assert packed.adapters is not None
        return [layer.factors[0].detach().clone() for layer in packed.adapters.layers]

    torch.manual_seed(5)
    first = factors(3)
    drawn = torch.rand(4)
    torch.manual_seed(5)
    model = make_model()  # draws from the global generator, as every random model does
    again = packed_causal_lm(model, lora=LORA, seed=3)
    assert torch.equal(torch.rand(4), drawn), "the global generator is left alone"
    assert again.adapters is not None
    assert all(torch.equal(a, layer.factors[0]) for a, layer in zip(first, again.adapters.layers, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, factors(4), strict=True))
    for a, layer in zip(first, again.adapters.layers, strict=True):
        bound = a.shape[1] ** -0.5
        assert 0.8 * bound < float(a.abs().max()) <= bound
        assert not bool(layer.factors[1].any())


def test_only_factors_and_a_scalar_head_are_trained(make_model: Make) -> None:
    policy = packed_causal_lm(make_model(), lora=LORA)
    assert {n for n, p in policy.model.named_parameters() if p.requires_grad} == {
        n for n, _ in policy.model.named_parameters() if ".lora_" in n
    }
    assert not any(layer.path == "lm_head" for layer in policy.adapters.layers)  # type: ignore[union-attr]
    critic = packed_scalar_model(scalar_model_from(make_model(), seed=0), lora=LORA)
    trained = {n for n, p in critic.model.named_parameters() if p.requires_grad}
    assert trained == {n for n, _ in critic.model.named_parameters() if ".lora_" in n} | {"score.weight"}
    assert "score in full" in critic.warnings[-1] and "rank 4 on 14 linear layers" in critic.warnings[-1]


@pytest.mark.parametrize(
    ("targets", "num_layers"),
    [("q_proj", 2), (["q_proj", "v_proj"], 4), (["0.self_attn.q_proj"], 1), (["mlp.up_proj"], 2), ("all-linear", 14)],
)
def test_layers_by_name(make_model: Make, targets: Any, num_layers: int) -> None:
    packed = packed_causal_lm(make_model(), lora=LoRAConfig(rank=2, target_modules=targets))
    assert packed.adapters is not None and len(packed.adapters.layers) == num_layers


def test_the_vision_tower_has_no_adapters(make_model: Make) -> None:
    packed = packed_causal_lm(make_model("gemma3_multimodal"), lora=LORA)
    assert packed.adapters is not None and packed.adapters.layers
    assert all("language_model" in layer.path for layer in packed.adapters.layers)


# The switch ----------------------------------------------------------------------------------------------


def test_without_adapters_the_model_is_its_base_to_the_bit(
    make_model: Make, sequences: Any, packed_hidden: Any
) -> None:
    expected = packed_logits(PackedCausalLM(make_model()), packed_hidden, sequences)
    packed = packed_causal_lm(make_model(), lora=LORA)
    learn(packed)
    learned = packed_logits(packed, packed_hidden, sequences)
    assert not torch.equal(learned, expected)
    with packed.without_adapters():
        assert torch.equal(packed_logits(packed, packed_hidden, sequences), expected)
    assert torch.equal(packed_logits(packed, packed_hidden, sequences), learned)
    with pytest.raises(ZeroDivisionError), packed.with_merged_adapters():
        _ = 1 / 0
    assert torch.equal(packed_logits(packed, packed_hidden, sequences), learned), "also after an error"


def test_the_adapter_switch_is_held_by_one_caller_at_a_time(make_model: Make) -> None:
    packed = packed_causal_lm(make_model(), lora=LORA)
    for first in (packed.without_adapters, packed.with_merged_adapters):
        for second in (packed.without_adapters, packed.with_merged_adapters):
            with first(), pytest.raises(RuntimeError, match="switched off"), second():
                pass
    with packed.without_adapters():
        pass


def test_release_gives_a_plain_model_of_merged_weights(make_model: Make, sequences: Any, close: Any) -> None:
    plain = make_model()
    packed = packed_causal_lm(copy.deepcopy(plain), lora=LORA)
    learn(packed)
    expected = added(plain, packed)
    model = packed.release()
    assert packed.release() is model, "once more changes nothing"
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert all(p.requires_grad for p in model.parameters())
    for name, value in expected.state_dict().items():
        close(model.state_dict()[name], value)
    close(one_logits(model, sequences), one_logits(expected, sequences))
    again = packed_causal_lm(model, lora=LORA)
    assert again.adapters is not None, "it can be taken over again"


# Saved ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt_neox"])
def test_saved_directories_give_the_same_logits(
    family: str, make_model: Make, make_tokenizer: Any, sequences: Any, packed_hidden: Any, close: Any, tmp_path: Path
) -> None:
    """``model/`` by transformers alone, ``adapter/`` by peft on top of the base; of a tied model too."""
    make_model(family).save_pretrained(tmp_path / "base")
    packed = packed_causal_lm(load_causal_lm(str(tmp_path / "base")), lora=LORA)
    learn(packed)
    expected = packed_logits(packed, packed_hidden, sequences)
    before = {name: value.clone() for name, value in packed.model.state_dict().items()}
    save_causal_lm(packed, make_tokenizer(), tmp_path / "model")
    assert all(torch.equal(value, before[name]) for name, value in packed.model.state_dict().items())
    attention = {"attn_implementation": "eager"} if family == "gemma2" else {}
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **attention).eval()
    assert adapter_path(tmp_path / "model") == tmp_path / "adapter"
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", **attention)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    close(one_logits(merged, sequences), expected)
    close(one_logits(adapted, sequences), expected)
    with packed.with_merged_adapters():
        exported = {name: value for name, value in packed.model.state_dict().items()}
        assert all(torch.equal(merged.state_dict()[name], value) for name, value in exported.items())
    # The names in the file are few enough to be written by hand.
    assert len(adapted.peft_config["default"].target_modules) < 10
    assert adapted.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")


@pytest.mark.parametrize(("export", "written"), [("merged", {"model"}), ("adapter", {"adapter"}), ("both", None)])
def test_what_is_written(export: Any, written: Any, make_model: Make, make_tokenizer: Any, tmp_path: Path) -> None:
    packed = packed_causal_lm(make_model(), lora=LoRAConfig(rank=2, export=export))
    save_causal_lm(packed, make_tokenizer(), tmp_path / "model")
    assert {path.name for path in tmp_path.iterdir()} == (written or {"model", "adapter"})
    assert all((path / "tokenizer.json").is_file() for path in tmp_path.iterdir())


def test_a_reward_models_adapter_brings_its_head(
    make_model: Make, make_tokenizer: Any, sequences: Any, packed_hidden: Any, close: Any, tmp_path: Path
) -> None:
    """On top of the causal LM that it started from, whose sequence-classification head is random."""
    make_model("qwen2").save_pretrained(tmp_path / "base")
    scalar = scalar_model_from(load_causal_lm(str(tmp_path / "base")), seed=3)
    packed = packed_scalar_model(scalar, lora=LORA)
    learn(packed)
    with torch.no_grad():
        expected = packed.scalars(packed_hidden(packed, [sequences[0]]))[-1]
    seen = torch.zeros(61, dtype=torch.bool)
    save_scalar_model(packed, make_tokenizer(), tmp_path / "critic", seen=seen)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic").eval()
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "critic_adapter").eval()
    for model in (merged, adapted):
        with torch.no_grad():
            close(model(input_ids=torch.tensor([sequences[0]])).logits[0, 0], expected)


# Bad input -----------------------------------------------------------------------------------------------


def test_unknown_layers_are_answered_with_the_known(make_model: Make) -> None:
    with pytest.raises(UserError, match="names layers that the model does not have") as caught:
        packed_causal_lm(make_model(), lora=LoRAConfig(target_modules=["q_proj", "query", "mlp"], rank=2))
    assert caught.value.found.startswith("query, mlp; its linear layers are called down_proj, gate_proj, k_proj")
    with pytest.raises(UserError, match="names layers"):
        packed_causal_lm(make_model(), lora=LoRAConfig(target_modules="lm_head", rank=2))


def test_a_model_with_adapters_of_another_library(make_model: Make, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    wrapped = peft.get_peft_model(make_model(), config)
    injected = peft.inject_adapter_in_model(config, make_model())
    for model in (wrapped, injected):
        for lora in (None, LORA):
            with pytest.raises(UserError, match="has adapters of peft in it already") as caught:
                packed_causal_lm(model, lora=lora)
            assert "merge_and_unload" in caught.value.remedy
    make_model().save_pretrained(tmp_path / "base")
    packed = packed_causal_lm(load_causal_lm(str(tmp_path / "base")), lora=LoRAConfig(rank=2))
    assert packed.adapters is not None
    packed.adapters.save(tmp_path / "adapter")
    with pytest.raises(UserError, match="has adapters of peft"):
        packed_causal_lm(load_causal_lm(str(tmp_path / "adapter")))


@pytest.mark.parametrize("lora", [LORA, LORA.model_copy(update={"target_modules": ("up_proj",)})])
def test_layers_that_peft_takes_for_others_are_refused(lora: Any, make_model: Make) -> None:
    """A dense layer of this family has names that peft takes for those of its experts."""
    with pytest.raises(UserError, match="peft does not adapt these layers"):
        packed_causal_lm(make_model("qwen3_moe"), lora=lora)


def test_without_peft_the_extra_is_named(make_model: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="LoRA needs the peft package") as caught:
        packed_causal_lm(make_model(), lora=LORA)
    assert "quartet-rl[lora]" in caught.value.remedy
    packed_causal_lm(make_model())


# Exact numerics ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("exact_processor")
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
@pytest.mark.parametrize("rank", [8, 11])
def test_exact_numerics_are_checked_with_adapters_that_do_something(
    family: str, rank: int, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quartet.models import loading

    sizes: list[float] = []
    check = loading.check_exact

    def watched(packed: PackedModel) -> None:
        assert packed.adapters is not None
        sizes.append(min(float(layer.factors[1].detach().abs().max()) for layer in packed.adapters.layers))
        check(packed)

    monkeypatch.setattr(loading, "check_exact", watched)
    packed = packed_causal_lm(make_model(family), numerics="exact", lora=LoRAConfig(rank=rank))
    assert sizes[0] > 0
    assert packed.adapters is not None and not any(bool(x.factors[1].any()) for x in packed.adapters.layers)
