"""Loads the models of an RL recipe, each when it is first asked for: a worker loads those of its own roles.

Reward models and functions as roles of a run, under a name and with a weight.

The sources of reward that a recipe and Python code name: reward models and functions, and their weights.

Demonstrations mixed into the actor's updates (Ouyang et al. 2022, PPO-ptx): ``loss = policy + coef · sft``.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.batch.trajectory import REWARD_PREFIX
from quartet.config import UserError
from quartet.config.algorithms import reads_reference
from quartet.config.choices import RewardConfig
from quartet.config.common import ModelConfig, TrainConfig
from quartet.config.plugins import load_object, plugin_entries
from quartet.config.recipe import PTXConfig, RLRecipe
from quartet.config.rewards import BaseModelReward, ModelReward
from quartet.config.run import PicturesConfig
from quartet.data.datasets import PromptData, PromptItem, SFTData
from quartet.data.fields import get_column
from quartet.data.lazy import Prefetcher
from quartet.envs.protocol import Environment
from quartet.models.directories import copy_to_meta
from quartet.models.loading import (
    load_causal_lm,
    load_scalar_model,
    packed_causal_lm,
    packed_scalar_model,
    scalar_model_from,
)
from quartet.models.packed_model import PackedCausalLM, PackedModel, PackedScalarModel
from quartet.models.vision import FeatureStore
from quartet.observe.metrics import METRICS, find_metric
from quartet.rewards.build import RuleSource, build_reward
from quartet.rewards.builtin import accepted_answers, open_tag_of_prompt
from quartet.rewards.functions import PassedFunction
from quartet.rewards.source import LEFT_OUT_PREFIX, GuardedReward
from quartet.rollout.drafter import DrafterModel, load_drafter_model
from quartet.schedule.iteration import Chunk, ModelScorer, Scorer
from quartet.schedule.leases import LeaseContext
from quartet.schedule.model_worker import AdapterlessWorker, CriticWorker, ModelWorker, ScoreWorker, TrainWorker
from quartet.schedule.role_group import RoleGroup
from quartet.text.examples import PromptText
from quartet.text.loading import have_same_vocabulary, load_generation_config, load_tokenizer
from quartet.text.tokenizer import TextCodec, check_vocabulary
from quartet.train.engine import LossTerm, TrainEngine
from quartet.train.forward import ForwardNeeds
from quartet.train.objectives import SFTObjective
from quartet.train.parallel.mesh import Mesh
from quartet.train.token_budget import TokenBudget
from quartet.trainers.devices import CPU, META, FrozenModels, resolve_precision
from quartet.trainers.input_sources import (
    check_budget,
    check_vocabulary_covers,
    connect_pictures,
    demonstration_reader,
    feature_store,
    open_pictures,
    read_data,
    resolve_model,
    resolve_tokenizer,
    vocabulary_size,
)


@dataclass(frozen=True)
class RewardModelRole:
    """A reward model with its name; ``codec`` only where its tokenizer differs from the actor's."""

    name: str
    model: PackedScalarModel
    budget: TokenBudget
    codec: TextCodec | None
    weight: float

    def worker(self) -> ScoreWorker:
        if self.codec is None:
            return ScoreWorker(self.model, self.budget)
        return TextScoreWorker(self.model, self.budget, self.codec)

    def scorer(self, leases: LeaseContext, model: RoleGroup[ModelWorker]) -> Scorer:
        """Makes what scores a chunk with this model, where ``model`` has it."""
        column, reads_text = REWARD_PREFIX + self.name, self.codec is not None
        return ModelScorer(leases, self.name, model, ForwardNeeds(scores=True), column, reads_text=reads_text)


class EpisodeScorer:
    """Marks a scorer that reads all turns of an episode, where others are given its last sequence alone."""


class TextScoreWorker(ScoreWorker):
    """A reward model with another tokenizer than the policy's: reads the text of prompts and completions, for scores.

    Args:
        codec: of the model's own tokenizer.
    """

    def __init__(self, packed: PackedScalarModel, budget: TokenBudget, codec: TextCodec) -> None:
        super().__init__(packed, budget)
        self._codec = codec

    def forward(self, batch: RaggedBatch, needs: ForwardNeeds) -> ColumnSet:
        rows = zip(batch.objects["prompt"], batch.objects["completion"], batch.sequence["ended"].tolist(), strict=True)
        encoded = [encode_answer(self._codec, prompt, text, ended=ended) for prompt, text, ended in rows]
        prompts, answers = [ids for ids, _ in encoded], [[ids] for _, ids in encoded]
        return super().forward(RaggedBatch.from_groups(prompts, answers, batch.ids), needs)


