"""Sources of reward as roles: reward models and functions, under a name and with a weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch
from quartet.batch.trajectory import REWARD_PREFIX
from quartet.config import UserError
from quartet.config.common import TrainConfig
from quartet.config.nearest import nearest
from quartet.config.rewards import GateConfig, ModelReward, ProcessModelReward, RewardConfig
from quartet.data.datasets import PromptItem
from quartet.models.loading import load_scalar_model
from quartet.models.packed import PackedScalarModel
from quartet.observe.metrics import METRICS, check_names
from quartet.rewards.build import build_reward
from quartet.rewards.combine import LEFT_OUT_PREFIX, RewardWeights
from quartet.rewards.functions import FunctionReward
from quartet.rewards.source import GuardedReward, Outcome
from quartet.schedule.iteration import Chunk, Scorer
from quartet.schedule.lease_context import LeaseContext
from quartet.schedule.model_worker import ModelWorker, ScoreWorker
from quartet.schedule.role_group import RoleGroup
from quartet.schedule.scorers import ModelScorer
from quartet.text.examples import PromptText
from quartet.text.loading import load_generation_config, load_tokenizer, reads_the_same
from quartet.text.tokenizer import TextCodec, check_vocabulary
from quartet.train.budget import TokenBudget
from quartet.train.engine import Needs
from quartet.trainers.devices import FrozenModels


@dataclass(frozen=True)
class RewardModelRole:
    """A reward model with its name; ``codec`` only where its tokenizer differs from the actor's."""

    name: str
    model: PackedScalarModel
    budget: TokenBudget
    codec: TextCodec | None
    weight: float
    gate: GateConfig | None = None

    def worker(self) -> ScoreWorker:
        if self.codec is None:
            return ScoreWorker(self.model, self.budget)
        return TextScoreWorker(self.model, self.budget, self.codec)

    def scorer(self, leases: LeaseContext, model: RoleGroup[ModelWorker]) -> Scorer:
        """What scores a chunk with this model, where ``model`` has it."""
        column, reads_text = REWARD_PREFIX + self.name, self.codec is not None
        return ModelScorer(leases, self.name, model, Needs(scores=True), column, reads_text=reads_text)


class TextScoreWorker(ScoreWorker):
    """A reward model with another tokenizer than the policy's: reads the text of prompts and completions, for scores.

    Args:
        codec: of the model's own tokenizer.
    """

    def __init__(self, packed: PackedScalarModel, budget: TokenBudget, codec: TextCodec) -> None:
        super().__init__(packed, budget)
        self._codec = codec

    def forward(self, batch: RaggedBatch, needs: Needs) -> ColumnSet:
        rows = zip(batch.objects["prompt"], batch.objects["completion"], batch.sequence["ended"].tolist(), strict=True)
        encoded = [encode_answer(self._codec, prompt, text, ended=ended) for prompt, text, ended in rows]
        prompts, answers = [ids for ids, _ in encoded], [[ids] for _, ids in encoded]
        return super().forward(RaggedBatch.from_groups(prompts, answers, batch.ids), needs)


def encode_answer(codec: TextCodec, prompt: PromptText, text: str, *, ended: bool) -> tuple[list[int], list[int]]:
    """Token ids of a prompt and of its completion, without the end-of-text that encoding adds where the completion did
    not end; one token always stays."""
    prompt_ids, ids = codec.encode_completion(prompt, text)
    return prompt_ids, ids if ended or len(ids) == 1 else ids[:-1]


@dataclass(frozen=True)
class RewardFunctionRole:
    """A source that is asked with text, and how it counts in the sum."""

    reward: GuardedReward
    weight: float
    gate: GateConfig | None = None


@dataclass(frozen=True)
class FunctionScorer:
    """Scores of a source as a sequence column; NaN where it does not apply, or was left out. Waits outside of any
    lease, so that generation goes on meanwhile.
    """

    leases: LeaseContext
    reward: GuardedReward

    async def score(self, chunk: Chunk) -> ColumnSet:
        batch = chunk.data
        items: Sequence[PromptItem] = batch.objects["prompt"]
        names = sorted({name for item in items for name in item.columns})
        columns = {name: [item.columns.get(name) for item in items] for name in names}
        with self.leases.recorder.span(
            f"reward_{self.reward.name}",
            step=chunk.step,
            role=self.reward.name,
            mode="forward",
            chunk=chunk.index,
        ) as span:
            mark = partial(self.leases.recorder.mark, span)
            outcome = await self.reward.score(
                [item.prompt for item in items], list(batch.objects["completion"]), columns, mark
            )
        self._check_answers(outcome)
        values = [float("nan") if score is None else float(score) for score in outcome.scores]
        sequence = {REWARD_PREFIX + self.reward.name: torch.tensor(values)}
        if self.reward.may_leave_out:
            sequence[LEFT_OUT_PREFIX + self.reward.name] = torch.tensor(outcome.failed, dtype=torch.float32)
        return ColumnSet(batch.ids, sequence=sequence)

    def _check_answers(self, outcome: Outcome) -> None:
        """A source that has failed for a whole chunk and never worked is no hiccup but a wrong address."""
        if outcome.failed and all(outcome.failed) and not self.reward.has_scored:
            raise UserError(
                f"the reward {self.reward.name!r} has not given a single score",
                found=str(outcome.reasons[0]),
                remedy="correct the recipe or start its server, and resume the run: no update was made with it",
            ) from outcome.reasons[0]


