"""Tokenised preferences: pairs of answers to one prompt, and answers judged one by one.

Both kinds give batches with the same fields, in which a prompt is stored once for its answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from quartet.batch.ragged import RaggedBatch
from quartet.config.errors import UserError
from quartet.config.preference import DoubtfulPairs
from quartet.data.datasets import Ordered, Overlong, fitting
from quartet.data.fields import placed
from quartet.data.formats import BEGINNING, SAME, Parsed, note_place, refuse_doubtful
from quartet.data.order import Mixture, draws
from quartet.text.examples import Judgement, Preference
from quartet.text.tokenizer import TextCodec


@dataclass(frozen=True)
class PreferenceItem:
    """A prompt and its two answers, which end with end-of-text."""

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    margin: float
    place: str

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The prompt and its answers."""
        return self.prompt_ids, self.chosen_ids, self.rejected_ids


@dataclass(frozen=True)
class JudgedItem:
    """A prompt and an answer, which ends with end-of-text, judged good (``desirable``) or bad."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    desirable: bool
    place: str

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The prompt and its answer."""
        return self.prompt_ids, self.answer_ids


@dataclass(frozen=True)
class PreferenceData(Ordered):
    """Preference pairs as token ids; no sequence is longer than ``max_tokens``."""

    items: tuple[PreferenceItem, ...]
    max_tokens: int
    remarks: tuple[str, ...] = ()
    mixture: Mixture | None = None

    @classmethod
    def build(
        cls,
        parsed: Parsed[Preference],
        codec: TextCodec,
        max_tokens: int,
        overlong: Overlong = "error",
        doubtful: DoubtfulPairs = "keep",
        section: str = "data",
    ) -> PreferenceData:
        """Tokenises; a pair whose longer sequence exceeds ``max_tokens`` is an error or is left out.

        Pairs of the same tokens are left out, as are pairs of the same text; ``doubtful`` is what happens to pairs
        whose chosen answer is the beginning of the rejected one, end-of-text apart.
        """
        items, remarks = [], list(parsed.report())
        skipped: dict[str, int] = {}
        notes: dict[str, int] = {}
        places: dict[str, list[str]] = {}
        for pair in parsed.items:
            with placed(pair.place):
                prompt, chosen, rejected = codec.encode_pair(pair)
            is_long = len(prompt) + max(len(chosen), len(rejected)) > max_tokens
            found = None if is_long else _doubt(chosen, rejected)
            if found == SAME or (found is not None and doubtful != "keep"):
                note_place(found, pair.place, skipped, places)
                continue
            if found is not None:
                note_place(found, pair.place, notes, places)
            margin = 0.0 if pair.margin is None else pair.margin
            items.append(PreferenceItem(tuple(prompt), tuple(chosen), tuple(rejected), margin, pair.place))
        if doubtful == "error":
            refuse_doubtful(skipped, places)
        told = Parsed(tuple(items), skipped, notes, places).report()
        if not items:
            raise UserError("no row is left to use", found="; ".join(told), remedy="use other data")
        lengths = [len(i.prompt_ids) + max(len(i.chosen_ids), len(i.rejected_ids)) for i in items]
        kept, remark = fitting(items, lengths, [i.place for i in items], max_tokens, overlong, "pair", section)
        return cls(tuple(kept), max_tokens, (*remarks, *told, *remark))

    def batch(self, step: int, size: int, seed: int) -> RaggedBatch:
        """The step's ``size`` pairs; fields as in ``select``."""
        drawn = draws(seed, step, self.order, size)
        return self.select([i for i, _ in drawn], [f"row{i}@{epoch}" for i, epoch in drawn])

    def select(self, indices: Sequence[int], ids: Sequence[str] | None = None) -> RaggedBatch:
        """Pairs by index: a prompt segment with two children, chosen then rejected, so S is twice the pairs.

        Token field ``loss_mask``: the answers. Sequence fields: ``row`` ``[S]`` int64, the pair's index in these data;
        ``pair`` ``[S]`` int64, its position in this batch; ``chosen`` ``[S]`` bool; ``margin`` ``[S]`` float32, 0 where
        the data have none.
        """
        items = [self.items[i] for i in indices]
        margins = torch.tensor([item.margin for item in items], dtype=torch.float32).repeat_interleave(2)
        return _answers(
            [(item.prompt_ids, (item.chosen_ids, item.rejected_ids)) for item in items],
            indices,
            ids,
            ("chosen", "rejected"),
            torch.tensor([True, False]).repeat(len(items)),
        ).with_sequence(margin=margins)

    def mismatched(self, indices: Sequence[int], ids: Sequence[str] | None = None) -> RaggedBatch:
        """As ``select``, with the two answers of the next pair that has another prompt, cut where they do not fit."""
        items = [self.items[i] for i in indices]
        others = [self.items[self._partners[i]] for i in indices]
        return _answers(
            [
                (
                    i.prompt_ids,
                    tuple(ids[: self.max_tokens - len(i.prompt_ids)] for ids in (o.chosen_ids, o.rejected_ids)),
                )
                for i, o in zip(items, others, strict=True)
            ],
            indices,
            ids,
            ("chosen", "rejected"),
            torch.tensor([True, False]).repeat(len(items)),
        )

    def check_mismatched(self) -> None:
        """Raises a UserError where all rows have the same prompt, so that ``mismatched`` has nothing to give."""
        _ = self._partners

    @cached_property
    def _partners(self) -> tuple[int, ...]:
        return _next_with_other([item.prompt_ids for item in self.items])


