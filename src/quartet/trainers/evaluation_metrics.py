"""From scored answers to figures: mean score, exact match, pass@k, maj@k and win rates, with intervals over prompts.

Also answers on disk.

``answers.jsonl`` and ``evaluations/step_00000050.jsonl`` hold one line per sample::

    {"prompt_id": "p0", "sample": 0, "prompt": "1+2=", "completion": "3", "finish_reason": "stop", "length": 2,
     "rewards": {"exact_match": 1.0, "judge": null}}
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch

from quartet.algorithms.evaluation_math import (
    Interval,
    bootstrap_interval,
    majority_vote,
    pass_at_k,
    wilson_interval,
    win_rate_interval,
)
from quartet.config import UserError
from quartet.config.errors import escape_control
from quartet.config.evaluation import AnswerConfig, GradingConfig, NumberAnswer, RegexAnswer
from quartet.observe.files import dataclass_from_row, read_objects_strictly, replace_atomically
from quartet.observe.trackers import Row
from quartet.rewards.judge import JudgeComparer
from quartet.rewards.source import combine_scores
from quartet.text.examples import PromptText, shown_content

_FILE_NAME = re.compile(r"step_(\d{8})\.jsonl")


@dataclass(frozen=True)
class ScoredAnswer:
    """One sample of a prompt and its scores by reward source (NaN: does not apply). ``length`` is in tokens."""

    prompt_id: str
    sample: int
    prompt: PromptText
    completion: str
    finish_reason: str
    length: int
    rewards: Mapping[str, float]


_KEYS = {field.name for field in fields(ScoredAnswer)}


def nan_to_none(value: float) -> float | None:
    """Returns the value, or None for NaN, which JSON does not have."""
    return None if math.isnan(value) else value


def rewards_without_nan(rewards: Mapping[str, float]) -> dict[str, float | None]:
    return {name: nan_to_none(value) for name, value in rewards.items()}


def _nan_for_nulls(rewards: Mapping[str, float | None]) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in rewards.items()}


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes JSON lines, whole or not at all; text is not escaped, except lone surrogates."""
    # Of a picture where it is from.
    text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False, default=str) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_atomically(path, text.encode("utf-8", errors="backslashreplace"))


def write_answers(path: Path, answers: Sequence[ScoredAnswer]) -> None:
    write_json_lines(path, [{**vars(answer), "rewards": rewards_without_nan(answer.rewards)} for answer in answers])


def read_answers(path: Path) -> list[ScoredAnswer]:
    """Reads the answers of an evaluation.

    Raises:
        UserError: the file is damaged, or cannot be read.
    """

    def answer(row: dict[str, Any]) -> ScoredAnswer:
        values = {"length": 0} | {name: row[name] for name in _KEYS & row.keys()}
        return dataclass_from_row(ScoredAnswer, {**values, "rewards": _nan_for_nulls(row.get("rewards", {}))})

    return read_objects_strictly(path, answer)


def prompt_as_text(prompt: PromptText) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {shown_content(message['content'])}" for message in prompt)


def answer_rows(path: Path, num: int) -> list[Row]:
    """Returns the first ``num`` answers of a file for people to read; none where it is gone."""
    answers = read_answers(path)[:num] if path.is_file() else []
    return [
        {
            "prompt": escape_control(prompt_as_text(answer.prompt)),
            "response": escape_control(answer.completion),
            "finish_reason": answer.finish_reason,
            "tokens": answer.length,
            **{f"reward/{name}": nan_to_none(value) for name, value in answer.rewards.items()},
        }
        for answer in answers
    ]


# One file per evaluation of a run --------------------------------------------------------------------------


def evaluation_path(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}.jsonl"


def delete_evaluations_after(directory: Path, step: int) -> None:
    """Deletes the files of evaluations after ``step`` complete steps."""
    for path in directory.glob("step_*.jsonl"):
        match = _FILE_NAME.fullmatch(path.name)
        if match and int(match[1]) > step:
            path.unlink()


_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
LENGTH = "eval/length_mean"
JUDGED_TOGETHER = 64
"""Pairs of answers that a judge is asked about at once."""
Extract = Callable[[str], str | None]


