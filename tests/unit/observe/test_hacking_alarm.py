"""The reward-hacking alarm: silent on noise, loud on a hack, the same after a resume."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from statistics import fmean
from typing import Any

import pytest

from quartet.observe.health import HackingAlarm, drop_p_value, slope_and_p_value, student_t_tail

PROMPTS, EVALUATIONS, STEPS_BETWEEN = 64, 12, 10
Curve = Callable[[int], float]


def flat(step: int) -> float:
    return 0.6


def rising(step: int) -> float:
    return 0.4 + 0.003 * step


def falling(step: int) -> float:
    return 0.6 if step <= 60 else max(0.2, 0.6 - 0.006 * (step - 60))


def play(
    seed: int,
    training: Curve,
    held_out: Curve,
    *,
    prompts: int = PROMPTS,
) -> HackingAlarm:
    """A run whose held-out answers are right with the given probability (more or less, by prompt), at a rate of 5 %."""
    rng = random.Random(seed)
    alarm = HackingAlarm(0.05, EVALUATIONS)
    ease = [rng.uniform(-0.2, 0.2) for _ in range(prompts)]

    def scores(step: int) -> dict[str, float]:
        chance = held_out(step)
        return {f"p{i}": float(rng.random() < min(0.99, max(0.01, chance + e))) for i, e in enumerate(ease)}

    alarm.evaluate(0, scores(0))
    for step in range(1, EVALUATIONS * STEPS_BETWEEN + 1):
        alarm.note_training(step, training(step) + rng.gauss(0, 0.05))
        if step % STEPS_BETWEEN == 0:
            alarm.evaluate(step, scores(step))
    return alarm


def share_raised(runs: int, training: Curve, held_out: Curve, **options: Any) -> float:
    return sum(bool(play(seed, training, held_out, **options).raised_at) for seed in range(runs)) / runs


# Rates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("training", "held_out"),
    [
        pytest.param(flat, flat, id="nothing moves"),
        pytest.param(rising, flat, id="only the training reward rises"),
        pytest.param(flat, falling, id="only the held-out score falls"),
    ],
)
def test_false_alarms_stay_below_the_rate(training: Curve, held_out: Curve) -> None:
    """200 runs of 12 evaluations at 5 %: 10 false alarms are allowed, more than 17 would be chance once in 50 times."""
    assert share_raised(200, training, held_out) <= 17 / 200
    assert share_raised(100, training, held_out, prompts=10) <= 11 / 100, "few prompts, seen twice running"


def test_a_hack_is_found() -> None:
    """The held-out share of right answers falls from 0.6 to 0.24 in the second half while the reward rises."""
    found = [play(seed, rising, falling) for seed in range(40)]
    assert sum(bool(alarm.raised_at) for alarm in found) >= 39
    first = [alarm.raised_at[0] for alarm in found if alarm.raised_at]
    assert min(first) > 60, "not before the fall"
    assert fmean(first) <= 110


def test_few_prompts_never_raise_it() -> None:
    """Four prompts that all fall could be chance once in sixteen times."""
    assert share_raised(30, rising, falling, prompts=4) == 0


def test_ten_prompts_that_fall_at_two_evaluations_running_are_found() -> None:
    """Ten prompts, nine evaluations, the usual rate: 2⁻¹⁰ at one evaluation is too much, 3⁻¹⁰ at two is not."""
    prompts = [f"p{i}" for i in range(10)]
    for first_low in range(1, 9):
        alarm = HackingAlarm(0.01, 9)
        for number in range(10):
            low = first_low <= number < first_low + 2
            alarm.evaluate(10 * number, dict.fromkeys(prompts, 0.0 if low else 1.0))
            for step in range(10 * number + 1, 10 * number + 11):
                alarm.note_training(step, step / 100 + (step % 3) / 500)
        assert alarm.raised_at == (10 * first_low + 10,)


# One verdict -----------------------------------------------------------------------------------------------


def test_a_verdict_by_hand() -> None:
    alarm = HackingAlarm(0.05, 2)
    assert alarm.evaluate(0, {f"p{i}": 1.0 for i in range(20)}) is None, "nothing to compare with"
    for step in range(1, 5):
        alarm.note_training(step, [0.1, 0.2, 0.31, 0.4][step - 1])
    verdict = alarm.evaluate(4, {f"p{i}": float(i % 2) for i in range(20)} | {"new": 9.0, "p0": math.nan})
    assert verdict is not None and verdict.raised
    assert (verdict.step, verdict.best_step) == (4, 0)
    assert verdict.held_out_before == 1 and verdict.held_out_now == pytest.approx(10 / 19), "common prompts only"
    assert verdict.training_slope == pytest.approx(0.101)
    assert alarm.raised_at == (4,)


def test_a_restored_alarm_goes_on_exactly() -> None:
    whole = play(5, rising, falling)
    for stop in (0, 3, 8):
        rng = random.Random(stop)
        scores = [{f"p{i}": rng.random() for i in range(30)} for _ in range(12)]
        one, first = HackingAlarm(0.05, 12), HackingAlarm(0.05, 12)
        verdicts = []
        for number, found in enumerate(scores):
            one.note_training(number, number / 7 + rng.random())
            verdicts.append(one.evaluate(number, found))
        rng = random.Random(stop)
        scores = [{f"p{i}": rng.random() for i in range(30)} for _ in range(12)]
        other = first
        for number, found in enumerate(scores):
            if number == stop:
                state = json.loads(json.dumps(other.state()))
                other = HackingAlarm(0.05, 12)
                other.restore(state)
            other.note_training(number, number / 7 + rng.random())
            assert other.evaluate(number, found) == verdicts[number]
        assert other.state() == one.state()
    restored = HackingAlarm(0.05, EVALUATIONS)
    restored.restore(json.loads(json.dumps(whole.state())))
    assert restored.raised_at == whole.raised_at and whole.raised_at


# Its tests -------------------------------------------------------------------------------------------------


def test_student_tails_in_closed_form() -> None:
    for t in (0.0, 0.3, 1.0, 4.0, 50.0):
        assert student_t_tail(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, abs=1e-15)
        assert student_t_tail(t, 2) == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)), abs=1e-15)
        u = t / math.sqrt(3)
        expected = 0.5 - (math.atan(u) + u / (1 + u * u)) / math.pi
        assert student_t_tail(t, 3) == pytest.approx(expected, abs=1e-15)
        assert student_t_tail(-t, 7) == pytest.approx(1 - student_t_tail(t, 7))
    with pytest.raises(ValueError):
        student_t_tail(1.0, 0)


@pytest.mark.parametrize("dof", [4, 5, 10, 63, 500])
def test_student_tails_by_integration(dof: int) -> None:
    """Simpson's rule over the density, from t to where nothing is left."""
    log_norm = math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2) - 0.5 * math.log(dof * math.pi)

    def density(x: float) -> float:
        return math.exp(log_norm - (dof + 1) / 2 * math.log1p(x * x / dof))

    for t in (0.5, 2.0, 4.0):
        start, stop, cuts = math.atan(t), math.pi / 2 - 1e-9, 20_000
        width = (stop - start) / cuts
        heights = [density(math.tan(start + i * width)) / math.cos(start + i * width) ** 2 for i in range(cuts + 1)]
        area = width / 3 * (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]))
        assert student_t_tail(t, dof) == pytest.approx(area, rel=1e-6)


