"""Which worker of a stage the others wait for, from the seconds that spans hold by worker."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from quartet.observe.spans import Span

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
