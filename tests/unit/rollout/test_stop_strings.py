"""Stop strings are found where a full decode finds them, whatever the tokens look like."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quartet.envs.protocol import Observation
from quartet.envs.transcript import Action, ObservedState, Transcript
from quartet.extras.serve.bodies import CompletionBody
from quartet.extras.serve.server import Answers
from quartet.rollout.protocol import Completion, FinishReason, Request, SamplingParams
from quartet.rollout.scheduler import StopStringMatcher
from quartet.schedule.groups import group_batch, single_turn_trajectory
from quartet.schedule.model_worker import record_columns, rollout_records
from quartet.schedule.rollout_worker import completion_text
from quartet.text.tokenizer import TextCodec

PIECES = ["a", "b", "ab", "ba", "END", "E", "N", "D", " ", "aab"]


def pieces(before: Sequence[int], ids: Sequence[int]) -> str:
    return "".join(PIECES[i] for i in ids)


def first_hit(matcher: StopStringMatcher, ids: Sequence[int]) -> tuple[int, int] | None:
    """(tokens when found, characters before the stop string)."""
    for n in range(1, len(ids) + 1):
        place = matcher.find(ids[:n])
        if place is not None:
            return n, place
    return None


@settings(deadline=None, max_examples=150)
@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=25),
    stops=st.lists(st.sampled_from(["ab", "END", "aba", "D a", "bb", "E"]), min_size=1, max_size=3),
)
def test_equals_decoding_everything_each_time(ids: list[int], stops: list[str]) -> None:
    expected = None
    for n in range(1, len(ids) + 1):
        places = [place for s in stops if (place := pieces((), ids[:n]).find(s)) >= 0]
        if places:
            expected = (n, min(places))
            break
    assert first_hit(StopStringMatcher(stops, pieces), ids) == expected


def test_only_the_newest_tokens_are_decoded() -> None:
    longest = 0

    def counting(before: Sequence[int], ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(before) + len(ids))
        return pieces(before, ids)

    assert first_hit(StopStringMatcher(["END"], counting), [0] * 200) is None
    assert longest <= 9


# Tokenizers of every kind -----------------------------------------------------------------------------------

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<think>", "</think>"]
KINDS = ("strips a space", "metaspace", "byte-level")


def codec_of(kind: str) -> TextCodec:
    letters = ["▁", *"ab42=+\n", "▁4", "ab"]
    if kind == "byte-level":
        letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġ4"]
    space = [f"<0x{n:02X}>" for n in range(256)] if kind == "strips a space" else []
    vocab = {token: n for n, token in enumerate([*SPECIAL, *space, *letters])}
    merges = [] if kind == "byte-level" else [("▁", "4"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=bool(space), fuse_unk=True))
    if kind == "byte-level":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
        tokenizer.decoder = decoders.Metaspace()
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(SPECIAL)
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named))


def ids_of(kind: str, said: str) -> list[int]:
    """As a model may say it: encoders put a space behind special tokens."""
    spelled = {" ": "Ġ", "\n": "Ċ", " 4": "Ġ4"} if kind == "byte-level" else {" ": "▁", " 4": "▁4"}
    tokens = [spelled.get(part, part) for part in re.findall("</?think>| 4|.", said, re.DOTALL)]
    return [CODECS[kind].tokenizer.get_vocab()[token] for token in tokens]


CODECS = {kind: codec_of(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_stop_strings_are_found_in_the_text_that_readers_have(kind: str, data: st.DataObject) -> None:
    codec = CODECS[kind]
    tokens = st.one_of(
        st.integers(0, len(codec.tokenizer) - 1), st.sampled_from(codec.encode_continuation(" 4 2\nab="))
    )
    prompt, ids = data.draw(st.lists(tokens, min_size=1, max_size=9)), data.draw(st.lists(tokens, max_size=16))
    if kind == "strips a space":  # bytes that are no characters change how those before them decode
        prompt, ids = ([token for token in each if not 134 <= token < 262] for each in (prompt, ids))
    stops = data.draw(
        st.lists(st.sampled_from([" 4", "\n", "2 ", "<think>", " ", "b=", "4 2"]), min_size=1, max_size=2)
    )
    expected = None
    for n in range(1, len(ids) + 1):
        text = codec.decode_completion(prompt, ids[:n])
        if places := [place for stop in stops if (place := text.find(stop)) >= 0]:
            expected = (n, min(places))
            break
    assert first_hit(StopStringMatcher(stops, codec.decode_completion, prompt), ids) == expected


CUT = [
    (" 42\n", "\n", " 42"),
    (" 42\nab", "\n", " 42"),
    (" 42", " 4", ""),  # at the first word
    ("42 4", " 4", "42"),
    ("ab 42", "42", "ab "),
    ("<think>2+2=4</think>4\n", "\n", "<think>2+2=4</think>4"),
    ("<think> 2</think> 4\n", "</think>", "<think> 2"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("said", "stop", "kept"), CUT)
def test_every_reader_of_a_completion_has_the_same_text(kind: str, said: str, stop: str, kept: str) -> None:
    """Reward, evaluation, rollout file, environment, server."""
    codec = CODECS[kind]
    prompt, ids = tuple(codec.encode_prompt("ab=")), ids_of(kind, said)
    request = Request("r", "r", prompt, SamplingParams(stop_strings=(stop,)))
    num, text_end = first_hit(StopStringMatcher([stop], codec.decode_completion, prompt), ids) or (0, 0)
    made = tuple(ids[:num])
    columns = made, (0.0,) * num, (0,) * num
    completion = Completion("r", "r", *columns, FinishReason.STOP_STRING, text_end)
    texts = {"reward and evaluation": completion_text(codec, prompt, completion)}

    batch = group_batch(0, [single_turn_trajectory(prompt, completion, texts["reward and evaluation"])])
    batch = batch.with_objects(prompt_id=["p"]).with_sequence(score=batch.sequence["version"].float())
    (record,) = rollout_records(batch, record_columns(batch), codec)
    texts["rollout file"] = record.response_text

    transcript = Transcript(codec)
    transcript.see(ObservedState(Observation("ab=", rewrites=True)))
    texts["environment"] = transcript.act(Action(*columns, "stop_string", text_end))

    body = CompletionBody(model="m", prompt="ab=", stop=stop, logprobs=0)
    (choice,) = Answers("c", body, codec, [request]).whole([completion])["choices"]
    texts["server"], said_tokens = choice["text"], choice["logprobs"]["tokens"]
    assert "".join(said_tokens) == kept
    assert set(texts.values()) == {kept}, texts
