"""Where models, tokenizers and rows come from: a recipe's path, or an object that Python code passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from quartet.config import UserError
from quartet.config.common import DataConfig, ModelConfig, SourceConfig
from quartet.config.plugins import all_jobs, load_object
from quartet.config.preference import PreferenceRecipe
from quartet.config.recipe import RewardModelRecipe, SFTRecipe
from quartet.config.run import PicturesConfig, Recipe
from quartet.config.strict import short_repr
from quartet.data.datasets import (
    JudgedData,
    Mixture,
    PreferenceData,
    PromptData,
    SFTData,
    TokenisedRows,
    TokenLimit,
    concat_sources,
)
from quartet.data.fields import ReadOptions
from quartet.data.formats import demonstrations, has_judgements, judgements, preferences, prompts
from quartet.data.lazy import ConcatRows, LazyExamples, TempFileRows
from quartet.data.readers import DataRow, iter_rows
from quartet.models.directories import read_config
from quartet.models.loading import load_causal_lm, load_scalar_model, scalar_model_from
from quartet.models.packed_model import PackedModel
from quartet.models.packing_probe import model_context_length
from quartet.models.vision import FeatureStore
from quartet.text.loading import load_generation_config, load_tokenizer, resolve_model_directory
from quartet.text.pictures import PictureCodec, PictureProcessor, PictureStore
from quartet.text.templates import with_template
from quartet.text.tokenizer import TextCodec
from quartet.trainers.run_files import recipe_job

ModelLike: TypeAlias = PreTrainedModel | str | Path
TokenizerLike: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin | str | Path
"""Of a vision-language model its processor, which has the tokenizer."""
Reward: TypeAlias = Callable[..., Any] | PreTrainedModel

R = TypeVar("R", bound=Recipe)
D = TypeVar("D", bound=TokenisedRows)
UNLIMITED = 1 << 30
"""Context of a model whose config names none."""
_LEAST_CHECKED = 1_000
"""Rows of each source that are checked at the start, where those before it have used up ``check_rows``."""


Reader: TypeAlias = Callable[[Iterator[DataRow], ReadOptions, TextCodec, TokenLimit, int], D]
"""``(rows, reading, codec, limit, first)`` of one source to data: parsed (``data.formats``) and tokenised, one after
the other. ``first`` is the number of the first row in its source. Raises ``NoRowsLeft`` where all are left out."""


# What Python code may pass: objects, paths and hub names, one bare reward ------------------------------------


def check_recipe(recipe: object, kind: type[Recipe]) -> None:
    """Raises ``UserError`` where ``recipe`` is no recipe of this kind."""
    if not isinstance(recipe, kind):
        job = kind.model_fields["job"].default
        raise UserError(
            f"this trainer takes a recipe of the class {kind.__name__}",
            found=type(recipe).__name__,
            remedy=f"make one, {kind.__name__}(…), or read one, load_recipe({job!r}, 'recipe.yaml')",
        )


def with_names(
    recipe: R, model: ModelLike | None, tokenizer: TokenizerLike | None, section: str = "model"
) -> tuple[R, PreTrainedModel | None, PreTrainedTokenizerBase | ProcessorMixin | None]:
    """Returns the recipe in which ``section`` names the model and tokenizer that were passed by name, and those passed
    as objects.

    Raises:
        UserError: the recipe names another model, or there is no such tokenizer.
    """
    recipe, own = with_name(recipe, model, f"{section}.path")
    if not isinstance(tokenizer, str | Path):
        return recipe, own, tokenizer
    config: ModelConfig | None = attrgetter(section)(recipe)
    if own is not None or config is None:
        return recipe, own, load_tokenizer(tokenizer)
    return _set(recipe, section, config.model_copy(update={"tokenizer": str(tokenizer)})), None, None


def with_name(recipe: R, model: ModelLike | None, key: str) -> tuple[R, PreTrainedModel | None]:
    """Returns the recipe whose ``key`` (``reference.path``, ``critic.path``) is the name passed, and the object passed.

    A name is written into the recipe, so that the run's record and ``--resume`` know it.

    Raises:
        UserError: the recipe has another path there, or ``model`` is neither a name nor a model that can be trained.
    """
    section, _, last = key.rpartition(".")
    if model is None or isinstance(model, PreTrainedModel):
        return recipe, model
    if not isinstance(model, str | Path):
        raise UserError(
            f"{section.rpartition('.')[2]} is not a model",
            found=f"{type(model).__name__}",
            remedy="pass a transformers model (model._orig_mod of a compiled one, with train.compile in the recipe), "
            "or the path or hub name of one",
        )
    former: Any = attrgetter(section)(recipe)
    if former is None:
        return _set(recipe, section, ModelConfig(path=str(model))), None
    if getattr(former, last) not in (None, str(model)):
        raise UserError(
            "two models are named for one place",
            found=f"{key}={getattr(former, last)} in the recipe, {str(model)!r} passed from Python",
            remedy="name it in one of them",
        )
    return _set(recipe, section, former.model_copy(update={last: str(model)})), None


def as_rewards(rewards: Reward | Sequence[Reward], name: str = "rewards") -> tuple[Reward, ...]:
    """Returns rewards passed from Python, one or several, as a tuple.

    Raises:
        UserError: one of them cannot be called.
    """
    found = tuple(rewards) if isinstance(rewards, Sequence) and not isinstance(rewards, str) else (rewards,)
    for reward in found:
        if not callable(reward):
            raise UserError(
                f"{name} holds something that is not a reward",
                found=f"{short_repr(reward)} ({type(reward).__name__})",
                remedy="pass functions f(prompts, completions, **columns) or sequence-classification models; "
                "rewards with a configuration belong into the recipe: RLRecipe(rewards=[…])",
            )
    return found


def _set(recipe: Any, dotted: str, value: Any) -> Any:
    first, _, rest = dotted.partition(".")
    inner = _set(getattr(recipe, first), rest, value) if rest else value
    return recipe.model_copy(update={first: inner})


# Models and tokenizers -----------------------------------------------------------------------------------


def resolve_model(
    config: ModelConfig | None, model: PreTrainedModel | None, load: Callable[..., PreTrainedModel], key: str
) -> PreTrainedModel:
    """Returns the object if there is one, else what the recipe's path names.

    Raises:
        UserError: there is neither, or ``save_pretrained`` would refuse the model after training.
    """
    if model is not None:
        found = model
    elif config is not None:
        found = load(config.path, trust_remote_code=config.trust_remote_code)
    else:
        raise UserError("there is no model", found=f"{key} is missing", remedy=f"set {key}.path, or pass a model")
    try:
        if (generation := getattr(found, "generation_config", None)) is not None:
            generation.validate(strict=True)
    except ValueError as error:
        raise UserError(
            "the model's generation config contradicts itself, so the trained model could not be saved",
            found=str(error).strip().splitlines()[0],
            remedy="mend generation_config.json (or model.generation_config), e.g. set do_sample to true",
        ) from error
    return found if model is None else found.float().eval().requires_grad_(True)


def resolve_scalar_model(
    config: ModelConfig | None, model: PreTrainedModel | None, *, seed: int, empty: bool = False
) -> tuple[PreTrainedModel, GenerationConfig | None]:
    """Returns the model with a scalar head to train, and the generation config that names its end-of-text ids where
    there is one.

    A sequence-classification model is trained itself; of a causal LM the body is copied and a head drawn from ``seed``.

    Args:
        empty: on the meta device, as ``model`` is then.
    """
    if model is None and config is not None and is_reward_model_directory(config):
        found = load_scalar_model(config.path, empty=empty, trust_remote_code=config.trust_remote_code)
        return found, load_generation_config(config.path)
    found = resolve_model(config, model, partial(load_causal_lm, empty=empty), "model")
    generation = getattr(found, "generation_config", None)
    if getattr(found, "score", None) is not None:
        return found, generation
    return scalar_model_from(found, seed=seed), generation


def is_reward_model_directory(given: ModelConfig) -> bool:
    """Tells whether the directory holds a sequence-classification model already."""
    try:
        source = resolve_model_directory(given.path, "model")
        config = AutoConfig.from_pretrained(source, trust_remote_code=given.trust_remote_code)
    except Exception:
        return False  # the loader that follows says what is wrong
    return any("SequenceClassification" in name for name in config.architectures or [])


def resolve_tokenizer(
    config: ModelConfig | None, tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None
) -> PreTrainedTokenizerBase:
    """Returns the object if there is one (of a processor its tokenizer), else what the recipe names; with the recipe's
    chat template where it has one."""
    if isinstance(tokenizer, ProcessorMixin):
        tokenizer = cast(Any, tokenizer).tokenizer
    if config is None:
        if tokenizer is None:
            found = "neither a path nor an object"
            raise UserError("there is no tokenizer", found=found, remedy="pass model and tokenizer")
        return tokenizer
    if tokenizer is None:
        if config.tokenizer is None:
            resolve_model_directory(
                config.path, "model"
            )  # what is missing is the model, of which the tokenizer is a part
        tokenizer = load_tokenizer(config.tokenizer or config.path, trust_remote_code=config.trust_remote_code)
    return with_template(tokenizer, config.chat_template, config.chat_template_kwargs)


def reads_pictures(config: ModelConfig | None, model: PreTrainedModel | None) -> bool:
    """Tells whether the model that was passed, or that the recipe names, is a vision-language model."""
    if model is None and config is None:
        return False  # what loads it says so
    found: Any = model.config if model is not None else None
    if config is not None and model is None:
        source = resolve_model_directory(config.path, "model")
        found = read_config(source, trust_remote_code=config.trust_remote_code)
    return getattr(found, "vision_config", None) is not None


def open_pictures(
    config: ModelConfig | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None,
    sizes: PicturesConfig,
    directory: Path | None = None,
) -> PictureCodec | UserError | None:
    """Returns what reads pictures in a vision-language model's prompts: with the processor that was passed, or that of
    the model's directory. None for a text model; where there is no processor, why: texts alone need none.

    Args:
        sizes: how much of the features is kept.
        directory: of the run's pictures, which other processes read; one of this process, which ends with it, when left
            out.
    """
    if getattr(model.config, "vision_config", None) is None:
        return None
    try:
        if isinstance(tokenizer, ProcessorMixin):
            processor = PictureProcessor.of(tokenizer, model.config)
        elif config is not None:
            path = config.tokenizer or config.path
            processor = PictureProcessor.load(path, trust_remote_code=config.trust_remote_code)
        else:
            return UserError(
                "the model has no processor for pictures",
                found="a tokenizer was passed with it",
                remedy="pass the processor as `tokenizer`, which has the tokenizer in it",
            )
    except UserError as error:
        return error
    return PictureCodec(processor, PictureStore(directory, sizes))


def feature_store(codec: TextCodec) -> FeatureStore | None:
    """Makes the store of the features of all pictures that the codec reads; None where it reads none."""
    return None if codec.pictures is None else FeatureStore.of(codec.pictures)


def connect_pictures(packed: PackedModel, features: FeatureStore | None) -> None:
    """Has a model's tower, if it has one, use these features."""
    if packed.tower is not None and features is not None:
        packed.tower.connect(features)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Returns how many rows the embedding has: one more than the largest id that the model can read."""
    return int(model.get_input_embeddings().weight.shape[0])


def check_vocabulary_covers(model: PreTrainedModel, policy: PreTrainedModel, what: str) -> None:
    """Refuses a model that cannot read all token ids of the policy.

    Raises:
        UserError: its vocabulary is smaller.
    """
    held, needed = vocabulary_size(model), vocabulary_size(policy)
    if held < needed:
        raise UserError(
            f"the {what}'s vocabulary is smaller than the policy's",
            found=f"{held} and {needed} ids",
            remedy=f"use a {what} with the policy's tokenizer, or leave {what}.path out",
        )


def context_length(model: PreTrainedModel) -> int:
    """Returns the longest sequence the model's positions allow in packed runs, in tokens."""
    return model_context_length(model) or UNLIMITED


