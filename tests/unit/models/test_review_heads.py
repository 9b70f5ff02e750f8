"""A directory of another kind is refused; what was changed about a model is said."""

from __future__ import annotations

import pytest

from quartet.config import UserError
from quartet.models.loading import load_causal_lm, scalar_model_from
from quartet.models.packed import PackedCausalLM


@pytest.mark.parametrize("tied", [True, False])
def test_a_reward_model_is_no_causal_lm(tied, tmp_path, make_model):
    """transformers would tie or draw a head without a word that anyone sees."""
    model = make_model(tie_word_embeddings=tied)
    scalar_model_from(model, seed=0).save_pretrained(tmp_path / "reward")
    with pytest.raises(UserError, match="not a causal language model"):
        load_causal_lm(str(tmp_path / "reward"))
    model.save_pretrained(tmp_path / "policy")
    assert load_causal_lm(str(tmp_path / "policy")).config.tie_word_embeddings == tied


def test_dropout_set_to_0_is_said(make_model):
    assert PackedCausalLM(make_model()).remarks == ()
    (remark,) = PackedCausalLM(make_model(attention_dropout=0.1)).remarks
    assert "dropout" in remark and "0.1" in remark
