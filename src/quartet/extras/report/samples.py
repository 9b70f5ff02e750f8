"""Which rollouts a report embeds, and in what form.

A run can hold millions of tokens, a page cannot. Steps are taken evenly, first and last always; within a step
whole groups are taken, those first whose prompt was also seen at other chosen steps. A note says what is left
out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from quartet.config.errors import UserError
from quartet.observe.diagnostics import repetition
from quartet.observe.rollouts import RolloutRecord, action_ids, list_steps, read_step

Item = TypeVar("Item")


@dataclass(frozen=True)
class ReportLimits:
    """How much of a run goes into the page."""

    steps: int = 12
    tokens: int = 120_000
    tokens_per_response: int = 1_024
    responses_per_group: int = 8
    groups_per_step: int = 12
    scanned_steps: int = 120
    echo_characters: int = 600


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """``count`` of ``items`` at even distances, first and last among them; all when there are fewer."""
    if len(items) <= count:
        return list(items)
    if count == 1:
        return [items[-1]]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def compact(value: float | None, digits: int = 5) -> float | int | str | None:
    """A number with ``digits`` significant digits, the text ``nan``, ``inf`` or ``-inf``, or None."""
    if value is None:
        return None
    if not math.isfinite(value):
        return str(float(value))
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def collect_rollouts(
    directory: Path, limits: ReportLimits, warn: Callable[[str], None], only: Sequence[int] | None = None
) -> dict[str, Any] | None:
    """What the token viewer shows, as plain JSON data; None where the run kept no rollouts.

    ``warn`` is told of files that cannot be read; the report does without them. ``only``: of these steps alone.
    """
    steps = list_steps(directory) if only is None else list(only)
    chosen = evenly(steps, limits.steps)
    by_step = {step: records for step in chosen if (records := _read(directory, step, warn))}
    if not by_step:
        return None
    keys: dict[tuple[str, tuple[int, ...]], str] = {}
    prompts: dict[str, Any] = {}
    samples: dict[str, list[Any]] = {}
    embedded = cut = 0
    recurrence = Counter(p for records in by_step.values() for p in {r.prompt_id for r in records})
    for step, records in by_step.items():
        groups = _choose_groups(records, recurrence, limits, limits.tokens // len(by_step))
        taken = [record for group in groups for record in group]
        for record in taken:
            if (key := _prompt_key(record, keys)) not in prompts:
                prompts[key] = _prompt(record, limits)
        samples[str(step)] = [_sample(record, _prompt_key(record, keys), limits) for record in taken]
        cut += sum(len(record.response_ids) > limits.tokens_per_response for record in taken)
        embedded += num_trajectories(taken)
    other_steps = [step for step in evenly(steps, limits.scanned_steps) if step not in chosen]
    total = sum(num_trajectories(records) for records in by_step.values())
    return {
        "steps": list(by_step),
        "prompts": prompts,
        "samples": samples,
        "counts": {str(step): num_trajectories(records) for step, records in by_step.items()},
        "echoes": _echoes(directory, other_steps, set(prompts), limits, warn),
        "note": _note(len(steps), len(by_step), total, embedded, cut, limits),
    }


def num_trajectories(records: Iterable[RolloutRecord]) -> int:
    return len({record.trajectory_id for record in records})


def _prompt_key(record: RolloutRecord, keys: dict[tuple[str, tuple[int, ...]], str]) -> str:
    """The prompt's id on the page; other states that are found under an id (an environment gives a row several) have a
    number behind it."""
    state = (record.prompt_id, tuple(record.prompt_ids))
    if state not in keys:
        number = sum(prompt_id == record.prompt_id for prompt_id, _ in keys)
        keys[state] = f"{record.prompt_id}#{number}" if number else record.prompt_id
    return keys[state]


def _note(steps: int, shown: int, total: int, embedded: int, cut: int, limits: ReportLimits) -> str | None:
    parts = []
    if shown < steps:
        parts.append(f"{shown} of {steps} steps, evenly spaced, with all columns")
    if embedded < total:
        parts.append(f"{embedded:,} of the {total:,} responses of these steps, in whole groups where they fit")
    if cut:
        parts.append(f"{cut} responses cut after {limits.tokens_per_response:,} tokens")
    return "This page holds " + "; ".join(parts) + ". The run directory keeps everything." if parts else None


def _read(directory: Path, step: int, warn: Callable[[str], None]) -> list[RolloutRecord]:
    try:
        return read_step(directory, step)
    except UserError as error:
        warn(f"{error.problem}: {error.found}")
        return []


def _choose_groups(
    records: Iterable[RolloutRecord], recurrence: Counter[str], limits: ReportLimits, token_budget: int
) -> list[list[RolloutRecord]]:
    """Groups in the order of the step, as many as fit the budget, at least one."""
    groups: dict[str, list[RolloutRecord]] = {}
    for record in records:
        groups.setdefault(record.group, []).append(record)
    order = list(groups)
    chosen: list[str] = []
    spent = 0
    for name in sorted(order, key=lambda name: -recurrence[groups[name][0].prompt_id]):
        kept = list(dict.fromkeys(r.trajectory_id for r in groups[name]))[: limits.responses_per_group]
        members = groups[name] = [r for r in groups[name] if r.trajectory_id in kept]
        cost = sum(min(len(r.response_ids), limits.tokens_per_response) for r in members)
        if chosen and (spent + cost > token_budget or len(chosen) == limits.groups_per_step):
            break
        chosen.append(name)
        spent += cost
    return [groups[name] for name in order if name in chosen]


def _sample(record: RolloutRecord, prompt: str, limits: ReportLimits) -> dict[str, Any]:
    cut = limits.tokens_per_response
    return {
        "id": record.sequence_id,
        "trajectory": record.trajectory_id,
        "part": record.part,
        "prompt": prompt,
        "index": record.response_index,
        "group": record.group,
        "version": record.policy_version,
        "finish": record.finish_reason,
        "score": compact(record.score),
        "rewards": {name: compact(value) for name, value in record.rewards.items()},
        "length": len(record.response_ids),
        "repetition": compact(repetition(action_ids(record))[0], 3),
        "ids": record.response_ids[:cut],
        "tokens": record.response_tokens[:cut],
        "columns": {name: _column(values[:cut]) for name, values in record.columns.items()},
    }


def _column(values: list[float]) -> Any:
    """A list of short numbers; a single number where all are the same (masks mostly are)."""
    short = [compact(value) for value in values]
    return short[0] if len(short) > 1 and len(set(map(str, short))) == 1 else short


def _prompt(record: RolloutRecord, limits: ReportLimits) -> dict[str, Any]:
    # the end of a long prompt is what the response answers
    kept = record.prompt_tokens[-limits.tokens_per_response :]
    return {"text": record.prompt_text[-4000:], "tokens": kept, "length": len(record.prompt_ids)}


def _echoes(
    directory: Path, steps: Sequence[int], prompt_ids: set[str], limits: ReportLimits, warn: Callable[[str], None]
) -> dict[str, list[Any]]:
    """Answers to the embedded prompts at steps that are not embedded: score and text only."""
    echoes: dict[str, list[Any]] = {}
    for step in steps:
        groups: dict[str, list[RolloutRecord]] = {}
        for record in _read(directory, step, warn):
            if record.prompt_id in prompt_ids and record.part == 0:
                groups.setdefault(record.prompt_id, []).append(record)
        for prompt_id, members in groups.items():
            scores = [m.score for m in members if m.score is not None and math.isfinite(m.score)]
            echo = {
                "step": step,
                "version": members[0].policy_version,
                "score": compact(members[0].score),
                "mean": compact(fmean(scores)) if scores else None,
                "count": len(members),
                "text": members[0].response_text[: limits.echo_characters],
            }
            echoes.setdefault(prompt_id, []).append(echo)
    return {prompt_id: evenly(found, limits.steps) for prompt_id, found in echoes.items()}
