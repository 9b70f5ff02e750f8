"""Tokenised data sets: immutable items, and batches that are a function of seed and step: a resumed run reads on
exactly where it stopped.

Tokenised preferences: pairs of answers to one prompt, and answers judged one by one.

Both kinds give batches with the same fields, in which a prompt is stored once for its answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from quartet.batch.pictures import is_picture
from quartet.batch.ragged import RaggedBatch
from quartet.config.errors import UserError
from quartet.data.fields import SAME, SkipRow, column_paths, naming_row
from quartet.data.formats import NoRowsLeft, ParsedRows
from quartet.data.lazy import ConcatRows, LazyExamples, TempFileRows
from quartet.text.examples import (
    AnswerText,
    Conversation,
    Example,
    Judgement,
    Message,
    Preference,
    Prompt,
    PromptText,
    answer_turn,
    has_loss,
)
from quartet.text.pictures import PictureError
from quartet.text.tokenizer import TextCodec


@dataclass(frozen=True)
class Mixture:
    """Sources of rows that follow each other in one data set, and their shares of what is drawn.

    An epoch is as many draws as there are rows in all sources together. Of these a source has its share, rounded to
    whole rows, at least one. Its own rows are gone through in passes, each a new permutation: it begins the next pass
    where the rows of the last have run out, in the middle of an epoch or several epochs later.

    Args:
        sizes: rows of each source.
        weights: in proportion to the shares.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]

    def __len__(self) -> int:
        return sum(self.sizes)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Draws of each source in an epoch."""
        whole = sum(self.weights)
        exact = [len(self) * weight / whole for weight in self.weights]
        found = [int(share) for share in exact]
        by_rest = sorted(range(len(exact)), key=lambda s: (found[s] - exact[s], s))
        for source in by_rest[: len(self) - sum(found)]:
            found[source] += 1
        while 0 in found:
            found[found.index(max(found))] -= 1
            found[found.index(0)] = 1
        return tuple(found)

    def draw(self, seed: int, place: int) -> tuple[int, int]:
        """Returns ``(row index, pass)`` of draw number ``place``."""
        epoch, position = divmod(place, len(self))
        rank = int(_permutation(seed, epoch, len(self))[position])
        source = bisect_right(self._ends, rank)
        first = self._ends[source] - self.counts[source]
        size = self.sizes[source]
        number, within = divmod(epoch * self.counts[source] + rank - first, size)
        return sum(self.sizes[:source]) + int(self._pass_order(seed, source, number)[within]), number

    def _pass_order(self, seed: int, source: int, number: int) -> NDArray[np.int32]:
        """Returns the order of a source's rows in one of its passes, ``[n]``; of each source two are kept."""
        place, key = (source, number % 2), (seed, number)
        if place not in self._orders or self._orders[place][0] != key:
            self._orders[place] = key, _shuffled([seed, number, source + 1], self.sizes[source])
        return self._orders[place][1]

    @cached_property
    def _orders(self) -> dict[tuple[int, int], tuple[tuple[int, int], NDArray[np.int32]]]:
        return {}

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.counts))


def _shuffled(key: list[int], n: int) -> NDArray[np.int32]:
    """Returns the numbers below ``n`` in an order drawn by ``key``, ``[n]``; 4 bytes per row, where a tuple has 40."""
    return np.random.Generator(np.random.PCG64(key)).permutation(n).astype(np.int32)


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, n: int) -> NDArray[np.int32]:
    return _shuffled([seed, epoch], n)


def draw_row(seed: int, place: int, rows: int | Mixture) -> tuple[int, int]:
    """Returns ``(row index, epoch)`` of draw number ``place``; of a mixture the pass of the row's source."""
    if isinstance(rows, Mixture):
        return rows.draw(seed, place)
    epoch, position = divmod(place, rows)
    return int(_permutation(seed, epoch, rows)[position]), epoch


def draw_batch(seed: int, step: int, rows: int | Mixture, batch_size: int) -> list[tuple[int, int]]:
    """Returns ``draw_row`` of each of the step's places; epochs follow each other without a short last batch.

    Args:
        rows: their number, or the sources that they come from.
    """
    if (rows if isinstance(rows, int) else len(rows)) < 1 or batch_size < 1 or step < 0:
        raise ValueError(f"nothing to draw: {rows} rows, {batch_size} per step, step {step}")
    return [draw_row(seed, place, rows) for place in range(step * batch_size, (step + 1) * batch_size)]


