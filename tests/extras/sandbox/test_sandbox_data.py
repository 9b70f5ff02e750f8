"""Plain data between tests and code: it crosses unchanged, what poses as data does not, and nothing else is built."""

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
from quartet.extras.sandbox.channel import decode, encode


def over(value: Any) -> Any:
    """``value`` as the other side has it; a reference stands for anything that is no data."""
    tree = encode(value, lambda other: ["mine", 7])
    return decode(json.loads(json.dumps(tree)), lambda kind, number: (kind, number))


def drawn(draw: random.Random, depth: int = 0) -> Any:
    """A random value of any kind that may cross."""
    plain: list[Any] = [None, True, draw.randrange(-9, 9), draw.getrandbits(200) - 2**199, draw.gauss(0, 1e9), -0.0]
    plain += ["ü\ud800\x00" * draw.randrange(3), b"\x00\xff", 1j, range(draw.randrange(9)), float("inf")]
    plain += [Decimal("-1.50E+3"), Fraction(draw.randrange(9), 7), dt.date(2020, 2, 29), dt.timedelta(-1, 2, 3)]
    zone = dt.timezone(dt.timedelta(hours=-3))
    plain += [dt.datetime(1, 2, 3, 4, 5, 6, 7), dt.datetime(2020, 1, 1, tzinfo=zone), dt.time(1, 2, 3), 2**20_000]
    if depth == 4 or draw.random() < 0.3:
        return draw.choice(plain)
    values = [drawn(draw, depth + 1) for _ in range(draw.randrange(4))]
    keys = [draw.choice(["a", 3, 2.5, None, (1, "b")]) for _ in values]
    kinds: list[Any] = [values, tuple(values), dict(zip(keys, values, strict=True)), set(keys), frozenset(keys)]
    return draw.choice([*kinds, collections.deque(values)])


def test_data_cross_unchanged() -> None:
    draw = random.Random(5)
    for _ in range(500):
        value = drawn(draw)
        there = over(value)
        assert type(there) is type(value) and there == value


class Items(list[Any]):
    __eq__ = lambda self, other: True  # noqa: E731
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("value", "there"),
    [
        (Items([1, Items()]), [1, []]),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        ({1: 2}.keys(), [1]),
        ({1: 2}.values(), [2]),
        (bytearray(b"x"), b"x"),
        *((value, ("mine", 7)) for value in (print, object(), int, iter([1]), (x for x in [1]), map(int, []))),
    ],
    ids=itertools.count(),
)
def test_other_classes_become_plain_or_stay(value: Any, there: Any) -> None:
    found = over(value)
    assert type(found) is type(there) and found == there


def nested(depth: int) -> Any:
    tree: Any = 0
    for _ in range(depth):
        tree = ["list", tree]
    return tree


@pytest.mark.parametrize(
    "tree",
    [
        [], {}, ["eval", "1"], ["type", "eval"], [["list"], 1], ["int", "z"], ["int", 3], ["list", ["nothing"]],
        ["dict", 1], ["dict", ["list"], 1], ["set", ["list"]], ["range", -(10**17), 10**17, 1], ["range", 1, 2, 0],
        ["range", "a"], ["bytes", "xx"], ["Fraction", 1, 0], ["datetime", "now"], ["date", 1], ["timedelta", 10**12],
        ["complex", "1", "2"], nested(102), ["list", *[0] * channel.MAX_VALUES], ["yours"], ["mine"],
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_what_was_made_up_builds_nothing(tree: Any) -> None:
    with pytest.raises(Exception) as caught:  # whatever it is, the test is refused
        decode(tree, lambda kind, number: (kind, number))
    assert isinstance(caught.value, (ValueError, TypeError, LookupError, ArithmeticError))
