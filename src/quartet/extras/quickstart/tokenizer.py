"""A character-level Hugging Face tokenizer for the quickstart's task, built on the spot."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ALPHABET = "0123456789+=;"
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
SPECIAL_TOKENS = (PAD, EOS, UNK)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Makes one token per character of ``ALPHABET``, and three distinct others: padding, end-of-text, unknown.

    Text over the alphabet survives encoding and decoding unchanged; any other character becomes ``<unk>``.
    Nothing is added around the text: there is no begin-of-text token, and trainers append end-of-text.
    """
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *ALPHABET])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )
