"""Loads the models of an RL recipe, each when it is first asked for: a worker loads those of its own roles."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quartet.config import UserError
from quartet.config.algorithms import reads_reference
from quartet.config.choices import RewardConfig
from quartet.config.common import TrainConfig
from quartet.config.plugins import added, load
from quartet.config.recipe import RLRecipe
from quartet.config.rewards import ModelSource
from quartet.envs.protocol import Environment
from quartet.models.directories import on_meta
from quartet.models.loading import (
    load_causal_lm,
    load_scalar_model,
    packed_causal_lm,
    packed_scalar_model,
    scalar_model_from,
)
from quartet.models.packed_model import PackedCausalLM, PackedModel, PackedScalarModel
from quartet.rollout.drafter import DrafterModel, load_drafter_model
from quartet.schedule.model_worker import AdapterlessWorker, CriticWorker, ScoreWorker, TrainWorker
from quartet.text.tokenizer import TextCodec
from quartet.train.engine import TrainEngine
from quartet.train.parallel.mesh import Mesh
from quartet.trainers.devices import CPU, META, FrozenModels, precision_on
from quartet.trainers.input_sources import resolve_model, resolve_tokenizer, vocabulary_size
from quartet.trainers.ptx import PTX
from quartet.trainers.reward_roles import RewardModelRole
from quartet.trainers.reward_sources import Rewards, forward_budget, reward_models

_P = TypeVar("_P", bound=PackedModel)


@dataclass(frozen=True)
class UserObjects:
    """What comes from Python in the place of what a recipe names; pickles as long as no model is taken over."""

    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    critic: PreTrainedModel | None = None
    rewards: Rewards = ()
    evaluation_rewards: Rewards = ()
    prompts: Sequence[Any] | None = None
    evaluation_prompts: Sequence[Any] | None = None
    environment: Callable[..., Environment] | None = None
    ptx_rows: Sequence[Any] | None = None

    def on_meta(self) -> UserObjects:
        """The same with models that have no contents; what shared weights still does."""
        given = (self.model, self.critic, *self.rewards, *self.evaluation_rewards)
        models = [model for model in given if isinstance(model, PreTrainedModel)]
        empty: dict[int, Any] = dict(zip(map(id, models), on_meta(models), strict=True))

        def emptied(values: Sequence[Any]) -> Any:
            return tuple(empty.get(id(value), value) for value in values)

        model, critic = emptied((self.model, self.critic))
        rewards, evaluation_rewards = emptied(self.rewards), emptied(self.evaluation_rewards)
        return replace(self, model=model, critic=critic, rewards=rewards, evaluation_rewards=evaluation_rewards)

    def models_only(self) -> UserObjects:
        """What workers need: functions are asked, and rows read, by the driver alone."""
        rewards, evaluation_rewards = (
            tuple(reward for reward in given if isinstance(reward, PreTrainedModel))
            for given in (self.rewards, self.evaluation_rewards)
        )
        return UserObjects(self.model, self.tokenizer, self.critic, rewards, evaluation_rewards)


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
        """Of the policy's texts, for which its weights are not loaded."""
        found: PreTrainedModel | None = vars(self).get("actor_model")
        if found is None:
            load = partial(load_causal_lm, empty=True)
            found = resolve_model(self.recipe.actor.model, self.objects.model, load, "actor.model")
        return TextCodec.of(self.tokenizer, found.generation_config)

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
        """Only where it is read: by a KL term, or as the teacher. The default is the actor as it starts: a copy, or the
        actor itself where it is that without its adapters."""
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
        held, needed = vocabulary_size(model), vocabulary_size(self.actor_model)
        if held != needed:
            raise UserError(
                "reference and actor have different vocabularies",
                found=f"{held} and {needed} ids",
                remedy="use a reference with the actor's tokenizer, or leave reference.path out",
            )
        return self._own(self._frozen.causal(model, numerics=recipe.numerics))

    @property
    def _frozen(self) -> FrozenModels:
        precision = precision_on(self._computes, self.recipe.actor.train.precision)
        return FrozenModels(self._device, precision, self._moves_user_models)

    @cached_property
    def reward_models(self) -> list[RewardModelRole]:
        return self._reward_models(self.recipe.rewards, self.objects.rewards)

    @cached_property
    def evaluation_reward_models(self) -> list[RewardModelRole]:
        """Those that are asked about held-out answers only."""
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
        needed, held = vocabulary_size(self.actor_model), vocabulary_size(model)
        if held < needed:
            raise UserError(
                "the critic's vocabulary is smaller than the actor's",
                found=f"{held} and {needed} ids",
                remedy="use a critic with the actor's tokenizer, or leave critic.path out",
            )
        return self._own(packed_scalar_model(model, **self._packing(recipe.critic.train)))

    def _critic_model(self) -> PreTrainedModel:
        """What the recipe names; else a copy of the first reward model that reads the policy's tokens; else the actor's
        body with a new head."""
        if (given := self.recipe.critic).path is not None:
            return self._load_scalar(given.path, trust_remote_code=given.trust_remote_code)
        if native := [role for role in self.reward_models if role.codec is None]:
            # From the directory once more where there is one: what is frozen may have rounded weights.
            for config in self.recipe.rewards:
                if config.name == native[0].name and isinstance(config, ModelSource):
                    return self._load_scalar(config.path, trust_remote_code=config.trust_remote_code)
            return copy.deepcopy(native[0].model.model)
        # Fresh adapters add nothing, but their modules would come along.
        with self.actor.without_adapters():
            return scalar_model_from(self.actor_model, seed=self.recipe.seed)

    def roles(self) -> list[str]:
        """Names of the models that the recipe has."""
        found = ["actor"]
        found += ["critic"] if self.critic is not None else []
        found += ["reference"] if self.reference is not None else []
        return found + [role.name for role in self.reward_models + self.evaluation_reward_models]

    def model(self, role: str) -> PackedModel:
        """The model of a role, taken over for packed runs."""
        models = {"actor": lambda: self.actor, "critic": lambda: self.critic, "reference": lambda: self.reference}
        found = models[role]() if role in models else self._reward_role(role).model
        assert found is not None, f"this recipe has no {role}"
        return found

    def _reward_role(self, role: str) -> RewardModelRole:
        return {source.name: source for source in self.reward_models + self.evaluation_reward_models}[role]

    def worker(self, role: str, ptx: PTX | None = None) -> ScoreWorker | TrainWorker:
        """What computes with the model of a role, in this process; ``ptx`` adds to the actor's losses."""
        if role == "actor":
            speculation, model = self.recipe.rollout.speculation, self.drafter_model
            if speculation is None or model is None:
                return TrainWorker(self.actor_engine, ptx)
            target = added("drafters")[speculation.type].worker
            assert target is not None, "its model learns"
            made: TrainWorker = load(target)(self.actor_engine, ptx, speculation, model, self.recipe.seed)
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
        """Arguments of ``packed_causal_lm`` and ``packed_scalar_model`` for a model that is trained."""
        return {
            "precision": precision_on(self._computes, train.precision),
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
        """Notes that ``release`` gives ``packed`` back."""
        self._taken.callback(packed.release)
        return packed

    def _placed(self, model: PreTrainedModel, passed: PreTrainedModel | None) -> PreTrainedModel:
        return model if passed is not None and not self._moves_user_models else model.to(self._device)
