"""Reinforcement learning: builds the roles of a recipe, runs iterations, evaluates, checkpoints, exports.

Held-out evaluation during RL: answers on its own cadence, figures, and the reward-hacking alarm.

::

    evaluations/step_00000050.jsonl   every answer with its scores, as in answers.jsonl
    alarms.jsonl                      one line per alarm: the verdict, and the prompts that show it
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quartet.cluster import ClusterError, WorkerDied
from quartet.config.plugins import installed_plugins, load_object, plugin_entries
from quartet.config.recipe import RLRecipe
from quartet.data.datasets import PromptData
from quartet.envs.protocol import Environment
from quartet.models.loading import (
    adapter_path,
    load_causal_lm,
    load_saved_model,
    load_scalar_model,
)
from quartet.models.packed_model import PackedCausalLM, PackedModel
from quartet.observe.callbacks import Callback
from quartet.observe.files import RowAppender
from quartet.observe.files import truncate_after as truncate_rows_after
from quartet.observe.health import AlarmVerdict, HackingAlarm, read_alarms
from quartet.observe.progress import Progress, ProgressBar
from quartet.observe.trackers import read_metrics
from quartet.schedule.groups import BufferedGroups
from quartet.schedule.iteration import run_concurrently, run_iteration
from quartet.schedule.leases import LeaseContext
from quartet.schedule.model_worker import Checkpointed, TrainWorker
from quartet.schedule.role_group import RoleGroup
from quartet.schedule.rollout import RolloutDriver
from quartet.schedule.rollout_worker import NativeRolloutWorker, sampling_params
from quartet.text.loading import has_custom_code
from quartet.trainers import checkpoints
from quartet.trainers.checkpoints import (
    BUFFERED,
    DRAFTS,
    TrainResult,
    restore_buffered_groups,
    save_buffered_groups,
    write_rollouts,
)
from quartet.trainers.evaluation import prompt_requests, score_groups
from quartet.trainers.evaluation_metrics import (
    ScoredAnswer,
    answer_rows,
    check_source_exists,
    compute_metrics,
    delete_evaluations_after,
    evaluation_path,
    metric_values,
    nan_to_none,
    pair_answers,
    prompt_as_text,
    prompt_means,
    read_answers,
    resolve_graders,
    standard_error,
    weighted_scores,
    write_answers,
)
from quartet.trainers.experience import KLCoefficient
from quartet.trainers.input_sources import (
    ModelLike,
    Reward,
    TokenizerLike,
    as_rewards,
    check_recipe,
    with_name,
    with_names,
)
from quartet.trainers.loop import RLLoop
from quartet.trainers.model_loader import UserObjects
from quartet.trainers.roles import RLRoles, needs_greedy
from quartet.trainers.run import Stopwatch, open_run
from quartet.trainers.run_files import Resume, naming_write_errors, note_budgets
from quartet.trainers.signals import reclaim_signals, run_async
from quartet.trainers.workers import (
    LocalRunWorkers,
    LookAhead,
    RayRunWorkers,
    RunWorkers,
    run_placement,
    shares_reference,
)
from quartet.weights.manifest import WeightSyncError


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
        self.graded = resolve_graders(config.grading, sources, [role.name for role in roles.reward_models])
        self._watched_source = config.alarm.source if config.alarm is not None else None
        check_source_exists("evaluation.alarm.source", self._watched_source, sources, "the evaluation's score")
        self.restore(None)

    # The run's calls ---------------------------------------------------------------------------------------

    def start(self, step: int) -> None:
        """Drops what was written after ``step`` complete steps; a run that goes on writes it again."""
        with naming_write_errors(self.path):
            delete_evaluations_after(self.path / "evaluations", step)
            truncate_rows_after(self.path / "alarms.jsonl", step)

    def note_training(self, step: int, metrics: Mapping[str, float]) -> None:
        """Notes the training reward of ``step``: that of all sampled groups where some of them were rejected."""
        reward = metrics.get("reward/sampled_score_mean", metrics.get("reward/score_mean", math.nan))
        if self.alarm is not None:
            self.alarm.note_training(step, reward)

    async def evaluate(
        self, leases: LeaseContext, rollout: RolloutDriver, step: int, *, is_last: bool = False
    ) -> dict[str, float]:
        """Answers, scores and judges after ``step`` complete steps, where an evaluation is due; returns the metrics."""
        if self.prompts is None or not (is_last or step % self.config.every_steps == 0):
            return {}
        # Counted with the step it follows.
        answers = await self._answers(self.prompts, leases, rollout, max(0, step - 1))
        with naming_write_errors(self.path / "evaluations"):
            write_answers(evaluation_path(self.path / "evaluations", step), answers)
        sums = {"eval/score_mean": self.weights}
        if self.roles.evaluation_rewards.weights:
            sums["eval/training_score_mean"] = self.training_weights
        figures = compute_metrics(answers, sums, self.config.grading, self.graded, seed=0, intervals=False)
        scores = prompt_means(answers, self._watched(answers))
        error = standard_error(list(scores.values()))
        found = {**metric_values(figures), **({} if math.isnan(error) else {"eval/score_se": error})}
        return {**found, **self._sound(step, scores, answers)}

    def state(self) -> dict[str, Any] | None:
        """Returns JSON values for the checkpoint."""
        return self.alarm.state() if self.alarm is not None else None

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restores the alarm as saved; without a checkpoint, or with one that has no alarm, it begins anew."""
        self.alarm: HackingAlarm | None = None
        if (alarm := self.config.alarm) is not None and self.prompts is not None:
            self.alarm = HackingAlarm(alarm.false_alarm_rate, math.ceil(self.steps / self.config.every_steps))
            if state is not None:
                self.alarm.restore(state)

    def summary(self) -> dict[str, Any]:
        """Returns what ``summary.json`` says about alarms."""
        if self.alarm is None:
            return {}
        if not self.alarm.raised_at:
            return {"reward_hacking": {"raised": False}}
        steps, path = ", ".join(map(str, self.alarm.raised_at)), self.path / "alarms.jsonl"
        if not (rows := read_alarms(path) if path.is_file() else []):  # deleted meanwhile: better than a run that stops
            return {"reward_hacking": {"raised": True, "raised_at_steps": steps}}
        last = rows[-1]
        examples = last.pop("examples")
        return {"reward_hacking": {**last, "raised_at_steps": steps}, "reward_hacking_examples": examples}

    # Answers -----------------------------------------------------------------------------------------------

    async def _answers(
        self, prompts: PromptData, leases: LeaseContext, rollout: RolloutDriver, step: int
    ) -> list[ScoredAnswer]:
        """Returns every held-out prompt's samples; episodes where the run has an environment."""
        roles, config = self.roles, self.config
        scorers = roles.reward_scorers(leases, held_out=True)
        async with rollout.quiet():
            if roles.environment is not None:
                runner, sampling = roles.episode_runner(rollout), sampling_params(config.sampling, roles.codec)
                # Negative indices: no group of the stream has one.
                num, items = config.samples_per_prompt, enumerate(prompts.items)
                begun = [runner.group(-1 - i, item, sampling, num, draw=-1) for i, item in items]
                return await score_groups(await run_concurrently(begun), scorers, step=step)
            num, seed = config.samples_per_prompt, roles.recipe.seed
            asked = prompt_requests(prompts, roles.codec, config.sampling, seed=seed, samples=num)
            groups = await rollout.evaluate(asked, step)
        return await score_groups(groups, scorers, step=step)

    # The alarm ---------------------------------------------------------------------------------------------

    def _watched(self, answers: Sequence[ScoredAnswer]) -> list[float]:
        """Returns the held-out score of each answer: one source, or the evaluation's weighted sum."""
        return weighted_scores(answers, self.weights, self._watched_source)

    def _sound(self, step: int, scores: Mapping[str, float], answers: Sequence[ScoredAnswer]) -> dict[str, float]:
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

    def _examples(self, verdict: AlarmVerdict, answers: Sequence[ScoredAnswer]) -> list[dict[str, Any]]:
        """Returns prompts whose held-out score fell, those first whose training reward rose most: answers then and
        now."""
        most = self.config.alarm.examples if self.config.alarm is not None else 0
        path = evaluation_path(self.path / "evaluations", verdict.best_step)
        # Deleted to make room, perhaps: an alarm without examples is better than a run that stops.
        before = read_answers(path) if path.is_file() else []

        def trained(found: Sequence[ScoredAnswer]) -> list[float]:
            return weighted_scores(found, self.training_weights)

        return hacking_examples(before, answers, self._watched, trained)[:most]


