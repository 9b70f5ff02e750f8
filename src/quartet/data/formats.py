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

A row that cannot be used as it is stops the run with its file and line. Rows that can be left out are counted by
reason in ``Parsed.skipped``, to be reported.

Beside a prompt, columns ``image`` and ``images`` may have pictures. All of them take a ``ReadOptions``, which has the
names of columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import dropwhile, takewhile
from typing import Any, Generic, TypeVar

from quartet.config.errors import UserError
from quartet.config.nearest import JOINT, suggest_name
from quartet.data.fields import (
    AS_GIVEN,
    EARLIER,
    PICTURES,
    SAME,
    ReadOptions,
    RowFields,
    SkipRow,
    answer_text,
    as_messages,
    column_paths,
    field_excerpt,
    get_column,
    read_prompt,
    split_common_prompt,
    to_messages,
    with_pictures,
    with_system_prompt,
)
from quartet.data.readers import DataRow, format_places
from quartet.text.examples import (
    AnswerText,
    Conversation,
    Demonstration,
    Example,
    Judgement,
    Messages,
    Preference,
    Prompt,
    PromptText,
    TextDocument,
    Tokenised,
    is_empty,
)
from quartet.text.pictures import PictureError

SIDES = ("chosen", "rejected")


def read_pair(fields: RowFields) -> tuple[PromptText, AnswerText, AnswerText]:
    """Returns the prompt, the chosen answer and the rejected one.

    Raises:
        Skip: the answers are the same, or differ before their last turn.
        UserError: there is no prompt, or values are neither text nor messages.
    """
    if all(isinstance(fields.get(name), (list, dict)) for name in SIDES):
        return _conversations(fields)
    chosen, rejected = (fields.text(name, empty=True) for name in SIDES)
    if fields.has("prompt") or fields.has("messages"):
        return read_prompt(fields), chosen, rejected
    if chosen == rejected:
        raise SkipRow(SAME)
    # Where another column could be the prompt, words that both answers happen to begin with are none.
    others = [name for name, value in fields.values.items() if isinstance(value, str) and name not in SIDES]
    cut = None if others or {"prompt", "messages"} & set(fields.values) else split_common_prompt(chosen, rejected)
    if cut is None:
        raise fields.missing("`prompt` or `messages`, with which `chosen` and `rejected` could also both begin")
    return chosen[:cut], chosen[cut:], rejected[cut:]


def _conversations(fields: RowFields) -> tuple[PromptText, AnswerText, AnswerText]:
    """Returns the prompt and answers of conversations: what both begin with, and the one turn in which they differ.

    Where they begin with the assistant's turn, they continue ``prompt``.
    """
    chosen, rejected = fields.messages("chosen"), fields.messages("rejected")
    if chosen == rejected:
        raise SkipRow(SAME)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if len(chosen) != shared + 1 or len(rejected) != shared + 1:
        raise SkipRow(EARLIER)
    prompt = chosen[:shared]
    if not shared or chosen[0]["role"] == "assistant":
        prompt = [*to_messages(read_prompt(fields)), *prompt]
    return prompt, answer_text(chosen[shared:], fields.place), answer_text(rejected[shared:], fields.place)


T = TypeVar("T")

_NO_LOSS = -100
"""Label of a token that is not learned."""
_KEPT_PLACES = 6
"""Places remembered per warning: one more than are shown."""


class NoRowsLeft(UserError):
    """Every row is left out; ``reason`` says why the first one is."""

    def __init__(
        self, found: str, *, reason: str, problem: str = "no row is left to use", remedy: str = "use other data"
    ) -> None:
        super().__init__(problem, found=found, remedy=remedy)
        self.reason = reason


@dataclass
class ParsedRows(Generic[T]):
    """Typed examples, and how many rows were left out, by reason, with their first places.

    ``items`` is a tuple; of rows that come one after the other an iterator, and the counts are complete at its end.
    """

    items: Any = ()
    skipped: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)
    skips_pictures: bool = False

    def skip(self, reason: str, place: str) -> None:
        """Counts one more row that is left out."""
        self.skipped[reason] += 1
        known = self.places.setdefault(reason, [])
        known += [place][: _KEPT_PLACES - len(known)]

    def skip_picture(self, error: PictureError, place: str) -> None:
        """Counts a row whose pictures cannot be used. Raises the error where the recipe leaves out no such rows."""
        if not self.skips_pictures:
            raise error
        self.skip(error.problem, place)

    def report(self) -> list[str]:
        """Returns one line per reason, for the log."""
        return [
            f"{count} rows left out: {reason} ({format_places(self.places[reason])})"
            for reason, count in self.skipped.items()
        ]


