"""Good, same, bad: one model's answers against another's, prompt by prompt and sample by sample."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, Protocol

import torch

from quartet.algorithms.evaluation import Interval, bootstrap_interval, win_rate_interval
from quartet.config import UserError
from quartet.text.examples import PromptText
from quartet.trainers.evaluation import CHUNK, Answer
from quartet.trainers.finished import Finished

Verdict = Literal["good", "same", "bad"]
_VALUE: Mapping[Verdict, float] = {"good": 1.0, "same": 0.5, "bad": 0.0}


class AnswerJudge(Protocol):
    """Who compares two answers to one prompt."""

    async def compare(
        self, prompts: Sequence[PromptText], answers_a: Sequence[str], answers_b: Sequence[str]
    ) -> list[float | None]:
        """Preference for answer A in [-1, 1], 0 for none; None where there is no verdict."""


@dataclass(frozen=True)
class BothOrders:
    """A judge that sees the answers in one order is asked in both; the preference is the mean.

    One that always prefers the first place then calls every pair the same. Without both judgements there is none.
    """

    judge: AnswerJudge

    async def compare(
        self, prompts: Sequence[PromptText], answers_a: Sequence[str], answers_b: Sequence[str]
    ) -> list[float | None]:
        forth = await self.judge.compare(prompts, answers_a, answers_b)
        back = await self.judge.compare(prompts, answers_b, answers_a)
        return [
            None if there is None or here is None else (there - here) / 2
            for there, here in zip(forth, back, strict=True)
        ]


@dataclass(frozen=True)
class Comparison:
    """One pair of answers; ``preference`` is above 0 where the first is better, NaN without a verdict."""

    first: Answer
    second: Answer
    preference: float
    verdict: Verdict | None

    def row(self) -> dict[str, Any]:
        """What ``comparison.jsonl`` keeps."""
        return {
            "prompt_id": self.first.item.prompt_id,
            "sample": self.first.sample,
            "prompt": self.first.item.prompt,
            "completion": self.first.text,
            "against": self.second.text,
            "rewards": {name: _number(value) for name, value in self.first.rewards.items()},
            "against_rewards": {name: _number(value) for name, value in self.second.rewards.items()},
            "preference": _number(self.preference),
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class WinRate:
    """Counts over pairs of answers, and the win rate ``(good + same / 2) / all`` with its interval over prompts."""

    good: int
    same: int
    bad: int
    no_verdict: int
    win_rate: float
    low: float
    high: float
    interval: str

    def metrics(self) -> dict[str, float]:
        num = self.good + self.same + self.bad
        return {
            "eval/win_rate": self.win_rate,
            "eval/good": self.good / num,
            "eval/same": self.same / num,
            "eval/bad": self.bad / num,
            "eval/no_verdict": float(self.no_verdict),
        }


def compare_scores(
    first: Sequence[Answer],
    second: Sequence[Answer],
    score: Callable[[Sequence[Answer]], list[float]],
    tie_margin: float,
) -> list[Comparison]:
    """The higher score wins; scores that differ by no more than ``tie_margin`` are the same."""
    pairs = _pairs(first, second)
    ours, theirs = score([a for a, _ in pairs]), score([b for _, b in pairs])
    return [_decided(a, b, x - y, tie_margin) for (a, b), x, y in zip(pairs, ours, theirs, strict=True)]


async def compare_by_judge(
    first: Sequence[Answer],
    second: Sequence[Answer],
    judge: AnswerJudge,
    tie_margin: float,
    finished: Finished | None = None,
) -> list[Comparison]:
    """The judge's preference wins, beyond ``tie_margin``.

    Args:
        finished: pairs that it has a preference for are not asked about again; those of the others are kept there.
    """
    pairs = _pairs(first, second)
    known = dict(finished.preferences) if finished is not None else {}
    missing = [n for n in range(len(pairs)) if str(n) not in known]
    for start in range(0, len(missing), CHUNK):
        part = missing[start : start + CHUNK]
        asked = [pairs[n] for n in part]
        found = await judge.compare(
            [a.item.prompt for a, _ in asked], [a.text for a, _ in asked], [b.text for _, b in asked]
        )
        for n, preference in zip(part, found, strict=True):
            known[str(n)] = math.nan if preference is None else preference
            if finished is not None and preference is not None:
                finished.keep_preference(str(n), preference)
    return [_decided(a, b, known[str(n)], tie_margin) for n, (a, b) in enumerate(pairs)]


def win_rate(comparisons: Sequence[Comparison], confidence: float, seed: int) -> WinRate:
    """Counts, win rate, and an interval: the score interval of paired proportions where every prompt has one pair, else
    the bootstrap over prompts, since pairs of one prompt hang together.

    Raises:
        UserError: no pair has a verdict.
    """
    counts = Counter(c.verdict for c in comparisons)
    good, same, bad = counts["good"], counts["same"], counts["bad"]
    if not good + same + bad:
        raise UserError(
            "no pair of answers could be compared",
            found=f"{len(comparisons)} pairs, none with a verdict",
            remedy="compare by a reward that applies to these prompts, or see why the judge gave no verdict",
        )
    by_prompt: dict[str, list[float]] = {}
    for comparison in comparisons:
        if comparison.verdict is not None:
            by_prompt.setdefault(comparison.first.item.prompt_id, []).append(_VALUE[comparison.verdict])
    num_pairs = torch.tensor([len(found) for found in by_prompt.values()])
    if int(num_pairs.max()) == 1:
        interval, method = win_rate_interval(good, same, bad, confidence), "score"
    elif len(by_prompt) > 1:
        values = torch.tensor([fmean(found) for found in by_prompt.values()], dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        interval, method = bootstrap_interval(values, generator, confidence, weights_P=num_pairs), "bootstrap"
    else:
        # One prompt says nothing about others, however often it is answered.
        interval, method = Interval(0.0, 1.0), "none"
    rate = (good + same / 2) / (good + same + bad)
    return WinRate(good, same, bad, counts[None], rate, interval.low, interval.high, method)


def _pairs(first: Sequence[Answer], second: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    others = {(b.item.prompt_id, b.sample): b for b in second}
    return [(a, others[key]) for a in first if (key := (a.item.prompt_id, a.sample)) in others]


def _decided(first: Answer, second: Answer, preference: float, tie_margin: float) -> Comparison:
    if math.isnan(preference):
        return Comparison(first, second, preference, None)
    verdict: Verdict = "same" if abs(preference) <= tie_margin else "good" if preference > 0 else "bad"
    return Comparison(first, second, preference, verdict)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
