"""Reinforcement learning: builds the roles of a recipe, runs iterations, evaluates, checkpoints, exports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quartet.algorithms.kl import adaptive_kl_coef
from quartet.cluster import ClusterError, WorkerDied
from quartet.config.algorithms import OnlineDPO, kl_term
from quartet.config.recipe import EvaluationConfig, RLRecipe
from quartet.envs.protocol import Environment
from quartet.observe.progress import Progress, Stage
from quartet.schedule.checkpointed import Checkpointed
from quartet.schedule.groups import staleness_metrics
from quartet.schedule.iteration import run_iteration
from quartet.schedule.model_worker import CriticWorker, TrainWorker
from quartet.schedule.role_group import RoleGroup
from quartet.schedule.stream import Ahead
from quartet.train.objectives import trajectory_index
from quartet.trainers import checkpoints
from quartet.trainers.advantages import Experience
from quartet.trainers.arguments import (
    ModelLike,
    Reward,
    TokenizerLike,
    as_rewards,
    check_recipe,
    only_object,
    with_names,
    with_path,
)
from quartet.trainers.cast import Cast, needs_greedy
from quartet.trainers.casting import build_cast
from quartet.trainers.company import Company, LocalCompany, RayCompany
from quartet.trainers.devices import compute_device, resolved
from quartet.trainers.episodes import episode_metrics
from quartet.trainers.event_loop import run_async
from quartet.trainers.greedy import greedy_metrics
from quartet.trainers.held_out import HeldOut
from quartet.trainers.loader import Passed
from quartet.trainers.placing import placement_of, shares_reference
from quartet.trainers.reference_refresh import ReferenceRefresh
from quartet.trainers.resuming import Resume, output_path
from quartet.trainers.rl_result import EXPORTED, RLResult, trained_model
from quartet.trainers.rollout_files import AHEAD, hold_ahead, restored_ahead, write_rollouts
from quartet.trainers.run import (
    RunDirectory,
    Stopwatch,
    resident_bytes,
    software_versions,
    use_threads,
)
from quartet.trainers.session import Play, Session
from quartet.trainers.signals import take_back_signals
from quartet.trainers.step_metrics import lengths, model_stats, timing
from quartet.weights import WeightSyncError


@dataclass(frozen=True)
class _Beginning:
    """Where a session begins: complete steps, where the stream stood, and what it had beyond that."""

    step: int
    stream: Mapping[str, Any] | None = None
    ahead: Ahead[Any] | None = None


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
        resume: Resume = False,
        progress: Progress | None = None,
        shuffle_scores: bool = False,
    ) -> None:
        check_recipe(recipe, RLRecipe)
        use_threads(1 if recipe.numerics == "exact" else recipe.threads)
        recipe, own_model, own_tokenizer = with_names(recipe, model, tokenizer, "actor.model")
        recipe = with_path(recipe, critic, "critic.path")
        self.recipe = recipe
        self.path = output_path(recipe.output_dir, "rl", resume)
        self.progress = progress if progress is not None else Progress()
        device = compute_device(recipe, own_model)
        record = resolved(recipe, device)
        self.run = RunDirectory(self.path, recipe, resume=resume, tell=self.progress.print, resolved=record)
        passed = Passed(
            own_model,
            own_tokenizer,
            only_object("critic", critic),
            as_rewards(rewards),
            as_rewards(evaluation_rewards, "evaluation_rewards"),
        )
        placement = placement_of(recipe, passed)
        with contextlib.ExitStack() as taken:
            company: Company | None = None
            if recipe.cluster.type == "ray":
                company = RayCompany(recipe, placement, passed)
                taken.callback(company.close)
                take_back_signals()
            self.cast: Cast = build_cast(
                recipe,
                passed if company is None else passed.without_weights(),
                prompts=prompts,
                evaluation_prompts=evaluation_prompts,
                environment=environment,
                ptx_rows=ptx_rows,
                shares_reference=shares_reference(placement),
                computes=device,
            )
            for owned in self.cast.models():
                taken.callback(owned.release)
            self.held_out = self._held_out()
            self._refresh = self._reference_refresh()
            self.company = company or LocalCompany(recipe, placement, self.cast)
            taken.pop_all()
        self.kl_coef = kl_term(recipe.algorithm).coef
        self._shuffle = _shuffled(recipe.seed) if shuffle_scores else None
        self._session: Session | None = None
        self._deaths: list[str] = []
        self._bar: Stage | None = None
        self._rollout_bar: Stage | None = None

    # The run ---------------------------------------------------------------------------------------------

    def train(self) -> RLResult:
        """Runs to the recipe's last step.

        Raises:
            Interrupted: Ctrl-C, SIGTERM or SIGUSR1; saved, and resumable.
            UserError: a reward failed, the disk is full, …; the last complete step is saved.
        """
        watch = Stopwatch()
        with self.cast.released_at_end(), contextlib.closing(self.company):
            run_async(self._start())
            with self.run.stoppable(), self.run:
                return run_async(self._train(watch))

    async def _start(self) -> None:
        """Starts what computes. What only loaded models show is refused here, before anything is written."""
        if text := self.company.describe():
            self.progress.print(text)
        await asyncio.to_thread(self.company.start, self.cast.ptx)
        self.cast.groups = self.company.models
        await self.cast.describe()

    async def _train(self, watch: Stopwatch) -> RLResult:
        beginning = await self._restore()
        self.run.start(beginning.step)
        for remark in self._remarks():
            self.progress.print(remark)
        with self.progress.stage("rl", self.recipe.steps) as bar:
            self._bar = bar
            bar.advance(beginning.step)
            while (died := await self._until_death(beginning)) is not None:
                beginning = await self._after_death(died)
        return await self._finish(watch.seconds)

    async def _until_death(self, beginning: _Beginning) -> ClusterError | WeightSyncError | None:
        """Runs steps to the last one; returns what a worker's death looked like when one died."""
        try:
            await self._run_from(beginning)
        except (ClusterError, WeightSyncError) as error:
            return error
        return None

    async def _run_from(self, beginning: _Beginning) -> None:
        step, self._at = beginning.step, beginning
        if self.held_out is not None:
            self.held_out.start(step)
        self._session = None
        self._session = session = await self._open_session(step)
        async with contextlib.aclosing(session), session.stream:
            if beginning.stream is not None:
                session.stream.restore(beginning.stream, beginning.ahead)
            if self.cast.ptx is not None:
                first = max(step, self._warmup_steps) * self.recipe.minibatches * self.recipe.epochs
                await self.cast.trained_group("actor").call(TrainWorker.expect_update, first)
            if step == 0:
                if self.held_out is not None:
                    self.held_out.restore(None)
                self.run.tracker.log(0, await self._evaluate(session, 0))
                self.run.recorder.drop_through(0)
            while step < self.recipe.steps:
                self._at = _Beginning(step, session.stream.state(), session.stream.ahead())
                step = await self._step(step, session)

    async def _open_session(self, step: int) -> Session:
        sizes = await self.company.sizes()
        await self.company.link()
        await self.company.deliver(step)
        await self.company.clear()
        play = Play(
            self.cast,
            self.company,
            self.run.recorder,
            lambda: self.kl_coef,
            self._shuffle,
            self._warmup_steps,
            self._on_finished,
            self.path,
        )
        session = Session(play, step, sizes)
        await session.rollout.begin()
        return session

    async def _after_death(self, error: ClusterError | WeightSyncError) -> _Beginning:
        """Replaces the workers that died; the step under way, or those since the last checkpoint, are done again.

        Raises:
            UserError: workers died too often.
            ClusterError, WeightSyncError: nobody died.
        """
        is_learning = self._session is not None and self._session.is_learning
        self.run.check_stop(None)  # a signal that went to all processes ended them, or nobody needs them any more
        while True:
            try:
                lost = await asyncio.to_thread(self.company.replace_dead, error, is_learning)
                self.run.drain()
                beginning = await self._restore() if lost.states else self._at
                self._deaths.append(f"{lost.text}; the run went on after step {beginning.step}")
                self.progress.print(self._deaths[-1])
            except (ClusterError, WeightSyncError) as another:
                if another is error:
                    raise
                error, is_learning = another, True  # died while others were being replaced
            else:
                self.run.rewind(beginning.step)
                return beginning

    async def _step(self, step: int, session: Session) -> int:
        """One iteration and everything that follows it; returns the number of complete steps."""
        watch = Stopwatch()
        recipe, before = self.recipe, session.rollout.stats()
        async with self._saved_if_clean(session):
            with self._rollout_progress(step):
                result = await run_iteration(step, session.roles)
        after, done, batch = session.generated, step + 1, result.experience.batch
        spans = self.run.recorder.of_step(step)
        metrics = {
            **result.metrics,
            # Agreement over the whole step, where it was measured, wins over the first mini-batch's.
            **result.experience.metrics,
            **timing(spans, watch.seconds, after.generated_tokens - before.generated_tokens),
            **lengths(batch),
            **(staleness_metrics(batch, step) if self.company.placement.max_staleness is not None else {}),
            **episode_metrics(batch),
            **greedy_metrics(batch),
            **(session.sampling.take_metrics() if session.sampling is not None else {}),
            **self._ptx_metrics(done),
            **(await self._refresh.after(done) if self._refresh is not None else {}),
            "rollout/prefill_tokens": float(after.prompt_tokens_prefilled - before.prompt_tokens_prefilled),
            "memory/rss_bytes": resident_bytes(),
            **model_stats(await self.cast.stats()),
            **session.mover.take_metrics(),
        }
        self._adapt_kl(result.experience, step)
        if step % recipe.log.rollouts_every == 0 or done == recipe.steps:
            await write_rollouts(self.run, self.company.writer, done, result.experience)
        if self.held_out is not None:
            self.held_out.note_training(done, metrics)
            metrics.update(await self._evaluate(session, done) if self.held_out.due(done) else {})
        self.run.tracker.log(done, metrics)
        self.run.recorder.drop_through(step)  # those of the next one may have begun
        if self._bar is not None:
            shown = {"score": "reward/score_mean", "kl": "kl/ref", "tokens/s": "rollout/tokens_per_s"}
            self._bar.advance(1, **{k: round(metrics[v], 3) for k, v in shown.items() if v in metrics})
        if self.run.due(done, recipe.steps):
            await self._save(_Beginning(done, session.stream.state(), session.stream.ahead()))
        self.run.check_stop(done)
        return done

    async def _evaluate(self, session: Session, step: int) -> dict[str, float]:
        if self.held_out is None:
            return {}
        return await self.held_out.evaluate(session.worker, session.rollout, step)

    @contextlib.contextmanager
    def _rollout_progress(self, step: int) -> Iterator[None]:
        recipe = self.recipe
        total = recipe.prompts_per_step * (recipe.responses_per_prompt + needs_greedy(recipe))
        with self.progress.stage(f"  rollout {step + 1}", total, transient=True) as bar:
            self._rollout_bar = bar
            yield
        self._rollout_bar = None

    async def _finish(self, seconds: float) -> RLResult:
        from quartet.observe.trackers import read_metrics

        engines = self.cast.engines()
        exported = [await self._export(role) for role in engines]
        await self.cast.describe()
        notes = [*self._remarks(), *self._deaths, *self.run.remarks, *(note for notes in exported for note in notes)]
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
        models = {role: partial(trained_model, e.packed, self.path / EXPORTED[role]) for role, e in engines.items()}
        return RLResult(self.path, summary, models)

    async def _export(self, role: str) -> list[str]:
        """Has who holds the role's model write it; returns what is to be said of it."""
        cast, path = self.cast, self.path / EXPORTED[role]
        model = cast.engines()[role].packed.model
        if model.device.type == "meta":  # the worker may be in another directory
            path = path.absolute()
        tokenizer, eos_ids = cast.codec.tokenizer, cast.codec.eos_ids
        remark = await cast.trained_group(role).call(TrainWorker.export, path, tokenizer, cast.prompts.seen, eos_ids)
        return [f"{path.name}: {remark}"] if remark else []

    def _held_out(self) -> HeldOut | None:
        if self.cast.evaluation_prompts is None:
            return None
        config = self.recipe.evaluation or EvaluationConfig()
        return HeldOut(config, self.cast, self.path, steps=self.recipe.steps, progress=self.progress)

    def _remarks(self) -> list[str]:
        held_out = self.held_out.remarks() if self.held_out is not None else []
        return self.cast.remarks() + (self.cast.ptx.remarks if self.cast.ptx is not None else []) + held_out

    def _reference_refresh(self) -> ReferenceRefresh | None:
        algorithm = self.recipe.algorithm
        if not isinstance(algorithm, OnlineDPO) or algorithm.refresh_steps is None or self.cast.reference is None:
            return None
        return ReferenceRefresh(algorithm.refresh_steps, self.cast)

    @property
    def _warmup_steps(self) -> int:
        """First steps, in which the actor rests."""
        return self.recipe.critic.warmup_steps if self.cast.critic is not None else 0

    def _ptx_metrics(self, steps: int) -> dict[str, float]:
        trained = steps - self._warmup_steps
        if self.cast.ptx is None or trained <= 0:
            return {}
        return self.cast.ptx.metrics(trained * self.recipe.minibatches * self.recipe.epochs)

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

    @property
    def _saved(self) -> dict[str, RoleGroup[Checkpointed]]:
        """The workers whose state changes in a run, by role."""
        roles = [*self.cast.engines(), *(["reference"] if self._refresh is not None else [])]
        return {role: self.cast.groups[role] for role in roles}

    async def _restore(self) -> _Beginning:
        """From the newest checkpoint; without one the models are as the run began."""
        await checkpoints.check_storage(self.run, self._saved)
        found = self.run.latest(list(self._saved), counters=("kl_coef", "stream"))
        self.kl_coef = kl_term(self.recipe.algorithm).coef if found is None else found.info["kl_coef"]
        if self.held_out is not None:
            self.held_out.restore(found.info.get("alarm") if found is not None else None)
        if found is None:
            return _Beginning(0)
        await checkpoints.load(self._saved, found)
        if self.cast.critic is not None and "emitted" in found.parts:  # of earlier versions, whose driver noted ids
            await self.cast.critic_group().call(CriticWorker.note_seen, found.parts["emitted"])
        ahead = await restored_ahead(self.company.writer, found, self.cast.item)
        return _Beginning(found.step, found.info["stream"], ahead)

    async def _save(self, at: _Beginning) -> None:
        """Saves the state of ``at``, which is the present one."""
        workers, writer = self._saved, self.company.writer
        if at.ahead is not None and await hold_ahead(writer, at.ahead):
            workers = {**workers, AHEAD: writer}
        alarm = self.held_out.state() if self.held_out is not None else None
        info = {"kl_coef": self.kl_coef, "stream": dict(at.stream or {}), "alarm": alarm}
        await checkpoints.save(self.run, workers, at.step, {}, info)

    @contextlib.asynccontextmanager
    async def _saved_if_clean(self, session: Session) -> AsyncIterator[None]:
        """Saves when an iteration fails before its updates begin: the state is still that of the step's beginning.

        The stream's state is that of the beginning, too: the stream itself may have been read to the step's end.
        """
        session.is_learning = False
        try:
            yield
        except (WorkerDied, WeightSyncError):
            raise  # a worker's death is dealt with by going on
        except BaseException:
            step = self._at.step
            if self.run.is_stopped_at_once:
                raise
            if not session.is_learning and step > 0 and step not in self.run.saved_steps():
                await self._save(self._at)
                self.run.drain()
            raise


def _shuffled(seed: int) -> Callable[[int, int], Tensor]:
    def permutation(step: int, num: int) -> Tensor:
        return torch.randperm(num, generator=torch.Generator().manual_seed(seed * 1_000_003 + step))

    return permutation