def has_judgements(rows: Sequence[DataRow], reading: ReadOptions = AS_GIVEN) -> bool:
    """Tells whether the first row holds a judged answer rather than a pair."""
    names = {name for name, value in rows[0].values.items() if value is not None} | set(reading.columns)
    return {"completion", "label"} <= names and not {"chosen", "rejected"} <= names


def parse_rows(
    parse: Callable[[RowFields], T],
    rows: Iterable[DataRow],
    reading: ReadOptions = AS_GIVEN,
    finish: Callable[[ParsedRows[T], int], None] | None = None,
) -> ParsedRows[T]:
    """Returns what ``parse`` makes of every row: at once, or of an iterator's rows as ``items`` is gone through.


    Args:
        finish: told the counts and the number of rows at the end.

    Raises:
        UserError: no row is left; what ``parse`` and ``finish`` raise.
    """
    parsed: ParsedRows[T] = ParsedRows(skips_pictures=reading.skips_pictures)

    def items() -> Iterator[T]:
        num_rows = num_kept = 0
        for row in rows:
            num_rows += 1
            fields = RowFields(_renamed(row, reading), row.place, reading, row.source)
            try:
                item = _in_context(parse(fields), fields)
            except SkipRow as reason:
                parsed.skip(str(reason), row.place)
                continue
            except PictureError as error:
                parsed.skip_picture(error, row.place)
                continue
            num_kept += 1
            yield item
        if finish is not None:
            finish(parsed, num_rows)
        if not num_kept:
            raise NoRowsLeft("; ".join(parsed.report()), reason=next(iter(parsed.skipped), ""))

    parsed.items = items() if isinstance(rows, Iterator) else tuple(items())
    return parsed


def _in_context(item: T, fields: RowFields) -> T:
    """Returns the example, in whose conversation the row's pictures, system prompt and tools are."""
    name = "messages" if isinstance(item, Conversation) else "prompt"
    prompt = getattr(item, name, None)
    if prompt is None:
        if fields.pictures():
            remedy = "give `prompt` and `completion`, or `messages`; or leave the pictures out"
            raise UserError("a row without a prompt has pictures", found=fields.place, remedy=remedy)
        return item
    found = with_system_prompt(fields, with_pictures(fields, prompt))
    changed: Any = item
    return item if found is prompt else replace(changed, **{name: found})


def _joined(row: DataRow, reading: ReadOptions) -> DataRow:
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


def _renamed(row: DataRow, reading: ReadOptions) -> dict[str, Any]:
    row = _joined(row, reading)
    renamed: dict[str, Any] = {}
    for ours, theirs in reading.columns.items():
        try:
            renamed[ours] = get_column(row.values, theirs)
        except KeyError:
            paths = list(column_paths(row.values))
            raise UserError(
                f"the data have no column {theirs!r}, to which {reading.section}.columns.{ours} points",
                found=f"{row.place} has {', '.join(map(repr, paths))}",
                remedy=suggest_name(theirs, paths) or f"set {reading.section}.columns.{ours} to one of these",
            ) from None
    kept = {name: value for name, value in row.values.items() if name not in reading.columns.values()}
    return {**kept, **renamed}


# Demonstrations and judgements ---------------------------------------------------------------------------


def _demonstration(fields: RowFields) -> Example:
    if fields.has("input_ids"):
        return _tokenised(fields)
    if fields.has("prompt", "completion"):
        prompt, answer = _answered(fields)
        return Demonstration(prompt, answer, fields.place)
    if fields.has("messages"):
        return _conversation(fields.messages("messages"), fields)
    if fields.has("text") and not (fields.has("prompt") or fields.has("completion")):
        return TextDocument(fields.text("text"), fields.place)
    raise fields.missing("`prompt` and `completion`, `messages`, `text` or `input_ids`")


