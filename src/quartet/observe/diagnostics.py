"""What shows that answers degenerate, whatever they should say: repetition, and letters of other writing systems.

Which worker of a stage the others wait for, from the seconds that spans hold by worker.
"""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np

from quartet.observe.spans import Span
from quartet.observe.trackers import read_metrics

NGRAM = 4
FIRST_STEPS = 5
"""Steps that a run's later ones are compared with."""
SCRIPT, CHANGE = "language/", "language/change"
_OTHER = "other"
_LEAST_SHARE = 0.01
_HASH = np.uint64(0x9E3779B97F4A7C15)
_NAMES = {"CJK": "han", "IDEOGRAPHIC": "han"}


def repetition(token_ids: Sequence[int]) -> tuple[float, int]:
    """Share of a response's 4-grams that it had before, and tokens of its longest stretch of such 4-grams alone."""
    ids = np.asarray(token_ids, dtype=np.uint64)
    count = len(ids) - NGRAM + 1
    if count < 2:
        return 0.0, 0
    # Equal 4-grams have equal numbers; that others have, too, is as likely as a collision of 64 random bits.
    grams = np.zeros(count, np.uint64)
    for k in range(NGRAM):
        grams = grams * _HASH + ids[k : k + count]
    is_new = np.ones(count + 2, bool)
    is_new[1:-1] = False
    is_new[np.unique(grams, return_index=True)[1] + 1] = True
    longest = int(np.diff(np.flatnonzero(is_new)).max()) - 1
    return float(count - is_new[1:-1].sum()) / count, longest + NGRAM - 1 if longest else 0


def script_counts(text: str) -> dict[str, int]:
    """Letters of a text by writing system: ``latin``, ``cyrillic``, ``han``, ``hiragana``, …"""
    found: Counter[str] = Counter()
    for char, count in Counter(text).items():
        if (script := _script(char)) is not None:
            found[script] += count
    return dict(found)


@cache
def _script(char: str) -> str | None:
    """The first word of a letter's name in Unicode, which is its script's; None of what is no letter."""
    if not char.isalpha():
        return None
    plain = unicodedata.normalize("NFKC", char)[:1]  # of full width, in bold: the letter itself
    word = unicodedata.name(plain, _OTHER).split()[0].partition("-")[0]
    return _NAMES.get(word, word.lower())


def script_shares(counts: Iterable[Mapping[str, int]]) -> dict[str, float]:
    """``language/<script>`` of all texts together; scripts below 1 % are ``language/other``. {} without letters."""
    total: Counter[str] = Counter()
    for of_text in counts:
        total.update(of_text)
    num = sum(total.values())
    shares: dict[str, float] = {}
    for script, count in sorted(total.items()):
        name = SCRIPT + (script if count >= _LEAST_SHARE * num else _OTHER)
        shares[name] = shares.get(name, 0.0) + count / num
    return shares


class LanguageChange:
    """How far the scripts of a step's answers are from those of the run's first steps.

    Args:
        path: the run's ``metrics.jsonl``, which holds those steps also after a resume.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first: list[dict[str, float]] = []

    def of(self, shares: Mapping[str, float]) -> float | None:
        """Half the sum of the differences of the shares, from 0 to 1; None at the first step and without letters."""
        now = _of_scripts(shares)
        if len(self._first) < FIRST_STEPS and self._path.exists():
            rows = (_of_scripts(row) for row in read_metrics(self._path))
            self._first = [row for row in rows if row][:FIRST_STEPS]
        if not now or not self._first:
            return None
        names = now.keys() | {name for row in self._first for name in row}
        before = {name: sum(row.get(name, 0.0) for row in self._first) / len(self._first) for name in names}
        return sum(abs(now.get(name, 0.0) - before[name]) for name in names) / 2


def _of_scripts(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith(SCRIPT) and name != CHANGE}


Seconds = dict[str, float]
"""By worker, as spans name them: role and rank."""


@dataclass(frozen=True)
class WorkerSeconds:
    """A worker's seconds per step in one stage: of ``steps`` steps it took longest in ``slowest``."""

    stage: str
    worker: str
    median_s: float
    max_s: float
    slowest: int
    steps: int


def workers_by_stage(spans: Iterable[Span]) -> dict[tuple[str, str], dict[int | None, Seconds]]:
    """By stage and role, where that has several workers: the seconds of each in every step."""
    found: dict[tuple[str, str], dict[int | None, Seconds]] = defaultdict(lambda: defaultdict(dict))
    for span in spans:
        for worker, seconds in span.worker_s.items():
            of_step = found[span.name, worker.rpartition(" ")[0]][span.step]
            of_step[worker] = of_step.get(worker, 0.0) + seconds
    return {key: steps for key, steps in found.items() if len({worker for of in steps.values() for worker in of}) > 1}


def straggler_metrics(spans: Iterable[Span]) -> dict[str, float]:
    """``time/straggler_<stage>`` of one step: seconds of the slowest worker over the median of the stage's workers."""
    found: dict[str, float] = {}
    for (stage, _), steps in workers_by_stage(spans).items():
        for seconds in steps.values():
            if (middle := median(seconds.values())) > 0:
                name = f"time/straggler_{stage}"
                found[name] = max(found.get(name, 1.0), max(seconds.values()) / middle)
    return found


def worker_table(spans: Iterable[Span]) -> list[WorkerSeconds]:
    """Every worker of a stage that has several; within a stage first who was slowest most often."""
    rows = []
    for (stage, _), steps in workers_by_stage(spans).items():
        last = Counter(max(of_step, key=of_step.__getitem__) for of_step in steps.values())
        for worker in sorted({worker for of_step in steps.values() for worker in of_step}):
            seconds = [of_step[worker] for of_step in steps.values() if worker in of_step]
            rows.append(WorkerSeconds(stage, worker, median(seconds), max(seconds), last[worker], len(steps)))
    return sorted(rows, key=lambda row: (row.stage, -row.slowest, -row.median_s))
