"""One row's values, checked as they are taken."""

from __future__ import annotations

import contextlib
import json
import math
import re
import reprlib
import shlex
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quartet.config.common import DataConfig, SourceConfig
from quartet.config.errors import UserError
from quartet.config.nearest import guess_columns
from quartet.text.examples import AnswerText, Message, Messages, PromptText, is_empty, is_image
from quartet.text.pictures import Picture, PictureError, given_source, image_parts, to_picture

_ASSISTANT = "\n\nAssistant:"
"""Begins an answer in texts of whole dialogues, as HH-RLHF has them."""


class SkipRow(Exception):
    """A row that is left out and counted under this reason."""


def split_common_prompt(chosen: str, rejected: str) -> int | None:
    """Returns where the answers of two texts begin: behind the last ``Assistant:`` that both share; without any before
    the word in which they first differ, so that no token is torn, and early enough that neither is empty. None where
    that leaves no prompt.

    Raises:
        Skip: dialogues that differ before their last turn.
    """
    # Comparing whole beginnings is much faster than comparing characters: texts may have millions.
    shared = bisect_left(
        range(min(map(len, (chosen, rejected)))), True, key=lambda n: chosen[: n + 1] != rejected[: n + 1]
    )
    if _ASSISTANT in chosen and _ASSISTANT in rejected:
        cut = chosen.rfind(_ASSISTANT, 0, shared) + len(_ASSISTANT)
        if cut < len(_ASSISTANT) or any("\n\nHuman:" in text[cut:] for text in (chosen, rejected)):
            raise SkipRow(EARLIER)
        return cut
    both_end_words = all(text[shared : shared + 1].isspace() for text in (chosen, rejected))
    places = [mark.start() for mark in re.finditer(r"\s+", chosen[:shared])] + [shared] * both_end_words
    for place in reversed(places):
        if not chosen[:place].strip():
            return None
        if chosen[place:].strip() and rejected[place:].strip():
            return place
    return None


SAME = "chosen and rejected are the same"
EARLIER = "the conversations differ before their last turn"
PICTURES = ("image", "images")
"""Columns of pictures beside prompts."""
_PLACE = re.compile(r"<image>\n?")
"""Where a picture stands in texts, as LLaVA's data have it."""
_ROLES = {"human": "user", "gpt": "assistant"}
_TRUTHS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


@contextlib.contextmanager
def naming_row(place: str) -> Iterator[None]:
    """Adds the row to errors of the tokenizer, the chat template and pictures."""
    try:
        yield
    except UserError as error:
        found = f"{place}: {error.found}" if place else error.found
        kind = PictureError if isinstance(error, PictureError) else UserError
        raise kind(error.problem, found=found, remedy=error.remedy) from None


@dataclass(frozen=True)
class ReadOptions:
    """How the rows of one source are read.

    Args:
        columns: our names → the file's.
        section: of the recipe, for remedies.
        system_prompt: of conversations that have none.
        skips_pictures: rows are left out whose pictures cannot be used.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    section: str = "data"
    system_prompt: str | None = None
    skips_pictures: bool = False

    @classmethod
    def of(cls, config: DataConfig | SourceConfig, section: str) -> ReadOptions:
        return cls(config.columns, section, config.system_prompt, config.bad_images == "skip")


AS_GIVEN = ReadOptions()


def column_paths(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yields the names of a row's columns, and of what is inside objects with dots: ``reward_model.ground_truth``."""
    for name, value in values.items():
        yield f"{above}{name}"
        if isinstance(value, dict):
            yield from column_paths(value, f"{above}{name}.")


def get_column(values: Mapping[str, Any], path: str) -> Any:
    """Returns the value of a column, or of what is inside an object; null where the object itself is null.

    Raises:
        KeyError: there is neither.
    """
    if path in values:
        return values[path]
    name, _, inside = path.partition(".")
    above = values[name]
    if not isinstance(above, dict) and not _is_null(above):
        raise KeyError(path)
    return None if _is_null(above) else get_column(above, inside)


