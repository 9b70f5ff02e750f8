"""Directories in and out: clear errors, plain reloads with equal outputs."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import LlamaForSequenceClassification

from quartet.config import UserError
from quartet.models.loading import (
    load_causal_lm,
    load_scalar_model,
    packed_causal_lm,
    packed_scalar_model,
    save_causal_lm,
    save_scalar_model,
    scalar_model_from,
    seen_token_mask,
)

VOCAB = 61


def _seen(*ids: int) -> torch.Tensor:
    return seen_token_mask(VOCAB, iter([torch.tensor(ids, dtype=torch.int64)]))


# Loading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [load_causal_lm, load_scalar_model])
def test_missing_directory(load, tmp_path):
    with pytest.raises(UserError) as raised:
        load(str(tmp_path / "nowhere"))
    assert "nowhere" in str(raised.value)


def test_home_directory_is_found(tmp_path, make_model, monkeypatch):
    make_model().save_pretrained(tmp_path / "mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_causal_lm("~/mine").dtype == torch.float32


def test_weights_are_fp32_and_in_evaluation_mode(tmp_path, make_model):
    make_model(dtype=torch.bfloat16).train().save_pretrained(tmp_path)
    model = load_causal_lm(str(tmp_path))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training


@pytest.mark.parametrize("num_labels", [2, 1], ids=["as saved", "with one label in its config"])
def test_causal_lm_is_no_reward_model(num_labels, tmp_path, make_model):
    model = make_model()
    model.config.num_labels = num_labels
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="not a reward model") as raised:
        load_scalar_model(str(tmp_path))
    assert ("LlamaForCausalLM" if num_labels == 2 else "score.weight") in raised.value.found


def test_classifier_with_two_labels_is_no_reward_model(tmp_path, make_model):
    config = copy.deepcopy(make_model().config)
    config.num_labels = 2
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="not a reward model") as raised:
        load_scalar_model(str(tmp_path))
    assert "num_labels 2" in raised.value.found


# A scalar model from a causal one ------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_scalar_model_has_the_body_and_a_small_head(family, make_model):
    model = make_model(family)
    before = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    scalar = scalar_model_from(model, seed=3)
    assert torch.equal(torch.get_rng_state(), random_state), "the caller's random numbers are not touched"
    body = dict(scalar.model.named_parameters())
    for name, parameter in model.model.named_parameters():
        assert torch.equal(body[name], parameter)
        assert body[name].data_ptr() != parameter.data_ptr(), "copied, not shared"
    head = scalar.score.weight
    assert head.shape == (1, 32)
    assert 0.5 < float(head.detach().std()) * 33 < 1.5
    assert torch.equal(head, scalar_model_from(model, seed=3).score.weight)
    assert not torch.equal(head, scalar_model_from(model, seed=4).score.weight)
    assert all(torch.equal(model.state_dict()[name], values) for name, values in before.items())


def test_scalar_model_keeps_fp32_whatever_the_config_says(make_model):
    model = make_model()
    model.config.dtype = torch.bfloat16
    scalar = scalar_model_from(model, seed=0)
    assert torch.equal(scalar.model.embed_tokens.weight, model.model.embed_tokens.weight)


# Saving --------------------------------------------------------------------------------------------------


def test_a_failed_save_leaves_the_model_as_it_was(tmp_path, make_model, make_tokenizer):
    packed = packed_scalar_model(scalar_model_from(make_model(pad_token_id=9), seed=0))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        save_scalar_model(packed, make_tokenizer(pad_token="t2"), Path(tmp_path / "taken"), seen=_seen(9))
    assert packed.model.config.pad_token_id == 9


def test_seen_tokens():
    seen = seen_token_mask(6, iter([torch.tensor([1, 1, 4]), torch.tensor([], dtype=torch.int64), torch.tensor([0])]))
    assert seen.tolist() == [True, True, False, False, True, False]


def test_a_file_in_the_place_of_a_saved_model_is_said_to_be_one(tmp_path, make_model, make_tokenizer):
    (tmp_path / "model").write_text("notes")
    with pytest.raises(FileExistsError):
        save_causal_lm(packed_causal_lm(make_model("llama")), make_tokenizer(), tmp_path / "model")


@pytest.mark.parametrize("tied", [True, False])
def test_a_reward_model_is_no_causal_lm(tied, tmp_path, make_model):
    """transformers would tie or draw a head without a word that anyone sees."""
    model = make_model(tie_word_embeddings=tied)
    scalar_model_from(model, seed=0).save_pretrained(tmp_path / "reward")
    with pytest.raises(UserError, match="not a causal language model"):
        load_causal_lm(str(tmp_path / "reward"))
    model.save_pretrained(tmp_path / "policy")
    assert load_causal_lm(str(tmp_path / "policy")).config.tie_word_embeddings == tied
