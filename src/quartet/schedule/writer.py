"""The writer: the worker that brings token ids to disk, those of a step's rollouts and of groups made ahead of theirs.

Its process is that of the actor's first worker: under a placement where generation goes on beside training, no engine
waits for what is written. Texts and JSON are made in a thread of its own, in the order of the steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.file_errors import write_error
from quartet.observe.rollouts import RolloutWriter, step_path
from quartet.schedule.checkpointed import Checkpointed
from quartet.schedule.records import record_columns, rollout_records
from quartet.text.examples import PromptText
from quartet.text.tokenizer import TextCodec
from quartet.train.state import REST, Shape

_STRUCTURE = ("segment_lengths", "parents", "leaves", "ids", "objects")
_FAMILIES = ("token", "sequence")


class Writer(Checkpointed):
    """Writes rollouts; its share of a checkpoint are the groups that were generated ahead.

    Args:
        codec: of the policy.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._written: dict[int, Future[None]] = {}
        self._thread: threading.Thread | None = None
        self._ahead: dict[str, Any] = {}

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
                RolloutWriter(directory).write(step, records)
            except OSError as error:
                raise write_error(step_path(directory, step), error) from error

        if background:
            written: Future[None] = Future()
            self._written[step] = written
            # No daemon: an interpreter that ends waits for the file being written.
            self._thread = threading.Thread(target=_do, args=(write, written, self._thread), name="quartet-rollouts")
            self._thread.start()
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

    def hold_ahead(self, batch: RaggedBatch | None, prompts: Sequence[PromptText], rejected: Sequence[int]) -> None:
        """Takes what the next ``save_checkpoint`` writes.

        Args:
            batch: the groups, one after the other.
            prompts: of each group, whose tokens are kept for comparison.
            rejected: indices of groups that a filter has not accepted.
        """
        ids = [self._codec.encode_prompt(prompt) for prompt in prompts]
        self._ahead = {REST: {"rejected": list(rejected), "prompt_ids": ids, "batch": None}}
        if batch is not None:
            tensors = {f"{family}.{name}": v for family in _FAMILIES for name, v in getattr(batch, family).items()}
            rest = {name: _plain(getattr(batch, name)) for name in _STRUCTURE}
            self._ahead = {"input_ids": batch.input_ids, **tensors, REST: {**self._ahead[REST], "batch": rest}}

    def loaded_ahead(self) -> tuple[list[int], list[int]]:
        """Indices of the groups in the share that was loaded, and of those that were rejected."""
        indices = self._ahead["sequence.group"].tolist() if "input_ids" in self._ahead else []
        return list(dict.fromkeys(indices)), self._ahead[REST]["rejected"]

    def release_ahead(self, prompts: Sequence[PromptText], names: Sequence[str]) -> RaggedBatch:
        """The loaded groups, one after the other, which are not kept here any longer.

        Args:
            prompts, names: of each group, as they are now.

        Raises:
            UserError: one has other tokens now.
        """
        (indices, _), state = self.loaded_ahead(), self._ahead
        self._ahead = {}
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
        state, self._ahead = self._ahead, {}
        return state

    @contextmanager
    def loading(self, saved: Mapping[str, Shape], rest: Mapping[str, Any]) -> Iterator[Mapping[str, Tensor]]:
        tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in saved.items()}
        yield tensors
        self._ahead = {**tensors, REST: rest}

    def state_of_old(self, part: Any) -> dict[str, Any]:
        if not part["groups"]:
            return {REST: {"rejected": list(part["rejected"]), "prompt_ids": [], "batch": None}}
        raise UserError(
            "an earlier version of Quartet saved this checkpoint with groups that were generated ahead",
            found=f"group {part['groups'][0]['index']} of the run, in the earlier format",
            remedy="finish the run with that version, or resume from a checkpoint without such groups",
        )


def _do(work: Callable[[], None], done: Future[None], former: threading.Thread | None) -> None:
    if former is not None:
        former.join()
    try:
        work()
    except BaseException as error:  # It belongs to whoever asks how it went.
        done.set_exception(error)
    else:
        done.set_result(None)


def _plain(values: Any) -> Any:
    """Lists and dicts, which a checkpoint takes from a file again."""
    return {name: list(column) for name, column in values.items()} if isinstance(values, Mapping) else list(values)
