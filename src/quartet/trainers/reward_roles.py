"""Sources of reward as roles: reward models, process reward models and functions, under a name and with a weight.

Shapes: T stored tokens, S sequences, N trajectories, M steps.

The worker of a process reward model finds the steps in the policy's own tokens and reads the model at the last token of
each. A model with another tokenizer, or one trained with another separator, reads the same steps rendered anew; its
k-th step is the policy's k-th. Either way a score comes to stand on the policy's token that ends the step. Rewards of
trajectories are computed from these columns: their sequences may have been read by different workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quartet.algorithms.process import process_rewards, step_credits, step_scores
from quartet.algorithms.segments import gather_owner, segment_count
from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch
from quartet.batch.trajectory import REWARD_PREFIX, STEP_PREFIX, STEP_SCORE_PREFIX, Trajectories
from quartet.config import UserError
from quartet.config.common import TrainConfig
from quartet.config.nearest import nearest
from quartet.config.rewards import DiscountedSteps, GateConfig, ModelReward, ProcessModelReward, RewardConfig
from quartet.data.datasets import PromptData, PromptItem
from quartet.models.loading import load_process_settings, load_scalar_model
from quartet.models.packed_model import PackedScalarModel
from quartet.observe.metrics import METRICS, check_names
from quartet.rewards.build import build_reward
from quartet.rewards.combine import LEFT_OUT_PREFIX, RewardWeights
from quartet.rewards.functions import FunctionReward
from quartet.rewards.source import GuardedReward
from quartet.schedule.iteration import Chunk, Scorer
from quartet.schedule.lease_context import LeaseContext
from quartet.schedule.model_worker import ModelWorker, ScoreWorker
from quartet.schedule.role_group import RoleGroup
from quartet.schedule.scorers import ModelScorer
from quartet.text.examples import PromptText
from quartet.text.loading import load_generation_config, load_tokenizer, reads_the_same
from quartet.text.steps import Step, answer_pieces, join_steps, last_tokens, split_steps
from quartet.text.tokenizer import TextCodec, check_vocabulary
from quartet.train.engine import Needs
from quartet.train.objectives import STEP_NEEDS
from quartet.train.token_budget import TokenBudget
from quartet.trainers.devices import META, FrozenModels
from quartet.trainers.sources import vocabulary_size

Rewards = Sequence[Callable[..., Any] | PreTrainedModel]
"""What Python code passes: functions and reward models."""


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
            check_names([REWARD_PREFIX + name])
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
        if not isinstance(config, ModelReward | ProcessModelReward)
    ]
    passed = [reward for reward in rewards if not isinstance(reward, PreTrainedModel)]
    return found + [RewardFunctionRole(GuardedReward(FunctionReward(reward)), 1.0) for reward in passed]


def check_columns(functions: Sequence[RewardFunctionRole], data: PromptData) -> None:
    """Refuses data without a column that a function needs."""
    names = sorted({name for item in data.items for name in item.columns})
    for function in functions:
        function.reward.check_columns(names)


def reward_models(
    configs: Sequence[RewardConfig], rewards: Rewards, codec: TextCodec, train: TrainConfig, frozen: FrozenModels
) -> list[RewardModelRole]:
    """The recipe's reward models, then those passed from Python (which share the policy's tokenizer), then the recipe's
    process reward models.

    Args:
        codec: the policy's.

    Raises:
        UserError: a model cannot be loaded, or does not go with its tokenizer; of a process reward model it is not
            known how its steps end, or a tokenizer loses the separator.
    """
    roles = [_reward_model(config, codec, frozen) for config in configs if isinstance(config, ModelReward)]
    models = [reward for reward in rewards if isinstance(reward, PreTrainedModel)]
    for name, reward in zip(user_object_names(len(models), after=len(roles)), models, strict=True):
        check_vocabulary(codec.tokenizer, vocabulary_size(reward))
        packed = frozen.scalar(reward, is_user_object=True)
        roles.append(RewardModelRole(name, packed, forward_budget(train), None, 1.0))
    return roles + [_process_model(one, codec, frozen) for one in configs if isinstance(one, ProcessModelReward)]


def user_object_names(num: int, *, after: int) -> list[str]:
    """What ``num`` reward models passed from Python are called, beside ``after`` of the recipe's."""
    return ["reward_model"] if num == 1 and not after else [f"reward_model_{i + 1}" for i in range(num)]


def forward_budget(train: TrainConfig) -> TokenBudget:
    return TokenBudget(train.forward_token_budget, "actor.train.forward_token_budget")


def _reward_model(config: ModelReward, codec: TextCodec, frozen: FrozenModels) -> RewardModelRole:
    tokenizer, packed, budget = _loaded(config, frozen)
    same = reads_the_same(tokenizer, codec.tokenizer)
    foreign = None if same else TextCodec.of(tokenizer, load_generation_config(config.path))
    return RewardModelRole(config.name, packed, budget, foreign, config.weight, config.gate)


