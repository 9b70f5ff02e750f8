"""Step-labelled answers: which rows are understood, and the batches they make.

====================================== ========================================================================
columns                                one label for
====================================== ========================================================================
``prompt``, ``steps``, ``labels``      each entry of the list ``steps``, which may also be called ``completions``
``prompt``, ``completion``, ``labels`` each step that the separator cuts the text ``completion`` into
====================================== ========================================================================

A hard label is 1, true or "+" (right) or 0, -1, false or "-" (wrong), a soft one a probability in [0, 1]; null leaves
a step without a label. In CSV the lists are JSON text.

The steps of a worked answer, and the tokens at which they end.

A *separator* (``"\n\n"``, ``" ки"``) ends a step and belongs to it. What stands behind the last separator is the last
step. A stretch of nothing but white space is no step, so a row of separators counts once; an answer without any step
is one step as a whole. With ``;`` as separator ``a;b;;c`` has the steps ``a;``, ``b;`` and ``c``.

A step ends at the token that holds its separator's last character; a last step without separator ends with the
answer's last token (its end-of-text).
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from quartet.batch.ragged import RaggedBatch
from quartet.config.errors import UserError
from quartet.data.datasets import RowCollector, TokenLimit, TrainingRows, check_examples
from quartet.data.fields import AS_GIVEN, ReadOptions, RowFields, SkipRow, field_excerpt, naming_row, read_prompt
from quartet.data.formats import ParsedRows, parse_rows
from quartet.data.readers import DataRow
from quartet.extras.process_rewards.config import ProcessRewardRecipe
from quartet.text.examples import PromptText
from quartet.text.loading import resolve_model_directory
from quartet.text.tokenizer import TextCodec
from quartet.trainers.input_sources import Reader

_CONTEXT = 8
"""Tokens before an answer that decide how its first tokens are decoded."""


@dataclass(frozen=True)
class Step:
    """``text`` without the separator; ``end`` is the offset behind the separator, None where there is none."""

    text: str
    end: int | None


def split_steps(text: str, separator: str) -> list[Step]:
    """Splits ``text`` into its steps, at least one."""
    found: list[Step] = []
    start = 0
    while (place := text.find(separator, start)) >= 0:
        if text[start:place].strip():
            found.append(Step(text[start:place], place + len(separator)))
        start = place + len(separator)
    if text[start:].strip() or not found:
        found.append(Step(text[start:], None))
    return found


def last_tokens(pieces: Sequence[str], steps: Sequence[Step]) -> list[int]:
    """Returns the index of the token that ends each step.

    Args:
        pieces: what each token adds to the text.
        steps: of the joined pieces.
    """
    stops = list(accumulate(map(len, pieces)))
    return [len(pieces) - 1 if step.end is None else bisect_left(stops, step.end) for step in steps]


def answer_pieces(codec: TextCodec, before: Sequence[int], ids: Sequence[int]) -> list[str]:
    """Returns what each token of an answer adds to its text; end-of-text tokens add nothing.

    Args:
        before: token ids that the answer continues.
        ids: the answer's.
    """
    context = list(before[-_CONTEXT:])
    pieces = codec.token_texts([*context, *ids])[len(context) :]
    return ["" if token in codec.eos_ids else piece for token, piece in zip(ids, pieces, strict=True)]


# In a model's directory: how the steps end that it was trained on -------------------------------------------

_PROCESS_FILE = "process_reward.json"


def save_step_separator(separator: str, directory: Path) -> None:
    """Writes what ends every step but perhaps the last into a model's directory."""
    (directory / _PROCESS_FILE).write_text(json.dumps({"separator": separator}) + "\n", encoding="utf-8")


def load_step_separator(path: str) -> str | None:
    """Reads the separator of a model directory or hub name; None where it has none."""
    file = Path(resolve_model_directory(path, "model"), _PROCESS_FILE)
    return str(json.loads(file.read_text(encoding="utf-8"))["separator"]) if file.is_file() else None


def write_separator(recipe: ProcessRewardRecipe, directory: Path) -> None:
    """Writes beside a trained model what its steps end with."""
    save_step_separator(recipe.separator, directory)


_WORDS = {"+": 1.0, "-": 0.0}
_STEPS = ("steps", "completions")


@dataclass(frozen=True)
class StepLabelled:
    """An answer and one label per step: the probability that it is right, None where it has none."""

    prompt: PromptText
    completion: str
    labels: tuple[float | None, ...]
    place: str = ""


def _misfit(place: str, reason: str) -> UserError:
    return UserError(
        "step labels do not fit their answers",
        found=f"{place}: {reason}",
        remedy="mend or remove this row, or set the separator that ends a step in it",
    )


def step_labelled(rows: Iterable[DataRow], separator: str, reading: ReadOptions = AS_GIVEN) -> ParsedRows[StepLabelled]:
    """Reads typed examples. Left out and counted: answers of which no step has a label.

    Raises:
        UserError: missing columns or empty values; labels that do not match the steps or are out of range.
    """
    return parse_rows(partial(_example, separator=separator), rows, reading)


def _example(fields: RowFields, separator: str) -> StepLabelled:
    name = next((name for name in _STEPS if fields.has(name)), None)
    if not fields.has("labels") or (name is None and not fields.has("completion")):
        raise fields.missing("`prompt`, `steps` (or `completion`) and `labels`")
    prompt = read_prompt(fields)
    values = _list(fields, "labels")
    labels = tuple(_label(value, fields.place) for value in values)
    text = _joined(fields, name, separator) if name is not None else fields.text("completion")
    num_steps = len(split_steps(text, separator))
    if num_steps != len(labels):
        raise _misfit(fields.place, f"{len(labels)} labels for {num_steps} steps that end with {separator!r}")
    if all(label is None for label in labels):
        raise SkipRow("no step has a label")
    return StepLabelled(prompt, text, labels, fields.place)


