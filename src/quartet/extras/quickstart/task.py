"""The quickstart's task: addition in columns with written carries, shown by demonstrators often wrong.

A prompt is ``47+85=``. The completion works from the ones upwards, one column per step, and ends with the
answer::

    7+5=12;4+8+1=13;132        4+8+1: the digits of the column, then the carry it received (0 or 1)

Demonstrators have one of three *habits* for a whole completion (``HABITS``): most forget every carry, some
carry where there is nothing to carry, the rest work rightly::

    forgetful   7+5=12;4+8+0=12;122
    eager       7+2=9;4+8+1=13;139
    careful     7+5=12;4+8+1=13;132

So on every input with a carry most demonstrations agree on one wrong answer. A model of them is wrong there
when it decodes greedily, and at any temperature more often than not: its faults are what it learned. The
right way of working is in the data too, which is what feedback can bring out.

Everything here is a function of its arguments; no global random state is read or changed. An input's split
depends on its operands alone, so no seed can carry a held-out input into training.
"""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache
from typing import Literal

TaskSplit = Literal["train", "held_out"]
Habit = Literal["careful", "forgetful", "eager"]

HABITS: dict[Habit, float] = {"careful": 0.14, "forgetful": 0.74, "eager": 0.12}
"""How frequent each habit is among demonstrators."""

HELD_OUT_ONE_IN = 10
"""One input in this many is held out."""

SECOND_OPERAND_DIGITS = (1, 2, 2)
"""Numbers of digits of the second operand, each entry equally likely; the first operand has two."""

COLUMN_END = ";"


def prompt_of(first: int, second: int) -> str:
    """Turns ``47, 85`` into ``"47+85="``."""
    return f"{first}+{second}="


def operands(prompt: str) -> tuple[int, int]:
    """Turns ``"47+85="`` into ``(47, 85)``.

    Raises:
        ValueError: ``prompt`` is not of that form.
    """
    first, plus, rest = prompt.partition("+")
    if not plus or not rest.endswith("="):
        raise ValueError(f"expected a prompt like '47+85=', found {prompt!r}")
    return int(first), int(rest[:-1])


def work(first: int, second: int, habit: Habit = "careful") -> str:
    """Writes the completion of a demonstrator with ``habit`` for ``first + second``, without end-of-text."""
    num_columns = max(len(str(first)), len(str(second)))
    steps: list[str] = []
    written = ""
    carry = 0
    for column in range(num_columns):
        upper, lower = first // 10**column % 10, second // 10**column % 10
        total = upper + lower + carry
        received = f"+{carry}" if column else ""
        steps.append(f"{upper}+{lower}{received}={total}")
        is_last = column == num_columns - 1
        written = (str(total) if is_last else str(total % 10)) + written
        carry = {"careful": total // 10, "forgetful": 0, "eager": 1}[habit]
    return COLUMN_END.join([*steps, written])


def split_of(first: int, second: int) -> TaskSplit:
    """Returns the split an input belongs to, whatever the seed; ``a + b`` and ``b + a`` belong together."""
    low, high = sorted((first, second))
    digest = hashlib.sha256(f"{low}+{high}".encode()).digest()
    return "held_out" if int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0 else "train"


@lru_cache
def num_inputs(split: TaskSplit) -> int:
    """Counts the distinct inputs of a split."""
    upper = range(1, 10)
    firsts = [10 * tens + ones for tens in upper for ones in upper]
    return sum(split_of(first, second) == split for first in firsts for second in [*upper, *firsts])


def toy_demonstrations(seed: int, n: int) -> list[dict[str, str]]:
    """Makes ``n`` rows for supervised training (``prompt``, ``completion``, to which the trainer appends end-of-text),
    of the training split; an input may come up more than once.
    """
    rng = random.Random(f"demonstrations {seed}")
    rows = []
    for _ in range(n):
        first, second = _draw(rng, "train")
        habit = rng.choices(list(HABITS), weights=list(HABITS.values()))[0]
        rows.append({"prompt": prompt_of(first, second), "completion": work(first, second, habit)})
    return rows


def toy_prompts(seed: int, n: int, split: TaskSplit = "train") -> list[str]:
    """Draws ``n`` distinct prompts of ``split``.

    Raises:
        ValueError: the split has fewer than ``n`` inputs.
    """
    if n > num_inputs(split):
        raise ValueError(f"{n} distinct prompts asked for, the {split} split has {num_inputs(split)}")
    rng = random.Random(f"prompts {split} {seed}")
    drawn: dict[str, None] = {}
    while len(drawn) < n:
        drawn[prompt_of(*_draw(rng, split))] = None
    return list(drawn)


def _draw(rng: random.Random, split: TaskSplit) -> tuple[int, int]:
    while True:
        first, second = _operand(rng, 2), _operand(rng, rng.choice(SECOND_OPERAND_DIGITS))
        if split_of(first, second) == split:
            return first, second


def _operand(rng: random.Random, num_digits: int) -> int:
    """Draws an operand of digits 1 to 9: without zeros, 5 of 9 inputs have a carry."""
    return sum(rng.randint(1, 9) * 10**place for place in range(num_digits))
