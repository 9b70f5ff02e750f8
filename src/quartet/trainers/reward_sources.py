"""The sources of reward that a recipe and Python code name: reward models and functions, and their weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quartet.batch.trajectory import REWARD_PREFIX
from quartet.config import UserError
from quartet.config.choices import RewardConfig
from quartet.config.common import TrainConfig
from quartet.config.nearest import nearest
from quartet.config.plugins import added, load
from quartet.config.rewards import ModelReward, ModelSource
from quartet.data.datasets import PromptData
from quartet.data.fields import column_at
from quartet.models.loading import load_scalar_model
from quartet.models.packed_model import PackedScalarModel
from quartet.observe.metrics import METRICS, find_metric
from quartet.rewards.build import RuleSource, build_reward
from quartet.rewards.builtin import opened_tag, right_answers
from quartet.rewards.functions import PassedFunction
from quartet.rewards.source import GuardedReward, RewardWeights
from quartet.schedule.iteration import Scorer
from quartet.schedule.leases import LeaseContext
from quartet.schedule.model_worker import ModelWorker
from quartet.schedule.role_group import RoleGroup
from quartet.text.loading import load_generation_config, load_tokenizer, reads_the_same
from quartet.text.tokenizer import TextCodec, check_vocabulary
from quartet.train.token_budget import TokenBudget
from quartet.trainers.devices import META, FrozenModels
from quartet.trainers.input_sources import vocabulary_size
from quartet.trainers.reward_roles import FunctionScorer, RewardFunctionRole, RewardModelRole

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
        """``groups`` have the models, by the roles' names."""
        scorers = [role.scorer(leases, groups[role.name]) for role in self.models]
        return [*scorers, *(FunctionScorer(leases, role.reward) for role in self.functions)]

    def warnings(self) -> list[str]:
        """What the functions have to say, and which samples they left out."""
        return [warning for role in self.functions for warning in role.reward.warnings()]

    def close(self) -> None:
        for role in self.functions:
            role.reward.close()


def reward_weights(
    sources: Sequence[RewardModelRole | RewardFunctionRole], own: Mapping[str, float] | None = None
) -> RewardWeights:
    """Weight of every source by name, and the gates; ``own`` as for ``RewardSources``.

    Raises:
        UserError: two of one name, a name that cannot be logged, or a gate that names no other source.
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
    weights = RewardWeights(pairs, {source.name: source.gate for source in sources if source.gate is not None})
    for name, gate in weights.gates.items():
        if gate.source == name or gate.source not in weights:
            others = [other for other in names if other != name]
            raise UserError(
                f"the gate of the reward {name!r} names no other reward",
                found=f"source: {gate.source}; the others are {', '.join(others) or 'none'}",
                remedy=nearest(gate.source, others) or "name one of them in gate.source",
            )
    return weights


# From a recipe, and from Python ----------------------------------------------------------------------------


def reward_functions(configs: Sequence[RewardConfig], rewards: Rewards) -> list[RewardFunctionRole]:
    """The recipe's sources that are asked with text, then the functions passed from Python."""
    found = [
        RewardFunctionRole(build_reward(config), config.weight, config.gate)
        for config in configs
        if not isinstance(config, ModelSource)
    ]
    passed = [reward for reward in rewards if not isinstance(reward, PreTrainedModel)]
    return found + [RewardFunctionRole(GuardedReward(PassedFunction(reward)), 1.0) for reward in passed]


def fit_to_data(functions: Sequence[RewardFunctionRole], data: PromptData, codec: TextCodec) -> None:
    """Refuses data without a column that a function needs, and objects where it needs right answers. Rules learn what
    the chat template opens.
    """
    first = data.items[0]
    for function in functions:
        source = function.reward.source
        function.reward.check_columns(sorted(data.columns))
        if source.compares and source.column is not None:
            with contextlib.suppress(KeyError):  # the first row is of a source of data that lacks the column
                right_answers(column_at(first.columns, source.column), source.column)
        if isinstance(source, RuleSource) and not isinstance(first.prompt, str):
            source.opened = opened_tag(codec.render(first.prompt))


def reward_models(
    configs: Sequence[RewardConfig], rewards: Rewards, codec: TextCodec, train: TrainConfig, frozen: FrozenModels
) -> list[RewardModelRole]:
    """The recipe's reward models, then those passed from Python (which share the policy's tokenizer), then those of
    plug-ins.

    Args:
        codec: the policy's.

    Raises:
        UserError: a model cannot be loaded, or does not go with its tokenizer.
    """
    roles = [_reward_model(config, codec, frozen) for config in configs if isinstance(config, ModelReward)]
    for name, reward in user_models(configs, rewards).items():
        check_vocabulary(codec.tokenizer, vocabulary_size(reward))
        packed = frozen.scalar(reward, is_user_object=True)
        roles.append(RewardModelRole(name, packed, forward_budget(train), None, 1.0))
    others = [one for one in configs if isinstance(one, ModelSource) and not isinstance(one, ModelReward)]
    return roles + [load(added("rewards")[one.type].model or "")(one, codec, frozen) for one in others]


def user_models(configs: Sequence[RewardConfig], rewards: Rewards) -> dict[str, PreTrainedModel]:
    """The reward models passed from Python, by what they are called beside those of the recipe."""
    models = [reward for reward in rewards if isinstance(reward, PreTrainedModel)]
    if len(models) == 1 and not any(isinstance(config, ModelReward) for config in configs):
        return {"reward_model": models[0]}
    return {f"reward_model_{number}": model for number, model in enumerate(models, start=1)}


def forward_budget(train: TrainConfig) -> TokenBudget:
    return TokenBudget(train.forward_token_budget, "actor.train.forward_token_budget")


def _reward_model(config: ModelReward, codec: TextCodec, frozen: FrozenModels) -> RewardModelRole:
    tokenizer, packed, budget = load_source(config, frozen)
    same = reads_the_same(tokenizer, codec.tokenizer)
    foreign = None if same else TextCodec.of(tokenizer, load_generation_config(config.path))
    return RewardModelRole(config.name, packed, budget, foreign, config.weight, config.gate)


def load_source(
    config: ModelSource, frozen: FrozenModels
) -> tuple[PreTrainedTokenizerBase, PackedScalarModel, TokenBudget]:
    """The model's own tokenizer, the model, and its token budget."""
    trust = config.trust_remote_code
    tokenizer = load_tokenizer(config.tokenizer or config.path, trust_remote_code=trust)
    packed = frozen.scalar(load_scalar_model(config.path, empty=frozen.device == META, trust_remote_code=trust))
    check_vocabulary(tokenizer, vocabulary_size(packed.model))
    budget = TokenBudget(config.forward_token_budget, f"forward_token_budget of reward {config.name!r}")
    return tokenizer, packed, budget
