"""Reward models and functions as roles of a run, under a name and with a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.batch.trajectory import REWARD_PREFIX
from quartet.config import UserError
from quartet.config.rewards import GateConfig
from quartet.data.datasets import PromptItem
from quartet.data.fields import column_at
from quartet.models.packed_model import PackedScalarModel
from quartet.rewards.source import LEFT_OUT_PREFIX, GuardedReward
from quartet.schedule.iteration import Chunk, ModelScorer, Scorer
from quartet.schedule.leases import LeaseContext
from quartet.schedule.model_worker import ModelWorker, ScoreWorker
from quartet.schedule.role_group import RoleGroup
from quartet.text.examples import PromptText
from quartet.text.tokenizer import TextCodec
from quartet.train.forward import Needs
from quartet.train.token_budget import TokenBudget


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


def _value(item: PromptItem, column: str) -> Any:
    """What the prompt's row has there; None where it is of a source of data that lacks the column."""
    try:
        return column_at(item.columns, column)
    except KeyError:
        return None


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
