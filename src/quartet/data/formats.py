"""Recognises the formats that people keep their data in.

============================  =======================================  =====================================
kind                          columns                                  prompt
============================  =======================================  =====================================
``demonstrations`` (SFT)      ``prompt``, ``completion``               text or messages
                              ``messages``                             every turn before the assistant's
                              ``text``                                 none: everything is learned
                              ``input_ids``, ``labels``                where labels are -100
``preferences`` (pairs)       ``prompt``, ``chosen``, ``rejected``     text or messages
                              ``messages``, ``chosen``, ``rejected``   the messages
                              ``chosen``, ``rejected``                 what both begin with
``judgements`` (KTO)          ``prompt``, ``completion``, ``label``    text or messages
``prompts`` (RL, evaluation)  ``prompt``                               text or messages
                              ``messages``                             the messages, without a final answer
                              ``chosen``, ``rejected``                 what both begin with
============================  =======================================  =====================================

A row that cannot be used as it is stops the run with its file and line. Rows that can be left out or read
with a harmless conversion are counted by reason in ``Parsed.notes``, to be reported.

All of them take a ``Reading``: the names of columns, and whether Human/Assistant turns in texts become messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, takewhile
from typing import Any, Generic, TypeVar

from quartet.config.errors import UserError
from quartet.config.nearest import JOINT, nearest
from quartet.config.preference import DoubtfulPairs
from quartet.data.fields import (
    AS_GIVEN,
    Fields,
    Reading,
    Skip,
    answer_of,
    as_chat,
    as_dialogue,
    as_messages,
    column_at,
    column_paths,
    field_excerpt,
    in_context,
    is_dialogue,
    is_whole_dialogue,
    prompt_field,
    split_dialogues,
    split_texts,
)
from quartet.data.readers import Row, shown_places
from quartet.text.examples import (
    AnswerText,
    Conversation,
    Demonstration,
    Document,
    Example,
    Judgement,
    Messages,
    Preference,
    Prompt,
    PromptText,
    Tokenised,
    is_empty,
    is_learned,
)

SIDES = ("chosen", "rejected")
SAME = "chosen and rejected are the same"
OWN_PROMPT = "the answers were whole conversations, of which the prompt was taken, not the one beside them"
EARLIER = "the conversations differ before their last turn"


def pair_field(fields: Fields) -> tuple[PromptText, AnswerText, AnswerText]:
    """Returns the prompt, the chosen answer and the rejected one.

    Raises:
        Skip: the answers are the same, or differ before their last turn.
        UserError: there is no prompt, or values are neither text nor messages.
    """
    sides = [fields.get(name) for name in ("chosen", "rejected")]
    if all(isinstance(side, (list, dict)) for side in sides):
        return _conversations(fields)
    chosen, rejected = fields.text("chosen", empty=True), fields.text("rejected", empty=True)
    prompt: PromptText
    given, has_prompt = fields.get("prompt"), fields.has("prompt") or fields.has("messages")
    if isinstance(given, str) and is_dialogue(given) and chosen.startswith(given) and rejected.startswith(given):
        fields.notes.append("both answers began with their prompt, which was taken off")
        prompt, chosen, rejected = prompt_field(fields), chosen[len(given) :], rejected[len(given) :]
    elif not has_prompt or (is_whole_dialogue(chosen) and is_whole_dialogue(rejected)):
        fields.notes += [OWN_PROMPT] if has_prompt else []
        cut = _num_prompt(fields, chosen, rejected)
        prompt, chosen, rejected = chosen[:cut], chosen[cut:], rejected[cut:]
    else:
        prompt = prompt_field(fields)
    if fields.as_turns:
        prompt = as_dialogue(prompt) if isinstance(prompt, str) else prompt
        chosen, rejected = chosen.strip(), rejected.strip()
    return prompt, chosen, rejected


def _num_prompt(fields: Fields, chosen: str, rejected: str) -> int:
    """Returns how many characters the prompt has with which two texts begin."""
    if chosen == rejected:
        raise Skip(SAME)
    if is_dialogue(chosen) and is_dialogue(rejected):
        cut = split_dialogues(chosen, rejected)
        if cut is None:
            raise Skip(EARLIER)
        return cut
    # Where another column could be the prompt, words that both answers happen to begin with are none.
    others = [name for name, value in fields.values.items() if isinstance(value, str) and name not in SIDES]
    cut = None if others or {"prompt", "messages"} & set(fields.values) else split_texts(chosen, rejected)
    if cut is None:
        raise fields.missing("`prompt` or `messages`, with which `chosen` and `rejected` could also both begin")
    return cut


def _conversations(fields: Fields) -> tuple[PromptText, AnswerText, AnswerText]:
    """Returns the prompt and answers of conversations: what both begin with, and the one turn in which they differ.

    Where they begin with the assistant's turn, they continue ``prompt``.
    """
    chosen, rejected = fields.messages("chosen"), fields.messages("rejected")
    if chosen == rejected:
        raise Skip(SAME)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if len(chosen) != shared + 1 or len(rejected) != shared + 1:
        raise Skip(EARLIER)
    prompt: PromptText = chosen[:shared]
    if not shared or chosen[0]["role"] == "assistant":
        prompt = [*as_chat(prompt_field(fields)), *chosen[:shared]]
    elif isinstance(beside := fields.get("prompt"), (list, dict)):
        given = as_messages(beside, fields.place)
        if given[-shared:] == prompt:
            prompt = given  # which may have a system's turn more
        elif given != prompt[: len(given)]:
            fields.notes.append(OWN_PROMPT)
    elif isinstance(beside, str) and beside.strip() not in {turn["content"].strip() for turn in chosen[:shared]}:
        fields.notes.append(OWN_PROMPT)
    return prompt, answer_of(chosen[shared:], fields.place), answer_of(rejected[shared:], fields.place)


T = TypeVar("T")

UNSEEN = "chosen and rejected differ only in what the chat template leaves out"
EMPTY = "one answer is empty"
BEGINNING = "the chosen answer is the beginning of the rejected one"
_NO_LOSS = -100
"""Label of a token that is not learned."""
_MASKS = ("completion_mask", "assistant_masks")
_KEPT_PLACES = 6
"""Places remembered per warning: one more than are shown."""


class NothingLeft(UserError):
    """Every row is left out; ``reason`` says why the first one is."""

    def __init__(
        self, found: str, *, reason: str, problem: str = "no row is left to use", remedy: str = "use other data"
    ) -> None:
        super().__init__(problem, found=found, remedy=remedy)
        self.reason = reason


@dataclass
class Parsed(Generic[T]):
    """Typed examples, and how many rows fell under which warning.

    ``items`` is a tuple; of rows that come one after the other an iterator, and the counts are complete at its end.
    ``skipped`` counts rows that were left out, ``notes`` rows that were used after a conversion; both by
    reason, with their first places.
    """

    items: Any = ()
    skipped: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def count(self, rows: Counter[str], reason: str, place: str) -> None:
        """Counts one more row among ``skipped`` or ``notes``."""
        rows[reason] += 1
        known = self.places.setdefault(reason, [])
        known += [place][: _KEPT_PLACES - len(known)]

    def report(self) -> list[str]:
        """Returns one line per warning, for the log."""
        lines = {reason: f"{count} rows left out: {reason}" for reason, count in self.skipped.items()}
        lines |= {reason: f"{count} rows: {reason}" for reason, count in self.notes.items()}
        return [f"{line} ({shown_places(self.places[reason])})" for reason, line in lines.items()]

    def counted(self, reasons: Iterable[str]) -> str:
        """Tells how many rows were left out for these reasons, in words; '' where there are none."""
        found = [r for r in reasons if r in self.skipped]
        return "; ".join(f"{self.skipped[r]}: {r} ({shown_places(self.places[r])})" for r in found)


def preferences(
    rows: Iterable[Row], reading: Reading = AS_GIVEN, doubtful: DoubtfulPairs = "keep"
) -> Parsed[Preference]:
    """Parses preference pairs.

    Left out and counted: pairs whose answers are the same, and conversations that differ before their last
    turn.

    Args:
        doubtful: what happens to a pair with an empty answer. "keep": it is counted; a model that says nothing is a
            judgement people have made. "skip": it is left out and counted. "error": it stops the run, and so do equal
            answers.

    Raises:
        UserError: missing columns, an empty prompt, values that are neither text nor messages, a margin that is not a
            finite number, doubtful pairs.
    """
    parse = partial(_preference, keep_empty=doubtful == "keep")
    return parse_rows(parse, rows, reading, refuse_doubtful if doubtful == "error" else None)


def refuse_doubtful(parsed: Parsed[Any], num_rows: int = 0) -> None:
    """Stops where pairs were left out that the recipe wants to be an error."""
    if found := parsed.counted((SAME, UNSEEN, EMPTY, BEGINNING)):
        raise UserError(
            "some pairs are doubtful",
            found=found,
            remedy="mend or remove these rows, or set doubtful_pairs to keep or skip",
        )


def has_judgements(rows: Sequence[Row], reading: Reading = AS_GIVEN) -> bool:
    """Tells whether the first row holds a judged answer rather than a pair."""
    names = {name for name, value in rows[0].values.items() if value is not None} | set(reading.columns)
    return {"completion", "label"} <= names and not {"chosen", "rejected"} <= names


def parse_rows(
    parse: Callable[[Fields], T],
    rows: Iterable[Row],
    reading: Reading = AS_GIVEN,
    finish: Callable[[Parsed[T], int], None] | None = None,
) -> Parsed[T]:
    """Returns what ``parse`` makes of every row: at once, or of an iterator's rows as ``items`` is gone through.


    Args:
        finish: told the counts and the number of rows at the end.

    Raises:
        UserError: no row is left; what ``parse`` and ``finish`` raise.
    """
    parsed: Parsed[T] = Parsed()

    def items() -> Iterator[T]:
        num_rows = num_kept = 0
        for row in rows:
            num_rows += 1
            fields = Fields(_renamed(row, reading), row.place, reading)
            try:
                item = _in_context(parse(fields), fields)
            except Skip as reason:
                parsed.count(parsed.skipped, str(reason), row.place)
                continue
            for note in fields.notes:
                parsed.count(parsed.notes, note, row.place)
            num_kept += 1
            yield item
        if finish is not None:
            finish(parsed, num_rows)
        if not num_kept:
            found = f"of {num_rows} rows left out {parsed.counted(parsed.skipped)}"
            raise NothingLeft(found, reason=next(iter(parsed.skipped), ""))

    parsed.items = items() if isinstance(rows, Iterator) else tuple(items())
    return parsed


def _in_context(item: T, fields: Fields) -> T:
    """Returns the example, in whose conversation the row's system prompt and tools are."""
    name = "messages" if isinstance(item, Conversation) else "prompt"
    prompt = getattr(item, name, "")
    found = in_context(fields, prompt)
    changed: Any = item
    return item if found is prompt else replace(changed, **{name: found})


