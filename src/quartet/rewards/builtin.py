"""Ready reward functions: plain functions, by ``type`` in a recipe or used as ``quartet.rewards.builtin:exact_match``.

Each takes completions (text or messages), most also the right answers, and gives one score per completion; None where a
row has no answer. Where it has a list of right answers, any of them counts.

Reward for mathematical equality, compared by math-verify in processes of its own.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal

from quartet.config.errors import UserError
from quartet.config.rewards import MathReward
from quartet.processes import ProcessDied, ProcessTimeout
from quartet.rewards.source import Columns, LimitedThreads, RewardError, RewardSource, Scores
from quartet.rewards.subprocesses import Subprocess, SubprocessPool
from quartet.text.examples import PromptText

NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-+−])?"  # a sign, not the minus of a difference
    r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?(?:[eE][-+]?\d+)?"
)


def exact_match(
    completions: Sequence[Any], answer: Sequence[Any], *, ignore_case: bool = False, **_: Any
) -> list[float | None]:
    """Scores 1 where the completion is the column ``answer``, white space around both aside, else 0."""

    def normal(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    return _against(completions, answer, lambda text, right: float(normal(text) == normal(right)))


def numeric(
    completions: Sequence[Any],
    answer: Sequence[Any],
    *,
    tolerance: float = 0.0,
    relative_tolerance: float = 0.0,
    **_: Any,
) -> list[float | None]:
    """Scores 1 where the last number of the completion is the last number of the column ``answer``, else 0; None where
    that column has no number. Thousands may be separated by commas.

    Args:
        tolerance, relative_tolerance: most that the two may differ, absolutely or as a share of the right one.
    """

    def judge(text: str, right: str) -> float | None:
        wanted, found = last_number(right), last_number(text)
        if wanted is None:
            return None
        room = max(tolerance, relative_tolerance * abs(wanted))
        return float(found is not None and abs(found - wanted) <= room)

    return _against(completions, answer, judge)


def last_number(text: str) -> float | None:
    """Returns the last number written in digits, e.g. ``-1,234.5`` or ``2e-3``; None without any."""
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("−", "-")) if found else None


def regex(
    completions: Sequence[Any],
    answer: Sequence[Any] | None = None,
    *,
    pattern: str,
    ignore_case: bool = False,
    **_: Any,
) -> list[float | None]:
    """Scores 1 where ``pattern`` is found, else 0. With ``answer``: 1 where the last match's first group is that text,
    white space around both aside.
    """
    compiled = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    if answer is None:
        return [float(compiled.search(plain_text(completion)) is not None) for completion in completions]

    def judge(text: str, right: str) -> float:
        matches = list(compiled.finditer(text))
        found = (matches[-1].group(1) or "").strip() if matches else None
        wanted = right.strip()
        return float(found is not None and (found.casefold() == wanted.casefold() if ignore_case else found == wanted))

    return _against(completions, answer, judge)


def format_match(
    completions: Sequence[Any],
    *,
    pattern: str | None = None,
    tags: Sequence[str] | None = None,
    opened: Sequence[str] | None = None,
    **_: Any,
) -> list[float | None]:
    """Scores 1 where ``pattern`` matches the whole completion (``.`` also a line break) or every tag stands in it once,
    as ``<tag>…</tag>``, one behind the other. Else 0.

    Args:
        opened: the tag that the prompt of each completion opens at its end (``open_tag_of_prompt``): the completion
            with it in front may have the form, too.
    """
    texts = list(map(plain_text, completions))
    ways = [{text.strip(), (tag + text).strip()} for text, tag in zip(texts, opened or [""] * len(texts), strict=True)]
    if pattern is not None:
        compiled = re.compile(pattern, re.DOTALL)
        return [float(any(map(compiled.fullmatch, texts))) for texts in ways]
    marks = [mark for tag in tags or () for mark in (f"<{tag}>", f"</{tag}>")]
    return [float(any(_each_once_in_order(text, marks) for text in texts)) for texts in ways]


def open_tag_of_prompt(prompt: str) -> str:
    """Returns the tag with which a prompt ends, as templates open ``<think>``; '' where it ends with none."""
    found = re.search(r"<[\w.:-]+>\s*\Z", prompt)
    return found[0] if found else ""


def _each_once_in_order(text: str, marks: Sequence[str]) -> bool:
    places = [text.find(mark) for mark in marks]
    return all(text.count(mark) == 1 for mark in marks) and places == sorted(places)


def length(
    completions: Sequence[Any],
    *,
    max: int | None = None,
    target: int | None = None,
    unit: Literal["characters", "words"] = "characters",
    **_: Any,
) -> list[float | None]:
    """Returns the length of the completion as its score; with a negative weight a price on it.

    Args:
        max: instead 1 up to this length, then falling, 0 from twice it on.
        target: instead 1 at this length, falling to both sides, 0 at nothing and from twice it on.
    """
    lengths = [len(text.split()) if unit == "words" else len(text) for text in map(plain_text, completions)]
    if max is not None:
        return [1.0 if n <= max else _at_least_0(2 - n / max) for n in lengths]
    if target is not None:
        return [_at_least_0(1 - abs(n - target) / target) for n in lengths]
    return [float(n) for n in lengths]


def _at_least_0(value: float) -> float:
    return value if value > 0 else 0.0


def _against(
    completions: Sequence[Any], answers: Sequence[Any], judge: Callable[[str, str], float | None]
) -> list[float | None]:
    scores: list[float | None] = []
    for completion, answer in zip(completions, answers, strict=True):
        found = [judge(plain_text(completion), right) for right in accepted_answers(answer)]
        scores.append(max((score for score in found if score is not None), default=None))
    return scores


def accepted_answers(answer: Any, column: str = "answer") -> list[str]:
    """Returns the texts that are right where a row has ``answer``: all entries of a list, both ways to write a whole
    float; none where there is no answer (null, NaN).

    Args:
        column: where it stands, for the message.

    Raises:
        UserError: an object, of which nobody has said what in it is the answer.
    """
    if isinstance(answer, Mapping):
        raise UserError(
            f"the right answers in {column!r} are objects",
            found=f"one with {', '.join(map(repr, answer))}",
            remedy="name the answer in them: data.columns.answer=COLUMN.KEY, the file's COLUMN and one of these keys",
        )
    answer = answer.tolist() if hasattr(answer, "tolist") else answer
    if isinstance(answer, (list, tuple)):
        return [text for one in answer for text in accepted_answers(one, column)]
    if answer is None or answer != answer:
        return []
    if isinstance(answer, float):  # a column of whole numbers has become floats where one was missing
        return [f"{Decimal(answer):f}"] * answer.is_integer() + [f"{Decimal(repr(answer)):f}"]
    return [str(answer)]


def plain_text(completion: Any) -> str:
    """Returns a completion's text, whether it came as text or as messages."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message["content"]) for message in completion)


