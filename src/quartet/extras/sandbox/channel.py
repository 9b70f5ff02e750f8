"""Calls between two processes: tests in one sandbox use the code under test in the other.

What crosses is plain data (:mod:`quartet.extras.sandbox.data`), or a reference to an object that stays where it is.
The side of the tests holds such an object as a :class:`SolutionObject`, which can be called and asked for attributes,
and little else: whatever a test compares, searches or counts is plain data of its own process. The code under test
holds what is not plain of the tests (a function to apply, say) as a :class:`TestObject`, which can be called.

A message is four bytes of length and JSON: ``["ask", operation, number, arguments, keywords]``, answered by ``["value",
value]``, ``["error", type's name, text]`` or ``["unsuitable", reason]``. Before it answers, a process may ask in turn.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import json
import operator
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from quartet.extras.sandbox.data import MAX_NODES, Unsuitable, decode, encode

MAX_MESSAGE_BYTES = 32 << 20


class ChannelClosed(BaseException):
    """The other process is gone, or sends what is no message. No ``except Exception`` of a test hides it."""


class Refused(BaseException):
    """What a test did with the solution cannot be judged. No ``except Exception`` of a test hides it."""


class SandboxRemoteError(Exception):
    """The other process raised something that is no exception of Python's own."""


class Channel:
    """One end, with a table of the own objects to which the other end has references.

    Args:
        operations: what the other end may ask of them.
        wrap: the object that stands for the other end's object of this number.
    """

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        operations: dict[str, Callable[..., Any]],
        wrap: Callable[[Channel, int], Any],
    ) -> None:
        self._read_fd, self._write_fd, self._operations, self._wrap = read_fd, write_fd, operations, wrap
        self._shared: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._wrapped: dict[int, Any] = {}
        self.num_asked = 0
        self.failure = ""
        """Why nothing that was asked lately can count, whatever a test made of the exception that told it."""

    # Messages --------------------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        body = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")
        view = memoryview(struct.pack(">I", len(body)) + body)
        while view:
            try:
                view = view[os.write(self._write_fd, view) :]
            except OSError as error:
                self.close(str(error))

    def receive(self) -> Any:
        (size,) = struct.unpack(">I", self._read(4))
        if size > MAX_MESSAGE_BYTES:
            self.close(f"a message of {size} bytes")
        body = self._read(size)
        try:
            return json.loads(body)
        except Exception as error:  # Hostile bytes may make parsing raise anything.
            self.close(f"{type(error).__name__}: {error}")

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            try:
                part = os.read(self._read_fd, min(size - len(found), 1 << 20))
            except OSError as error:
                self.close(str(error))
            if not part:
                self.close("the code under test has ended")
            found += part
        return bytes(found)

    def close(self, reason: str) -> NoReturn:
        # Nothing that follows is in step with its question.
        self._read_fd = self._write_fd = -1
        self.failure = self.failure or reason
        raise ChannelClosed(reason)

    # Values ----------------------------------------------------------------------------------------------

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
            raise Unsuitable("no reference")
        if kind == "yours":
            return self._shared[number]
        if number not in self._wrapped:
            self._wrapped[number] = self._wrap(self, number)
        return self._wrapped[number]

    def _decoded(self, tree: Any) -> Any:
        try:
            return decode(tree, self._resolve)
        except Exception as error:  # Hostile data may make decoding raise anything.
            self.close(f"{type(error).__name__}: {error}")

    # Calls -----------------------------------------------------------------------------------------------

    def ask(self, operation: str, number: int, *arguments: Any, **keywords: Any) -> Any:
        """The result of the operation in the other process; raises what it raised, if that is one of Python's own.

        Raises:
            Refused: arguments or result cannot cross.
        """
        self.num_asked += 1
        try:
            message = ["ask", operation, number, encode(arguments, self.refer), encode(keywords, self.refer)]
        except Unsuitable as error:
            self.refuse(f"the test gives the code {error}")
        try:
            answer = self._answer_to(message)
        except (MemoryError, RecursionError) as error:  # In the middle of a message, maybe.
            self.close(f"{type(error).__name__} in a call between tests and code")
        match answer:
            case ["value", value]:
                return value
            case ["error", str() as name, str() as text]:
                raise _exception(name, text)
            case ["unsuitable", str() as reason]:
                self.refuse(f"the code gives {reason}"[:300])
        self.close("something that is no answer")

    def _answer_to(self, message: list[Any]) -> Any:
        self.send(message)
        while True:
            match self.receive():
                case ["ask", *question]:
                    self._answer(question)
                case ["value", tree]:
                    return ["value", self._decoded(tree)]
                case answer:
                    return answer

    @property
    def is_closed(self) -> bool:
        return self._read_fd < 0

    def refuse(self, reason: str) -> NoReturn:
        self.failure = self.failure or reason
        raise Refused(reason)

    def serve(self) -> None:
        """Answers until the other process ends."""
        while True:
            try:
                _, *question = self.receive()
                self._answer(question)
            except ChannelClosed:
                return

    def _answer(self, question: list[Any]) -> None:
        match question:
            case [str() as name, int() as number, ["tuple", *arguments], keywords] if name in self._operations:
                target, *positional = self._decoded(["list", ["yours", number], *arguments])
                named = self._decoded(keywords)
            case _:
                self.close("something that is no question")
        try:
            value = self._operations[name](target, *positional, **named)
            is_made = name == "make" and type(value) is target
            message = ["value", encode(value, self.refer, keep=is_made)]
        except (Unsuitable, Refused) as error:
            message = ["unsuitable", str(error)]
        except ChannelClosed:
            raise
        except BaseException as error:  # Whatever the code raises is its answer.
            message = ["error", _base_name(error), _text(error)]
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

    def __refuse(self, what: str) -> NoReturn:
        _state(self).channel.refuse(f"the code gives an object that is no plain data, and the test {what}")

    def __ask_own(self, what: str, operation: str, *arguments: Any) -> Any:
        if not _state(self).is_own:
            self.__refuse(what)
        return self.__ask(operation, *arguments)

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
        is_own = _state(self).is_own
        if name in _PLAIN_NAMES and not is_own:
            self.__refuse(f"asks for .{name}, which plain data have")
        return named(self.__ask("getattr", name), name, is_own)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__ask_own(f"sets .{name}", "setattr", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self.__ask_own("asks for an item", "getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__ask_own("sets an item", "setitem", key, value)

    def __len__(self) -> int:
        return int(self.__ask_own("asks for its length", "len"))

    def __str__(self) -> str:
        return str(self.__ask_own("asks for its text", "str"))

    def __repr__(self) -> str:
        return str(self.__ask_own("asks for its text", "repr"))

    def __iter__(self) -> Iterator[Any]:
        # Also what ``in`` asks: the items come over and are compared here.
        return iter(list(self.__ask_own("asks for its items", "items")))

    def __instancecheck__(self, value: object) -> bool:
        return type(value) is SolutionObject and bool(self.__ask("isinstance", value))

    def __bool__(self) -> bool:
        self.__refuse("asks whether it is true")

    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        self.__refuse("compares it (compare its attributes)")

    def __lt__(self, other: object) -> bool:
        self.__refuse("compares it")

    def __add__(self, *_: object) -> Any:
        self.__refuse("computes with it")

    __le__ = __gt__ = __ge__ = __lt__
    __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = __and__ = __or__ = __xor__ = __add__
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = __rand__ = __ror__ = __add__
    __lshift__ = __rshift__ = __matmul__ = __divmod__ = __rlshift__ = __rrshift__ = __rmatmul__ = __rdivmod__ = __add__
    __neg__ = __pos__ = __invert__ = __abs__ = __round__ = __int__ = __float__ = __complex__ = __index__ = __add__


def named(value: Any, name: str, is_own: bool = False) -> Any:
    """``value``, which the tests reached by ``name``: of something that is the solution's own, where ``is_own``."""
    if type(value) is SolutionObject:
        is_class = name.lstrip("_")[:1].isupper()
        _state(value).is_class |= is_class
        _state(value).is_own |= is_own or is_class
    return value


def _items(value: Any) -> list[Any]:
    found = list(itertools.islice(value, MAX_NODES + 1))
    if len(found) > MAX_NODES:
        raise Unsuitable(f"more than {MAX_NODES} items")
    return found


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": operator.call,
    "make": operator.call,
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "len": len,
    "str": str,
    "repr": repr,
    "items": _items,
    "isinstance": lambda kind, value: isinstance(value, kind),
}
"""What tests may ask of an object of the code under test, by the methods of :class:`SolutionObject`."""
CALLS: dict[str, Callable[..., Any]] = {"call": operator.call}
"""What the code under test may ask of an object of the tests."""


def _base_name(error: BaseException) -> str:
    """The nearest class of Python's own that it is of."""
    bases: tuple[type, ...] = type.__dict__["__mro__"].__get__(type(error))
    return next(base.__name__ for base in bases if vars(builtins).get(base.__name__) is base)


def _exception(name: str, text: str) -> Exception:
    kind = vars(builtins).get(name)
    # An end of iteration would end a loop of the test's (``all(map(f, xs))``) instead of failing it.
    own = (StopIteration, StopAsyncIteration)
    for base in kind.__mro__ if isinstance(kind, type) and not issubclass(kind, own) else ():
        if issubclass(base, Exception):
            with contextlib.suppress(TypeError):  # It is not made of a text alone, as UnicodeDecodeError.
                return base(text)
    return SandboxRemoteError(f"{name}: {text}")


def _text(error: BaseException) -> str:
    try:
        return str.__str__(str(error))[:1000]
    except BaseException:  # The exception's own code fails.
        return ""