def _joined(row: Row, reading: Reading) -> Row:
    """Returns the row with the columns that are joined of several texts, as ``instruction + input``; empty ones are
    left out.

    Raises:
        UserError: a part is no text.
    """
    joined: dict[str, Any] = {}
    for name in reading.columns.values():
        parts = name.split(JOINT)
        if name in row.values or len(parts) < 2 or not row.values.keys() >= set(parts):
            continue
        texts = [row.values[part] for part in parts]
        for part, text in zip(parts, texts, strict=True):
            if not isinstance(text, str | None):
                raise UserError(
                    f"column {part!r} is joined to others, and is no text",
                    found=f"{row.place}: {type(text).__name__}",
                    remedy=f"map text columns alone under {reading.section}.columns, or write the text into the data",
                )
        joined[name] = "\n\n".join(text for text in texts if text and text.strip())
    return replace(row, values={**row.values, **joined}) if joined else row


def _renamed(row: Row, reading: Reading) -> dict[str, Any]:
    row = _joined(row, reading)
    renamed: dict[str, Any] = {}
    for ours, theirs in reading.columns.items():
        try:
            renamed[ours] = column_at(row.values, theirs)
        except KeyError:
            paths = list(column_paths(row.values))
            raise UserError(
                f"the data have no column {theirs!r}, to which {reading.section}.columns.{ours} points",
                found=f"{row.place} has {', '.join(map(repr, paths))}",
                remedy=nearest(theirs, paths) or f"set {reading.section}.columns.{ours} to one of these",
            ) from None
    kept = {name: value for name, value in row.values.items() if name not in reading.columns.values()}
    return {**kept, **renamed}


