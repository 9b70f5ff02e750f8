"""Small tokenizers built on the spot, one per trap."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from quartet.text.tokenizer import TextCodec

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def byte_level() -> Callable[..., PreTrainedTokenizerFast]:
    """GPT-2's kind: one token per byte, a few merges, whatever special tokens are asked for."""

    def build(template: str | None = None, **special: str) -> PreTrainedTokenizerFast:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        merged = ["he", "ll", "hell", "Ġw", "12"]
        vocab = {token: n for n, token in enumerate([*alphabet, *merged, "<|im_start|>", "<|im_end|>"])}
        merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("1", "2")]
        tokenizer = Tokenizer(models.BPE(vocab, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
        fast.chat_template = template
        return fast

    return build


@pytest.fixture(scope="session")
def sentence_piece() -> Callable[[str], PreTrainedTokenizerFast]:
    """Llama-2's kind: a space is put before every text and stripped again, bytes as a fall-back."""

    def build(single: str) -> PreTrainedTokenizerFast:
        special = ["<unk>", "<s>", "</s>"]
        tokens = [*special, *(f"<0x{n:02X}>" for n in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz.,?", "▁a", "▁th"]
        vocab = {token: n for n, token in enumerate([*tokens, "th"])}
        merges = [("t", "h"), ("▁", "a"), ("▁", "th")]
        tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        tokenizer.add_special_tokens(special)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<unk>", unk_token="<unk>"
        )

    return build


@pytest.fixture(scope="session")
def chat(byte_level: Callable[..., PreTrainedTokenizerFast]) -> TextCodec:
    return TextCodec(byte_level(CHATML, eos_token="<|im_end|>", pad_token="<|im_end|>"))


@pytest.fixture(scope="session")
def marked(byte_level: Callable[..., PreTrainedTokenizerFast]) -> TextCodec:
    return TextCodec(byte_level(MARKED, eos_token="<|im_end|>"))


@pytest.fixture(scope="session")
def llama(sentence_piece: Callable[[str], PreTrainedTokenizerFast]) -> TextCodec:
    return TextCodec(sentence_piece("<s> $A"), (1, 2))