def _conversation(messages: Messages, fields: RowFields) -> Conversation:
    roles = [message["role"] for message in messages]
    if "assistant" not in roles[1:]:
        raise UserError(
            "a conversation has no assistant turn to learn from",
            found=f"{fields.place}: roles {roles}",
            remedy="remove the row, or add the answer",
        )
    return Conversation(messages, fields.place)


def _tokenised(fields: RowFields) -> Tokenised:
    """Returns ids as they are; labels of -100 carry no loss."""
    ids = fields.integers("input_ids")
    labels = fields.integers("labels") if fields.has("labels") else ids
    if len(labels) != len(ids):
        raise _unfit(fields, f"`labels` has {len(labels)} entries for {len(ids)} ids")
    wrong = next((n for n, label in enumerate(labels) if label not in (_NO_LOSS, ids[n])), None)
    if wrong is not None:
        raise _unfit(fields, f"label {labels[wrong]} at place {wrong} is neither {_NO_LOSS} nor the id {ids[wrong]}")
    if fields.has("attention_mask") and 0 in fields.integers("attention_mask"):
        raise _unfit(fields, "`attention_mask` marks padding")
    learned = [False, *(label != _NO_LOSS for label in labels[1:])]  # nothing predicts the first
    if True not in learned:
        raise _unfit(fields, "no token carries loss")
    return Tokenised(tuple(ids), tuple(learned), fields.place)


def _unfit(fields: RowFields, reason: str) -> UserError:
    return UserError(
        "a tokenised row cannot be learned from",
        found=f"{fields.place}: {reason}",
        remedy=f"mend or remove the row; labels repeat `input_ids`, with {_NO_LOSS} where nothing is learned",
    )


def _judgement(fields: RowFields) -> Judgement:
    if not fields.has("completion", "label"):
        raise fields.missing("`prompt`, `completion` and `label`")
    prompt, answer = _answered(fields, empty=True)
    return Judgement(prompt, answer, fields.truth("label"), fields.place)


def _answered(fields: RowFields, *, empty: bool = False) -> tuple[PromptText, AnswerText]:
    """Returns ``prompt`` and ``completion``."""
    prompt, given = read_prompt(fields), fields.get("completion")
    if isinstance(given, (list, dict)):
        answer = answer_text(as_messages(given, fields.place, fields.source), fields.place)
        if is_empty(answer) and not empty:
            found = f"{fields.place}: {field_excerpt(given)}"
            raise UserError("`completion` is empty", found=found, remedy="fill in or remove that row")
        return to_messages(prompt), answer
    return prompt, fields.text("completion", empty=empty)


# Pairs ---------------------------------------------------------------------------------------------------


def _preference(fields: RowFields) -> Preference:
    if not fields.has("chosen", "rejected"):
        raise fields.missing("`chosen` and `rejected`, with `prompt` or `messages` or as conversations")
    margin = fields.number("margin")
    prompt, chosen, rejected = read_pair(fields)
    if chosen == rejected:
        raise SkipRow(SAME)
    return Preference(prompt, chosen, rejected, margin, fields.place)


# Prompts -------------------------------------------------------------------------------------------------


def _prompt(fields: RowFields) -> Prompt:
    if fields.has("prompt") or fields.has("messages"):
        name = "prompt" if fields.has("prompt") else "messages"
        prompt = read_prompt(fields)
        used = {name}
    elif fields.has(*SIDES):
        prompt, _, _ = read_pair(fields)
        used = set(SIDES)
    else:
        raise fields.missing("`prompt`, `messages`, or `chosen` and `rejected` that hold it")
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        prompt = list(reversed(list(dropwhile(lambda turn: turn["role"] == "assistant", reversed(prompt)))))
        if not prompt:
            raise UserError(
                "a prompt holds only assistant turns",
                found=fields.place,
                remedy="remove the row, or add the user's turn",
            )
    used.update(PICTURES)  # which are in the prompt
    return Prompt(prompt, {k: v for k, v in fields.values.items() if k not in used}, fields.place)


demonstrations = partial(parse_rows, _demonstration)
"""SFT examples.

Raises:
    UserError: missing columns, empty or non-text values, a conversation without an answer, labels that are not the
        row's own token ids.
"""
preferences = partial(parse_rows, _preference)
"""Preference pairs. Left out and counted: pairs whose answers are the same, and conversations that differ before their
last turn.

Raises:
    UserError: missing columns, an empty prompt, values that are neither text nor messages, a margin that is not a
        finite number.
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
