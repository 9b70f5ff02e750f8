"""Arbiter, stream, scorers and learners of an RL run from one step on, made anew after a worker's death; and the
metrics of a step beside its losses: seconds, lengths, episodes, baselines, memory.

Dynamic sampling (Yu et al. 2025, DAPO §3.2): groups without variance are replaced by newly sampled prompts.

A group whose responses all have the same score has advantages of exactly 0, so a step full of such groups learns
nothing. Here a group is scored as soon as it is complete, and takes part only if its shaped scores differ, the same
question as `groups/zero_variance` asks. The reward columns stay with the group and are not computed again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch, join_columns
from quartet.batch.trajectory import CUT_OFF, Trajectories, TrajectoryEnd, num_policy_tokens
from quartet.config import UserError
from quartet.config.algorithms import BestOfN, DynamicSamplingConfig, GroupAlgorithm, OnlineDPO, SelectionAlgorithm
from quartet.config.engines import is_served
from quartet.config.placement import HEADS, VISION
from quartet.observe.health import straggler_metrics
from quartet.observe.memory import resident_bytes
from quartet.observe.spans import Span, overlap_seconds, seconds_by_name
from quartet.rollout.protocol import EngineStats
from quartet.schedule.groups import (
    REPETITION,
    AdmissionRule,
    GroupStream,
    PromptGroup,
    drop_texts,
    make_chunk,
    staleness_metrics,
)
from quartet.schedule.iteration import (
    DrafterLearner,
    IterationStages,
    ModelLearner,
    Scorer,
    SubsetScorer,
    UpdatePlan,
    score_chunk,
)
from quartet.schedule.iteration import StepLearner as AnyLearner
from quartet.schedule.leases import LeaseContext, arbiter_for_placement
from quartet.schedule.rollout import RolloutDriver
from quartet.train.engine import Objective
from quartet.train.objectives import BestOfNObjective, PolicyObjective, PreferenceObjective, ValueObjective
from quartet.trainers.devices import throughput
from quartet.trainers.experience import (
    BASELINE,
    Experience,
    ExperienceAssembler,
    KLCoefficient,
    ScoredGroups,
    sampled_and_greedy,
    sampled_only,
    select_learned,
)
from quartet.trainers.roles import RLRoles, needs_greedy, policy_limits
from quartet.trainers.run import RunDirectory, Stopwatch
from quartet.trainers.workers import RoleOffloader, RunWorkers


class DynamicSampling:
    """Scores groups when they are complete and keeps those with variance.

    Args:
        source: ``index → group``.
        version: that of the weights now in force, which is also the number of the step.
        scorers: the reward sources.
        judge: scores of a batch with its reward columns.
    """

    def __init__(
        self,
        config: DynamicSamplingConfig,
        source: Callable[[int], Awaitable[PromptGroup]],
        version: Callable[[], int],
        scorers: Sequence[Scorer],
        judge: Callable[[RaggedBatch], ScoredGroups],
    ) -> None:
        self.config = config
        self._source = source
        self._version = version
        self._scorers = scorers
        self._judge = judge
        self._outcomes: dict[int, tuple[bool, Tensor]] = {}  # by group: whether its scores differ, and they themselves

    def stream(self, rule: AdmissionRule, *, chunk_size: int) -> GroupStream:
        """Makes the stream of groups with variance, replaced in rounds, as which requests share the engine's batch must
        not depend on how long a reward takes."""
        return GroupStream(
            self.produce,
            rule,
            chunk_size=chunk_size,
            accept=self.accept,
            max_attempts=int(self.config.max_prompts_factor * rule.prompts_per_step),
            shortage=self._too_few,
        )

    async def produce(self, index: int) -> PromptGroup:
        """Produces the group at ``index`` with its reward columns."""
        group = await self._source(index)
        chunk = make_chunk(self._version(), index, [group])
        scored = join_columns(chunk.data, *await score_chunk(self._scorers, chunk))
        judged = self._judge(scored)
        values = judged.shaped_N[judged.applies_N]
        varies = len(values) > 1 and bool((values != values[0]).any())
        self._outcomes[index] = varies, judged.scores_N[judged.applies_N].to(torch.float64)
        return replace(group, batch=scored)

    def accept(self, group: PromptGroup) -> bool:
        return self._outcomes[group.index][0]

    def take_metrics(self) -> dict[str, float]:
        """Returns figures of the groups sampled since the last call."""
        # In the order of the stream: sums must not depend on which group was scored first.
        outcomes = [self._outcomes[index] for index in sorted(self._outcomes)]
        self._outcomes.clear()
        if not outcomes:  # all of the step's were sampled earlier: generation runs ahead
            return {}
        rejected = sum(not varies for varies, _ in outcomes)
        found = {"groups/sampled": float(len(outcomes)), "groups/rejected_frac": rejected / len(outcomes)}
        num = sum(len(scores) for _, scores in outcomes)
        if num:
            found["reward/sampled_score_mean"] = sum(float(scores.sum()) for _, scores in outcomes) / num
        return found

    def _too_few(self, step: int, wanted: int, accepted: int, attempts: int) -> UserError:
        key = "algorithm.dynamic_sampling.max_prompts_factor"
        return UserError(
            f"step {step + 1}: too few groups have responses with different scores",
            found=f"{attempts} groups tried, {accepted} with variance, {wanted} needed; "
            f"{key}={self.config.max_prompts_factor:g}",
            remedy="use prompts that the model solves sometimes, more responses_per_prompt or a reward with more "
            f"grades; a resumed run may also raise {key}. Nothing of this step was trained on",
        )


class RLLoop:
    """What an RL run computes with from ``step`` on, until it ends or a worker dies.

    Args:
        on_finished: told of completions, or episodes, that ended.
        step: complete steps so far, which is the version of all weights.
        shuffle: of scores within a step, for control experiments.

    Attributes:
        is_learning: updates of the step under way have begun, so the weights are no longer those of its beginning.
    """

    def __init__(
        self,
        roles: RLRoles,
        workers: RunWorkers,
        run: RunDirectory,
        kl: KLCoefficient,
        on_finished: Callable[[int], None],
        step: int,
        *,
        shuffle: Callable[[int, int], Tensor] | None = None,
    ) -> None:
        self.roles, self.recipe, self._workers = roles, roles.recipe, workers
        self._run, self._recorder, self._kl = run, run.recorder, kl
        self._on_finished, self._step, self._shuffle = on_finished, step, shuffle
        self._runs_ahead = workers.placement.max_staleness is not None
        self._trains_drafter = HEADS in workers.placement.pool_of
        self._offloader = RoleOffloader(workers, self._recorder)
        self._sampling: DynamicSampling | None = None
        self.is_learning = False

    async def begin(self) -> None:
        """Connects actor and engines, brings the engines to the weights of ``step``, and makes what computes."""
        workers, placement, step = self._workers, self._workers.placement, self._step
        sizes = await workers.sizes()
        await workers.connect_engines()
        await workers.update_engine_weights(step)
        await workers.clear()
        arbiter = arbiter_for_placement(placement, sizes, version=step, offloader=self._offloader)
        self.leases = LeaseContext(arbiter, self._recorder)
        self.rollout = self._rollout(step)
        self._assembler = ExperienceAssembler(
            self.recipe.algorithm,
            self.roles.rewards.weights,
            lambda: self._kl.value,
            self._shuffle,
            max_new_tokens=self.recipe.rollout.sampling.max_new_tokens,
            seed=self.recipe.seed,
        )
        source = self.roles.source(self.rollout, self._on_finished)
        rule = AdmissionRule(self.recipe.prompts_per_step, placement.max_staleness)
        chunk_size = self.recipe.chunk_size
        algorithm = self.recipe.algorithm
        if isinstance(algorithm, GroupAlgorithm) and algorithm.dynamic_sampling is not None:
            rewards = self.roles.reward_scorers(self.leases)
            self._sampling = DynamicSampling(
                algorithm.dynamic_sampling, source, lambda: self.rollout.version, rewards, self._assembler.judge
            )
            self.stream = self._sampling.stream(rule, chunk_size=chunk_size)
        else:
            self.stream = GroupStream(source, rule, chunk_size=chunk_size)
        self.stages = self._stages()
        # What the engines had sampled: before the step's rollouts, when these were complete, and by the last chunk.
        self._before = self._generated = self._sampled = self.rollout.stats()
        await self.rollout.begin()

    def begin_step(self) -> None:
        self.is_learning = False
        # An engine that is ahead samples for this step while the learners of the one before work.
        self._before = self._generated if self._runs_ahead else self.rollout.stats()

    async def metrics(self, step: int, experience: Experience, watch: Stopwatch) -> dict[str, float]:
        """Returns metrics of a complete iteration, beside those that scorers and learners return."""
        batch, before, after = experience.batch, self._before, self._generated
        generated = after.generated_tokens - before.generated_tokens
        done, minibatches = step + 1, self.recipe.minibatches * self.recipe.epochs
        seconds, spans = watch.seconds, self._recorder.of_step(step)
        trained, of_role = done - self.roles.warmup_steps, await self.roles.stats()
        stats = of_role.values()
        pictures = sum(of.work.pictures for of in stats) + after.num_pictures - before.num_pictures
        return {
            **timing_metrics(spans, seconds, generated),
            **throughput(
                seconds,
                samples=len(Trajectories.of(batch)),
                tokens=batch.num_tokens,
                devices=self._workers.placement.num_processes,
                works={role: of.work for role, of in of_role.items()},
            ),
            "throughput/weight_sync_bytes": float(sum(s.nbytes or 0 for s in spans if s.name == "publish")),
            **batch_metrics(batch),
            **(staleness_metrics(batch, step) if self._runs_ahead else {}),
            **(self._sampling.take_metrics() if self._sampling is not None else {}),
            **(self.roles.ptx.metrics(trained * minibatches) if self.roles.ptx is not None and trained > 0 else {}),
            **await self.roles.refresh_reference(done),
            **({"pictures/computed": float(pictures)} if VISION in self._workers.placement.pool_of else {}),
            **self._engine_metrics(),
            **(draft_metrics(before, after) if self.recipe.rollout.speculation is not None else {}),
            "rollout/prefill_tokens": float(after.prompt_tokens_prefilled - before.prompt_tokens_prefilled),
            "memory/rss_bytes": resident_bytes(),
            "optim/skipped_steps": float(sum(of.num_skipped for of in stats)),
            "train/token_budget": float(min(of.token_budget for of in stats if of.token_budget)),
            "train/num_oom": float(sum(of.num_oom for of in stats)),
            **self._offloader.take_metrics(),
        }

    def _engine_metrics(self) -> dict[str, float]:
        """Tells what happened to engines since the run, or the loop after a worker's death, began."""
        if not is_served(self.recipe.rollout.engine):
            return {}
        stats = self.rollout.stats()
        counts = {"restarts": stats.num_restarts, "rerouted": stats.num_rerouted, "retries": stats.num_retries}
        return {f"engine/{name}": float(count) for name, count in counts.items()}

    def _rollout(self, step: int) -> RolloutDriver:
        roles, workers, config = self.roles, self._workers, self.recipe.rollout
        return RolloutDriver(
            self.leases,
            workers.engines,
            roles.requests,
            steps_per_lease=config.engine.steps_per_lease,
            version=step,
            canary=roles.canary(),
            trainer=roles.train_group("actor"),
            update_engine_weights=workers.update_engine_weights,
            shares_actor=workers.shares_actor,
            sends=("actor", HEADS) if self._trains_drafter else ("actor",),
            in_flight=workers.placement.in_flight,
            max_running=config.engine.capacity if self._runs_ahead else None,
            balances=is_served(config.engine),
            on_finished=self._on_finished if roles.environment is None else None,
        )

    # The iteration's roles -------------------------------------------------------------------------------

    def _stages(self) -> IterationStages:
        return IterationStages.wired(
            self.rollout,
            self.stream,
            self._scorers(),
            self._assemble,
            self._learners(),
            placement=self._workers.placement,
            on_chunk=self._note_sampled,
            num_steps=self.recipe.steps,
        )

    def _note_sampled(self, step: int, groups: Sequence[PromptGroup]) -> None:
        # Now, not when all is scored: how far an engine elsewhere has come by then is a matter of time.
        self._sampled = self.rollout.stats()

    def _scorers(self) -> list[tuple[Scorer, bool]]:
        """Returns scorers, each with whether its columns stay the same while the actor trains. Rewards are left out
        where groups are scored as they are sampled; greedy responses have rewards, but no columns of models."""
        has_greedy = needs_greedy(self.recipe)
        found: list[tuple[Scorer, bool]] = []
        for reward in self.roles.reward_scorers(self.leases) if self._sampling is None else []:
            found.append((SubsetScorer(reward, sampled_and_greedy) if has_greedy else reward, True))
        for column in self.roles.column_scorers(self.leases):
            is_frozen = not column.trains and self.roles.refresh_steps is None
            found.append((SubsetScorer(column, sampled_only) if has_greedy else column, is_frozen))
        return found

    async def _assemble(self, chunks: Sequence[tuple[Any, Sequence[Any]]]) -> Experience:
        with self._recorder.span("advantages", step=chunks[0][0].step):
            experience = await self._workers.compute.run(partial(self._assembler, chunks))
        greedy = drop_texts(experience.greedy) if experience.greedy is not None else None
        experience = replace(experience, batch=drop_texts(experience.batch), greedy=greedy)
        self._generated = self._sampled  # chunks of coming steps are collected from here on
        self.is_learning = True
        return experience

    def _learners(self) -> list[AnyLearner]:
        recipe, roles = self.recipe, self.roles
        plan = UpdatePlan(recipe.minibatches, recipe.epochs, recipe.seed)

        def learner(role: str, objective: Callable[[bool], Objective], prefix: str, rests: int) -> AnyLearner:
            group = roles.train_group(role)
            return ModelLearner(self.leases, role, group, plan, objective, prefix, rests, self.learned)

        critic = [learner("critic", self._value, "critic", 0)] if roles.critic is not None else []
        actor = learner("actor", self.policy_objective, "policy", roles.warmup_steps)
        heads = [DrafterLearner(self.leases, roles.train_group("actor"))] if self._trains_drafter else []
        return [*critic, actor, *heads]

    def learned(self, experience: Experience) -> RaggedBatch:
        """Returns what the actor learns from."""
        algorithm = self.recipe.algorithm
        return (
            select_learned(algorithm, experience.batch)
            if isinstance(algorithm, SelectionAlgorithm)
            else experience.batch
        )

    def _value(self, is_first: bool) -> Objective:
        algorithm = self.recipe.algorithm
        assert algorithm.name == "ppo", "only PPO has a critic"
        return ValueObjective(algorithm, self.recipe.prompts_per_step * self.recipe.responses_per_prompt)

    def policy_objective(self, is_first: bool) -> Objective:
        """Makes the objective of a mini-batch of the actor, the first of its step or not."""
        recipe, algorithm = self.recipe, self.recipe.algorithm
        num = recipe.prompts_per_step * recipe.responses_per_prompt
        turns = recipe.environment.max_turns if recipe.environment is not None else 1
        longest, temperature = recipe.rollout.sampling.max_new_tokens * turns, recipe.rollout.sampling.temperature
        if isinstance(algorithm, BestOfN):
            return BestOfNObjective(algorithm.aggregation, num, temperature, longest, is_first)
        if isinstance(algorithm, OnlineDPO):
            return PreferenceObjective(algorithm.loss, temperature, compare_sampler=is_first)
        kl_coef = self._kl.value if self._kl.term.place == "loss" else 0.0
        return PolicyObjective(algorithm, num, temperature, kl_coef, is_first, longest, policy_limits(recipe))

    async def aclose(self) -> None:
        """Stops the score prefetcher and the engine clients."""
        if self.stages.prefetch is not None:
            await self.stages.prefetch.close()
        await self.rollout.close()


