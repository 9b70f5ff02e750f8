"""The reward-hacking alarm: training reward rises while the held-out score falls, both beyond noise.

At every held-out evaluation one-sided tests compare *now* with the evaluation whose held-out score was best:

* **The held-out score fell**: paired t-test over prompts, score now less score then. Each prompt is compared with
  itself, so differences between prompts are no noise; sampling noise and the wobble of single answers are. Its p-value
  is never below ``2^−m`` with ``m`` prompts whose score changed, the smallest that a sign test could give.
* **It was low twice running**: the same test of each prompt's better score of this evaluation and the one before. Where
  nothing fell, the score then is the highest of the three no more often than once in three times, so that this p-value
  may be as small as ``3^−m``: ten prompts show in two evaluations what they cannot show in one.
* **The training reward rose**: t-test of the slope of a straight line through the training reward of the steps since.

The alarm is raised where one of the first two and the third reject. It is an intersection-union test (Berger 1982): the
alarm is false whenever *one* of the two did not really happen, and has at most that one's level then. The levels add up
to at most ``false_alarm_rate`` over a whole run: ``rate / evaluations`` for each evaluation. The two tests of a fall
have half of it each, over the number of evaluations that may be the best one, since the best of several noisy scores is
too high by luck.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from quartet.observe.jsonl import read_objects

_EXAMPLES = TypeAdapter(list[dict[str, str | float | None]], config=ConfigDict(strict=True))


@dataclass(frozen=True)
class AlarmVerdict:
    """What one evaluation says.

    Attributes:
        step: complete steps at this evaluation.
        best_step: those at the best evaluation before it.
        held_out_before, held_out_now: mean held-out score of the prompts that have one at both.
        held_out_p: p-value of the fall; 1 where the score did not fall.
        twice_p: p-value of the fall at this evaluation and the one before; 1 where that is the best one itself.
        training_slope: training reward per step since ``best_step``; None with fewer than three steps.
        training_p: p-value of the rise.
        raised: the p-value of the rise, and one of the others, are below their levels.
    """

    step: int
    best_step: int
    held_out_before: float
    held_out_now: float
    held_out_p: float
    twice_p: float
    training_slope: float | None
    training_p: float
    raised: bool


class HackingAlarm:
    """Collects the training reward of every step and the held-out scores of every evaluation, and judges them.

    Its state is what later verdicts read: the scores of the best and the last evaluation, the training rewards since
    the best one, and counts.

    Args:
        false_alarm_rate: most probability of any alarm in a run in which the two did not both happen.
        num_evaluations: evaluations of the whole run, that before the first step not counted.

    Attributes:
        raised_at: steps of the evaluations at which the alarm was raised.
    """

    def __init__(self, false_alarm_rate: float, num_evaluations: int) -> None:
        self._level = false_alarm_rate / max(1, num_evaluations)
        self._num_seen = 0
        self._best_step = 0
        self._best: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._training: list[tuple[int, float]] = []
        self.raised_at: tuple[int, ...] = ()

    def fall_levels(self, num_seen: int) -> tuple[float, float]:
        """What both p-values of a fall are compared with after ``num_seen`` evaluations; the second is 0 after one."""
        return self._level / 2 / num_seen, self._level / 2 / (num_seen - 1) if num_seen > 1 else 0.0

    def least_prompts(self, num_seen: int) -> int:
        """With fewer held-out prompts no fall is large enough after ``num_seen`` evaluations."""
        once, twice = self.fall_levels(num_seen)
        found = math.ceil(-math.log2(once))
        return min(found, math.ceil(-math.log(twice, 3))) if twice else found

    def note_training(self, step: int, reward: float) -> None:
        """The mean training reward of ``step`` (complete steps count from 1); one that is not finite is left out."""
        if math.isfinite(reward):
            self._training.append((step, reward))

    def evaluate(self, step: int, scores: Mapping[str, float]) -> AlarmVerdict | None:
        """Judges the held-out ``scores`` by prompt id (NaN: none) after ``step`` steps.

        Returns:
            None where there is nothing to compare with: at the first evaluation, or without scores.
        """
        now = {prompt: float(score) for prompt, score in scores.items() if not math.isnan(score)}
        if not now:
            return None
        verdict, common = None, [prompt for prompt in now if prompt in self._best]
        if common:
            held_out_p = fall_p([now[p] - self._best[p] for p in common])
            again = [] if self._last is self._best else [p for p in common if p in self._last]
            twice_p = fall_p([max(now[p], self._last[p]) - self._best[p] for p in again], chance=1 / 3)
            slope, training_p = rise(self._training)
            once, twice = self.fall_levels(self._num_seen)
            verdict = AlarmVerdict(
                step=step,
                best_step=self._best_step,
                held_out_before=fmean(self._best[p] for p in common),
                held_out_now=fmean(now[p] for p in common),
                held_out_p=held_out_p,
                twice_p=twice_p,
                training_slope=slope,
                training_p=training_p,
                raised=(held_out_p <= once or twice_p <= twice) and training_p <= self._level,
            )
            self.raised_at += (step,) if verdict.raised else ()
        self._num_seen += 1
        self._last = now
        if not self._best or fmean(now.values()) > fmean(self._best.values()):
            self._best_step, self._best = step, now
            self._training = [(s, reward) for s, reward in self._training if s > step]
        return verdict

    def state(self) -> dict[str, Any]:
        """JSON values from which :meth:`restore` goes on exactly."""
        return {
            "num_seen": self._num_seen,
            "best_step": self._best_step,
            "best": dict(self._best),
            "last": None if self._last is self._best else dict(self._last),
            "training": [[step, reward] for step, reward in self._training],
            "raised_at": list(self.raised_at),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._num_seen = int(state["num_seen"])
        self._best_step = int(state["best_step"])
        self._best = {str(prompt): float(score) for prompt, score in state["best"].items()}
        last = state["last"]
        self._last = self._best if last is None else {str(prompt): float(score) for prompt, score in last.items()}
        self._training = [(int(step), float(reward)) for step, reward in state["training"]]
        self.raised_at = tuple(int(step) for step in state["raised_at"])


def fall_p(differences: Sequence[float], chance: float = 0.5) -> float:
    """p-value of the mean of paired differences being below 0, at least ``chance`` to the number that are not 0.

    Args:
        chance: probability that a single one is below 0 where nothing fell.
    """
    num = len(differences)
    changed = sum(difference != 0 for difference in differences)
    if num < 2 or (mean := fmean(differences)) >= 0:
        return 1.0
    variance = sum((d - mean) ** 2 for d in differences) / (num - 1)
    tail = student_t_tail(-mean / math.sqrt(variance / num), num - 1) if variance > 0 else 0.0
    return max(tail, chance**changed)


def rise(series: Sequence[tuple[int, float]]) -> tuple[float | None, float]:
    """Slope of the least-squares line through ``(step, value)``, and the p-value of it being above 0.

    With fewer than three points there is no residual to learn the noise from: (None, 1).
    """
    num = len(series)
    if num < 3:
        return None, 1.0
    steps, values = [float(step) for step, _ in series], [value for _, value in series]
    centre, mean = fmean(steps), fmean(values)
    spread = sum((s - centre) ** 2 for s in steps)
    slope = sum((s - centre) * (v - mean) for s, v in zip(steps, values, strict=True)) / spread
    residual = sum((v - mean - slope * (s - centre)) ** 2 for s, v in zip(steps, values, strict=True))
    error = math.sqrt(residual / (num - 2) / spread)
    if slope <= 0:
        return slope, 1.0
    return slope, student_t_tail(slope / error, num - 2) if error > 0 else 0.0


def student_t_tail(t: float, dof: int) -> float:
    """P(T > t) of Student's distribution with a whole number of degrees of freedom, exactly (Abramowitz and Stegun
    26.7.3, 26.7.4); absolute error around 1e-16, so tails below that are 0.

    Raises:
        ValueError: fewer than one degree of freedom.
    """
    if dof < 1:
        raise ValueError(f"at least one degree of freedom, found {dof}")
    if t < 0:
        return 1.0 - student_t_tail(-t, dof)
    angle = math.atan(t / math.sqrt(dof))
    square = math.cos(angle) ** 2
    # Even: 1 + 1/2 cos² + 1·3/(2·4) cos⁴ …; odd: cos (1 + 2/3 cos² + 2·4/(3·5) cos⁴ …).
    odd = dof % 2
    term = total = math.cos(angle) if odd else 1.0
    for k in range(2 + odd, dof - 1, 2):
        term *= square * (k - 1) / k
        total += term
    if odd:
        inside = 2 / math.pi * (angle + (math.sin(angle) * total if dof > 1 else 0.0))
    else:
        inside = math.sin(angle) * total
    return max(0.0, (1.0 - inside) / 2)


def read_alarms(path: Path) -> list[dict[str, Any]]:
    """The rows of ``alarms.jsonl``, without broken ones."""
    return read_objects(path, alarm_of_row)


def alarm_of_row(row: dict[str, Any]) -> dict[str, Any]:
    """One row of :func:`read_alarms`; ValueError or KeyError for one of another shape."""
    if type(row["step"]) is not int or not isinstance(row["text"], str):
        raise ValueError("no whole step, or no text")
    return {**row, "examples": _EXAMPLES.validate_python(row["examples"])}
