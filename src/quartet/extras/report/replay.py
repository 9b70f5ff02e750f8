"""A kept trajectory token by token, as lines of text: what the policy sampled, how likely it was, what it earned."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from quartet.config.errors import UserError
from quartet.extras.report.collect import check_run, stage_dirs
from quartet.observe.rollouts import RolloutRecord, list_steps, read_step

_COLUMNS = (("log-prob.", ("rollout_logprobs", "old_logprobs")), ("reward", ("token_rewards",)))
_MORE = (("advantage", ("advantages",)), ("value", ("values",)))
_WIDTH = 24


def kept_trajectory(run_dir: Path, step: int | None, sample: int, stage: str | None = None) -> list[RolloutRecord]:
    """The sequences of one trajectory in their order: one, or several where an environment rewrote the state.

    Args:
        step: None for the newest that was kept.
        sample: place among the step's trajectories, from 0.
        stage: of a run of several, the directory; None for the only one that has kept rollouts, or the last.

    Raises:
        UserError: there is no such run, stage, step or sample, or its file is damaged.
    """
    check_run(run_dir)
    kept = {path.name: path / "rollouts" for path in stage_dirs(run_dir) if list_steps(path / "rollouts")}
    if not kept or (stage is not None and stage not in kept):
        raise UserError(
            "the run has kept no rollouts" if not kept else f"no stage {stage!r} has kept rollouts",
            found=f"{run_dir}: " + (", ".join(kept) or "no rollouts/ with a step in it"),
            remedy="name one of these with --stage" if kept else "RL keeps those of every log.rollouts_every-th step",
        )
    directory = kept[stage] if stage is not None else list(kept.values())[-1]
    records = read_step(directory, list_steps(directory)[-1] if step is None else step)
    names = list(dict.fromkeys(record.trajectory_id for record in records))
    if not 0 <= sample < len(names):
        raise UserError(
            f"no sample {sample} at this step",
            found=f"{len(names)} trajectories" + (f", 0 to {len(names) - 1}" if names else ""),
            remedy="choose one of them with --sample",
        )
    return sorted((r for r in records if r.trajectory_id == names[sample]), key=lambda record: record.part)


def replay_lines(trajectory: Sequence[RolloutRecord]) -> Iterator[str]:
    """The prompt, a line per token of the response, and the sums; token texts are in quotes, as JSON has them."""
    total = 0.0
    for record in trajectory:
        several = f" (sequence {record.part + 1} of {len(trajectory)})" if len(trajectory) > 1 else ""
        yield f"prompt{several}: {record.prompt_text}"
        columns = [(name, found) for name, names in (*_COLUMNS, *_MORE) if (found := _first(record, names)) is not None]
        yield f"{'token':>6}  {'text':{_WIDTH}}" + "".join(f"{name:>11}" for name, _ in columns) + "   probability"
        observed = record.columns.get("observation_mask")
        for i, text in enumerate(record.response_tokens):
            head = f"{i + 1:6}  {json.dumps(text, ensure_ascii=False):{_WIDTH}}"
            if observed is not None and observed[i]:
                yield f"{head}  read, not sampled"
                continue
            values = dict(columns)
            total += values["reward"][i] if "reward" in values and math.isfinite(values["reward"][i]) else 0.0
            bar = "█" * round(12 * math.exp(min(values["log-prob."][i], 0.0))) if "log-prob." in values else ""
            yield head + "".join(f"{column[i]:11.4g}" for _, column in columns) + f"   {bar}"
        version = f"policy version {record.policy_version}"
        yield f"ended by {record.finish_reason} after {len(record.response_ids)} tokens, {version}"
    last = trajectory[-1]
    rewards = ", ".join(f"{name} {value:.4g}" for name, value in last.rewards.items() if value is not None)
    score = "none" if last.score is None else f"{last.score:.4g}"
    yield f"score {score}" + (f" ({rewards})" if rewards else "") + f"; rewards of the tokens together {total:.4g}"


def _first(record: RolloutRecord, names: Sequence[str]) -> list[float] | None:
    return next((record.columns[name] for name in names if name in record.columns), None)
