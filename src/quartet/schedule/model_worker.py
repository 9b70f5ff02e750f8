"""Workers of the roles with a model: passes and updates, beside the model, in this process or in another.

Workers whose parts can leave their device for others and come back, as the arbiter's leases ask.

Workers whose state is a share of a run's checkpoints.
"""

from __future__ import annotations

import contextlib
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from quartet.batch.columns import ColumnSet
from quartet.batch.ragged import RaggedBatch
from quartet.cluster.dispatch import ONE_COPY, RANK_ZERO, SPLIT, Custom, dispatch
from quartet.cluster.layout import Layout
from quartet.config import UserError
from quartet.config.cluster import OffloadConfig
from quartet.config.file_errors import write_error
from quartet.models.directories import load_warnings
from quartet.models.loading import save_causal_lm, save_scalar_model
from quartet.models.packed_model import PackedModel, PackedScalarModel
from quartet.models.work import Work
from quartet.observe.files import FileDigest
from quartet.rollout.drafter import DrafterModel
from quartet.schedule.leases import LeaseMode
from quartet.schedule.weight_sync import WeightSenderMixin
from quartet.train.bit_flips import ModelPart
from quartet.train.checkpoint import Share, ShareWriter
from quartet.train.engine import LossTerm, Objective, TrainEngine
from quartet.train.forward import Needs, forward_only
from quartet.train.host_memory import MappedFiles, PinnedMemory
from quartet.train.offload import PARTS, Moved, Offload, OffloadPart, Store
from quartet.train.parallel.tensors import local, write_part
from quartet.train.state import REST, Shape, check_fit, model_tensors, shapes_of
from quartet.train.token_budget import TokenBudget

_PARTS_OF: dict[LeaseMode, tuple[OffloadPart, ...]] = {"forward": ("params",), "generate": ("params",), "train": PARTS}


def store_of(config: OffloadConfig) -> Store:
    if config.to == "pinned_memory":
        return PinnedMemory()
    return MappedFiles(config.directory or tempfile.gettempdir())


class Offloadable(ABC):
    """A worker with parts that move, once ``make_offloadable`` was called."""

    _parts: Offload | None = None

    def make_offloadable(self, config: OffloadConfig) -> None:
        self._parts = self._offload(store_of(config))

    def onload(self, mode: LeaseMode) -> Moved:
        """Brings in what ``mode`` needs and is not there."""
        return self._movable.onload(_PARTS_OF[mode])

    def offload(self) -> Moved:
        """Everything leaves."""
        return self._movable.offload()

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Within, the parameters are there, whatever leases say: for the moments in which a model is read or replaced
        as a whole."""
        away = self._parts is not None and not self._parts.is_resident(("params",))
        if away:
            self._movable.onload(("params",))
        try:
            yield
        finally:
            if away:
                self._movable.offload(("params",))

    def stop_offloading(self) -> None:
        """Parameters come back for good: the model is its owner's again. Nothing where it does not move."""
        if self._parts is not None:
            self._parts.release()

    @property
    def _movable(self) -> Offload:
        if self._parts is None:
            raise RuntimeError(f"this {type(self).__name__} does not move: its pool has no budget")
        return self._parts

    @dispatch(RANK_ZERO)
    @abstractmethod
    def sizes(self) -> dict[LeaseMode, int]:
        """Bytes that must be on the device in each mode."""

    @abstractmethod
    def _offload(self, store: Store) -> Offload:
        """What moves this host's parts to ``store`` and back."""