@dataclass(frozen=True)
class EvaluationMetric:
    """A mean over prompts and where it may lie; ``interval`` names the method, None where there is none.

    ``num_prompts`` counts the prompts that have a value at all.
    """

    name: str
    value: float
    num_prompts: int
    low: float | None = None
    high: float | None = None
    interval: str | None = None


def compute_metrics(
    answers: Sequence[ScoredAnswer],
    scores: Mapping[str, Mapping[str, float]],
    grading: GradingConfig,
    graded: Sequence[str],
    *,
    seed: int,
    intervals: bool = True,
) -> list[EvaluationMetric]:
    """Computes every figure of the answers. A prompt to which a source does not apply has no part in that source's
    figures.

    ======================================= =====================================================================
    ``eval/<source>``                       mean score of a prompt's samples
    the names of ``scores``                 the same for a weighted sum of sources
    ``eval/<source>/exact_match``           share of a prompt's samples that are right (source in ``graded``)
    ``eval/<source>/pass@k``, ``/maj@k``    see ``algorithms.evaluation``
    ``eval/length_mean``, ``truncated_frac`` of answers; in tokens
    ======================================= =====================================================================

    Args:
        scores: weights of the sources by figure, mostly ``{"eval/score_mean": {...}}``.
        graded: sources that judge right and wrong.
        seed: of the resampling.
        intervals: False leaves them out.
    """
    groups, sources = group_by_prompt(answers), sorted({name for answer in answers for name in answer.rewards})

    def means(values: Sequence[float]) -> list[float]:
        return list(prompt_means(answers, values).values())

    values = {f"eval/{name}": means([a.rewards.get(name, math.nan) for a in answers]) for name in sources}
    values |= {name: means(weighted_scores(answers, weights)) for name, weights in scores.items()}
    for source in [name for name in sources if name in graded]:
        values |= _graded(groups, source, grading, max(map(len, groups)), build_extractor(grading.answer))
    values[LENGTH] = means([float(a.length) for a in answers])
    values["eval/truncated_frac"] = means([float(a.finish_reason == "length") for a in answers])
    kept = {name: [v for v in found if not math.isnan(v)] for name, found in values.items()}
    plain = [EvaluationMetric(name, sum(v) / len(v), len(v)) for name, v in kept.items() if v]
    if not intervals:
        return plain
    return [_with_interval(figure, kept[figure.name], grading.confidence, seed) for figure in plain]


def metric_values(figures: Sequence[EvaluationMetric]) -> dict[str, float]:
    return {figure.name: figure.value for figure in figures}


def group_by_prompt(answers: Sequence[ScoredAnswer]) -> list[list[ScoredAnswer]]:
    """Returns the samples of each prompt, in order."""
    found: dict[str, list[ScoredAnswer]] = {}
    for answer in answers:
        found.setdefault(answer.prompt_id, []).append(answer)
    return list(found.values())


def weighted_scores(
    answers: Sequence[ScoredAnswer], weights: Mapping[str, float], source: str | None = None
) -> list[float]:
    """Returns each answer's weighted sum of the sources that apply, as in training; NaN where none
    does.

    Args:
        source: the score of this source alone.
    """
    if source is not None:
        return [answer.rewards.get(source, math.nan) for answer in answers]
    if not weights or not answers:
        return [math.nan] * len(answers)
    by_source = {name: torch.tensor([a.rewards.get(name, math.nan) for a in answers]) for name in weights}
    total, applies = combine_scores(by_source, weights)
    return torch.where(applies, total, math.nan).tolist()


