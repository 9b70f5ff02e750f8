"""Whether a run learns, and what stands in its way.

One table of checks, :data:`CHECKS`. Each is a pure function of a few metrics in the last steps, compared with the run's
first ones where a figure alone says nothing. The run itself, ``watch``, the report and ``benchmarks/health.py``, which
counts false alarms over healthy runs, all ask :class:`HealthMonitor`; ``docs/how-to/not-learning.md`` has the table.

Beside it: how far answers repeat themselves (:func:`repetition`), the workers that others wait for
(:func:`worker_table`), and :class:`HackingAlarm`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from pydantic import ConfigDict, TypeAdapter

from quartet.observe.files import read_objects
from quartet.observe.spans import Span

NGRAM = 4
FIRST_STEPS = 5
"""Steps that a run's later ones are compared with."""
_HASH = np.uint64(0x9E3779B97F4A7C15)


def measure_repetition(token_ids: Sequence[int]) -> tuple[float, int]:
    """Returns the share of a response's 4-grams that it had before, and tokens of its longest stretch of such 4-grams
    alone.
    """
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
    """Returns by stage and role, where that has several workers, the seconds of each in every step."""
    found: dict[tuple[str, str], dict[int | None, Seconds]] = defaultdict(lambda: defaultdict(dict))
    for span in spans:
        for worker, seconds in span.worker_s.items():
            of_step = found[span.name, worker.rpartition(" ")[0]][span.step]
            of_step[worker] = of_step.get(worker, 0.0) + seconds
    return {key: steps for key, steps in found.items() if len({worker for of in steps.values() for worker in of}) > 1}


def straggler_metrics(spans: Iterable[Span]) -> dict[str, float]:
    """Returns ``time/straggler_<stage>`` of one step: seconds of the slowest worker over the median of the stage's
    workers.
    """
    found: dict[str, float] = {}
    for (stage, _), steps in workers_by_stage(spans).items():
        for seconds in steps.values():
            if (middle := median(seconds.values())) > 0:
                name = f"time/straggler_{stage}"
                found[name] = max(found.get(name, 1.0), max(seconds.values()) / middle)
    return found


def worker_table(spans: Iterable[Span]) -> list[WorkerSeconds]:
    """Returns every worker of a stage that has several; within a stage first who was slowest most often."""
    rows = []
    for (stage, _), steps in workers_by_stage(spans).items():
        last = Counter(max(of_step, key=of_step.__getitem__) for of_step in steps.values())
        for worker in sorted({worker for of_step in steps.values() for worker in of_step}):
            seconds = [of_step[worker] for of_step in steps.values() if worker in of_step]
            rows.append(WorkerSeconds(stage, worker, median(seconds), max(seconds), last[worker], len(steps)))
    return sorted(rows, key=lambda row: (row.stage, -row.slowest, -row.median_s))


Values = Sequence[Sequence[float]]
"""Of each step the metrics that a check needs, in its order."""


@dataclass(frozen=True)
class HealthCheck:
    """One row of the table.

    Attributes:
        name: logged as ``health/<name>``, 1 where it finds something.
        needs: metrics that it reads; steps without all of them do not count.
        steps: so many last steps are judged together.
        finds: of the first ``FIRST_STEPS`` values (none until so many came before the last ones) and the last
            ``steps``.
        when: the same in words, with the thresholds.
        title, meaning, remedy: what is told.
    """

    name: str
    needs: tuple[str, ...]
    steps: int
    finds: Callable[[Values, Values], bool]
    when: str
    title: str
    meaning: str
    remedy: str


@dataclass(frozen=True)
class HealthFinding:
    """What a check has found: from the step at which it did first, to the last one at which it did."""

    check: HealthCheck
    since: int
    until: int
    values: tuple[float, ...]

    @property
    def text(self) -> str:
        figures = ", ".join(f"{name} {value:.3g}" for name, value in zip(self.check.needs, self.values, strict=True))
        return f"step {self.since}: {self.check.title} ({figures}). {self.check.meaning} Try: {self.check.remedy}"


def _always(first: Values, last: Values) -> bool:
    return all(share >= 1 for (share,) in last)


def _constant_reward(first: Values, last: Values) -> bool:
    return all(spread < 1e-9 and math.isclose(mean, last[0][1], abs_tol=1e-9) for spread, mean in last)


def _cut_off(first: Values, last: Values) -> bool:
    shares = [share for (share,) in last]
    falls = fmean(shares[:2]) - fmean(shares[-2:]) > 0.1  # answers are learning to end
    return min(shares) >= 0.5 and not falls and not _always(first, last)


def _collapsed(first: Values, last: Values) -> bool:
    begun = fmean(entropy for (entropy,) in first) if first else 0.0
    return all(entropy < min(0.05, 0.1 * begun) for (entropy,) in last)


def _far_from_reference(first: Values, last: Values) -> bool:
    begun = fmean(abs(kl) for (kl,) in first) if first else math.inf
    return all(kl > max(1.0, 3 * begun) for (kl,) in last)


