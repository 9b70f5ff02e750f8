"""Calls between two processes: tests in one sandbox use the code under test in the other.

What crosses is plain data of bounded size, or a numbered reference to an object that stays where it is.
The side of the tests holds such an object as a :class:`SolutionObject`, which can be called and asked for attributes,
and little else: whatever a test compares, searches or counts is plain data of its own process. The code under test
holds what is not plain of the tests (a function to apply, say) as a :class:`TestObject`, which can be called.

A message is four bytes of length and JSON: ``["ask", operation, number, arguments, keywords]``, answered by ``["value",
value]``, ``["error", type's name, text]`` or ``["unsuitable", reason]``. Before it answers, a process may ask in turn.

``encode`` looks at a value by its exact type and reads it with the methods of that type, never with its own: what a
class says of itself (``__class__``, ``__eq__``, ``__iter__``) has no say. An instance of a class that inherits from a
plain type becomes the plain value. ``decode`` trusts nothing: it builds plain values only, within the same bounds.

The form is JSON: numbers, text and the three constants stand for themselves, all else is ``[tag, …]``.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime as dt
import itertools
import json
import operator
import os
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

MAX_DEPTH = 100
MAX_NODES = 1 << 18
"""Most values in one message, keys and items of containers included; also the longest ``range``."""
MAX_TEXT = 1 << 22
"""Most characters and bytes of all text in one message."""
MAX_INT_BITS = 1 << 17
_SMALL = 1 << 53
_MAX_DECIMAL = 20_000  # characters

_NAMED: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(bool, int, float, complex, str, bytes, bytearray),
        *(list, tuple, dict, set, frozenset, range, object, type),
    )
}
"""Types that cross by name, so that ``f(x, int)`` and ``type_of(3) is int`` mean Python's own."""
_EMPTY: dict[Any, Any] = {}
_KEYS, _VALUES, _ITEMS = type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items())
# As they are before any code under test runs: a metaclass may have attributes of these names.
_mro = type.__dict__["__mro__"].__get__
_variables = type.__dict__["__dict__"].__get__
_name = type.__dict__["__name__"].__get__


class Unsuitable(Exception):
    """A value that does not cross, and why."""


class _Bounds:
    """Counts down what one message may hold."""

    def __init__(self) -> None:
        self.nodes, self.text, self.depth = MAX_NODES, MAX_TEXT, 0

    def spend(self, text: int = 0) -> None:
        self.nodes -= 1
        self.text -= text
        if self.depth > MAX_DEPTH:
            raise Unsuitable(f"data nested deeper than {MAX_DEPTH}")
        if self.nodes < 0:
            raise Unsuitable(f"more than {MAX_NODES} values")
        if self.text < 0:
            raise Unsuitable(f"more than {MAX_TEXT} characters")


# Out -------------------------------------------------------------------------------------------------------


def encode(value: Any, refer: Callable[[Any], list[Any]], keep: bool = False) -> Any:
    """Writes ``value`` as JSON.

    Args:
        refer: the reference that stands for an object of another type.
        keep: an instance of a class that inherits from a plain type is referred to, too, if it is ``value`` itself.

    Raises:
        Unsuitable: it is lazy or too large.
    """
    bounds = _Bounds()

    def down(value: Any) -> Any:
        kind = type(value)
        base = next((base for base in _mro(kind) if id(base) in _PLAIN), None)
        if keep and bounds.depth == 0 and base is not kind:
            return refer(value)
        bounds.spend(str.__len__(value) if base is str else 0)
        if base is None:
            return _other(value, kind, refer)
        if base in _SCALARS:
            return _SCALARS[base](value)
        found: list[Any] = [base.__name__]
        bounds.depth += 1
        for part in _PARTS[base](value):
            found.append(down(part))
        bounds.depth -= 1
        return found

    return down(value)


_flat: Callable[[Iterable[tuple[Any, Any]]], Iterable[Any]] = itertools.chain.from_iterable


def _int(value: int) -> Any:
    value = int.__pos__(value)
    if (bits := value.bit_length()) > MAX_INT_BITS:
        raise Unsuitable(f"an integer of {bits} bits, more than {MAX_INT_BITS}")
    return value if -_SMALL < value < _SMALL else ["int", f"{value:x}"]


def _other(value: Any, kind: type, refer: Callable[[Any], list[Any]]) -> Any:
    for name, own in _NAMED.items():
        if value is own:
            return ["type", name]
    if any("__next__" in _variables(base) for base in _mro(kind)):
        raise Unsuitable(f"a {_name(kind)}, which is lazy; plain data such as a list is judged")
    return refer(value)


def _range(value: range) -> tuple[int, int, int]:
    if (value.stop - value.start) // value.step >= MAX_NODES:
        raise Unsuitable(f"a range of more than {MAX_NODES} numbers")
    return value.start, value.stop, value.step


def _zoned(kind: Any) -> Callable[[Any], tuple[str]]:
    def parts(value: Any) -> tuple[str]:
        zone = kind.tzinfo.__get__(value)
        if zone is not None and type(zone) is not dt.timezone:
            raise Unsuitable(f"a {kind.__name__} whose time zone is of another class than datetime.timezone")
        return (kind.isoformat(value),)

    return parts