# Demonstrations and judgements ---------------------------------------------------------------------------


def _demonstration(fields: Fields) -> Example:
    if fields.has("input_ids"):
        if any(fields.has(name) for name in ("prompt", "messages", "text")):
            fields.notes.append("input_ids were learned from, not the text beside them")
        return _tokenised(fields)
    if fields.has("prompt", "completion"):
        prompt, answer = _answered(fields)
        return Demonstration(prompt, answer, fields.place)
    if fields.has("messages"):
        return _conversation(fields.messages("messages"), fields)
    if fields.has("text") and not (fields.has("prompt") or fields.has("completion")):
        text = fields.text("text")
        return _conversation(as_dialogue(text), fields) if fields.as_turns else Document(text, fields.place)
    raise fields.missing("`prompt` and `completion`, `messages`, `text` or `input_ids`")


def _conversation(messages: Messages, fields: Fields) -> Conversation:
    roles = [message["role"] for message in messages]
    if "assistant" not in roles[1:]:
        raise UserError(
            "a conversation has no assistant turn to learn from",
            found=f"{fields.place}: roles {roles}",
            remedy="remove the row, or add the answer",
        )
    if any(is_learned(message) and is_empty(message) for message in messages):
        fields.notes.append("an assistant's turn is empty: end-of-text alone is learned")
    return Conversation(messages, fields.place)


