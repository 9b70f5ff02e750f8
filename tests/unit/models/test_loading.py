"""Directories in and out: clear errors, plain reloads with equal outputs, pad ids that never occur in data."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaForSequenceClassification,
)

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.models.loading import (
    choose_pad_id,
    load_causal_lm,
    load_scalar_model,
    packed_causal_lm,
    packed_scalar_model,
    save_causal_lm,
    save_scalar_model,
    scalar_model_from,
    seen_tokens,
)
from quartet.train.engine import Needs, forward_only

VOCAB = 61


def _seen(*ids: int) -> torch.Tensor:
    return seen_tokens(VOCAB, iter([torch.tensor(ids, dtype=torch.int64)]))


# Loading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [load_causal_lm, load_scalar_model])
def test_missing_directory(load, tmp_path):
    with pytest.raises(UserError) as raised:
        load(str(tmp_path / "nowhere"))
    assert "nowhere" in str(raised.value)


@pytest.mark.parametrize("load", [load_causal_lm, load_scalar_model])
def test_directory_without_a_model(load, tmp_path):
    with pytest.raises(UserError, match="cannot be loaded"):
        load(str(tmp_path))


@pytest.mark.parametrize("load", [load_causal_lm, load_scalar_model])
def test_damaged_weights(load, tmp_path, make_model):
    model = make_model()
    (model if load is load_causal_lm else scalar_model_from(model, seed=0)).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be loaded"):
        load(str(tmp_path))


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


def test_reward_model_is_no_causal_lm(tmp_path, make_model):
    """transformers would quietly make up a head for it."""
    scalar_model_from(make_model(), seed=0).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="not a causal language model") as raised:
        load_causal_lm(str(tmp_path))
    assert "score.weight" in raised.value.found


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


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_saved_causal_lm_reloads_plainly(family, tmp_path, make_model, make_tokenizer, sequences, packed_hidden, close):
    packed = packed_causal_lm(make_model(family))
    save_causal_lm(packed, make_tokenizer(eos_token="t1"), tmp_path)
    assert "quartet" not in (tmp_path / "config.json").read_text()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        ours = packed.logits(packed_hidden(packed, sequences))
        theirs = [plain(input_ids=torch.tensor([s]), use_cache=False).logits[0] for s in sequences]
        close(ours, torch.cat(theirs))
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "t1"
    reloaded = load_causal_lm(str(tmp_path)).state_dict()
    assert all(torch.equal(reloaded[name], values) for name, values in packed.model.state_dict().items())


# Special tokens of the tokenizer, ids it knows, ids in data → the pad id saved.
PADS = {
    "own": (dict(pad_token="t2", eos_token="t1"), VOCAB, 2),
    "pad is eos": (dict(pad_token="t1", eos_token="t1", additional_special_tokens=["t5"]), VOCAB, 5),
    "no pad, a row beyond": (dict(eos_token="t1"), VOCAB - 2, VOCAB - 2),
    "no pad, an ordinary token": (dict(eos_token="t1"), VOCAB, 40),
}


@pytest.mark.parametrize("case", list(PADS))
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_right_padded_batches_of_the_saved_classifier(family, case, tmp_path, make_model, make_tokenizer, close):
    """Plain transformers, right-padded with the saved config's pad id, gives our scores at the last token.

    Texts end in end-of-text, twice, and in the tokenizer's own pad: nothing may be mistaken for padding.
    """
    special, num_ids, expected = PADS[case]
    tokenizer = make_tokenizer(num_ids, **special)
    texts = [[7, 8, 9, 1], [7, 8, 1, 1], [10, 11, 12, 13, 14, 15, 16, 17], [3], [6, 6, 1]]
    seen = ~_seen(40) if case == "no pad, an ordinary token" else _seen(*[i for text in texts for i in text])
    packed = packed_scalar_model(scalar_model_from(make_model(family), seed=0))
    torch.nn.init.normal_(packed.head.weight)
    scores = forward_only(packed, RaggedBatch.from_sequences(texts), Needs(scores=True), 64).sequence["scores"]

    warning = save_scalar_model(packed, tokenizer, tmp_path, seen=seen)
    assert (warning is not None) == (case == "no pad, an ordinary token")
    assert packed.model.config.pad_token_id is None, "the model in memory keeps its own"
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    pad = plain.config.pad_token_id
    assert pad == expected
    assert plain.config.num_labels == 1
    longest = max(map(len, texts))
    ids = torch.tensor([text + [pad] * (longest - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    with torch.no_grad():
        close(plain(input_ids=ids, attention_mask=mask).logits.squeeze(1), scores)
    reloaded = packed_scalar_model(load_scalar_model(str(tmp_path)))
    again = forward_only(reloaded, RaggedBatch.from_sequences(texts), Needs(scores=True), 64).sequence["scores"]
    assert torch.equal(again, scores)


@pytest.mark.parametrize("case", ["own", "pad is eos", "no pad, a row beyond"])
def test_the_saved_tokenizer_pads_as_the_saved_model_expects(case, tmp_path, make_model, make_tokenizer, close):
    special, num_ids, expected = PADS[case]
    tokenizer = make_tokenizer(num_ids, **special, padding_side="left")
    own_pad, own_size = tokenizer.pad_token, len(tokenizer)
    packed = packed_scalar_model(scalar_model_from(make_model(), seed=0))
    save_scalar_model(packed, tokenizer, tmp_path, seen=_seen(1, 7, 8, 9))
    assert (tokenizer.pad_token, len(tokenizer), tokenizer.padding_side) == (own_pad, own_size, "left")
    saved = AutoTokenizer.from_pretrained(tmp_path)
    batch = saved(["t7 t8 t9 t1", "t7 t1"], padding=True, return_tensors="pt")
    assert batch["input_ids"].tolist() == [[7, 8, 9, 1], [7, 1, expected, expected]]
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    texts = RaggedBatch.from_sequences([[7, 8, 9, 1], [7, 1]])
    with torch.no_grad():
        theirs = plain(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.squeeze(1)
    close(theirs, forward_only(packed, texts, Needs(scores=True), 64).sequence["scores"])


def test_without_any_unused_id_no_pad_is_saved(tmp_path, make_model, make_tokenizer):
    packed = packed_scalar_model(scalar_model_from(make_model(), seed=0))
    warning = save_scalar_model(packed, make_tokenizer(eos_token="t1"), tmp_path, seen=torch.ones(VOCAB).bool())
    assert warning is not None and "every token id occurs" in warning
    assert json.loads((tmp_path / "config.json").read_text()).get("pad_token_id") is None
    assert load_scalar_model(str(tmp_path)).config.pad_token_id is None


def test_a_failed_save_leaves_the_model_as_it_was(tmp_path, make_model, make_tokenizer):
    packed = packed_scalar_model(scalar_model_from(make_model(pad_token_id=9), seed=0))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        save_scalar_model(packed, make_tokenizer(pad_token="t2"), Path(tmp_path / "taken"), seen=_seen(9))
    assert packed.model.config.pad_token_id == 9


# The pad id ----------------------------------------------------------------------------------------------


def _choose(tokenizer, seen, model):
    return choose_pad_id(model, tokenizer, seen)


def test_own_pad_if_unused(make_model, make_tokenizer):
    tokenizer = make_tokenizer(pad_token="t2", eos_token="t1")
    assert _choose(tokenizer, _seen(1, 7), make_model()) == (2, None)


def test_pad_that_is_eos_is_passed_over(make_model, make_tokenizer):
    """Also where end-of-text did not occur in the data: texts to score may end in it."""
    tokenizer = make_tokenizer(VOCAB - 1, pad_token="t1", eos_token="t1", bos_token="t3")
    assert _choose(tokenizer, _seen(7), make_model()) == (VOCAB - 1, None)


def test_pad_that_occurs_in_data_is_passed_over(make_model, make_tokenizer):
    tokenizer = make_tokenizer(pad_token="t2", eos_token="t1", additional_special_tokens=["t4", "t5"])
    assert _choose(tokenizer, _seen(1, 2, 4), make_model()) == (5, None)


def test_unknown_token_is_no_padding(make_model, make_tokenizer):
    """It did not occur in the data, but a text to score may end in an unknown word."""
    tokenizer = make_tokenizer(VOCAB - 1, eos_token="t1", unk_token="t0")
    assert _choose(tokenizer, _seen(1), make_model()) == (VOCAB - 1, None)


def test_without_a_pad_an_embedding_row_beyond_the_tokenizer(make_model, make_tokenizer):
    assert _choose(make_tokenizer(50, eos_token="t1"), _seen(1, 7), make_model()) == (50, None)


def test_else_an_ordinary_token_with_a_warning(make_model, make_tokenizer):
    pad_id, warning = _choose(make_tokenizer(eos_token="t1"), ~_seen(1, 30, 40), make_model())
    assert pad_id == 40
    assert warning is not None and "'t40'" in warning and "ordinary" in warning


def test_all_ids_seen(make_model, make_tokenizer):
    pad_id, warning = _choose(make_tokenizer(eos_token="t1"), torch.ones(VOCAB).bool(), make_model())
    assert pad_id is None
    assert warning is not None and "every token id occurs" in warning


def test_pad_outside_of_the_embedding_is_passed_over(make_model, make_tokenizer):
    tokenizer = make_tokenizer(eos_token="t1")
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    assert tokenizer.pad_token_id == VOCAB
    pad_id, warning = _choose(tokenizer, ~_seen(40), make_model())
    assert pad_id == 40 and warning is not None


def test_seen_tokens():
    seen = seen_tokens(6, iter([torch.tensor([1, 1, 4]), torch.tensor([], dtype=torch.int64), torch.tensor([0])]))
    assert seen.tolist() == [True, True, False, False, True, False]
