"""The cast of an RL run: who plays which role, and what each is asked."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.algorithms import PPO, OnlineDPO, ReMax, Selection, keeps_trajectories_whole, kl_term
from quartet.config.fits import without_effect
from quartet.config.recipe import EnvironmentConfig, RLRecipe
from quartet.data.datasets import PromptData, PromptItem
from quartet.data.order import draw
from quartet.envs.episode import EpisodeLimits
from quartet.envs.protocol import EnvironmentFactory
from quartet.models.packed import PackedCausalLM, PackedModel, PackedScalarModel
from quartet.rollout.seeds import sample_seed
from quartet.schedule.groups import Group
from quartet.schedule.iteration import Scorer
from quartet.schedule.model_worker import CriticWorker, Described, ModelStats, ModelWorker, TrainWorker
from quartet.schedule.role_group import LocalGroup, RoleGroup
from quartet.schedule.rollout import Rollout
from quartet.schedule.rollout_worker import CanaryProbe
from quartet.schedule.sampled import PromptRequest, Sample
from quartet.schedule.scorers import ModelScorer, PartScorer
from quartet.schedule.worker import Worker
from quartet.text.tokenizer import TextCodec
from quartet.train.engine import Needs, TrainEngine
from quartet.trainers.episodes import EpisodePlayer, Policy
from quartet.trainers.evaluation import sampling_params
from quartet.trainers.process_roles import ProcessScorer
from quartet.trainers.ptx import PTX
from quartet.trainers.reward_roles import RewardFunctionRole, RewardModelRole, reward_scorers
from quartet.trainers.sources import UNLIMITED, check_budget, context_length, cut_short
from quartet.trainers.trajectories import last_ones

CANARY_TOKENS = 4
CANARY_TOLERANCE = {"fp32": 1e-3, "bf16": 0.25}


@dataclass
class Cast:
    """Everything an RL run plays with.

    Args:
        workers: of the models in this process, by role.
        evaluation_models, evaluation_functions, evaluation_weights: sources that are asked about held-out answers only.
        ptx: demonstrations that the actor's worker reads; here it is for figures and remarks, and for that worker.
    """

    recipe: RLRecipe
    codec: TextCodec
    prompts: PromptData
    evaluation_prompts: PromptData | None
    workers: Mapping[str, ModelWorker]
    actor: TrainEngine[PackedCausalLM]
    critic: TrainEngine[PackedScalarModel] | None
    reference: PackedCausalLM | None
    reward_models: list[RewardModelRole]
    reward_functions: list[RewardFunctionRole]
    reward_weights: dict[str, float]
    evaluation_models: list[RewardModelRole] = field(default_factory=list)
    evaluation_functions: list[RewardFunctionRole] = field(default_factory=list)
    evaluation_weights: dict[str, float] = field(default_factory=dict)
    environment: EnvironmentFactory | None = None
    ptx: PTX | None = None
    groups: dict[str, RoleGroup[ModelWorker]] = field(init=False)
    """What computes each role's passes and updates, by its name; in this process unless somebody puts others there."""
    described: dict[str, Described] = field(init=False)
    """What the workers say of their models, by role: once they have loaded them, where that is elsewhere."""

    def __post_init__(self) -> None:
        self.groups = {name: LocalGroup(worker) for name, worker in self.workers.items()}
        self.described = {name: worker.describe() for name, worker in self.workers.items()}

    async def stats(self) -> dict[str, ModelStats]:
        """Of every role with a model."""
        return {name: await group.call(ModelWorker.stats) for name, group in self.groups.items()}

    def trained_group(self, name: str) -> RoleGroup[TrainWorker]:
        """The group of a role that trains: ``actor`` or ``critic``."""
        return cast(RoleGroup[TrainWorker], self.groups[name])

    def critic_group(self) -> RoleGroup[CriticWorker]:
        return cast(RoleGroup[CriticWorker], self.groups["critic"])

    async def describe(self) -> None:
        """Has the workers say anew what is to be said of their models.

        Raises:
            UserError: with what came to light the recipe does not fit.
        """
        self.described = {name: await group.call(ModelWorker.describe) for name, group in self.groups.items()}
        check_pair_budget(self.recipe, self.prompts, self.context, self.described["actor"].shares_prefixes)

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
        return found + [role.model for role in self.reward_models + self.evaluation_models]

    def remarks(self) -> list[str]:
        """What was left out of the data or converted, and what was changed about the models, in words."""
        held_out = self.evaluation_prompts.remarks if self.evaluation_prompts is not None else ()
        found = without_effect(self.recipe)
        found += [f"data: {remark}" for remark in self.prompts.remarks]
        found += [f"held-out data: {remark}" for remark in held_out]
        actor, critic = (part.train.optim.lr for part in (self.recipe.actor, self.recipe.critic))
        if self.critic is not None and critic <= actor:
            found.append(f"critic: its learning rate, {critic:g}, is not above the actor's, {actor:g}")
        for function in self.reward_functions + self.evaluation_functions:
            found += function.reward.remarks()
        found += self.environment.guard.remarks() if self.environment is not None else []
        named = [role.name for role in self.reward_models + self.evaluation_models]
        named += ["reference"] if self.recipe.reference.path is not None and self.reference is not None else []
        found += self._of_models(named)
        return found + self._cut_short() + self._of_models(self.engines())

    def _of_models(self, roles: Iterable[str]) -> list[str]:
        return [f"{role}: {remark}" for role in roles for remark in self.described[role].remarks]

    def _cut_short(self) -> list[str]:
        recipe, context = self.recipe, self.context
        if recipe.environment is not None:
            return []
        training = recipe.rollout.sampling.max_new_tokens
        lengths = (item.num_tokens for item in self.prompts)
        found = cut_short(lengths, training, context, "rollout.sampling.max_new_tokens")
        if self.evaluation_prompts is not None and recipe.evaluation is not None:
            held_out = recipe.evaluation.sampling.max_new_tokens
            lengths = (item.num_tokens for item in self.evaluation_prompts)
            found += cut_short(lengths, held_out, context, "evaluation.sampling.max_new_tokens")
        return found

    @contextlib.contextmanager
    def released_at_end(self) -> Iterator[None]:
        """Gives the models back their own attention and closes the rewards when the run is over, however it ends."""
        try:
            yield
        finally:
            for model in self.models():
                model.release()
            for function in self.reward_functions + self.evaluation_functions:
                function.reward.close()
            if self.ptx is not None:
                self.ptx.close()

    # What is asked ---------------------------------------------------------------------------------------

    def item(self, index: int) -> PromptItem:
        """The prompt of stream index ``index``: data in an order drawn anew for every pass."""
        row, _ = draw(self.recipe.seed, index, self.prompts.order)
        return self.prompts.item(row)

    def requests(self, index: int) -> tuple[PromptItem, PromptRequest]:
        """The prompt of stream index ``index``, and what is asked for it: a sample per response; a greedy one follows
        where it is the method's baseline."""
        item = self.item(index)
        limits = sampling_params(self.recipe.rollout.sampling, self.codec, 0)
        samples = [
            Sample(f"{index}.{r}", replace(limits, seed=sample_seed(self.recipe.seed, index, item.prompt_id, r)))
            for r in range(self.recipe.responses_per_prompt)
        ]
        if needs_greedy(self.recipe):
            samples.append(
                Sample(f"{index}.greedy", replace(samples[0].sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0))
            )
        return item, PromptRequest(str(index), item.prompt, tuple(samples))

    # Who plays -------------------------------------------------------------------------------------------

    def canary(self) -> CanaryProbe:
        """What engines and trainer must agree on after every weight update."""
        tolerance = self.recipe.canary_tolerance or CANARY_TOLERANCE[self.actor.packed.precision]
        item = self.prompts.item(0)
        room = max(1, min(CANARY_TOKENS, context_length(self.actor.packed.model) - item.num_tokens))
        return CanaryProbe(item.prompt, room, tolerance)

    def reward_scorers(self, worker: Worker) -> list[Scorer[RaggedBatch, ColumnSet]]:
        scorers = reward_scorers(worker, self.reward_models, self.reward_functions, self.groups)
        return self.of_whole_trajectories(scorers)

    def of_whole_trajectories(
        self, scorers: Sequence[Scorer[RaggedBatch, ColumnSet]]
    ) -> list[Scorer[RaggedBatch, ColumnSet]]:
        """Sources of reward, each asked once per trajectory, about its last sequence, also where that has several;
        process rewards read all of them."""
        if self.environment is None:
            return [*scorers]
        return [scorer if isinstance(scorer, ProcessScorer) else PartScorer(scorer, last_ones) for scorer in scorers]

    # Episodes --------------------------------------------------------------------------------------------

    def source(self, rollout: Rollout, on_played: Callable[[int], None]) -> Callable[[int], Awaitable[Group]]:
        """``index → group`` of the stream: answers to prompts, or episodes where the recipe has an environment."""
        if self.environment is None:
            return rollout.generate
        recipe = self.recipe
        player = self.episode_player(rollout, on_played)
        sampling = sampling_params(recipe.rollout.sampling, self.codec, 0)
        return lambda index: player.group(index, self.item(index), sampling, recipe.responses_per_prompt)

    def episode_player(self, policy: Policy, on_played: Callable[[int], None] | None = None) -> EpisodePlayer:
        recipe, config = self.recipe, self.recipe.environment
        if config is None or self.environment is None:
            raise ValueError("the recipe has no environment")
        limits = EpisodeLimits(
            config.max_turns,
            longest_sequence(config, context_length(self.actor.packed.model)),
            recipe.actor.train.token_budget if keeps_trajectories_whole(recipe.algorithm) else None,
            config.timeout_s,
        )
        return EpisodePlayer(self.environment, config, policy, limits, run_seed=recipe.seed, on_played=on_played)

    def column_scorers(self, worker: Worker) -> list[ModelScorer]:
        """The columns that this recipe's algorithm really reads, beside the rewards."""
        recipe, groups = self.recipe, self.groups
        policy = Needs(logprobs=True, mask="action_mask", temperature=recipe.rollout.sampling.temperature)
        found: list[ModelScorer] = []
        if self.reference is not None:
            reads: dict[str, int | None] = {"actor": None} if self.shares_reference else {}
            found.append(ModelScorer(worker, "reference", groups["reference"], policy, "ref_logprobs", reads=reads))
        if needs_old_logprobs(recipe):
            found.append(ModelScorer(worker, "actor", groups["actor"], policy, "old_logprobs", trains=True))
        if self.critic is not None:
            after = needs_next_values(recipe)
            needs = Needs(values=True, step_scores=after, mask="action_mask")
            beside = {"step_scores": "next_values"} if after else {}
            found.append(ModelScorer(worker, "critic", groups["critic"], needs, "values", beside, trains=True))
        return found


