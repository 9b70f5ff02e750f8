"""What computes in a job without sampling: model, optimizer and rows, in this process or in several of Ray.

::

    SupervisedWorker ─┬─ CausalWorker ─┬─ SFTWorker
                      │                └─ PreferenceWorker
                      └─ ScalarWorker ─┬─ RewardModelWorker
                                       └─ ProcessRewardWorker
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from quartet.batch.ragged import RaggedBatch
from quartet.cluster.dispatch import RANK_ZERO, dispatch
from quartet.config import UserError
from quartet.config.common import DataConfig
from quartet.config.supervised import SupervisedRecipe
from quartet.data.order import steps_for
from quartet.models.loading import (
    load_causal_lm,
    load_scalar_model,
    packed_causal_lm,
    packed_scalar_model,
    seen_tokens,
)
from quartet.models.packed import PackedCausalLM, PackedModel, PackedScalarModel
from quartet.schedule.model_worker import Described, TrainWorker
from quartet.text.tokenizer import TextCodec, check_vocabulary
from quartet.train.data_parallel import Peers
from quartet.train.engine import Objective, TrainEngine
from quartet.trainers.devices import precision_on
from quartet.trainers.sources import context_length, resolve_model, resolve_scalar_model, resolve_tokenizer


class Rows(Protocol):
    """Tokenised data."""

    @property
    def remarks(self) -> Sequence[str]:
        """What was left out or converted, in words."""

    def __len__(self) -> int: ...

    def batch(self, step: int, size: int, seed: int) -> RaggedBatch:
        """The rows of a step."""


class Answered(Protocol):
    @property
    def parts(self) -> Sequence[Sequence[int]]:
        """The tokens of a prompt and of its answers."""


class AnsweredRows(Rows, Protocol):
    @property
    def items(self) -> Sequence[Answered]: ...


R = TypeVar("R", bound=SupervisedRecipe)
D = TypeVar("D", bound=Rows)
A = TypeVar("A", bound=AnsweredRows)
P = TypeVar("P", bound=PackedModel)


@dataclass(frozen=True)
class Given:
    """What Python code passes in place of what a recipe names. Copies of it go to workers in other processes."""

    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    rows: Sequence[Any] | None = None
    evaluation_rows: Sequence[Any] | None = None
    reference: PreTrainedModel | None = None


@dataclass(frozen=True)
class SupervisedDescription(Described):
    """What a worker says of its model and its rows.

    Attributes:
        num_rows: to train on.
        has_evaluation: there are held-out rows.
    """

    steps: int
    num_rows: int
    rows_per_step: int
    has_evaluation: bool


class SupervisedWorker(TrainWorker, Generic[R, D, P]):
    """Trains one model on rows. Of several, each reads all rows and computes its share of every update.

    A job says what it reads, what it minimises and what it measures; whether it trains a causal LM or a scalar head is
    said by ``CausalWorker`` and ``ScalarWorker``.

    Args:
        device: where the model goes.
        peers: the workers that train it together; None for this one alone.

    Raises:
        UserError: the recipe, the data or the objects do not fit together.
    """

    def __init__(self, recipe: R, given: Given, device: torch.device, peers: Peers | None = None) -> None:
        self.recipe = recipe
        self.device = device
        text = resolve_tokenizer(recipe.model, given.tokenizer)
        found, generation = self._resolve(given.model)
        check_vocabulary(text, vocabulary_size(found))
        self.codec = TextCodec.of(text, generation)
        context = context_length(found)
        self.data = self._read("data", recipe.data, given.rows, context)
        self.evaluation: D | None = None
        if recipe.evaluation_data is not None or given.evaluation_rows is not None:
            self.evaluation = self._read("evaluation_data", recipe.evaluation_data, given.evaluation_rows, context)
        self.steps = recipe.steps or steps_for(recipe.epochs, len(self.data), self._rows_per_step)
        train = recipe.train
        with contextlib.ExitStack() as taken:
            # Where something does not fit after all, the model is given back as it was.
            self.packed = self._pack(
                found.to(device),
                precision=precision_on(device, train.precision),
                activation_checkpointing=train.activation_checkpointing,
                lora=train.lora,
                seed=recipe.seed,
            )
            taken.callback(self.packed.release)
            self._check_budgets()
            super().__init__(TrainEngine(self.packed, train, total_steps=self.steps, peers=peers))
            taken.pop_all()

    def release(self) -> None:
        """Gives the models back as they were."""
        self.packed.release()

    # What a job says ---------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def objective(self) -> Objective:
        """What every update minimises."""

    @property
    @abstractmethod
    def _rows_per_step(self) -> int: ...

    @abstractmethod
    def _read(self, key: str, config: DataConfig | None, rows: Sequence[Any] | None, context: int) -> D:
        """The rows of ``key`` in the recipe, or those passed, as tokens."""

    @abstractmethod
    def _check_budgets(self) -> None:
        """Refuses budgets that are too small for the data."""

    @abstractmethod
    def _measure(self, data: D) -> dict[str, float]:
        """Figures of held-out rows, ``eval/…``."""

    def _batch(self, step: int) -> RaggedBatch:
        """The batch of a step, a pure function of it, so that a resumed run sees the same data."""
        return self.data.batch(step, self._rows_per_step, self.recipe.seed)

    # What a kind of model says -------------------------------------------------------------------------------

    @abstractmethod
    def _resolve(self, model: PreTrainedModel | None) -> tuple[PreTrainedModel, GenerationConfig | None]:
        """The model to train, and the generation config that names its end-of-text ids, where there is one."""

    @abstractmethod
    def _pack(self, model: PreTrainedModel, **options: Any) -> P:
        """The model, taken over for packed runs."""

    def _seen(self) -> torch.Tensor:
        """``[V]`` bool: the tokens that occur in the data; none where the export does not ask."""
        return torch.zeros(0, dtype=torch.bool)

    @staticmethod
    @abstractmethod
    def load_written(path: str) -> PreTrainedModel:
        """Loads what ``write_model`` has written."""

    # What it is asked --------------------------------------------------------------------------------------

    @dispatch(RANK_ZERO)
    def describe(self) -> SupervisedDescription:
        remarks = [f"data: {remark}" for remark in self.data.remarks]
        if self.evaluation is not None:
            remarks += [f"held-out data: {remark}" for remark in self.evaluation.remarks]
        model = super().describe()
        return SupervisedDescription(
            remarks=(*remarks, *model.remarks),
            shares_prefixes=model.shares_prefixes,
            steps=self.steps,
            num_rows=len(self.data),
            rows_per_step=self._rows_per_step,
            has_evaluation=self.evaluation is not None,
        )

    def step(self, step: int) -> dict[str, float]:
        """Makes the update of step ``step``, from 0; returns its figures by the names under which they are logged."""
        engine = self.engine
        with engine.announcing():
            batch = self._batch(step)
        found = engine.train_step(batch, self.objective)
        figures = {name: value for name, value in found.items() if name not in ("lr", "grad_norm", "skipped")}
        return {
            **figures,
            "optim/lr": found["lr"],
            "optim/grad_norm": found["grad_norm"],
            "optim/skipped_steps": float(engine.num_skipped),
            "train/token_budget": float(engine.budget.tokens),
            "train/num_oom": float(engine.num_oom),
            "tokens/useful": float(batch.num_tokens),
        }

    @dispatch(RANK_ZERO)
    def evaluate(self) -> dict[str, float]:
        """Figures of the held-out rows, as they are logged.

        Raises:
            UserError: there are none.
        """
        if self.evaluation is None:
            raise UserError(
                "there is no evaluation data",
                found="neither evaluation_data nor evaluation_rows",
                remedy="set evaluation_data.path, or pass evaluation_rows",
            )
        return self._measure(self.evaluation)

    @dispatch(RANK_ZERO)
    def write_model(self, path: Path) -> str | None:
        """As ``export``, with the tokenizer that the job has."""
        return self.export(path, self.codec.tokenizer, self._seen(), self.codec.eos_ids)


class CausalWorker(SupervisedWorker[R, D, PackedCausalLM]):
    """Trains a causal LM, in place."""

    def _resolve(self, model: PreTrainedModel | None) -> tuple[PreTrainedModel, GenerationConfig | None]:
        found = resolve_model(self.recipe.model, model, load_causal_lm, "model")
        return found, found.generation_config

    def _pack(self, model: PreTrainedModel, **options: Any) -> PackedCausalLM:
        return packed_causal_lm(model, **options)

    @staticmethod
    def load_written(path: str) -> PreTrainedModel:
        return load_causal_lm(path)


class ScalarWorker(SupervisedWorker[R, A, PackedScalarModel]):
    """Trains a scalar head on a causal LM's body, which is copied, or goes on with a sequence-classification model with
    one label, in place.
    """

    def _resolve(self, model: PreTrainedModel | None) -> tuple[PreTrainedModel, GenerationConfig | None]:
        return resolve_scalar_model(self.recipe.model, model, seed=self.recipe.seed)

    def _pack(self, model: PreTrainedModel, **options: Any) -> PackedScalarModel:
        return packed_scalar_model(model, **options)

    @staticmethod
    def load_written(path: str) -> PreTrainedModel:
        return load_scalar_model(path)

    def _seen(self) -> torch.Tensor:
        parts = [self.data] + ([self.evaluation] if self.evaluation is not None else [])
        ids = (torch.tensor(ids) for data in parts for item in data.items for ids in item.parts)
        return seen_tokens(vocabulary_size(self.packed.model), ids)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Rows of the embedding: one more than the largest id that the model can read."""
    return int(model.get_input_embeddings().weight.shape[0])
