"""A token budget that halves when memory runs out, so that the same work is done in smaller parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from quartet.batch.partition import TOKEN_COST, AtomTree, plan_micro_batches
from quartet.batch.ragged import RaggedBatch
from quartet.cluster.errors import OutOfMemory, SmallerBudget
from quartet.config import UserError

T = TypeVar("T")


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether an accelerator's or the host's memory ran out, for which torch's CPU allocator raises a plain
    RuntimeError.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    if "CUDA error: out of memory" in text or "CUBLAS_STATUS_ALLOC_FAILED" in text:
        return True
    return "DefaultCPUAllocator" in text and "allocate memory" in text


def _largest(batch: RaggedBatch, parts: Sequence[Sequence[int]], share: bool) -> int:
    """Counts the tokens of the largest part."""
    return max((block.tokens for block in AtomTree(batch, parts, share=share).alone), default=0)


class TokenBudget:
    """Most tokens of one micro-batch.

    Args:
        tokens: at the start.
        key: the recipe key that sets it, for messages.

    Attributes:
        tokens: now.
        num_oom: how often memory ran out.
    """

    def __init__(self, tokens: int, key: str) -> None:
        self.tokens = tokens
        self.key = key
        self.num_oom = 0

    @property
    def warnings(self) -> tuple[str, ...]:
        """What memory did not allow, in words."""
        if not self.num_oom:
            return ()
        return (f"memory ran out (so far {self.num_oom} ×): {self.key} is {self.tokens} from now on",)

    def run_several(
        self,
        work: Callable[[list[list[list[int]]]], T],
        batches: Sequence[tuple[RaggedBatch, Sequence[Sequence[int]]]],
        *,
        share: bool,
        token_cost: int = TOKEN_COST,
        rank: int = 0,
        num_ranks: int = 1,
        together: str | None = None,
    ) -> T:
        """Runs ``work(plans)`` with one list of parts per batch, each part the sequences of a micro-batch; from its
        start with smaller parts where memory ran out. The result is that of the budget which was enough, and the budget
        stays there.

        With several ranks all plan for all, so that they come to the same budget. ``work`` is given the parts of
        ``rank``: equally many on all, some of them empty where atoms run out.

        Args:
            work: drops what an earlier call left behind.
            batches: each with its atoms, the sequences that must stay in one part.
            share: ancestors are computed once per part.
            token_cost: as in ``plan_micro_batches``.
            together: this rank, in words, where ``work`` is collective: it is not run again, since others take part.

        Raises:
            UserError: an atom is larger than the budget, or memory ran out at the smallest parts.
            OutOfMemory: memory ran out in collective work; with which budget all ranks are to start again.
        """
        while True:
            plans = plan_micro_batches(
                batches, self.tokens, num_ranks=num_ranks, share=share, budget_key=self.key, token_cost=token_cost
            )
            try:
                return work(plans[rank])
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            # Not before the handler has ended: until then its traceback holds the tensors of the failed attempt.
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            largest = max(
                _largest(batch, parts, share) for plan in plans for (batch, _), parts in zip(batches, plan, strict=True)
            )
            smallest = max(_largest(batch, atoms, share) for batch, atoms in batches)
            here = f" on {together}" if together is not None else ""
            tokens = max(smallest, min(self.tokens, largest) // 2)
            if together is not None and largest > smallest:
                raise OutOfMemory(
                    f"memory ran out{here}",
                    found=f"a micro-batch of at most {largest} tokens, {failure}",
                    remedy=f"set {self.key} to {tokens} or less, and go on with --resume",
                    smaller=SmallerBudget(self.key, tokens, self.num_oom + 1),
                )
            if largest <= smallest:
                raise UserError(
                    f"memory ran out{here} at the smallest micro-batch that {self.key} allows",
                    found=f"{largest} tokens, {failure}",
                    remedy="shorten the sequences, or set activation_checkpointing: true or precision: bf16 beside "
                    f"{self.key}",
                )
            self.lower(tokens, self.num_oom + 1)

    def lower(self, tokens: int, num_oom: int) -> None:
        """Takes over what memory has allowed, where that is less."""
        self.tokens, self.num_oom = min(self.tokens, tokens), max(self.num_oom, num_oom)

    # State -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, int]:
        """Returns what a resumed run must know to cut its batches in the same way."""
        return {"tokens": self.tokens, "num_oom": self.num_oom}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Keeps a budget low that memory has lowered; otherwise the recipe's counts."""
        if state["num_oom"]:
            self.lower(int(state["tokens"]), int(state["num_oom"]))