def prompt_means(answers: Sequence[ScoredAnswer], scores: Sequence[float]) -> dict[str, float]:
    """Returns the mean score of the samples of each prompt by its id, one score per answer; NaN where none has one."""
    found: dict[str, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        found.setdefault(answer.prompt_id, []).append(score)
    return {prompt_id: _mean(values) for prompt_id, values in found.items()}


def standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean of the values that are not NaN; NaN for fewer than two."""
    kept = torch.tensor([value for value in values if not math.isnan(value)], dtype=torch.float64)
    return float(kept.std() / math.sqrt(len(kept))) if len(kept) > 1 else math.nan


def resolve_graders(grading: GradingConfig, sources: Sequence[str], models: Sequence[str]) -> tuple[str, ...]:
    """Returns the sources that judge right and wrong: those named, or all but reward models.

    Raises:
        UserError: a name that no source has.
    """
    for name in grading.sources or ():
        check_source_exists("grading.sources", name, sources, "all but reward models")
    return grading.sources if grading.sources is not None else tuple(n for n in sources if n not in models)


def check_source_exists(key: str, source: str | None, sources: Sequence[str], otherwise: str) -> None:
    """Raises a UserError where ``key`` of the recipe names a source of reward that there is not."""
    if source is not None and source not in sources:
        raise UserError(
            f"{key} names a reward that there is not",
            found=f"{source!r}; the rewards are {', '.join(sources) or 'none'}",
            remedy=f"name one of them, or leave {key} out for {otherwise}",
        )


# Right and wrong -------------------------------------------------------------------------------------------


def _graded(
    groups: Sequence[Sequence[ScoredAnswer]], source: str, grading: GradingConfig, samples: int, extract: Extract
) -> dict[str, list[float]]:
    """Returns the values per prompt; a prompt with fewer samples that the source applies to than a k has no value at
    that k."""
    applying = [[a for a in group if not math.isnan(a.rewards.get(source, math.nan))] for group in groups]
    right = [[a.rewards[source] >= grading.threshold for a in group] for group in applying]
    found = {f"eval/{source}/exact_match": [_mean([float(r) for r in row]) for row in right]}
    num = torch.tensor([len(row) for row in right])
    num_right = torch.tensor([sum(row) for row in right])
    for k in grading.passes(samples):
        enough = num >= k
        if bool(enough.any()):
            found[f"eval/{source}/pass@{k}"] = pass_at_k(num[enough], num_right[enough], k).tolist()
    for k in grading.majorities(samples):
        if values := _votes(applying, right, k, extract):
            found[f"eval/{source}/maj@{k}"] = values
    return found


def _votes(
    groups: Sequence[Sequence[ScoredAnswer]], right: Sequence[Sequence[bool]], k: int, extract: Extract
) -> list[float]:
    """Returns per prompt the mean over its votes: samples 1 … k, k + 1 … 2k and so on, as many as are complete.

    Votes of disjoint samples are independent, so their mean is unbiased, and no draw of samples is needed.
    """
    values = []
    for group, marks in zip(groups, right, strict=True):
        num_votes = len(group) // k
        if not num_votes:
            continue
        classes: dict[str, int] = {}
        answers = [extract(a.completion) for a in group[: num_votes * k]]
        votes = [-1 if text is None else classes.setdefault(text, len(classes)) for text in answers]
        value = majority_vote(
            torch.tensor(votes).view(num_votes, k), torch.tensor(marks[: num_votes * k]).view(num_votes, k)
        )
        values.append(float(value.mean()))
    return values


def build_extractor(config: AnswerConfig) -> Extract:
    """Makes the function ``completion → answer``, None where there is none; equal answers give equal text."""
    if isinstance(config, NumberAnswer):
        return _last_number
    if isinstance(config, RegexAnswer):
        pattern = re.compile(config.pattern)
        return lambda text: _last_match(pattern, text)
    return lambda text: text.strip() or None


def _last_match(pattern: re.Pattern[str], text: str) -> str | None:
    matches = list(pattern.finditer(text))
    if not matches:
        return None
    found = matches[-1].group(1) if pattern.groups else matches[-1].group()
    return found.strip() if found is not None and found.strip() else None


def _last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    if not found:
        return None
    try:
        number = Decimal(found[-1].replace(",", "")).normalize()
    except ArithmeticError:  # an exponent beyond what Decimal holds
        return str(found[-1])
    return str(number + 0)  # no negative zero


# Intervals -------------------------------------------------------------------------------------------------


def _with_interval(figure: EvaluationMetric, values: Sequence[float], confidence: float, seed: int) -> EvaluationMetric:
    """Adds the interval: proportions (every prompt 0 or 1) get Wilson's interval, other means of two prompts or more
    the bootstrap's."""
    if figure.name != LENGTH and all(value in (0.0, 1.0) for value in values):
        low, high = wilson_interval(figure.value, len(values), confidence)
        return replace(figure, low=low, high=high, interval="wilson")
    if len(values) < 2:
        return figure
    generator = torch.Generator().manual_seed(seed)
    low, high = bootstrap_interval(torch.tensor(values, dtype=torch.float64), generator, confidence)
    return replace(figure, low=low, high=high, interval="bootstrap")


def _mean(values: Sequence[float]) -> float:
    """Returns the mean of the values that are not NaN; NaN where there are none."""
    kept = [value for value in values if not math.isnan(value)]
    return sum(kept) / len(kept) if kept else math.nan


# One model against another ---------------------------------------------------------------------------------

PairwiseVerdict = Literal["good", "same", "bad"]
_VALUE: Mapping[PairwiseVerdict, float] = {"good": 1.0, "same": 0.5, "bad": 0.0}


@dataclass(frozen=True)
class AnswerComparison:
    """One pair of answers; ``preference`` is above 0 where the first is better, NaN without a verdict."""

    first: ScoredAnswer
    second: ScoredAnswer
    preference: float
    verdict: PairwiseVerdict | None

    def row(self) -> dict[str, Any]:
        """Returns what ``comparison.jsonl`` keeps."""
        return {
            "prompt_id": self.first.prompt_id,
            "sample": self.first.sample,
            "prompt": self.first.prompt,
            "completion": self.first.completion,
            "against": self.second.completion,
            "rewards": rewards_without_nan(self.first.rewards),
            "against_rewards": rewards_without_nan(self.second.rewards),
            "preference": nan_to_none(self.preference),
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
    first: Sequence[ScoredAnswer],
    second: Sequence[ScoredAnswer],
    weights: Mapping[str, float],
    source: str | None,
    tie_margin: float,
) -> list[AnswerComparison]:
    """Compares by scores: the higher score wins (``weighted_scores``); scores that differ by no more than
    ``tie_margin`` are the same."""
    both = pair_answers(first, second)
    ours, theirs = (weighted_scores([pair[k] for pair in both], weights, source) for k in (0, 1))
    return [_decided(a, b, x - y, tie_margin) for (a, b), x, y in zip(both, ours, theirs, strict=True)]


async def compare_by_judge(
    first: Sequence[ScoredAnswer], second: Sequence[ScoredAnswer], judge: JudgeComparer, tie_margin: float
) -> list[AnswerComparison]:
    """Compares by a judge: the judge's preference wins, beyond ``tie_margin``."""
    both, found = pair_answers(first, second), list[AnswerComparison]()
    for start in range(0, len(both), JUDGED_TOGETHER):
        asked = both[start : start + JUDGED_TOGETHER]
        preferences = await judge.compare(
            [a.prompt for a, _ in asked], [a.completion for a, _ in asked], [b.completion for _, b in asked]
        )
        for (a, b), preference in zip(asked, preferences, strict=True):
            found.append(_decided(a, b, math.nan if preference is None else preference, tie_margin))
    return found


def win_rate(comparisons: Sequence[AnswerComparison], confidence: float, seed: int) -> WinRate:
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
            by_prompt.setdefault(comparison.first.prompt_id, []).append(_VALUE[comparison.verdict])
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


def pair_answers(
    first: Sequence[ScoredAnswer], second: Sequence[ScoredAnswer]
) -> list[tuple[ScoredAnswer, ScoredAnswer]]:
    """Pairs answers to the same prompt and of the same place, which have the same random numbers."""
    others = {(b.prompt_id, b.sample): b for b in second}
    return [(a, others[key]) for a in first if (key := (a.prompt_id, a.sample)) in others]


def _decided(first: ScoredAnswer, second: ScoredAnswer, preference: float, tie_margin: float) -> AnswerComparison:
    if math.isnan(preference):
        return AnswerComparison(first, second, preference, None)
    verdict: PairwiseVerdict = "same" if abs(preference) <= tie_margin else "good" if preference > 0 else "bad"
    return AnswerComparison(first, second, preference, verdict)