def num_steps_for_epochs(epochs: int, n: int, batch_size: int) -> int:
    """Returns the number of steps of at least ``epochs`` epochs, in which every row is seen so many times (not so in a
    mixture)."""
    return -(-epochs * n // batch_size)


Overlong = Literal["error", "skip"]


class DataItem(Protocol):
    """A tokenised row."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of its parts: the prompt and its answers, or the whole sequence."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of its longest sequence."""

    @property
    def place(self) -> str:
        """File and line, for messages."""


E = TypeVar("E", bound=Example | Judgement | Preference)
A = TypeVar("A")
T = TypeVar("T", bound=DataItem)


@dataclass(frozen=True)
class TokenisedRows:
    """Tokenised rows, drawn by number.

    ``warnings`` says in words what was left out; ``mixture`` how the sources are drawn from, where they
    have weights. What is said of the rows before any is drawn is said of those that were checked: ``measured`` are
    their ``lengths``, ``tokens`` the ids that occur in them. ``unchecked`` are the rows behind these, by source.
    """

    items: Sequence[Any]
    warnings: tuple[str, ...] = ()
    mixture: Mixture | None = None
    measured: NDArray[np.int32] | None = field(default=None, kw_only=True, compare=False)
    tokens: frozenset[int] = field(default=frozenset(), kw_only=True, compare=False)
    unchecked: tuple[LazyExamples[Any], ...] = field(default=(), kw_only=True, compare=False)

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """``[rows, parts]``: tokens of the parts of every row that was checked."""
        if self.measured is not None:
            return self.measured
        return np.array([item.lengths for item in self.items], np.int32)

    @property
    def seen(self) -> frozenset[int]:
        """Token ids that occur in rows that were checked or drawn, of jobs that ask for them."""
        return self.tokens.union(*(rows.seen for rows in self.unchecked))

    @property
    def remarks(self) -> tuple[str, ...]:
        """``warnings``, and what was left out of the rows drawn so far."""
        return (*self.warnings, *(line for rows in self.unchecked for line in rows.report()))

    def __len__(self) -> int:
        return len(self.items)

    @property
    def order(self) -> int | Mixture:
        """The number of the rows or their mixture, which decides their order."""
        return self.mixture or len(self)


class TrainingRows(TokenisedRows, ABC):
    """Rows that are trained on."""

    def batch(self, step: int, size: int, seed: int) -> RaggedBatch:
        """Returns the step's ``size`` rows; fields as in ``select``."""
        drawn = draw_batch(seed, step, self.order, size)
        return self.select([i for i, _ in drawn], [f"row{i}@{epoch}" for i, epoch in drawn])

    @abstractmethod
    def select(self, indices: Sequence[int], ids: Sequence[str] | None = None) -> RaggedBatch:
        """Returns rows by index, in that order. ``ids`` name them; ``row<index>`` when left out."""

    def in_parts(self, size: int) -> Iterator[RaggedBatch]:
        """Yields all rows in their order, ``size`` at a time."""
        for start in range(0, len(self), size):
            yield self.select(range(start, min(start + size, len(self))))


D = TypeVar("D", bound=TokenisedRows)


def concat_sources(sources: Sequence[D], weights: Sequence[float] | None) -> D:
    """Returns the rows of several sources of one kind as one data set.

    Args:
        weights: of the sources in what is drawn; None: every row counts alike.
    """
    first = sources[0]
    mixture = None if weights is None else Mixture(tuple(map(len, sources)), tuple(weights))
    if isinstance(first, PromptData):
        prompts = [source for source in sources if isinstance(source, PromptData)]
        hashes = np.concatenate([source.hashes for source in prompts])
        first = replace(first, columns=frozenset().union(*(source.columns for source in prompts)), hashes=hashes)
    return replace(
        first,
        items=ConcatRows([source.items for source in sources]),
        warnings=tuple(warning for source in sources for warning in source.warnings),
        mixture=mixture,
        measured=np.concatenate([source.lengths for source in sources]),
        tokens=frozenset().union(*(source.tokens for source in sources)),
        unchecked=tuple(rows for source in sources for rows in source.unchecked),
    )


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


class RowCollector(Generic[T]):
    """Collects the rows of a data set: those within the limit of tokens; the others are counted.

    Args:
        what: a row is, for messages.
    """

    def __init__(self, limit: TokenLimit, what: str) -> None:
        self._limit, self._what = limit, what
        self.num_rows = self._num_too_long = self._longest = 0
        self._first_too_long = ""
        self._items = TempFileRows[T]()
        self._lengths = array("i")
        self._tokens: set[int] = set()

    def add(self, item: T, seen: Iterable[Sequence[int]] = ()) -> bool:
        """Takes a row; ``seen`` are token ids that occur in it. Returns whether it is within the limit."""
        self.num_rows += 1
        if (length := item.num_tokens) > self._limit.max_tokens:
            self._first_too_long = self._first_too_long or f"first {item.place} with {length} tokens"
            self._num_too_long += 1
            self._longest = max(self._longest, length)
            return False
        self._items.append(item)
        self._lengths.extend(item.lengths)
        for ids in seen:
            self._tokens.update(ids if min(ids, default=0) >= 0 else (token for token in ids if not is_picture(token)))
        return True

    def fields(self, parsed: ParsedRows[Any]) -> dict[str, Any]:
        """Returns the fields of ``TokenisedRows``, with what was left out of ``parsed`` among the warnings.

        Raises:
            UserError: too long rows are errors, or no other row is left.
        """
        told = parsed.report()
        if not self.num_rows:
            raise NoRowsLeft("; ".join(told), reason=next(iter(parsed.skipped), ""))
        warnings = (*told, *([self._warning()] if self._num_too_long else []))
        measured = np.array(self._lengths, np.int32).reshape(len(self._items), -1)
        return {"items": self._items, "warnings": warnings, "measured": measured, "tokens": frozenset(self._tokens)}

    def _warning(self) -> str:
        num, what, allowed, section = self._num_too_long, self._what, self._limit.max_tokens, self._limit.section
        found = f"{num} of {self.num_rows}, {self._first_too_long}, longest {self._longest}; allowed {allowed}"
        if self._limit.overlong == "error":
            remedy = f"set {section}.overlong=skip to leave such rows out, or raise {section}.max_tokens"
            raise UserError(f"a {what} is longer than allowed", found=found, remedy=remedy)
        reason = f"{what} longer than {allowed} tokens"
        if num == self.num_rows:
            remedy = "use a longer context, or other data"
            raise NoRowsLeft(found, reason=reason, problem=f"every {what} is longer than allowed", remedy=remedy)
        return f"{num} rows left out: {reason} ({self._first_too_long})"


_ANSWERS = ("completion", "chosen", "rejected")
_TORN = "an answer holds the end-of-text token in its middle"


def check_examples(parsed: ParsedRows[A], codec: TextCodec) -> Iterator[A]:
    """Yields the examples, with answers that end once. Those in which an answer holds the end-of-text token in its
    middle are left out and counted in ``parsed``.
    """
    for example in parsed.items:
        try:
            yield _ended_once(example, codec)
        except SkipRow as reason:
            parsed.skip(str(reason), example.place)


def _ended_once(example: Any, codec: TextCodec) -> Any:
    """Returns the example without the end-of-text tokens that its answers end with: encoding adds one."""

    def once(turn: Message) -> Message:
        content = codec.without_end(turn["content"])
        if codec.holds_end(content):
            raise SkipRow(_TORN)
        return {**turn, "content": content}

    if isinstance(example, Conversation):
        return replace(example, messages=[once(turn) if has_loss(turn) else turn for turn in example.messages])
    ended: dict[str, AnswerText] = {}
    for name in _ANSWERS:
        if hasattr(example, name):
            answer = getattr(example, name)
            turn = once(answer_turn(answer))
            ended[name] = turn["content"] if isinstance(answer, str) else turn
    return replace(example, **ended)


def tokenise_examples(
    parsed: ParsedRows[E], codec: TextCodec, tokenise: Callable[[E], T], limit: TokenLimit, what: str
) -> dict[str, Any]:
    """Returns the fields of the data set of the rows that ``tokenise`` makes of the examples.

    Raises:
        UserError: the tokenizer or the chat template refuses a row, which is named; rows are too long.
    """
    kept = RowCollector[T](limit, what)
    for example in check_examples(parsed, codec):
        try:
            with naming_row(example.place):
                item = tokenise(example)
        except SkipRow as reason:
            parsed.skip(str(reason), example.place)
            continue
        except PictureError as error:
            parsed.skip_picture(error, example.place)
            continue
        kept.add(item, getattr(item, "parts", ()))
    return kept.fields(parsed)


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
    def lengths(self) -> tuple[int, ...]:
        return (len(self.input_ids),)

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

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.num_tokens,)