Scores = Callable[[Sequence[ScoredAnswer]], list[float]]


def hacking_examples(
    before: Sequence[ScoredAnswer], now: Sequence[ScoredAnswer], held_out: Scores, training: Scores
) -> list[dict[str, Any]]:
    """Returns every prompt whose held-out score fell, in falling order of the gain in training reward, then of that
    fall.

    Of a prompt with several samples the one that lost most is shown; samples of one place have the same random numbers.
    """
    both = pair_answers(before, now)
    former, later = [old for old, _ in both], [new for _, new in both]
    figures = zip(held_out(former), held_out(later), training(former), training(later), strict=True)
    lost: dict[str, tuple[float, float, dict[str, Any]]] = {}
    for (old, new), (score_then, score_now, reward_then, reward_now) in zip(both, figures, strict=True):
        change, gain = score_now - score_then, reward_now - reward_then
        known = lost.get(old.prompt_id)
        if not change < 0 or (known is not None and known[1] <= change):
            continue
        row = {
            "prompt": prompt_as_text(new.prompt),
            "before": old.completion,
            "now": new.completion,
            "training_reward_before": nan_to_none(reward_then),
            "training_reward_now": nan_to_none(reward_now),
            "held_out_before": nan_to_none(score_then),
            "held_out_now": nan_to_none(score_now),
            "verdict": "bad",
        }
        lost[old.prompt_id] = (0.0 if math.isnan(gain) else -gain, change, row)
    return [row for _, _, row in sorted(lost.values(), key=lambda found: found[:2])]


