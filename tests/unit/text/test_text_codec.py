"""From text to ids and back: boundaries, end-of-text, chat templates, pieces for display."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig, PreTrainedTokenizerFast

from quartet.config.errors import UserError
from quartet.text.examples import Conversation, Demonstration
from quartet.text.loading import check_vocabulary, load_generation_config, load_tokenizer
from quartet.text.tokenizer import TextCodec

Build = Callable[..., PreTrainedTokenizerFast]
TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello world"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "12?"},
    {"role": "assistant", "content": "no"},
]
TEXT = st.text(st.sampled_from("hello w12\n ?日é🙂"), min_size=1, max_size=12)


def learned(codec: TextCodec, ids: list[int], mask: list[bool]) -> str:
    return codec.decode([token for token, keep in zip(ids, mask, strict=True) if keep], skip_special=False)


# End of text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model_eos", "expected"), [(None, {2}), (2, {2}), ([1, 2], {1, 2}), ([7], {2, 7})])
def test_eos_ids_are_the_union(sentence_piece: Build, model_eos: Any, expected: set[int]) -> None:
    codec = TextCodec.of(sentence_piece("<s> $A"), GenerationConfig(eos_token_id=model_eos))
    assert codec.eos_ids == expected and codec.eos_id == 2


def test_begin_of_text_among_the_eos_ids_does_not_end_a_prompt(llama: TextCodec) -> None:
    ids, mask = llama.encode_example(Demonstration("the", " a cat"))
    assert ids[0] == 1 and ids[0] in llama.eos_ids
    assert learned(llama, ids, mask) == "a cat</s>" and ids[-1] == 2


def test_eos_of_a_tokenizer_without_one(byte_level: Build) -> None:
    tokenizer = byte_level(bos_token="<|im_start|>", pad_token="h")
    assert TextCodec(tokenizer).eos_ids == frozenset()
    pad, bos = tokenizer.pad_token_id, tokenizer.bos_token_id
    assert TextCodec(tokenizer, (bos, pad, 9)).eos_id == 9
    for ids in ((), (8, 9)):
        with pytest.raises(UserError, match="no end-of-text token"):
            _ = TextCodec(tokenizer, ids).eos_id


# Plain text --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("single", ["<s> $A", "<s> $A </s>", "$A </s>", "$A"])
def test_prompts_never_end_with_end_of_text(sentence_piece: Build, single: str) -> None:
    codec = TextCodec(sentence_piece(single))
    ids = codec.encode_prompt("the cat")
    assert (ids[0] == 1) == single.startswith("<s>") and ids[-1] != 2
    assert codec.encode_completion("the cat", " a")[1].count(2) == 1


def test_a_prompt_without_tokens(byte_level: Build) -> None:
    with pytest.raises(UserError, match="no tokens"):
        TextCodec(byte_level(eos_token="<|im_end|>")).encode_prompt("")


def test_half_a_character_is_named(byte_level: Build) -> None:
    """As it comes out of JSON that was cut in the middle of an emoji."""
    codec = TextCodec(byte_level(eos_token="<|im_end|>"))
    for encode in (codec.encode_prompt, codec.encode_continuation, lambda text: codec.encode_completion("a", text)):
        with pytest.raises(UserError, match="cannot read a text") as caught:
            encode("hello \ud83d")
        assert "hello" in caught.value.found and "ud83d" in caught.value.found


@given(prompt=TEXT, completion=TEXT)
def test_examples_spell_the_joined_text(chat: TextCodec, prompt: str, completion: str) -> None:
    prompt_ids, completion_ids = chat.encode_completion(prompt, completion)
    assert prompt_ids == chat.encode_prompt(prompt)
    assert chat.decode(prompt_ids + completion_ids) == prompt + completion
    assert completion_ids[-1] == chat.eos_id and chat.eos_id not in completion_ids[:-1]


def test_no_space_is_written_between_prompt_and_completion(llama: TextCodec) -> None:
    prompt_ids, completion_ids = llama.encode_completion("the t", "here")
    assert llama.decode(prompt_ids + completion_ids) == "the there"
    assert llama.decode_completion(prompt_ids, completion_ids) == "here"


def test_a_completion_keeps_the_space_it_begins_with(llama: TextCodec) -> None:
    prompt_ids, completion_ids = llama.encode_completion("the", " a cat")
    assert llama.decode(completion_ids) == "a cat"
    assert llama.decode_completion(prompt_ids, completion_ids) == " a cat"


THINK = {"additional_special_tokens": ["<think>", "</think>"]}


def test_special_tokens_are_text_but_those_for_no_text(byte_level: Build) -> None:
    codec = TextCodec(
        byte_level(eos_token="<|im_end|>", pad_token="<pad>", unk_token="<unk>", bos_token="<|im_start|>", **THINK)
    )
    said = "<think>2+2=1</think>4"
    end, pad, unknown = codec.eos_id, codec.tokenizer.pad_token_id, codec.tokenizer.unk_token_id
    for ids in (
        codec.encode_continuation(said),
        [*codec.encode_continuation(said), end],
        [pad, unknown, *codec.encode_continuation(said), end, pad],
    ):
        assert codec.decode_completion(codec.encode_prompt("2+2="), ids) == said
        assert "".join(codec.completion_pieces(codec.encode_prompt("2+2="), ids)) == said
    assert codec.decode_completion([65], [pad, 66, end], whole=True) == codec.decode([pad, 66, end], skip_special=False)
    assert codec.kept_special == "; special tokens that stay in their text: <|im_start|>, <think>, </think>"
    # One that the model ends with, though the tokenizer does not.
    other = TextCodec(codec.tokenizer, (codec.tokenizer.convert_tokens_to_ids("</think>"),))
    assert other.decode_completion([65], other.encode_continuation("<think>4</think>")) == "<think>4"


@pytest.mark.parametrize(
    ("prompt", "said", "text"),
    [
        ([], [" a"], "a"),  # nothing before it but begin-of-text
        (["日本語の"], ["の", " a"], "の a"),  # a prompt of bytes alone
        (["the", "</s>"], [" a"], " a"),
        (["the "], [" a"], " a"),
    ],
)
def test_a_completion_is_decoded_with_the_prompts_last_character(
    llama: TextCodec, prompt: list[str], said: list[str], text: str
) -> None:
    prompt_ids = [
        1,
        *(token for part in prompt for token in ([2] if part == "</s>" else llama.encode_continuation(part))),
    ]
    ids = [token for part in said for token in llama.encode_continuation(part)]
    assert llama.decode_completion(prompt_ids, ids) == text
    assert "".join(llama.completion_pieces(prompt_ids, ids)) == text


@given(data=st.data())
def test_pieces_of_a_completion_make_its_text(llama: TextCodec, chat: TextCodec, data: st.DataObject) -> None:
    """Bytes that are no characters, ends, and special tokens included."""
    for codec in (llama, chat):
        tokens = st.lists(st.integers(0, len(codec.tokenizer) - 1), max_size=14)
        prompt, ids = data.draw(tokens), data.draw(tokens)
        pieces = codec.completion_pieces(prompt, ids)
        assert len(pieces) == len(ids) and "".join(pieces) == codec.decode_completion(prompt, ids)


# Chat --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chat", "marked"])
def test_assistant_turns_carry_loss(name: str, request: pytest.FixtureRequest) -> None:
    codec: TextCodec = request.getfixturevalue(name)
    ids, mask = codec.encode_example(Conversation(TALK))
    assert learned(codec, ids, mask) == "yes<|im_end|>no<|im_end|>"
    assert codec.decode(ids, skip_special=False) == codec.render(TALK, generation_prompt=False)
    first = codec.encode_prompt(TALK[:2])
    assert ids[: len(first)] == first and not any(mask[: len(first)])
    second = codec.encode_prompt(TALK[:4])
    assert ids[: len(second)] == second


def test_end_of_text_is_added_where_the_template_writes_none(byte_level: Build) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    codec = TextCodec(byte_level(template, eos_token="<|im_end|>"))
    ids, mask = codec.encode_conversation(TALK)
    assert learned(codec, ids, mask) == " yes\n no\n<|im_end|>"


@pytest.mark.parametrize("roles", [["user"], ["assistant"], ["assistant", "user"], []])
def test_conversations_with_nothing_to_learn(chat: TextCodec, roles: list[str]) -> None:
    with pytest.raises(UserError, match="nothing to learn"):
        chat.encode_conversation([{"role": role, "content": "x"} for role in roles])


def test_a_template_that_rewrites_history_is_refused(byte_level: Build) -> None:
    template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    codec = TextCodec(byte_level(template, eos_token="<|im_end|>"))
    with pytest.raises(UserError, match="differently") as caught:
        codec.encode_example(Conversation(TALK))
    assert "{% generation %}" in caught.value.remedy


def test_messages_without_template(llama: TextCodec) -> None:
    with pytest.raises(UserError, match="no chat template") as caught:
        llama.encode_prompt(TALK[:2])
    assert "chat_template.jinja" in caught.value.remedy


def test_marks_that_cover_nothing(byte_level: Build) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{% endgeneration %}"
    with pytest.raises(UserError, match="cover no token"):
        TextCodec(byte_level(template, eos_token="<|im_end|>")).encode_conversation(TALK)


# Display -----------------------------------------------------------------------------------------------


def test_a_character_belongs_to_the_token_that_completes_it(chat: TextCodec, llama: TextCodec) -> None:
    assert chat.token_texts(chat.encode_prompt("é12"))[-2:] == ["é", "12"]
    assert chat.token_texts(chat.encode_prompt("🙂h")) == ["", "", "", "🙂", "h"]
    assert llama.token_texts(llama.encode_prompt("a日 a"))[-4:] == ["", "", "日", " a"]


# Loading -----------------------------------------------------------------------------------------------


def test_load_from_a_directory(tmp_path: Path, chat: TextCodec) -> None:
    chat.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": [3, 4]}))
    codec = TextCodec.from_pretrained(tmp_path)
    assert codec.encode_conversation(TALK) == chat.encode_conversation(TALK)
    assert codec.eos_ids == {3, 4, chat.eos_id}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert TextCodec.from_pretrained(tmp_path).eos_ids == {5, chat.eos_id}


def test_paths_without_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="did you mean 'model'"):
        load_tokenizer(tmp_path / "modle")
    with pytest.raises(UserError, match="not a directory"):
        load_tokenizer(tmp_path / "file")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer(tmp_path / "model")
    assert load_generation_config(tmp_path / "model") is None
    (tmp_path / "model" / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="generation config cannot be read"):
        load_generation_config(tmp_path / "model")


def test_check_vocabulary(chat: TextCodec) -> None:
    size = len(chat.tokenizer)
    check_vocabulary(chat.tokenizer, size)
    check_vocabulary(chat.tokenizer, size + 64)
    with pytest.raises(UserError, match=f"has id {size - 1}, the model's embedding has {size - 1} rows"):
        check_vocabulary(chat.tokenizer, size - 1)


@pytest.mark.realdata
def test_the_story_model(realdata: Path) -> None:
    codec = TextCodec.from_pretrained(realdata / "stories260K")
    assert codec.eos_ids == {1, 2} and codec.eos_id == 2 and codec.tokenizer.pad_token_id == 0
    check_vocabulary(codec.tokenizer, 512)
    prompt_ids, completion_ids = codec.encode_completion("Once upon a", " time, é日")
    assert prompt_ids[0] == 1 and completion_ids[-1] == 2
    assert codec.decode_completion(prompt_ids, completion_ids) == " time, é日"
    ids, mask = codec.encode_conversation(TALK[1:])
    assert learned(codec, ids, mask).endswith("</s>") and ids[: mask.index(True)] == codec.encode_prompt(TALK[1:2])