def _tokenised(fields: Fields) -> Tokenised:
    """Returns ids as they are; padding, which ``attention_mask`` marks, is taken off both ends."""
    ids = fields.integers("input_ids")
    labels = fields.integers("labels") if fields.has("labels") else ids
    masks = {name: fields.integers(name) for name in ("attention_mask", *_MASKS) if fields.has(name)}
    for name, values in {"labels": labels, **masks}.items():
        if len(values) != len(ids):
            raise _unfit(fields, f"`{name}` has {len(values)} entries for {len(ids)} ids")
    wrong = next((n for n, label in enumerate(labels) if label not in (_NO_LOSS, ids[n])), None)
    if wrong is not None:
        raise _unfit(fields, f"label {labels[wrong]} at place {wrong} is neither {_NO_LOSS} nor the id {ids[wrong]}")
    learned = [label != _NO_LOSS and all(masks[n][k] for n in _MASKS if n in masks) for k, label in enumerate(labels)]
    seen = masks.get("attention_mask", [1] * len(ids))
    start, stop = (seen.index(1), len(seen) - seen[::-1].index(1)) if 1 in seen else (0, 0)
    if not all(seen[start:stop]):
        raise _unfit(fields, "`attention_mask` has gaps: several sequences in one row")
    places = fields.integers("position_ids")[start:stop] if fields.has("position_ids") else range(len(seen))
    lengths = fields.integers("seq_lengths") if fields.has("seq_lengths") else []
    if len(lengths) > 1 or any(after != before + 1 for before, after in pairwise(places)):
        raise _unfit(fields, f"`{'seq_lengths' if lengths[1:] else 'position_ids'}`: several sequences in one row")
    learned[start : start + 1] = [False]  # nothing predicts the first
    if not any(learned[start:stop]):
        raise _unfit(fields, "no token carries loss")
    return Tokenised(tuple(ids[start:stop]), tuple(learned[start:stop]), fields.place)