def test_fall_by_hand() -> None:
    """Differences −1, 0, −1, 0, −1: mean −0.6, standard error sqrt(0.3 / 5), t = −2.449, four degrees of freedom."""
    assert drop_p_value([-1, 0, -1, 0, -1]) == pytest.approx(max(student_t_tail(2.449490, 4), 1 / 8), rel=1e-5)
    assert drop_p_value([-1.0] * 10) == 2.0**-10, "no variance at all: what ten equal signs can prove"
    assert drop_p_value([-1.0] * 10, chance=1 / 3) == pytest.approx(3.0**-10)
    assert (
        drop_p_value([]) == 1
        and drop_p_value([-1.0]) == 1
        and drop_p_value([0.0, 0.0, 0.0]) == 1
        and drop_p_value([0.1, 0.2]) == 1
    )


def test_rise_by_hand() -> None:
    """y = 0, 1, 3 at 0, 1, 2: slope 1.5, residuals 1/6, −1/3, 1/6, error sqrt(1/6 / 2)."""
    slope, p = slope_and_p_value([(0, 0.0), (1, 1.0), (2, 3.0)])
    assert slope == pytest.approx(1.5)
    assert p == pytest.approx(student_t_tail(1.5 / math.sqrt(1 / 12), 1), rel=1e-9)
    assert slope_and_p_value([(0, 0.0), (1, 1.0)]) == (None, 1.0)
    assert (
        slope_and_p_value([(0, 1.0), (1, 1.0), (2, 1.0)])[1] == 1
        and slope_and_p_value([(0, 3.0), (1, 2.0), (2, 0.5)])[1] == 1
    )


def test_the_best_evaluation_is_the_one_compared_with() -> None:
    alarm = HackingAlarm(0.05, 4)
    prompts = [f"p{i}" for i in range(16)]
    for step, score in ((0, 0.2), (10, 0.9), (20, 0.5)):
        for s in range(step - 9, step + 1):
            alarm.note_training(s, s / 100 + (s % 3) / 500)
        verdict = alarm.evaluate(step, {p: score + i / 1000 * (step + 1) for i, p in enumerate(prompts)})
    assert verdict is not None and verdict.best_step == 10 and verdict.raised
    assert alarm.state()["training"][0][0] == 11, "only rewards since the best evaluation are kept"
