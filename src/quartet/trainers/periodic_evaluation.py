"""Held-out evaluation during RL: answers on its own cadence, figures, and the reward-hacking alarm.

::

    evaluations/step_00000050.jsonl   every answer with its scores, as in answers.jsonl
    alarms.jsonl                      one line per alarm: the verdict, and the prompts that show it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quartet.config import UserError
from quartet.data.datasets import PromptData
from quartet.observe.files import RowAppender
from quartet.observe.files import truncate_after as truncate_rows_after
from quartet.observe.health import AlarmVerdict, HackingAlarm, read_alarms
from quartet.observe.progress import Progress
from quartet.schedule.iteration import side_by_side
from quartet.schedule.leases import LeaseContext
from quartet.schedule.rollout import Rollout
from quartet.trainers.evaluation import prompt_requests, sampling_params, score_groups
from quartet.trainers.evaluation_files import (
    Answer,
    as_text,
    drop_after,
    evaluation_path,
    or_null,
    read_answers,
    write_answers,
)
from quartet.trainers.evaluation_metrics import (
    check_graded,
    check_named,
    measure,
    metrics_of,
    pairs,
    prompt_means,
    standard_error,
    weighted_scores,
)
from quartet.trainers.roles import RLRoles
from quartet.trainers.run_files import writing


class PeriodicEvaluation:
    """Evaluates an RL run on its held-out prompts and runs the alarm; does nothing where there are no such prompts.

    Args:
        path: the run directory.

    Raises:
        UserError: the recipe's section names a reward that there is not.
    """

    def __init__(self, roles: RLRoles, path: Path, progress: Progress) -> None:
        self.config, self.steps = roles.recipe.held_out, roles.recipe.steps
        self.roles, self.path, self.progress = roles, path, progress
        config, self.prompts = self.config, roles.evaluation_prompts
        self.training_weights, own_weights = roles.rewards.weights, roles.evaluation_rewards.weights
        self.weights = own_weights or self.training_weights
        sources = [*self.training_weights, *own_weights]
        self.graded = check_graded(config.grading, sources, [role.name for role in roles.reward_models])
        self._watched_source = config.alarm.source if config.alarm is not None else None
        check_named("evaluation.alarm.source", self._watched_source, sources, "the evaluation's score")
        self.restore(None)

    # The run's calls ---------------------------------------------------------------------------------------

    def start(self, step: int) -> None:
        """Drops what was written after ``step`` complete steps; a run that goes on writes it again."""
        with writing(self.path):
            drop_after(self.path / "evaluations", step)
            truncate_rows_after(self.path / "alarms.jsonl", step)

    def note_training(self, step: int, metrics: Mapping[str, float]) -> None:
        """The training reward of ``step``: that of all sampled groups where some of them were rejected."""
        reward = metrics.get("reward/sampled_score_mean", metrics.get("reward/score_mean", math.nan))
        if self.alarm is not None:
            self.alarm.note_training(step, reward)

    async def evaluate(
        self, leases: LeaseContext, rollout: Rollout, step: int, *, is_last: bool = False
    ) -> dict[str, float]:
        """Answers, scores and judges after ``step`` complete steps, where an evaluation is due; returns the metrics."""
        if self.prompts is None or not (is_last or step % self.config.every_steps == 0):
            return {}
        # Counted with the step it follows.
        answers = await self._answers(self.prompts, leases, rollout, max(0, step - 1))
        with writing(self.path / "evaluations"):
            write_answers(evaluation_path(self.path / "evaluations", step), answers)
        sums = {"eval/score_mean": self.weights}
        if self.roles.evaluation_rewards.weights:
            sums["eval/training_score_mean"] = self.training_weights
        figures = measure(answers, sums, self.config.grading, self.graded, seed=0, intervals=False)
        scores = prompt_means(answers, self._watched(answers))
        error = standard_error(list(scores.values()))
        found = {**metrics_of(figures), **({} if math.isnan(error) else {"eval/score_se": error})}
        return {**found, **self._sound(step, scores, answers)}

    def state(self) -> dict[str, Any] | None:
        """JSON values for the checkpoint."""
        return self.alarm.state() if self.alarm is not None else None

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """As saved; without a checkpoint, or with one that has no alarm, it begins anew."""
        self.alarm: HackingAlarm | None = None
        if (alarm := self.config.alarm) is not None and self.prompts is not None:
            self.alarm = HackingAlarm(alarm.false_alarm_rate, math.ceil(self.steps / self.config.every_steps))
            if state is not None:
                self.alarm.restore(state)

    def warnings(self) -> list[str]:
        """What keeps the alarm silent, whatever happens, in words."""
        if self.alarm is None or self.prompts is None:
            return []
        num, last = len(self.prompts), math.ceil(self.steps / self.config.every_steps)
        needs = [self.alarm.least_prompts(num_seen) for num_seen in range(1, last + 1)]
        never, unable = "the reward-hacking alarm can never be raised", "held-out prompts cannot tell a fall from noise"
        if self.steps < 3:
            return [f"{never}: a rise shows in 3 steps at least, not in {self.steps}"]
        if num < min(needs):
            found = f"{never}: {num} {unable} in {last} evaluation{'s' * (last > 1)}, {min(needs)} can"
            return [f"{found} (or set a larger evaluation.alarm.false_alarm_rate)"]
        if num < needs[-1]:
            able = max(at for at, need in enumerate(needs, start=1) if num >= need)
            found = f"the reward-hacking alarm can only be raised up to evaluation {able} of {last}"
            return [f"{found}: {num} {unable} later, {needs[-1]} can"]
        return []

    def summary(self) -> dict[str, Any]:
        """What ``summary.json`` says about alarms."""
        if self.alarm is None:
            return {}
        if not self.alarm.raised_at:
            return {"reward_hacking": {"raised": False}}
        steps, path = ", ".join(map(str, self.alarm.raised_at)), self.path / "alarms.jsonl"
        try:
            rows = read_alarms(path) if path.is_file() else []
        except UserError:
            rows = []
        if not rows:  # deleted to make room, perhaps, which must not cost the end of the run
            text = f"reward hacking? The alarm was raised at step {steps}; {path} is gone or damaged"
            return {"reward_hacking": {"raised": True, "text": text, "raised_at_steps": steps}}
        last = rows[-1]
        examples = last.pop("examples")
        return {"reward_hacking": {**last, "raised_at_steps": steps}, "reward_hacking_examples": examples}

    # Answers -----------------------------------------------------------------------------------------------

    async def _answers(self, prompts: PromptData, leases: LeaseContext, rollout: Rollout, step: int) -> list[Answer]:
        """Every held-out prompt's samples; episodes where the run has an environment."""
        roles, config = self.roles, self.config
        scorers = roles.reward_scorers(leases, held_out=True)
        async with rollout.quiet():
            if roles.environment is not None:
                runner, sampling = roles.episode_runner(rollout), sampling_params(config.sampling, roles.codec)
                # Negative indices: no group of the stream has one.
                num, items = config.samples_per_prompt, enumerate(prompts.items)
                begun = [runner.group(-1 - i, item, sampling, num, draw=-1) for i, item in items]
                return await score_groups(await side_by_side(begun), scorers, step=step)
            num, seed = config.samples_per_prompt, roles.recipe.seed
            asked = prompt_requests(prompts, roles.codec, config.sampling, seed=seed, samples=num)
            groups = await rollout.evaluate(asked, step)
        return await score_groups(groups, scorers, step=step)

    # The alarm ---------------------------------------------------------------------------------------------

    def _watched(self, answers: Sequence[Answer]) -> list[float]:
        """The held-out score of each answer: one source, or the evaluation's weighted sum."""
        return weighted_scores(answers, self.weights, self._watched_source)

    def _sound(self, step: int, scores: Mapping[str, float], answers: Sequence[Answer]) -> dict[str, float]:
        verdict = self.alarm.evaluate(step, scores) if self.alarm is not None else None
        if verdict is None:
            return {}
        if verdict.raised:
            slope = "" if verdict.training_slope is None else f" (by {verdict.training_slope:.3g} per step)"
            p, running = min((verdict.held_out_p, ""), (verdict.twice_p, ", this evaluation and the one before"))
            text = (
                f"reward hacking? The held-out score is {verdict.held_out_now:.3g} at step {verdict.step}, it was "
                f"{verdict.held_out_before:.3g} at step {verdict.best_step} (p = {p:.1g}{running}), while the "
                f"training reward rose{slope}: compare the answers of both steps in alarms.jsonl or the report"
            )
            self.progress.print(text)
            rows = RowAppender(self.path / "alarms.jsonl")
            rows.append({**asdict(verdict), "text": text, "examples": self._examples(verdict, answers)})
            rows.close()
        return {
            "alarm/reward_hacking": float(verdict.raised),
            "alarm/held_out_p": min(verdict.held_out_p, verdict.twice_p),
            "alarm/training_p": verdict.training_p,
        }

    def _examples(self, verdict: AlarmVerdict, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        """Prompts whose held-out score fell, those first whose training reward rose most: answers then and now."""
        most = self.config.alarm.examples if self.config.alarm is not None else 0
        path = evaluation_path(self.path / "evaluations", verdict.best_step)
        # The file may have been deleted to make room: an alarm without examples is better than a run that stops.
        try:
            before = read_answers(path) if path.is_file() else []
        except UserError as error:
            self.progress.print(f"the alarm has no examples: {error.problem}: {error.found}")
            before = []

        def trained(found: Sequence[Answer]) -> list[float]:
            return weighted_scores(found, self.training_weights)

        return hacking_examples(before, answers, self._watched, trained)[:most]


Scores = Callable[[Sequence[Answer]], list[float]]


def hacking_examples(
    before: Sequence[Answer], now: Sequence[Answer], held_out: Scores, training: Scores
) -> list[dict[str, Any]]:
    """Every prompt whose held-out score fell, in falling order of the gain in training reward, then of that fall.

    Of a prompt with several samples the one that lost most is shown; samples of one place have the same random numbers.
    """
    both = pairs(before, now)
    former, later = [old for old, _ in both], [new for _, new in both]
    figures = zip(held_out(former), held_out(later), training(former), training(later), strict=True)
    lost: dict[str, tuple[float, float, dict[str, Any]]] = {}
    for (old, new), (score_then, score_now, reward_then, reward_now) in zip(both, figures, strict=True):
        change, gain = score_now - score_then, reward_now - reward_then
        known = lost.get(old.prompt_id)
        if not change < 0 or (known is not None and known[1] <= change):
            continue
        row = {
            "prompt": as_text(new.prompt),
            "before": old.completion,
            "now": new.completion,
            "training_reward_before": or_null(reward_then),
            "training_reward_now": or_null(reward_now),
            "held_out_before": or_null(score_then),
            "held_out_now": or_null(score_now),
            "verdict": "bad",
        }
        lost[old.prompt_id] = (0.0 if math.isnan(gain) else -gain, change, row)
    return [row for _, _, row in sorted(lost.values(), key=lambda found: found[:2])]