@dataclass
class RowFields:
    """A row under our column names; null counts as missing, and so does NaN, which tables have for it. ``source`` is
    the file that it is from."""

    values: Mapping[str, Any]
    place: str
    reading: ReadOptions = AS_GIVEN
    source: str = ""

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def parsed(self, name: str) -> Any:
        """Returns a value; of text in JSON, as CSV has lists, what it says."""
        value = self.values.get(name)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return json.loads(value)
        return value

    def has(self, *names: str) -> bool:
        return not any(_is_null(self.values.get(name)) for name in names)

    def missing(self, needed: str) -> UserError:
        present = [name for name, value in self.values.items() if not _is_null(value)]
        null = [name for name, value in self.values.items() if _is_null(value)]
        found = f"{self.place} has {', '.join(map(repr, present)) or 'nothing'}"
        found += f"; null: {', '.join(map(repr, null))}" if null else ""
        usual = guess_columns(re.findall(r"`(\w+)`", needed), self.values) or {"prompt": "question"}
        keys = " ".join(shlex.quote(f"{self.reading.section}.columns.{name}={usual[name]}") for name in usual)
        return UserError(f"a row lacks {needed}", found=found, remedy=f"rename the columns, or map them: {keys}")

    def text(self, name: str, *, empty: bool = False) -> str:
        """Returns a text value. Numbers and booleans are taken as Python writes them (``42``, ``True``), because
        converters like to turn such answers into scalars.

        Raises:
            UserError: missing, another type, or nothing but white space unless ``empty``.
        """
        if not self.has(name):
            raise self.missing(f"`{name}`")
        value = self.get(name)
        if isinstance(value, (bool, int, float)):
            value = str(value)
        if not isinstance(value, str):
            raise _refused(f"`{name}` is not text", self.place, value, "write it as text, or map another column")
        if not empty and not value.strip():
            raise UserError(f"`{name}` is empty", found=f"{self.place}: {value!r}", remedy="fill in or remove that row")
        return value

    def messages(self, name: str) -> Messages:
        """Returns a conversation, as a list or (in CSV) as JSON text.

        Raises:
            UserError: missing, empty, or not messages.
        """
        value = self.parsed(name)
        if isinstance(value, str):
            remedy = "write a list of messages, or use a `prompt` column for text"
            raise _refused(f"`{name}` is text, not a list of messages", self.place, value, remedy)
        return as_messages(value, self.place, self.source)

    def pictures(self) -> list[Picture]:
        """Returns what the columns `image` and `images` have: one picture each, or a list.

        Raises:
            PictureError: there is something else.
        """
        given: list[Any] = []
        for name in PICTURES:
            if name in self.values and self.has(name):
                value = self.parsed(name)
                given += value if isinstance(value, list | tuple) else [value]
        return [_picture(value, self.place, self.source) for value in given if not _is_null(value) and value != ""]

    def number(self, name: str) -> float | None:
        """Returns an optional finite number; CSV gives it as text."""
        value = self.values.get(name)
        if value is None or value == "":
            return None
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise _refused(f"`{name}` is not a finite number", self.place, value, "write a number, or leave it out")
        return number

    def integers(self, name: str) -> list[int]:
        """Returns a list of whole numbers; in CSV as JSON text.

        Raises:
            UserError: missing, or anything else.
        """
        if not self.has(name):
            raise self.missing(f"`{name}`")
        value = self.parsed(name)
        value = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            remedy = "write it as [1, 2, 3], or leave the column out"
            raise _refused(f"`{name}` is not a list of whole numbers", self.place, value, remedy)
        return value

    def tools(self) -> list[dict[str, Any]]:
        """Returns the tools that a conversation may call, as JSON schemas: a list, or JSON text; empty where there are
        none.

        Raises:
            UserError: JSON text that cannot be read, or anything but objects.
        """
        shape = '[{"type": "function", "function": {"name": "…", "parameters": {…}}}]'
        return _objects(self.values.get("tools"), "tools", self.place, "JSON schemas", shape)

    def truth(self, name: str) -> bool:
        """Reads a yes or no; CSV gives it as text, some converters as 1 and 0.

        Raises:
            UserError: anything else.
        """
        value = self.values.get(name)
        known = _TRUTHS.get(str(value).strip().lower())
        if known is None:
            remedy = "write true for a good answer and false for a bad one"
            raise _refused(f"`{name}` is neither true nor false", self.place, value, remedy)
        return known