# Metrics of a step ----------------------------------------------------------------------------------------


def timing_metrics(spans: Sequence[Span], wall_s: float, generated: int) -> dict[str, float]:
    """Returns the seconds of each stage and of the step; ``generated`` tokens were sampled in it."""
    seconds = seconds_by_name(spans)
    found = {f"time/{name}_s": value for name, value in seconds.items()}
    found |= straggler_metrics(spans)
    found["time/step_s"] = wall_s
    found["rollout/tokens"] = float(generated)
    bursts = [span for span in spans if span.name == "generate"]
    if seconds.get("generate"):
        # Of the engine's leases: an engine that is ahead has sampled some of the step's tokens earlier.
        found["rollout/tokens_per_s"] = sum(span.tokens or 0 for span in bursts) / seconds["generate"]
    compared = [Span("scoring", s.start_s, s.end_s) for s in spans if s.chunk is not None]
    if bursts:  # from the first to the last one, as one
        compared.append(Span("generation", min(s.start_s for s in bursts), max(s.end_s for s in bursts)))
    found["overlap/score_generate_s"] = overlap_seconds(compared, "generation", "scoring")
    return found


def draft_metrics(before: EngineStats, after: EngineStats) -> dict[str, float]:
    """Tells what became of drafted tokens between two states of the engines; nothing where none decoded."""
    rows = after.num_row_steps - before.num_row_steps
    if not rows:
        return {}
    drafted, kept = (
        [late - early for early, late in zip_longest(*counts, fillvalue=0)]
        for counts in (
            (before.drafted_by_depth, after.drafted_by_depth),
            (before.kept_by_depth, after.kept_by_depth),
        )
    )
    counts = enumerate(zip(drafted, kept, strict=True), 1)
    by_depth = {f"rollout/accepted_by_depth_{depth}": k / d for depth, (d, k) in counts if d}
    acceptance = {"rollout/draft_acceptance": sum(kept) / sum(drafted)} if any(drafted) else {}
    return {"rollout/tokens_per_forward": 1 + sum(kept) / rows, **acceptance, **by_depth}