def _exploded(first: Values, last: Values) -> bool:
    begun = median(norm for (norm,) in first) if first else math.inf
    return all(not math.isfinite(norm) or norm > 20 * max(1.0, begun) for (norm,) in last)


def _ratio_of_one(first: Values, last: Values) -> bool:
    return all(abs(ratio - 1) < 1e-5 and kl < 1e-9 and norm > 1e-6 for ratio, kl, norm, _ in last)


def _gradient(name: str, metric: str, remedy: str) -> HealthCheck:
    return HealthCheck(
        name,
        (metric,),
        3,
        _exploded,
        f"`{metric}` not finite, or above 20 and 20 × its median of the first {FIRST_STEPS} steps, in 3 steps running",
        "the gradient norm has exploded",
        "Clipping keeps the direction of a gradient that is mostly noise; weights that are not finite never recover.",
        remedy,
    )


CHECKS: tuple[HealthCheck, ...] = (
    HealthCheck(
        "no_variance",
        ("groups/zero_variance",),
        5,
        _always,
        "`groups/zero_variance` 1, in 5 steps running",
        "no group has answers with different rewards",
        "Group-relative advantages are 0, and so is the gradient but for KL: nothing is learned from the reward.",
        "read answers and scores in the report; prompts of another difficulty, SFT first, more responses_per_prompt, "
        "algorithm.dynamic_sampling={}",
    ),
    HealthCheck(
        "constant_reward",
        ("reward/score_std", "reward/score_mean"),
        5,
        _constant_reward,
        "`reward/score_std` 0 and `reward/score_mean` the same, in 5 steps running",
        "every answer gets the same reward",
        "The reward tells no answers apart: it reads a wrong column, finds no answer in the text, or is saturated.",
        "quartet doctor; the reward's column and pattern; a reward with partial credit",
    ),
    HealthCheck(
        "never_ends",
        ("rollout/truncated_frac",),
        5,
        _always,
        "`rollout/truncated_frac` 1, in 5 steps running",
        "no answer ends by itself",
        "The model never samples its end of text: a wrong template or token, a base model, or too low a limit.",
        "the doctor's turn_end and end_of_text; rollout.sampling.stop_strings; a larger "
        "rollout.sampling.max_new_tokens; SFT first",
    ),
    HealthCheck(
        "cut_off",
        ("rollout/truncated_frac",),
        5,
        _cut_off,
        "`rollout/truncated_frac` at least 0.5 in 5 steps running, over which it does not fall by 0.1",
        "most answers are cut off at the limit",
        "Their rewards judge half an answer, and length itself is not learned.",
        "a larger rollout.sampling.max_new_tokens, or a penalty for length (algorithm.overlong)",
    ),
    HealthCheck(
        "entropy_collapsed",
        ("policy/entropy",),
        5,
        _collapsed,
        f"`policy/entropy` below 0.05 and a tenth of its mean of the first {FIRST_STEPS} steps, in 5 steps running",
        "the entropy has collapsed",
        "The policy gives one answer to each prompt and explores no more; with the best reward there is, it is done.",
        "a smaller actor.train.optim.lr, a larger algorithm.kl.coef, algorithm.entropy_coef, temperature 1",
    ),
    HealthCheck(
        "kl_exploded",
        ("kl/ref",),
        3,
        _far_from_reference,
        f"`kl/ref` above 1 and 3 × its mean of the first {FIRST_STEPS} steps, in 3 steps running",
        "the policy has left its reference",
        "Answers are no longer language as the model knew it; a rising reward is then often an exploited one.",
        "a smaller actor.train.optim.lr, a larger algorithm.kl.coef, or a target for it (algorithm.kl.target)",
    ),
    _gradient(
        "gradient_exploded",
        "policy/grad_norm",
        "a smaller actor.train.optim.lr, more warm-up, rewards of a smaller scale; an earlier checkpoint",
    ),
    _gradient(
        "critic_gradient_exploded",
        "critic/grad_norm",
        "a smaller critic.train.optim.lr, critic.warmup_steps, rewards of a smaller scale",
    ),
    _gradient(
        "loss_gradient_exploded",
        "optim/grad_norm",
        "a smaller train.optim.lr, more warm-up; quartet data recipe.yaml: rows that are not like the others",
    ),
    HealthCheck(
        "ratio_of_one",
        ("policy/ratio_max", "policy/approx_kl", "policy/grad_norm", "policy/clip_frac_drift"),
        5,
        _ratio_of_one,
        "several updates a step (`policy/clip_frac_drift` is there), `policy/grad_norm` above 1e-6, and yet "
        "`policy/ratio_max` within 1e-5 of 1 and `policy/approx_kl` below 1e-9, in 5 steps running",
        "updates do not change the policy",
        "After an update the probabilities are those before it: the step is too small for the weights' precision.",
        "a larger actor.train.optim.lr, fp32 weights, a shorter warm-up; the doctor's weight_update",
    ),
)