def _refused(problem: str, place: str, value: Any, remedy: str) -> UserError:
    return UserError(problem, found=f"{place}: {field_excerpt(value)}", remedy=remedy)


def _objects(value: Any, name: str, place: str, what: str, shape: str) -> list[dict[str, Any]]:
    """Returns the objects of a list of objects, one object, or the JSON text of either; empty where there are none.

    Raises:
        UserError: JSON text that cannot be read, or anything but objects.
    """
    try:
        found = json.loads(value) if isinstance(value, str) and value.strip() else without_nulls(value)
    except ValueError as error:
        remedy = f"write a list of {what}, or the JSON text of one"
        raise _refused(f"`{name}` is not valid JSON: {error}", place, value, remedy) from None
    objects = [] if _is_null(found) or found == "" else found if isinstance(found, list) else [found]
    if not all(isinstance(one, dict) for one in objects):
        raise _refused(f"`{name}` is not a list of {what}", place, value, f"write {shape}, or map another column")
    return objects


def _is_null(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def without_nulls(value: Any) -> Any:
    """Returns a value without the null keys of objects: Parquet stores one struct type for all, and gives null for keys
    one lacks."""
    if isinstance(value, dict):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def as_messages(value: Any, place: str, source: str = "") -> Messages:
    """Returns messages with text content; one message alone counts as a list, ``from``/``value`` as
    ``role``/``content``, a list of text parts as their text; with pictures it stays a list. A message that only calls
    tools or thinks has the content "". One with ``weight`` 0 or ``train`` false has ``train`` False.

    Raises:
        UserError: with the turn that is wrong.
    """
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not turns:
        remedy = 'write [{"role": "user", "content": "…"}, …]'
        raise _refused("a conversation is not a list of messages", place, value, remedy)
    return [_message(turn, f"{place}, turn {n}", source) for n, turn in enumerate(turns, start=1)]


def _message(turn: Any, place: str, source: str) -> dict[str, Any]:
    message: Message = without_nulls(turn) if isinstance(turn, dict) else {}
    if "role" not in message and isinstance(message.get("from"), str) and "value" in message:
        role = message.pop("from")
        message = {"role": _ROLES.get(role, role), "content": message.pop("value"), **message}
    if "tool_calls" in message:
        shape = '[{"type": "function", "function": {"name": "…", "arguments": {…}}}]'
        message["tool_calls"] = _objects(message["tool_calls"], "tool_calls", place, "calls", shape)
    if "content" not in message and not is_empty({**message, "content": ""}):
        message["content"] = ""
    if isinstance(parts := message.get("content"), list):
        message["content"] = _parts(parts, place, source, is_answer=message.get("role") == "assistant")
    if not (message.pop("weight", 1) and message.pop("train", True)):
        message["train"] = False
    if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str | list):
        remedy = 'write {"role": "user", "content": "…"}'
        raise _refused("a message needs `role` and `content`, both text", place, turn, remedy)
    return message


def _parts(parts: list[Any], place: str, source: str, *, is_answer: bool) -> str | list[dict[str, Any]]:
    """Returns the text of content that is a list of parts, or the parts where pictures are among them.

    Raises:
        UserError: some are neither text nor pictures, or an answer has pictures.
    """
    found: list[dict[str, Any]] = []
    for part in parts:
        known = part if isinstance(part, dict) else {}
        if known.get("type") == "text" and isinstance(known.get("text"), str):
            found.append({"type": "text", "text": known["text"]})
        elif is_image(known) and not is_answer:
            given = given_source(known)
            found.append({"type": "image"} | ({} if given is None else {"image": _picture(given, place, source)}))
        else:
            remedy = 'write {"type": "text", "text": "…"}, or {"type": "image", "image": "…"} in turns of the user'
            raise _refused("a part of a message's content is neither text nor a picture", place, part, remedy)
    if any(part["type"] == "image" for part in found):
        return found
    return "".join(part["text"] for part in found)


