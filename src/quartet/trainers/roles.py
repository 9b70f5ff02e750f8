"""The roles of an RL run: loads and checks what a recipe names, and says what each role is asked for.

Episodes as the source of a run's trajectories: run over the rollout engine.

A group is one prompt's episodes. Each is a trajectory of one sequence, or of several where its environment rewrote the
state.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from quartet.batch.trajectory import TrajectoryEnd, last_sequences
from quartet.config import UserError
from quartet.config.algorithms import (
    PPO,
    Distillation,
    OnlineDPO,
    OptimalTokenBaseline,
    PolicyGradient,
    ReMax,
    SelectionAlgorithm,
    keeps_trajectories_whole,
    kl_term,
    reads_old_logprobs,
)
from quartet.config.recipe import EnvironmentConfig, RLRecipe, unused_settings
from quartet.data.datasets import PromptData, PromptItem, draw_row
from quartet.envs.episode import ActFunction, ContextFull, EpisodeError, EpisodeLimits, FinishedEpisode, run_episode
from quartet.envs.protocol import Environment, EnvironmentFactory, Item, environment_factory
from quartet.envs.transcript import SOURCE, ObservedState
from quartet.models.logprobs import SamplingLimits
from quartet.models.packed_model import PackedModel
from quartet.rollout.protocol import SamplingParams
from quartet.rollout.sampler import sample_seed
from quartet.schedule.groups import PromptGroup
from quartet.schedule.iteration import ModelScorer, Scorer, SubsetScorer, run_concurrently
from quartet.schedule.leases import LeaseContext
from quartet.schedule.model_worker import ModelStats, ModelWorker, TrainWorker
from quartet.schedule.role_group import LocalGroup, RoleGroup
from quartet.schedule.rollout import RolloutDriver
from quartet.schedule.rollout_worker import PromptRequest, TurnRequest, sampling_params
from quartet.schedule.weight_sync import CanarySpec
from quartet.text.pictures import image_parts
from quartet.text.tokenizer import check_vocabulary
from quartet.train.engine import TrainEngine
from quartet.train.forward import ForwardNeeds
from quartet.trainers.devices import CPU, META
from quartet.trainers.experience import ENTROPIES, SHARP
from quartet.trainers.input_sources import (
    UNLIMITED,
    check_budget,
    check_context,
    context_length,
    load_prompts,
    vocabulary_size,
)
from quartet.trainers.model_loader import (
    EpisodeScorer,
    ModelLoader,
    RewardModelRole,
    RewardSources,
    UserObjects,
    build_ptx,
    check_reward_columns,
    reward_functions,
    reward_weights,
)
from quartet.trainers.sharded_models import check_cuts, role_shardings


class EpisodeRunner:
    """Runs episodes side by side, at most ``max_environments`` at a time.

    Args:
        make: a fresh environment.
        policy: generates each turn's action, and keeps the episodes' tokens.
        limits: how far an episode may go.
    """

    def __init__(
        self,
        make: EnvironmentFactory,
        config: EnvironmentConfig,
        policy: RolloutDriver,
        limits: EpisodeLimits,
        *,
        run_seed: int,
        on_episode_end: Callable[[int], None] | None = None,
    ) -> None:
        self._make, self._on_error = make, config.on_error
        self._slots = asyncio.Semaphore(config.max_environments)
        self._policy = policy
        self._limits = limits
        self._run_seed = run_seed
        self._on_episode_end = on_episode_end

    async def group(
        self, index: int, item: PromptItem, sampling: SamplingParams, num_episodes: int, *, draw: int | None = None
    ) -> PromptGroup:
        """Runs the episodes of ``item``.

        Args:
            index: place in the stream.
            sampling: of one turn; its seed is not used.
            draw: what is sampled depends on it, the prompt's id, the episode and the turn; ``index`` when left out.
        """
        drawn = index if draw is None else draw
        endings = await run_concurrently([self._episode(index, drawn, item, r, sampling) for r in range(num_episodes)])
        return await self._policy.episodes(index, item, endings)

    async def _episode(
        self, index: int, draw: int, item: PromptItem, response: int, sampling: SamplingParams
    ) -> FinishedEpisode:
        name = f"{index}.{response}"

        async def act(turn: int, seen: ObservedState) -> str:
            params = replace(sampling, seed=sample_seed(self._run_seed, draw, item.prompt_id, response, turn))
            ended = await self._policy.act(index, TurnRequest(f"{name}.{turn}", name, seen, params, self._limits))
            if ended.text is None:
                raise ContextFull(ended.held or 0)
            return ended.text

        seed = sample_seed(self._run_seed, draw, f"{SOURCE}\x1f{item.prompt_id}", 0)
        about = Item(item.prompt, item.columns, item.prompt_id, seed, response)
        async with self._slots:
            ending = await self._played(name, about, act)
        if self._on_episode_end is not None:
            self._on_episode_end(1)
        return ending

    async def _played(self, name: str, about: Item, act: ActFunction) -> FinishedEpisode:
        """Plays the episode, under the rule for environments that fail."""
        try:
            return await run_episode(name, self._make, about, act, self._limits)
        except EpisodeError as error:
            if self._on_error == "stop":
                raise
            self._make.failures.add(error)
        return FinishedEpisode(name, TrajectoryEnd.FAILED, math.nan, None, about.prompt)


CANARY_TOKENS = 4
_LOOKED_AT = 64
"""Prompts among which the canary looks for one with a picture."""
CANARY_TOLERANCE = {"fp32": 1e-3, "bf16": 0.25}


class RLRoles:
    """Everything an RL run computes with. Functions and data are checked first, because they fail fastest.

    Args:
        objects: what comes from Python in the place of what the recipe names.
        shares_reference: as for ``ModelLoader``.
        computes: the run's device; where workers compute, the models made here have no contents.

    Attributes:
        rewards, evaluation_rewards: sources of reward; the latter are asked about held-out answers only.
        workers: of the models in this process, by role.
        groups: what computes each role's passes and updates, by its name; in this process unless replaced.
        described: what the workers say of their models, by role: once they have loaded them, where that is elsewhere.
        ptx: demonstrations that the actor's worker reads; here it is for metrics and warnings, and for that worker.
        on_begun: told of the stream's prompts as their groups are begun, where something gets ready for those to come.

    Raises:
        UserError: recipe, models and data do not fit together.
    """

    on_begun: Callable[[int], None] | None = None

    def __init__(
        self, recipe: RLRecipe, objects: UserObjects, *, shares_reference: bool = True, computes: torch.device = CPU
    ) -> None:
        is_local = recipe.cluster.type == "local"
        self.recipe = recipe
        functions = reward_functions(recipe.rewards, objects.rewards)
        self.environment = _environment(recipe, objects.environment)
        loader = ModelLoader(
            recipe,
            objects,
            device=computes if is_local else META,
            moves_user_models=is_local and recipe.device != "auto",
            computes=computes,
            shares_reference=shares_reference,
        )
        check_vocabulary(loader.tokenizer, vocabulary_size(loader.actor_model))
        self.codec, context = loader.codec, context_length(loader.actor_model)
        self.prompts = load_prompts(recipe.data, objects.prompts, self.codec, context, "data")
        check_reward_columns(functions, self.prompts, self.codec)
        evaluation, rows = recipe.held_out, objects.evaluation_prompts
        only_functions = reward_functions(evaluation.rewards, objects.evaluation_rewards)
        self.evaluation_prompts: PromptData | None = None
        if recipe.evaluation is not None or rows is not None:
            self.evaluation_prompts = load_prompts(evaluation.data, rows, self.codec, context, "evaluation.data")
            check_reward_columns(functions + only_functions, self.evaluation_prompts, self.codec)
        longest = _longest(recipe, self.prompts, context)
        _check_budgets(recipe, longest)
        with contextlib.ExitStack() as taken:
            # When a later model does not fit, those taken over are given back as they were.
            taken.callback(loader.release)
            check_pair_budget(recipe, self.prompts, context, loader.actor.shares_prefixes)
            self.reference = loader.reference
            models, only_models = loader.reward_models, loader.evaluation_reward_models
            own = {SOURCE: recipe.environment.weight} if recipe.environment is not None else {}
            # Names are checked among all, so that none stands for two.
            reward_weights([*models, *only_models, *functions, *only_functions], own)
            self.rewards = RewardSources(models, functions, own)
            self.evaluation_rewards = RewardSources(only_models, only_functions)
            if not self.rewards.weights and not isinstance(recipe.algorithm, Distillation):
                raise UserError(
                    "there is no reward",
                    found="rewards: []",
                    remedy="name a reward model or a function under `rewards`",
                )
            self.critic = loader.critic_engine
            self._check_contexts(longest)
            check_cuts(loader, role_shardings(recipe, shares_reference=shares_reference))
            self.ptx = build_ptx(recipe, objects.ptx_rows, self.codec, context)
            self.actor = loader.actor_engine
            self._check_refresh()
            self.workers: Mapping[str, ModelWorker] = {name: loader.worker(name, self.ptx) for name in loader.roles()}
            taken.pop_all()
        self.groups: dict[str, RoleGroup[ModelWorker]] = {n: LocalGroup(worker) for n, worker in self.workers.items()}
        self.described = {name: worker.describe() for name, worker in self.workers.items()}

    def _check_contexts(self, longest: int) -> None:
        """Checks the contexts of the models beside the actor."""
        if self.reference is not None:
            check_context(self.reference.model, longest, "reference")
        for role in self.reward_models:
            if role.codec is None:
                check_context(role.model.model, longest, f"reward model {role.name!r}")
        if self.critic is not None:
            check_context(self.critic.packed.model, longest, "critic")

    @property
    def reward_models(self) -> list[RewardModelRole]:
        """The reward models of training, then those that score held-out answers only."""
        return [*self.rewards.models, *self.evaluation_rewards.models]

    async def stats(self) -> dict[str, ModelStats]:
        """Returns the counters of every role with a model."""
        return {name: await group.call(ModelWorker.stats) for name, group in self.groups.items()}

    def train_group(self, name: str) -> RoleGroup[TrainWorker]:
        """Returns the group of a role that trains: ``actor`` or ``critic``."""
        return cast(RoleGroup[TrainWorker], self.groups[name])

    async def describe(self) -> None:
        """Has the workers say anew what is to be said of their models.

        Raises:
            UserError: with what came to light the recipe does not fit.
        """
        self.described = {name: await group.call(ModelWorker.describe) for name, group in self.groups.items()}
        check_pair_budget(self.recipe, self.prompts, self.context, self.described["actor"].shares_prefixes)

    @property
    def warmup_steps(self) -> int:
        """First steps, in which only the critic is updated."""
        return self.recipe.critic.warmup_steps if self.critic is not None else 0

    @property
    def context(self) -> int:
        """Longest sequence of the actor, in tokens."""
        return context_length(self.actor.packed.model)

    def engines(self) -> dict[str, TrainEngine[Any]]:
        return {"actor": self.actor, **({"critic": self.critic} if self.critic is not None else {})}

    @property
    def shares_reference(self) -> bool:
        """The reference is the actor without its adapters, so its passes have that module to themselves."""
        return self.reference is self.actor.packed

    def models(self) -> list[PackedModel]:
        found: list[PackedModel] = [engine.packed for engine in self.engines().values()]
        found += [self.reference] if self.reference is not None and not self.shares_reference else []
        return found + [role.model for role in self.reward_models]

    def warnings(self) -> list[str]:
        """Tells what was left out of the data or converted, and what was changed about the models, in words."""
        held_out = self.evaluation_prompts.remarks if self.evaluation_prompts is not None else ()
        found = unused_settings(self.recipe)
        found += [f"data: {warning}" for warning in self.prompts.remarks]
        found += [f"held-out data: {warning}" for warning in held_out]
        found += self.rewards.warnings() + self.evaluation_rewards.warnings()
        found += self.environment.warnings() if self.environment is not None else []
        named = [role.name for role in self.reward_models]
        named += ["reference"] if self.recipe.reference.path is not None and self.reference is not None else []
        found += self._of_models(named)
        return found + self._of_models(self.engines())

    def _of_models(self, roles: Iterable[str]) -> list[str]:
        return [f"{role}: {warning}" for role in roles for warning in self.described[role].warnings]

    def close(self) -> None:
        """Gives the models back their own attention and closes the rewards."""
        for model in self.models():
            model.release()
        self.rewards.close()
        self.evaluation_rewards.close()
        if self.ptx is not None:
            self.ptx.close()

    # What is asked ---------------------------------------------------------------------------------------

    def item(self, index: int) -> PromptItem:
        """Returns the prompt of stream index ``index``: data in an order drawn anew for every pass."""
        row, _ = draw_row(self.recipe.seed, index, self.prompts.order)
        return self.prompts.items[row]

    def requests(self, index: int) -> tuple[PromptItem, PromptRequest]:
        """Returns the prompt of stream index ``index``, and what is asked for it: a sample per response; a greedy one
        follows where it is the method's baseline."""
        recipe, item = self.recipe, self.item(index)
        params = sampling_params(recipe.rollout.sampling, self.codec)
        num, seed = recipe.responses_per_prompt, recipe.seed
        request = PromptRequest.of(str(index), item, params, seed=seed, draw=index, num=num)
        if needs_greedy(recipe):
            greedy = replace(request.samples[f"{index}.0"], temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
            request = replace(request, samples={**request.samples, f"{index}.greedy": greedy})
        return item, request

    # Rewards and columns -----------------------------------------------------------------------------------

    def canary(self) -> CanarySpec:
        """Returns what engines and trainer must agree on after every weight update."""
        tolerance = self.recipe.canary_tolerance or CANARY_TOLERANCE[self.actor.packed.precision]
        # Where there are pictures, one of them too: features that an engine has kept of an older tower would show.
        some = self.prompts.items[:_LOOKED_AT]
        with_pictures = (i for i in some if not isinstance(i.prompt, str) and image_parts(i.prompt))
        item = next(with_pictures, some[0])
        room = max(1, min(CANARY_TOKENS, self.context - item.num_tokens))
        return CanarySpec(item.prompt, room, tolerance)

    def reward_scorers(self, leases: LeaseContext, *, held_out: bool = False) -> list[Scorer]:
        """Returns the sources of reward, of episodes each asked once per trajectory, about its last sequence, also
        where that has several; process rewards read all of them.

        Args:
            held_out: with those that are asked about held-out answers only.
        """
        found = self.rewards.scorers(leases, self.groups)
        found += self.evaluation_rewards.scorers(leases, self.groups) if held_out else []
        if self.environment is None:
            return found
        return [
            scorer if isinstance(scorer, EpisodeScorer) else SubsetScorer(scorer, last_sequences) for scorer in found
        ]

    def column_scorers(self, leases: LeaseContext) -> list[ModelScorer]:
        """Returns the columns that this recipe's algorithm really reads, beside the rewards."""
        recipe, groups = self.recipe, self.groups
        policy = ForwardNeeds(logprobs=True, mask="action_mask", temperature=recipe.rollout.sampling.temperature)
        found: list[ModelScorer] = []
        if self.reference is not None:
            reads: dict[str, int | None] = {"actor": None} if self.shares_reference else {}
            found.append(ModelScorer(leases, "reference", groups["reference"], policy, "ref_logprobs", reads=reads))
        if needs_old_logprobs(recipe):
            own, algorithm = replace(policy, limits=policy_limits(recipe)), recipe.algorithm
            beside, further = dict[str, str](), dict[str, ForwardNeeds]()
            if isinstance(algorithm, PolicyGradient) and algorithm.top_entropy_quantile < 1:
                own, beside = replace(own, entropies=True), {"entropies": ENTROPIES}
            if isinstance(algorithm, OptimalTokenBaseline):
                further = {SHARP: replace(own, entropies=False, temperature=own.temperature / 2)}
            scorer = ModelScorer(leases, "actor", groups["actor"], own, "old_logprobs", beside, further, trains=True)
            found.append(scorer)
        if self.critic is not None:
            # The values of the states behind tokens are read, too.
            after = isinstance(recipe.algorithm, PPO) and recipe.algorithm.bootstrap_truncated
            needs = ForwardNeeds(values=True, step_scores=after, mask="action_mask")
            next_values = {"step_scores": "next_values"} if after else {}
            found.append(ModelScorer(leases, "critic", groups["critic"], needs, "values", next_values, trains=True))
        return found

    # Episodes --------------------------------------------------------------------------------------------

    def source(
        self, rollout: RolloutDriver, on_episode_end: Callable[[int], None]
    ) -> Callable[[int], Awaitable[PromptGroup]]:
        """Returns ``index → group`` of the stream: answers to prompts, or episodes where the recipe has an
        environment."""
        source = rollout.generate if self.environment is None else self._episodes(rollout, on_episode_end)
        if (told := self.on_begun) is None:
            return source

        def begun(index: int) -> Awaitable[PromptGroup]:
            told(index)
            return source(index)

        return begun

    def _episodes(
        self, rollout: RolloutDriver, on_episode_end: Callable[[int], None]
    ) -> Callable[[int], Awaitable[PromptGroup]]:
        recipe = self.recipe
        runner = self.episode_runner(rollout, on_episode_end)
        sampling = sampling_params(recipe.rollout.sampling, self.codec)
        return lambda index: runner.group(index, self.item(index), sampling, recipe.responses_per_prompt)

    def episode_runner(
        self, policy: RolloutDriver, on_episode_end: Callable[[int], None] | None = None
    ) -> EpisodeRunner:
        recipe, config = self.recipe, self.recipe.environment
        assert config is not None and self.environment is not None, "a recipe with an environment"
        limits = EpisodeLimits(
            config.max_turns,
            longest_sequence(config, self.context),
            recipe.actor.train.token_budget if keeps_trajectories_whole(recipe.algorithm) else None,
            config.timeout_s,
        )
        return EpisodeRunner(
            self.environment, config, policy, limits, run_seed=recipe.seed, on_episode_end=on_episode_end
        )

    # Iterative DPO ---------------------------------------------------------------------------------------

    @property
    def refresh_steps(self) -> int | None:
        """Every so many steps the reference takes over the actor's weights, with its adapters in them."""
        return reference_refresh_steps(self.recipe) if self.reference is not None else None

    def _check_refresh(self) -> None:
        if self.refresh_steps is None or self.reference is None:
            return
        with self.actor.packed.without_adapters():
            both = (self.actor.packed.model.state_dict(), self.reference.model.state_dict())
        own, other = ({name: tuple(tensor.shape) for name, tensor in state.items()} for state in both)
        if own != other:
            name = min(name for name, _ in own.items() ^ other.items())
            raise UserError(
                "the reference cannot take over the actor's weights",
                found=f"algorithm.refresh_steps={self.refresh_steps}; the models differ, first in {name}",
                remedy="use a reference.path of the actor's architecture and size, or leave refresh_steps out",
            )

    async def refresh_reference(self, steps: int) -> dict[str, float]:
        """Renews the reference where that is due. Call it after ``steps`` complete steps; returns how old the reference
        is, where it is ever renewed."""
        every = self.refresh_steps
        if every is None:
            return {}
        if steps % every == 0:
            await self.groups["actor"].send(ModelWorker.weights, self.groups["reference"], ModelWorker.load_weights)
        return {"reference/age": float(steps % every)}


def needs_old_logprobs(recipe: RLRecipe) -> bool:
    """Tells whether a run needs the policy's own ``old`` log-probabilities. The first mini-batch's ``old`` is its own
    forward pass; only later ones, KL in the reward, or what depends on all tokens of a step, need another.
    """
    if isinstance(recipe.algorithm, SelectionAlgorithm):
        return False
    kl = kl_term(recipe.algorithm)
    is_in_reward = kl.coef > 0 and kl.place == "reward"
    return recipe.minibatches * recipe.epochs > 1 or is_in_reward or reads_old_logprobs(recipe.algorithm)


def policy_limits(recipe: RLRecipe) -> SamplingLimits | None:
    """Returns what the policy's log-probabilities leave out, as its sampling does. The reference's are always of all
    tokens: their difference is the KL divergence of what is sampled from the reference.
    """
    sampling = recipe.rollout.sampling
    if not (sampling.truncates and sampling.truncated_logprobs):
        return None
    return SamplingLimits(sampling.top_p, sampling.top_k, sampling.min_p)


def needs_greedy(recipe: RLRecipe) -> bool:
    """Tells whether each prompt gets a greedy response too, whose reward is the method's baseline."""
    return isinstance(recipe.algorithm, ReMax)


def check_pair_budget(recipe: RLRecipe, data: PromptData, context: int, shares_prefixes: bool) -> None:
    """Refuses a budget that is too small for a pair: both of its responses have to lie in one micro-batch."""
    share = shares_prefixes and recipe.actor.train.share_prefixes
    if not isinstance(recipe.algorithm, OnlineDPO):
        return
    num_new, lengths_P = recipe.rollout.sampling.max_new_tokens, data.lengths[:, 0]
    both_P = (1 if share else 2) * lengths_P + 2 * (context - lengths_P).clip(max=num_new)
    check_budget(int(both_P.max()), recipe.actor.train.token_budget, "actor.train.token_budget")


def longest_sequence(config: EnvironmentConfig, context: int) -> int:
    """Returns how many tokens one sequence of an episode may have.

    Raises:
        UserError: neither the recipe nor the model has a limit.
    """
    if config.max_tokens is None and context >= UNLIMITED:
        raise UserError(
            "episodes have no length limit",
            found="the model names no context, the recipe no environment.max_tokens",
            remedy="set environment.max_tokens",
        )
    return min(context, config.max_tokens or context)


def _longest(recipe: RLRecipe, data: PromptData, context: int) -> int:
    """Returns the length in tokens of the longest sequence that the run may make."""
    if recipe.environment is not None:
        return longest_sequence(recipe.environment, context)
    return min(context, int(data.lengths.max()) + recipe.rollout.sampling.max_new_tokens)


def _environment(recipe: RLRecipe, environment: Callable[..., Environment] | None) -> EnvironmentFactory | None:
    if recipe.environment is not None:
        return environment_factory(recipe.environment, environment)
    if environment is not None:
        raise UserError(
            "an environment is passed that the recipe does not know of",
            found="the recipe's `environment` is left out",
            remedy="give the recipe environment=EnvironmentConfig(…), with target left out",
        )
    return None


def _check_budgets(recipe: RLRecipe, longest: int) -> None:
    roles = {"actor": recipe.actor.train}
    if recipe.algorithm.name == "ppo":
        roles["critic"] = recipe.critic.train
    for role, config in roles.items():
        check_budget(longest, config.token_budget, f"{role}.train.token_budget")
        check_budget(longest, config.forward_token_budget, f"{role}.train.forward_token_budget")


def reference_refresh_steps(recipe: RLRecipe) -> int | None:
    return recipe.algorithm.refresh_steps if isinstance(recipe.algorithm, OnlineDPO) else None