@dataclass(frozen=True)
class SFTData(TrainingRows):
    """Demonstrations as token ids."""

    items: Sequence[SFTItem]

    @classmethod
    def build(cls, parsed: ParsedRows[Example], codec: TextCodec, limit: TokenLimit) -> SFTData:
        """Tokenises; UserError as :func:`tokenised`."""
        return cls(**tokenise_examples(parsed, codec, lambda example: SFTItem.of(example, codec), limit, "sequence"))

    def select(self, indices: Sequence[int], ids: Sequence[str] | None = None) -> RaggedBatch:
        """Returns rows by index, in that order, with token field ``loss_mask`` (bool)."""
        items = [self.items[i] for i in indices]
        mask = torch.tensor([learned for item in items for learned in item.loss_mask], dtype=torch.bool)
        names = list(ids) if ids is not None else [f"row{i}" for i in indices]
        return RaggedBatch.from_sequences([item.input_ids for item in items], names, token={"loss_mask": mask})


@dataclass(frozen=True)
class PromptData(TokenisedRows):
    """Prompts with the columns their rewards receive.

    Of the rows that were checked, ``columns`` are the names of these (and of what is inside objects,
    ``reward_model.ground_truth``), and ``hashes`` those of the prompts (in this process), to find equal ones.
    """

    items: Sequence[PromptItem]
    columns: frozenset[str] = field(default=frozenset(), kw_only=True, compare=False)
    hashes: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64), kw_only=True, compare=False)

    @classmethod
    def build(
        cls, parsed: ParsedRows[Prompt], codec: TextCodec, limit: TokenLimit, prefix: str = "p", first: int = 0
    ) -> PromptData:
        """Tokenises; UserError as :func:`tokenised`. Ids are ``prefix`` and a number, from ``first`` on."""
        kept, columns, hashes = RowCollector[PromptItem](limit, "prompt"), set[str](), array("q")
        for number, row in enumerate(check_examples(parsed, codec), start=first):
            try:
                with naming_row(row.place):
                    ids = codec.encode_prompt(row.prompt)
            except PictureError as error:
                parsed.skip_picture(error, row.place)
                continue
            if kept.add(PromptItem(f"{prefix}{number}", row.prompt, row.columns, row.place, len(ids)), [ids]):
                columns.update(column_paths(row.columns))
                hashes.append(hash(repr(row.prompt)))
        found = kept.fields(parsed)
        return cls(**found, columns=frozenset(columns), hashes=np.array(hashes, np.int64))

    def __iter__(self) -> Iterator[PromptItem]:
        return iter(self.items)


