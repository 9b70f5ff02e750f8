"""Preference training: DPO and its relatives on pairs of answers, KTO on pairs or on answers judged one by one.

::

    reference ──► log-probabilities of every answer, once, on disk
                                        │
    pairs of a step ──► prompt ┬► chosen    ├──► loss ──► update
                               └► rejected ─┘            (the prompt is computed once for both)

::

    <run>/reference/training.safetensors, evaluation.safetensors
        answers     [rows, answers per row]  log-probability of each whole answer; NaN of rows that the run never draws
        mismatched  [rows, answers per row]  the same of answers to other prompts (KTO)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from quartet.algorithms.preference import kto_reference_point, preference_baselines
from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.config import UserError
from quartet.config.common import DataConfig
from quartet.config.preference import REFERENCE_FREE, KTOLoss, PreferenceRecipe, StepLossConfig
from quartet.data.datasets import JudgedData, PreferenceData, draw_batch
from quartet.models.directories import copy_to_meta
from quartet.models.loading import load_causal_lm, packed_causal_lm
from quartet.observe.callbacks import Callback
from quartet.observe.files import replace_atomically
from quartet.observe.progress import Progress
from quartet.schedule.role_group import RoleGroup
from quartet.train.engine import Objective, TrainEngine
from quartet.train.forward import ForwardNeeds, ForwardOutputs, forward_only
from quartet.train.metrics import MetricSums
from quartet.train.objectives import KTOObjective, PreferenceObjective, answer_logprobs
from quartet.train.parallel.data import shard_model
from quartet.train.parallel.loading import load_shares
from quartet.trainers import checkpoints
from quartet.trainers.devices import FrozenModels, resolve_precision
from quartet.trainers.input_sources import (
    ModelLike,
    TokenizerLike,
    check_budget,
    check_recipe,
    check_vocabulary_covers,
    connect_pictures,
    longest_group,
    with_name,
)
from quartet.trainers.run_files import Resume, naming_write_errors
from quartet.trainers.supervised import PassedObjects, SupervisedTrainer, SupervisedWorker

_AT_A_TIME = 128
"""Rows of one forward-only pass."""
_LOGPROBS = ForwardNeeds(logprobs=True)
_ROWS = 64
"""Rows of one forward-only pass; micro-batches are cut by the token budget."""

Tables = Mapping[str, Tensor]


class PreferenceWorker(SupervisedWorker[PreferenceRecipe, PreferenceData | JudgedData]):
    """Trains a causal LM to prefer chosen over rejected answers."""

    _rows_key = "pairs_per_step"

    def _begin(self, given: PassedObjects) -> None:
        self._tables = self._reference_tables(given.reference)

    def release(self) -> None:
        self.release_reference()
        super().release()

    # What is compared ------------------------------------------------------------------------------------

    def _read(
        self, key: str, config: DataConfig | None, rows: Sequence[Any] | None, context: int
    ) -> PreferenceData | JudgedData:
        loss = self.recipe.loss
        found = super()._read(key, config, rows, context)
        if isinstance(loss, KTOLoss):
            found.check_mismatched()
        elif isinstance(found, JudgedData):
            raise UserError(
                f"loss {loss.name} compares two answers, but the rows of {key} hold one each",
                found="columns completion and label",
                remedy="use loss.name=kto, or rows with chosen and rejected",
            )
        return found

    def _longest(self) -> int:
        for data in (self.data, *([self.evaluation] if self.evaluation is not None else [])):
            prompts_R, answers_R = data.lengths[:, 0], data.lengths[:, 1:].max(1)
            longest = int((prompts_R + answers_R).max())
            if isinstance(self.recipe.loss, KTOLoss):
                # Answers are also read after other prompts.
                longest = min(data.max_tokens, int(prompts_R.max() + answers_R.max()))
            check_budget(longest, self.recipe.train.forward_token_budget, "train.forward_token_budget")
        return longest_group(self.data, share=self._shares_prompts)

    def _reference_tables(self, model: PreTrainedModel | None) -> ReferenceTables | None:
        loss = self.recipe.loss
        if isinstance(loss, REFERENCE_FREE):
            if model is not None:
                raise UserError(
                    f"loss {loss.name} looks at the policy alone",
                    found="a reference model",
                    remedy="leave the reference out, or use a loss such as dpo",
                )
            return None
        if (model is None or model is self.packed.model) and self.recipe.reference.path is None:
            reference = self._model_as_it_starts()
        else:
            reference = self._other_model(None if model is self.packed.model else model)
        data = {"training": (self.data, self._drawn())}
        if self.evaluation is not None:
            data["evaluation"] = (self.evaluation, range(len(self.evaluation)))
        return ReferenceTables(reference, data, self.engine, mismatched=isinstance(loss, KTOLoss))

    def _drawn(self) -> Sequence[int]:
        """Returns the rows that the run uses: all, but where it has so many that they are not all checked at its
        start."""
        order, size = self.data.order, self._rows_per_step
        if not self.data.unchecked or (self.data.mixture is None and self.steps * size >= len(self.data)):
            return range(len(self.data))
        is_drawn = np.zeros(len(self.data), bool)
        for step in range(self.steps):
            is_drawn[[row for row, _ in draw_batch(self.recipe.seed, step, order, size)]] = True
        found: list[int] = np.flatnonzero(is_drawn).tolist()
        return found

    def _model_as_it_starts(self) -> ReferencePolicy:
        """Returns the model as it starts, with adapters their base, as the reference."""
        engine, packed = self.engine, self.packed

        def forward(batch: RaggedBatch) -> ColumnSet:
            with packed.without_adapters():
                return engine.forward(batch, _LOGPROBS)

        return ReferencePolicy(forward)

    def _other_model(self, passed: PreTrainedModel | None) -> ReferencePolicy:
        """Returns the model passed, or the one that the recipe names; given back once its log-probabilities are
        known."""
        recipe, train = self.recipe, self.recipe.train
        path = str(recipe.reference.path)
        model = passed
        if model is None:
            trust = recipe.reference.trust_remote_code
            model = load_causal_lm(path, empty=self.mesh is not None, trust_remote_code=trust)
        check_vocabulary_covers(model, self.packed.model, "reference")
        precision = resolve_precision(self.device, train.precision)
        if self.mesh is not None:
            packed = packed_causal_lm(copy_to_meta([model])[0], precision)
            packed.model.requires_grad_(False)
            shard_model(packed, self.mesh, on_host=recipe.sharding.cpu_offload)
            load_shares(packed, passed.state_dict() if passed is not None else path, device=self.device)
        else:
            model.float().eval()
            stays = recipe.device == "auto" and recipe.cluster.type == "local"
            packed = FrozenModels(self.device, precision, moves_user_models=not stays).causal(
                model, is_user_object=passed is not None
            )
        connect_pictures(packed, self._features)
        budget = self.engine.forward_budget

        def forward(batch: RaggedBatch) -> ColumnSet:
            return forward_only(packed, batch, _LOGPROBS, budget, train.logprob_chunk, share=train.share_prefixes)

        return ReferencePolicy(forward, packed.release)

    def release_reference(self) -> None:
        """Gives the reference back: its log-probabilities are there."""
        if self._tables is not None:
            self._tables.release()

    # Training --------------------------------------------------------------------------------------------

    @property
    def objective(self) -> Objective:
        loss = self.recipe.loss
        return KTOObjective(loss) if isinstance(loss, KTOLoss) else PreferenceObjective(loss)

    def begin_reference(self, path: Path) -> int:
        """Begins the reference as ``ReferenceTables.begin`` does, once, before the first step; without a reference
        nothing is missing."""
        return self._tables.begin(path) if self._tables is not None else 0

    def compute_reference(self) -> int:
        """Computes what is missing of the reference, as ``ReferenceTables.compute`` does."""
        return self._tables.compute() if self._tables is not None else 0

    def _batch(self, step: int) -> RaggedBatch:
        drawn = draw_batch(self.recipe.seed, step, self.data.order, self._rows_per_step)
        rows, names = [row for row, _ in drawn], [f"row{row}@{epoch}" for row, epoch in drawn]
        kl = self._reference_point("training", self.data, rows, names)
        anchors = self._anchors("training", self.data, rows, names)
        # The tokenizer may not be able to prepare a batch while answers to other prompts are read with it.
        batch = super()._batch(step) if kl is None and anchors is None else self.data.select(rows, names)
        batch = self._with_reference("training", batch, rows, kl)
        return batch if anchors is None else batch.with_sequence(anchor=anchors.flatten())

    def _with_reference(self, name: str, batch: RaggedBatch, rows: Sequence[int], kl: Tensor | None) -> RaggedBatch:
        if self._tables is not None:
            batch = batch.with_sequence(ref_logprobs=self._tables[name]["answers"][list(rows)].flatten())
        return batch if kl is None else batch.with_sequence(kl=kl.expand(len(batch)))

    def _policy_logprobs(
        self,
        select: Callable[[Sequence[int], Sequence[str] | None], RaggedBatch],
        rows: Sequence[int],
        names: Sequence[str] | None,
    ) -> Tensor:
        """Computes the log-probabilities of the answers to ``rows`` that ``select`` gives, under the present policy."""
        forward = partial(self.engine.forward, needs=_LOGPROBS)
        batches = (select(rows[part], None if names is None else names[part]) for part in self._slices(len(rows)))
        passes = self.engine.in_shares(batches, forward)
        return torch.cat([answer_logprobs(found.token["logprobs"], batch)[0] for batch, found in passes])

    def _anchors(
        self, name: str, data: PreferenceData | JudgedData, rows: Sequence[int], names: Sequence[str] | None = None
    ) -> Tensor | None:
        """Returns ``[R, 2]`` as ``preference_baselines``, of all rows under the present policy; None for losses of
        single pairs.
        """
        loss = self.recipe.loss
        if not isinstance(loss, StepLossConfig):
            return None
        assert self._tables is not None, f"{loss.name} has a reference"
        totals = self._policy_logprobs(data.select, rows, names).view(-1, 2)
        return preference_baselines(loss.name, totals, self._tables[name]["answers"][list(rows)])

    def _reference_point(
        self, name: str, data: PreferenceData | JudgedData, rows: Sequence[int], names: Sequence[str] | None = None
    ) -> Tensor | None:
        """Returns KTO's scalar, from answers to other prompts under the present policy and the reference; None of
        others."""
        if not isinstance(self.recipe.loss, KTOLoss):
            return None
        assert self._tables is not None, "KTO has a reference"
        totals = self._policy_logprobs(data.mismatched, rows, names)
        return kto_reference_point(totals - self._tables[name]["mismatched"][list(rows)].flatten())

    def _slices(self, num_rows: int) -> list[slice]:
        """Cuts the rows into slices, for one forward-only pass after the other."""
        size = _AT_A_TIME * self.engine.num_ranks
        return [slice(start, start + size) for start in range(0, num_rows, size)]

    def _measure(self, data: PreferenceData | JudgedData) -> dict[str, float]:
        objective, sums, everything = self.objective, MetricSums(), range(len(data))
        kl = self._reference_point("evaluation", data, everything)
        anchors = self._anchors("evaluation", data, everything)
        whole = len(data) if kl is None else len(data) * (data.lengths.shape[1] - 1)
        parts, forward = self._slices(len(data)), partial(self.engine.forward, needs=objective.needs)
        passes = self.engine.in_shares((data.select(everything[part]) for part in parts), forward)
        for part, (batch, columns) in zip(parts, passes, strict=True):
            batch = self._with_reference("evaluation", batch, everything[part], kl)
            batch = batch if anchors is None else batch.with_sequence(anchor=anchors[part].flatten())
            objective.loss(ForwardOutputs(logprobs=columns.token["logprobs"]), batch, whole, sums)
        found = sums.results()
        figures = {f"eval/{n.removeprefix('preference/')}": v for n, v in found.items() if n.startswith("preference/")}
        return {"eval/loss": found["loss/preference"], **figures}


class PreferenceTrainer(SupervisedTrainer[PreferenceRecipe, PreferenceWorker]):
    """Trains a causal LM to prefer chosen over rejected answers, without sampling and without a reward model.

    Rows have ``prompt``, ``chosen``, ``rejected``; for KTO also ``prompt``, ``completion``, ``label``. Held-out
    figures: ``eval/loss``, and the mean figures of the rows under ``eval/`` (``accuracy``, ``margin``, …); the
    reference's log-probabilities that they need are there once ``train`` has begun.

    Args:
        reference: a causal LM to compare with, or its path or hub name; default ``recipe.reference.path``, else the
            model as it starts.

    The other arguments are those of ``SupervisedTrainer``.
    """

    recipe_class = PreferenceRecipe
    worker_class = PreferenceWorker

    def __init__(
        self,
        recipe: PreferenceRecipe,
        *,
        model: ModelLike | None = None,
        reference: ModelLike | None = None,
        tokenizer: TokenizerLike | None = None,
        rows: Sequence[Any] | None = None,
        evaluation_rows: Sequence[Any] | None = None,
        callbacks: Sequence[Callback] = (),
        resume: Resume = False,
        progress: Progress | None = None,
    ) -> None:
        check_recipe(recipe, PreferenceRecipe)
        recipe, self._reference = with_name(recipe, reference, "reference.path")
        super().__init__(
            recipe,
            model=model,
            tokenizer=tokenizer,
            rows=rows,
            evaluation_rows=evaluation_rows,
            callbacks=callbacks,
            resume=resume,
            progress=progress,
        )
        self._reference = None  # the worker's, which gives it back before the first step

    async def _prepare(self, group: RoleGroup[PreferenceWorker]) -> None:
        """Has the reference's log-probabilities computed where they are not there."""
        run, path = self.run, self._path_of_workers
        if missing := await group.call(PreferenceWorker.begin_reference, path):
            with self.progress.stage("reference", missing) as bar:
                while num_rows := await group.call(PreferenceWorker.compute_reference):
                    bar.advance(num_rows)
                    run.check_stop(max(run.saved_steps(), default=0))
        await checkpoints.bring_to_driver(run, group, path / "reference")
        await group.call(PreferenceWorker.release_reference)