def _process_model(config: ProcessModelReward, codec: TextCodec, frozen: FrozenModels) -> ProcessModelRole:
    own_separator = load_process_settings(config.path) or config.separator
    if own_separator is None:
        raise UserError(
            f"it is not known how the steps of process reward {config.name!r} end",
            found=f"{config.path} has no process_reward.json, and the recipe no separator",
            remedy="set separator to what ended the steps it was trained on",
        )
    separator = config.separator or own_separator
    tokenizer, packed, budget = _loaded(config, frozen)
    own = TextCodec.of(tokenizer, load_generation_config(config.path))
    for reader, text, whose in ((codec, separator, "policy"), (own, own_separator, f"process reward {config.name!r}")):
        kept = reader.decode(reader.encode_prompt(f"1{text}1"), skip_special=False)
        if text not in kept:  # no step would ever end
            raise UserError(
                f"the tokenizer of the {whose} does not keep the separator of steps",
                found=f"{f'1{text}1'!r} becomes {kept!r}",
                remedy="choose a separator that it knows",
            )
    reads_tokens = reads_the_same(tokenizer, codec.tokenizer) and separator == own_separator
    return ProcessModelRole(
        *(config.name, packed, budget, None if reads_tokens else own, config.weight, config.gate),
        config=config,
        policy_codec=codec,
        separator=separator,
        own_separator=own_separator,
    )


def _loaded(
    config: ModelReward | ProcessModelReward, frozen: FrozenModels
) -> tuple[PreTrainedTokenizerBase, PackedScalarModel, TokenBudget]:
    """The model's own tokenizer, the model, and its token budget."""
    tokenizer = load_tokenizer(config.tokenizer or config.path)
    packed = frozen.scalar(load_scalar_model(config.path, empty=frozen.device == META))
    check_vocabulary(tokenizer, vocabulary_size(packed.model))
    return (
        tokenizer,
        packed,
        TokenBudget(config.forward_token_budget, f"forward_token_budget of reward {config.name!r}"),
    )


# Process reward models: where steps end --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ProcessModelRole(RewardModelRole):
    """A process reward model with its name.

    ``codec`` only where steps are rendered anew for it. ``separator`` ends a step in the policy's text, which
    ``policy_codec`` makes; ``own_separator`` ended those that the model was trained on.
    """

    config: ProcessModelReward
    policy_codec: TextCodec
    separator: str
    own_separator: str

    def worker(self) -> ProcessScoreWorker:
        return ProcessScoreWorker(self)

    def scorer(self, leases: LeaseContext, model: RoleGroup[ModelWorker]) -> ProcessScorer:
        return ProcessScorer(leases, self, model)


@dataclass(frozen=True)
class AnswerSteps:
    """The steps of one turn, and the stored token that ends each."""

    steps: tuple[Step, ...]
    tokens: tuple[int, ...]


def steps_of(batch: RaggedBatch, s: int, codec: TextCodec, separator: str) -> tuple[AnswerSteps, ...]:
    """The steps of sequence ``s``, one entry per turn (a run of action tokens): a turn ends its last step."""
    start, stop = batch.leaf_span(s)
    ids = batch.token_ids(s)
    shift = stop - len(ids)  # the leaf's tokens stand at the end of ``ids``
    is_action = batch.token["action_mask"][start:stop].tolist()
    found = []
    for acts, run in groupby(range(start, stop), key=lambda token: is_action[token - start]):
        if acts:
            tokens = list(run)
            first, last = tokens[0] - shift, tokens[-1] + 1 - shift
            pieces = answer_pieces(codec, ids[:first], ids[first:last])
            steps = split_steps("".join(pieces), separator)
            ends = last_tokens(pieces, steps)
            found.append(AnswerSteps(tuple(steps), tuple(tokens[end] for end in ends)))
    return tuple(found)


def _rendered(
    batch: RaggedBatch, turns: Sequence[Sequence[AnswerSteps]], codec: TextCodec, separator: str
) -> tuple[RaggedBatch, Tensor, Tensor]:
    """The same steps under the model's tokenizer and separator; sequences whose steps it does not give back have none.

    Returns:
        What the model reads; ``[M]`` tokens of it that end steps; ``[M]`` the policy's tokens that do, each once.

    Raises:
        UserError: an answer of several turns: what stood between them would be missing.
    """
    prompts, responses, places = [], [], []
    for s, sequence in enumerate(turns):
        if len(sequence) > 1:
            raise UserError(
                "a process reward model with another tokenizer or separator reads answers of one turn only",
                found=f"sequence {batch.ids[s]} with {len(sequence)} turns",
                remedy="use a model with the policy's tokenizer and separator",
            )
        steps = sequence[0].steps if sequence else (Step("", None),)
        ended = bool(batch.sequence["ended"][s])
        text = join_steps(steps, separator)
        prompt_ids, answer_ids = encode_answer(codec, batch.objects["prompt"][s], text, ended=ended)
        pieces = answer_pieces(codec, prompt_ids, answer_ids)
        ends = last_tokens(pieces, split_steps("".join(pieces), separator))
        prompts.append(prompt_ids)
        responses.append([answer_ids])
        places.append(ends if len(ends) == len(steps) else None)
    rendered = RaggedBatch.from_groups(prompts, responses, batch.ids)
    # Of steps that end in one token the last counts.
    pairs: dict[int, int] = {}
    for s, (sequence, ends_of) in enumerate(zip(turns, places, strict=True)):
        if sequence and ends_of is not None:
            begin, _ = rendered.leaf_span(s)
            pairs.update(zip(sequence[0].tokens, (begin + end for end in ends_of), strict=True))
    targets, rows = torch.tensor(list(pairs.items()), dtype=torch.int64).view(-1, 2).unbind(1)
    return rendered, rows, targets


