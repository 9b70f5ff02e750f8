"""Reinforcement learning: builds the roles of a recipe, runs iterations, evaluates, checkpoints, exports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quartet.algorithms.controllers import adaptive_kl_coef
from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch
from quartet.config.algorithms import AlgorithmConfig, GroupAlgorithm, OnlineDPO, Selection, kl_term
from quartet.config.recipe import EvaluationConfig, RLRecipe
from quartet.envs.protocol import Environment
from quartet.models.loading import save_causal_lm, save_scalar_model, seen_tokens
from quartet.observe.progress import Progress, Stage
from quartet.observe.rollouts import RolloutWriter
from quartet.observe.spans import Span, overlap_seconds, seconds_by_name
from quartet.schedule.iteration import Roles, Scorer, run_iteration
from quartet.schedule.learners import Learner, UpdatePlan
from quartet.schedule.local import local_arbiter
from quartet.schedule.model_host import ModelStats
from quartet.schedule.rollout import LocalRollout
from quartet.schedule.stream import AdmissionRule, GroupStream
from quartet.schedule.worker import Worker
from quartet.train.engine import Objective
from quartet.train.objectives import PolicyObjective, ValueObjective, trajectory_index
from quartet.trainers.advantages import Assembler, Experience
from quartet.trainers.cast import Cast, needs_greedy
from quartet.trainers.casting import build_cast
from quartet.trainers.dynamic_sampling import DynamicSampling
from quartet.trainers.episodes import AnyGroup, GroupSource, episode_metrics
from quartet.trainers.greedy import GreedyBaseline, greedy_metrics
from quartet.trainers.held_out import HeldOut
from quartet.trainers.loader import Passed
from quartet.trainers.ptx import build_ptx
from quartet.trainers.records import rollout_records
from quartet.trainers.run import (
    RunDirectory,
    Stopwatch,
    default_output_dir,
    resident_bytes,
    software_versions,
    use_threads,
    writing,
)
from quartet.trainers.selection import ReferenceRefresh, learned_from, selection_objective
from quartet.trainers.sources import context_length
from quartet.trainers.trajectories import Trajectories, num_emitted


@dataclass(frozen=True)
class RLResult:
    """Where the run is, its trained models (Hugging Face objects) and what ``summary.json`` holds."""

    path: Path
    model: PreTrainedModel
    critic: PreTrainedModel | None
    summary: dict[str, Any]


class _ExperienceLearner:
    """A learner that reads the batch out of an experience."""

    def __init__(self, learner: Learner, algorithm: AlgorithmConfig) -> None:
        self.learner = learner
        self.algorithm = algorithm

    async def train(self, experience: Experience, step: int) -> dict[str, float]:
        batch = experience.batch
        if isinstance(self.algorithm, Selection):
            batch = learned_from(self.algorithm, batch)
        return dict(await self.learner.train(batch, step))


class RLTrainer:
    """Any method of ``quartet.config.algorithms`` on one process.

    Args:
        recipe: the run. What it leaves out (model, data, rewards) comes as objects:
        model, tokenizer: a causal LM and its tokenizer; trained in place.
        rewards: callables ``f(prompts, completions, **columns) -> list[float | None]`` and sequence-classification
            models with one label, in addition to the recipe's.
        prompts, evaluation_prompts: strings, message lists, or rows with a ``prompt`` and other columns.
        evaluation_rewards: as ``rewards``, asked about answers to evaluation prompts only.
        critic: a sequence-classification model; default a copy of the first reward model, or of the actor's body.
        environment: the class behind the recipe's ``environment``, where that names no ``target``.
        ptx_rows: demonstrations as ``SFTTrainer`` takes them, in place of the recipe's ``ptx.data``.
        resume: go on with the run in ``recipe.output_dir``.
        shuffle_scores: control experiment: scores are shuffled within each step's batch.

    Raises:
        UserError: the recipe or the objects do not fit together; nothing has been written then.
    """

    def __init__(
        self,
        recipe: RLRecipe,
        *,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        rewards: Sequence[Callable[..., Any] | PreTrainedModel] = (),
        prompts: Sequence[Any] | None = None,
        evaluation_prompts: Sequence[Any] | None = None,
        evaluation_rewards: Sequence[Callable[..., Any] | PreTrainedModel] = (),
        critic: PreTrainedModel | None = None,
        environment: Callable[..., Environment] | None = None,
        ptx_rows: Sequence[Any] | None = None,
        resume: bool = False,
        progress: Progress | None = None,
        shuffle_scores: bool = False,
    ) -> None:
        use_threads(1 if recipe.numerics == "exact" else recipe.threads)
        self.recipe = recipe
        self.path = Path(recipe.output_dir) if recipe.output_dir else default_output_dir("rl")
        self.progress = progress if progress is not None else Progress()
        self.run = RunDirectory(self.path, recipe, resume=resume)
        self.cast: Cast = build_cast(
            recipe,
            Passed(model, tokenizer, critic, tuple(rewards), tuple(evaluation_rewards)),
            prompts=prompts,
            evaluation_prompts=evaluation_prompts,
            environment=environment,
        )
        with contextlib.ExitStack() as taken:
            for owned in self.cast.models():
                taken.callback(owned.release)
            self.held_out = self._held_out()
            self.ptx = build_ptx(recipe, ptx_rows, self.cast.codec, context_length(self.cast.actor.packed.model))
            self._refresh = self._reference_refresh()
            taken.pop_all()
        self.kl_coef = kl_term(recipe.algorithm).coef
        self._shuffle = _shuffled(recipe.seed) if shuffle_scores else None
        self._bar: Stage | None = None
        self._rollout_bar: Stage | None = None

    # The run ---------------------------------------------------------------------------------------------

    def train(self) -> RLResult:
        """Runs to the recipe's last step.

        Raises:
            Interrupted: Ctrl-C; saved, and resumable.
            UserError: a reward failed, the disk is full, …; the last complete step is saved.
        """
        with self.run, self.run.stoppable(), self.cast.released_at_end(), self._ptx_closed():
            return asyncio.run(self._train())

    @contextlib.contextmanager
    def _ptx_closed(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self.ptx is not None:
                self.ptx.close()

    async def _train(self) -> RLResult:
        watch = Stopwatch()
        step, stream_state = self._restore()
        self.run.start(step)
        if self.held_out is not None:
            self.held_out.start(step)
        roles, rollout = self._roles(step)
        writer = RolloutWriter(self.path / "rollouts")
        stream = roles.stream
        assert isinstance(stream, GroupStream), "the local back end's stream"
        async with stream:
            if stream_state is not None:
                stream.restore(stream_state)
            for remark in self._remarks():
                self.progress.print(remark)
            if self.ptx is not None:
                first = max(step, self._warmup_steps)
                self.ptx.start(first * self.recipe.minibatches * self.recipe.epochs)
            with self.progress.stage("rl", self.recipe.steps) as bar:
                self._bar = bar
                bar.advance(step)
                if step == 0:
                    self.run.tracker.log(0, await self._evaluate(rollout, 0))
                    self.run.recorder.drop_through(0)
                while step < self.recipe.steps:
                    step = await self._step(step, roles, rollout, stream, writer)
        return self._finish(watch.seconds)

    async def _step(
        self,
        step: int,
        roles: Roles[AnyGroup, RaggedBatch, Any, Experience],
        rollout: LocalRollout,
        stream: GroupStream[AnyGroup],
        writer: RolloutWriter,
    ) -> int:
        """One iteration and everything that follows it; returns the number of complete steps."""
        watch = Stopwatch()
        recipe = self.recipe
        before = rollout.engine.stats()
        with self._saved_if_clean(step, stream.state()), self._rollout_progress(step):
            result = await run_iteration(step, roles)
        after = self._generated
        done = step + 1
        spans = self.run.recorder.of_step(step)
        metrics = {
            **result.metrics,
            # Agreement over the whole step, where it was measured, wins over the first mini-batch's.
            **result.experience.metrics,
            **_timing(spans, watch.seconds, after.generated_tokens - before.generated_tokens),
            **_lengths(result.experience.batch),
            **episode_metrics(result.experience.batch),
            **greedy_metrics(result.experience.batch),
            **(self._sampling.take_metrics() if self._sampling is not None else {}),
            **self._ptx_metrics(done),
            **(self._refresh.after(done) if self._refresh is not None else {}),
            "rollout/prefill_tokens": float(after.prompt_tokens_prefilled - before.prompt_tokens_prefilled),
            "memory/rss_bytes": resident_bytes(),
            **_model_stats(await self.cast.stats()),
        }
        self._adapt_kl(result.experience, step)
        if step % recipe.log.rollouts_every == 0 or done == recipe.steps:
            records = rollout_records(result.experience.batch, self.cast.codec)
            self.run.write_later("write_rollouts", done, lambda: writer.write(done, records))
        if self.held_out is not None:
            self.held_out.note_training(done, metrics)
            metrics.update(await self._evaluate(rollout, done) if self.held_out.due(done) else {})
        self.run.tracker.log(done, metrics)
        self.run.recorder.drop_through(done)
        if self._bar is not None:
            shown = {"score": "reward/score_mean", "kl": "kl/ref", "tokens/s": "rollout/tokens_per_s"}
            self._bar.advance(1, **{k: round(metrics[v], 3) for k, v in shown.items() if v in metrics})
        if self.run.due(done, recipe.steps):
            self._save(done, stream.state())
        self.run.check_stop(done)
        return done

    async def _evaluate(self, rollout: LocalRollout, step: int) -> dict[str, float]:
        return {} if self.held_out is None else await self.held_out.evaluate(self._worker, rollout, step)

    @contextlib.contextmanager
    def _rollout_progress(self, step: int) -> Iterator[None]:
        recipe = self.recipe
        total = recipe.prompts_per_step * (recipe.responses_per_prompt + needs_greedy(recipe))
        with self.progress.stage(f"  rollout {step + 1}", total, transient=True) as bar:
            self._rollout_bar = bar
            yield
        self._rollout_bar = None

    def _finish(self, seconds: float) -> RLResult:
        from quartet.observe.trackers import read_metrics

        cast = self.cast
        with writing(self.path / "model"):
            save_causal_lm(cast.actor.packed, cast.codec.tokenizer, self.path / "model")
        notes = self._remarks()
        if cast.critic is not None:
            ids = (torch.tensor(item.token_ids) for item in cast.prompts.items)
            with writing(self.path / "critic"):
                warning = save_scalar_model(
                    cast.critic.packed,
                    cast.codec.tokenizer,
                    self.path / "critic",
                    seen=_joined(seen_tokens(_vocabulary(cast.critic.packed.model), ids), cast.emitted),
                )
            notes += [f"critic: {warning}"] if warning else []
        rows = read_metrics(self.path / "metrics.jsonl")
        last = {name: value for row in rows for name, value in row.items() if name not in ("step", "time_s")}
        summary = {
            "job": "rl",
            "seed": self.recipe.seed,
            "versions": software_versions(),
            "stages": [{"name": "rl", "seconds": round(seconds, 3), "metrics": last}],
            "notes": notes,
            **(self.held_out.summary() if self.held_out is not None else {}),
        }
        self.run.finish(summary)
        critic = cast.critic.packed.model if cast.critic is not None else None
        return RLResult(self.path, cast.actor.packed.model, critic, summary)

    def _held_out(self) -> HeldOut | None:
        if self.cast.evaluation_prompts is None:
            return None
        config = self.recipe.evaluation or EvaluationConfig()
        return HeldOut(config, self.cast, self.path, steps=self.recipe.steps, progress=self.progress)

    def _remarks(self) -> list[str]:
        held_out = self.held_out.remarks() if self.held_out is not None else []
        return self.cast.remarks() + (self.ptx.remarks if self.ptx is not None else []) + held_out

    def _reference_refresh(self) -> ReferenceRefresh | None:
        algorithm, reference = self.recipe.algorithm, self.cast.reference
        if not isinstance(algorithm, OnlineDPO) or algorithm.refresh_steps is None or reference is None:
            return None
        return ReferenceRefresh(algorithm.refresh_steps, self.cast.actor.packed, reference)

    @property
    def _warmup_steps(self) -> int:
        """First steps, in which the actor rests."""
        return self.recipe.critic.warmup_steps if self.cast.critic is not None else 0

    def _ptx_metrics(self, steps: int) -> dict[str, float]:
        trained = steps - self._warmup_steps
        if self.ptx is None or trained <= 0:
            return {}
        return self.ptx.metrics(trained * self.recipe.minibatches * self.recipe.epochs)

    # Roles -----------------------------------------------------------------------------------------------

    def _roles(self, step: int) -> tuple[Roles[AnyGroup, RaggedBatch, Any, Experience], LocalRollout]:
        recipe, cast = self.recipe, self.cast
        arbiter = local_arbiter(cast.sizes(), version=step)
        self._worker = Worker(arbiter, self.run.recorder)
        rollout = cast.rollout(
            self._worker, version=step, on_finished=self._on_finished if cast.environment is None else None
        )
        self._engine = rollout.engine
        self._assembler = Assembler(
            recipe.algorithm,
            cast.reward_weights,
            lambda: self.kl_coef,
            self._shuffle,
            max_new_tokens=recipe.rollout.sampling.max_new_tokens,
        )
        source = cast.group_source(rollout, self._on_finished)
        self._sampling = self._dynamic_sampling(source, rollout)
        rule = AdmissionRule(recipe.prompts_per_step)
        if self._sampling is None:
            stream = GroupStream(source.generate, rule, chunk_size=recipe.chunk_size)
        else:
            stream = self._sampling.stream(rule, chunk_size=recipe.chunk_size)
        roles = Roles(
            stream=stream,
            collect=source.collect,
            scorers=self._scorers(),
            assemble=self._assemble,
            learners=[_ExperienceLearner(learner, recipe.algorithm) for learner in self._learners()],
            publish=rollout.publish,
        )
        return roles, rollout

    def _dynamic_sampling(self, source: GroupSource, rollout: LocalRollout) -> DynamicSampling | None:
        algorithm, cast = self.recipe.algorithm, self.cast
        if not isinstance(algorithm, GroupAlgorithm) or algorithm.dynamic_sampling is None:
            return None
        rewards = cast.reward_scorers(self._worker)
        return DynamicSampling(
            algorithm.dynamic_sampling, source, lambda: rollout.version, rewards, self._assembler.judge
        )

    def _scorers(self) -> list[Scorer[RaggedBatch, ColumnSet]]:
        """Rewards, unless groups come with theirs; the greedy baseline, where there is one; the other columns."""
        cast, rewards = self.cast, self.cast.reward_scorers(self._worker)
        found: list[Scorer[RaggedBatch, ColumnSet]] = [*rewards] if self._sampling is None else []
        if needs_greedy(self.recipe):
            found.append(GreedyBaseline(rewards, cast.completion_text, self._assembler.judge))
        return [*found, *cast.column_scorers(self._worker)]

    def _assemble(self, chunks: Sequence[tuple[Any, Sequence[Any]]]) -> Experience:
        with self.run.recorder.span("advantages", step=chunks[0][0].step):
            experience = self._assembler(chunks)
        self.cast.note_emitted(experience.batch)
        self._generated = self._engine.stats()
        self._learning = True
        return experience

    def _learners(self) -> list[Learner]:
        recipe, cast = self.recipe, self.cast
        plan = UpdatePlan(recipe.minibatches, recipe.epochs, recipe.seed)
        num_trajectories = recipe.prompts_per_step * recipe.responses_per_prompt
        algorithm = recipe.algorithm
        turns = recipe.environment.max_turns if recipe.environment is not None else 1

        def policy(step: int, is_first: bool) -> Objective:
            if isinstance(algorithm, Selection):
                longest = recipe.rollout.sampling.max_new_tokens * turns
                temperature = recipe.rollout.sampling.temperature
                return selection_objective(algorithm, num_trajectories, temperature, longest, is_first=is_first)
            return PolicyObjective(
                algorithm,
                num_trajectories,
                recipe.rollout.sampling.temperature,
                self.kl_coef if kl_term(algorithm).place == "loss" else 0.0,
                is_first,
                recipe.rollout.sampling.max_new_tokens * turns,
            )

        learners = []
        if cast.critic is not None and algorithm.name == "ppo":
            ppo = algorithm
            learners.append(
                Learner(
                    self._worker,
                    "critic",
                    cast.handles["critic"],
                    plan,
                    lambda step, is_first: ValueObjective(ppo, num_trajectories),
                    "critic",
                )
            )
        also = self.ptx.terms if self.ptx is not None else None
        actor = cast.handles["actor"]
        learners.append(Learner(self._worker, "actor", actor, plan, policy, "policy", self._warmup_steps, also))
        return learners

    def _on_finished(self, finished: int) -> None:
        if self._rollout_bar is not None:
            self._rollout_bar.advance(finished)

    def _adapt_kl(self, experience: Experience, step: int) -> None:
        """Moves the coefficient by the KL of the responses that take part; rests while the actor does."""
        kl, batch = kl_term(self.recipe.algorithm), experience.batch
        num = len(torch.unique(trajectory_index(batch)[batch.token["action_mask"]]))
        if kl.target is None or "ref_logprobs" not in batch.token or step < self._warmup_steps or not num:
            return
        observed = float(batch.token["kl"].sum()) / num
        self.kl_coef = adaptive_kl_coef(self.kl_coef, observed, kl.target, kl.horizon, num)

    # Checkpoints -----------------------------------------------------------------------------------------

    def _restore(self) -> tuple[int, dict[str, int] | None]:
        found = self.run.latest()
        if found is None:
            return 0, None
        step, parts, info = found
        for name, engine in self.cast.engines().items():
            engine.load_state(parts[name])
        self.cast.emitted = parts["emitted"]
        if self._refresh is not None:
            self._refresh.load_state(parts["reference"])
        self.kl_coef = info["kl_coef"]
        if self.held_out is not None:
            self.held_out.restore(info.get("alarm"))
        return step, info["stream"]

    def _save(self, step: int, stream_state: Mapping[str, int]) -> None:
        parts: dict[str, Any] = {name: engine.state() for name, engine in self.cast.engines().items()}
        parts["emitted"] = self.cast.emitted
        if self._refresh is not None:
            parts["reference"] = self._refresh.state()
        alarm = self.held_out.state() if self.held_out is not None else None
        self.run.save(step, parts, {"kl_coef": self.kl_coef, "stream": dict(stream_state), "alarm": alarm})

    @contextlib.contextmanager
    def _saved_if_clean(self, step: int, stream_state: Mapping[str, int]) -> Iterator[None]:
        """Saves when an iteration fails before its updates begin: the state is still that of ``step`` complete steps.

        ``stream_state`` is that of the step's beginning: the stream itself may have been read to the step's end.
        """
        self._learning = False
        try:
            yield
        except BaseException:
            if not self._learning and step > 0 and step not in self.run.saved_steps():
                self._save(step, stream_state)
                self.run.drain()
            raise


def _shuffled(seed: int) -> Callable[[int, int], Tensor]:
    def permutation(step: int, num: int) -> Tensor:
        return torch.randperm(num, generator=torch.Generator().manual_seed(seed * 1_000_003 + step))

    return permutation


def _vocabulary(model: PreTrainedModel) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _joined(seen: Tensor, others: Tensor) -> Tensor:
    """Ids seen in either; ``others`` may belong to a smaller vocabulary."""
    seen[: len(others)] |= others
    return seen


def _timing(spans: Sequence[Span], wall_s: float, generated: int) -> dict[str, float]:
    seconds = seconds_by_name(spans)
    found = {f"time/{name}_s": value for name, value in seconds.items()}
    found["time/step_s"] = wall_s
    found["rollout/tokens"] = float(generated)
    if seconds.get("generate"):
        found["rollout/tokens_per_s"] = generated / seconds["generate"]
    windows = [Span("generation", min(g), max(h)) for g, h in [_window(spans, "generate")] if g]
    scoring = [Span("scoring", s.start_s, s.end_s) for s in spans if s.chunk is not None]
    found["overlap/score_generate_s"] = overlap_seconds([*windows, *scoring], "generation", "scoring")
    return found


def _model_stats(stats: Mapping[str, ModelStats]) -> dict[str, float]:
    return {
        "optim/skipped_steps": float(sum(of.num_skipped for of in stats.values())),
        "train/token_budget": float(min(of.token_budget for of in stats.values() if of.token_budget)),
        "train/num_oom": float(sum(of.num_oom for of in stats.values())),
    }


def _window(spans: Sequence[Span], name: str) -> tuple[list[float], list[float]]:
    picked = [s for s in spans if s.name == name]
    return [s.start_s for s in picked], [s.end_s for s in picked]


def _lengths(batch: RaggedBatch) -> dict[str, float]:
    trajectories = Trajectories.of(batch)
    lengths = num_emitted(batch, trajectories)
    return {
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
        "rollout/truncated_frac": float((~batch.sequence["ended"][trajectories.final_N]).float().mean()),
        "tokens/useful": float(batch.num_tokens),
    }
