"""Token bookkeeping: nothing sampled is tokenised again, and a sequence holds what the conversation says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quartet.batch.trajectory import STEP_PREFIX, TrajectorySequence
from quartet.envs.protocol import Observation
from quartet.envs.transcript import SOURCE, Action, EpisodeLimits, ObservedState, StateError, Transcript
from quartet.text.pictures import Picture, PictureCodec, PictureProcessor, PictureStore
from quartet.text.tokenizer import TextCodec, load_tokenizer
from tiny_vision import KINDS, picture_bytes, save_processor

IdsOf = Callable[[TextCodec, str], tuple[int, ...]]
END = "<|im_end|>"
STEPS = STEP_PREFIX + SOURCE


def begun(codec: TextCodec, state: Any) -> Transcript:
    transcript = Transcript(codec)
    transcript.see(ObservedState(Observation(state, rewrites=True)))
    return transcript


def action(
    token_ids: tuple[int, ...], *, reason: str = "stop", text_end: int | None = None, first: float = 0.0
) -> Action:
    logprobs = tuple(-first - 0.25 * n for n in range(len(token_ids)))
    return Action(token_ids, logprobs, (3,) * len(token_ids), reason, text_end)


def actions_of(sequences: tuple[TrajectorySequence, ...], name: str) -> list[Any]:
    """A column on the action tokens of all sequences, in order."""
    return [
        value
        for sequence in sequences
        for value, is_action in zip({**vars(sequence), **sequence.columns}[name], sequence.action_mask, strict=True)
        if is_action
    ]


# One case after the other ------------------------------------------------------------------------------------


def test_tokens_that_would_merge_across_the_boundary_stay_apart(plain: TextCodec, ids_of: IdsOf) -> None:
    """`he` + `llo` is one token when it is tokenised as a whole; the policy sampled it as two."""
    assert plain.encode_prompt("hello") == [*ids_of(plain, "hello")]
    transcript = begun(plain, "say he")
    sampled = ids_of(plain, "l l")
    assert transcript.act(action(sampled, reason="length")) == "ll"
    transcript.see(ObservedState(Observation("o w")))
    now = transcript.token_ids
    assert now[: len(now) - 2][-2:] == sampled
    assert now[-2:] == ids_of(plain, "o Ġw")
    assert plain.decode(now) == "say hello w"


def test_a_space_is_not_put_before_an_observation(sentence_piece: TextCodec) -> None:
    transcript = begun(sentence_piece, "a cat")
    transcript.act(action(tuple(sentence_piece.encode_continuation("s")), reason="length"))
    transcript.see(ObservedState(Observation("and")))
    assert sentence_piece.decode(transcript.token_ids) == "a catsand"
    transcript.act(action(tuple(sentence_piece.encode_continuation(" th")), reason="length"))
    transcript.see(ObservedState(Observation(" a")))
    assert sentence_piece.decode(transcript.token_ids) == "a catsand th a"
    assert len(transcript.sequences()) == 1


def test_a_rewritten_state_begins_another_sequence(plain: TextCodec, ids_of: IdsOf) -> None:
    transcript = begun(plain, "read this")
    first, second = ids_of(plain, "n o t e <|im_end|>"), ids_of(plain, "4 7")
    assert transcript.act(action(first, first=1.0)) == "note"
    transcript.see(ObservedState(Observation("you wrote: note. now?", rewrites=True), 0.5))
    assert transcript.act(action(second, reason="length", first=2.0)) == "47"
    transcript.earn(-1.0)
    one, two = transcript.sequences()
    assert one.prompt_ids == tuple(plain.encode_prompt("read this"))
    assert two.prompt_ids == tuple(plain.encode_prompt("you wrote: note. now?"))
    assert (one.token_ids, two.token_ids) == (first, second)
    assert one.columns[STEPS] == (0.0, 0.0, 0.0, 0.0, 0.5) and two.columns[STEPS] == (0.0, -1.0)
    assert one.logprobs == (-1.0, -1.25, -1.5, -1.75, -2.0)
    assert (one.state, two.state) == ("read this", "you wrote: note. now?")
    assert (one.completion, two.completion) == ("note", "47")
    assert (one.num_turns, two.num_turns, two.versions, two.finish_reason) == (1, 1, (3, 3), "length")


def test_an_end_of_text_that_was_sampled_is_not_written_twice(plain: TextCodec, ids_of: IdsOf) -> None:
    """An environment that writes its template itself repeats the end of the turn."""
    tail = f"{END}<|im_start|>u"
    ended, cut_off = ids_of(plain, "b <|im_end|>"), ids_of(plain, "b")
    for sampled, state in ((ended, tail), (cut_off, tail), (ended, "ab" + tail), (cut_off, "ab" + tail)):
        transcript = begun(plain, "a")
        transcript.act(action(sampled))
        transcript.see(ObservedState(Observation(state, rewrites=state.startswith("ab"))))
        assert plain.decode(transcript.token_ids, skip_special=False) == f"ab{END}<|im_start|>u"
        assert transcript.token_ids[1 : 1 + len(sampled)] == sampled


def test_the_environment_does_not_see_the_stop_string_but_the_state_keeps_it(plain: TextCodec, ids_of: IdsOf) -> None:
    transcript = begun(plain, "q")
    assert transcript.act(action(ids_of(plain, "o k ; !"), reason="stop_string", text_end=2)) == "ok"
    transcript.see(ObservedState(Observation(" next")))
    transcript.act(action(ids_of(plain, "y"), reason="length"))
    (only,) = transcript.sequences()
    assert plain.decode(only.token_ids) == "ok;! nexty"
    assert only.state == "qok;! next"


def test_an_observation_that_nothing_answers_is_left_out(plain: TextCodec, ids_of: IdsOf) -> None:
    transcript = begun(plain, "a")
    assert transcript.sequences() == ()
    transcript.act(action(ids_of(plain, "b")))
    transcript.see(ObservedState(Observation("too late")))
    (only,) = transcript.sequences()
    assert only.token_ids == ids_of(plain, "b") and only.action_mask == (True,)
    transcript.see(ObservedState(Observation("another state", rewrites=True)))
    assert transcript.sequences() == (only,), "a state in which nothing was done is no sequence"


def test_text_and_messages_do_not_mix(chat: TextCodec, ids_of: IdsOf) -> None:
    text = begun(chat, "a")
    text.act(action(ids_of(chat, "b")))
    with pytest.raises(StateError, match="observation") as raised:
        text.see(ObservedState(Observation([{"role": "user", "content": "c"}])))
    assert "the state is text" in raised.value.found
    text.see(ObservedState(Observation([{"role": "user", "content": "c"}], rewrites=True)))
    assert text.token_ids == tuple(chat.encode_prompt([{"role": "user", "content": "c"}]))


def test_room_is_what_the_sequence_and_all_of_them_leave(plain: TextCodec, ids_of: IdsOf) -> None:
    transcript = begun(plain, "abc")
    assert transcript.room(EpisodeLimits(1, 10)) == 7 and transcript.room(EpisodeLimits(1, 10, max_tokens=4)) == 1
    transcript.act(action(ids_of(plain, "d e"), reason="length"))
    transcript.see(ObservedState(Observation("f")))
    assert transcript.room(EpisodeLimits(1, 10)) == 4
    transcript.see(ObservedState(Observation("vwxyz", rewrites=True)))
    assert transcript.room(EpisodeLimits(1, 10)) == 5
    assert transcript.room(EpisodeLimits(1, 10, max_tokens=12)) == 2, "5 tokens ended, without what nothing answers"


# Messages ------------------------------------------------------------------------------------------------


USER = {"role": "user", "content": "hello"}


def test_messages_extend_where_the_template_writes_what_was_sampled(chat: TextCodec, ids_of: IdsOf) -> None:
    """Whether a turn ended by itself or not: what the policy did not write of its end is the environment's."""
    for sampled, added in (
        (ids_of(chat, "he l lo <|im_end|>"), f"\n<|im_start|>user\n12{END}\n<|im_start|>assistant\n"),
        (ids_of(chat, "he l lo"), f"{END}\n<|im_start|>user\n12{END}\n<|im_start|>assistant\n"),
    ):
        transcript = begun(chat, [USER])
        before = transcript.token_ids
        transcript.act(action(sampled))
        transcript.see(ObservedState(Observation([{"role": "user", "content": "12"}])))
        assert transcript.token_ids[: len(before) + len(sampled)] == (*before, *sampled)
        assert chat.decode(transcript.token_ids[len(before) + len(sampled) :], skip_special=False) == added
        transcript.act(action(ids_of(chat, "1")))
        (only,) = transcript.sequences()
        assert only.state[1:] == [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "12"}]


