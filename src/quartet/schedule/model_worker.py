"""Workers of the roles with a model: passes and updates, beside the model, in this process or in another.

Workers whose parts can leave their device for others and come back, as the arbiter's leases ask.

Workers whose state is a share of a run's checkpoints.

The writer: the worker that brings token ids to disk, those of a step's rollouts and of groups made ahead of theirs.

Its process is that of the actor's first worker: under a placement where generation goes on beside training, no engine
waits for what is written. Texts and JSON are made in a thread of its own, in the order of the steps.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from quartet.batch.pictures import keys_in, picture_places
from quartet.batch.ragged import ColumnSet, RaggedBatch
from quartet.batch.trajectory import REWARD_PREFIX, STEP_PREFIX, STEP_SCORE_PREFIX
from quartet.cluster.dispatch import ONE_COPY, RANK_ZERO, SPLIT, CustomDispatch, RankLayout, dispatch
from quartet.cluster.errors import SmallerBudget
from quartet.config import UserError
from quartet.config.common import OffloadConfig
from quartet.config.errors import write_error
from quartet.models.directories import load_warnings
from quartet.models.loading import save_causal_lm, save_scalar_model
from quartet.models.packed_model import PackedModel, PackedScalarModel
from quartet.models.work import WorkTotals
from quartet.observe.files import FileDigest
from quartet.observe.rollouts import RolloutRecord, rollouts_path, write_rollout_step
from quartet.rollout.drafter import DrafterModel
from quartet.schedule.groups import TEXT_END
from quartet.schedule.leases import LeaseMode
from quartet.schedule.weight_sync import WeightSenderMixin
from quartet.text.examples import PromptText
from quartet.text.tokenizer import TextCodec
from quartet.train.checkpoint import CheckpointShare, ShareWriter
from quartet.train.engine import LossTerm, Objective, TrainEngine
from quartet.train.forward import ForwardNeeds, forward_only
from quartet.train.offload import (
    PARTS,
    MappedFileStore,
    MoveResult,
    Offload,
    OffloadPart,
    OffloadStore,
    PinnedMemoryStore,
)
from quartet.train.parallel.data import sharded
from quartet.train.parallel.tensors import local, write_part
from quartet.train.state import REST, Shape, check_state_fits, model_tensors, saved_here, tensor_shapes
from quartet.train.token_budget import TokenBudget

_PARTS_OF: dict[LeaseMode, tuple[OffloadPart, ...]] = {"forward": ("params",), "generate": ("params",), "train": PARTS}


def same_for_all(layout: RankLayout, *args: Any, **kwargs: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [(args, kwargs)] * layout.world_size


def _largest(layout: RankLayout, found: list[dict[LeaseMode, int]]) -> dict[LeaseMode, int]:
    return {mode: max(sizes[mode] for sizes in found) for mode in found[0]}


class Offloadable(ABC):
    """A worker with parts that move, once ``make_offloadable`` was called."""

    _parts: Offload | None = None

    def make_offloadable(self, config: OffloadConfig) -> None:
        is_pinned = config.to == "pinned_memory"
        self._parts = self._offload(
            PinnedMemoryStore() if is_pinned else MappedFileStore(config.directory or tempfile.gettempdir())
        )

    def onload(self, mode: LeaseMode) -> MoveResult:
        """Brings in what ``mode`` needs and is not there."""
        return self._movable.onload(_PARTS_OF[mode])

    def offload(self) -> MoveResult:
        """Moves everything off the device."""
        return self._movable.offload()

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Has the parameters on the device inside the block, whatever leases say: for the moments in which a model is
        read or replaced as a whole."""
        away = self._parts is not None and not self._parts.is_resident(("params",))
        if away:
            self._movable.onload(("params",))
        try:
            yield
        finally:
            if away:
                self._movable.offload(("params",))

    def stop_offloading(self) -> None:
        """Brings the parameters back for good: the model is its owner's again. Nothing where it does not move."""
        if self._parts is not None:
            self._parts.release()

    @property
    def _movable(self) -> Offload:
        assert self._parts is not None, "its pool has a budget"
        return self._parts

    @dispatch(CustomDispatch(same_for_all, _largest))
    @abstractmethod
    def sizes(self) -> dict[LeaseMode, int]:
        """Returns the bytes that must be on the device in each mode: of several ranks the most."""

    @abstractmethod
    def _offload(self, store: OffloadStore) -> Offload:
        """Makes what moves this host's parts to ``store`` and back."""