def _unfit(fields: Fields, reason: str) -> UserError:
    return UserError(
        "a tokenised row cannot be learned from",
        found=f"{fields.place}: {reason}",
        remedy=f"mend or remove the row; labels repeat `input_ids`, with {_NO_LOSS} where nothing is learned",
    )


def _judgement(fields: Fields) -> Judgement:
    if not fields.has("completion", "label"):
        raise fields.missing("`prompt`, `completion` and `label`")
    prompt, answer = _answered(fields, empty=True)
    if is_empty(answer):
        fields.notes.append("the answer is empty")
    return Judgement(prompt, answer, fields.truth("label"), fields.place)


def _answered(fields: Fields, *, empty: bool = False) -> tuple[PromptText, AnswerText]:
    """Returns ``prompt`` and ``completion``."""
    prompt, given = prompt_field(fields), fields.get("completion")
    if isinstance(given, (list, dict)):
        answer = answer_of(as_messages(given, fields.place), fields.place)
        if is_empty(answer) and not empty:
            found = f"{fields.place}: {field_excerpt(given)}"
            raise UserError("`completion` is empty", found=found, remedy="fill in or remove that row")
        return as_chat(prompt), answer
    text = fields.text("completion", empty=empty)
    return prompt, text.strip() if fields.as_turns else text


# Pairs ---------------------------------------------------------------------------------------------------


def _preference(fields: Fields, *, keep_empty: bool) -> Preference:
    if not fields.has("chosen", "rejected"):
        raise fields.missing("`chosen` and `rejected`, with `prompt` or `messages` or as conversations")
    margin = fields.number("margin")
    prompt, chosen, rejected = pair_field(fields)
    if chosen == rejected:
        raise Skip(SAME)
    if is_empty(chosen) or is_empty(rejected):
        if not keep_empty:
            raise Skip(EMPTY)
        fields.notes.append(EMPTY)
    return Preference(prompt, chosen, rejected, margin, fields.place)


# Prompts -------------------------------------------------------------------------------------------------


def _prompt(fields: Fields) -> Prompt:
    if fields.has("prompt") or fields.has("messages"):
        name = "prompt" if fields.has("prompt") else "messages"
        prompt = prompt_field(fields)
        used = {name}
    elif fields.has(*SIDES):
        prompt, _, _ = pair_field(fields)
        used = set(SIDES)
    else:
        raise fields.missing("`prompt`, `messages`, or `chosen` and `rejected` that hold it")
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        turns = len(prompt)
        while prompt and prompt[-1]["role"] == "assistant":
            prompt = prompt[:-1]
        if not prompt:
            raise UserError(
                "a prompt holds only assistant turns",
                found=f"{fields.place}: {turns} turns",
                remedy="remove the row, or add the user's turn",
            )
        fields.notes.append("the final assistant turn was taken off the prompt")
    return Prompt(prompt, {k: v for k, v in fields.values.items() if k not in used}, fields.place)


demonstrations = partial(parse_rows, _demonstration)
"""SFT examples.

Raises:
    UserError: missing columns, empty or non-text values, a conversation without an answer, labels that are not the
        row's own token ids.
"""
judgements = partial(parse_rows, _judgement)
"""Answers judged good or bad one by one.

Raises:
    UserError: missing columns, an empty prompt, a label that is neither true nor false.
"""
prompts = partial(parse_rows, _prompt)
"""Prompts for generation; every other column goes to the rewards.

Raises:
    UserError: missing columns, an empty prompt, values that are neither text nor messages.
"""