def picture(colour: Any) -> dict[str, Any]:
    return {"type": "image", "image": Picture(picture_bytes(24, 24, colour))}


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_in_later_turns(kind: str, tmp_path: Path) -> None:
    directory = save_processor(kind, tmp_path)
    pictures = PictureCodec(PictureProcessor.load(directory), PictureStore(tmp_path / "pictures"))
    codec = TextCodec(load_tokenizer(directory), pictures=pictures)
    first = {"role": "user", "content": [picture("red"), {"type": "text", "text": "what?"}]}
    transcript = begun(codec, [first])
    before = transcript.token_ids
    assert before == tuple(codec.encode_prompt([first]))
    sampled = tuple(codec.encode_continuation("he<|im_end|>"))
    transcript.act(action(sampled))
    seen = {"role": "user", "content": [picture("blue"), {"type": "text", "text": "ll"}, picture("red")]}
    transcript.see(ObservedState(Observation([seen])))
    held, alone = transcript.token_ids, pictures.processor.counts_beside
    # A picture that stands otherwise beside another one than alone begins another sequence.
    assert (held[: len(before) + len(sampled)] == (*before, *sampled)) is not alone
    assert held == tuple(codec.encode_prompt([first, {"role": "assistant", "content": "he"}, seen]))
    transcript.act(action(sampled))
    other = {**first, "content": [picture("green"), *first["content"][1:]]}
    transcript.see(ObservedState(Observation([other, *transcript._open.state[1:]], rewrites=True)))
    transcript.act(action(sampled))
    assert len(transcript.sequences()) == 2 + alone


