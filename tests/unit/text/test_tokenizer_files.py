"""A directory's tokenizer.json decides what its texts become, whatever class tokenizer_config.json names, and what is
saved reads the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from quartet.config import UserError
from quartet.text.loading import PROBE_TEXTS, find_tokenizer_difference, load_tokenizer, save_tokenizer
from quartet.text.tokenizer import TextCodec

TEXTS = [*PROBE_TEXTS, "<s> x</s> y", " Once upon", "  \n a\n\n b", "x <pad>y"]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def _backend() -> Tokenizer:
    """Pieces as Llama has them, but spaces are prepended by a normaliser and nothing merges them."""
    alphabet = [*"▁abcdefghijklmnopqrstuvwxyzHOLEU0123456789.,!?'()", "▁▁", "▁a", "▁O"]
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", *bytes_, *alphabet])}
    merges = [("▁", "▁"), ("▁", "a"), ("▁", "O")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(list(SPECIAL.values()))
    return backend


Directory = Callable[..., Path]


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    """``directory(**tokenizer_config)``: a Llama directory with that tokenizer.json."""

    def make(config: object = None, **settings: object) -> Path:
        path = tmp_path / "model"
        path.mkdir()
        LlamaConfig(vocab_size=320).save_pretrained(path)
        _backend().save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps({**SPECIAL, **settings}))
        (path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
        return path

    return make


def _expected(path: Path, *, special: bool = True) -> list[list[int]]:
    file = Tokenizer.from_file(str(path / "tokenizer.json"))
    return [file.encode(text, add_special_tokens=special).ids for text in TEXTS]


@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "GPT2Tokenizer", None])
def test_the_file_decides_not_the_class(name, directory):
    path = directory(**({"tokenizer_class": name} if name else {}), padding_side="left", model_max_length=77)
    loaded = load_tokenizer(path)
    assert [loaded(text)["input_ids"] for text in TEXTS] == _expected(path)
    assert loaded.special_tokens_map == SPECIAL
    assert loaded.chat_template and loaded.padding_side == "left" and loaded.model_max_length == 77


def test_the_class_would_have_changed_them(directory):
    """Guards the test above: transformers alone takes the class's rules."""
    path = directory(tokenizer_class="LlamaTokenizer")
    auto = AutoTokenizer.from_pretrained(path)
    assert [auto(text)["input_ids"] for text in TEXTS] != _expected(path)


def test_what_is_saved_reads_as_what_was_loaded(directory, tmp_path):
    path = directory(tokenizer_class="LlamaTokenizer")
    LlamaConfig(vocab_size=320).save_pretrained(tmp_path / "saved")
    assert save_tokenizer(load_tokenizer(path), tmp_path / "saved") is None
    reloaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert [reloaded(text)["input_ids"] for text in TEXTS] == _expected(path)
    assert reloaded.special_tokens_map == SPECIAL and reloaded.chat_template


def test_special_tokens_of_the_class_are_kept(directory):
    """A tokenizer_config.json that names only the class: it knows which tokens begin and end."""
    path = directory()
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    loaded = load_tokenizer(path)
    assert (loaded.bos_token, loaded.eos_token, loaded.unk_token) == ("<s>", "</s>", "<unk>")
    assert [loaded(text)["input_ids"] for text in TEXTS] == _expected(path)


@pytest.mark.parametrize("name", ["LlamaTokenizer", "TokenizersBackend"])
def test_begin_and_end_of_text_as_the_file_adds_them(name, directory):
    """transformers 5 leaves these two settings out of account where the file says what is added, too."""
    path = directory(tokenizer_class=name, add_bos_token=False, add_eos_token=True)
    loaded = load_tokenizer(path)
    assert [loaded(text)["input_ids"] for text in TEXTS] == _expected(path)