EXPORTED = {"actor": "model", "critic": "critic"}
"""Where in a run's directory the models that train are written to, by role."""


@dataclass(frozen=True)
class _ResumePoint:
    """Where the loop begins: complete steps, where the stream stood, what it had beyond that, and what each engine
    that drafts had learned.
    """

    step: int
    stream: Mapping[str, Any] | None = None
    buffered: BufferedGroups | None = None
    drafts: Sequence[Mapping[str, Any]] = ()


class RLTrainer:
    """Any method of ``quartet.config.algorithms``, under any placement.

    Args:
        recipe: the run. What it leaves out (model, data, rewards) comes as objects:
        model, tokenizer: a causal LM, trained in place, and its tokenizer; or their paths or hub names.
        rewards: callables ``f(prompts, completions, **columns) -> list[float | None]`` and sequence-classification
            models with one label, one or several, in addition to the recipe's.
        prompts, evaluation_prompts: strings, message lists, or rows with a ``prompt`` and other columns.
        evaluation_rewards: as ``rewards``, asked about answers to evaluation prompts only.
        critic: a sequence-classification model, or its path; default a copy of the first reward model, or of the
            actor's body.
        environment: the class behind the recipe's ``environment``, where that names no ``target``.
        ptx_rows: demonstrations as ``SFTTrainer`` takes them, in place of the recipe's ``ptx.data``.
        callbacks: are told of the run's steps, and may end it.
        resume: go on with the run in ``recipe.output_dir``; ``auto``: or start it, without a word.
        shuffle_scores: control experiment: scores are shuffled within each step's batch.

    Raises:
        UserError: the recipe or the objects do not fit together; nothing has been written then.
    """

    def __init__(
        self,
        recipe: RLRecipe,
        *,
        model: ModelLike | None = None,
        tokenizer: TokenizerLike | None = None,
        rewards: Reward | Sequence[Reward] = (),
        prompts: Sequence[Any] | None = None,
        evaluation_prompts: Sequence[Any] | None = None,
        evaluation_rewards: Reward | Sequence[Reward] = (),
        critic: ModelLike | None = None,
        environment: Callable[..., Environment] | None = None,
        ptx_rows: Sequence[Any] | None = None,
        callbacks: Sequence[Callback] = (),
        resume: Resume = False,
        progress: Progress | None = None,
        shuffle_scores: bool = False,
    ) -> None:
        check_recipe(recipe, RLRecipe)
        recipe, own_model, own_tokenizer = with_names(recipe, model, tokenizer, "actor.model")
        recipe, own_critic = with_name(recipe, critic, "critic.path")
        self.run, self.progress, device = open_run(recipe, resume, progress, own_model, callbacks)
        self.run.check_length(recipe.steps)
        self.recipe = recipe = self.run.pin(recipe)
        self.path = self.run.path
        objects = UserObjects(
            own_model,
            own_tokenizer,
            own_critic,
            as_rewards(rewards),
            as_rewards(evaluation_rewards, "evaluation_rewards"),
            prompts,
            evaluation_prompts,
            environment,
            ptx_rows,
            self.path.absolute() / "pictures" if recipe.cluster.type == "ray" else None,
        )
        placement = run_placement(recipe, objects)
        with contextlib.ExitStack() as taken:
            workers: RunWorkers | None = None
            if recipe.cluster.type == "ray":
                workers = RayRunWorkers(recipe, placement, objects)
                taken.callback(workers.close)
                reclaim_signals()
                objects = objects.on_meta()
            self.roles = RLRoles(recipe, objects, shares_reference=shares_reference(placement), computes=device)
            taken.callback(self.roles.close)
            self.evaluation = PeriodicEvaluation(self.roles, self.path, self.progress)
            self.workers = workers or LocalRunWorkers(recipe, placement, self.roles)
            taken.pop_all()
        self.kl = KLCoefficient(recipe.algorithm, self.roles.warmup_steps)
        self._shuffle = partial(_permutation, recipe.seed) if shuffle_scores else None
        self._loop: RLLoop | None = None
        self._bar: ProgressBar | None = None
        self._rollout_bar: ProgressBar | None = None

    # The run ---------------------------------------------------------------------------------------------

    def train(self) -> TrainResult:
        """Runs to the recipe's last step.

        Raises:
            Interrupted: Ctrl-C, SIGTERM or SIGUSR1; saved, and resumable.
            UserError: a reward failed, the disk is full, …; the last complete step is saved.
        """
        watch = Stopwatch()
        with contextlib.closing(self.roles), contextlib.closing(self.workers):
            if self.recipe.cluster.type == "ray":
                self.progress.print(f"placement {self.workers.placement.type}: starting workers")
            run_async(self.start_workers())
            with self.run.stoppable(), self.run:
                return run_async(self._train(watch))

    async def start_workers(self) -> None:
        """Starts what computes. What only loaded models show is refused here, before anything is written."""
        await asyncio.to_thread(self.workers.start, self.roles.ptx)
        self.roles.groups = self.workers.models
        await self.roles.describe()

    async def _train(self, watch: Stopwatch) -> TrainResult:
        beginning = await self._restore()
        self.run.start(beginning.step)
        if (pictures := self.roles.codec.pictures) is not None and self.recipe.cluster.type == "local":
            pictures.store.move_to(self.path / "pictures")
        if vision := self.workers.vision:
            ahead = LookAhead(vision, self.roles.item, self.recipe.prompts_per_step, self.run.recorder)
            self.roles.on_begun = ahead.begun
        for warning in self._warnings() + ([] if beginning.step else plugin_warnings(self.roles, self.path)):
            self.progress.print(warning)
        with self.progress.stage("rl", self.recipe.steps) as bar:
            self._bar = bar
            bar.advance(beginning.step)
            while True:
                try:
                    await self._run_from(beginning)
                    break
                except (ClusterError, WeightSyncError) as error:
                    beginning = await self._after_death(error)
        return await self._finish(watch.seconds)

    async def _run_from(self, beginning: _ResumePoint) -> None:
        step, self._at = beginning.step, beginning
        self.evaluation.start(step)
        self._loop = None
        await checkpoints.lower_budgets(self.path, self.workers.models)
        loop = RLLoop(self.roles, self.workers, self.run, self.kl, self._on_finished, step, shuffle=self._shuffle)
        await loop.begin()
        self._loop = loop
        async with contextlib.aclosing(loop), loop.stream:
            if beginning.stream is not None:
                loop.stream.restore(beginning.stream, beginning.buffered)
            if self.roles.ptx is not None:
                first = max(step, self.roles.warmup_steps) * self.recipe.minibatches * self.recipe.epochs
                await self.roles.train_group("actor").call(TrainWorker.expect_update, first)
            self._at = await self._point(step, loop)
            if step == 0:
                self.evaluation.restore(None)
                self.run.log(0, await self._evaluate(loop, 0))
                self.run.recorder.drop_through(0)
            while step < self.recipe.steps and not self.run.has_stopped:
                step = await self._step(step, loop)

    async def _after_death(self, error: ClusterError | WeightSyncError) -> _ResumePoint:
        """Replaces the workers that died; the step under way, or those since the last checkpoint, are done again.

        Raises:
            UserError: workers died too often.
            ClusterError, WeightSyncError: no worker died.
        """
        is_learning = self._loop is not None and self._loop.is_learning
        self.run.check_stop(None)  # a signal that went to all processes ended them, or they are not needed any more
        while True:
            try:
                happened, is_lost, lowered = await asyncio.to_thread(self.workers.replace_dead, error, is_learning)
                note_budgets(self.path, lowered)
                self.run.drain()
                beginning = await self._restore() if is_lost else await self._rewound()
                self.run.warning(f"{happened}; the run went on after step {beginning.step}")
            except (ClusterError, WeightSyncError) as another:
                if another is error:
                    raise
                error, is_learning = another, True  # died while others were being replaced
            else:
                self.run.rewind(beginning.step)
                return beginning

    async def _step(self, step: int, loop: RLLoop) -> int:
        """Makes one iteration and everything that follows it; returns the number of complete steps."""
        watch, done = Stopwatch(), step + 1
        async with self._saved_if_clean(loop):
            with self._rollout_progress(step):
                experience, learned = await run_iteration(step, loop.stages)
        # Agreement over the whole step, where it was measured, wins over the first mini-batch's.
        metrics = {**learned, **experience.metrics, **await loop.metrics(step, experience, watch)}
        self.kl.adapt(experience.batch, step)
        self.run.callbacks(Callback.on_step_end, done, metrics)
        if step % self.recipe.log.rollouts_every == 0 or self.run.is_last(done, self.recipe.steps):
            await write_rollouts(self.run, self.workers.writer, done, experience)
        self.evaluation.note_training(done, metrics)
        metrics |= await self._evaluate(loop, done)
        self.run.log(done, metrics)
        self.run.recorder.drop_through(step)  # those of the next one may have begun
        self._show(metrics)
        self._at = await self._point(done, loop)
        if self.run.due(done, self.recipe.steps):
            await self._save(self._at)
        if self.run.export_is_due(done):
            draft = self.run.begin_export(done)
            async with loop.leases.turn("actor", "forward", "export", step=step, reads={"actor": done}):
                await self._export("actor", draft / "model")
            self.run.complete_export(draft, done)
        self.run.check_stop(done)
        return done

    async def _evaluate(self, loop: RLLoop, step: int) -> dict[str, float]:
        """Returns held-out figures after ``step`` complete steps, where they are due."""
        is_last = step > 0 and self.run.is_last(step, self.recipe.steps)
        found = await self.evaluation.evaluate(loop.leases, loop.rollout, step, is_last=is_last)
        if found:
            self.run.callbacks(Callback.on_evaluate, step, found)
            rows = partial(answer_rows, evaluation_path(self.path / "evaluations", step))
            self.run.tracker.samples(step, "samples/evaluation", rows)
        return found

    def _show(self, metrics: Mapping[str, float]) -> None:
        shown = {"score": "reward/score_mean", "kl": "kl/ref", "tokens/s": "rollout/tokens_per_s"}
        if self._bar is not None:
            self._bar.advance(1, **{k: round(metrics[v], 3) for k, v in shown.items() if v in metrics})

    @contextlib.contextmanager
    def _rollout_progress(self, step: int) -> Iterator[None]:
        recipe = self.recipe
        total = recipe.prompts_per_step * (recipe.responses_per_prompt + needs_greedy(recipe))
        with self.progress.stage(f"  rollout {step + 1}", total, transient=True) as bar:
            self._rollout_bar = bar
            yield
        self._rollout_bar = None

    async def _finish(self, seconds: float) -> TrainResult:
        engines = self.roles.engines()
        exported = [await self._export(role) for role in engines]
        await self.roles.describe()
        notes = [*self._warnings(), *self.run.warnings, *(note for notes in exported for note in notes)]
        rows = read_metrics(self.path / "metrics.jsonl")
        last = {name: value for row in rows for name, value in row.items() if name not in ("step", "time_s")}
        summary = self.run.finish(
            {
                "stages": [{"name": "rl", "seconds": round(seconds, 3), "metrics": last}],
                "notes": notes,
                **self.evaluation.summary(),
            }
        )
        models = {role: partial(_trained_model, e.packed, self.path / EXPORTED[role]) for role, e in engines.items()}
        return TrainResult(self.path, summary, models["actor"], models.get("critic"))

    async def _export(self, role: str, path: Path | None = None) -> list[str]:
        """Has the workers of the role write its model, into the run's directory or to ``path``; returns remarks on
        it."""
        roles, path = self.roles, path or self.path / EXPORTED[role]
        model = roles.engines()[role].packed.model
        if model.device.type == "meta":  # the worker may be in another directory
            path = path.absolute()
        tokenizer, eos_ids = roles.codec.tokenizer, roles.codec.eos_ids
        warning = await roles.train_group(role).call(TrainWorker.export, path, tokenizer, roles.prompts.seen, eos_ids)
        written, speculation = [path, adapter_path(path)], self.recipe.rollout.speculation
        if role == "actor" and speculation is not None and speculation.learns:
            written.append(path.with_name(plugin_entries("drafters")[speculation.type].folder))
        await checkpoints.bring_to_driver(self.run, roles.train_group(role), *written)
        return [f"{path.name}: {warning}"] if warning else []

    def _warnings(self) -> list[str]:
        ptx = self.roles.ptx.warnings if self.roles.ptx is not None else []
        return self.roles.warnings() + ptx

    def _on_finished(self, finished: int) -> None:
        if self._rollout_bar is not None:
            self._rollout_bar.advance(finished)

    # Checkpoints -----------------------------------------------------------------------------------------

    @property
    def _models(self) -> dict[str, RoleGroup[Checkpointed]]:
        """The workers whose models change in a run, by role."""
        roles = [*self.roles.engines(), *(["reference"] if self.roles.refresh_steps is not None else [])]
        return {role: self.roles.groups[role] for role in roles}

    @property
    def _saved(self) -> dict[str, RoleGroup[Checkpointed]]:
        return {**self._models, **{f"{DRAFTS}{i}": engine for i, engine in enumerate(self.workers.drafting())}}

    async def _restore(self) -> _ResumePoint:
        """Restores the run from the newest checkpoint; without one the models are as the run began."""
        await checkpoints.check_storage(self.run, self._saved)
        found = self.run.latest(list(self._models), counters=("kl_coef", "stream"))
        self.kl.value = self.kl.term.coef if found is None else found.info["kl_coef"]
        self.evaluation.restore(None if found is None else found.info.get("alarm"))
        if found is None:
            return _ResumePoint(0, drafts=await self._mark_drafts())
        await checkpoints.load_states(self._models, found)
        await checkpoints.load_drafts(self.workers.drafting(), found)
        buffered = await restore_buffered_groups(self.workers.writer, found, self.roles.item)
        return _ResumePoint(found.step, found.info["stream"], buffered, await self._mark_drafts())

    async def _point(self, step: int, loop: RLLoop) -> _ResumePoint:
        """Returns the present state, after ``step`` complete steps."""
        drafts = await self._mark_drafts()
        return _ResumePoint(step, loop.stream.state(), loop.stream.buffered(), drafts)

    async def _mark_drafts(self) -> Sequence[Mapping[str, Any]]:
        return [await engine.call(NativeRolloutWorker.mark) for engine in self.workers.drafting()]

    async def _rewound(self) -> _ResumePoint:
        """Goes back to the beginning of the step under way and returns it: no model has changed since."""
        for engine, drafts in zip(self.workers.drafting(), self._at.drafts, strict=True):
            await engine.call(NativeRolloutWorker.rewind, drafts)
        return self._at

    async def _save(self, at: _ResumePoint) -> None:
        """Saves the state of ``at``, which is the present one."""
        workers, writer = self._saved, self.workers.writer
        if at.buffered is not None and await save_buffered_groups(writer, at.buffered):
            workers = {**workers, BUFFERED: writer}
        info = {"kl_coef": self.kl.value, "stream": dict(at.stream or {}), "alarm": self.evaluation.state()}
        await checkpoints.save_checkpoint(self.run, workers, at.step, info)

    @contextlib.asynccontextmanager
    async def _saved_if_clean(self, loop: RLLoop) -> AsyncIterator[None]:
        """Saves when an iteration fails before its updates begin: the state is still that of the step's beginning.

        The stream's state is that of the beginning, too: the stream itself may have been read to the step's end.
        """
        loop.begin_step()
        try:
            yield
        except (WorkerDied, WeightSyncError):
            raise  # a worker's death is dealt with by going on
        except BaseException:
            step = self._at.step
            if self.run.is_stopped_at_once:
                raise
            if not loop.is_learning and step > 0 and step not in self.run.saved_steps():
                with contextlib.suppress(WorkerDied):  # the failure has ended its group
                    await self._save(self._at)
                    self.run.drain()
            raise


def _permutation(seed: int, step: int, num: int) -> Tensor:
    return torch.randperm(num, generator=torch.Generator().manual_seed(seed * 1_000_003 + step))


def _trained_model(packed: PackedModel, path: Path) -> PreTrainedModel:
    """Returns the model of ``packed``, or, where that has no contents, what was saved at ``path``; as
    ``load_saved_model``."""
    if packed.device.type != "meta":
        return packed.model
    load = load_causal_lm if isinstance(packed, PackedCausalLM) else load_scalar_model
    return load_saved_model(path, partial(load, trust_remote_code=has_custom_code(packed.model)))


def plugin_warnings(roles: RLRoles, path: Path) -> list[str]:
    """Returns what the checks of plug-ins say of a run that is about to begin in ``path``."""
    return [
        text for plugin in installed_plugins() for check in plugin.checks for text in load_object(check)(roles, path)
    ]