@pytest.mark.parametrize(
    ("codec", "tokens", "why"),
    [
        ("chat", "h i <|other|>", "the policy ended its turn with another token than the template does"),
        ("chat", "h <|im_end|> i <|im_end|>", "an end of text in the middle is no part of the message's text"),
        ("trimming", "h i Ġ <|im_end|>", "the template strips what was sampled"),
        ("forgetful", "h i <|im_end|>", "the template leaves out what was said before"),
    ],
)
def test_messages_that_render_other_tokens_begin_another_sequence(
    request: pytest.FixtureRequest, ids_of: IdsOf, codec: str, tokens: str, why: str
) -> None:
    held: TextCodec = request.getfixturevalue(codec)
    transcript = begun(held, [USER])
    transcript.act(action(ids_of(held, tokens)))
    transcript.see(ObservedState(Observation([{"role": "user", "content": "12"}])))
    transcript.act(action(ids_of(held, "1 <|im_end|>")))
    one, two = transcript.sequences()
    assert one.token_ids == ids_of(held, tokens), why
    assert two.prompt_ids == tuple(held.encode_prompt(two.state))


# Any episode -----------------------------------------------------------------------------------------------

TEXTS = st.text("helo w123", min_size=1, max_size=8)
TOKENS = ["h", "e", "l", "o", "w", "1", "2", "3", "Ġ", "he", "ll", "hell", "hello", "Ġw", "12", "123", "lo"]
SAMPLED = st.tuples(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=6), st.booleans())
KINDS = st.sampled_from(["extends", "whole", "rewrites"])
EPISODES = st.tuples(TEXTS, st.lists(st.tuples(SAMPLED, TEXTS, KINDS), min_size=1, max_size=5))