def check_context(model: PreTrainedModel, longest: int, what: str) -> None:
    """Refuses a scorer whose positions end before the longest sequence it would have to read."""
    if context_length(model) < longest:
        raise UserError(
            f"the {what}'s context is too short",
            found=f"{context_length(model)} positions for sequences of up to {longest} tokens",
            remedy="use a model with a longer context, shorter prompts, or a smaller max_new_tokens",
        )


def check_budget(longest: int, budget: int, key: str) -> None:
    """Refuses at the start what would otherwise stop the run at its first long sequence.

    Raises:
        UserError: ``longest`` tokens that have to stay together do not fit a micro-batch of ``budget``.
    """
    if longest > budget:
        raise UserError(
            f"{key} is too small for the longest sequence",
            found=f"{longest} tokens that belong together, {key}={budget}",
            remedy=f"set {key} to at least {longest}, or allow only shorter sequences",
        )


# Rows ----------------------------------------------------------------------------------------------------


def read_data(
    config: DataConfig | None,
    rows: Iterable[Any] | None,
    codec: TextCodec,
    room: int,
    key: str,
    reader: Reader[D],
    *,
    check_all: bool = False,
) -> D:
    """Reads and tokenises the rows of ``key`` in the recipe, of all sources, mixed where they have weights; or the rows
    that Python code passes, where a string or a message list is a prompt.

    The recipe's ``check_rows`` are checked and tokenised here; the others are when they are drawn.

    Args:
        room: most tokens of a row, where the recipe allows as many.
        reader: of the kind of rows.
        check_all: here, as evaluations do, which use every row.

    Raises:
        UserError: there are no rows, or some that cannot be used.
    """
    options = config or DataConfig()
    parts: list[tuple[Iterator[DataRow], SourceConfig | None, ReadOptions]]
    if rows is not None:
        if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
            raise UserError(
                f"{key} passed from Python is not a list of rows",
                found=f"{short_repr(rows)} ({type(rows).__name__})",
                remedy="pass a list of dictionaries, [{'prompt': …, …}, …], or of prompts",
            )
        values = (row if isinstance(row, Mapping) else {"prompt": row} for row in rows)
        passed = (DataRow(value, f"{key} passed from Python", number) for number, value in enumerate(values, start=1))
        parts = [(passed, None, ReadOptions.of(options, key))]
    else:
        parts = [(iter_rows(source), source, how) for source, how in read_options(config, key)]
    limit = token_limit(options, room, key)
    limited = codec.limited(limit.max_tokens)
    left = None if check_all or key.startswith("evaluation") else options.check_rows
    found: list[D] = []
    for given, source, how in parts:
        num = None if left is None else max(left, min(options.check_rows, _LEAST_CHECKED))

        def read(rows: Iterator[DataRow], first: int, how: ReadOptions = how) -> D:
            return reader(rows, how, limited, limit, first)

        found.append(_read_source(given, source, num, read))
        left = None if left is None else left - len(found[-1])
    if len(found) == 1:
        return found[0]
    if len({type(part) for part in found}) > 1:
        raise _mixed_kinds(f"{key}.sources")
    weights = [source.weight for source in options.sources if source.weight is not None]
    data = concat_sources(found, weights or None)
    return replace(data, warnings=(*describe_shares(options, [len(part) for part in found]), *data.warnings))


