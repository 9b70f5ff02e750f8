"""Tokenised data sets: immutable items, and batches that are a function of the step."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

import torch

from quartet.batch.ragged import RaggedBatch
from quartet.config.errors import UserError
from quartet.data.fields import placed
from quartet.data.formats import NothingLeft, Parsed
from quartet.data.order import Mixture, draws
from quartet.text.examples import Example, Judgement, Prompt, PromptText
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


E = TypeVar("E", bound=Example | Judgement | Prompt)
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


# Too long ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenLimit:
    """The longest sequence of a row, and what happens to rows beyond it.

    Args:
        overlong: "error" stops the run, "skip" leaves such rows out.
        section: of the recipe, whose keys remedies name.
    """

    max_tokens: int
    overlong: Overlong = "error"
    section: str = "data"

    def fitting(self, items: Sequence[T], what: str) -> tuple[tuple[T, ...], tuple[str, ...]]:
        """The items within the limit, and a warning about the others.

        Raises:
            UserError: some are too long and ``overlong`` is "error", or none is left.
        """
        too_long = Overlength(self)
        kept = tuple(item for item in items if too_long.fits(item.place, item.num_tokens))
        return kept, too_long.warning(len(items), what)


@dataclass
class Overlength:
    """Counts rows beyond the limit of tokens; keeps the first one's place and length, and the largest length."""

    limit: TokenLimit
    num: int = 0
    first: str = ""
    longest: int = 0

    def fits(self, place: str, length: int) -> bool:
        """Whether a row is within the limit; one that is not is counted."""
        if length <= self.limit.max_tokens:
            return True
        self.first = self.first or f"first {place} with {length} tokens"
        self.num += 1
        self.longest = max(self.longest, length)
        return False

    def warning(self, num_rows: int, what: str) -> tuple[str, ...]:
        """The warning that such rows are left out; empty where all rows fit.

        Raises:
            UserError: too long rows are errors, or no other row is left.
        """
        if not self.num:
            return ()
        allowed, section = self.limit.max_tokens, self.limit.section
        found = f"{self.num} of {num_rows}, {self.first}, longest {self.longest}; allowed {allowed}"
        if self.limit.overlong == "error":
            remedy = f"set {section}.overlong=skip to leave such rows out, or raise {section}.max_tokens"
            raise UserError(f"a {what} is longer than allowed", found=found, remedy=remedy)
        reason = f"{what} longer than {allowed} tokens"
        if self.num == num_rows:
            remedy = "use a longer context, or other data"
            raise NothingLeft(found, reason=reason, problem=f"every {what} is longer than allowed", remedy=remedy)
        return (f"{self.num} rows left out: {reason} ({self.first})",)


def tokenised(
    parsed: Parsed[E], tokenise: Callable[[E], T], limit: TokenLimit, what: str
) -> tuple[tuple[T, ...], tuple[str, ...]]:
    """Rows that ``tokenise`` makes of the examples and that are within the limit, and warnings about the others.

    Raises:
        UserError: the tokenizer or the chat template refuses a row, which is named; rows are too long.
    """
    items = []
    for example in parsed.items:
        with placed(example.place):
            items.append(tokenise(example))
    kept, warnings = limit.fitting(items, what)
    return kept, (*parsed.report(), *warnings)


# Demonstrations and prompts ------------------------------------------------------------------------------


@dataclass(frozen=True)
class SFTItem:
    """One sequence and, per token, whether it carries loss."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    place: str

    @classmethod
    def of(cls, example: Example, codec: TextCodec) -> SFTItem:
        ids, mask = codec.encode_example(example)
        return cls(tuple(ids), tuple(mask), example.place)

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
    def build(cls, parsed: Parsed[Example], codec: TextCodec, limit: TokenLimit) -> SFTData:
        """Tokenises; UserError as :func:`tokenised`."""
        return cls(*tokenised(parsed, lambda example: SFTItem.of(example, codec), limit, "sequence"))

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
    def build(cls, parsed: Parsed[Prompt], codec: TextCodec, limit: TokenLimit, prefix: str = "p") -> PromptData:
        """Tokenises; UserError as :func:`tokenised`. Ids begin with ``prefix``."""
        numbers, seen = itertools.count(), set[int]()

        def item(row: Prompt) -> PromptItem:
            ids = codec.encode_prompt(row.prompt)
            if len(ids) <= limit.max_tokens:
                seen.update(ids)
            return PromptItem(f"{prefix}{next(numbers)}", row.prompt, row.columns, row.place, len(ids))

        kept, warnings = tokenised(parsed, item, limit, "prompt")
        return cls(kept, warnings, seen=frozenset(seen))

    def __iter__(self) -> Iterator[PromptItem]:
        return iter(self.items)
