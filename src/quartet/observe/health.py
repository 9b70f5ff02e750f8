"""Health of a run: what its metrics say when it does not learn, with what it means and what to try.

One table of checks, :data:`CHECKS`. Each is a pure function of a few metrics in the last steps, compared with the run's
first ones where a figure alone says nothing. The run itself, ``watch``, the report and ``benchmarks/health.py``, which
counts false alarms over healthy runs, all ask :class:`Health`; ``docs/how-to/not-learning.md`` has the table.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from quartet.observe.diagnostics import FIRST_STEPS

Values = Sequence[Sequence[float]]
"""Of each step the metrics that a check needs, in its order."""


@dataclass(frozen=True)
class Check:
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
class Finding:
    """What a check has found: from the step at which it did first, to the last one at which it did."""

    check: Check
    since: int
    until: int
    values: tuple[float, ...]

    @property
    def text(self) -> str:
        figures = ", ".join(f"{name} {value:.3g}" for name, value in zip(self.check.needs, self.values, strict=True))
        return f"step {self.since}: {self.check.title} ({figures}). {self.check.meaning} Try: {self.check.remedy}"


def _no_variance(first: Values, last: Values) -> bool:
    return all(share >= 1 for (share,) in last)


def _constant_reward(first: Values, last: Values) -> bool:
    return all(spread < 1e-9 and math.isclose(mean, last[0][1], abs_tol=1e-9) for spread, mean in last)


def _never_ends(first: Values, last: Values) -> bool:
    return all(share >= 1 for (share,) in last)


def _cut_off(first: Values, last: Values) -> bool:
    shares = [share for (share,) in last]
    falls = fmean(shares[:2]) - fmean(shares[-2:]) > 0.1  # answers are learning to end
    return min(shares) >= 0.5 and not falls and not _never_ends(first, last)


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


def _gradient(name: str, metric: str, remedy: str) -> Check:
    return Check(
        name,
        (metric,),
        3,
        _exploded,
        f"`{metric}` not finite, or above 20 and 20 × its median of the first {FIRST_STEPS} steps, in 3 steps running",
        "the gradient norm has exploded",
        "Clipping keeps the direction of a gradient that is mostly noise; weights that are not finite never recover.",
        remedy,
    )


CHECKS: tuple[Check, ...] = (
    Check(
        "no_variance",
        ("groups/zero_variance",),
        5,
        _no_variance,
        "`groups/zero_variance` 1, in 5 steps running",
        "no group has answers with different rewards",
        "Group-relative advantages are 0, and so is the gradient but for KL: nothing is learned from the reward.",
        "read answers and scores in the report; prompts of another difficulty, SFT first, more responses_per_prompt, "
        "algorithm.dynamic_sampling={}",
    ),
    Check(
        "constant_reward",
        ("reward/score_std", "reward/score_mean"),
        5,
        _constant_reward,
        "`reward/score_std` 0 and `reward/score_mean` the same, in 5 steps running",
        "every answer gets the same reward",
        "The reward tells no answers apart: it reads a wrong column, finds no answer in the text, or is saturated.",
        "quartet doctor; the reward's column and pattern; a reward with partial credit",
    ),
    Check(
        "never_ends",
        ("rollout/truncated_frac",),
        5,
        _never_ends,
        "`rollout/truncated_frac` 1, in 5 steps running",
        "no answer ends by itself",
        "The model never samples its end of text: a wrong template or token, a base model, or too low a limit.",
        "the doctor's stop_tokens; rollout.sampling.stop_strings; a larger rollout.sampling.max_new_tokens; SFT first",
    ),
    Check(
        "cut_off",
        ("rollout/truncated_frac",),
        5,
        _cut_off,
        "`rollout/truncated_frac` at least 0.5 in 5 steps running, over which it does not fall by 0.1",
        "most answers are cut off at the limit",
        "Their rewards judge half an answer, and length itself is not learned.",
        "a larger rollout.sampling.max_new_tokens, or a penalty for length (algorithm.overlong)",
    ),
    Check(
        "entropy_collapsed",
        ("policy/entropy",),
        5,
        _collapsed,
        f"`policy/entropy` below 0.05 and a tenth of its mean of the first {FIRST_STEPS} steps, in 5 steps running",
        "the entropy has collapsed",
        "The policy gives one answer to each prompt and explores no more; with the best reward there is, it is done.",
        "a smaller actor.train.optim.lr, a larger algorithm.kl.coef, algorithm.entropy_coef, temperature 1",
    ),
    Check(
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
    Check(
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


class Health:
    """What the checks have found in a run whose steps are told one after the other.

    Attributes:
        findings: by the name of the check, in the order in which they were found first.
        present: names of the checks that find something at the newest step.
    """

    def __init__(self) -> None:
        self.findings: dict[str, Finding] = {}
        self.present: list[str] = []
        self._first: dict[str, list[tuple[float, ...]]] = {check.name: [] for check in CHECKS}
        self._last = {check.name: deque[tuple[float, ...]](maxlen=check.steps) for check in CHECKS}

    def note(self, step: int, metrics: Mapping[str, float]) -> list[Finding]:
        """Takes in the metrics of ``step``; returns what is found for the first time."""
        new: list[Finding] = []
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
            found = Finding(check, step, step, values) if known is None else replace(known, until=step, values=values)
            self.findings[check.name] = found
            new += [found] if known is None else []
        return new

    def metrics(self) -> dict[str, float]:
        """``health/<check>`` of those that find something at the newest step; none in a healthy run."""
        return {f"health/{name}": 1.0 for name in self.present}


def examine(rows: Sequence[Mapping[str, float]]) -> Health:
    """The health of a run by the rows of its ``metrics.jsonl``."""
    health = Health()
    for row in rows:
        health.note(int(row["step"]), row)
    return health