def read_options(config: DataConfig | None, key: str) -> list[tuple[SourceConfig, ReadOptions]]:
    """Returns the sources of ``key`` in the recipe, and how the rows of each are read.

    Raises:
        UserError: there are none.
    """
    if config is None or not config.parts:
        missing = key if config is None else f"{key}.path"
        raise UserError("there is no data", found=f"{missing} is missing", remedy=f"set {key}.path, or pass rows")
    sections = [f"{key}.sources.{n}" if config.sources else key for n in range(len(config.parts))]
    return [(part, ReadOptions.of(part, section)) for part, section in zip(config.parts, sections, strict=True)]


def token_limit(options: DataConfig, room: int, key: str) -> TokenLimit:
    """Returns the longest sequence of ``key``, where ``room`` is the longest that the model allows."""
    return TokenLimit(min(room, options.max_tokens or room), options.overlong, key)


def describe_shares(options: DataConfig, sizes: Sequence[int]) -> list[str]:
    """Tells how many rows of each of several sources an epoch has, in words.

    Args:
        sizes: rows of each that are used.
    """
    weights = [source.weight for source in options.sources if source.weight is not None]
    counts = Mixture(tuple(sizes), tuple(weights)).counts if weights else sizes
    return [
        f"{source.path}: {num:,} of the {sum(sizes):,} rows of an epoch, from {size:,}"
        for source, size, num in zip(options.sources, sizes, counts, strict=True)
    ]


