"""What the jobs without sampling share: the objects of a run, its loop, evaluation and export.

::

    SupervisedTrainer ─┬─ CausalTrainer ─┬─ SFTTrainer
                       │                 └─ PreferenceTrainer
                       └─ ScalarTrainer ─┬─ RewardModelTrainer
                                         └─ ProcessRewardTrainer
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from transformers import GenerationConfig, PreTrainedModel

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.common import DataConfig, SupervisedRecipe
from quartet.data.order import steps_for
from quartet.models.loading import (
    load_causal_lm,
    packed_causal_lm,
    packed_scalar_model,
    save_causal_lm,
    save_scalar_model,
    seen_tokens,
)
from quartet.models.packed import PackedCausalLM, PackedModel, PackedScalarModel
from quartet.observe.progress import Progress
from quartet.text.tokenizer import TextCodec, check_vocabulary
from quartet.train.engine import Objective, TrainEngine
from quartet.trainers.arguments import ModelLike, TokenizerLike, check_recipe, with_names
from quartet.trainers.devices import compute_device, precision_on, resolved
from quartet.trainers.resuming import Resume, output_path
from quartet.trainers.run import RunDirectory, use_threads
from quartet.trainers.sources import context_length, resolve_model, resolve_scalar_model, resolve_tokenizer
from quartet.trainers.supervised import SupervisedLoop, run_supervised


@dataclass(frozen=True)
class SupervisedResult:
    """Where the run is, the trained model (a Hugging Face object) and what ``summary.json`` holds."""

    path: Path
    model: PreTrainedModel
    summary: dict[str, Any]


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


class SupervisedTrainer(abc.ABC, Generic[R, D, P]):
    """A job without sampling: takes the objects of the run together, trains, evaluates, exports.

    A job says what it reads, what it minimises and what it measures; whether it trains a causal LM or a scalar head is
    said by ``CausalTrainer`` and ``ScalarTrainer``.

    Args:
        recipe: the run. What it leaves out comes as objects:
        model, tokenizer: what is trained, in place, and its tokenizer; objects, or paths or hub names. An object stays
            on its device unless the recipe names another.
        rows, evaluation_rows: mappings, with the columns that the job reads from files.
        resume: go on with the run in ``recipe.output_dir``; ``auto``: or start it, without a word.

    Raises:
        UserError: the recipe, the data or the objects do not fit together; nothing has been written then.
    """

    recipe_class: ClassVar[type[SupervisedRecipe]]

    def __init__(
        self,
        recipe: R,
        *,
        model: ModelLike | None = None,
        tokenizer: TokenizerLike | None = None,
        rows: Sequence[Any] | None = None,
        evaluation_rows: Sequence[Any] | None = None,
        resume: Resume = False,
        progress: Progress | None = None,
    ) -> None:
        check_recipe(recipe, self.recipe_class)
        use_threads(recipe.threads)
        recipe, passed, own = with_names(recipe, model, tokenizer)
        self.recipe = recipe
        self.device = compute_device(recipe, passed)
        self.path = output_path(recipe.output_dir, recipe.job, resume)
        self.progress = progress if progress is not None else Progress()
        record = resolved(recipe, self.device)
        self.run = RunDirectory(self.path, recipe, resume=resume, tell=self.progress.print, resolved=record)
        text = resolve_tokenizer(recipe.model, own)
        found, generation = self._resolve(passed)
        check_vocabulary(text, vocabulary_size(found))
        self.codec = TextCodec.of(text, generation)
        context = context_length(found)
        self.data = self._read("data", recipe.data, rows, context)
        self.evaluation: D | None = None
        if recipe.evaluation_data is not None or evaluation_rows is not None:
            self.evaluation = self._read("evaluation_data", recipe.evaluation_data, evaluation_rows, context)
        self.steps = recipe.steps or steps_for(recipe.epochs, len(self.data), self._rows_per_step)
        train = recipe.train
        with contextlib.ExitStack() as taken:
            # Where something does not fit after all, the model is given back as it was.
            self.packed = self._pack(
                found.to(self.device),
                precision=precision_on(self.device, train.precision),
                activation_checkpointing=train.activation_checkpointing,
                lora=train.lora,
                seed=recipe.seed,
            )
            taken.callback(self.packed.release)
            self._check_budgets()
            self.engine = TrainEngine(self.packed, train, total_steps=self.steps)
            taken.pop_all()

    # What a job says ---------------------------------------------------------------------------------------

    _held_out_figure: ClassVar[str] = "eval/accuracy"
    """Shown beside the progress bar."""

    @property
    @abc.abstractmethod
    def objective(self) -> Objective:
        """What every update minimises."""

    @property
    @abc.abstractmethod
    def _rows_per_step(self) -> int: ...

    @abc.abstractmethod
    def _read(self, key: str, config: DataConfig | None, rows: Sequence[Any] | None, context: int) -> D:
        """The rows of ``key`` in the recipe, or those passed, as tokens."""

    @abc.abstractmethod
    def _check_budgets(self) -> None:
        """Refuses budgets that are too small for the data."""

    @abc.abstractmethod
    def _measure(self, data: D) -> dict[str, float]:
        """Figures of held-out rows, ``eval/…``."""

    def _batch(self, step: int) -> RaggedBatch:
        return self.data.batch(step, self._rows_per_step, self.recipe.seed)

    def _prepare(self, run: RunDirectory, progress: Progress) -> None:
        """What has to be done before the first step; see ``SupervisedLoop``."""

    # What a kind of model says -------------------------------------------------------------------------------

    @abc.abstractmethod
    def _resolve(self, model: PreTrainedModel | None) -> tuple[PreTrainedModel, GenerationConfig | None]:
        """The model to train, and the generation config that names its end-of-text ids, where there is one."""

    @abc.abstractmethod
    def _pack(self, model: PreTrainedModel, **options: Any) -> P:
        """The model, taken over for packed runs."""

    @abc.abstractmethod
    def _export(self, path: Path) -> str | None:
        """Writes the model directory; returns a warning or None."""

    # The run -----------------------------------------------------------------------------------------------

    def train(self) -> SupervisedResult:
        """Runs to the last step; ``model/`` is then a plain Hugging Face directory.

        Raises:
            Interrupted: Ctrl-C, SIGTERM or SIGUSR1; saved, and resumable.
        """
        name = self.recipe.job.replace("-", "_")
        loop = SupervisedLoop(
            name=name,
            engine=self.engine,
            objective=self.objective,
            batch=self._batch,
            steps=self.steps,
            evaluate=self.evaluate if self.evaluation is not None else None,
            evaluate_every=self.recipe.evaluate_every_steps,
            num_rows=len(self.data),
            rows_per_step=self._rows_per_step,
            figures={"loss": f"loss/{name}", "accuracy": f"{name}/accuracy", "held-out": self._held_out_figure},
            prepare=self._prepare,
        )
        remarks = [f"data: {remark}" for remark in self.data.remarks]
        if self.evaluation is not None:
            remarks += [f"held-out data: {remark}" for remark in self.evaluation.remarks]
        summary = run_supervised(loop, self.run, self.progress, remarks, self._export)
        return SupervisedResult(self.path, self.packed.model, summary)

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


class CausalTrainer(SupervisedTrainer[R, D, PackedCausalLM]):
    """Trains a causal LM, in place."""

    def _resolve(self, model: PreTrainedModel | None) -> tuple[PreTrainedModel, GenerationConfig | None]:
        found = resolve_model(self.recipe.model, model, load_causal_lm, "model")
        return found, found.generation_config

    def _pack(self, model: PreTrainedModel, **options: Any) -> PackedCausalLM:
        return packed_causal_lm(model, **options)

    def _export(self, path: Path) -> str | None:
        return save_causal_lm(self.packed, self.codec.tokenizer, path)


class ScalarTrainer(SupervisedTrainer[R, A, PackedScalarModel]):
    """Trains a scalar head on a causal LM's body, which is copied, or goes on with a sequence-classification model with
    one label, in place.
    """

    def _resolve(self, model: PreTrainedModel | None) -> tuple[PreTrainedModel, GenerationConfig | None]:
        return resolve_scalar_model(self.recipe.model, model, seed=self.recipe.seed)

    def _pack(self, model: PreTrainedModel, **options: Any) -> PackedScalarModel:
        return packed_scalar_model(model, **options)

    def _export(self, path: Path) -> str | None:
        codec = self.codec
        return save_scalar_model(self.packed, codec.tokenizer, path, seen=self._seen(), eos_ids=codec.eos_ids)

    def _seen(self) -> torch.Tensor:
        """``[V]`` bool: the tokens that occur in the data."""
        parts = [self.data] + ([self.evaluation] if self.evaluation is not None else [])
        ids = (torch.tensor(ids) for data in parts for item in data.items for ids in item.parts)
        return seen_tokens(vocabulary_size(self.packed.model), ids)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Rows of the embedding: one more than the largest id that the model can read."""
    return int(model.get_input_embeddings().weight.shape[0])