def reward_scorers(
    leases: LeaseContext,
    models: Sequence[RewardModelRole],
    functions: Sequence[RewardFunctionRole],
    groups: Mapping[str, RoleGroup[ModelWorker]],
) -> list[Scorer]:
    """``groups`` have the models, by the roles' names."""
    scorers = [role.scorer(leases, groups[role.name]) for role in models]
    return [*scorers, *(FunctionScorer(leases, role.reward) for role in functions)]


def reward_functions(
    configs: Sequence[RewardConfig], rewards: Sequence[Callable[..., Any] | PreTrainedModel]
) -> list[RewardFunctionRole]:
    """The recipe's sources that are asked with text, then the functions passed from Python."""
    found = [
        RewardFunctionRole(build_reward(config), config.weight, config.gate)
        for config in configs
        if not isinstance(config, ModelReward | ProcessModelReward)
    ]
    passed = [reward for reward in rewards if not isinstance(reward, PreTrainedModel)]
    return found + [RewardFunctionRole(GuardedReward(FunctionReward(reward)), 1.0) for reward in passed]


def reward_models(
    configs: Sequence[RewardConfig],
    rewards: Sequence[Callable[..., Any] | PreTrainedModel],
    codec: TextCodec,
    train: TrainConfig,
    frozen: FrozenModels,
) -> list[RewardModelRole]:
    """The recipe's reward models, then those passed from Python (which share the policy's tokenizer)."""
    roles: list[RewardModelRole] = []
    for config in configs:
        if isinstance(config, ModelReward):
            own = load_tokenizer(config.tokenizer or config.path)
            same = reads_the_same(own, codec.tokenizer)
            packed = frozen.scalar(load_scalar_model(config.path, empty=frozen.are_meta))
            check_vocabulary(own, int(packed.model.get_input_embeddings().weight.shape[0]))
            foreign = None if same else TextCodec.of(own, load_generation_config(config.path))
            budget = TokenBudget(config.forward_token_budget, f"forward_token_budget of reward {config.name!r}")
            roles.append(RewardModelRole(config.name, packed, budget, foreign, config.weight, config.gate))
    models = [reward for reward in rewards if isinstance(reward, PreTrainedModel)]
    for name, reward in zip(user_object_names(len(models), after=len(roles)), models, strict=True):
        check_vocabulary(codec.tokenizer, int(reward.get_input_embeddings().weight.shape[0]))
        packed = frozen.scalar(reward, is_user_object=True)
        roles.append(RewardModelRole(name, packed, forward_budget(train), None, 1.0))
    return roles


def user_object_names(num: int, *, after: int) -> list[str]:
    """What ``num`` reward models passed from Python are called, beside ``after`` of the recipe's."""
    return ["reward_model"] if num == 1 and not after else [f"reward_model_{i + 1}" for i in range(num)]


def forward_budget(train: TrainConfig) -> TokenBudget:
    return TokenBudget(train.forward_token_budget, "actor.train.forward_token_budget")


def reward_weights(
    models: Sequence[RewardModelRole],
    functions: Sequence[RewardFunctionRole],
    played: Mapping[str, float] | None = None,
) -> RewardWeights:
    """Weight of every source by name, and the gates.

    Args:
        played: sources without a scorer: an environment's own rewards come with its episodes.

    Raises:
        UserError: two of one name, a name that cannot be logged, or a gate that names no other source.
    """
    pairs = list((played or {}).items()) + [(role.name, role.weight) for role in models]
    pairs += [(role.reward.name, role.weight) for role in functions]
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
            check_names([REWARD_PREFIX + name])
        except ValueError:
            raise UserError(
                "the name of a reward cannot be part of a metric's",
                found=repr(name),
                remedy="use letters, digits, and any of _.+@:- in its `name`",
            ) from None
    gates = {role.name: role.gate for role in models} | {role.reward.name: role.gate for role in functions}
    weights = RewardWeights(pairs, {name: gate for name, gate in gates.items() if gate is not None})
    for name, gate in weights.gates.items():
        if gate.source == name or gate.source not in weights:
            others = [other for other in names if other != name]
            raise UserError(
                f"the gate of the reward {name!r} names no other reward",
                found=f"source: {gate.source}; the others are {', '.join(others) or 'none'}",
                remedy=nearest(gate.source, others) or "name one of them in gate.source",
            )
    return weights