def _list(fields: RowFields, name: str) -> list[Any]:
    value = fields.parsed(name)
    if not isinstance(value, list) or not value:
        raise _misfit(fields.place, f"`{name}` is {field_excerpt(value)}, not a list with entries")
    return value


def _label(value: Any, place: str) -> float | None:
    """Returns the probability that a step is right."""
    if value is None:
        return None
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    if isinstance(value, (bool, int, float)) and (value == -1 or 0 <= value <= 1):
        return max(0.0, float(value))
    raise _misfit(place, f"label {field_excerpt(value)} is not 0, 1, -1, true, false, '+', '-' or a number from 0 to 1")


def _joined(fields: RowFields, name: str, separator: str) -> str:
    """Joins the steps to one text, each but the last ended by the separator."""
    steps = _list(fields, name)
    for step in steps:
        if not isinstance(step, str) or not step.strip() or separator in step.removesuffix(separator):
            raise _misfit(fields.place, f"step {field_excerpt(step)} is no text, or holds the separator {separator!r}")
    return separator.join([*(step.removesuffix(separator) for step in steps[:-1]), steps[-1]])


# Token ids -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProcessItem:
    """A prompt and its answer, which ends with end-of-text.

    ``step_tokens`` are places in ``completion_ids`` at which labelled steps end, ascending; ``labels`` theirs.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    step_tokens: tuple[int, ...]
    labels: tuple[float, ...]
    place: str

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The prompt and its answer."""
        return self.prompt_ids, self.completion_ids

    @property
    def lengths(self) -> tuple[int, ...]:
        return len(self.prompt_ids), len(self.completion_ids)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class ProcessData(TrainingRows):
    """Step-labelled answers as token ids."""

    items: Sequence[ProcessItem]

    @classmethod
    def build(
        cls, parsed: ParsedRows[StepLabelled], codec: TextCodec, separator: str, limit: TokenLimit
    ) -> ProcessData:
        """Tokenises; a sequence beyond the limit is an error or is left out.

        Raises:
            UserError: the steps cannot be told apart in the tokens.
        """
        kept = RowCollector[ProcessItem](limit, "sequence")
        for example in check_examples(parsed, codec):
            item = _tokenised(example, codec, separator, limit.max_tokens)
            kept.add(item, item.parts)
        return cls(**kept.fields(parsed))

    def select(self, indices: Sequence[int], ids: Sequence[str] | None = None) -> RaggedBatch:
        """Selects answers by index; those of one prompt stand together, at the place of the first, and share its
        tokens.

        Token fields: ``step_mask`` ``[T]`` bool, last tokens of labelled steps; ``step_labels`` ``[T]`` float32, 0
        elsewhere.
        """
        names = list(ids) if ids is not None else [f"row{i}" for i in indices]
        groups: dict[tuple[int, ...], list[tuple[ProcessItem, str]]] = {}
        for index, name in zip(indices, names, strict=True):
            item = self.items[index]
            groups.setdefault(item.prompt_ids, []).append((item, name))
        batch = RaggedBatch.from_groups(
            list(groups),
            [[item.completion_ids for item, _ in members] for members in groups.values()],
            [name for members in groups.values() for _, name in members],
        )
        labels = torch.full((batch.num_tokens,), math.nan)
        for s, item in enumerate(item for members in groups.values() for item, _ in members):
            start, _ = batch.leaf_span(s)
            labels[start + torch.tensor(item.step_tokens)] = torch.tensor(item.labels)
        return batch.with_token(step_mask=~labels.isnan(), step_labels=labels.nan_to_num(0.0))


def _tokenised(example: StepLabelled, codec: TextCodec, separator: str, max_tokens: int) -> ProcessItem:
    """Makes the item of a row; of one that is too long the length alone counts, so its steps are not looked for."""
    with naming_row(example.place):
        prompt_ids, completion_ids = codec.encode_completion(example.prompt, example.completion)
    if len(prompt_ids) + len(completion_ids) > max_tokens:
        return ProcessItem(tuple(prompt_ids), tuple(completion_ids), (), (), example.place)
    pieces = answer_pieces(codec, prompt_ids, completion_ids)
    ends = last_tokens(pieces, split_steps("".join(pieces), separator))
    if len(ends) != len(example.labels):
        raise _misfit(
            example.place,
            f"{len(example.labels)} steps, of which the tokenizer keeps {len(ends)}; it changes the separator "
            f"{separator!r} or what stands around it",
        )
    if len(set(ends)) != len(ends):
        raise _misfit(example.place, "two steps end in the same token")
    labelled = [(end, label) for end, label in zip(ends, example.labels, strict=True) if label is not None]
    return ProcessItem(
        tuple(prompt_ids),
        tuple(completion_ids),
        tuple(end for end, _ in labelled),
        tuple(label for _, label in labelled),
        example.place,
    )


def reader(recipe: ProcessRewardRecipe) -> Reader[ProcessData]:
    """Makes a reader of step-labelled answers, whose steps end with the recipe's separator."""
    return step_reader(recipe.separator)


def step_reader(separator: str) -> Reader[ProcessData]:
    """Makes a reader of step-labelled answers, whose steps end with ``separator``."""
    return lambda rows, how, codec, limit, _: ProcessData.build(
        step_labelled(rows, separator, how), codec, separator, limit
    )
