"""Compares mathematical answers with math-verify, in a process of its own.

A process because math-verify ends long computations by SIGALRM, which works in a main thread alone, and because only a
process can be ended that is deep inside a number of a billion digits.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quartet.rewards.subprocess_main import PipeChannel

_MEMORY_BYTES = 4 << 30


def compare(parse: Callable[..., Any], verify: Callable[..., bool], configs: dict[str, Any], job: Any) -> float | None:
    """1 for an equal answer, else 0; None where the right answer itself cannot be read."""
    extraction = [configs[kind] for kind in job["extract"]]
    limit = max(1, int(job["timeout_s"]))
    gold = parse(job["gold"], extraction_config=extraction, parsing_timeout=limit)
    if not gold:
        # Data sets often hold bare LaTeX, which is only recognised between delimiters.
        gold = parse(f"${job['gold']}$", extraction_config=list(configs.values()), parsing_timeout=limit)
    if not gold:
        return None
    found = parse(job["completion"], extraction_config=extraction, parsing_timeout=limit)
    return float(bool(verify(gold, found, float_rounding=job["digits"], timeout_seconds=limit)))


def serve(settings: Mapping[str, Any], channel: PipeChannel) -> None:
    """Answers each job with a score."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    configs = {"latex": LatexExtractionConfig(), "expr": ExprExtractionConfig()}
    channel.answer(0, "ready")
    for number, job in channel:
        try:
            score = compare(parse, verify, configs, job)
        except (MemoryError, RecursionError):
            score = 0.0
        channel.answer(number, score)
