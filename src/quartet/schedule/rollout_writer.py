"""The writer: the worker that brings token ids to disk, those of a step's rollouts and of groups made ahead of theirs.

Its process is that of the actor's first worker: under a placement where generation goes on beside training, no engine
waits for what is written. Texts and JSON are made in a thread of its own, in the order of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch
from quartet.batch.trajectory import REWARD_PREFIX, STEP_PREFIX, STEP_SCORE_PREFIX
from quartet.config import UserError
from quartet.config.errors import write_error
from quartet.observe.rollouts import RolloutRecord, rollouts_path, write_step
from quartet.schedule.groups import TEXT_END
from quartet.schedule.model_worker import Checkpointed
from quartet.text.examples import PromptText
from quartet.text.tokenizer import TextCodec
from quartet.train.state import REST, Shape

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


class Writer(Checkpointed):
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
                write_step(directory, step, records)
            except OSError as error:
                raise write_error(rollouts_path(directory, step), error) from error

        if background:
            self._written[step] = self._thread.submit(write)
        else:
            write()

    def finish_rollouts(self, step: int) -> bool | None:
        """True once the file of ``step`` is written, until then None; False where this process has not begun it.

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
        """Indices of the groups in the share that was loaded, and of those that were rejected."""
        indices = self._buffered["sequence.group"].tolist() if "input_ids" in self._buffered else []
        return list(dict.fromkeys(indices)), self._buffered[REST]["rejected"]

    def release_buffered(self, prompts: Sequence[PromptText], names: Sequence[str]) -> RaggedBatch:
        """The loaded groups, one after the other, which are not kept here any longer.

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
    """``[T]`` of each column that is recorded: all that is to be computed of a record, apart from its texts."""
    own = [name for name in batch.token if name.startswith((STEP_PREFIX, STEP_SCORE_PREFIX))]
    columns = {name: batch.token[name].float() for name in (*_COLUMNS, *own) if name in batch.token}
    if "old_logprobs" in columns:
        columns["ratio"] = (columns["old_logprobs"] - columns["rollout_logprobs"]).clamp(-20, 20).exp()
    if _mixes_versions(batch):
        columns["policy_version"] = batch.token["policy_version"].float()
    return columns


def rollout_records(batch: RaggedBatch, columns: Mapping[str, Tensor], codec: TextCodec) -> list[RolloutRecord]:
    """One record per sequence, in the batch's order.

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
            )
        )
    return records


def _response_text(batch: RaggedBatch, s: int, text: str) -> str:
    """Of one turn up to its stop string; several turns as they are."""
    end = -1 if "observation_mask" in batch.token else int(batch.sequence[TEXT_END][s])
    return text if end < 0 else text[:end]


def _mixes_versions(batch: RaggedBatch) -> bool:
    """Whether new weights came into a response as it was generated; else its first token's version is all of it."""
    actions = batch.token["action_mask"]
    first = batch.sequence["version"][batch.sequence_index()[actions]]
    return bool((batch.token["policy_version"][actions] != first).any())


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _rounded(values: Tensor) -> list[float]:
    """Six significant digits: enough to read, and a third of the file."""
    return [float(f"{value:.6g}") for value in values.tolist()]