def test_an_object_with_rules_of_its_own_is_saved_with_them(directory, tmp_path):
    """Passed from Python: a class whose backend was changed."""
    tokenizer = AutoTokenizer.from_pretrained(directory(tokenizer_class="LlamaTokenizer"))
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    LlamaConfig(vocab_size=320).save_pretrained(tmp_path / "saved")
    assert save_tokenizer(tokenizer, tmp_path / "saved") is None
    assert find_tokenizer_difference(tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved")) is None


def test_a_model_kind_with_one_class_for_all_says_so(directory, tmp_path):
    """For these transformers takes its own class, whatever stands in the directory."""
    path, saved = directory(), tmp_path / "saved"
    Qwen2Config(vocab_size=320).save_pretrained(path)
    Qwen2Config(vocab_size=320).save_pretrained(saved)
    loaded = load_tokenizer(path)
    assert [loaded(text)["input_ids"] for text in TEXTS] == _expected(path)
    warning = save_tokenizer(loaded, saved)
    assert warning is not None and "Qwen2Tokenizer" in warning and "PreTrainedTokenizerFast" in warning
    assert find_tokenizer_difference(loaded, PreTrainedTokenizerFast.from_pretrained(saved)) is None
    again = load_tokenizer(saved)
    assert [again(text)["input_ids"] for text in TEXTS] == _expected(path)


# What is no tokenizer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"tokenizer_class": "LlamaTokenizer"}, {"tokenizer_class": "Qwen2Tokenizer"}])
def test_a_directory_without_vocabulary(settings, directory):
    """Some classes come with three tokens then, of which every prompt is empty."""
    path = directory()
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"the tokenizer (has no vocabulary|cannot be loaded)") as raised:
        load_tokenizer(path)
    assert "tokenizer.json" in raised.value.remedy


DAMAGES = {
    "empty": b"",
    "cut off": b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0',
    "vocabulary of text": b'{"version": "1.0", "model": {"type": "BPE", "vocab": "abc", "merges": []}}',
}


@pytest.mark.parametrize("damage", list(DAMAGES))
@pytest.mark.parametrize("name", ["LlamaTokenizer", "TokenizersBackend"])
def test_damaged_files_are_user_errors(damage, name, directory):
    path = directory(tokenizer_class=name)
    (path / "tokenizer.json").write_bytes(DAMAGES[damage])
    with pytest.raises(UserError, match="the tokenizer"):
        load_tokenizer(path)


@pytest.mark.parametrize("text", ["[]", "{", '{"bos_token": 5}', '{"added_tokens_decoder": 3}'])
def test_damaged_configs_are_user_errors(text, directory):
    path = directory()
    (path / "tokenizer_config.json").write_text(text)
    with pytest.raises(UserError, match="the tokenizer"):
        load_tokenizer(path)


def test_sentencepiece_alone_says_what_is_missing(directory):
    path = directory(tokenizer_class="LlamaTokenizer")
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.model").write_bytes(b"\x0a\x0bnot a model")
    with pytest.raises(UserError, match="cannot be loaded") as raised:
        load_tokenizer(path)
    assert "sentencepiece" in raised.value.remedy


# What fails while it works --------------------------------------------------------------------------------

TEMPLATES = {
    "{{ 1 / 0 }}": "ZeroDivisionError",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{% if %}": "expected an expression",
    "{{ raise_exception('no system role') }}": "no system role",
    "{% for i in range(10 ** 12) %}{% endfor %}": "Range",
}


@pytest.mark.parametrize("template", list(TEMPLATES))
def test_templates_that_fail(template, directory):
    codec = TextCodec(load_tokenizer(directory()))
    codec.tokenizer.chat_template = template
    with pytest.raises(UserError, match=r"the chat template (refuses|is not valid)") as refused:
        codec.encode_prompt([{"role": "user", "content": "a"}])
    assert TEMPLATES[template].lower() in refused.value.found.lower()


def test_a_word_that_a_tokenizer_cannot_read():
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert codec.encode_prompt("a b") == [0, 1]
    with pytest.raises(UserError, match="cannot read a text") as refused:
        codec.encode_prompt("a word")
    assert "'a word'" in refused.value.found and "unk_token" in refused.value.remedy


@pytest.mark.realdata
def test_the_story_model_under_another_class(realdata, tmp_path):
    folder = tmp_path / "stories"
    shutil.copytree(realdata / "stories260K", folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "LlamaTokenizer"}))
    file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = (realdata / "dpo_en_demo_pairs.jsonl").read_text().splitlines()[:100]
    texts = [json.loads(row)["chosen"] for row in rows] + TEXTS
    loaded = load_tokenizer(folder)
    assert loaded(texts)["input_ids"] == [file.encode(text).ids for text in texts]
    shutil.copytree(folder, tmp_path / "saved", ignore=shutil.ignore_patterns("tokenizer*"))
    assert save_tokenizer(loaded, tmp_path / "saved") is None
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")(texts)["input_ids"] == loaded(texts)["input_ids"]
