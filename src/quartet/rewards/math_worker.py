"""Compares mathematical answers with math-verify, in a process of its own.

A process because math-verify ends long computations by SIGALRM, which works in a main thread alone, and because only a
process can be ended that is deep inside a number of a billion digits.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from quartet.processes import MessagePipe
from quartet.rewards.subprocesses import WorkerRequests

_MEMORY_BYTES = 4 << 30
_STANDS_ALONE = re.compile(
    r"(?<!\\)\$|\\[(\[]|\\boxed"  # has delimiters
    r"|(?<![\\\w{])[A-Za-z]{4,}|\*\*"  # a sentence, which ends with the answer; Python's power
    # A number with its unit.
    r"|^\s*(?:[-+\d.,/]+|-?\\[dt]?frac\{\d+\}\{\d+\})"
    r"(?:\s+(?:[A-Za-z]{2,}(?:/[A-Za-z]+)?|m/s|[JLVW]|[ckm]?m\^[23]|(?:in|ft|mi)\^[23])(?:(?<=/[sm])\^[23])?\.?)+\s*$"
)
_SET_IN_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf)\s*\{[^{}]*\}")
# Few digits: a completion may hold any number of them.
_REPEATING = re.compile(r"(?<!\d)(\d{0,20})\.(\d{0,20})\\overline\{(\d{1,20})\}")
_POWER = re.compile(r"(?<![\w.\\])\d{1,20}(?:\.\d{1,20})?[eE]\+?\d{1,2}(?!\w|\.\d)")
_NAMED = re.compile(r"(?<![\\A-Za-z])(pi|sin|cos|tan|ln|log)(?![A-Za-z])")
_COMMAND = r"\\\1"
_MIXED = re.compile(r"(?<![^{$-])(\d{1,20}) +(\d{1,20})/(\d{1,20})(?= *(?:[}$]|$))")


def verify_answers(
    parse: Callable[..., Any], verify: Callable[..., bool], configs: dict[str, Any], job: Any
) -> float | None:
    """Returns 1 for an equal answer, else 0; None where the right answer itself cannot be read."""
    extraction = [configs[kind] for kind in job["extract"]]
    limit = max(1, int(job["timeout_s"]))
    as_it_stands, between = (job["gold"], extraction), (f"${_NAMED.sub(_COMMAND, job['gold'])}$", [*configs.values()])
    gold: list[Any] = []
    # Data sets often hold bare LaTeX. Without delimiters a number is looked for, which would be a part of it.
    for text, kinds in (as_it_stands, between) if is_plain_answer(job["gold"]) else (between, as_it_stands):
        gold = parse(_with_fractions(text), extraction_config=kinds, parsing_timeout=limit)
        if any(not isinstance(found, str) for found in gold):
            break
    if not gold:
        return None
    found = parse(_with_fractions(job["completion"]), extraction_config=extraction, parsing_timeout=limit)
    return float(bool(verify(gold, found, float_rounding=job["digits"], timeout_seconds=limit)))


def is_plain_answer(gold: str) -> bool:
    """Tells whether an answer is read as it stands: it has delimiters, or is no LaTeX. Any other is read between
    them."""
    return _STANDS_ALONE.search(_SET_IN_TEXT.sub("", gold)) is not None


def _with_fractions(text: str) -> str:
    """Writes repeating decimals and mixed numbers as fractions, and powers of ten in full: math-verify reads 0 in
    ``0.\\overline{3}``, 1 in ``2 1/2``, a product in ``1e5``.
    """

    def repeating(found: re.Match[str]) -> str:
        whole, fixed, repeated = found.groups()
        value = int(whole + fixed + repeated) - int((whole + fixed) or "0")
        return rf"\frac{{{value}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"

    text = _POWER.sub(lambda found: f"{Decimal(found[0]):f}", _REPEATING.sub(repeating, text))
    return _MIXED.sub(lambda found: f"{int(found[1]) * int(found[3]) + int(found[2])}/{found[3]}", text)


def serve_math(settings: Mapping[str, Any], wire: MessagePipe) -> None:
    """Answers each job with a score."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    configs = {"latex": LatexExtractionConfig(), "expr": ExprExtractionConfig()}
    channel = WorkerRequests(wire)
    channel.answer(0, "ready")
    for number, job in channel:
        try:
            score = verify_answers(parse, verify, configs, job)
        except (MemoryError, RecursionError):
            score = 0.0
        channel.answer(number, score)