def _read_source(
    rows: Iterator[DataRow], source: SourceConfig | None, num: int | None, read: Callable[[Iterator[DataRow], int], D]
) -> D:
    """Reads the data of one source, of which the first ``num`` rows are checked; all where that is None."""
    data = read(islice(rows, num), 0)
    rest = TempFileRows[DataRow](rows if num is not None else ())
    if num is None or not rest:
        return data

    def read_one(row: DataRow, number: int) -> D:
        found = read(iter([row]), num + number)
        if type(found) is not type(data):
            raise _mixed_kinds(row.place)
        return found

    unchecked: LazyExamples[Any] = LazyExamples(rest, read_one)
    name = source.path if source is not None else "rows"
    remark = f"{name}: the first {num:,} of {num + len(rest):,} rows were checked; the others are when they are drawn"
    return replace(
        data,
        items=ConcatRows([data.items, unchecked]),
        warnings=(*data.warnings, remark),
        unchecked=(unchecked,),
    )


def _mixed_kinds(found: str) -> UserError:
    return UserError(
        "some rows hold pairs and others answers judged one by one", found=found, remedy="use sources of one kind"
    )


def load_prompts(
    config: DataConfig | None,
    rows: Iterable[Any] | None,
    codec: TextCodec,
    context: int,
    key: str,
    *,
    check_all: bool = False,
) -> PromptData:
    """Reads and tokenises prompts that leave room for at least one token of ``context``."""
    # One per source, in their order. Prompts of a single source keep their ids when others join it as further sources.
    prefixes = chain(["p"], (f"s{n}p" for n in count(1)))
    of_section = defaultdict[str, str](lambda: next(prefixes))

    def read(rows: Iterator[DataRow], how: ReadOptions, codec: TextCodec, limit: TokenLimit, first: int) -> PromptData:
        return prompt_reader(rows, how, codec, limit, first, of_section[how.section])

    return read_data(config, rows, codec, context - 1, key, read, check_all=check_all)