def needs_next_values(recipe: RLRecipe) -> bool:
    """Whether the values of the states behind tokens are read, too."""
    return isinstance(recipe.algorithm, PPO) and recipe.algorithm.bootstrap_truncated


def needs_old_logprobs(recipe: RLRecipe) -> bool:
    """The first mini-batch's ``old`` is its own forward pass; only later ones, or KL in the reward, need another."""
    if isinstance(recipe.algorithm, Selection):
        return False
    kl = kl_term(recipe.algorithm)
    return recipe.minibatches * recipe.epochs > 1 or (kl.coef > 0 and kl.place == "reward")


def needs_greedy(recipe: RLRecipe) -> bool:
    """Whether each prompt gets a greedy response too, whose reward is the method's baseline."""
    return isinstance(recipe.algorithm, ReMax)


def check_pair_budget(recipe: RLRecipe, data: PromptData, context: int, shares_prefixes: bool) -> None:
    """Refuses a budget that is too small for a pair: both of its responses have to lie in one micro-batch."""
    share = shares_prefixes and recipe.actor.train.share_prefixes
    if not isinstance(recipe.algorithm, OnlineDPO):
        return
    num_new, lengths = recipe.rollout.sampling.max_new_tokens, [item.num_tokens for item in data.items]
    both = [(1 if share else 2) * n + 2 * min(num_new, context - n) for n in lengths]
    check_budget(max(both), recipe.actor.train.token_budget, "actor.train.token_budget")


def longest_sequence(config: EnvironmentConfig, context: int) -> int:
    """Tokens that one sequence of an episode may have.

    Raises:
        UserError: neither the recipe nor the model says.
    """
    if config.max_tokens is None and context >= UNLIMITED:
        raise UserError(
            "nobody says how long an episode may become",
            found="the model names no context, the recipe no environment.max_tokens",
            remedy="set environment.max_tokens",
        )
    return min(context, config.max_tokens or context)
