"""One row's values, checked as they are taken."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quartet.config.errors import UserError
from quartet.text.examples import Messages

_ROLES = {"human": "user", "gpt": "assistant"}
_TRUTHS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


@contextlib.contextmanager
def placed(place: str) -> Iterator[None]:
    """What the tokenizer or the chat template refuses is reported with its row."""
    try:
        yield
    except UserError as error:
        found = f"{place}: {error.found}" if place else error.found
        raise UserError(error.problem, found=found, remedy=error.remedy) from None


@dataclass
class Fields:
    """A row under our column names; null counts as missing. ``notes`` collects conversions worth
    reporting.
    """

    values: Mapping[str, Any]
    place: str
    notes: list[str] = field(default_factory=list)

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def has(self, *names: str) -> bool:
        return all(self.values.get(name) is not None for name in names)

    def missing(self, needed: str) -> UserError:
        present = [name for name, value in self.values.items() if value is not None]
        null = [name for name, value in self.values.items() if value is None]
        found = f"{self.place} has {', '.join(map(repr, present)) or 'nothing'}"
        found += f"; null: {', '.join(map(repr, null))}" if null else ""
        return UserError(
            f"a row lacks {needed}",
            found=found,
            remedy="rename the columns, or map them: data.columns.prompt=question",
        )

    def text(self, name: str, *, empty: bool = False) -> str:
        """A text value. Numbers and booleans are taken as Python writes them (``42``, ``True``) and noted,
        because converters like to turn such answers into scalars.

        Raises:
            UserError: missing, another type, or nothing but white space unless ``empty``.
        """
        if not self.has(name):
            raise self.missing(f"`{name}`")
        value = self.values[name]
        if isinstance(value, (bool, int, float)):
            self.notes.append(f"{name} was not text and was written out as text")
            value = str(value)
        if not isinstance(value, str):
            raise UserError(
                f"`{name}` is not text",
                found=f"{self.place}: {_excerpt(value)}",
                remedy="write it as text, or map another column",
            )
        if not empty and not value.strip():
            raise UserError(f"`{name}` is empty", found=f"{self.place}: {value!r}", remedy="fill in or remove that row")
        return value

    def messages(self, name: str) -> Messages:
        """A conversation, as a list or (in CSV) as JSON text.

        Raises:
            UserError: missing, empty, or not messages.
        """
        value = self.values.get(name)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError:
                raise UserError(
                    f"`{name}` is text, not a list of messages",
                    found=f"{self.place}: {_excerpt(value)}",
                    remedy="write a list of messages, or use a `prompt` column for text",
                ) from None
        return as_messages(value, self.place)

    def number(self, name: str) -> float | None:
        """An optional finite number; CSV gives it as text."""
        value = self.values.get(name)
        if value is None or value == "":
            return None
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise UserError(
                f"`{name}` is not a finite number",
                found=f"{self.place}: {_excerpt(value)}",
                remedy="write a number, or leave it out",
            )
        return number

    def truth(self, name: str) -> bool:
        """A yes or no; CSV gives it as text, some converters as 1 and 0.

        Raises:
            UserError: anything else.
        """
        value = self.values.get(name)
        known = _TRUTHS.get(str(value).strip().lower())
        if known is None:
            raise UserError(
                f"`{name}` is neither true nor false",
                found=f"{self.place}: {_excerpt(value)}",
                remedy="write true for a good answer and false for a bad one",
            )
        return known


def as_messages(value: Any, place: str) -> Messages:
    """Messages with text content; one message alone counts as a list, ``from``/``value`` as
    ``role``/``content``.

    Raises:
        UserError: with the turn that is wrong.
    """
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not turns:
        raise UserError(
            "a conversation is not a list of messages",
            found=f"{place}: {_excerpt(value)}",
            remedy='write [{"role": "user", "content": "…"}, …]',
        )
    return [_message(turn, n, place) for n, turn in enumerate(turns, start=1)]


def _message(turn: Any, number: int, place: str) -> dict[str, Any]:
    # Parquet stores one struct type for all messages and so gives null for the keys a message does not have.
    message = {k: v for k, v in turn.items() if v is not None} if isinstance(turn, dict) else {}
    if "role" not in message and isinstance(message.get("from"), str) and "value" in message:
        role = message.pop("from")
        message = {"role": _ROLES.get(role, role), "content": message.pop("value"), **message}
    if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
        raise UserError(
            "a message needs `role` and `content`, both text",
            found=f"{place}, turn {number}: {_excerpt(turn)}",
            remedy='write {"role": "user", "content": "…"}',
        )
    return message


def answer_of(messages: Messages, place: str) -> str:
    """The content of an answer given as one assistant message."""
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise UserError(
            "an answer is not one assistant message",
            found=f"{place}: roles {[message['role'] for message in messages]}",
            remedy="give the answer as text or as one assistant message, the turns before it in `prompt`",
        )
    return str(messages[0]["content"])


def _excerpt(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
