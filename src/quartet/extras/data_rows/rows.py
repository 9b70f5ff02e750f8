"""Rows of a recipe's data as the job trains on them, one by one, each with its masks or with what is wrong with it.

Nothing is rendered or tokenised here: every row goes through the job's own ``Reader`` (``input_sources``), alone. Of
the model its config and tokenizer are read, and never its weights.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quartet.batch.pictures import is_later_row, is_picture, key_of
from quartet.config import UserError
from quartet.config.common import DataConfig, ModelConfig, SamplingConfig
from quartet.config.evaluation import EvalRecipe
from quartet.config.plugins import all_jobs, load_object
from quartet.config.recipe import RewardModelRecipe, RLRecipe
from quartet.config.run import Recipe, SupervisedRecipe
from quartet.data.datasets import PromptItem, TokenisedRows
from quartet.data.fields import ReadOptions
from quartet.data.formats import NoRowsLeft, ParsedRows
from quartet.data.readers import DataRow, iter_rows
from quartet.models.loading import load_on_meta
from quartet.text.loading import expand_local_path, load_generation_config, resolve_model_directory
from quartet.text.pictures import PictureCodec
from quartet.text.tokenizer import TextCodec
from quartet.trainers.evaluation import sampling_params
from quartet.trainers.input_sources import (
    Reader,
    choose_reader,
    context_length,
    demonstration_reader,
    describe_shares,
    is_reward_model_directory,
    prompt_reader,
    read_options,
    resolve_tokenizer,
    token_limit,
)
from quartet.trainers.run_files import recipe_job


@dataclass(frozen=True)
class Section:
    """One section of data in a recipe, and how its rows are read.

    Args:
        room: tokens of the model's context that stay free.
        sampling: how prompts are answered; None for rows that are trained on as they are.
        is_scored: a scalar head reads the last token of each answer.
    """

    config: DataConfig | None
    model: ModelConfig | None
    reader: Reader[Any]
    room: int = 0
    sampling: SamplingConfig | None = None
    is_scored: bool = False


def sections_of(recipe: Recipe) -> dict[str, Section]:
    """Returns the sections of data that a recipe has, by their keys."""
    found: dict[str, Section] = {}
    match recipe:
        case SupervisedRecipe():
            asked = recipe.answered_by
            how = (recipe.model, choose_reader(recipe), asked is not None, asked, isinstance(recipe, RewardModelRecipe))
            found = {key: Section(getattr(recipe, key), *how) for key in ("data", "evaluation_data")}
        case RLRecipe():
            model, evaluation = recipe.actor.model, recipe.evaluation
            found["data"] = Section(recipe.data, model, prompt_reader, 1, recipe.rollout.sampling)
            if evaluation is not None:
                found["evaluation.data"] = Section(evaluation.data, model, prompt_reader, 1, evaluation.sampling)
            if recipe.ptx is not None:
                found["ptx.data"] = Section(recipe.ptx.data, model, demonstration_reader)
        case EvalRecipe():
            found["data"] = Section(recipe.data, recipe.model, prompt_reader, 1, recipe.sampling)
        case _ if (sections := all_jobs()[recipe_job(recipe)].sections) is not None:
            parts = load_object(sections)(recipe).items()
            found = {f"{above}.{key}": one for above, part in parts for key, one in sections_of(part).items()}
    return {key: section for key, section in found.items() if section.config is not None}


@dataclass(frozen=True)
class Span:
    """Tokens that stand together: a prompt, an answer, a sequence.

    Args:
        texts: what each token adds to the text.
        mask: whether each carries loss, or a score is read there.
        marks: what is said of single tokens, by place.
    """

    title: str
    ids: tuple[int, ...]
    texts: tuple[str, ...]
    mask: tuple[bool, ...]
    marks: dict[int, str] = field(default_factory=dict)

    def is_shown(self, place: int) -> bool:
        """Tells whether a token is shown: of a picture the first alone is."""
        return not is_later_row(self.ids[place])

    @property
    def num_pictures(self) -> int:
        return sum(is_picture(token) and not is_later_row(token) for token in self.ids)


@dataclass(frozen=True)
class ShownRow:
    """A row by its number from 1, with its spans, or with what keeps it from being used.

    ``error`` would stop the run; ``skipped`` leaves the row out.
    """

    number: int
    place: str
    spans: tuple[Span, ...] = ()
    notes: tuple[str, ...] = ()
    error: UserError | None = None
    skipped: str | None = None


class DataRows:
    """The rows of one section of a recipe, gone through once by ``rows``; figures of all are complete after that.

    Attributes:
        told: rows that are used, their notes, and those that are left out, by reason.
        stopping: rows that would stop the run, by reason.
        lengths: tokens of each used row's longest sequence.

    Raises:
        UserError: the model's config or its tokenizer cannot be read.
    """

    def __init__(self, section: Section, key: str) -> None:
        self.section, self.parts = section, read_options(section.config, key)
        self.codec, context = _codec(section.model)
        assert section.config is not None, "it has sources"
        self.limit = token_limit(section.config, context - section.room, key)
        self.told, self.stopping = ParsedRows[Any](), ParsedRows[Any]()
        self.lengths, self.sizes = array("Q"), [0] * len(self.parts)
        self.num_rows = 0

    def rows(self, start: int, num: int) -> Iterator[ShownRow]:
        """Goes through all rows; yields ``num`` of them from number ``start`` on, and the one that cannot be read."""
        for part, (source, reading) in enumerate(self.parts):
            rows = iter_rows(source)
            while True:
                self.num_rows += 1
                is_wanted = start <= self.num_rows < start + num
                try:
                    row = next(rows)
                except StopIteration:
                    self.num_rows -= 1
                    break
                except UserError as error:  # the reader stops here, and so would the run
                    self.stopping.skip(error.problem, error.found)  # which names file and line
                    notes = ("rows behind it are not read",)
                    yield ShownRow(self.num_rows, str(source.path), notes=notes, error=error)
                    break
                shown = self._row(row, reading, part, is_wanted)
                if is_wanted:
                    yield shown

    def _row(self, row: DataRow, reading: ReadOptions, part: int, is_wanted: bool) -> ShownRow:
        reader, codec = self.section.reader, self.codec.limited(self.limit.max_tokens)
        shown = ShownRow(self.num_rows, row.place)
        try:
            data = reader(iter([row]), reading, codec, self.limit, self.num_rows)
            self.sizes[part] += 1
            self.lengths.append(data.items[0].num_tokens)
            return replace(shown, spans=self._spans(data) if is_wanted else ())
        except NoRowsLeft as nothing:
            self.told.skip(nothing.reason, row.place)
            length = f" ({nothing.found})" if nothing.problem.startswith("every") else ""
            return replace(shown, skipped=f"{nothing.reason}{length}")
        except UserError as error:
            self.stopping.skip(error.problem, row.place)
            return replace(shown, error=error)

    def _spans(self, data: TokenisedRows) -> tuple[Span, ...]:
        """Returns the row's tokens with their masks, as its batch has them."""
        item = data.items[0]
        if isinstance(item, PromptItem):
            ids = self.codec.encode_prompt(item.prompt)
            return (Span("prompt", tuple(ids), tuple(self._texts(ids)), (False,) * len(ids)),)
        batch: Any = data.select([0])  # type: ignore[attr-defined]
        masks = batch.token.get("loss_mask", batch.token.get("step_mask")).tolist()
        labels = batch.token["step_labels"].tolist() if "step_labels" in batch.token else []
        titles = ["sequence"] if len(batch.segment_lengths) == 1 else ["prompt", *_titles(item)]
        spans, context = [], list[int]()
        for title, start, stop in zip(titles, batch.segment_offsets, batch.segment_offsets[1:], strict=False):
            ids, mask = batch.input_ids[start:stop].tolist(), masks[start:stop]
            if self.section.is_scored and title != "prompt":
                mask = [False] * (len(ids) - 1) + [True]
            texts = self._texts([*context, *ids])[len(context) :]
            marks = {n: f"{labels[start + n]:g}" for n, is_end in enumerate(mask) if labels and is_end}
            spans.append(Span(title, tuple(ids), tuple(texts), tuple(mask), marks))
            context = ids if title == "prompt" else context
        return tuple(spans)

    def _texts(self, ids: Sequence[int]) -> list[str]:
        """Returns what each token adds to the text; of pictures their sizes as well."""
        texts, nums = self.codec.token_texts(ids), Counter(map(key_of, filter(is_picture, ids)))
        copies = Counter(key_of(token) for token in ids if is_picture(token) and not is_later_row(token))
        for n, token in enumerate(ids):
            if self.codec.pictures is not None and is_picture(token) and not is_later_row(token):
                key = key_of(token)
                width, height = self.codec.pictures.processor.size_of(key)
                texts[n] += f"[{width} × {height}, {nums[key] // copies[key]} tokens]"
        return texts

    def stops(self) -> str:
        """Tells at what the answers to prompts end; '' for rows that have their answers."""
        if self.section.sampling is None:
            return ""
        params = sampling_params(self.section.sampling, self.codec)
        tokens = self.codec.tokenizer.convert_ids_to_tokens(list(params.stop_token_ids))
        ends = [*(f"{token} ({n})" for token, n in zip(tokens, params.stop_token_ids, strict=True))]
        ends += [repr(text) for text in params.stop_strings]
        return (
            f"answers end at {', '.join(ends) or 'no token'}, or after {params.max_new_tokens} tokens"
            + self.codec.kept_special
        )

    def errors(self) -> list[str]:
        """Returns the rows that would stop the run, by reason with their first places."""
        return [line.replace("rows left out: ", "rows stop the run: ", 1) for line in self.stopping.report()]

    def notes(self) -> list[str]:
        """Returns the rows left out, by reason with their first places; the sources' shares of what is drawn."""
        config = self.section.config
        is_mixed = config is not None and len(self.parts) > 1 and all(self.sizes)
        return [*self.told.report(), *(describe_shares(config, self.sizes) if config and is_mixed else ())]


def _codec(model: ModelConfig | None) -> tuple[TextCodec, int]:
    """Returns the codec that the job has, and the model's context, both from config and tokenizer."""
    if model is None:
        raise UserError(
            "there is no model", found="its path is missing", remedy="set model.path (rl: actor.model.path)"
        )
    name = model.path if model.revision is None else f"{model.path}@{model.revision}"
    path = expand_local_path(name, "model") or resolve_model_directory(name, "tokenizer")  # of the hub without weights
    model = model.model_copy(update={"path": path, "revision": None})
    tokenizer, empty = resolve_tokenizer(model, None), load_on_meta(path, trust_remote_code=model.trust_remote_code)
    generation = load_generation_config(path)
    if generation is None and not is_reward_model_directory(model):
        generation = empty.generation_config
    pictures = PictureCodec.of(path, trust_remote_code=model.trust_remote_code)
    return replace(TextCodec.of(tokenizer, generation), pictures=pictures), context_length(empty)


def _titles(item: Any) -> Sequence[str]:
    chosen: tuple[bool, ...] = getattr(item, "chosen", ())
    if len(chosen) == 2:
        return ("chosen", "rejected")
    return ("good answer" if chosen[0] else "bad answer",) if chosen else ("answer",)
