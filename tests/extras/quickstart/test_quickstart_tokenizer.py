"""The character-level tokenizer: exact round trips, distinct special tokens, survives saving."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from quartet.extras.quickstart.tokenizer import ALPHABET, build_tokenizer

TOKENIZER = build_tokenizer()


@given(st.text(alphabet=ALPHABET))
def test_text_over_the_alphabet_survives_a_round_trip(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_a_saved_tokenizer_is_reloaded_by_auto_tokenizer(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "47+85=7+5=12;4+8+1=13;132"
    assert reloaded(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert reloaded.decode(reloaded(text)["input_ids"]) == text
    assert (reloaded.pad_token_id, reloaded.eos_token_id) == (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id)
    assert len(reloaded) == len(TOKENIZER)
