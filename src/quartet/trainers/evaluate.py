"""`quartet eval`: answers of a model to held-out prompts, scored by rewards, alone or against another model's
(``Evaluator``); and the same during RL on a cadence of its own, with the reward-hacking alarm (``PeriodicEvaluation``).

::

    evaluations/step_00000050.jsonl   every answer with its scores, as in answers.jsonl
    alarms.jsonl                      one line per alarm: the verdict, and the prompts that show it
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quartet.config import Interrupted, UserError
from quartet.config.common import ModelConfig
from quartet.config.evaluation import ComparisonConfig, EvalRecipe, EvaluationConfig
from quartet.data.datasets import PromptData
from quartet.models.directories import load_warnings
from quartet.observe.hacking_alarm import AlarmVerdict, HackingAlarm
from quartet.observe.jsonl import RowAppender
from quartet.observe.jsonl import truncate_after as truncate_rows_after
from quartet.observe.progress import Progress
from quartet.observe.report.collect import read_alarms
from quartet.observe.spans import SpanRecorder
from quartet.rewards.judge import Comparer
from quartet.schedule.iteration import side_by_side
from quartet.schedule.lease_context import LeaseContext
from quartet.schedule.rollout import Rollout
from quartet.text.examples import PromptText
from quartet.text.loading import load_tokenizer, local_or_hub
from quartet.trainers.devices import FrozenModels, precision_on
from quartet.trainers.evaluation import EvaluationModel, prompt_requests, sampling_params, score_groups
from quartet.trainers.evaluation_files import (
    Answer,
    EvaluationCache,
    drop_after,
    evaluation_path,
    matched,
    or_null,
    read_answers,
    write_answers,
    write_rows,
)
from quartet.trainers.evaluation_metrics import (
    AnswerJudge,
    BothOrders,
    EvaluationMetric,
    WinRate,
    check_graded,
    check_named,
    compare_by_judge,
    compare_scores,
    measure,
    metrics_of,
    pairs,
    prompt_means,
    standard_error,
    weighted_scores,
    win_rate,
)
from quartet.trainers.event_loop import run_async
from quartet.trainers.roles import RLRoles
from quartet.trainers.run import Stopwatch, open_run, writing
from quartet.trainers.run_files import Resume
from quartet.trainers.signals import number_of, stop_signals
from quartet.trainers.sources import (
    ModelLike,
    Reward,
    TokenizerLike,
    as_rewards,
    check_recipe,
    check_unweighted,
    with_names,
)


@dataclass(frozen=True)
class EvaluationResult:
    """Figures with their intervals, and files under ``path``: ``answers.jsonl`` with every sample and its scores, where
    there is a comparison also ``against.jsonl`` and ``comparison.jsonl``."""

    path: Path
    num_prompts: int
    metrics: dict[str, float]
    notes: tuple[str, ...] = ()
    """Rows left out of the data or converted."""
    figures: tuple[EvaluationMetric, ...] = ()
    against: tuple[EvaluationMetric, ...] = ()
    """The same figures of the model compared with."""
    comparison: WinRate | None = None


class Evaluator:
    """Generates answers, scores them, and compares them with those of another model.

    Two models are never in memory together: the first is given back before the second is loaded.

    Args:
        recipe: model, data, rewards, sampling, comparison. What it leaves out comes as objects:
        model, tokenizer, rewards, prompts: as for ``RLTrainer``.
        judge: compares pairs of answers in place of a reward, asked in both orders; needs ``recipe.compare``.
        resume: go on with the evaluation in ``recipe.output_dir``: what it has finished is not computed again;
            ``auto``: or start it, without a word.
    """

    def __init__(
        self,
        recipe: EvalRecipe,
        *,
        model: ModelLike | None = None,
        tokenizer: TokenizerLike | None = None,
        rewards: Reward | Sequence[Reward] = (),
        prompts: Sequence[Any] | None = None,
        judge: AnswerJudge | None = None,
        resume: Resume = False,
        progress: Progress | None = None,
    ) -> None:
        check_recipe(recipe, EvalRecipe)
        recipe, own_model, own_tokenizer = with_names(recipe, model, tokenizer)
        self.recipe = recipe
        self.judge: AnswerJudge | None = BothOrders(judge) if judge is not None else None
        if judge is None and recipe.compare is not None and recipe.compare.judge is not None:
            self.judge = Comparer(recipe.compare.judge)
        self.run_directory, self.progress, device = open_run(recipe, resume, progress, own_model)
        self.path = self.run_directory.path
        if recipe.data is not None:
            check_unweighted(recipe.data, "data")
        self._open_model = partial(
            EvaluationModel,
            data=recipe.data,
            reward_configs=recipe.rewards,
            frozen=FrozenModels(device, precision_on(device, recipe.precision), recipe.device != "auto"),
            rewards=as_rewards(rewards),
            prompts=prompts,
        )
        opened = self._open_model(recipe.model, model=own_model, tokenizer=own_tokenizer)
        self._evaluation_model: EvaluationModel | None = opened
        self.prompts, self.weights = opened.prompts, opened.rewards.weights
        with contextlib.ExitStack() as taken:
            # When the rest does not fit, the model is given back as it was.
            taken.callback(opened.close)
            models = [role.name for role in opened.rewards.models]
            self.graded = check_graded(recipe.grading, list(self.weights), models)
            self._stored = self._check_comparison(recipe.compare)
            taken.pop_all()
        self._notes: list[str] = []

    def _check_comparison(self, config: ComparisonConfig | None) -> list[Answer]:
        """Everything about the comparison that can be known before the first answer; returns the answers of a file."""
        if config is None:
            if self.judge is not None:
                raise UserError(
                    "there is nothing for the judge to compare with",
                    found="compare is missing",
                    remedy="set compare.model, or pass no judge",
                )
            return []
        if self.judge is None and not self.weights:
            raise UserError(
                "there is nothing to compare by",
                found="rewards: []",
                remedy="name a reward model, a function or another source under `rewards`",
            )
        check_named("compare.source", config.source, list(self.weights), "the weighted sum")
        if not config.is_file:
            local_or_hub(config.model, "model")
            load_tokenizer(config.tokenizer or config.model)
            return []
        stored = read_answers(Path(config.model))
        matched(stored, self.prompts.items)
        return stored

    def run(self) -> EvaluationResult:
        """All answers, scores and figures.

        Raises:
            Interrupted: Ctrl-C, SIGTERM or SIGUSR1; what is finished is saved, and resumable.
            UserError: a reward's, or the judge has no verdict at all.
        """
        try:
            with stop_signals():
                return self._run()
        except KeyboardInterrupt as stop:
            raise Interrupted(self.path, None, number_of(stop)) from stop

    def _run(self) -> EvaluationResult:
        watch = Stopwatch()
        with self.run_directory as run:
            run.start(0)
            answers, others = self._answers(run.recorder)
            with writing(self.path / "answers.jsonl"):
                write_answers(self.path / "answers.jsonl", answers)
                if others:
                    write_answers(self.path / "against.jsonl", others)
            compared, common = (self._compare(answers, others), pairs(answers, others)) if others else (None, [])
            if others and not len(common) == len(answers) == len(others):
                found = f"{len(answers)} answers here, {len(others)} there"
                self._notes.append(f"{len(common)} pairs of answers compared: {found}")
            figures, against = self._figures(answers), self._figures(others) if others else []
            result = EvaluationResult(
                path=self.path,
                num_prompts=len({answer.prompt_id for answer in answers}),
                metrics=metrics_of(figures) | (compared.metrics() if compared is not None else {}),
                notes=tuple(self._notes),
                figures=tuple(figures),
                against=tuple(against),
                comparison=compared,
            )
            run.tracker.log(0, result.metrics)
            run.finish(self._summary(result, watch.seconds))
        return result

    def _summary(self, result: EvaluationResult, seconds: float) -> dict[str, Any]:
        found: dict[str, Any] = {
            "stages": [{"name": "eval", "seconds": round(seconds, 3), "metrics": result.metrics}],
            "notes": list(result.notes),
            "figures": [_figure_row(figure) for figure in result.figures],
        }
        if result.comparison is not None:
            rate = {"label": "Win rate: good + same / 2", "after": result.comparison.win_rate, "unit": "fraction"}
            found["headline"] = [rate]
            found["comparison"] = asdict(result.comparison)
            found["against"] = [_figure_row(figure) for figure in result.against]
        return found

    # Answers -----------------------------------------------------------------------------------------------

    def _answers(self, recorder: SpanRecorder) -> tuple[list[Answer], list[Answer]]:
        """Those of the model, and those it is compared with (none without a comparison)."""
        evaluation_model, self._evaluation_model = self._evaluation_model, None
        if evaluation_model is None:
            raise RuntimeError("an evaluation runs once; make another Evaluator")
        compare, others = self.recipe.compare, list[Answer]()
        with contextlib.closing(evaluation_model):
            answers = self._of(evaluation_model, recorder, "answers", "answers")
            if compare is not None and compare.is_file:
                with self._cache("against", _identity(self._stored)) as cache:
                    others = evaluation_model.score_stored(self._stored, recorder, cache)
        self._notes += evaluation_model.warnings()
        del evaluation_model
        if compare is not None and not compare.is_file:
            other = self._open_model(ModelConfig(path=compare.model, tokenizer=compare.tokenizer))
            self._notes += load_warnings(other.packed.model)
            with contextlib.closing(other):
                others = self._of(other, recorder, "against", f"answers of {compare.model}")
        return answers, others

    def _cache(self, name: str, about: Any) -> contextlib.closing[EvaluationCache]:
        return contextlib.closing(EvaluationCache(self.path / "finished" / f"{name}.jsonl", about))

    def _of(self, evaluation_model: EvaluationModel, recorder: SpanRecorder, name: str, title: str) -> list[Answer]:
        recipe, codec = self.recipe, evaluation_model.codec
        about = [[item.prompt_id, codec.encode_prompt(item.prompt)] for item in evaluation_model.prompts]
        for warning in evaluation_model.cut_short(recipe.sampling, "sampling.max_new_tokens"):
            self.progress.print(f"{title}: {warning}")
            self._notes.append(f"{title}: {warning}")
        total = len(about) * recipe.samples_per_prompt
        with self._cache(name, about) as cache, self.progress.stage(title, total) as bar:
            return evaluation_model.answers(recipe, recorder, bar, seed=recipe.seed, cache=cache)

    # Figures -----------------------------------------------------------------------------------------------

    def _figures(self, answers: Sequence[Answer]) -> list[EvaluationMetric]:
        scores = {"eval/score_mean": self.weights}
        return measure(answers, scores, self.recipe.grading, self.graded, seed=self.recipe.seed)

    def _compare(self, answers: Sequence[Answer], others: Sequence[Answer]) -> WinRate:
        config, judge = self.recipe.compare, self.judge
        assert config is not None, "called with a comparison"
        if judge is None:
            comparisons = compare_scores(answers, others, self.weights, config.source, config.tie_margin)
        else:
            with contextlib.ExitStack() as stack:
                if isinstance(judge, Comparer):
                    stack.callback(judge.close)
                cache = stack.enter_context(self._cache("verdicts", [_identity(answers), _identity(others)]))
                comparisons = run_async(compare_by_judge(answers, others, judge, config.tie_margin, cache))
        with writing(self.path / "comparison.jsonl"):
            write_rows(self.path / "comparison.jsonl", [comparison.row() for comparison in comparisons])
        return win_rate(comparisons, self.recipe.grading.confidence, self.recipe.seed)


def _identity(answers: Sequence[Answer]) -> list[list[Any]]:
    """What makes these answers others than those of another evaluation."""
    return [[answer.prompt_id, answer.sample, answer.completion] for answer in answers]


def _figure_row(figure: EvaluationMetric) -> dict[str, Any]:
    """A row of the summary's table."""
    middle = {name: getattr(figure, name) for name in ("value", "low", "high", "interval")}
    return {"figure": figure.name, **middle, "prompts": figure.num_prompts}