class HealthMonitor:
    """What the checks have found in a run whose steps are told one after the other.

    Attributes:
        findings: by the name of the check, in the order in which they were found first.
        present: names of the checks that find something at the newest step.
    """

    def __init__(self) -> None:
        self.findings: dict[str, HealthFinding] = {}
        self.present: list[str] = []
        self._first: dict[str, list[tuple[float, ...]]] = {check.name: [] for check in CHECKS}
        self._last = {check.name: deque[tuple[float, ...]](maxlen=check.steps) for check in CHECKS}

    def note(self, step: int, metrics: Mapping[str, float]) -> list[HealthFinding]:
        """Takes in the metrics of ``step``; returns what is found for the first time."""
        new: list[HealthFinding] = []
        self.present = []
        for check in CHECKS:
            if not all(name in metrics for name in check.needs):
                continue
            values = tuple(float(metrics[name]) for name in check.needs)
            first, last = self._first[check.name], self._last[check.name]
            if len(last) == check.steps and len(first) < FIRST_STEPS:
                first.append(last[0])
            last.append(values)
            if len(last) < check.steps or not check.finds(first if len(first) == FIRST_STEPS else [], last):
                continue
            self.present.append(check.name)
            known = self.findings.get(check.name)
            found = (
                HealthFinding(check, step, step, values) if known is None else replace(known, until=step, values=values)
            )
            self.findings[check.name] = found
            new += [found] if known is None else []
        return new

    def metrics(self) -> dict[str, float]:
        """Returns ``health/<check>`` of those that find something at the newest step; none in a healthy run."""
        return {f"health/{name}": 1.0 for name in self.present}


def examine_health(rows: Sequence[Mapping[str, float]]) -> HealthMonitor:
    """Examines the health of a run by the rows of its ``metrics.jsonl``."""
    health = HealthMonitor()
    for row in rows:
        health.note(int(row["step"]), row)
    return health


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
    """The reward-hacking alarm: training reward rises while the held-out score falls, both beyond noise.

    At every held-out evaluation one-sided tests compare *now* with the evaluation whose held-out score was best:

    * **The held-out score fell**: paired t-test over prompts, score now less score then. Each prompt is compared with
      itself, so differences between prompts are no noise; sampling noise and the wobble of single answers are. Its
      p-value is never below ``2^−m`` with ``m`` prompts whose score changed, the smallest that a sign test could give.
    * **It was low twice running**: the same test of each prompt's better score of this evaluation and the one before.
      Where nothing fell, the score then is the highest of the three no more often than once in three times, so that
      this p-value may be as small as ``3^−m``: ten prompts show in two evaluations what they cannot show in one.
    * **The training reward rose**: t-test of the slope of a straight line through the training reward of the steps
      since.

    The alarm is raised where one of the first two and the third reject. It is an intersection-union test (Berger 1982):
    the alarm is false whenever *one* of the two did not really happen, and has at most that one's level then. The
    levels add up to at most ``false_alarm_rate`` over a whole run: ``rate / evaluations`` for each evaluation. The two
    tests of a fall have half of it each, over the number of evaluations that may be the best one, since the best of
    several noisy scores is too high by luck.

    It collects the training reward of every step and the held-out scores of every evaluation, and judges them.

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
        """Returns what the p-values of a fall are compared with after ``num_seen`` evaluations; the second is 0 after
        one.
        """
        return self._level / 2 / num_seen, self._level / 2 / (num_seen - 1) if num_seen > 1 else 0.0

    def note_training(self, step: int, reward: float) -> None:
        """Notes the mean training reward of ``step`` (complete steps count from 1); one that is not finite
        is left out.
        """
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
            held_out_p = drop_p_value([now[p] - self._best[p] for p in common])
            again = [] if self._last is self._best else [p for p in common if p in self._last]
            twice_p = drop_p_value([max(now[p], self._last[p]) - self._best[p] for p in again], chance=1 / 3)
            slope, training_p = slope_and_p_value(self._training)
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
        """Returns JSON values from which :meth:`restore` goes on exactly."""
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


def drop_p_value(differences: Sequence[float], chance: float = 0.5) -> float:
    """Computes the p-value of the mean of paired differences being below 0, at least ``chance`` to the number that are
    not 0.

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


def slope_and_p_value(series: Sequence[tuple[int, float]]) -> tuple[float | None, float]:
    """Computes the slope of the least-squares line through ``(step, value)``, and the p-value of it being above 0.

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
    """Computes P(T > t) of Student's distribution with a whole number of degrees of freedom, exactly (Abramowitz and
    Stegun 26.7.3, 26.7.4); absolute error around 1e-16, so tails below that are 0.

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
    """Reads the rows of ``alarms.jsonl``, without broken ones."""
    return read_objects(path, alarm_from_row)


def alarm_from_row(row: dict[str, Any]) -> dict[str, Any]:
    """Makes one row of :func:`read_alarms`; ValueError or KeyError for one of another shape."""
    if type(row["step"]) is not int or not isinstance(row["text"], str):
        raise ValueError("no whole step, or no text")
    return {**row, "examples": _EXAMPLES.validate_python(row["examples"])}
