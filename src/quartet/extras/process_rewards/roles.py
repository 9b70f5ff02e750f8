"""Process reward models as a source of reward in RL: where the policy's steps end, and what each of them scores.

Shapes: T stored tokens, S sequences, N trajectories, M steps.

A worker finds the steps in the policy's own tokens and reads the model, which has the policy's tokenizer, at the last
token of each. Rewards of trajectories are computed from these columns: their sequences may have been read by different
workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from quartet.algorithms.segments import segment_count, to_reduction_dtype
from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.batch.trajectory import REWARD_PREFIX, STEP_PREFIX, STEP_SCORE_PREFIX, Trajectories
from quartet.config import UserError
from quartet.extras.process_rewards.config import DiscountedSteps, ProcessModelReward
from quartet.extras.process_rewards.data import answer_pieces, last_tokens, load_step_separator, split_steps
from quartet.extras.process_rewards.trainer import STEP_NEEDS, mean_gap, process_rewards, right_answers, step_credits
from quartet.rewards.source import combine_scores
from quartet.schedule.iteration import Chunk, ModelScorer
from quartet.schedule.leases import LeaseContext
from quartet.schedule.model_worker import ModelWorker, ScoreWorker
from quartet.schedule.role_group import RoleGroup
from quartet.text.loading import have_same_vocabulary
from quartet.text.tokenizer import TextCodec
from quartet.train.forward import ForwardNeeds
from quartet.trainers.devices import FrozenModels
from quartet.trainers.model_loader import EpisodeScorer, RewardModelRole, load_reward_model


@dataclass(frozen=True, kw_only=True)
class ProcessModelRole(RewardModelRole):
    """A process reward model with its name; ``separator`` ends a step in the text that ``policy_codec`` makes."""

    config: ProcessModelReward
    policy_codec: TextCodec
    separator: str

    def worker(self) -> ProcessScoreWorker:
        return ProcessScoreWorker(self)

    def scorer(self, leases: LeaseContext, model: RoleGroup[ModelWorker]) -> ProcessScorer:
        return ProcessScorer(leases, self, model)


def step_ends(batch: RaggedBatch, s: int, codec: TextCodec, separator: str) -> list[int]:
    """Returns the stored tokens of sequence ``s`` that end steps; a turn (a run of action tokens) ends its last one."""
    start, stop = batch.leaf_span(s)
    ids = batch.token_ids(s)
    shift = stop - len(ids)  # the leaf's tokens stand at the end of ``ids``
    is_action = batch.token["action_mask"][start:stop].tolist()
    found: list[int] = []
    for acts, run in groupby(range(start, stop), key=lambda token: is_action[token - start]):
        if acts:
            tokens = list(run)
            first, last = tokens[0] - shift, tokens[-1] + 1 - shift
            pieces = answer_pieces(codec, ids[:first], ids[first:last])
            found += [tokens[end] for end in last_tokens(pieces, split_steps("".join(pieces), separator))]
    return found


class ProcessScoreWorker(ScoreWorker):
    """A process reward model that finds the steps itself.

    ``forward`` gives columns on the policy's tokens: ``step_scores`` (the logit at each token that ends a step, 0 on
    others) and ``step_mask`` (which those are).
    """

    def __init__(self, role: ProcessModelRole) -> None:
        super().__init__(role.model, role.budget)
        self._role = role

    def forward(self, batch: RaggedBatch, needs: ForwardNeeds) -> ColumnSet:
        role = self._role
        ends = [t for s in range(len(batch)) for t in step_ends(batch, s, role.policy_codec, role.separator)]
        mask_T = torch.zeros(batch.num_tokens, dtype=torch.bool)
        mask_T[ends] = True
        found = super().forward(batch.with_token(step_mask=mask_T), needs).token
        if not len(batch):  # other ranks have made passes meanwhile
            return ColumnSet(())
        return ColumnSet(batch.ids, {"step_scores": found["step_scores"], "step_mask": mask_T})


class ProcessScorer(EpisodeScorer):
    """Columns of a process reward model; all token columns stand on the policy's tokens.

    ``reward/<name>`` ``[S]`` is the trajectory's process reward on its last sequence, NaN where it has none and on the
    others; ``step_reward/<name>`` ``[T]`` the steps' credits, which add up to it; ``step_score/<name>`` ``[T]`` the
    steps' own scores, NaN elsewhere.
    """

    def __init__(self, leases: LeaseContext, role: ProcessModelRole, model: RoleGroup[ModelWorker]) -> None:
        self.role = role
        beside = {"step_mask": "step_mask"}
        self._model = ModelScorer(leases, role.name, model, STEP_NEEDS, "step_scores", beside=beside)

    async def score(self, chunk: Chunk) -> ColumnSet:
        found = await self._model.score(chunk)
        batch, logits_T, mask_T = chunk.data, found.token["step_scores"], found.token["step_mask"]
        name, combine = self.role.name, self.role.config.combine
        gamma = combine.gamma if isinstance(combine, DiscountedSteps) else 1.0
        scores_T = logits_T.new_full((batch.num_tokens,), float("nan"))
        scores_T[mask_T] = to_reduction_dtype(logits_T[mask_T]).sigmoid()
        trajectories = Trajectories.of(batch)
        sequence_T = batch.sequence_index()
        owner_T = torch.where(sequence_T >= 0, trajectories.owner_S[sequence_T.clamp(min=0)], -1)
        reward_N = process_rewards(scores_T, mask_T, owner_T, len(trajectories), combine.name, gamma)
        # Nothing was emitted where there is no step.
        is_empty_N = segment_count(torch.where(mask_T, owner_T, -1), len(trajectories)) == 0
        reward_S = reward_N.new_full((len(batch),), float("nan"))
        reward_S[trajectories.final_N] = reward_N.masked_fill(is_empty_N, float("nan"))
        return ColumnSet(
            batch.ids,
            token={
                STEP_PREFIX + name: step_credits(scores_T, mask_T, owner_T, combine.name, gamma),
                STEP_SCORE_PREFIX + name: scores_T,
            },
            sequence={REWARD_PREFIX + name: reward_S},
        )


def process_model(config: ProcessModelReward, codec: TextCodec, frozen: FrozenModels) -> ProcessModelRole:
    """Makes the role of one source of a recipe.

    Args:
        codec: the policy's.

    Raises:
        UserError: the model cannot be loaded; it is not known how its steps end; it has another tokenizer than the
            policy, or one that loses the separator.
    """
    trained_with = load_step_separator(config.path)
    separator = config.separator or trained_with
    if separator is None:
        raise UserError(
            f"it is not known how the steps of process reward {config.name!r} end",
            found=f"{config.path} has no process_reward.json, and the recipe no separator",
            remedy="set separator to what ended the steps it was trained on",
        )
    tokenizer, packed, budget = load_reward_model(config, frozen)
    if trained_with not in (None, separator) or not have_same_vocabulary(tokenizer, codec.tokenizer):
        raise UserError(
            f"process reward {config.name!r} does not read what the policy writes",
            found=f"steps end with {separator!r}, in training with {trained_with!r}; tokenizers may differ",
            remedy="use a model that was trained with the policy's tokenizer and this separator",
        )
    kept = codec.decode(codec.encode_prompt(f"1{separator}1"), skip_special=False)
    if separator not in kept:  # no step would ever end
        raise UserError(
            "the policy's tokenizer does not keep the separator of steps",
            found=f"{f'1{separator}1'!r} becomes {kept!r}",
            remedy="choose a separator that it knows",
        )
    return ProcessModelRole(
        name=config.name,
        model=packed,
        budget=budget,
        codec=None,
        weight=config.weight,
        config=config,
        policy_codec=codec,
        separator=separator,
    )


# Figures -------------------------------------------------------------------------------------------------


def process_metrics(
    batch: RaggedBatch, rewards: Mapping[str, Tensor], weights: Mapping[str, float]
) -> dict[str, float]:
    """Returns the figures of the process reward models among the sources; none without such a model.

    The gaps compare mean rewards of right and wrong answers, under the outcome sources and under the process reward
    models; several sources of a kind are added up with their weights (without, where all of these are 0). An answer is
    right where its outcome lies above the middle of the smallest and the largest of the step.

    Args:
        rewards: ``[N]`` by source, NaN where it does not apply.
        weights: of every source.
    """
    process = [name for name in rewards if STEP_SCORE_PREFIX + name in batch.token]
    if not process:
        return {}
    num = len(rewards[process[0]])
    scores = [batch.token[STEP_SCORE_PREFIX + name] for name in process]
    found = {
        "process/steps_mean": sum(float((~values.isnan()).sum()) for values in scores) / (num * len(process)),
    }
    outcome_N, judged_N = _combined(rewards, weights, [name for name in rewards if name not in process])
    process_N, scored_N = _combined(rewards, weights, process)
    both_N = judged_N & scored_N
    right_N = right_answers(outcome_N, both_N)
    if right_N is not None:
        found["process/gap_outcome"] = float(mean_gap(outcome_N, right_N, both_N))
        found["process/gap_process"] = float(mean_gap(process_N, right_N, both_N))
    return found


def _combined(
    rewards: Mapping[str, Tensor], weights: Mapping[str, float], names: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Returns ``[N]`` weighted sum of the sources that apply, and whether any does."""
    if not names:
        num = len(next(iter(rewards.values())))
        return torch.zeros(num, dtype=torch.float64), torch.zeros(num, dtype=torch.bool)
    only_logged = not any(weights[name] for name in names)
    return combine_scores(rewards, {name: 1.0 if only_logged else weights[name] for name in names})
