"""Plain data between tests and code: it crosses unchanged, lies do not, and what was made up is refused."""

from __future__ import annotations

import collections
import datetime as dt
import itertools
import json
import random
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from quartet.extras.sandbox import channel
from quartet.extras.sandbox.channel import Unsuitable, decode, encode


def over(value: Any, keep: bool = False) -> Any:
    """``value`` as the other side has it; a reference stands for anything that is no data."""
    tree = encode(value, lambda other: ["mine", 7], keep=keep)
    return decode(json.loads(json.dumps(tree)), lambda kind, number: (kind, number))


def drawn(draw: random.Random, depth: int = 0) -> Any:
    """A random value of any kind that may cross."""
    plain: list[Any] = [None, True, draw.randrange(-9, 9), draw.getrandbits(200) - 2**199, draw.gauss(0, 1e9), -0.0]
    plain += [
        "ü\ud800\x00" * draw.randrange(3),
        b"\x00\xff",
        bytearray(b"x"),
        1j,
        range(draw.randrange(9)),
        float("inf"),
    ]
    plain += [Decimal("-1.50E+3"), Fraction(draw.randrange(9), 7), dt.date(2020, 2, 29), dt.timedelta(-1, 2, 3), int]
    zone = dt.timezone(dt.timedelta(hours=-3))
    plain += [dt.datetime(1, 2, 3, 4, 5, 6, 7), dt.datetime(2020, 1, 1, tzinfo=zone), dt.time(1, 2, 3), float("inf")]
    if depth == 4 or draw.random() < 0.3:
        return draw.choice(plain)
    values = [drawn(draw, depth + 1) for _ in range(draw.randrange(4))]
    keys = [draw.choice(["a", 3, 2.5, None, (1, "b")]) for _ in values]
    pairs = dict(zip(keys, values, strict=True))
    kinds: list[Any] = [values, tuple(values), pairs, set(keys), frozenset(keys), collections.deque(values, 5)]
    kinds += [collections.OrderedDict(pairs), collections.defaultdict(list, pairs), collections.Counter(keys)]
    return draw.choice(kinds)


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and repr(a) == repr(b)


def test_data_cross_unchanged() -> None:
    draw = random.Random(5)
    for _ in range(500):
        value = drawn(draw)
        there = over(value)
        assert same(there, value) or (type(there) is type(value) and there == value), value


class Number(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__
    __pos__ = __index__ = __int__ = lambda self: 9


class Text(str):
    __str__ = __len__ = lambda self: 0


class Items(list[Any]):
    def __iter__(self) -> Any:
        return iter([9])

    __len__ = lambda self: 9  # noqa: E731


class Pairs(dict[Any, Any]):
    items = keys = __iter__ = lambda self: [(9, 9)]


class Meta(type):
    def __eq__(cls, other: object) -> bool:
        return True

    def __hash__(cls) -> int:
        return hash(list)

    __mro__ = property(lambda cls: (list, object))
    __name__ = "list"


class Posing(metaclass=Meta):
    __class__ = list

    def __iter__(self) -> Any:
        return iter([9])


@pytest.mark.parametrize(
    ("value", "there"),
    [(Number(3), 3), (Text("abc"), "abc"), (Items([1, Number(2)]), [1, 2]), (Pairs(a=Number(1)), {"a": 1})],
)
def test_a_class_of_its_own_is_read_by_its_base(value: Any, there: Any) -> None:
    found = over(value)
    assert same(found, there)
    for part in found if isinstance(found, list) else found.values() if isinstance(found, dict) else ():
        assert type(part) is int
    assert over(value, keep=True) == ("mine", 7), "made by the test, it stays where its methods are"
    assert same(over([value], keep=True), [there])


def test_what_poses_as_data_is_an_object() -> None:
    assert over(Posing()) == over([Posing()])[0] == ("mine", 7)
    assert over(Posing) == over(print) == over(object()) == ("mine", 7)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (iter([1]), "lazy"),
        ((x for x in [1]), "generator"),
        ([{"a": map(int, [])}], "lazy"),
        (range(10**30), "range"),
        (range(-(10**30), 10**30, 10**20), "range"),
        ([0] * channel.MAX_NODES, "values"),
        ("x" * (channel.MAX_TEXT + 1), "characters"),
        (["x" * 1000] * 5000, "characters"),
        (1 << channel.MAX_INT_BITS, "bits"),
        (Decimal("1" * 30_000), "digits"),
    ],
    ids=itertools.count(),
)
def test_what_is_lazy_or_large_does_not_cross(value: Any, reason: str) -> None:
    with pytest.raises(Unsuitable, match=reason):
        over(value)


def test_what_contains_itself_does_not_cross() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(Unsuitable, match="nested"):
        over(value)


def nested(depth: int) -> Any:
    tree: Any = 0
    for _ in range(depth):
        tree = ["list", tree]
    return tree


@pytest.mark.parametrize(
    "tree",
    [
        [], {}, {"list": 1}, ["eval", "1"], ["type", "eval"], ["type", ["list"]], [["list"], 1], ["int", "f" * 10**6],
        ["int", "z"], ["int", 3], ["list", ["nothing"]], ["dict", 1], ["dict", ["list"], 1],
        ["set", ["list"]], ["range", -(10**17), 10**17, 1], ["range", 1, 2, 0], ["range", "a"], ["bytes", "xx"],
        ["Decimal", "1" * 10**5], ["Decimal", 1, 2], ["Fraction", 1, 0], ["datetime", "now"], ["date", 1],
        ["timedelta", 10**12], ["deque", -1], ["deque", 0.5, 1], ["defaultdict", 3], ["complex", "1", "2"], nested(101),
        ["list", *[0] * channel.MAX_NODES], ["list", "x" * (channel.MAX_TEXT + 1)], ["yours"], ["mine"],
        ["dict_items", 1], ["dict_keys", ["list"]],
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_what_was_made_up_builds_nothing(tree: Any) -> None:
    with pytest.raises(Exception) as caught:  # whatever it is, the channel is closed by it
        decode(tree, lambda kind, number: (kind, number))
    assert isinstance(caught.value, (Unsuitable, ValueError, TypeError, LookupError, ArithmeticError))