def demonstration_reader(
    rows: Iterator[DataRow], how: ReadOptions, codec: TextCodec, limit: TokenLimit, _: int
) -> SFTData:
    return SFTData.build(demonstrations(rows, how), codec, limit)


def pair_reader(
    rows: Iterator[DataRow], how: ReadOptions, codec: TextCodec, limit: TokenLimit, _: int
) -> PreferenceData:
    return PreferenceData.build(preferences(rows, how), codec, limit)


def pair_or_judgement_reader(
    rows: Iterator[DataRow], how: ReadOptions, codec: TextCodec, limit: TokenLimit, first: int
) -> PreferenceData | JudgedData:
    """Reads pairs, or answers judged one by one, as the first row has it."""
    head = list(islice(rows, 1))
    rows = chain(head, rows)
    if head and has_judgements(head, how):
        return JudgedData.build(judgements(rows, how), codec, limit)
    return pair_reader(rows, how, codec, limit, first)


def prompt_reader(
    rows: Iterator[DataRow], how: ReadOptions, codec: TextCodec, limit: TokenLimit, first: int, prefix: str = "p"
) -> PromptData:
    return PromptData.build(prompts(rows, how), codec, limit, prefix, first)


def choose_reader(recipe: Recipe) -> Reader[Any]:
    """Returns how a job reads the rows that it trains on; prompts are those of the jobs that sample."""
    match recipe:
        case SFTRecipe():
            return demonstration_reader
        case RewardModelRecipe():
            return pair_reader
        case PreferenceRecipe():
            return pair_or_judgement_reader
        case _:
            reader = all_jobs()[recipe_job(recipe)].reader
            return prompt_reader if reader is None else load_object(reader)(recipe)


def longest_group(data: PreferenceData | JudgedData, *, share: bool) -> int:
    """Returns the most tokens that have to stay in one micro-batch: a row's answers and its prompt, once for all where
    shared."""
    prompts_R, answers_RA = data.lengths[:, 0], data.lengths[:, 1:]
    return int(((1 if share else answers_RA.shape[1]) * prompts_R + answers_RA.sum(1)).max())