_WORKER = "quartet.rewards.math_worker:serve_math"
_START_S = 120.0
_ATTEMPTS = 2
_PATIENCE = 3.0
"""The worker stops parsing twice and comparing once, after ``timeout_s`` each; later than that it is stuck."""


class MathSource(RewardSource):
    """See :class:`~quartet.config.rewards.MathReward`.

    Raises:
        UserError: math-verify is not installed.
    """

    compares = True

    def __init__(self, config: MathReward) -> None:
        self.name, self.column = config.name, config.column
        if importlib.util.find_spec("math_verify") is None:
            raise UserError(
                f"the reward {self.name!r} needs the library math-verify",
                found="it is not installed",
                remedy="pip install 'quartet-rl[math]'",
            )
        self._config = config
        self._threads = LimitedThreads(config.concurrency, self.name)
        self._pool = SubprocessPool(self._start, config.concurrency)

    async def score(self, prompts: Sequence[PromptText], completions: Sequence[str], columns: Columns) -> Scores:
        pairs = zip(completions, columns[self._config.column], strict=True)
        return [await self._threads.run(self._score, completion, gold) for completion, gold in pairs]

    def _score(self, completion: str, answer: Any) -> float | None:
        """Returns the score against the right answers, of which any counts; None where none can be read."""
        best: float | None = None
        for gold in accepted_answers(answer, self._config.column):
            score = self._compared(completion, gold)
            best = score if best is None else max(best, score or 0.0)
            if best == 1.0:
                break
        return best

    def _compared(self, completion: str, gold: str) -> float | None:
        config = self._config
        job = {
            "completion": completion,
            "gold": gold,
            "extract": config.extract,
            "digits": config.digits,
            "timeout_s": config.timeout_s,
        }
        for _ in range(_ATTEMPTS):
            with self._pool.taken() as process:
                try:
                    score = process.ask(job, max(1.0, config.timeout_s) * _PATIENCE)
                except ProcessTimeout:
                    process.kill()
                    break
                except ProcessDied:
                    continue  # perhaps ended from outside, for nothing in this completion
            return None if score is None else float(score)
        # A comparison that takes too long, or all memory, shows no equality.
        return 0.0

    def _start(self) -> Subprocess:
        try:
            return Subprocess(_WORKER, {}, quiet=True, patience_s=_START_S)
        except ProcessDied as error:
            raise RewardError(
                f"the process of the reward {self.name!r} does not start",
                found=str(error),
                remedy="see whether `python -c 'import math_verify'` works",
            ) from error

    def close(self) -> None:
        self._threads.close()
        self._pool.close()