def _decimal(value: Decimal) -> tuple[str]:
    if len(text := Decimal.__str__(value)) > _MAX_DECIMAL:
        raise Unsuitable(f"a Decimal of {len(text)} digits")
    return (text,)


def _defaultdict(value: Any) -> Iterable[Any]:
    factory = defaultdict.__dict__["default_factory"].__get__(value)
    known = any(factory is kind for kind in _NAMED.values())
    return itertools.chain([factory if known else None], _flat(dict.items(value)))


_SCALARS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _int,
    float: float.__pos__,
    str: str.__str__,
}
_UNITS = ("days", "seconds", "microseconds")
_NUMERATOR, _DENOMINATOR = (Fraction.__dict__[name].__get__ for name in ("_numerator", "_denominator"))

_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    list: list.__iter__,
    tuple: tuple.__iter__,
    set: set.__iter__,
    frozenset: frozenset.__iter__,
    bytes: lambda value: (bytes.hex(value),),
    bytearray: lambda value: (bytearray.hex(value),),
    complex: lambda value: (complex.real.__get__(value), complex.imag.__get__(value)),
    range: _range,
    deque: lambda value: itertools.chain([deque.maxlen.__get__(value)], deque.__iter__(value)),
    Counter: lambda value: _flat(dict.items(value)),
    OrderedDict: lambda value: _flat(OrderedDict.items(value)),
    defaultdict: _defaultdict,
    dict: lambda value: _flat(dict.items(value)),
    _KEYS: _KEYS.__iter__,
    _VALUES: _VALUES.__iter__,
    _ITEMS: _ITEMS.__iter__,
    Decimal: _decimal,
    Fraction: lambda value: (_NUMERATOR(value), _DENOMINATOR(value)),
    dt.datetime: _zoned(dt.datetime),
    dt.date: lambda value: (dt.date.isoformat(value),),
    dt.time: _zoned(dt.time),
    dt.timedelta: lambda value: tuple(vars(dt.timedelta)[name].__get__(value) for name in _UNITS),
}
"""What a value consists of, itself plain."""
_PLAIN = {id(kind) for kind in (*_SCALARS, *_PARTS)}  # a metaclass may say that its classes equal these


# In --------------------------------------------------------------------------------------------------------


def decode(tree: Any, resolve: Callable[[str, Any], Any]) -> Any:
    """Returns the value of a JSON tree.

    Args:
        resolve: what a reference of this kind and number stands for.

    Raises:
        Unsuitable: it is beyond the bounds.
        Exception: any other, where the tree is no value.
    """
    bounds = _Bounds()

    def down(tree: Any) -> Any:
        bounds.spend(len(tree) if type(tree) is str else 0)
        if type(tree) is int:
            return _checked(tree)
        if type(tree) in _SCALARS:
            return tree
        if type(tree) is not list:
            raise Unsuitable("no value")
        tag, *parts = tree
        if tag in ("mine", "yours"):
            return resolve(tag, parts[0])
        if tag == "type":
            return _NAMED[parts[0]]
        bounds.depth += 1
        values = [down(part) for part in parts]
        bounds.depth -= 1
        return _BUILD[tag](values)

    return down(tree)


def _checked(value: int) -> int:
    if value.bit_length() > MAX_INT_BITS:
        raise Unsuitable("a large integer")
    return value


def _pairs(values: list[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(values[::2], values[1::2], strict=True)


def _built_range(values: list[Any]) -> range:
    found = range(*values)
    _range(found)
    return found


def _built_decimal(values: list[Any]) -> Decimal:
    (text,) = values
    if type(text) is not str or len(text) > _MAX_DECIMAL:
        raise Unsuitable("a long Decimal")
    return Decimal(text)


def _hexadecimal(values: list[Any]) -> int:
    if len(values[0]) > MAX_INT_BITS // 4 + 2:
        raise Unsuitable("a large integer")
    return _checked(int(values[0], 16))


_BUILD: dict[str, Callable[[list[Any]], Any]] = {
    "int": _hexadecimal,
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "bytes": lambda values: bytes.fromhex(*values),
    "bytearray": lambda values: bytearray.fromhex(*values),
    "complex": lambda values: complex(*values),
    "range": _built_range,
    "deque": lambda values: deque(values[1:], values[0]),
    "Counter": lambda values: Counter(dict(_pairs(values))),
    "OrderedDict": lambda values: OrderedDict(_pairs(values)),
    "defaultdict": lambda values: defaultdict(values[0], _pairs(values[1:])),
    "dict": lambda values: dict(_pairs(values)),
    "dict_keys": lambda values: dict.fromkeys(values).keys(),
    "dict_values": lambda values: dict(enumerate(values)).values(),
    "dict_items": lambda values: dict(values).items(),
    "Decimal": _built_decimal,
    "Fraction": lambda values: Fraction(*values),
    "datetime": lambda values: dt.datetime.fromisoformat(*values),
    "date": lambda values: dt.date.fromisoformat(*values),
    "time": lambda values: dt.time.fromisoformat(*values),
    "timedelta": lambda values: dt.timedelta(*values),
}


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
        """Returns the result of the operation in the other process; raises what it raised, if that is one of Python's
        own.

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
    """Returns ``value``, which the tests reached by ``name``: of something that is the solution's own, where
    ``is_own``.
    """
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
    """Returns the nearest class of Python's own that it is of."""
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