def encode_answer(codec: TextCodec, prompt: PromptText, text: str, *, ended: bool) -> tuple[list[int], list[int]]:
    """Returns the token ids of a prompt and of its completion, without the end-of-text that encoding adds where the
    completion did not end; one token always stays."""
    prompt_ids, ids = codec.encode_completion(prompt, text)
    return prompt_ids, ids if ended or len(ids) == 1 else ids[:-1]


def _value(item: PromptItem, column: str) -> Any:
    """Returns what the prompt's row has there; None where it is of a source of data that lacks the column."""
    try:
        return get_column(item.columns, column)
    except KeyError:
        return None


@dataclass(frozen=True)
class RewardFunctionRole:
    """A source that is asked with text, and how it counts in the sum."""

    reward: GuardedReward
    weight: float

    @property
    def name(self) -> str:
        return self.reward.name


@dataclass(frozen=True)
class FunctionScorer:
    """Scores of a source as a sequence column; NaN where it does not apply, or was left out. Waits outside of any
    lease, so that generation goes on meanwhile.
    """

    leases: LeaseContext
    reward: GuardedReward

    async def score(self, chunk: Chunk) -> ColumnSet:
        batch, name, recorder = chunk.data, self.reward.name, self.leases.recorder
        items: Sequence[PromptItem] = batch.objects["prompt"]
        keys = sorted({key for item in items for key in item.columns})
        columns = {key: [item.columns.get(key) for item in items] for key in keys}
        if (needed := self.reward.source.column) is not None and needed not in columns:
            columns[needed] = [_value(item, needed) for item in items]
        prompts, completions = [item.prompt for item in items], list(batch.objects["completion"])
        with recorder.span(f"reward_{name}", step=chunk.step, role=name, mode="forward", chunk=chunk.index) as span:
            outcome = await self.reward.score(prompts, completions, columns, partial(recorder.mark, span))
        if outcome.failed and all(outcome.failed) and not self.reward.has_scored:
            # A source that has failed for a whole chunk and never worked is no hiccup but a wrong address.
            raise UserError(
                f"the reward {name!r} has not given a single score",
                found=str(outcome.reasons[0]),
                remedy="correct the recipe or start its server, and resume the run: no update was made with it",
            ) from outcome.reasons[0]
        values = [float("nan") if score is None else float(score) for score in outcome.scores]
        sequence = {REWARD_PREFIX + name: torch.tensor(values)}
        if self.reward.may_leave_out:
            sequence[LEFT_OUT_PREFIX + name] = torch.tensor(outcome.failed, dtype=torch.float32)
        return ColumnSet(batch.ids, sequence=sequence)


Rewards = Sequence[Callable[..., Any] | PreTrainedModel]
"""What Python code passes: functions and reward models."""


class RewardSources:
    """The sources that answers are scored by, and the weight of each by its name.

    Args:
        own: weights of sources without a scorer: an environment's own rewards come with its episodes.

    Raises:
        UserError: as ``reward_weights``.
    """

    def __init__(
        self,
        models: Sequence[RewardModelRole],
        functions: Sequence[RewardFunctionRole],
        own: Mapping[str, float] | None = None,
    ) -> None:
        self.models, self.functions = models, functions
        self.weights = reward_weights([*models, *functions], own)

    def scorers(self, leases: LeaseContext, groups: Mapping[str, RoleGroup[ModelWorker]]) -> list[Scorer]:
        """Makes the scorers; ``groups`` have the models, by the roles' names."""
        scorers = [role.scorer(leases, groups[role.name]) for role in self.models]
        return [*scorers, *(FunctionScorer(leases, role.reward) for role in self.functions)]

    def warnings(self) -> list[str]:
        """Returns what the functions have to say, and which samples they left out."""
        return [warning for role in self.functions for warning in role.reward.warnings()]

    def close(self) -> None:
        for role in self.functions:
            role.reward.close()