# The reference's log-probabilities -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ReferencePolicy:
    """A policy that answers are compared with.

    Args:
        forward: ``logprobs [T]`` of a batch's loss tokens.
        release: called when the tables are complete; gives back what the reference holds.
    """

    forward: Callable[[RaggedBatch], ColumnSet]
    release: Callable[[], object] = lambda: None


class ReferenceTables:
    """The tables of one run's data sets: ``tables[name]["answers"]`` is ``[rows, answers per row]`` float32.

    All ranks make the same calls: each computes its share, and the first one reads and writes files.

    Args:
        reference: whose log-probabilities.
        data: the data sets by name, each with the rows that the run uses, ascending.
        engine: of the model that is trained, for its ranks.
        mismatched: also of answers to other prompts.
    """

    def __init__(
        self,
        reference: ReferencePolicy,
        data: Mapping[str, tuple[PreferenceData | JudgedData, Sequence[int]]],
        engine: TrainEngine[Any],
        *,
        mismatched: bool,
    ) -> None:
        self._engine = engine
        self._reference: ReferencePolicy | None = reference
        self._data = data
        self._kinds = ("answers", "mismatched") if mismatched else ("answers",)
        self._work: Iterator[int] = iter(())
        self.tables: dict[str, Tables] = {}

    def __getitem__(self, name: str) -> Tables:
        if name not in self.tables:
            raise RuntimeError(f"the reference's log-probabilities of {name!r} are not there before the first step")
        return self.tables[name]

    def begin(self, path: Path) -> int:
        """Reads the tables that are there; ``compute`` makes the others.

        Args:
            path: the run's directory.

        Returns:
            How many rows have to be computed.
        """
        assert self._reference is not None, "begun once, before the reference is given back"
        missing = {}
        for name in self._data:
            file = path / "reference" / f"{name}.safetensors"
            found = self._engine.of_first_rank(partial(_load, file, partial(self._digest, name)))
            if found is not None:
                self.tables[name] = found
            else:
                missing[name] = file
        self._work = self._computed(self._reference, missing)
        return sum(len(self._data[name][1]) for name in missing)

    def _digest(self, name: str) -> str:
        """Digests the token ids of the rows that are drawn: a table is theirs alone."""
        found = hashlib.sha256()
        for rows, batches in self._parts(name, _ROWS):
            found.update(repr(list(rows)).encode())
            for batch in batches:
                found.update(repr(batch.segment_lengths).encode())
                found.update(batch.input_ids.numpy().data)
        return found.hexdigest()

    def _parts(self, name: str, size: int) -> Iterator[tuple[Sequence[int], list[RaggedBatch]]]:
        """Yields ``size`` rows at a time, with a batch of each kind."""
        data, drawn = self._data[name]
        for start in range(0, len(drawn), size):
            rows = drawn[start : start + size]
            yield rows, [data.select(rows) if kind == "answers" else data.mismatched(rows) for kind in self._kinds]

    def compute(self) -> int:
        """Computes some rows of what is missing, and writes tables that are complete.

        Returns:
            How many rows; 0 when all tables are there.

        Raises:
            UserError: the reference computes numbers that are not finite, or the file cannot be written.
        """
        return next(self._work, 0)

    def _computed(self, reference: ReferencePolicy, missing: Mapping[str, Path]) -> Iterator[int]:
        for name, path in missing.items():
            data, drawn = self._data[name]
            totals: dict[str, list[Tensor]] = {kind: [] for kind in self._kinds}
            for rows, batches in self._parts(name, _ROWS * self._engine.num_ranks):
                passes = self._engine.in_shares(batches, reference.forward)
                for kind, (batch, found) in zip(self._kinds, passes, strict=True):
                    of_answers, _ = answer_logprobs(found.token["logprobs"], batch)
                    if not bool(of_answers.isfinite().all()):
                        raise UserError(
                            "the reference gives log-probabilities that are not finite",
                            found=f"answers to rows {rows[0]} to {rows[-1]}",
                            remedy="check the reference's weights, or compute in fp32",
                        )
                    totals[kind].append(of_answers.float().view(len(rows), -1))
                if rows[-1] == drawn[-1]:
                    tables = {kind: _spread(torch.cat(part), drawn, len(data)) for kind, part in totals.items()}
                    self._engine.of_first_rank(partial(_write, path, tables, partial(self._digest, name)))
                    self.tables[name] = tables
                yield len(rows)

    def release(self) -> None:
        """Gives the reference back, if it is still there; it may change afterwards."""
        reference, self._reference, self._work = self._reference, None, iter(())
        if reference is not None:
            reference.release()


def _spread(values_D: Tensor, rows: Sequence[int], num: int) -> Tensor:
    """Spreads the values of ``rows`` over ``num`` rows; NaN stands for the others, which are not drawn."""
    found = torch.full((num, *values_D.shape[1:]), math.nan)
    found[torch.tensor(rows)] = values_D
    return found


def _write(path: Path, tables: dict[str, Tensor], digest: Callable[[], str]) -> None:
    with naming_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(path, save(tables, {"ids": digest()}))


def _load(path: Path, digest: Callable[[], str]) -> Tables | None:
    """Returns what the file holds; None where there is none, one that is damaged, or one of other rows or tokens."""
    try:
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("ids") != digest():
                return None
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    except (OSError, SafetensorError):
        return None
