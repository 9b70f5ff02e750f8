"""The roles of an RL run from one step on: arbiter, stream, scorers, learners. After a death there is another one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.algorithms import GroupAlgorithm, OnlineDPO, Selection, kl_term
from quartet.config.placement import AsynchronousPlacement
from quartet.observe.spans import SpanRecorder
from quartet.schedule.ahead import ScoringAhead
from quartet.schedule.barriers import Barriers
from quartet.schedule.groups import Group, chunk_of, without_texts
from quartet.schedule.iteration import Chunk, Collect, Roles, Scorer
from quartet.schedule.iteration import Learner as AnyLearner
from quartet.schedule.journal import Journal
from quartet.schedule.learners import Learner, UpdatePlan
from quartet.schedule.placement import admission_rule, placed_arbiter
from quartet.schedule.rollout import Rollout
from quartet.schedule.scorers import PartScorer
from quartet.schedule.stream import GroupStream
from quartet.schedule.worker import Worker
from quartet.train.engine import Objective
from quartet.train.objectives import PolicyObjective, ValueObjective
from quartet.trainers.advantages import Assembler, Experience
from quartet.trainers.cast import Cast, needs_greedy
from quartet.trainers.company import Company, PartsMover, Sizes
from quartet.trainers.dynamic_sampling import DynamicSampling
from quartet.trainers.greedy import sampled_and_greedy, sampled_only
from quartet.trainers.run import writing
from quartet.trainers.selection import learned_from, selection_objective


@dataclass(frozen=True)
class Play:
    """What every session of a run is made of.

    Args:
        kl_coef: the coefficient now in force.
        shuffle: of scores within a step, for control experiments.
        warmup_steps: first steps, in which the actor rests.
        on_finished: told of completions, or episodes, that ended.
        path: the run directory. An asynchronous session notes in ``journal.jsonl`` what durations decided, one that
            begins after ``step`` steps in ``journal_<step>.jsonl``.
    """

    cast: Cast
    company: Company
    recorder: SpanRecorder
    kl_coef: Callable[[], float]
    shuffle: Callable[[int, int], Tensor] | None
    warmup_steps: int
    on_finished: Callable[[int], None]
    path: Path


class Session:
    """
    Args:
        step: complete steps so far, which is the version of all weights.
        sizes: role → mode → bytes.

    Attributes:
        is_learning: updates of the step under way have begun, so the weights are no longer those of its beginning.
        generated: what the engines had sampled when the step's rollouts were complete.
    """

    def __init__(self, play: Play, step: int, sizes: Sizes) -> None:
        self.play = play
        self.cast, self.recipe = play.cast, play.cast.recipe
        self.is_learning = False
        placement = play.company.placement
        self.mover = PartsMover(play.company, play.recorder)
        self.worker = Worker(placed_arbiter(placement, sizes, version=step, mover=self.mover), play.recorder)
        self.journal = self._journal(step)
        self.rollout = self._rollout(step)
        self._assembler = Assembler(
            self.recipe.algorithm,
            self.cast.reward_weights,
            play.kl_coef,
            play.shuffle,
            max_new_tokens=self.recipe.rollout.sampling.max_new_tokens,
        )
        source = self.cast.source(self.rollout, play.on_finished)
        self.sampling = self._dynamic_sampling(source)
        rule, chunk_size = admission_rule(placement, self.recipe.prompts_per_step), self.recipe.chunk_size
        if self.sampling is None:
            self.stream = GroupStream(source, rule, chunk_size=chunk_size)
        else:
            self.stream = self.sampling.stream(rule, chunk_size=chunk_size)
        self.roles = self._roles()
        self.generated = self._sampled = self.rollout.stats()

    def _rollout(self, step: int) -> Rollout:
        play, cast, config = self.play, self.cast, self.recipe.rollout
        return Rollout(
            self.worker,
            play.company.engines,
            cast.requests,
            steps_per_lease=config.steps_per_lease,
            version=step,
            canary=cast.canary(),
            trainer=cast.trained_group("actor"),
            deliver=play.company.deliver,
            shares_actor=play.company.shares_actor,
            in_flight=play.company.placement.in_flight,
            max_running=config.max_running if play.company.placement.max_staleness is not None else None,
            journal=self.journal,
            on_finished=play.on_finished if cast.environment is None else None,
        )

    def _journal(self, step: int) -> Journal | None:
        """What durations decide when generation runs ahead; kept where it can be followed."""
        placement = self.recipe.placement
        if not isinstance(placement, AsynchronousPlacement):
            return None
        can_be_kept = len(self.play.company.engines) == 1 and self.cast.environment is None
        if placement.follow is None and not can_be_kept:
            return None
        if placement.follow is not None and step:
            raise UserError(
                "a journal is followed from a run's first step only",
                found=f"placement.follow, and a run that goes on after step {step}",
                remedy="start the run again in another output_dir",
            )
        script = Journal.load(Path(placement.follow)) if placement.follow is not None else []
        path = self.play.path / (f"journal_{step:08d}.jsonl" if step else "journal.jsonl")
        with writing(path):
            path.unlink(missing_ok=True)
            return Journal(script, path)

    def _dynamic_sampling(self, source: Callable[[int], Awaitable[Group]]) -> DynamicSampling | None:
        algorithm = self.recipe.algorithm
        if not isinstance(algorithm, GroupAlgorithm) or algorithm.dynamic_sampling is None:
            return None
        rewards = self.cast.reward_scorers(self.worker)
        return DynamicSampling(
            algorithm.dynamic_sampling,
            source,
            lambda: self.rollout.version,
            rewards,
            self._assembler.judge,
        )

    # The iteration's roles -------------------------------------------------------------------------------

    def _roles(self) -> Roles[Group, RaggedBatch, Any, Experience]:
        recipe = self.recipe
        num_chunks = -(-recipe.prompts_per_step // recipe.chunk_size)
        barriers = Barriers(self.play.company.placement.after, num_chunks=num_chunks)
        collect = barriers.collect(self._collected())
        scorers = [(barriers.scorer(stage, scorer), is_frozen) for stage, scorer, is_frozen in self._scorers()]
        frozen = [scorer for scorer, is_frozen in scorers if is_frozen]
        runs_ahead = self.play.company.placement.max_staleness is not None
        return Roles(
            stream=self.stream,
            collect=collect,
            scorers=[scorer for scorer, _ in scorers],
            assemble=self._assemble,
            learners=[barriers.learner(f"train_{role}", learner) for role, learner in self._learners()],
            publish=self.rollout.publish,
            ahead=ScoringAhead(self.stream, collect, frozen, recipe.steps) if runs_ahead else None,
        )

    def _collected(self) -> Collect[Group, RaggedBatch]:
        """Chunks of groups, of which the journal is told; followed, it compares them."""
        journal = self.journal

        def collect(step: int, index: int, groups: Sequence[Group]) -> Chunk[RaggedBatch]:
            if journal is not None:
                journal.consume(step, index, [group.consumed() for group in groups])
            # Now, not when all is scored: how far an engine elsewhere has come by then is a matter of time.
            self._sampled = self.rollout.stats()
            return chunk_of(step, index, groups)

        return collect

    def _scorers(self) -> list[tuple[str, Scorer[RaggedBatch, ColumnSet], bool]]:
        """With their stages, and whether training leaves their columns as they are: rewards, unless groups come with
        theirs, and columns, which greedy responses have not."""
        recipe, has_greedy = self.recipe, needs_greedy(self.recipe)
        found: list[tuple[str, Scorer[RaggedBatch, ColumnSet], bool]] = []
        for reward in self.cast.reward_scorers(self.worker) if self.sampling is None else []:
            found.append(("reward", PartScorer(reward, sampled_and_greedy) if has_greedy else reward, True))
        refreshes = isinstance(recipe.algorithm, OnlineDPO) and recipe.algorithm.refresh_steps is not None
        for column in self.cast.column_scorers(self.worker):
            is_frozen = not column.trains and not refreshes
            found.append((column.column, PartScorer(column, sampled_only) if has_greedy else column, is_frozen))
        return found

    async def _assemble(self, chunks: Sequence[tuple[Any, Sequence[Any]]]) -> Experience:
        with self.play.recorder.span("advantages", step=chunks[0][0].step):
            experience = await self.play.company.compute.run(partial(self._assembler, chunks))
        experience = _without_texts(experience)
        self.generated = self._sampled  # chunks of coming steps are collected from here on
        self.is_learning = True
        return experience

    def _learners(self) -> list[tuple[str, AnyLearner[Experience]]]:
        recipe, cast, algorithm = self.recipe, self.cast, self.recipe.algorithm
        plan = UpdatePlan(recipe.minibatches, recipe.epochs, recipe.seed)
        num_trajectories = recipe.prompts_per_step * recipe.responses_per_prompt
        learners: list[Learner] = []
        if cast.critic is not None and algorithm.name == "ppo":
            ppo = algorithm

            def value(is_first: bool) -> Objective:
                return ValueObjective(ppo, num_trajectories)

            critic = cast.trained_group("critic")
            learners.append(Learner(self.worker, "critic", critic, plan, value, "critic", learned=self._learned))
        actor, resting = cast.trained_group("actor"), self.play.warmup_steps
        learners.append(Learner(self.worker, "actor", actor, plan, self._policy, "policy", resting, self._learned))
        return [(learner.role, learner) for learner in learners]

    def _learned(self, experience: Experience) -> RaggedBatch:
        algorithm = self.recipe.algorithm
        return learned_from(algorithm, experience.batch) if isinstance(algorithm, Selection) else experience.batch

    def _policy(self, is_first: bool) -> Objective:
        recipe, algorithm = self.recipe, self.recipe.algorithm
        num_trajectories = recipe.prompts_per_step * recipe.responses_per_prompt
        turns = recipe.environment.max_turns if recipe.environment is not None else 1
        longest, temperature = recipe.rollout.sampling.max_new_tokens * turns, recipe.rollout.sampling.temperature
        if isinstance(algorithm, Selection):
            return selection_objective(algorithm, num_trajectories, temperature, longest, is_first=is_first)
        kl_coef = self.play.kl_coef() if kl_term(algorithm).place == "loss" else 0.0
        return PolicyObjective(algorithm, num_trajectories, temperature, kl_coef, is_first, longest)

    async def aclose(self) -> None:
        """Stops scoring ahead and the engines' pumps."""
        if self.roles.ahead is not None:
            await self.roles.ahead.close()
        await self.rollout.close()
        if self.journal is not None:
            self.journal.close()


def _without_texts(experience: Experience) -> Experience:
    greedy = without_texts(experience.greedy) if experience.greedy is not None else None
    return replace(experience, batch=without_texts(experience.batch), greedy=greedy)
