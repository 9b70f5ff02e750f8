"""A model's answers to prompts, several per prompt where asked for, and their scores by source.

::

    prompt_requests ──► completions, or episodes ──► groups ──► score_groups ──► answers with scores

``quartet eval`` and the iterated reward model generate with an ``EvaluationModel``, which has the process to itself; an
RL run with its own rollout (``PeriodicEvaluation``); ``quartet generate`` answers without scores (``generate``).
What answers are worth is measured in ``evaluation_metrics.py``. ``Evaluator`` is ``quartet eval``: a model's answers to
held-out prompts, scored by rewards, alone or against another model's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from quartet.batch.ragged import join_columns
from quartet.batch.trajectory import CUT_OFF, REWARD_PREFIX, Trajectories, TrajectoryEnd, num_policy_tokens
from quartet.config import Interrupted, UserError
from quartet.config.choices import EngineConfig, RewardConfig
from quartet.config.common import DataConfig, ModelConfig, SamplingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig, is_served
from quartet.config.evaluation import ComparisonConfig, EvalRecipe
from quartet.config.run import PicturesConfig
from quartet.data.datasets import PromptData, PromptItem
from quartet.models.directories import load_warnings
from quartet.models.loading import load_causal_lm
from quartet.models.packed_model import PackedCausalLM
from quartet.observe.progress import Progress, ProgressBar
from quartet.observe.spans import SpanRecorder
from quartet.rewards.judge import JudgeComparer
from quartet.rollout.engine import NativeEngine
from quartet.rollout.protocol import Completion, Request, SamplingParams, StepEngine
from quartet.rollout.sampler import sample_seed
from quartet.schedule.groups import PromptGroup, group_batch, make_chunk, single_turn_trajectory
from quartet.schedule.iteration import Chunk, Scorer, score_chunk
from quartet.schedule.leases import LeaseContext, default_arbiter
from quartet.schedule.role_group import LocalGroup
from quartet.schedule.rollout_worker import PromptRequest, completion_text, sampling_params
from quartet.text.examples import PromptText
from quartet.text.tokenizer import TextCodec, check_vocabulary
from quartet.trainers.checkpoints import model_directory
from quartet.trainers.devices import META, FrozenModels, resolve_precision
from quartet.trainers.engines import frozen_model_engine, has_model_directory
from quartet.trainers.evaluation_metrics import (
    EvaluationMetric,
    ScoredAnswer,
    WinRate,
    answer_rows,
    check_source_exists,
    compare_by_judge,
    compare_scores,
    compute_metrics,
    metric_values,
    resolve_graders,
    win_rate,
    write_answers,
    write_json_lines,
)
from quartet.trainers.input_sources import (
    ModelLike,
    Reward,
    TokenizerLike,
    as_rewards,
    check_recipe,
    connect_pictures,
    context_length,
    feature_store,
    load_prompts,
    open_pictures,
    resolve_model,
    resolve_tokenizer,
    vocabulary_size,
    with_names,
)
from quartet.trainers.model_loader import (
    Rewards,
    RewardSources,
    check_reward_columns,
    reward_functions,
    reward_models,
)
from quartet.trainers.run import Stopwatch, open_run
from quartet.trainers.run_files import Resume, naming_write_errors
from quartet.trainers.signals import run_async, signal_number, stop_signals

_NATIVE = NativeEngineConfig()
CHUNK = 64
"""Answers that are scored together."""


# What is asked -------------------------------------------------------------------------------------------


def prompt_requests(
    prompts: PromptData, codec: TextCodec, sampling: SamplingConfig, *, seed: int, samples: int
) -> list[tuple[PromptItem, PromptRequest]]:
    """Returns what an evaluation asks for each prompt."""
    params = sampling_params(sampling, codec)
    return [
        (item, PromptRequest.of(f"eval.{i}", item, params, seed=seed, draw=-1, num=samples))
        for i, item in enumerate(prompts)
    ]


# Scores --------------------------------------------------------------------------------------------------


async def score_groups(groups: Sequence[PromptGroup], scorers: Sequence[Scorer], *, step: int) -> list[ScoredAnswer]:
    """Returns every trajectory as an answer with the scores of all ``scorers``, prompt after prompt; of several turns
    the last action is the text.

    Args:
        step: the step that the spans of scoring belong to.
    """
    most = max((len(Trajectories.of(group.batch)) for group in groups), default=1)
    per_chunk, found = max(1, CHUNK // max(1, most)), list[ScoredAnswer]()
    for number, start in enumerate(range(0, len(groups), per_chunk)):
        part = groups[start : start + per_chunk]
        scores = iter(await _scored(make_chunk(step, number, part), scorers))
        found += [answer for group in part for answer in _answers(group, scores)]
    return found


async def _scored(chunk: Chunk, scorers: Sequence[Scorer]) -> list[dict[str, float]]:
    """Returns the scores of each trajectory by source."""
    batch = join_columns(chunk.data, *await score_chunk(scorers, chunk))
    final_N = Trajectories.of(batch).final_N
    columns = {name: column[final_N].tolist() for name, column in batch.sequence.items()}
    scores = {name.removeprefix(REWARD_PREFIX): c for name, c in columns.items() if name.startswith(REWARD_PREFIX)}
    return [{name: float(column[n]) for name, column in scores.items()} for n in range(len(final_N))]


def _answers(group: PromptGroup, rewards: Iterator[dict[str, float]]) -> Iterator[ScoredAnswer]:
    batch, item, trajectories = group.batch, group.prompt, Trajectories.of(group.batch)
    lengths = num_policy_tokens(batch, trajectories).tolist()
    for r, (last, length) in enumerate(zip(trajectories.final_N.tolist(), lengths, strict=True)):
        reason = batch.objects["finish_reason"][last]
        # Cut off is cut off, by whichever limit.
        reason = "length" if reason in CUT_OFF else reason
        text = batch.objects["completion"][last]
        scores = next(rewards)
        if reason == TrajectoryEnd.FAILED:
            scores = dict.fromkeys(scores, math.nan)
        yield ScoredAnswer(item.prompt_id, r, item.prompt, text, reason, int(length), scores)


# Plain generation ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GeneratedText:
    """One completion: its text (without end-of-text or stop string), why it ended, and the raw completion."""

    text: str
    finish_reason: str
    completion: Completion


def generate(
    packed: PackedCausalLM,
    codec: TextCodec,
    prompts: Sequence[PromptText],
    sampling: SamplingParams,
    *,
    num_responses: int = 1,
    seed: int = 0,
    max_running: int = 64,
    engine: StepEngine | None = None,
    on_done: Callable[[int], None] | None = None,
) -> list[list[GeneratedText]]:
    """Generates completions of every prompt, ``num_responses`` each, in order.

    Args:
        sampling: applies to all; every response gets its own seed, derived from ``seed``, prompt place and place.
        engine: what generates; None: the native engine, with ``max_running``.
        on_done: called with the number of completions finished by each engine step.
    """
    engine = engine or NativeEngine(packed, max_running=max_running, decode=codec.decode_completion)
    stops = tuple(sorted({*sampling.stop_token_ids, *codec.eos_ids}))
    encoded = [tuple(codec.encode_prompt(prompt)) for prompt in prompts]
    requests = [
        Request(f"{p}.{r}", str(p), ids, replace(sampling, stop_token_ids=stops, seed=sample_seed(seed, 0, p, r)))
        for p, ids in enumerate(encoded)
        for r in range(num_responses)
    ]

    def report(completions: Sequence[Completion]) -> None:
        if on_done is not None:
            on_done(len(completions))

    found = iter(run_requests(engine, requests, report))
    return [
        [GeneratedText(completion_text(codec, ids, c), c.finish_reason.value, c) for c in islice(found, num_responses)]
        for ids in encoded
    ]


def run_requests(
    engine: StepEngine,
    requests: Sequence[Request],
    on_done: Callable[[Sequence[Completion]], None] | None = None,
) -> list[Completion]:
    """Returns the completions of the requests, in their order, by an engine that does nothing else meanwhile.

    Args:
        on_done: called with the completions of each engine step that finished any.
    """
    engine.submit(requests)
    found: dict[str, Completion] = {}
    while engine.has_work:
        finished = engine.step()
        found.update({completion.request_id: completion for completion in finished})
        if finished and on_done is not None:
            on_done(finished)
    return [found[request.request_id] for request in requests]


# A model alone -------------------------------------------------------------------------------------------


def completions_as_group(
    codec: TextCodec, index: int, item: PromptItem, completions: Sequence[Completion], texts: Sequence[str] = ()
) -> PromptGroup:
    """Makes a group of completions of one prompt as trajectories of one turn, with their texts; those given where they
    are known."""
    ids = tuple(codec.encode_prompt(item.prompt))
    texts = texts or [completion_text(codec, ids, one) for one in completions]
    made = [single_turn_trajectory(ids, one, text) for one, text in zip(completions, texts, strict=True)]
    return PromptGroup.of(index, item, group_batch(index, made))


class EvaluationModel:
    """A model that answers prompts with the process to itself, and the rewards that score its answers.

    They are what the recipe's parts name, or the objects passed in their place; ``close`` gives all of it back.

    Args:
        frozen: where the models go, and in which precision.
        engine: what is to answer; one that reads the weights itself leaves the model here without contents.

    Raises:
        UserError: model, tokenizer, data and rewards do not fit together.
    """

    def __init__(
        self,
        config: ModelConfig | None,
        data: DataConfig | None,
        reward_configs: Sequence[RewardConfig],
        *,
        frozen: FrozenModels,
        engine: EngineConfig = _NATIVE,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        rewards: Rewards = (),
        prompts: Sequence[Any] | None = None,
        pictures: PicturesConfig | None = None,
    ) -> None:
        text = resolve_tokenizer(config, tokenizer)
        is_apart = model is None and is_served(engine) and (engine.has_own_weights or has_model_directory(config))
        causal = resolve_model(config, model, partial(load_causal_lm, empty=is_apart), "model")
        check_vocabulary(text, vocabulary_size(causal))
        reads = open_pictures(config, causal, tokenizer, pictures or PicturesConfig())
        self.codec = TextCodec.of(text, causal.generation_config, reads)
        self.prompts = load_prompts(data, prompts, self.codec, context_length(causal), "data", check_all=True)
        functions = reward_functions(reward_configs, rewards)
        check_reward_columns(functions, self.prompts, self.codec)
        models = reward_models(reward_configs, rewards, self.codec, TrainConfig(), frozen)
        self.rewards = RewardSources(models, functions)
        placed = replace(frozen, device=META) if is_apart else frozen
        self.packed = placed.causal(causal, is_user_object=model is not None)
        features = feature_store(self.codec)
        for one in (self.packed, *(role.model for role in models if role.codec is None)):
            connect_pictures(one, features)
        self._config, self._engine = config, engine
        self._device = frozen.device if is_apart else self.packed.device

    def close(self) -> None:
        """Gives the models back their own attention and closes the rewards."""
        for model in (self.packed, *(role.model for role in self.rewards.models)):
            model.release()
        self.rewards.close()

    def warnings(self) -> list[str]:
        """Tells of rows left out or converted, what is changed about the model, and samples that rewards left out, in
        words."""
        found = [*self.prompts.remarks, *self.packed.warnings]
        found += [warning for role in self.rewards.models for warning in load_warnings(role.model.model)]
        return found + self.rewards.warnings()

    def answers(
        self,
        sampling: SamplingConfig,
        samples: int,
        recorder: SpanRecorder,
        bar: ProgressBar,
        *,
        seed: int,
    ) -> list[ScoredAnswer]:
        """Returns ``samples`` answers to every prompt, scored. ``bar`` is told how many are generated."""
        asked = prompt_requests(self.prompts, self.codec, sampling, seed=seed, samples=samples)
        requests = []
        for item, request in asked:
            ids = tuple(self.codec.encode_prompt(item.prompt))
            requests += [Request(name, request.group, ids, sampling) for name, sampling in request.samples.items()]
        with frozen_model_engine(self._engine, self.packed, self.codec, self._config, self._device) as engine:
            completions = iter(run_requests(engine, requests, lambda finished: bar.advance(len(finished))))
        groups = [
            completions_as_group(self.codec, i, item, list(islice(completions, samples)))
            for i, (item, _) in enumerate(asked)
        ]
        return run_async(score_groups(groups, self._scorers(recorder), step=0))

    def _scorers(self, recorder: SpanRecorder) -> Sequence[Scorer]:
        workers = {role.name: role.worker() for role in self.rewards.models}
        arbiter = default_arbiter({name: worker.sizes() for name, worker in workers.items()}, version=0)
        groups = {name: LocalGroup(worker) for name, worker in workers.items()}
        return self.rewards.scorers(LeaseContext(arbiter, recorder), groups)


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
        resume: make the evaluation in ``recipe.output_dir`` anew; ``auto``: or start it, without a word.
    """

    def __init__(
        self,
        recipe: EvalRecipe,
        *,
        model: ModelLike | None = None,
        tokenizer: TokenizerLike | None = None,
        rewards: Reward | Sequence[Reward] = (),
        prompts: Sequence[Any] | None = None,
        resume: Resume = False,
        progress: Progress | None = None,
    ) -> None:
        check_recipe(recipe, EvalRecipe)
        recipe, own_model, own_tokenizer = with_names(recipe, model, tokenizer)
        self.run_directory, self.progress, device = open_run(recipe, resume, progress, own_model)
        self.recipe = recipe = self.run_directory.pin(recipe)
        asked = recipe.compare.judge if recipe.compare is not None else None
        self.judge = JudgeComparer(asked) if asked is not None else None
        self.path = self.run_directory.path
        self._open_model = partial(
            EvaluationModel,
            data=recipe.data,
            reward_configs=recipe.rewards,
            frozen=FrozenModels(device, resolve_precision(device, recipe.precision), recipe.device != "auto"),
            rewards=as_rewards(rewards),
            prompts=prompts,
            engine=recipe.engine,
            pictures=recipe.pictures,
        )
        opened = self._open_model(_found(recipe.model), model=own_model, tokenizer=own_tokenizer)
        self._evaluation_model: EvaluationModel | None = opened
        self.prompts, self.weights = opened.prompts, opened.rewards.weights
        with contextlib.ExitStack() as taken:
            # When the rest does not fit, the model is given back as it was.
            taken.callback(opened.close)
            models = [role.name for role in opened.rewards.models]
            self.graded = resolve_graders(recipe.grading, list(self.weights), models)
            self._check_comparison(recipe.compare)
            taken.pop_all()
        self._notes: list[str] = []

    def _check_comparison(self, config: ComparisonConfig | None) -> None:
        """Checks everything about the comparison that can be known before the first answer."""
        if config is None:
            return
        if self.judge is None and not self.weights:
            raise UserError(
                "there is nothing to compare by",
                found="rewards: []",
                remedy="name a reward model, a function or another source under `rewards`",
            )
        check_source_exists("compare.source", config.source, list(self.weights), "the weighted sum")
        self._other = _found(config.as_model())
        resolve_tokenizer(self._other, None)

    def run(self) -> EvaluationResult:
        """Makes all answers, scores and figures.

        Raises:
            Interrupted: Ctrl-C, SIGTERM or SIGUSR1.
            UserError: a reward's, or the judge has no verdict at all.
        """
        try:
            with stop_signals():
                return self._run()
        except KeyboardInterrupt as stop:
            raise Interrupted(self.path, None, signal_number(stop)) from stop

    def _run(self) -> EvaluationResult:
        watch = Stopwatch()
        with self.run_directory as run:
            run.start(0)
            answers, others = self._answers(run.recorder)
            with naming_write_errors(self.path / "answers.jsonl"):
                write_answers(self.path / "answers.jsonl", answers)
                if others:
                    write_answers(self.path / "against.jsonl", others)
            compared = self._compare(answers, others) if others else None
            figures, against = self._figures(answers), self._figures(others) if others else []
            result = EvaluationResult(
                path=self.path,
                num_prompts=len({answer.prompt_id for answer in answers}),
                metrics=metric_values(figures) | (compared.metrics() if compared is not None else {}),
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

    def _answers(self, recorder: SpanRecorder) -> tuple[list[ScoredAnswer], list[ScoredAnswer]]:
        """Returns the answers of the model, and those they are compared with (none without a comparison)."""
        evaluation_model, self._evaluation_model = self._evaluation_model, None
        if evaluation_model is None:
            raise RuntimeError("an evaluation runs once; make another Evaluator")
        compare, others = self.recipe.compare, list[ScoredAnswer]()
        with contextlib.closing(evaluation_model):
            answers = self._of(evaluation_model, recorder, "answers")
        self._notes += evaluation_model.warnings()
        del evaluation_model
        if compare is not None:
            other = self._open_model(self._other)
            self._notes += load_warnings(other.packed.model)
            with contextlib.closing(other):
                others = self._of(other, recorder, f"answers of {compare.model}")
        return answers, others

    def _of(self, evaluation_model: EvaluationModel, recorder: SpanRecorder, title: str) -> list[ScoredAnswer]:
        recipe, samples = self.recipe, self.recipe.samples_per_prompt
        with self.progress.stage(title, len(evaluation_model.prompts) * samples) as bar:
            return evaluation_model.answers(recipe.sampling, samples, recorder, bar, seed=recipe.seed)

    # Figures -----------------------------------------------------------------------------------------------

    def _figures(self, answers: Sequence[ScoredAnswer]) -> list[EvaluationMetric]:
        scores = {"eval/score_mean": self.weights}
        return compute_metrics(answers, scores, self.recipe.grading, self.graded, seed=self.recipe.seed)

    def _compare(self, answers: Sequence[ScoredAnswer], others: Sequence[ScoredAnswer]) -> WinRate:
        config, judge = self.recipe.compare, self.judge
        assert config is not None, "called with a comparison"
        if judge is None:
            comparisons = compare_scores(answers, others, self.weights, config.source, config.tie_margin)
        else:
            with contextlib.closing(judge):
                comparisons = run_async(compare_by_judge(answers, others, judge, config.tie_margin))
        with naming_write_errors(self.path / "comparison.jsonl"):
            write_json_lines(self.path / "comparison.jsonl", [comparison.row() for comparison in comparisons])
        return win_rate(comparisons, self.recipe.grading.confidence, self.recipe.seed)


def _found(config: ModelConfig | None) -> ModelConfig | None:
    """Returns the section with the directory of the run or checkpoint that it names."""
    if config is None or config.revision is not None:
        return config
    path = model_directory(config.path, trust_remote_code=config.trust_remote_code)
    return config.model_copy(update={"path": path})


def _figure_row(figure: EvaluationMetric) -> dict[str, Any]:
    """Makes a row of the summary's table."""
    return {
        "figure": figure.name,
        "value": figure.value,
        "low": figure.low,
        "high": figure.high,
        "interval": figure.interval,
        "prompts": figure.num_prompts,
    }