def _with_rank(layout: Layout, *args: Any, **kwargs: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [(args, {**kwargs, "rank": rank}) for rank in range(layout.world_size)]


def same_for_all(layout: Layout, *args: Any, **kwargs: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [(args, kwargs)] * layout.world_size


def _all_files(layout: Layout, found: list[dict[str, FileDigest] | None]) -> dict[str, FileDigest] | None:
    """Of all ranks together: None until all have theirs, empty where one never will."""
    if any(files is None for files in found):
        return None
    return {name: digest for files in found for name, digest in (files or {}).items()} if all(found) else {}


class Checkpointed(ABC):
    """A worker that writes its share of a checkpoint itself, and reads it; what several have the first one writes."""

    _writer: ShareWriter | None = None

    def check_sees(self, directory: Path) -> None:
        """
        Args:
            directory: which the driver has made.

        Raises:
            UserError: this process does not see it.
        """
        if not directory.is_dir():
            raise UserError(
                "a worker does not see the run's directory",
                found=f"{directory}, made by the driver, is not there on the worker's machine",
                remedy="set output_dir to a directory on storage that all machines share, where workers write their "
                "checkpoints and models themselves, or on Ray to a URL (s3://…)",
            )

    @dispatch(Custom(_with_rank, lambda layout, found: None))
    def save_checkpoint(self, directory: Path, *, background: bool, rank: int = 0) -> None:
        """Writes this rank's part of the state into the new ``directory``; with ``background`` from a copy, while the
        worker goes on.

        Raises:
            UserError: it could not be written; in the background ``finish_checkpoint`` raises that.
        """
        self.check_sees(directory.parent)
        if self._writer is None:
            self._writer = ShareWriter()
        self._writer.begin(directory, self.checkpoint_state(), background=background, rank=rank)

    @dispatch(Custom(same_for_all, _all_files))
    def finish_checkpoint(self, directory: Path) -> dict[str, FileDigest] | None:
        """Digests of the files in ``directory`` once they are written, until then None; does not wait.

        Empty where this process has not begun that share.
        """
        return self._writer.finish(directory) if self._writer is not None else {}

    def load_checkpoint(self, directory: Path) -> None:
        """Takes up a share, in every replica.

        Raises:
            UserError: it is not there, cannot be read or belongs to another model.
        """
        self.check_sees(directory.parent)
        share = Share(directory)
        with self.loading(share.shapes, share.rest()) as live:
            share.read_into(live)

    @abstractmethod
    def checkpoint_state(self) -> dict[str, Any]:
        """The state, named as in ``train.state``."""

    @abstractmethod
    def loading(
        self, saved: Mapping[str, Shape], rest: Mapping[str, Any]
    ) -> AbstractContextManager[Mapping[str, Tensor]]:
        """As ``TrainEngine.loading``."""


_SEEN = "seen_token_ids"


@dataclass(frozen=True)
class Update:
    """One optimizer update: which sequences of the experience, what is minimised, and its number in the run. Of a
    ``rehearsal`` everything is computed, and no weight changed."""

    sequences: tuple[int, ...]
    objective: Objective
    number: int
    rehearsal: bool = False


class AddedLosses(Protocol):
    """Losses that are added to those of a run's updates."""

    def start(self, number: int) -> None:
        """Begins to prepare those of update ``number`` and of what follows it."""

    def terms(self, number: int) -> Sequence[LossTerm]:
        """Those of update ``number``, of which they are a function."""


@dataclass(frozen=True)
class ModelStats:
    """Counted since the run began. Updates and the budget are of training, 0 of a model that never trains.

    Attributes:
        work: since the last call, of all ranks together.
    """

    num_oom: int
    num_updates: int = 0
    num_skipped: int = 0
    token_budget: int = 0
    work: Work = field(default_factory=Work)


def _together(layout: Layout, found: list[ModelStats]) -> ModelStats:
    return replace(found[0], work=Work.joined(stats.work for stats in found))


@dataclass(frozen=True)
class Described:
    """What a worker says of its model once that is loaded and probed.

    Attributes:
        warnings: what was left out of it or changed about it, and what memory did not allow, in words.
        shares_prefixes: a prompt is computed once for all of its responses.
    """

    warnings: tuple[str, ...]
    shares_prefixes: bool


def model_bytes(model: PackedModel) -> int:
    """Of what is here of a model that several processes hold between them."""
    return sum(local(p).nbytes for p in model.model.parameters())


def train_bytes(model: PackedModel) -> int:
    """Gradients and two moments of the parameters that learn: all of them, or adapters."""
    return 3 * sum(local(p).nbytes for p in model.model.parameters() if p.requires_grad)


class ModelWorker(Checkpointed, Offloadable):
    """One model of a run: what every role with a model can be asked."""

    packed: PackedModel

    @dispatch(SPLIT, blocking=False)
    @abstractmethod
    def forward(self, batch: RaggedBatch, needs: Needs) -> ColumnSet:
        """Forward-only pass; fields as in ``Outputs``."""

    @dispatch(Custom(same_for_all, _together))
    @abstractmethod
    def stats(self) -> ModelStats:
        """Counters of rank 0, and the work of all ranks since the last call."""

    def _taken_work(self) -> Work:
        return self.packed.work.take(self.packed.device, self.packed.precision)

    @dispatch(RANK_ZERO)
    @abstractmethod
    def describe(self) -> Described:
        """What is to be said of the model now."""

    @dispatch(ONE_COPY)
    def weights(self) -> dict[str, Tensor]:
        """The model's whole state, with its adapters merged, as copies in the first process of a copy."""
        with self.present(), self.packed.with_merged_adapters():
            whole, state = self.packed.gather.whole, self.packed.model.state_dict()
            return {name: found.clone() for name, tensor in state.items() if (found := whole(tensor)) is not None}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Takes over what another model's ``weights`` gave."""
        raise RuntimeError("this model takes up states, not another model's weights")


class ScoreWorker(ModelWorker):
    """A model that never changes by itself: a reference, a reward model.

    Args:
        budget: tokens of a forward pass.
    """

    def __init__(
        self, packed: PackedModel, budget: TokenBudget, *, logprob_chunk: int = 1024, share_prefixes: bool = True
    ) -> None:
        self.packed = packed
        self._budget = budget
        self._logprob_chunk = logprob_chunk
        self._share_prefixes = share_prefixes

    def forward(self, batch: RaggedBatch, needs: Needs) -> ColumnSet:
        return forward_only(self.packed, batch, needs, self._budget, self._logprob_chunk, share=self._share_prefixes)

    def stats(self) -> ModelStats:
        return ModelStats(self._budget.num_oom, work=self._taken_work())

    def describe(self) -> Described:
        return Described(load_warnings(self.packed.model), self.packed.shares_prefixes)

    def sizes(self) -> dict[LeaseMode, int]:
        return {"forward": model_bytes(self.packed)}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        with self.present():
            own = self.packed.model.state_dict()
            if own.keys() != weights.keys():
                raise RuntimeError(f"weights of another model: {sorted(own.keys() ^ weights.keys())[:4]}")
            for name, tensor in own.items():
                write_part(tensor, weights[name])

    def checkpoint_state(self) -> dict[str, Any]:
        return {**model_tensors(self.packed.model.state_dict()), REST: {}}

    @contextmanager
    def loading(self, saved: Mapping[str, Shape], rest: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
        with self.present():
            live = model_tensors(self.packed.model.state_dict())
            check_fit(shapes_of(live), saved, "give the model that the run began with, or choose another output_dir")
            yield live

    def _offload(self, store: Store) -> Offload:
        return Offload(self.packed, store)


class TrainWorker(WeightSenderMixin, ModelWorker):
    """A model that trains: the actor, or with more to do the critic.

    Args:
        also: losses that this worker adds to its updates.

    Attributes:
        drafter_model: what learns along with the model, and is sent with its weights.
    """

    drafter_model: DrafterModel | None = None

    def __init__(self, engine: TrainEngine[Any], also: AddedLosses | None = None) -> None:
        self.engine = engine
        self.packed = engine.packed
        self._also = also

    def forward(self, batch: RaggedBatch, needs: Needs) -> ColumnSet:
        return self.engine.forward(batch, needs)

    def update(self, experience: RaggedBatch, updates: Sequence[Update]) -> list[dict[str, float]]:
        """The updates in their order; of each what ``TrainEngine.train_step`` returns."""
        return [self._update_once(update, experience.select(update.sequences), len(updates)) for update in updates]

    def _update_once(self, update: Update, batch: RaggedBatch, num_updates: int) -> dict[str, float]:
        """One of ``num_updates``, from ``batch``."""
        also = self._also.terms(update.number) if self._also is not None else ()
        return self.engine.train_step(batch, update.objective, also, rehearsal=update.rehearsal)

    def train_drafter(self) -> dict[str, float]:
        """Updates of ``drafter_model``, from what the calls of ``update`` left for it; their metrics."""
        return {}

    def note_drafts(self, drafted: int, kept: int) -> None:
        """What became of the engines' drafted tokens in a step."""

    def flip_bits(self, part: ModelPart) -> int:
        """As ``TrainEngine.flip_bits``; new weights, which the engines are to be given."""
        return self.engine.flip_bits(part)

    def expect_update(self, number: int) -> None:
        """Prepares, beside what is computed meanwhile, the losses added to update ``number`` of the run."""
        if self._also is not None:
            self._also.start(number)

    def stats(self) -> ModelStats:
        engine = self.engine
        counts = engine.num_oom, engine.num_updates, engine.num_skipped
        return ModelStats(*counts, engine.budget.tokens, self._taken_work())

    def describe(self) -> Described:
        return Described(self.engine.warnings, self.packed.shares_prefixes)

    def sizes(self) -> dict[LeaseMode, int]:
        size = model_bytes(self.packed)
        return {"forward": size, "train": size + train_bytes(self.packed)}

    def checkpoint_state(self) -> dict[str, Any]:
        return self.engine.state()

    @contextmanager
    def loading(self, saved: Mapping[str, Shape], rest: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
        with self.engine.loading(saved, rest) as live:
            yield live

    @dispatch(ONE_COPY)
    def export(
        self, path: Path, tokenizer: PreTrainedTokenizerBase, seen: Collection[int], eos_ids: Collection[int]
    ) -> str | None:
        """Writes the model and its tokenizer as a Hugging Face directory.

        Args:
            seen: token ids that occur in data, where not all of it was trained on.
            eos_ids: ids at which answers end, beside the tokenizer's own.

        Returns:
            None, or a warning for users who load the directory.

        Raises:
            UserError: it could not be written.
        """
        self.check_sees(path.parent)
        try:
            with self.present():
                return self._write(path, tokenizer, seen, eos_ids)
        except (OSError, SafetensorError) as error:
            raise write_error(path, error) from error

    def _write(
        self, path: Path, tokenizer: PreTrainedTokenizerBase, seen: Collection[int], eos_ids: Collection[int]
    ) -> str | None:
        return save_causal_lm(self.engine.packed, tokenizer, path, eos_ids=eos_ids)

    def _offload(self, store: Store) -> Offload:
        return self.engine.offloading(store)


class CriticWorker(TrainWorker):
    """A scalar model that trains. It notes which token ids it is given, since a pad token must be none of them."""

    def __init__(self, engine: TrainEngine[PackedScalarModel]) -> None:
        super().__init__(engine)
        num_ids = int(engine.packed.model.get_input_embeddings().weight.shape[0])
        self._seen = torch.zeros(num_ids, dtype=torch.bool)

    def update(self, experience: RaggedBatch, updates: Sequence[Update]) -> list[dict[str, float]]:
        self._seen[experience.input_ids] = True
        return super().update(experience, updates)

    def checkpoint_state(self) -> dict[str, Any]:
        state = super().checkpoint_state()
        return {**state, REST: {**state[REST], _SEEN: self._seen.clone()}}

    @contextmanager
    def loading(self, saved: Mapping[str, Shape], rest: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
        with super().loading(saved, rest) as live:
            yield live
        self._seen = rest[_SEEN] if _SEEN in rest else torch.zeros_like(self._seen)

    def _write(
        self, path: Path, tokenizer: PreTrainedTokenizerBase, seen: Collection[int], eos_ids: Collection[int]
    ) -> str | None:
        all_seen = self._seen.clone()
        all_seen[list(seen)] = True
        return save_scalar_model(self.engine.packed, tokenizer, path, seen=all_seen, eos_ids=eos_ids)


class AdapterlessWorker(ScoreWorker):
    """The reference of a LoRA actor: the actor's own model with adapters switched off."""

    def forward(self, batch: RaggedBatch, needs: Needs) -> ColumnSet:
        with self.packed.without_adapters():
            return super().forward(batch, needs)

    def sizes(self) -> dict[LeaseMode, int]:
        return {"forward": 0}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        raise RuntimeError("the reference shares the actor's weights and takes none of its own")