def batch_metrics(batch: RaggedBatch) -> dict[str, float]:
    """Measures lengths, and what episodes and the greedy baseline add where there are any."""
    trajectories = Trajectories.of(batch)
    emitted = num_policy_tokens(batch, trajectories)
    return {
        "rollout/length_mean": float(emitted.mean()),
        "rollout/length_max": float(emitted.max()),
        "rollout/truncated_frac": float((~batch.sequence["ended"][trajectories.final_N]).float().mean()),
        "tokens/useful": float(batch.num_tokens),
        **repetition_metrics(batch),
        **episode_metrics(batch),
        **greedy_metrics(batch),
    }


def repetition_metrics(batch: RaggedBatch) -> dict[str, float]:
    """Measures repetition within responses."""
    found = [each for each in batch.objects.get(REPETITION, ()) if each is not None]
    if not found:
        return {}
    shares, longest = zip(*found, strict=True)
    return {"rollout/repetition_frac": sum(shares) / len(shares), "rollout/repetition_max": float(max(longest))}


def episode_metrics(batch: RaggedBatch) -> dict[str, float]:
    """Tells how the episodes of a step went; nothing where there are none."""
    if "observation_mask" not in batch.token:
        return {}
    num = len(Trajectories.of(batch))
    reasons = batch.objects["finish_reason"]
    failed = sum(reason == TrajectoryEnd.FAILED for reason in reasons)
    cut_off = failed + sum(reason in CUT_OFF for reason in reasons)
    return {
        "episode/turns_mean": float(batch.sequence["num_turns"].sum()) / num,
        "episode/sequences_mean": len(batch) / num,
        "episode/observation_tokens": float(batch.token["observation_mask"].sum()) / num,
        "episode/done_frac": 1.0 - cut_off / num,
        **({"episode/left_out": float(failed)} if failed else {}),
    }


def greedy_metrics(batch: RaggedBatch) -> dict[str, float]:
    """Returns the mean baseline over the prompts of a step that have one; nothing where the method has none."""
    if BASELINE not in batch.sequence:
        return {}
    by_group = dict(zip(batch.sequence["group"].tolist(), batch.sequence[BASELINE].tolist(), strict=True))
    found = torch.tensor(list(by_group.values())).nanmean()
    return {} if bool(found.isnan()) else {"reward/greedy_mean": float(found)}
