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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from quartet.batch.ragged import RaggedBatch
from quartet.cluster.dispatch import ONE_COPY, RANK_ZERO, dispatch
from quartet.config import UserError
from quartet.config.common import DataConfig, SupervisedRecipe
from quartet.data.datasets import Batches, steps_for
from quartet.data.lazy import Prefetcher
from quartet.models.directories import on_meta
from quartet.models.loading import (
    check_saves,
    load_causal_lm,
    load_scalar_model,
    packed_causal_lm,
    packed_scalar_model,
    save_scalar_model,
    seen_tokens,
)
from quartet.models.packed_model import PackedCausalLM, PackedModel, PackedScalarModel
from quartet.schedule.model_worker import Described, TrainWorker
from quartet.schedule.role_group import RolesWorker
from quartet.text.tokenizer import TextCodec, check_vocabulary
from quartet.train.engine import Objective, TrainEngine
from quartet.train.parallel.fsdp import shard_model
from quartet.train.parallel.loading import load_shares
from quartet.train.parallel.mesh import Mesh
from quartet.trainers.devices import enter_process, precision_on, worker_device
from quartet.trainers.input_sources import (
    check_budget,
    context_length,
    read_data,
    reader_of,
    resolve_model,
    resolve_scalar_model,
    resolve_tokenizer,
    vocabulary_size,
)

