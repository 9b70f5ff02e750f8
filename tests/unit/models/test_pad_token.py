"""Saved reward models and critics score the same outside: plain transformers, alone and in padded batches of either
side, whatever the tokenizer padded with before."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    PreTrainedModel,
    pipeline,
)

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.common import LoRAConfig
from quartet.models.loading import (
    adapter_path,
    load_causal_lm,
    load_scalar_model,
    packed_scalar_model,
    save_scalar_model,
    scalar_model_from,
    seen_token_mask,
    with_pad_token,
)
from quartet.models.packed_model import PackedScalarModel
from quartet.text.loading import PAD_TOKEN, have_same_vocabulary, load_tokenizer
from quartet.train.forward import ForwardNeeds, forward_only

VOCAB = 61
TEXTS = ["t7 t8 t9 t1", "t7 t8 t1 t1", "t10 t11 t12 t13 t14 t15 t16 t17", "t3", "t6 t0", "t5 what t8 ever", "t9 t2"]
"""They end in end-of-text, twice as well, in the unknown token and in token 2, which some tokenizers pad with."""


def _seen(*ids: int) -> Tensor:
    return seen_token_mask(VOCAB, iter([torch.tensor(ids, dtype=torch.int64)]))


def _packed(model: PreTrainedModel) -> PackedScalarModel:
    packed = packed_scalar_model(scalar_model_from(model, seed=0))
    # Larger than drawn, so that a wrong token shows.
    torch.nn.init.normal_(packed.head.weight, generator=torch.Generator().manual_seed(2))
    return packed


def _ours(packed: PackedScalarModel, tokenizer: Any, texts: list[str]) -> Tensor:
    batch = RaggedBatch.from_sequences([tokenizer(text)["input_ids"] for text in texts])
    return forward_only(packed, batch, ForwardNeeds(scores=True), 64).sequence["scores"]


def _plain(path: Path, texts: list[str], side: str) -> Tensor:
    """Scores by plain transformers of one batch that the saved tokenizer pads."""
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(path).eval(),
        AutoTokenizer.from_pretrained(path),
    )
    assert (
        model.config.get_text_config().pad_token_id
        == tokenizer.pad_token_id
        < model.config.get_text_config().vocab_size
    )
    tokenizer.padding_side = side
    with torch.no_grad():
        return model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.squeeze(1)


# What the tokenizer has: special tokens, ids it knows; ids in data; the model's other end-of-text ids → pad id saved.
CASES: dict[str, tuple[dict[str, str], int, tuple[int, ...], tuple[int, ...], int]] = {
    "a pad of its own": (dict(pad_token="t20", eos_token="t1"), VOCAB, (1, 7), (), 20),
    "pad = unk": (dict(pad_token="t0", unk_token="t0", eos_token="t1"), VOCAB, (1, 7), (), VOCAB),
    "pad = eos": (dict(pad_token="t1", eos_token="t1"), VOCAB, (7,), (), VOCAB),
    "pad among several eos": (dict(pad_token="t2", eos_token="t1"), VOCAB, (1, 7), (1, 2), VOCAB),
    "a pad that occurs in data": (dict(pad_token="t2", eos_token="t1"), VOCAB, (1, 2), (), VOCAB),
    "none": (dict(eos_token="t1"), VOCAB, (1, 7), (), VOCAB),
    "none, rows beyond the tokenizer": (dict(eos_token="t1"), VOCAB - 2, (1, 7), (), VOCAB - 2),
    "none, and every id occurs": (dict(eos_token="t1"), VOCAB, tuple(range(VOCAB)), (), VOCAB),
}


@pytest.mark.parametrize("case", list(CASES))
def test_scores_outside_equal_ours(case, tmp_path, make_model, make_tokenizer, close):
    special, num_ids, occurring, eos_ids, expected = CASES[case]
    tokenizer = make_tokenizer(num_ids, **special, padding_side="left")
    before = tokenizer.pad_token, len(tokenizer), tokenizer.padding_side
    packed = _packed(make_model())
    config, weight = packed.model.config, packed.model.get_input_embeddings().weight
    former = config.pad_token_id, config.vocab_size
    warning = save_scalar_model(packed, tokenizer, tmp_path, seen=_seen(*occurring), eos_ids=eos_ids)
    assert (warning is not None and "embedding row" in warning) == (expected == VOCAB)
    assert (tokenizer.pad_token, len(tokenizer), tokenizer.padding_side) == before
    assert (config.pad_token_id, config.vocab_size) == former, "the model in memory keeps its own"
    assert packed.model.get_input_embeddings().weight is weight

    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert saved.pad_token_id == expected
    assert saved.padding_side == "right"
    assert [saved(text)["input_ids"] for text in TEXTS] == [tokenizer(text)["input_ids"] for text in TEXTS]
    scores = _ours(packed, tokenizer, TEXTS)
    close(torch.cat([_plain(tmp_path, [text], "right") for text in TEXTS]), scores)
    for side in ("left", "right"):
        close(_plain(tmp_path, TEXTS, side), scores)
    classify = pipeline("text-classification", model=str(tmp_path), function_to_apply="none")
    close(torch.tensor([found["score"] for found in classify(TEXTS, batch_size=len(TEXTS))]), scores)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_multimodal", "gpt_neox"])
def test_families_with_an_added_row(family, tmp_path, make_model, make_tokenizer, close):
    """Scaled embeddings, windows, configs in parts."""
    tokenizer, packed = make_tokenizer(pad_token="t0", eos_token="t1", unk_token="t0"), _packed(make_model(family))
    assert save_scalar_model(packed, tokenizer, tmp_path, seen=_seen(1)) is not None
    for side in ("left", "right"):
        close(_plain(tmp_path, TEXTS, side), _ours(packed, tokenizer, TEXTS))
    # It goes on as it is: the next run adds nothing.
    again, its_own = packed_scalar_model(load_scalar_model(str(tmp_path))), load_tokenizer(tmp_path)
    assert again.model.get_input_embeddings().weight.shape[0] == VOCAB + 1
    assert have_same_vocabulary(its_own, tokenizer), "its rewards are computed on the policy's own tokens"
    assert save_scalar_model(again, its_own, tmp_path / "again", seen=_seen(1)) is None
    assert torch.equal(_ours(again, its_own, TEXTS), _ours(packed, tokenizer, TEXTS))


def test_learnt_positions_are_padded_on_the_right_and_say_so(tmp_path, make_tokenizer, close):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
    tokenizer = make_tokenizer(eos_token="t1")
    packed = _packed(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval())
    warning = save_scalar_model(packed, tokenizer, tmp_path, seen=_seen(1))
    assert warning is not None and "pad batches on the right" in warning
    close(_plain(tmp_path, TEXTS, "right"), _ours(packed, tokenizer, TEXTS))


@pytest.mark.parametrize("export", ["merged", "both"])
def test_adapters(export, tmp_path, make_model, make_tokenizer, close):
    """The merged directory as any other; the adapter alone after the calls that the remark names."""
    peft = pytest.importorskip("peft")
    scalar = scalar_model_from(make_model(), seed=0)
    scalar.save_pretrained(tmp_path / "base")
    scalar.name_or_path = str(tmp_path / "base")
    packed = packed_scalar_model(scalar, lora=LoRAConfig(rank=2, export=export))
    assert packed.adapters is not None
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in packed.adapters.trained.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    tokenizer, path = make_tokenizer(eos_token="t1", pad_token="t1"), tmp_path / "model"
    warning = save_scalar_model(packed, tokenizer, path, seen=_seen(1))
    scores = _ours(packed, tokenizer, TEXTS)
    close(_plain(path, TEXTS, "left"), scores)
    assert warning is not None and ("by the adapter" in warning) == (export == "both")
    if export == "both":
        assert f"resize_token_embeddings({VOCAB + 1})" in warning and f"pad_token_id = {VOCAB}" in warning
        base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
        base.resize_token_embeddings(VOCAB + 1)
        base.config.pad_token_id = VOCAB
        adapted = peft.PeftModel.from_pretrained(base, adapter_path(path)).eval()
        batch = AutoTokenizer.from_pretrained(adapter_path(path))(TEXTS, padding=True, return_tensors="pt")
        with torch.no_grad():
            close(adapted(**batch).logits.squeeze(1), scores)


# Real tokenizers ------------------------------------------------------------------------------------------


def _story_tokenizers(folder: Path, tmp_path: Path) -> dict[str, Path]:
    """The real tokenizer as it lies (pad = unk, two end-of-text ids), padding with end-of-text, and with nothing."""
    found = {"as it lies": folder}
    for name, pad in (("pad = eos", "</s>"), ("no pad", None)):
        found[name] = tmp_path / name
        shutil.copytree(folder, found[name])
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.pad_token = pad
        tokenizer.save_pretrained(found[name])
    return found


@pytest.mark.realdata
def test_reward_models_of_the_story_model(realdata: Path, tmp_path: Path, close: Callable[..., None]) -> None:
    """Real texts in batches of 16 by plain transformers, with three ways to pad."""
    texts = [f"Once upon a time{' there was a cat' * (n % 5)} {n}.{'?' * (n % 3)} ☃" for n in range(40)]
    for name, folder in _story_tokenizers(realdata / "stories260K", tmp_path).items():
        packed, tokenizer = _packed(load_causal_lm(str(folder))), load_tokenizer(folder)
        path = tmp_path / f"saved, {name}"
        save_scalar_model(packed, tokenizer, path, seen=torch.zeros(512, dtype=torch.bool), eos_ids={1, 2})
        ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
        scores = forward_only(packed, RaggedBatch.from_sequences(ids), ForwardNeeds(scores=True), 512).sequence[
            "scores"
        ]
        saved = AutoTokenizer.from_pretrained(path)
        assert saved.pad_token == PAD_TOKEN
        ended = [text + "</s>" for text in texts]
        assert saved(ended)["input_ids"] == ids
        for side in ("left", "right"):
            close(torch.cat([_plain(path, ended[i : i + 16], side) for i in range(0, 40, 16)]), scores)


# The token ------------------------------------------------------------------------------------------------


def test_a_special_token_kept_for_padding_is_taken(make_tokenizer):
    tokenizer = make_tokenizer(eos_token="t1")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|finetune_right_pad_id|>"]})
    assert with_pad_token(tokenizer, _seen(1)).pad_token_id == VOCAB
    assert len(with_pad_token(tokenizer, _seen(1))) == VOCAB + 1
    # Not one that occurs in data, and no ordinary word of that spelling.
    assert with_pad_token(tokenizer, torch.ones(VOCAB + 1).bool()).pad_token == PAD_TOKEN
    tokenizer = make_tokenizer(eos_token="t1")
    tokenizer.add_tokens(["<pad>"])
    assert with_pad_token(tokenizer, _seen(1)).pad_token == PAD_TOKEN


def test_a_pad_token_outside_of_the_embedding_gets_rows(tmp_path, make_model, make_tokenizer, close):
    tokenizer, packed = make_tokenizer(eos_token="t1"), _packed(make_model())
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    assert tokenizer.pad_token_id == VOCAB
    assert "<new>" in str(save_scalar_model(packed, tokenizer, tmp_path, seen=_seen(1)))
    close(_plain(tmp_path, TEXTS, "left"), _ours(packed, tokenizer, TEXTS))


def test_a_tokenizer_that_takes_no_new_token_is_refused(make_tokenizer, monkeypatch):
    tokenizer = make_tokenizer(eos_token="t1")
    monkeypatch.setattr(type(tokenizer), "add_special_tokens", lambda *args, **options: 0)
    with pytest.raises(UserError, match="takes no new one"):
        with_pad_token(tokenizer, _seen(1))