def _picture(value: Any, place: str, source: str) -> Picture:
    """Returns a picture; relative paths begin at the data file's directory."""
    path = Path(source).expanduser()
    with naming_row(place):
        return to_picture(value, (path if path.is_dir() else path.parent) if source and path.exists() else None)


def with_pictures(fields: RowFields, prompt: PromptText) -> PromptText:
    """Returns a prompt with the pictures that stand in columns beside it.

    They go to the parts that have no picture, in order; without such parts to each ``<image>`` of the user's texts;
    without these before the text of the user's first turn. Text becomes that turn.

    Raises:
        PictureError: there are more places than pictures, or fewer.
    """
    given = fields.pictures()
    if not given and not image_parts(prompt):
        return prompt
    messages = to_messages(prompt)
    if given and not image_parts(messages):
        messages = _with_places(messages, len(given))
    num = sum("image" not in part for part in image_parts(messages))
    if num != len(given):
        found = f"{fields.place}: {len(given)} in {' and '.join(PICTURES)}, {num} places without one in the messages"
        remedy = 'write one {"type": "image"} for each picture of the columns'
        raise PictureError("a prompt has not as many pictures as places for them", found=found, remedy=remedy)
    left = iter(given)

    def filled(part: dict[str, Any]) -> dict[str, Any]:
        return {**part, "image": next(left)} if part["type"] == "image" and "image" not in part else part

    return [
        {**turn, "content": [filled(part) for part in turn["content"]]} if isinstance(turn["content"], list) else turn
        for turn in messages
    ]


def _with_places(messages: Messages, num: int) -> Messages:
    """Returns messages of texts with places for ``num`` pictures."""
    users = [n for n, turn in enumerate(messages) if turn["role"] == "user"]
    found, place = list(messages), {"type": "image"}
    is_marked = any(_PLACE.search(messages[n]["content"]) for n in users)
    for n in users if is_marked else users[:1]:
        texts = _PLACE.split(messages[n]["content"])
        parts = [[{"type": "text", "text": text}] if text else [] for text in texts]
        before = [] if is_marked else [place] * num
        content = [*before, *parts[0], *(part for more in parts[1:] for part in (place, *more))]
        if place in content:
            found[n] = {**messages[n], "content": content}
    return found


def read_prompt(fields: RowFields) -> PromptText:
    """Returns the column ``prompt`` (text or messages), else ``messages``."""
    if fields.has("prompt"):
        if isinstance(fields.get("prompt"), (list, dict)):
            return fields.messages("prompt")
        return fields.text("prompt")
    if fields.has("messages"):
        return fields.messages("messages")
    raise fields.missing("`prompt` or `messages`")


def with_system_prompt(fields: RowFields, prompt: PromptText) -> PromptText:
    """Returns a conversation with its system prompt and, in its first message, its tools. Plain text, to which no
    chat template is applied, stays as it is.

    The system message that it has comes before the row's column ``system`` (empty: none), and that before the recipe's.

    Raises:
        UserError: a system prompt that is no text, tools that are no JSON schemas.
    """
    if isinstance(prompt, str):
        return prompt
    system = fields.text("system", empty=True) if fields.has("system") else fields.reading.system_prompt
    if system and prompt[0]["role"] not in ("system", "developer"):
        prompt = [{"role": "system", "content": system}, *prompt]
    if tools := fields.tools():
        prompt = [{**prompt[0], "tools": tools}, *prompt[1:]]
    return prompt


def to_messages(prompt: PromptText) -> Messages:
    """Returns a prompt as messages: text, whose answers are messages, is the user's turn."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def answer_text(messages: Messages, place: str) -> AnswerText:
    """Returns an answer given as one assistant message: its content, where it has nothing else."""
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise UserError(
            "an answer is not one assistant message",
            found=f"{place}: roles {[message['role'] for message in messages]}",
            remedy="give the answer as text or as one assistant message, the turns before it in `prompt`",
        )
    answer = {name: value for name, value in messages[0].items() if name != "train"}
    return answer if answer.keys() - {"role", "content"} else str(answer["content"])


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def field_excerpt(value: Any) -> str:
    """Returns at most 80 characters of a value as Python writes it."""
    # reprlib looks only as far as it shows: a value may be nested without end, or very long.
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