R = TypeVar("R", bound=SupervisedRecipe)
D = TypeVar("D", bound=Batches)
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
        num_evaluation_rows: held-out ones.
    """

    steps: int
    num_rows: int
    rows_per_step: int
    num_evaluation_rows: int


class SupervisedWorker(TrainWorker, Generic[R, D, P]):
    """Trains one model on rows. Of several, each reads all rows and computes its share of every update and evaluation.

    A job's class says what it reads, minimises and measures; ``CausalWorker`` and ``ScalarWorker`` say which kind of
    model it trains.

    Args:
        device: where the model goes.
        mesh: the workers that train it together; None for this one alone.

    Raises:
        UserError: the recipe, the data or the objects do not fit together.
    """

    packed: P
    load_written: ClassVar[Callable[..., PreTrainedModel]]
    """Loads what ``write_model`` has written."""
    _pack: ClassVar[Callable[..., Any]]
    """Takes a model over for packed runs."""
    _rows_key: ClassVar[str]
    """Key of the recipe that says how many rows make a step."""

    def __init__(self, recipe: R, given: Given, device: torch.device, mesh: Mesh | None = None) -> None:
        self.recipe = recipe
        self.device = device
        self.mesh = mesh if mesh is not None and mesh.copy.size > 1 else None
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
                found if self.mesh is not None else found.to(device),
                precision=precision_on(device, train.precision),
                activation_checkpointing=train.activation_checkpointing,
                lora=train.lora,
                seed=recipe.seed,
            )
            taken.callback(self.packed.release)
            check_budget(self._longest(), train.token_budget, "train.token_budget")
            if self.mesh is not None:
                shard_model(self.packed, self.mesh, on_host=recipe.sharding.cpu_offload)
                load_shares(self.packed, self._contents(given.model), device=device, seed=recipe.seed)
            super().__init__(TrainEngine(self.packed, train, total_steps=self.steps, mesh=mesh))
            check_saves(self.packed, text, self._seen(), self.codec.eos_ids)
            self._begin(given)
            taken.pop_all()

    def _begin(self, given: Given) -> None:
        """Takes what else a job needs, once model and data are there."""

    def release(self) -> None:
        """Gives the models back as they were."""
        self._batches.close()
        self.packed.release()

    @property
    @abstractmethod
    def objective(self) -> Objective:
        """What every update minimises."""

    def _read(self, key: str, config: DataConfig | None, rows: Sequence[Any] | None, context: int) -> D:
        """The rows of ``key`` in the recipe, or those passed, as tokens."""
        return read_data(config, rows, self.codec, context, key, reader_of(self.recipe))

    @abstractmethod
    def _longest(self) -> int:
        """Most tokens that have to stay in one micro-batch."""

    @abstractmethod
    def _measure(self, data: D) -> dict[str, float]:
        """Figures of held-out rows, ``eval/…``; collective."""

    def _batch(self, step: int) -> RaggedBatch:
        """The batch of a step, a pure function of it, so that a resumed run sees the same data."""
        return self._batches.get(step)

    @cached_property
    def _batches(self) -> Prefetcher[Any]:
        """Of each step; one is prepared ahead where rows have to be read and tokenised for it."""
        size, seed = self._rows_per_step, self.recipe.seed

        def make(step: int) -> RaggedBatch | None:
            return self.data.batch(step, size, seed) if step < self.steps else None

        return Prefetcher(make, ahead=1 if self.data.unchecked else 0)

    @property
    def _rows_per_step(self) -> int:
        return int(getattr(self.recipe, self._rows_key))

    @property
    def _shares_prompts(self) -> bool:
        """A prompt is computed once for all of its answers."""
        return self.packed.shares_prefixes and self.recipe.train.share_prefixes

    @abstractmethod
    def _resolve(self, model: PreTrainedModel | None) -> tuple[PreTrainedModel, GenerationConfig | None]:
        """The model to train, and the generation config that names its end-of-text ids, where there is one.

        One that is to be cut has no contents yet.
        """

    def _emptied(self, model: PreTrainedModel | None) -> PreTrainedModel | None:
        return on_meta([model])[0] if model is not None and self.mesh is not None else model

    def _contents(self, model: PreTrainedModel | None) -> str | dict[str, torch.Tensor]:
        """Where the weights are that ``_resolve`` has left out."""
        if model is not None:
            return model.state_dict()
        assert self.recipe.model is not None, "it has been resolved"
        return self.recipe.model.path

    def _seen(self) -> torch.Tensor:
        """``[V]`` bool: the tokens that occur in the data; none where the export does not ask."""
        return torch.zeros(0, dtype=torch.bool)

    @dispatch(RANK_ZERO)
    def describe(self) -> SupervisedDescription:
        warnings = [f"data: {warning}" for warning in self.data.remarks]
        if self.evaluation is not None:
            warnings += [f"held-out data: {warning}" for warning in self.evaluation.remarks]
        model = super().describe()
        return SupervisedDescription(
            warnings=(*warnings, *model.warnings),
            shares_prefixes=model.shares_prefixes,
            steps=self.steps,
            num_rows=len(self.data),
            rows_per_step=self._rows_per_step,
            num_evaluation_rows=len(self.evaluation) if self.evaluation is not None else 0,
        )

    def step(self, step: int) -> dict[str, float]:
        """Makes the update of step ``step``, from 0; returns its figures by the names under which they are logged."""
        engine = self.engine
        with engine.reporting_failures():
            batch = self._batch(step)
        found = self._update(batch)
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

    def _update(self, batch: RaggedBatch) -> dict[str, float]:
        return self.engine.train_step(batch, self.objective)

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

    @dispatch(ONE_COPY)
    def write_model(self, path: Path) -> str | None:
        """As ``export``, with the tokenizer that the job has."""
        return self.export(path, self.codec.tokenizer, self._seen(), self.codec.eos_ids)


class CausalWorker(SupervisedWorker[R, D, PackedCausalLM]):
    """Trains a causal LM, in place."""

    load_written = staticmethod(load_causal_lm)
    _pack = staticmethod(packed_causal_lm)

    def _resolve(self, model: PreTrainedModel | None) -> tuple[PreTrainedModel, GenerationConfig | None]:
        load = partial(load_causal_lm, empty=self.mesh is not None)
        found = resolve_model(self.recipe.model, self._emptied(model), load, "model")
        return found, found.generation_config


class ScalarWorker(SupervisedWorker[R, D, PackedScalarModel]):
    """Trains a scalar head on a causal LM's body, which is copied, or goes on with a sequence-classification model with
    one label, in place.
    """

    load_written = staticmethod(load_scalar_model)
    _pack = staticmethod(packed_scalar_model)

    def _resolve(self, model: PreTrainedModel | None) -> tuple[PreTrainedModel, GenerationConfig | None]:
        empty, seed = self.mesh is not None, self.recipe.seed
        return resolve_scalar_model(self.recipe.model, self._emptied(model), seed=seed, empty=empty)

    def _seen(self) -> torch.Tensor:
        found = (data.seen for data in (self.data, self.evaluation) if data is not None)
        return seen_tokens(vocabulary_size(self.packed.model), (torch.tensor(sorted(ids)) for ids in found))

    def _write(self, path: Path, tokenizer: PreTrainedTokenizerBase, seen: Any, eos_ids: Collection[int]) -> str | None:
        return save_scalar_model(self.packed, tokenizer, path, seen=seen, eos_ids=eos_ids)


class SupervisedProcess(RolesWorker):
    """A process of Ray with one worker, ``model``, which loads the model and reads the rows.

    Args:
        kind: of the worker.
        directory: of the driver; paths of the recipe begin there, where a node has it.
    """

    def __init__(
        self, kind: type[SupervisedWorker[Any, Any, Any]], recipe: SupervisedRecipe, given: Given, directory: str
    ) -> None:
        group = enter_process(self, recipe.job, recipe, directory, is_group=self.world_size > 1)
        mesh = Mesh.cut(group, recipe.sharding) if group is not None else None
        self.roles = {"model": kind(recipe, given, worker_device(self.device, recipe), mesh)}