@dataclass(frozen=True)
class AnsweredItem:
    """A prompt and its answers, which end with end-of-text; ``chosen`` says of each whether it is the good one."""

    prompt_ids: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    chosen: tuple[bool, ...]
    place: str
    margin: float = 0.0

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The prompt and its answers."""
        return self.prompt_ids, *self.answers

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(map(len, self.parts))

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + max(map(len, self.answers))


@dataclass(frozen=True)
class AnsweredData(TrainingRows):
    """Prompts with their answers as token ids; no sequence is longer than ``max_tokens``."""

    items: Sequence[AnsweredItem]
    max_tokens: int = field(kw_only=True)

    def select(self, indices: Sequence[int], ids: Sequence[str] | None = None) -> RaggedBatch:
        """Returns rows by index: a prompt segment with a child per answer, the chosen one of a pair first. ``ids`` name
        rows.

        Token field ``loss_mask``: the answers. Sequence fields: ``row`` ``[S]`` int64, the row's index in these data;
        ``pair`` ``[S]`` int64, its position in this batch; ``chosen`` ``[S]`` bool; ``margin`` ``[S]`` float32, 0 where
        the data have none.
        """
        items = [self.items[i] for i in indices]
        return self._batch(indices, items, [item.answers for item in items], ids)

    def mismatched(self, indices: Sequence[int], ids: Sequence[str] | None = None) -> RaggedBatch:
        """Returns rows as ``select`` does, with the answers of the next row that has another prompt, cut where they do
        not fit."""
        items = [self.items[i] for i in indices]
        room = [self.max_tokens - len(item.prompt_ids) for item in items]
        others = [self.items[self._partner(i)].answers for i in indices]
        cut = [[ids[:most] for ids in answers] for answers, most in zip(others, room, strict=True)]
        return self._batch(indices, items, cut, ids)

    def check_mismatched(self) -> None:
        """Raises a UserError where all rows have the same prompt, so that ``mismatched`` has nothing to give."""
        self._partner(0)

    def _partner(self, row: int) -> int:
        """Returns the next row, the first following the last, that has another prompt."""
        own = self.items[row].prompt_ids
        for other in chain(range(row + 1, len(self)), range(row)):
            if self.items[other].prompt_ids != own:
                return other
        raise UserError(
            "all rows have the same prompt, so there is no answer to another one",
            found=f"{len(self)} rows",
            remedy="use data with several prompts, or another loss than kto",
        )

    def _batch(
        self,
        indices: Sequence[int],
        items: Sequence[AnsweredItem],
        answers: Sequence[Sequence[Sequence[int]]],
        ids: Sequence[str] | None,
    ) -> RaggedBatch:
        """Makes a batch of the rows' prompts with these answers, which carry the loss."""
        names = list(ids) if ids is not None else [f"row{i}" for i in indices]
        sides = ("answer",) if len(items[0].chosen) == 1 else ("chosen", "rejected")
        batch = RaggedBatch.from_groups(
            [item.prompt_ids for item in items],
            answers,
            [f"{name}/{side}" for name in names for side in sides],
            sequence={
                "row": torch.tensor(list(indices), dtype=torch.int64).repeat_interleave(len(sides)),
                "pair": torch.arange(len(items)).repeat_interleave(len(sides)),
                "chosen": torch.tensor([is_chosen for item in items for is_chosen in item.chosen]),
                "margin": torch.tensor([i.margin for i in items], dtype=torch.float32).repeat_interleave(len(sides)),
            },
        )
        return batch.with_token(loss_mask=batch.sequence_index() >= 0)