# During RL -----------------------------------------------------------------------------------------------


class PeriodicEvaluation:
    """What an RL run asks of its held-out prompts, and what it remembers of the answers; nothing where it has none.

    Args:
        path: the run directory.

    Raises:
        UserError: the recipe's section names a reward that there is not.
    """

    def __init__(self, roles: RLRoles, path: Path, progress: Progress) -> None:
        self.config, self.steps = roles.recipe.evaluation or EvaluationConfig(), roles.recipe.steps
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

    async def evaluate(self, leases: LeaseContext, rollout: Rollout, step: int) -> dict[str, float]:
        """Answers, scores and judges after ``step`` complete steps, where an evaluation is due; returns the metrics."""
        if self.prompts is None or not (step % self.config.every_steps == 0 or step == self.steps):
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
        """What keeps the alarm silent, in words."""
        if self.alarm is None or self.prompts is None or len(self.prompts) >= self.alarm.least_prompts:
            return []
        return [
            f"the reward-hacking alarm needs at least {self.alarm.least_prompts} held-out prompts to tell a fall from "
            f"noise; there are {len(self.prompts)}"
        ]

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
            text = (
                f"reward hacking? The held-out score is {verdict.held_out_now:.3g} at step {verdict.step}, it was "
                f"{verdict.held_out_before:.3g} at step {verdict.best_step} (p = {verdict.held_out_p:.1g}), while the "
                f"training reward rose{slope}: compare the answers of both steps in alarms.jsonl or the report"
            )
            self.progress.print(text)
            rows = RowAppender(self.path / "alarms.jsonl")
            rows.append({**asdict(verdict), "text": text, "examples": self._examples(verdict, answers)})
            rows.close()
        return {
            "alarm/reward_hacking": float(verdict.raised),
            "alarm/held_out_p": verdict.held_out_p,
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
            "prompt": _as_text(new.prompt),
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


def _as_text(prompt: PromptText) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
