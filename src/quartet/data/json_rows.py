"""Rows in JSON, with the bounds that its parser does not have.

Accepted beyond the standard, as Python's own writer gives it: ``NaN`` and ``Infinity``. Refused: a key twice in an
object (one value would vanish), numbers that no computation can use, nesting beyond any data format, half characters.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from quartet.config.errors import UserError
from quartet.data.files import MAX_ROW_BYTES, too_long

MAX_DEPTH = 64
_MAX_DIGITS = 300
"""Digits of a whole number: it is then within what a float can hold."""
_MAX_NUMBER_LENGTH = 1000
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")
_SPACE = re.compile(r"[ \t\r\n]*")
ROWS_KEY = "data"
"""Where a file that is one object has its rows."""


class Unreadable(ValueError):
    """Why text is not JSON that can be used."""


def _whole(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise Unreadable(f"a number of {len(text):,} digits")
    return int(text)


def _fraction(text: str) -> float:
    number = float(text) if len(text) <= _MAX_NUMBER_LENGTH else math.inf
    if math.isinf(number):
        raise Unreadable("a number that is too large or too long")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise Unreadable(f"the key {shortened_row(twice)} twice in one object")
    return found


_DECODER = json.JSONDecoder(parse_int=_whole, parse_float=_fraction, object_pairs_hook=_object)


def value_at(text: str, at: int = 0) -> tuple[Any, int]:
    """The value that begins at ``text[at]``, and where it ends.

    Raises:
        Unreadable: there is none, or none that can be used.
    """
    try:
        value, end = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise Unreadable(error.msg) from None
    except RecursionError:
        raise Unreadable(f"more than {MAX_DEPTH} levels of nesting") from None
    if text.count("[", at, end) + text.count("{", at, end) > MAX_DEPTH and _is_deep(value):
        raise Unreadable(f"more than {MAX_DEPTH} levels of nesting")
    if _HALF_CHARACTER.search(text, at, end):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Unreadable("half a character (a lone surrogate)") from None
    return value, end


def loads(text: str) -> Any:
    """The value of a whole text; Unreadable as ``value_at``."""
    value, end = value_at(text, _skip_space(text, 0))
    if _skip_space(text, end) < len(text):
        raise Unreadable("Extra data")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


# Files ---------------------------------------------------------------------------------------------------


def parse_line(path: Path, line: int, text: str) -> dict[str, Any]:
    """The row in one line of a JSON Lines file.

    Raises:
        UserError: it is not valid JSON, or not an object.
    """
    try:
        return as_object(loads(text), path, line)
    except Unreadable as error:
        raise malformed_row(path, line, text[:80], str(error)) from None


def is_one_document(path: Path, text: str) -> bool:
    """Whether a file's text is an array of rows, or one object with its rows under ``data``.

    Raises:
        UserError: it is a table that is not written row by row.
    """
    start = _skip_space(text, 0)
    if text[start : start + 1] != "{":
        return text[start : start + 1] == "["
    try:
        value, end = value_at(text, start)
    except Unreadable:
        return False
    rows = value.get(ROWS_KEY)
    if is_whole := _skip_space(text, end) == len(text):
        check_orientation(path, value)
    return is_whole and isinstance(rows, list) and all(isinstance(row, dict) for row in rows)


def check_orientation(path: Path, value: dict[str, Any]) -> None:
    """Refuses an object that is a whole table, as pandas and ``datasets`` write them unless they are told otherwise."""
    inner, orientation = list(value.values()), None
    if isinstance(value.get("columns"), list) and isinstance(value.get("data"), list):
        orientation = None if all(isinstance(row, dict) for row in value["data"]) else "split"
    elif inner and all(isinstance(part, dict) and part for part in inner):
        by_column = all(key.isdecimal() for part in inner for key in part)
        orientation = "columns" if by_column else "index" if all(map(str.isdecimal, value)) else None
    elif len(inner) > 1 and all(isinstance(part, list) and part for part in inner):
        firsts = {type(part[0]) for part in inner}
        is_table = str in firsts and not firsts & {dict, list} and len({len(part) for part in inner}) == 1
        orientation = "list" if is_table else None
    if orientation is not None:
        raise UserError(
            f"the file is a table written as a whole, and not row by row (orient={orientation!r} of pandas)",
            found=f"{path}: an object of {', '.join(map(shortened_row, list(value)[:4]))}",
            remedy=f"write it by rows: df.to_json({path.name!r}, orient='records', lines=True)",
        )


def document_rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a document, each with the line at which it begins."""
    at = _skip_space(text, 0)
    if text[at] == "{":
        at = _start_of_rows(text, at)
        yield from _elements(path, text, at)
        return
    end = yield from _elements(path, text, at)
    rest = _skip_space(text, end)
    if rest < len(text):
        raise malformed_row(path, text.count("\n", 0, rest) + 1, text[rest : rest + 80], "text behind the array")


def _start_of_rows(text: str, at: int) -> int:
    """Where the array under ``data`` begins, in an object that was read before."""
    at = _skip_space(text, at + 1)
    while True:
        name, end = value_at(text, at)
        at = _skip_space(text, _skip_space(text, end) + 1)
        if name == ROWS_KEY:
            return at
        _, end = value_at(text, at)
        at = _skip_space(text, _skip_space(text, end) + 1)


def _elements(path: Path, text: str, at: int) -> Generator[tuple[int, dict[str, Any]], None, int]:
    """Decodes one element after the other, because only that way each row's line is known; returns the array's end."""
    line, counted = 1, 0
    at = _skip_space(text, at + 1)
    while text[at : at + 1] != "]":
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, end = value_at(text, at)
        except Unreadable as error:
            raise malformed_row(path, line, text[at : at + 80].partition("\n")[0], str(error)) from None
        if end - at > MAX_ROW_BYTES:
            raise too_long(path, line)
        yield line, as_object(value, path, line)
        at = _skip_space(text, end)
        if text[at : at + 1] == ",":
            at = _skip_space(text, at + 1)
        elif text[at : at + 1] != "]":
            line += text.count("\n", counted, at)
            raise malformed_row(path, line, text[at : at + 80], "expected ',' or ']' between rows")
    return at + 1


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found is not None else at


def as_object(value: Any, path: Path, line: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(
            "a row is not an object",
            found=f"{path}:{line}: {shortened_row(json.dumps(value))}",
            remedy='write each row as {"column": value, …}',
        )
    return value


def malformed_row(path: Path, line: int, text: str, reason: str) -> UserError:
    return UserError(
        "a row is not valid JSON",
        found=f"{path}:{line}: {reason}: {shortened_row(text)}",
        remedy="mend or remove that row",
    )


def shortened_row(text: str) -> str:
    """At most 60 characters of a text, quoted."""
    text = text.strip()
    return repr(text if len(text) <= 60 else text[:57] + "…")