def _with_rank(layout: RankLayout, *args: Any, **kwargs: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [(args, {**kwargs, "rank": rank}) for rank in range(layout.world_size)]


def _all_files(layout: RankLayout, found: list[dict[str, FileDigest] | None]) -> dict[str, FileDigest] | None:
    """Joins the files of all ranks: None until all have theirs, empty where one never will."""
    if any(files is None for files in found):
        return None
    return {name: digest for files in found for name, digest in (files or {}).items()} if all(found) else {}


class Checkpointed(ABC):
    """A worker that writes its share of a checkpoint itself, and reads it; what several have the first one writes."""

    _writer: ShareWriter | None = None

    def check_sees(self, directory: Path) -> None:
        """Checks that this process sees the run's directory.

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

    @dispatch(CustomDispatch(_with_rank, lambda layout, found: None))
    def save_checkpoint(self, directory: Path, *, background: bool, rank: int = 0) -> None:
        """Writes this rank's part of the state into the new ``directory``; with ``background`` from a copy, while the
        worker goes on.

        Raises:
            UserError: it could not be written; in the background ``finish_checkpoint`` raises that.
        """
        self.check_sees(directory.parent)
        if self._writer is None:
            self._writer = ShareWriter()
        self._writer.begin(directory, self._own_share(self.checkpoint_state(), rank), background=background, rank=rank)

    def _own_share(self, state: dict[str, Any], rank: int) -> dict[str, Any]:
        """Returns what this rank writes of the state."""
        packed: PackedModel | None = getattr(self, "packed", None)
        root = sharded(packed) if packed is not None else None
        return root.written(state) if root is not None else state if rank == 0 else {}

    @dispatch(CustomDispatch(same_for_all, _all_files))
    def finish_checkpoint(self, directory: Path) -> dict[str, FileDigest] | None:
        """Returns the digests of the files in ``directory`` once they are written, until then None; does not wait.

        Empty where this process has not begun that share.
        """
        return self._writer.finish(directory) if self._writer is not None else {}

    def load_checkpoint(self, directory: Path) -> None:
        """Takes up a share, in every replica.

        Raises:
            UserError: it is not there, cannot be read or belongs to another model.
        """
        self.check_sees(directory.parent)
        share = CheckpointShare(directory)
        with self.loading(share.shapes, share.rest()) as live:
            share.read_into(live)

    @property
    def budgets(self) -> Sequence[TokenBudget]:
        """The token budgets of passes."""
        return ()

    def lower_budgets(self, found: Sequence[SmallerBudget]) -> None:
        """Takes over what memory has allowed since the checkpoint was saved."""
        for smaller in found:
            for budget in self.budgets:
                if budget.key == smaller.key:
                    budget.lower(smaller.tokens, smaller.num_oom)

    @abstractmethod
    def checkpoint_state(self) -> dict[str, Any]:
        """Returns the state, named as in ``train.state``."""

    @abstractmethod
    def loading(
        self, saved: Mapping[str, Shape], rest: Mapping[str, Any]
    ) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Loads as ``TrainEngine.loading`` does."""


_SEEN = "seen_token_ids"


@dataclass(frozen=True)
class OptimizerStep:
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
        """Returns the losses of update ``number``, of which they are a function."""


@dataclass(frozen=True)
class ModelStats:
    """Counted since the run began. Updates and the budget are of training, 0 of a model that never trains.

    Attributes:
        work: since the last call, of all ranks together.
    """

    num_oom: int
    num_skipped: int = 0
    token_budget: int = 0
    work: WorkTotals = field(default_factory=WorkTotals)


def _together(layout: RankLayout, found: list[ModelStats]) -> ModelStats:
    return replace(found[0], work=WorkTotals.joined(stats.work for stats in found))


@dataclass(frozen=True)
class ModelDescription:
    """What a worker says of its model once that is loaded and probed.

    Attributes:
        warnings: what was left out of it or changed about it, and what memory did not allow, in words.
        shares_prefixes: a prompt is computed once for all of its responses.
    """

    warnings: tuple[str, ...]
    shares_prefixes: bool


def local_model_bytes(model: PackedModel) -> int:
    """Counts the bytes of what is here of a model that several processes hold between them."""
    return sum(local(p).nbytes for p in model.model.parameters())


def training_bytes(model: PackedModel) -> int:
    """Counts the bytes of gradients and two moments of the parameters that learn: all of them, or adapters."""
    return 3 * sum(local(p).nbytes for p in model.model.parameters() if p.requires_grad)


class ModelWorker(Checkpointed, Offloadable):
    """One model of a run: what every role with a model can be asked."""

    packed: PackedModel

    @dispatch(SPLIT, blocking=False)
    @abstractmethod
    def forward(self, batch: RaggedBatch, needs: ForwardNeeds) -> ColumnSet:
        """Makes a forward-only pass; fields as in ``ForwardOutputs``."""

    @dispatch(CustomDispatch(same_for_all, _together))
    @abstractmethod
    def stats(self) -> ModelStats:
        """Returns counters of rank 0, and the work of all ranks since the last call."""

    def _taken_work(self) -> WorkTotals:
        return self.packed.work.take(self.packed.device, self.packed.precision)

    @dispatch(RANK_ZERO)
    @abstractmethod
    def describe(self) -> ModelDescription:
        """Returns what is to be said of the model now."""

    @dispatch(ONE_COPY)
    def weights(self) -> dict[str, Tensor]:
        """Returns the model's whole state, with its adapters merged, as copies in the first process of a copy."""
        with self.present(), self.packed.with_merged_adapters():
            whole, state = self.packed.gather.whole, self.packed.complete_state(self.packed.model.state_dict())
            return {name: found.clone() for name, tensor in state.items() if (found := whole(tensor)) is not None}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Takes over what another model's ``weights`` gave."""
        raise NotImplementedError


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

    def forward(self, batch: RaggedBatch, needs: ForwardNeeds) -> ColumnSet:
        return forward_only(self.packed, batch, needs, self._budget, self._logprob_chunk, share=self._share_prefixes)

    @property
    def budgets(self) -> Sequence[TokenBudget]:
        return (self._budget,)

    def stats(self) -> ModelStats:
        return ModelStats(self._budget.num_oom, work=self._taken_work())

    def describe(self) -> ModelDescription:
        return ModelDescription(load_warnings(self.packed.model), self.packed.shares_prefixes)

    def sizes(self) -> dict[LeaseMode, int]:
        return {"forward": local_model_bytes(self.packed)}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        with self.present():
            own = self.packed.model.state_dict()
            for name, tensor in own.items():
                write_part(tensor, weights[name])

    def checkpoint_state(self) -> dict[str, Any]:
        return {**model_tensors(self.packed.model.state_dict()), REST: {}}

    @contextmanager
    def loading(self, saved: Mapping[str, Shape], rest: Mapping[str, Any]) -> Iterator[dict[str, Tensor]]:
        with self.present():
            live = model_tensors(self.packed.model.state_dict())
            remedy = "give the model that the run began with, or choose another output_dir"
            check_state_fits(tensor_shapes(live), saved_here(saved, self.packed), remedy)
            yield live

    def _offload(self, store: OffloadStore) -> Offload:
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

    def forward(self, batch: RaggedBatch, needs: ForwardNeeds) -> ColumnSet:
        return self.engine.forward(batch, needs)

    def update(self, experience: RaggedBatch, updates: Sequence[OptimizerStep]) -> list[dict[str, float]]:
        """Makes the updates in their order; returns of each what ``TrainEngine.train_step`` returns."""
        return [self._update_once(update, experience.select(update.sequences), len(updates)) for update in updates]

    def _update_once(self, update: OptimizerStep, batch: RaggedBatch, num_updates: int) -> dict[str, float]:
        """Makes one of ``num_updates`` updates, from ``batch``."""
        also = self._also.terms(update.number) if self._also is not None else ()
        return self.engine.train_step(batch, update.objective, also, rehearsal=update.rehearsal)

    def train_drafter(self) -> dict[str, float]:
        """Updates of ``drafter_model``, from what the calls of ``update`` left for it; their metrics."""
        return {}

    def flip_bits(self) -> None:
        """Flips bits as ``TrainEngine.flip_bits`` does: new weights, which the engines are to be given."""
        self.engine.flip_bits()

    def expect_update(self, number: int) -> None:
        """Prepares, beside what is computed meanwhile, the losses added to update ``number`` of the run."""
        if self._also is not None:
            self._also.start(number)

    @property
    def budgets(self) -> Sequence[TokenBudget]:
        return self.engine.budget, self.engine.forward_budget

    def stats(self) -> ModelStats:
        engine = self.engine
        return ModelStats(engine.num_oom, engine.num_skipped, engine.budget.tokens, self._taken_work())

    def describe(self) -> ModelDescription:
        return ModelDescription(self.engine.warnings, self.packed.shares_prefixes)

    def sizes(self) -> dict[LeaseMode, int]:
        size = local_model_bytes(self.packed)
        return {"forward": size, "train": size + training_bytes(self.packed)}

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

    def _offload(self, store: OffloadStore) -> Offload:
        return self.engine.offloading(store)


class CriticWorker(TrainWorker):
    """A scalar model that trains. It notes which token ids it is given, since a pad token must be none of them."""

    def __init__(self, engine: TrainEngine[PackedScalarModel]) -> None:
        super().__init__(engine)
        num_ids = int(engine.packed.model.get_input_embeddings().weight.shape[0])
        self._seen = torch.zeros(num_ids, dtype=torch.bool)

    def update(self, experience: RaggedBatch, updates: Sequence[OptimizerStep]) -> list[dict[str, float]]:
        self._seen[experience.input_ids[~picture_places(experience.input_ids)]] = True
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

    def forward(self, batch: RaggedBatch, needs: ForwardNeeds) -> ColumnSet:
        with self.packed.without_adapters():
            return super().forward(batch, needs)

    def sizes(self) -> dict[LeaseMode, int]:
        return {"forward": 0}


_STRUCTURE = ("segment_lengths", "parents", "leaves", "ids", "objects")
_FAMILIES = ("token", "sequence")
_COLUMNS = (
    "rollout_logprobs",
    "old_logprobs",
    "ref_logprobs",
    "values",
    "token_rewards",
    "kl",
    "advantages",
    "returns",
    "loss_mask",
    "observation_mask",
)


class RolloutWriter(Checkpointed):
    """Writes rollouts; its share of a checkpoint are the groups that were generated ahead.

    Args:
        codec: of the policy.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._written: dict[int, Future[None]] = {}
        # In the order of the steps; an interpreter that ends waits for the file being written.
        self._thread = ThreadPoolExecutor(1, "quartet-rollouts")
        self._buffered: dict[str, Any] = {}

    # Rollouts ------------------------------------------------------------------------------------------------

    def write_rollouts(self, directory: Path, step: int, batches: Sequence[RaggedBatch], *, background: bool) -> None:
        """Writes the file of ``step``, or begins to; it appears complete or not at all.

        Args:
            batches: as ``rollout_records`` takes them, one after the other in the file.

        Raises:
            UserError: this process does not see the run's directory, or (but in the background, where
                ``finish_rollouts`` raises that) the file could not be written.
        """
        self.check_sees(directory.parent)
        # Not in the thread: what is computed there would have OpenMP threads of its own beside those of training.
        pairs = [(batch, record_columns(batch)) for batch in batches]

        def write() -> None:
            records = [record for pair in pairs for record in rollout_records(*pair, self._codec)]
            try:
                if self._codec.pictures is not None:
                    shown = {int(key, 16) for record in records for key in record.pictures}
                    self._codec.pictures.store.copy_to(directory.parent / "pictures", shown)
                write_rollout_step(directory, step, records)
            except OSError as error:
                raise write_error(rollouts_path(directory, step), error) from error

        if background:
            self._written[step] = self._thread.submit(write)
        else:
            write()

    def finish_rollouts(self, step: int) -> bool | None:
        """Returns True once the file of ``step`` is written, until then None; False where this process has not begun
        it.

        Raises:
            UserError: it could not be written.
        """
        written = self._written.get(step)
        if written is None or not written.done():
            return False if written is None else None
        self._written.pop(step).result()
        return True

    # Groups ahead --------------------------------------------------------------------------------------------

    def hold_buffered(self, batch: RaggedBatch | None, prompts: Sequence[PromptText], rejected: Sequence[int]) -> None:
        """Takes what the next ``save_checkpoint`` writes.

        Args:
            batch: the groups, one after the other.
            prompts: of each group, whose tokens are kept for comparison.
            rejected: indices of groups that a filter has not accepted.
        """
        ids = [self._codec.encode_prompt(prompt) for prompt in prompts]
        self._buffered = {REST: {"rejected": list(rejected), "prompt_ids": ids, "batch": None}}
        if batch is not None:
            tensors = {f"{family}.{name}": v for family in _FAMILIES for name, v in getattr(batch, family).items()}
            rest = {name: _plain(getattr(batch, name)) for name in _STRUCTURE}
            self._buffered = {"input_ids": batch.input_ids, **tensors, REST: {**self._buffered[REST], "batch": rest}}

    def loaded_buffered(self) -> tuple[list[int], list[int]]:
        """Returns the indices of the groups in the share that was loaded, and of those that were rejected."""
        indices = self._buffered["sequence.group"].tolist() if "input_ids" in self._buffered else []
        return list(dict.fromkeys(indices)), self._buffered[REST]["rejected"]

    def release_buffered(self, prompts: Sequence[PromptText], names: Sequence[str]) -> RaggedBatch:
        """Returns the loaded groups, one after the other, which are not kept here any longer.

        Args:
            prompts, names: of each group, as they are now.

        Raises:
            UserError: one has other tokens now.
        """
        (indices, _), state = self.loaded_buffered(), self._buffered
        self._buffered = {}
        for index, prompt, name, ids in zip(indices, prompts, names, state[REST]["prompt_ids"], strict=True):
            if self._codec.encode_prompt(prompt) != ids:
                raise UserError(
                    "the data or the tokenizer changed since the checkpoint was saved",
                    found=f"prompt {index} of the run, {name!r}, has other tokens than the answers saved for it",
                    remedy="resume with the data and the tokenizer of the run, or start another run",
                )
        fields: dict[str, Any] = {
            family: {n.partition(".")[2]: v for n, v in state.items() if n.startswith(f"{family}.")}
            for family in _FAMILIES
        }
        return RaggedBatch(input_ids=state["input_ids"], **state[REST]["batch"], **fields)

    def checkpoint_state(self) -> dict[str, Any]:
        state, self._buffered = self._buffered, {}
        return state

    @contextmanager
    def loading(self, saved: Mapping[str, Shape], rest: Mapping[str, Any]) -> Iterator[Mapping[str, Tensor]]:
        tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in saved.items()}
        yield tensors
        self._buffered = {**tensors, REST: rest}


def _plain(values: Any) -> Any:
    """Lists and dicts, which a checkpoint takes from a file again."""
    return {name: list(column) for name, column in values.items()} if isinstance(values, Mapping) else list(values)


# What is recorded: every token of every response with everything the step computed about it ----------------


def record_columns(batch: RaggedBatch) -> dict[str, Tensor]:
    """Returns ``[T]`` of each column that is recorded: all that is to be computed of a record, apart from its texts."""
    own = [name for name in batch.token if name.startswith((STEP_PREFIX, STEP_SCORE_PREFIX))]
    columns = {name: batch.token[name].float() for name in (*_COLUMNS, *own) if name in batch.token}
    if "old_logprobs" in columns:
        columns["ratio"] = (columns["old_logprobs"] - columns["rollout_logprobs"]).clamp(-20, 20).exp()
    if _mixes_versions(batch):
        columns["policy_version"] = batch.token["policy_version"].float()
    return columns


def rollout_records(batch: RaggedBatch, columns: Mapping[str, Tensor], codec: TextCodec) -> list[RolloutRecord]:
    """Makes one record per sequence, in the batch's order.

    Args:
        batch: with its token ids, ``score`` and the objects ``prompt_id`` and ``finish_reason``.
        columns: of ``record_columns``.
    """
    rewards = {name: batch.sequence[name].tolist() for name in batch.sequence if name.startswith(REWARD_PREFIX)}
    scores = batch.sequence["score"].tolist()
    parts = batch.sequence["part"].tolist() if "part" in batch.sequence else [0] * len(batch)
    records = []
    for s in range(len(batch)):
        start, stop = batch.leaf_span(s)
        ids = batch.token_ids(s)
        prompt_ids, response_ids = ids[: len(ids) - (stop - start)], ids[len(ids) - (stop - start) :]
        # In one piece: decoders of the SentencePiece kind strip the space of a text's first token.
        pieces = codec.token_texts(ids)
        records.append(
            RolloutRecord(
                sequence_id=batch.ids[s],
                prompt_id=batch.objects["prompt_id"][s],
                response_index=int(batch.sequence["response"][s]),
                policy_version=int(batch.sequence["version"][s]),
                prompt_ids=prompt_ids,
                response_ids=response_ids,
                prompt_tokens=pieces[: len(prompt_ids)],
                response_tokens=pieces[len(prompt_ids) :],
                prompt_text=codec.decode(prompt_ids),
                response_text=_response_text(batch, s, codec.decode_completion(prompt_ids, response_ids)),
                finish_reason=batch.objects["finish_reason"][s],
                rewards={name.removeprefix(REWARD_PREFIX): _number(values[s]) for name, values in rewards.items()},
                score=_number(scores[s]),
                group=str(int(batch.sequence["group"][s])),
                columns={name: _rounded(values[start:stop]) for name, values in columns.items()},
                trajectory_id=f"{int(batch.sequence['group'][s])}.{int(batch.sequence['response'][s])}",
                part=parts[s],
                pictures=[f"{key:012x}" for key in keys_in(ids)],
            )
        )
    return records


def _response_text(batch: RaggedBatch, s: int, text: str) -> str:
    """Returns the text of one turn up to its stop string; that of several turns as it is."""
    end = -1 if "observation_mask" in batch.token else int(batch.sequence[TEXT_END][s])
    return text if end < 0 else text[:end]


def _mixes_versions(batch: RaggedBatch) -> bool:
    """Tells whether new weights came into a response as it was generated; else its first token's version is all of
    it."""
    actions = batch.token["action_mask"]
    first = batch.sequence["version"][batch.sequence_index()[actions]]
    return bool((batch.token["policy_version"][actions] != first).any())


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _rounded(values: Tensor) -> list[float]:
    """Rounds to six significant digits: enough to read, and a third of the file."""
    return [float(f"{value:.6g}") for value in values.tolist()]