class PreferenceData(AnsweredData):
    """Preference pairs: of each row's answers the first is the chosen one."""

    @classmethod
    def build(cls, parsed: ParsedRows[Preference], codec: TextCodec, limit: TokenLimit) -> PreferenceData:
        """Tokenises; UserError as :func:`tokenised`. Pairs of the same tokens are left out."""

        def item(pair: Preference) -> AnsweredItem:
            prompt, chosen = codec.encode_completion(pair.prompt, pair.chosen)
            _, rejected = codec.encode_completion(pair.prompt, pair.rejected)
            answers = (tuple(chosen), tuple(rejected))
            found = AnsweredItem(tuple(prompt), answers, (True, False), pair.place, pair.margin or 0.0)
            if chosen == rejected and found.num_tokens <= limit.max_tokens:  # of longer ones only the beginning is here
                raise SkipRow(SAME)
            return found

        return cls(**tokenise_examples(parsed, codec, item, limit, "pair"), max_tokens=limit.max_tokens)


class JudgedData(AnsweredData):
    """Answers judged one by one, good or bad; each is its own ``pair``."""

    @classmethod
    def build(cls, parsed: ParsedRows[Judgement], codec: TextCodec, limit: TokenLimit) -> JudgedData:
        """Tokenises; UserError as :func:`tokenised`."""

        def item(row: Judgement) -> AnsweredItem:
            prompt, answer = codec.encode_completion(row.prompt, row.completion)
            return AnsweredItem(tuple(prompt), (tuple(answer),), (row.label,), row.place)

        return cls(**tokenise_examples(parsed, codec, item, limit, "sequence"), max_tokens=limit.max_tokens)
