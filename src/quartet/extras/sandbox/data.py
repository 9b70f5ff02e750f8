"""What may cross between tests and the code under test: plain data of bounded size, and numbered references.

``encode`` looks at a value by its exact type and reads it with the methods of that type, never with its own: what a
class says of itself (``__class__``, ``__eq__``, ``__iter__``) has no say. An instance of a class that inherits from a
plain type becomes the plain value. ``decode`` trusts nothing: it builds plain values only, within the same bounds.

The form is JSON: numbers, text and the three constants stand for themselves, all else is ``[tag, …]``.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

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
    """JSON of ``value``.

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
    """The value of a JSON tree.

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