@dataclass(frozen=True)
class JudgedData(Ordered):
    """Answers judged one by one, as token ids; no sequence is longer than ``max_tokens``."""

    items: tuple[JudgedItem, ...]
    max_tokens: int
    remarks: tuple[str, ...] = ()
    mixture: Mixture | None = None

    @classmethod
    def build(
        cls,
        parsed: Parsed[Judgement],
        codec: TextCodec,
        max_tokens: int,
        overlong: Overlong = "error",
        section: str = "data",
    ) -> JudgedData:
        """Tokenises; a sequence longer than ``max_tokens`` is an error or is left out."""
        items = []
        for row in parsed.items:
            with placed(row.place):
                prompt, answer = codec.encode_judgement(row)
            items.append(JudgedItem(tuple(prompt), tuple(answer), row.label, row.place))
        lengths = [len(item.prompt_ids) + len(item.answer_ids) for item in items]
        kept, remark = fitting(items, lengths, [i.place for i in items], max_tokens, overlong, "sequence", section)
        return cls(tuple(kept), max_tokens, (*parsed.report(), *remark))

    def batch(self, step: int, size: int, seed: int) -> RaggedBatch:
        """The step's ``size`` answers; fields as in ``select``."""
        drawn = draws(seed, step, self.order, size)
        return self.select([i for i, _ in drawn], [f"row{i}@{epoch}" for i, epoch in drawn])

    def select(self, indices: Sequence[int], ids: Sequence[str] | None = None) -> RaggedBatch:
        """Answers by index; fields as in ``PreferenceData.select`` without ``margin``, each answer its own ``pair``."""
        items = [self.items[i] for i in indices]
        chosen = torch.tensor([item.desirable for item in items])
        return _answers([(i.prompt_ids, (i.answer_ids,)) for i in items], indices, ids, ("answer",), chosen)

    def mismatched(self, indices: Sequence[int], ids: Sequence[str] | None = None) -> RaggedBatch:
        """As ``select``, with the answer of the next row that has another prompt, cut where it does not fit."""
        items = [self.items[i] for i in indices]
        others = [self.items[self._partners[i]].answer_ids for i in indices]
        answers = [
            (item.prompt_ids, (other[: self.max_tokens - len(item.prompt_ids)],))
            for item, other in zip(items, others, strict=True)
        ]
        return _answers(answers, indices, ids, ("answer",), torch.tensor([item.desirable for item in items]))

    def check_mismatched(self) -> None:
        """Raises a UserError where all rows have the same prompt, so that ``mismatched`` has nothing to give."""
        _ = self._partners

    @cached_property
    def _partners(self) -> tuple[int, ...]:
        return _next_with_other([item.prompt_ids for item in self.items])


def _answers(
    groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]],
    rows: Sequence[int],
    ids: Sequence[str] | None,
    sides: Sequence[str],
    chosen: torch.Tensor,
) -> RaggedBatch:
    """A batch of prompts, each with its answers, which carry the loss. ``ids`` name the groups."""
    names = list(ids) if ids is not None else [f"row{i}" for i in rows]
    batch = RaggedBatch.from_groups(
        [prompt for prompt, _ in groups],
        [answers for _, answers in groups],
        [f"{name}/{side}" for name in names for side in sides],
        sequence={
            "row": torch.tensor(list(rows), dtype=torch.int64).repeat_interleave(len(sides)),
            "pair": torch.arange(len(groups)).repeat_interleave(len(sides)),
            "chosen": chosen,
        },
    )
    return batch.with_token(loss_mask=batch.sequence_index() >= 0)


def _doubt(chosen: Sequence[int], rejected: Sequence[int]) -> str | None:
    """What is doubtful about two answers, which end with end-of-text; empty ones are known from their text."""
    if chosen == rejected:
        return SAME
    body = chosen[:-1]
    return BEGINNING if body and rejected[: len(body)] == body else None


def _next_with_other(keys: Sequence[object]) -> tuple[int, ...]:
    """For each place the next one, the first following the last, whose key differs.

    Raises:
        UserError: there is none.
    """
    num = len(keys)
    if all(key == keys[0] for key in keys):
        raise UserError(
            "all rows have the same prompt, so there is no answer to another one",
            found=f"{num} rows",
            remedy="use data with several prompts, or another loss than kto",
        )
    found = [0] * num
    # Twice around: the second time, the last places know what the first ones found.
    for place in reversed(range(2 * num)):
        here, following = place % num, (place + 1) % num
        found[here] = following if keys[following] != keys[here] else found[following]
    return tuple(found)
