"""Tokenised data sets: immutable items, and batches that are a function of the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

import torch

from quartet.batch.ragged import RaggedBatch
from quartet.config.errors import UserError
from quartet.data.fields import placed
from quartet.data.formats import Parsed
from quartet.data.order import Mixture, draws
from quartet.text.examples import Example, Prompt, PromptText
from quartet.text.tokenizer import TextCodec

Overlong = Literal["error", "skip"]


class Item(Protocol):
    """A tokenised row."""

    @property
    def num_tokens(self) -> int:
        """Of its longest sequence."""

    @property
    def place(self) -> str:
        """File and line, for messages."""


T = TypeVar("T", bound=Item)


@dataclass(frozen=True)
class Ordered:
    """Tokenised rows, drawn by number.

    ``warnings`` says in words what was left out or converted; ``mixture`` how the sources are drawn from, where they
    have weights.
    """

    items: tuple[Any, ...]
    warnings: tuple[str, ...] = ()
    mixture: Mixture | None = None

    def __len__(self) -> int:
        return len(self.items)

    @property
    def order(self) -> int | Mixture:
        """What decides the order of the rows."""
        return self.mixture or len(self)


class Batches(Ordered, ABC):
    """Rows that are trained on."""

    def batch(self, step: int, size: int, seed: int) -> RaggedBatch:
        """The step's ``size`` rows; fields as in ``select``."""
        drawn = draws(seed, step, self.order, size)
        return self.select([i for i, _ in drawn], [f"row{i}@{epoch}" for i, epoch in drawn])

    @abstractmethod
    def select(self, indices: Sequence[int], ids: Sequence[str] | None = None) -> RaggedBatch:
        """Rows by index, in that order. ``ids`` name them; ``row<index>`` when left out."""

    def in_parts(self, size: int) -> Iterator[RaggedBatch]:
        """All rows in their order, ``size`` at a time."""
        for start in range(0, len(self), size):
            yield self.select(range(start, min(start + size, len(self))))


D = TypeVar("D", bound=Ordered)


def joined(sources: Sequence[D], weights: Sequence[float] | None) -> D:
    """The rows of several sources of one kind as one data set.

    Args:
        weights: of the sources in what is drawn; None: every row counts alike.
    """
    items = tuple(item for source in sources for item in source.items)
    warnings = tuple(warning for source in sources for warning in source.warnings)
    mixture = None if weights is None else Mixture(tuple(len(source.items) for source in sources), tuple(weights))
    first = sources[0]
    if isinstance(first, PromptData):
        seen = [source.seen for source in sources if isinstance(source, PromptData)]
        first = replace(first, seen=frozenset().union(*seen))
    return replace(first, items=items, warnings=warnings, mixture=mixture)


@dataclass(frozen=True)
class SFTItem:
    """One sequence and, per token, whether it carries loss."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    place: str

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class PromptItem:
    """A prompt to answer. Its token ids are made where they are read, by ``TextCodec.encode_prompt``.

    ``prompt_id`` names it in this data set, the same at every step.
    """

    prompt_id: str
    prompt: PromptText
    columns: Mapping[str, Any]
    place: str
    num_tokens: int


@dataclass(frozen=True)
class SFTData(Batches):
    """Demonstrations as token ids."""

    items: tuple[SFTItem, ...]

    @classmethod
    def build(
        cls,
        parsed: Parsed[Example],
        codec: TextCodec,
        max_tokens: int,
        overlong: Overlong = "error",
        section: str = "data",
    ) -> SFTData:
        """Tokenises; a sequence longer than ``max_tokens`` is an error, which names the recipe's section, or is left
        out."""
        items = []
        for example in parsed.items:
            with placed(example.place):
                ids, mask = codec.encode_example(example)
            items.append(SFTItem(tuple(ids), tuple(mask), example.place))
        kept, warning = fitting(items, max_tokens, overlong, "sequence", section)
        return cls(kept, (*parsed.report(), *warning))

    def select(self, indices: Sequence[int], ids: Sequence[str] | None = None) -> RaggedBatch:
        """Rows by index, in that order, with token field ``loss_mask`` (bool)."""
        items = [self.items[i] for i in indices]
        mask = torch.tensor([learned for item in items for learned in item.loss_mask], dtype=torch.bool)
        names = list(ids) if ids is not None else [f"row{i}" for i in indices]
        return RaggedBatch.from_sequences([item.input_ids for item in items], names, token={"loss_mask": mask})


@dataclass(frozen=True)
class PromptData(Ordered):
    """Prompts with the columns their rewards receive; ``seen`` are the token ids that occur in any of them."""

    items: tuple[PromptItem, ...]
    seen: frozenset[int] = frozenset()

    @classmethod
    def build(
        cls,
        parsed: Parsed[Prompt],
        codec: TextCodec,
        max_tokens: int,
        overlong: Overlong = "error",
        section: str = "data",
        prefix: str = "p",
    ) -> PromptData:
        """Tokenises; a prompt longer than ``max_tokens`` is an error or is left out. Ids begin with ``prefix``."""
        items, seen = [], set[int]()
        for index, row in enumerate(parsed.items):
            with placed(row.place):
                ids = codec.encode_prompt(row.prompt)
            items.append(PromptItem(f"{prefix}{index}", row.prompt, row.columns, row.place, len(ids)))
            seen.update(ids if len(ids) <= max_tokens else ())
        kept, warning = fitting(items, max_tokens, overlong, "prompt", section)
        return cls(kept, (*parsed.report(), *warning), seen=frozenset(seen))

    def __iter__(self) -> Iterator[PromptItem]:
        return iter(self.items)

    def item(self, index: int) -> PromptItem:
        return self.items[index]


def fitting(
    items: Sequence[T], limit: int, overlong: Overlong, what: str, section: str = "data"
) -> tuple[tuple[T, ...], tuple[str, ...]]:
    """The items within the limit, and a warning about the others.

    Raises:
        UserError: some are too long and ``overlong`` is "error", or none is left.
    """
    too_long = Overlength(limit)
    kept = tuple(item for item in items if too_long.fits(item.place, item.num_tokens))
    return kept, too_long.warning(len(items), overlong, what, section)


@dataclass
class Overlength:
    """Counts rows beyond the limit of tokens; keeps the first one's place and length, and the largest length."""

    limit: int
    num: int = 0
    first: str = ""
    longest: int = 0

    def fits(self, place: str, length: int) -> bool:
        """Whether a row is within the limit; one that is not is counted."""
        if length <= self.limit:
            return True
        self.first = self.first or f"first {place} with {length} tokens"
        self.num += 1
        self.longest = max(self.longest, length)
        return False

    def warning(self, num_rows: int, overlong: Overlong, what: str, section: str = "data") -> tuple[str, ...]:
        """What is said when they are left out, nothing where all rows fit; remedies name keys of the recipe's
        ``section``.

        Raises:
            UserError: ``overlong`` is "error", or no other row is left.
        """
        if not self.num:
            return ()
        found = f"{self.num} of {num_rows}, {self.first}, longest {self.longest}; allowed {self.limit}"
        if overlong == "error":
            raise UserError(
                f"a {what} is longer than allowed",
                found=found,
                remedy=f"set {section}.overlong=skip to leave such rows out, or raise {section}.max_tokens",
            )
        if self.num == num_rows:
            raise UserError(
                f"every {what} is longer than allowed", found=found, remedy="use a longer context, or other data"
            )
        return (f"{self.num} rows left out: {what} longer than {self.limit} tokens ({self.first})",)