def reward_weights(
    sources: Sequence[RewardModelRole | RewardFunctionRole], own: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Returns the weight of every source by name; ``own`` as for ``RewardSources``.

    Raises:
        UserError: two of one name, or a name that cannot be logged.
    """
    pairs = [*(own or {}).items(), *((source.name, source.weight) for source in sources)]
    names = [name for name, _ in pairs]
    taken = sorted({name for name in names if names.count(name) > 1 or REWARD_PREFIX + name in METRICS})
    if taken:
        raise UserError(
            "a reward needs a name of its own",
            found=f"{taken}, used twice or for a metric",
            remedy="set another `name`",
        )
    for name in names:
        try:
            find_metric(REWARD_PREFIX + name)
        except ValueError:
            raise UserError(
                "the name of a reward cannot be part of a metric's",
                found=repr(name),
                remedy="use letters, digits, and any of _.+@:- in its `name`",
            ) from None
    return dict(pairs)


# From a recipe, and from Python ----------------------------------------------------------------------------


def reward_functions(configs: Sequence[RewardConfig], rewards: Rewards) -> list[RewardFunctionRole]:
    """Returns the recipe's sources that are asked with text, then the functions passed from Python."""
    found = [
        RewardFunctionRole(build_reward(config), config.weight)
        for config in configs
        if not isinstance(config, BaseModelReward)
    ]
    passed = [reward for reward in rewards if not isinstance(reward, PreTrainedModel)]
    return found + [RewardFunctionRole(GuardedReward(PassedFunction(reward)), 1.0) for reward in passed]


def check_reward_columns(functions: Sequence[RewardFunctionRole], data: PromptData, codec: TextCodec) -> None:
    """Refuses data without a column that a function needs, and objects where it needs right answers. Rules learn what
    the chat template opens.
    """
    first = data.items[0]
    for function in functions:
        source = function.reward.source
        function.reward.check_columns(sorted(data.columns))
        if source.compares and source.column is not None:
            with contextlib.suppress(KeyError):  # the first row is of a source of data that lacks the column
                accepted_answers(get_column(first.columns, source.column), source.column)
        if isinstance(source, RuleSource) and not isinstance(first.prompt, str):
            source.opened = open_tag_of_prompt(codec.render(first.prompt))


def reward_models(
    configs: Sequence[RewardConfig], rewards: Rewards, codec: TextCodec, train: TrainConfig, frozen: FrozenModels
) -> list[RewardModelRole]:
    """Returns the recipe's reward models, then those passed from Python (which share the policy's tokenizer), then
    those of plug-ins.

    Args:
        codec: the policy's.

    Raises:
        UserError: a model cannot be loaded, or does not go with its tokenizer.
    """
    roles = [_reward_model(config, codec, frozen) for config in configs if isinstance(config, ModelReward)]
    for name, reward in passed_reward_models(configs, rewards).items():
        check_vocabulary(codec.tokenizer, vocabulary_size(reward))
        packed = frozen.scalar(reward, is_user_object=True)
        roles.append(RewardModelRole(name, packed, forward_budget(train), None, 1.0))
    others = [one for one in configs if isinstance(one, BaseModelReward) and not isinstance(one, ModelReward)]
    return roles + [load_object(plugin_entries("rewards")[one.type].model or "")(one, codec, frozen) for one in others]


def passed_reward_models(configs: Sequence[RewardConfig], rewards: Rewards) -> dict[str, PreTrainedModel]:
    """Returns the reward models passed from Python, by what they are called beside those of the recipe."""
    models = [reward for reward in rewards if isinstance(reward, PreTrainedModel)]
    if len(models) == 1 and not any(isinstance(config, ModelReward) for config in configs):
        return {"reward_model": models[0]}
    return {f"reward_model_{number}": model for number, model in enumerate(models, start=1)}


def forward_budget(train: TrainConfig) -> TokenBudget:
    return TokenBudget(train.forward_token_budget, "actor.train.forward_token_budget")


def _reward_model(config: ModelReward, codec: TextCodec, frozen: FrozenModels) -> RewardModelRole:
    tokenizer, packed, budget = load_reward_model(config, frozen)
    same = have_same_vocabulary(tokenizer, codec.tokenizer)
    own = ModelConfig(path=config.path, tokenizer=config.tokenizer, trust_remote_code=config.trust_remote_code)
    sizes = PicturesConfig() if codec.pictures is None else codec.pictures.store.sizes
    pictures = None if same else open_pictures(own, packed.model, None, sizes)
    foreign = None if same else TextCodec.of(tokenizer, load_generation_config(config.path), pictures)
    if foreign is not None:
        connect_pictures(packed, feature_store(foreign))
    return RewardModelRole(config.name, packed, budget, foreign, config.weight)


def load_reward_model(
    config: BaseModelReward, frozen: FrozenModels
) -> tuple[PreTrainedTokenizerBase, PackedScalarModel, TokenBudget]:
    """Loads the model's own tokenizer, the model, and its token budget."""
    trust = config.trust_remote_code
    tokenizer = load_tokenizer(config.tokenizer or config.path, trust_remote_code=trust)
    packed = frozen.scalar(load_scalar_model(config.path, empty=frozen.device == META, trust_remote_code=trust))
    check_vocabulary(tokenizer, vocabulary_size(packed.model))
    budget = TokenBudget(config.forward_token_budget, f"forward_token_budget of reward {config.name!r}")
    return tokenizer, packed, budget


_ORDER = 7_919
"""Added to the run's seed: where prompts and demonstrations are the same rows, they do not come in the same order."""


class PTXData:
    """The second data loader: the demonstrations of update ``number`` are a function of (seed, number).

    Copies in other processes read the rows themselves, when they are first asked for: by then such a process is where
    relative paths begin.
    """

    def __init__(self, config: PTXConfig, seed: int, read: Callable[[TextCodec], SFTData], codec: TextCodec) -> None:
        self.config = config
        self._seed = seed
        self._read, self._codec = read, codec
        self._batches: Prefetcher[RaggedBatch] = Prefetcher(self.batch, ahead=config.prefetch)

    def __reduce__(self) -> tuple[type[PTXData], tuple[Any, ...]]:
        return PTXData, (self.config, self._seed, self._read, self._codec)

    def read_with(self, codec: TextCodec) -> None:
        """Has the rows read as this process reads them: where their pictures go is known here."""
        self._codec = codec

    @cached_property
    def data(self) -> SFTData:
        return self._read(self._codec)

    def batch(self, number: int) -> RaggedBatch:
        """Returns the demonstrations of update ``number``."""
        return self.data.batch(number, self.config.examples_per_minibatch, self._seed + _ORDER)

    def start(self, number: int) -> None:
        """Begins to prepare the batches of update ``number`` and those that follow."""
        self._batches.start(number)

    def terms(self, number: int) -> list[LossTerm]:
        """Returns what is added to the loss of update ``number``."""
        return [LossTerm(self._batches.get(number), SFTObjective("loss/ptx"), self.config.coef)]

    def metrics(self, num_updates: int) -> dict[str, float]:
        return {"data/ptx_epoch": num_updates * self.config.examples_per_minibatch / len(self.data)}

    @property
    def warnings(self) -> list[str]:
        """The remarks on what was left out or converted, in words."""
        return [f"ptx: {warning}" for warning in self.data.remarks]

    def close(self) -> None:
        self._batches.close()


def build_ptx(recipe: RLRecipe, rows: Sequence[Any] | None, codec: TextCodec, context: int) -> PTXData | None:
    """Builds the loader of the recipe's ``ptx``; None without it.

    Args:
        rows: demonstrations passed from Python in place of ``ptx.data``.
        context: longest sequence that the actor can read.

    Raises:
        UserError: data or coefficient are missing, or a row cannot be used.
    """
    config = recipe.ptx
    if config is None:
        if rows is not None:
            raise UserError(
                "demonstrations need a weight in the actor's loss",
                found="ptx_rows without ptx in the recipe",
                remedy="set ptx.coef and ptx.examples_per_minibatch",
            )
        return None
    if rows is None and (config.data is None or not config.data.parts):
        raise UserError("there is no data", found="ptx.data is missing", remedy="set ptx.data.path, or pass ptx_rows")
    ptx = PTXData(config, recipe.seed, partial(_read, config, rows, context), codec)
    check_budget(int(ptx.data.lengths.max()), recipe.actor.train.token_budget, "actor.train.token_budget")
    return ptx


def _read(config: PTXConfig, rows: Sequence[Any] | None, context: int, codec: TextCodec) -> SFTData:
    # The thread that prepares batches has a tokenizer of its own: not every one may be used by two at a time.
    own_codec = replace(codec, tokenizer=copy.deepcopy(codec.tokenizer))
    return read_data(config.data, rows, own_codec, context, "ptx.data", demonstration_reader)


_P = TypeVar("_P", bound=PackedModel)


@dataclass(frozen=True)
class UserObjects:
    """What comes from Python in the place of what a recipe names; pickles as long as no model is taken over."""

    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None
    critic: PreTrainedModel | None = None
    rewards: Rewards = ()
    evaluation_rewards: Rewards = ()
    prompts: Sequence[Any] | None = None
    evaluation_prompts: Sequence[Any] | None = None
    environment: Callable[..., Environment] | None = None
    ptx_rows: Sequence[Any] | None = None
    pictures: Path | None = None
    """Directory in which the processes of a run share its pictures; without it each has its own."""

    def on_meta(self) -> UserObjects:
        """Returns the same with models that have no contents, and so no need of pictures; what shared weights still
        does."""
        given = (self.model, self.critic, *self.rewards, *self.evaluation_rewards)
        models = [model for model in given if isinstance(model, PreTrainedModel)]
        empty: dict[int, Any] = dict(zip(map(id, models), copy_to_meta(models), strict=True))

        def emptied(values: Sequence[Any]) -> Any:
            return tuple(empty.get(id(value), value) for value in values)

        model, critic = emptied((self.model, self.critic))
        rewards, evaluation_rewards = emptied(self.rewards), emptied(self.evaluation_rewards)
        emptied_objects = {"model": model, "critic": critic, "rewards": rewards}
        return replace(self, **emptied_objects, evaluation_rewards=evaluation_rewards, pictures=None)

    def models_only(self) -> UserObjects:
        """Returns what workers need: functions are asked, and rows read, by the driver alone."""
        rewards, evaluation_rewards = (
            tuple(reward for reward in given if isinstance(reward, PreTrainedModel))
            for given in (self.rewards, self.evaluation_rewards)
        )
        found = UserObjects(self.model, self.tokenizer, self.critic, rewards, evaluation_rewards)
        return replace(found, pictures=self.pictures)


class ModelLoader:
    """The models of an RL recipe, each loaded when it is first asked for.

    Args:
        device: where loaded models go; with ``moves_user_models`` those passed from Python, too. On ``meta`` they have
            no contents: whether they fit together is seen from configs and headers.
        computes: the device that decides what `precision: auto` stands for, where that is another one.
        shares_reference: the reference of a LoRA actor is that actor without its adapters; else a model of its own.
        meshes: role → the processes that have it together; None for a role that this process has alone.

    Raises:
        UserError: what is asked for cannot be loaded, or does not fit the rest.
    """

    def __init__(
        self,
        recipe: RLRecipe,
        objects: UserObjects,
        *,
        device: torch.device = CPU,
        moves_user_models: bool = False,
        computes: torch.device | None = None,
        shares_reference: bool = True,
        meshes: Callable[[str], Mesh | None] = lambda role: None,
    ) -> None:
        self.recipe = recipe
        self.objects = objects
        self._device = device
        self._moves_user_models = moves_user_models
        self._computes = computes if computes is not None else device
        self._shares_reference = shares_reference
        self._mesh_of = meshes
        self._load_causal = partial(load_causal_lm, empty=device == META)
        self._load_scalar = partial(load_scalar_model, empty=device == META)
        self._taken = contextlib.ExitStack()

    def release(self) -> None:
        """Gives every model back as it was."""
        self._taken.close()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return resolve_tokenizer(self.recipe.actor.model, self.objects.tokenizer)

    @cached_property
    def actor_model(self) -> PreTrainedModel:
        own = self.objects.model
        return self._placed(resolve_model(self.recipe.actor.model, own, self._load_causal, "actor.model"), own)

    @cached_property
    def codec(self) -> TextCodec:
        """The codec of the policy's texts, for which its weights are not loaded."""
        found: PreTrainedModel | None = vars(self).get("actor_model")
        if found is None:
            load = partial(load_causal_lm, empty=True)
            found = resolve_model(self.recipe.actor.model, self.objects.model, load, "actor.model")
        objects = self.objects
        pictures = open_pictures(
            self.recipe.actor.model, found, objects.tokenizer, self.recipe.pictures, objects.pictures
        )
        return TextCodec.of(self.tokenizer, found.generation_config, pictures)

    @cached_property
    def features(self) -> FeatureStore | None:
        """Of the pictures in prompts, for all roles in this process."""
        return feature_store(self.codec)

    @cached_property
    def actor(self) -> PackedCausalLM:
        train, numerics = self.recipe.actor.train, self.recipe.numerics
        return self._own(packed_causal_lm(self.actor_model, **self._packing(train), numerics=numerics))

    @cached_property
    def actor_engine(self) -> TrainEngine[PackedCausalLM]:
        recipe = self.recipe
        resting = recipe.critic.warmup_steps if recipe.algorithm.name == "ppo" else 0
        return self._engine(self.actor, "actor", max(1, recipe.steps - resting))

    @cached_property
    def drafter_model(self) -> DrafterModel | None:
        """The one that learns along with the actor."""
        speculation = self.recipe.rollout.speculation
        learns = speculation is not None and speculation.learns
        return load_drafter_model(speculation, self.actor) if learns else None

    @cached_property
    def reference(self) -> PackedCausalLM | None:
        """The reference model, only where it is read: by a KL term, or as the teacher. The default is the actor as it
        starts: a copy, or the actor itself where it is that without its adapters."""
        recipe = self.recipe
        if not reads_reference(recipe.algorithm):
            return None
        path, lora = recipe.reference.path, recipe.actor.train.lora
        if path is None and lora is not None and self._shares_reference:
            return self.actor
        if path is not None:
            model = self._load_causal(path, trust_remote_code=recipe.reference.trust_remote_code)
        else:
            with self.actor.without_adapters() if lora is not None else contextlib.nullcontext():
                model = copy.deepcopy(self.actor_model)
        check_vocabulary_covers(model, self.actor_model, "reference")
        return self._own(self._frozen.causal(model, numerics=recipe.numerics))

    @property
    def _frozen(self) -> FrozenModels:
        precision = resolve_precision(self._computes, self.recipe.actor.train.precision)
        return FrozenModels(self._device, precision, self._moves_user_models)

    @cached_property
    def reward_models(self) -> list[RewardModelRole]:
        return self._reward_models(self.recipe.rewards, self.objects.rewards)

    @cached_property
    def evaluation_reward_models(self) -> list[RewardModelRole]:
        """The reward models that are asked about held-out answers only."""
        evaluation = self.recipe.held_out
        return self._reward_models(evaluation.rewards, self.objects.evaluation_rewards)

    def _reward_models(self, configs: Sequence[RewardConfig], rewards: Rewards) -> list[RewardModelRole]:
        found = reward_models(configs, rewards, self.codec, self.recipe.actor.train, self._frozen)
        for role in found:
            self._own(role.model)
        return found

    @cached_property
    def critic_engine(self) -> TrainEngine[PackedScalarModel] | None:
        return self._engine(self.critic, "critic", self.recipe.steps) if self.critic is not None else None

    @cached_property
    def critic(self) -> PackedScalarModel | None:
        recipe, given = self.recipe, self.objects.critic
        if recipe.algorithm.name != "ppo":
            if given is not None:
                raise UserError(
                    "a critic is passed that the method does not have",
                    found=f"algorithm {recipe.algorithm.name}",
                    remedy="leave the critic out, or use ppo",
                )
            return None
        model = self._placed(given if given is not None else self._critic_model(), given)
        # On the actor's own body each optimizer would move the other's weights, and adapters of the two would lie in
        # one module and switch together.
        own = {id(parameter) for parameter in self.actor_model.parameters()}
        if shared := [name for name, parameter in model.named_parameters() if id(parameter) in own]:
            raise UserError(
                "the critic shares weights with the actor",
                found=f"{len(shared)} tensors, first {shared[0]}",
                remedy="pass a critic with weights of its own (copy.deepcopy), or none: it then starts as a copy",
            )
        # Master weights are fp32, also where an object came in half precision.
        model.float().requires_grad_(True)
        check_vocabulary_covers(model, self.actor_model, "critic")
        return self._own(packed_scalar_model(model, **self._packing(recipe.critic.train)))

    def _critic_model(self) -> PreTrainedModel:
        """Returns what the recipe names; else a copy of the first reward model that reads the policy's tokens; else the
        actor's body with a new head."""
        if (given := self.recipe.critic).path is not None:
            return self._load_scalar(given.path, trust_remote_code=given.trust_remote_code)
        if native := [role for role in self.reward_models if role.codec is None]:
            # From the directory once more where there is one: what is frozen may have rounded weights.
            for config in self.recipe.rewards:
                if config.name == native[0].name and isinstance(config, BaseModelReward):
                    return self._load_scalar(config.path, trust_remote_code=config.trust_remote_code)
            return copy.deepcopy(native[0].model.model)
        # Fresh adapters add nothing, but their modules would come along.
        with self.actor.without_adapters():
            return scalar_model_from(self.actor_model, seed=self.recipe.seed)

    def roles(self) -> list[str]:
        """Returns the names of the models that the recipe has."""
        found = ["actor"]
        found += ["critic"] if self.critic is not None else []
        found += ["reference"] if self.reference is not None else []
        return found + [role.name for role in self.reward_models + self.evaluation_reward_models]

    def model(self, role: str) -> PackedModel:
        """Returns the model of a role, taken over for packed runs."""
        models = {"actor": lambda: self.actor, "critic": lambda: self.critic, "reference": lambda: self.reference}
        found = models[role]() if role in models else self._reward_role(role).model
        assert found is not None, f"this recipe has no {role}"
        return found

    def _reward_role(self, role: str) -> RewardModelRole:
        return {source.name: source for source in self.reward_models + self.evaluation_reward_models}[role]

    def worker(self, role: str, ptx: PTXData | None = None) -> ScoreWorker | TrainWorker:
        """Makes what computes with the model of a role, in this process; ``ptx`` adds to the actor's losses."""
        if role == "actor":
            speculation, model = self.recipe.rollout.speculation, self.drafter_model
            if speculation is None or model is None:
                return TrainWorker(self.actor_engine, ptx)
            target = plugin_entries("drafters")[speculation.type].worker
            assert target is not None, "its model learns"
            made: TrainWorker = load_object(target)(self.actor_engine, ptx, speculation, model, self.recipe.seed)
            return made
        if role == "critic" and self.critic_engine is not None:
            return CriticWorker(self.critic_engine)
        if role == "reference" and self.reference is not None:
            reference, train = self.reference, self.recipe.actor.train
            # Asked only with adapters: a worker of the reference alone need not build the actor.
            is_actor = train.lora is not None and reference is self.actor
            kind = AdapterlessWorker if is_actor else ScoreWorker
            return kind(
                reference, forward_budget(train), logprob_chunk=train.logprob_chunk, share_prefixes=train.share_prefixes
            )
        return self._reward_role(role).worker()

    def _packing(self, train: TrainConfig) -> dict[str, Any]:
        """Returns the arguments of ``packed_causal_lm`` and ``packed_scalar_model`` for a model that is trained."""
        return {
            "precision": resolve_precision(self._computes, train.precision),
            "activation_checkpointing": train.activation_checkpointing,
            "lora": train.lora,
            "seed": self.recipe.seed,
        }

    def _engine(self, packed: _P, role: Literal["actor", "critic"], steps: int) -> TrainEngine[_P]:
        recipe = self.recipe
        train = recipe.actor.train if role == "actor" else recipe.critic.train
        total_steps = steps * recipe.minibatches * recipe.epochs
        mesh = self._mesh_of(role)
        return TrainEngine(packed, train, total_steps=total_steps, name=f"{role}.train", mesh=mesh)

    def _own(self, packed: _P) -> _P:
        """Notes that ``release`` gives ``packed`` back; it reads the run's pictures."""
        if packed.tower is not None and not packed.tower.is_connected:
            connect_pictures(packed, self.features)
        self._taken.callback(packed.release)
        return packed

    def _placed(self, model: PreTrainedModel, passed: PreTrainedModel | None) -> PreTrainedModel:
        return model if passed is not None and not self._moves_user_models else model.to(self._device)
