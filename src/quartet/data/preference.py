"""Tokenised preferences: pairs of answers to one prompt, and answers judged one by one.

Both kinds give batches with the same fields, in which a prompt is stored once for its answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from quartet.batch.ragged import RaggedBatch
from quartet.config.errors import UserError
from quartet.config.preference import DoubtfulPairs
from quartet.data.datasets import Batches, Kept, TokenLimit, checked, tokenised
from quartet.data.fields import placed
from quartet.data.formats import BEGINNING, SAME, UNSEEN, NothingLeft, Parsed, refuse_doubtful
from quartet.text.examples import AnswerText, Judgement, Preference, answer_turn
from quartet.text.tokenizer import TextCodec


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
class AnsweredData(Batches):
    """Prompts with their answers as token ids; no sequence is longer than ``max_tokens``."""

    items: Sequence[AnsweredItem]
    max_tokens: int = field(kw_only=True)

    def select(self, indices: Sequence[int], ids: Sequence[str] | None = None) -> RaggedBatch:
        """Rows by index: a prompt segment with a child per answer, the chosen one of a pair first. ``ids`` name rows.

        Token field ``loss_mask``: the answers. Sequence fields: ``row`` ``[S]`` int64, the row's index in these data;
        ``pair`` ``[S]`` int64, its position in this batch; ``chosen`` ``[S]`` bool; ``margin`` ``[S]`` float32, 0 where
        the data have none.
        """
        items = [self.items[i] for i in indices]
        return self._batch(indices, items, [item.answers for item in items], ids)

    def mismatched(self, indices: Sequence[int], ids: Sequence[str] | None = None) -> RaggedBatch:
        """As ``select``, with the answers of the next row that has another prompt, cut where they do not fit."""
        items = [self.items[i] for i in indices]
        room = [self.max_tokens - len(item.prompt_ids) for item in items]
        others = [self.items[self._partner(i)].answers for i in indices]
        cut = [[ids[:most] for ids in answers] for answers, most in zip(others, room, strict=True)]
        return self._batch(indices, items, cut, ids)

    def check_mismatched(self) -> None:
        """Raises a UserError where all rows have the same prompt, so that ``mismatched`` has nothing to give."""
        self._partner(0)

    def _partner(self, row: int) -> int:
        """The next row, the first following the last, that has another prompt."""
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
        """The rows' prompts with these answers, which carry the loss."""
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
    def build(
        cls, parsed: Parsed[Preference], codec: TextCodec, limit: TokenLimit, doubtful: DoubtfulPairs = "keep"
    ) -> PreferenceData:
        """Tokenises; a pair whose longer sequence is beyond the limit is an error or is left out.

        Pairs of the same tokens are left out, as are pairs of the same text; ``doubtful`` is what happens to pairs
        whose chosen answer is the beginning of the rejected one, end-of-text apart.
        """
        kept = Kept[AnsweredItem](limit, "pair")
        told: Parsed[AnsweredItem] = Parsed()
        for pair in checked(parsed, codec):
            with placed(pair.place):
                prompt, chosen = codec.encode_completion(pair.prompt, pair.chosen)
                _, rejected = codec.encode_completion(pair.prompt, pair.rejected)
            answers = (tuple(chosen), tuple(rejected))
            item = AnsweredItem(tuple(prompt), answers, (True, False), pair.place, pair.margin or 0.0)
            body = chosen[:-1]  # without end-of-text; empty answers were found by their text
            found = None
            if item.num_tokens > limit.max_tokens:
                pass  # ``kept`` counts it as too long
            elif chosen == rejected:
                found = SAME if isinstance(pair.prompt, str) or _words(pair.chosen) == _words(pair.rejected) else UNSEEN
            elif body and rejected[: len(body)] == body:
                found = BEGINNING
            if found in (SAME, UNSEEN) or (found is not None and doubtful != "keep"):
                told.count(told.skipped, found, pair.place)
                continue
            if found is not None:
                told.count(told.notes, found, pair.place)
            kept.add(item, item.parts)
        if doubtful == "error":
            refuse_doubtful(told)
        if not kept.num_rows:
            raise NothingLeft("; ".join(told.report()), reason=next(iter(told.skipped)))
        return cls(**kept.fields((*parsed.report(), *told.report())), max_tokens=limit.max_tokens)


def _words(answer: AnswerText) -> Any:
    """An answer without what templates trim."""
    return {**answer_turn(answer), "content": answer_turn(answer)["content"].split()}


class JudgedData(AnsweredData):
    """Answers judged one by one, good or bad; each is its own ``pair``."""

    @classmethod
    def build(cls, parsed: Parsed[Judgement], codec: TextCodec, limit: TokenLimit) -> JudgedData:
        """Tokenises; UserError as :func:`tokenised`."""

        def item(row: Judgement) -> AnsweredItem:
            prompt, answer = codec.encode_completion(row.prompt, row.completion)
            return AnsweredItem(tuple(prompt), (tuple(answer),), (row.label,), row.place)

        return cls(**tokenised(parsed, codec, item, limit, "sequence"), max_tokens=limit.max_tokens)
