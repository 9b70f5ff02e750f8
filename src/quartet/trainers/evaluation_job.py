"""`quartet eval`: answers of a model to held-out prompts, scored by rewards, alone or against another model's."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quartet.config import Interrupted, UserError
from quartet.config.common import ModelConfig
from quartet.config.evaluation import ComparisonConfig, EvalRecipe
from quartet.models.directories import load_warnings
from quartet.observe.progress import Progress
from quartet.observe.spans import SpanRecorder
from quartet.rewards.judge import Comparer
from quartet.trainers.checkpoints import model_directory
from quartet.trainers.devices import FrozenModels, precision_on
from quartet.trainers.evaluation import EvaluationModel
from quartet.trainers.evaluation_files import (
    Answer,
    EvaluationCache,
    answer_rows,
    matched,
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
    win_rate,
)
from quartet.trainers.input_sources import (
    ModelLike,
    Reward,
    TokenizerLike,
    as_rewards,
    check_recipe,
    check_unweighted,
    resolve_tokenizer,
    with_names,
)
from quartet.trainers.run import Stopwatch, open_run
from quartet.trainers.run_files import Resume, writing
from quartet.trainers.signals import number_of, run_async, stop_signals


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
        self.run_directory, self.progress, device = open_run(recipe, resume, progress, own_model)
        self.recipe = recipe = self.run_directory.pin(recipe)
        self.judge: AnswerJudge | None = BothOrders(judge) if judge is not None else None
        if judge is None and recipe.compare is not None and recipe.compare.judge is not None:
            self.judge = Comparer(recipe.compare.judge)
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
            engine=recipe.engine,
        )
        opened = self._open_model(_found(recipe.model), model=own_model, tokenizer=own_tokenizer)
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
            self._other = _found(config.as_model())
            resolve_tokenizer(self._other, None)
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
            compared, num_pairs = self._compare(answers, others) if others else None, len(pairs(answers, others))
            if others and not num_pairs == len(answers) == len(others):
                found = f"{len(answers)} answers here, {len(others)} there"
                self._notes.append(f"{num_pairs} pairs of answers compared: {found}")
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
            run.log(0, result.metrics)
            run.tracker.samples(0, "samples/answers", partial(answer_rows, self.path / "answers.jsonl"))
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
            other = self._open_model(self._other)
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
            return evaluation_model.answers(
                recipe.sampling, recipe.samples_per_prompt, recorder, bar, seed=recipe.seed, cache=cache
            )

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


def _found(config: ModelConfig | None) -> ModelConfig | None:
    """The section with the directory of the run or checkpoint that it names."""
    if config is None or config.revision is not None:
        return config
    path = model_directory(config.path, trust_remote_code=config.trust_remote_code)
    return config.model_copy(update={"path": path})


def _identity(answers: Sequence[Answer]) -> list[list[Any]]:
    """What makes these answers others than those of another evaluation."""
    return [[answer.prompt_id, answer.sample, answer.completion] for answer in answers]


def _figure_row(figure: EvaluationMetric) -> dict[str, Any]:
    """A row of the summary's table."""
    return {
        "figure": figure.name,
        "value": figure.value,
        "low": figure.low,
        "high": figure.high,
        "interval": figure.interval,
        "prompts": figure.num_prompts,
    }