@given(EPISODES)
def test_any_text_episode(plain: TextCodec, ids_of: IdsOf, episode: Any) -> None:
    """Per sequence, tokens decode to the conversation; over all sequences, actions are exactly what was sampled."""
    start, turns = episode
    transcript, conversation = begun(plain, start), start
    conversations, sampled, rewards = [], [], []
    for turn, ((tokens, ends), text, kind) in enumerate(turns):
        token_ids = ids_of(plain, " ".join([*tokens, END] if ends else tokens))
        before = transcript.token_ids
        seen = transcript.act(action(token_ids, first=float(turn)))
        assert seen == plain.decode(token_ids)
        assert transcript.token_ids == (*before, *token_ids)
        sampled.append(token_ids)
        rewards.append(float(turn + 1))
        conversation += seen
        if turn == len(turns) - 1:
            transcript.earn(rewards[-1])
            break
        if kind == "rewrites":
            conversations.append(conversation)
            # No extension of the one before, which has one question mark less in front.
            conversation = "?" * len(conversations) + text
            transcript.see(ObservedState(Observation(conversation, rewrites=True), rewards[-1]))
            continue
        conversation += text
        before = transcript.token_ids
        after = Observation(text) if kind == "extends" else Observation(conversation, rewrites=True)
        transcript.see(ObservedState(after, rewards[-1]))
        assert transcript.token_ids[: len(before)] == before, "what stood there is not tokenised again"
    sequences = transcript.sequences()
    conversations.append(conversation)
    assert [plain.decode((*s.prompt_ids, *s.token_ids)) for s in sequences] == conversations
    assert actions_of(sequences, "token_ids") == [token for ids in sampled for token in ids]
    expected = [-float(turn) - 0.25 * n for turn, ids in enumerate(sampled) for n in range(len(ids))]
    assert actions_of(sequences, "logprobs") == expected
    ends = list(accumulate(len(ids) for ids in sampled))
    earned = actions_of(sequences, STEPS)
    assert [earned[end - 1] for end in ends] == rewards and sum(map(abs, earned)) == sum(rewards)
    assert sum(s.num_turns for s in sequences) == len(turns)
    for sequence in sequences:
        assert sequence.action_mask[-1], "nothing follows the last action"
        columns = (sequence.logprobs, sequence.columns[STEPS])
        assert all(v == 0 for c in columns for v, a in zip(c, sequence.action_mask, strict=True) if not a)


@given(EPISODES)
def test_any_chat_episode_reads_what_the_template_writes(chat: TextCodec, ids_of: IdsOf, episode: Any) -> None:
    start, turns = episode
    messages = [{"role": "user", "content": start}]
    transcript, sampled = begun(chat, messages), []
    for (tokens, ends), text, kind in turns:
        token_ids = ids_of(chat, " ".join([*tokens, END] if ends else tokens))
        answer = {"role": "assistant", "content": transcript.act(action(token_ids))}
        sampled.append(token_ids)
        more = [{"role": "user", "content": text}]
        messages = more if kind == "rewrites" else [*messages, answer, *more]
        transcript.see(ObservedState(Observation(more) if kind == "extends" else Observation(messages, rewrites=True)))
        assert chat.decode(transcript.token_ids, skip_special=False) == chat.render(messages)
    sequences = transcript.sequences()
    assert actions_of(sequences, "token_ids") == [token for ids in sampled for token in ids]
    assert len(sequences) == 1 + sum(kind == "rewrites" for _, _, kind in turns[:-1])
