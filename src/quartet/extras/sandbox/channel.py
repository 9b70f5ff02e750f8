"""Calls between two processes: tests in one sandbox use the code under test in the other.

What crosses is plain data of bounded size, or a numbered reference to an object that stays where it is.
The side of the tests holds such an object as a :class:`SolutionObject`, which can be called and asked for attributes,
and little else: whatever a test compares, searches or counts is plain data of its own process. The code under test
holds what is not plain of the tests (a function to apply, say) as a :class:`TestObject`, which can be called.

A message is a line of JSON: ``["ask", operation, number, arguments, keywords]``, answered by ``["value", value]`` or
``["error", names of the class and its bases, text]``. Before it answers, a process may ask in turn.

Code under test may change all that its process does, so nothing rests on what it sends: ``decode`` builds plain values
only, within bounds. In the form of a value ``None``, ``bool``, ``float``, text and small numbers stand for themselves,
all else is ``[tag, …]``. An instance of a class that inherits from a plain type becomes the plain value.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime as dt
import itertools
import json
import operator
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

MAX_DEPTH = 100
MAX_VALUES = 1 << 18
"""Most values in what one message brings, keys and items of containers included; also the longest ``range``."""
MAX_MESSAGE_BYTES = 1 << 25
_SMALL = 1 << 53


def _pairs(*values: Any) -> dict[Any, Any]:
    return dict(zip(values[::2], values[1::2], strict=True))


def _range(*values: int) -> range:
    found = range(*values)
    if len(found) > MAX_VALUES:
        raise ValueError(f"a range of more than {MAX_VALUES} numbers")
    return found


_KINDS: dict[str, tuple[Any, Callable[[Any], Iterable[Any]], Callable[..., Any]]] = {
    "int": (int, lambda value: [f"{int(value):x}"], lambda text: int(text, 16)),
    "list": ((list, MappingView), list, lambda *values: list(values)),
    "tuple": (tuple, list, lambda *values: values),
    "set": (set, list, lambda *values: set(values)),
    "frozenset": (frozenset, list, lambda *values: frozenset(values)),
    "dict": (dict, lambda value: itertools.chain.from_iterable(value.items()), _pairs),
    "deque": (deque, list, lambda *values: deque(values)),
    "range": (range, lambda value: (value.start, value.stop, value.step), _range),
    "bytes": ((bytes, bytearray), lambda value: [value.hex()], bytes.fromhex),
    "complex": (complex, lambda value: (value.real, value.imag), complex),
    "Decimal": (Decimal, lambda value: [str(value)], Decimal),
    "Fraction": (Fraction, lambda value: (value.numerator, value.denominator), Fraction),
    "datetime": (dt.datetime, lambda value: [value.isoformat()], dt.datetime.fromisoformat),
    "date": (dt.date, lambda value: [value.isoformat()], dt.date.fromisoformat),
    "time": (dt.time, lambda value: [value.isoformat()], dt.time.fromisoformat),
    "timedelta": (dt.timedelta, lambda value: (value.days, value.seconds, value.microseconds), dt.timedelta),
}
"""By tag: the type, what a value of it consists of, itself plain, and how it is built of that."""


def encode(value: Any, refer: Callable[[Any], list[Any]]) -> Any:
    """Writes ``value`` as JSON, with ``refer`` of an object of another type."""
    if value is None or isinstance(value, bool | float | str) or (type(value) is int and -_SMALL < value < _SMALL):
        return value
    for tag, (kind, parts, _) in _KINDS.items():
        if isinstance(value, kind):
            return [tag, *(encode(part, refer) for part in parts(value))]
    return refer(value)


def decode(tree: Any, resolve: Callable[[str, Any], Any]) -> Any:
    """Returns the value of a JSON tree.

    Args:
        resolve: what a reference of this kind and number stands for.

    Raises:
        Exception: any, where the tree is no value, or beyond the bounds.
    """
    left = MAX_VALUES

    def down(tree: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if left < 0 or depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_VALUES} values, or data nested deeper than {MAX_DEPTH}")
        if tree is None or isinstance(tree, bool | int | float | str):
            return tree
        tag, *parts = tree
        if tag in ("mine", "yours"):
            return resolve(tag, *parts)
        return _KINDS[tag][2](*[down(part, depth + 1) for part in parts])

    return down(tree, 0)


class Refused(BaseException):
    """What a test did with the solution cannot be judged. No ``except Exception`` of a test hides it."""


class Channel:
    """One end, with a table of the own objects to which the other end has references.

    Args:
        operations: what the other end may ask of them.
        wrap: the object that stands for the other end's object of this number.

    Attributes:
        closed: why nothing that is asked from now on can count.
        refused: why nothing that was asked lately can count, whatever a test made of the exception that told it.
    """

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        operations: Mapping[str, Callable[..., Any]],
        wrap: Callable[[Channel, int], Any],
    ) -> None:
        self._in, self._out = os.fdopen(read_fd, "rb"), os.fdopen(write_fd, "wb")
        self._operations, self._wrap = operations, wrap
        self._shared: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._wrapped: dict[int, Any] = {}
        self.closed = self.refused = ""

    def send(self, message: Any) -> None:
        line = json.dumps(message).encode() + b"\n"
        try:
            self._out.write(line)
            self._out.flush()
        except OSError as error:
            self.close(str(error))

    def receive(self) -> Any:
        try:
            line = self._in.readline(MAX_MESSAGE_BYTES)
            if line.endswith(b"\n"):
                return json.loads(line)
        except Exception as error:  # Hostile bytes may make parsing raise anything.
            self.close(f"{type(error).__name__}: {error}")
        self.close("a message that is too long" if line else "the code under test has ended")

    def close(self, reason: str) -> NoReturn:
        """Nothing that follows is in step with its question."""
        self.closed = self.closed or reason
        raise Refused(reason)

    def refuse(self, reason: str) -> NoReturn:
        self.refused = self.refused or reason
        raise Refused(reason)

    def refer(self, value: Any) -> list[Any]:
        if type(value) is SolutionObject:
            return ["yours", _state(value).number]
        if type(value) is TestObject:
            return ["yours", value.number]
        number = self._numbers.setdefault(id(value), len(self._shared))
        if number == len(self._shared):
            self._shared.append(value)  # also keeps it alive, so that its id stays its own
        return ["mine", number]

    def _resolve(self, kind: str, number: int) -> Any:
        if type(number) is not int or number < 0:
            raise ValueError("no reference")
        if kind == "yours":
            return self._shared[number]
        if number not in self._wrapped:
            self._wrapped[number] = self._wrap(self, number)
        return self._wrapped[number]

    def ask(self, operation: str, number: int, *arguments: Any, **keywords: Any) -> Any:
        """Returns the result of the operation in the other process; raises what it raised, as the nearest exception of
        Python's own.

        Raises:
            Refused: the result cannot cross.
        """
        if self.closed:
            self.close(self.closed)
        self.send(["ask", operation, number, encode(arguments, self.refer), encode(keywords, self.refer)])
        while True:
            match self.receive():
                case ["ask", *question]:
                    self._answer(question)
                case ["value", tree]:
                    try:
                        return decode(tree, self._resolve)
                    except Exception as error:  # Hostile data may make decoding raise anything.
                        self.refuse(f"the code gives what is no plain data: {error}"[:300])
                case ["error", [*names], str() as text]:
                    raise _exception(names, text)
                case _:
                    self.close("something that is no answer")

    def serve(self) -> None:
        """Answers until the other process ends."""
        with contextlib.suppress(Refused):
            while True:
                self._answer(self.receive()[1:])

    def _answer(self, question: Any) -> None:
        try:
            name, number, arguments, keywords = question
            target = self._resolve("yours", number)
            positional, named = decode(arguments, self._resolve), decode(keywords, self._resolve)
            value = self._operations[name](target, *positional, **named)
            is_made = name == "make" and type(value) is target  # stays where its methods are, whatever it inherits from
            message = ["value", self.refer(value) if is_made else encode(value, self.refer)]
        except BaseException as error:  # Whatever the code raises is its answer.
            message = ["error", [kind.__name__ for kind in type(error).__mro__], _text(error)]
        self.send(message)


class TestObject:
    """What the tests gave to the code under test: it can be called and handed back."""

    def __init__(self, channel: Channel, number: int) -> None:
        self.channel, self.number = channel, number

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.channel.ask("call", self.number, *arguments, **keywords)


_PLAIN_NAMES = {
    name
    for kind in (str, bytes, bytearray, int, float, complex, list, tuple, dict, set, frozenset, range, memoryview)
    for name in dir(kind)
}


class _State:
    def __init__(self, channel: Channel, number: int) -> None:
        self.channel, self.number = channel, number
        self.is_class = self.is_own = False


_STATE = "_SolutionObject__state"  # no name that an attribute of the solution's may have


def _state(value: SolutionObject) -> _State:
    state: _State = object.__getattribute__(value, _STATE)
    return state


class SolutionObject:
    """An object of the code under test, as a test holds it.

    A test that names a class with a capital letter, as Python does, and calls it, knows that it has an object of the
    solution's own: its methods and items are what is tested. Any other object stands where a test may expect plain
    data, and so has no attribute that plain data have, and no item: a test would ask it, and tell it what is expected,
    instead of judging for itself (``f(x).startswith("a")``).
    """

    __slots__ = ("__state",)
    __hash__ = object.__hash__

    def __init__(self, channel: Channel, number: int) -> None:
        object.__setattr__(self, _STATE, _State(channel, number))

    def __ask(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        return _state(self).channel.ask(operation, _state(self).number, *arguments, **keywords)

    def __ask_own(self, what: str, operation: str, *arguments: Any) -> Any:
        if not _state(self).is_own:
            self.__refuse(f"asks for its {what}")
        return self.__ask(operation, *arguments)

    def __refuse(self, what: str) -> NoReturn:
        _state(self).channel.refuse(f"the code gives an object that is no plain data, and the test {what}")

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if not _state(self).is_class:
            return self.__ask("call", *arguments, **keywords)
        made = self.__ask("make", *arguments, **keywords)
        if type(made) is SolutionObject:
            _state(made).is_own = True
        return made

    def __getattr__(self, name: str) -> Any:
        if name == "__name__":
            return "an object of the code"  # how unittest's assertRaises calls it
        if name.startswith("__"):
            raise AttributeError(name)
        ask = self.__ask_own if name in _PLAIN_NAMES else lambda _, *asked: self.__ask(*asked)
        return named(ask(f"{name}, which plain data have", "getattr", name), name, _state(self).is_own)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__ask_own(name, "setattr", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self.__ask_own("items", "getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__ask_own("items", "setitem", key, value)

    def __bool__(self) -> bool:
        return bool(self.__ask_own("truth", "bool"))

    def __len__(self) -> int:
        return int(self.__ask_own("length", "len"))

    def __str__(self) -> str:
        return str(self.__ask_own("text", "str"))

    def __repr__(self) -> str:
        return str(self.__ask_own("text", "repr"))

    def __iter__(self) -> Iterator[Any]:
        # Also what ``in`` asks: the items come over and are compared here.
        return iter(list(self.__ask_own("items", "items")))

    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        self.__refuse("compares it (compare its attributes)")

    def __instancecheck__(self, value: object) -> bool:
        return type(value) is SolutionObject and bool(self.__ask("isinstance", value))


def named(value: Any, name: str, is_own: bool = False) -> Any:
    """Returns ``value``, which the tests reached by ``name``: of something that is the solution's own, where
    ``is_own``.
    """
    if type(value) is SolutionObject:
        is_class = name.lstrip("_")[:1].isupper()
        _state(value).is_class |= is_class
        _state(value).is_own |= is_own or is_class
    return value


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": operator.call,
    "make": operator.call,
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "bool": bool,
    "len": len,
    "str": str,
    "repr": repr,
    "items": list,
    "isinstance": lambda kind, value: isinstance(value, kind),
}
"""What tests may ask of an object of the code under test, by the methods of :class:`SolutionObject`."""
CALLS: dict[str, Callable[..., Any]] = {"call": operator.call}
"""What the code under test may ask of an object of the tests."""


def _exception(names: Sequence[Any], text: str) -> Exception:
    for name in names:
        kind = vars(builtins).get(name) if isinstance(name, str) else None
        # An end of iteration would end a loop of the test's (``all(map(f, xs))``) instead of failing it.
        if (
            isinstance(kind, type)
            and issubclass(kind, Exception)
            and name not in ("StopIteration", "StopAsyncIteration")
        ):
            with contextlib.suppress(TypeError):  # It is not made of a text alone, as UnicodeDecodeError.
                return kind(text)
    return Exception(f"{names[:1]}: {text}")


def _text(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except BaseException:  # The exception's own code fails.
        return ""