def _mask(batch: RaggedBatch, tokens: Tensor) -> Tensor:
    """``[T]`` bool, true on ``tokens``."""
    return torch.zeros(batch.num_tokens, dtype=torch.bool).index_fill(0, tokens, True)


class ProcessScoreWorker(ScoreWorker):
    """A process reward model that finds the steps itself.

    ``forward`` gives columns on the policy's tokens: ``step_scores`` (the logit at each token that ends a step, 0 on
    others) and ``step_mask`` (which those are).
    """

    def __init__(self, role: ProcessModelRole) -> None:
        super().__init__(role.model, role.budget)
        self._role = role

    def forward(self, batch: RaggedBatch, needs: Needs) -> ColumnSet:
        if not len(batch):
            return ColumnSet(())
        role = self._role
        turns = [steps_of(batch, s, role.policy_codec, role.separator) for s in range(len(batch))]
        if role.codec is None:
            ends = sorted({token for sequence in turns for turn in sequence for token in turn.tokens})
            read, rows = batch, torch.tensor(ends, dtype=torch.int64)
            targets = rows
        else:
            read, rows, targets = _rendered(batch, turns, role.codec, role.own_separator)
        found = super().forward(read.with_token(step_mask=_mask(read, rows)), needs).token["step_scores"]
        logits_T = found.new_zeros(batch.num_tokens).index_put((targets,), found[rows])
        return ColumnSet(batch.ids, {"step_scores": logits_T, "step_mask": _mask(batch, targets)})


class ProcessScorer:
    """Columns of a process reward model; all token columns stand on the policy's tokens.

    ``reward/<name>`` ``[S]`` is the trajectory's process reward on its last sequence, NaN where it has none and on the
    others; ``step_reward/<name>`` ``[T]`` the steps' credits, which add up to it; ``step_score/<name>`` ``[T]`` the
    steps' own scores, NaN elsewhere.
    """

    def __init__(self, leases: LeaseContext, role: ProcessModelRole, model: RoleGroup[ModelWorker]) -> None:
        self.role = role
        beside, reads_text = {"step_mask": "step_mask"}, role.codec is not None
        self._model = ModelScorer(
            leases, role.name, model, STEP_NEEDS, "step_scores", beside=beside, reads_text=reads_text
        )

    async def score(self, chunk: Chunk) -> ColumnSet:
        found = await self._model.score(chunk)
        batch, logits_T, mask_T = chunk.data, found.token["step_scores"], found.token["step_mask"]
        name, combine = self.role.name, self.role.config.combine
        gamma = combine.gamma if isinstance(combine, DiscountedSteps) else 1.0
        scores_M = step_scores(logits_T[mask_T], self.role.config.score)
        scores_T = logits_T.new_full((batch.num_tokens,), float("nan")).index_put((mask_T,), scores_M)
        trajectories = Trajectories.of(batch)
        sequence_T = batch.sequence_index()
        owner_T = torch.where(sequence_T >= 0, trajectories.owner_S[sequence_T.clamp(min=0)], -1)
        # What was emitted has at least one step, unless the model's tokenizer does not give its steps back.
        is_lost_S = torch.zeros(len(batch), dtype=torch.bool)
        is_lost_S[sequence_T[batch.token["action_mask"]]] = True
        is_lost_S[sequence_T[mask_T]] = False
        lost_N = torch.zeros(len(trajectories), dtype=torch.bool)
        lost_N[trajectories.owner_S[is_lost_S]] = True
        mask_T = mask_T & ~gather_owner(lost_N.long(), owner_T).bool()
        reward_N = process_rewards(scores_T, mask_T, owner_T, len(trajectories), combine.name, gamma)
        # Nothing was emitted where there is no step.
        lost_N |= segment_count(torch.where(mask_T, owner_T, -1), len(trajectories)) == 0
        reward_S = reward_N.new_full((len(batch),), float("nan"))
        reward_S[trajectories.final_N] = reward_N.masked_fill(lost_N, float("nan"))
        return ColumnSet(
            batch.ids,
            token={
                STEP_PREFIX + name: step_credits(scores_T, mask_T, owner_T, combine.name, gamma),
                STEP_SCORE_PREFIX + name: scores_T.masked_fill(~mask_T, float("nan")),
            },
            sequence={REWARD_PREFIX + name: reward_S},
        )
