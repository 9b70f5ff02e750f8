"""Process reward models as a source of reward in RL: where the policy's steps end, and what each of them scores.

Shapes: T stored tokens, S sequences, N trajectories, M steps.

A worker finds the steps in the policy's own tokens and reads the model at the last token of each. A model with another
tokenizer, or one trained with another separator, reads the same steps rendered anew; its k-th step is the policy's
k-th. Either way a score comes to stand on the policy's token that ends the step. Rewards of trajectories are computed
from these columns: their sequences may have been read by different workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from quartet.algorithms.segments import gather_owner, segment_count
from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.batch.trajectory import REWARD_PREFIX, STEP_PREFIX, STEP_SCORE_PREFIX, Trajectories
from quartet.config import UserError
from quartet.extras.process_rewards.config import DiscountedSteps, ProcessModelReward
from quartet.extras.process_rewards.data import (
    Step,
    answer_pieces,
    join_steps,
    last_tokens,
    load_step_separator,
    split_steps,
)
from quartet.extras.process_rewards.trainer import (
    STEP_NEEDS,
    mean_gap,
    process_rewards,
    right_answers,
    step_credits,
    step_scores,
)
from quartet.rewards.source import combine
from quartet.schedule.iteration import Chunk, ModelScorer
from quartet.schedule.leases import LeaseContext
from quartet.schedule.model_worker import ModelWorker, ScoreWorker
from quartet.schedule.role_group import RoleGroup
from quartet.text.loading import load_generation_config, reads_the_same
from quartet.text.tokenizer import TextCodec
from quartet.train.forward import Needs
from quartet.trainers.devices import FrozenModels
from quartet.trainers.model_loader import EpisodeScorer, RewardModelRole, encode_answer, load_source


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
    """Returns the steps of sequence ``s``, one entry per turn (a run of action tokens): a turn ends its last step."""
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
    """Returns the same steps under the model's tokenizer and separator; sequences whose steps it does not give back
    have none.

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
    """Returns ``[T]`` bool, true on ``tokens``."""
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


class ProcessScorer(EpisodeScorer):
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


def process_model(config: ProcessModelReward, codec: TextCodec, frozen: FrozenModels) -> ProcessModelRole:
    """Makes the role of one source of a recipe.

    Args:
        codec: the policy's.

    Raises:
        UserError: the model cannot be loaded; it is not known how its steps end, or a tokenizer loses the separator.
    """
    own_separator = load_step_separator(config.path) or config.separator
    if own_separator is None:
        raise UserError(
            f"it is not known how the steps of process reward {config.name!r} end",
            found=f"{config.path} has no process_reward.json, and the recipe no separator",
            remedy="set separator to what ended the steps it was trained on",
        )
    separator = config.separator or own_separator
    tokenizer, packed, budget = load_source(config, frozen)
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
        name=config.name,
        model=packed,
        budget=budget,
        codec=None if reads_tokens else own,
        weight=config.weight,
        config=config,
        policy_codec=codec,
        separator=separator,
        own_separator=own_separator,
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
        "process/unscored": float(sum(rewards[name].isnan().sum() for name in process)),
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
    return combine(rewards, {name: 1.0 if only_logged else weights[name] for name in names})
