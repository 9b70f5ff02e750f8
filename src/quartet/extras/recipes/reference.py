"""Every key of every job: its address, type, default and meaning, read off the recipes' pydantic fields.

`quartet config` prints what is collected here, and docs/reference holds it. At the end the recipes of `quartet init`,
whose comments are the keys' own descriptions.
"""

from __future__ import annotations

import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen, Unit
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from quartet.config.algorithms import PPO, BestOfN, Distillation, RewardedAlgorithm
from quartet.config.errors import UserError
from quartet.config.load import job_methods, unknown_job_error
from quartet.config.nearest import guess_columns, suggest_name
from quartet.config.plugins import StarterRecipe, all_jobs, load_object, recipe_classes
from quartet.config.preference import KTOLoss
from quartet.config.strict import (
    choose_union_member,
    discriminator_values,
    item_annotation,
    strip_annotated,
    union_members,
)
from quartet.config.yamls import dump_yaml_inline

_SCALARS = {int: "integer", float: "number", bool: "true or false", str: "text"}
_BOUNDS = {Ge: ("≥", "ge"), Gt: (">", "gt"), Le: ("≤", "le"), Lt: ("<", "lt")}


@dataclass(frozen=True)
class Key:
    """One key of a section.

    Args:
        default: as YAML in one line; None where it must be set.
        section: address at which the keys below it are listed, or ``job <name>``; None for a value.
    """

    name: str
    type: str
    default: str | None
    meaning: str
    section: str | None = None


@dataclass(frozen=True)
class Section:
    """A section with its keys, or the choices of a tagged union.

    Args:
        address: dotted, as in overrides; '' for the whole recipe.
        variants: for a choice, what each of its values is for.
        tag: the key that tells them apart, and in the section of a variant what it then says.
    """

    address: str
    meaning: str
    keys: tuple[Key, ...] = ()
    variants: Mapping[str, str] = field(default_factory=dict)
    tag: str = ""


@dataclass(frozen=True)
class _Place:
    """Something with keys below it: one model, or the variants of a choice; with the default that it has here."""

    models: Mapping[str, type[BaseModel]]
    default: BaseModel | None
    meaning: str

    @property
    def is_choice(self) -> bool:
        return len(self.models) > 1

    @property
    def model(self) -> type[BaseModel]:
        return next(iter(self.models.values()))

    @property
    def tag(self) -> str:
        return discriminator_values([self.model])[0]

    def variant(self, name: str) -> _Place:
        model = self.models[name]
        return _Place({name: model}, self.default if type(self.default) is model else None, purpose(model))


# One key in words -------------------------------------------------------------------------------------------


def meaning(model: type[BaseModel], name: str) -> str:
    """Says in one line what the key ``name`` of ``model`` is for; '' where nothing says it.

    A key that a variant only gives another default keeps its parent's words; a section is described by its class.
    """
    for parent in model.__mro__:
        fields = getattr(parent, "__pydantic_fields__", {})
        if name in fields and fields[name].description:
            return _plain(fields[name].description)
    held = _held_models(model.model_fields[name].annotation)
    return purpose(held[0]) if len(held) == 1 else ""


def purpose(model: type[BaseModel]) -> str:
    """Returns the first paragraph of a class's docstring, in one line."""
    return _plain(inspect.cleandoc(model.__dict__.get("__doc__") or "").partition("\n\n")[0])


def _plain(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def type_words(info: FieldInfo) -> str:
    """Says the type as a reader of YAML would: ``integer (tokens) ≥ 1``, ``fp32 | bf16``, ``list of text``."""
    words = _bounded(_words(info.annotation), info.metadata)
    is_optional = type(None) in get_args(strip_annotated(info.annotation))
    return f"{words}, or null" if is_optional and info.default is not None else words


def _bounded(words: str, metadata: Iterable[Any]) -> str:
    for part in metadata:
        if isinstance(part, FieldInfo):
            words = _bounded(words, part.metadata)
        elif isinstance(part, Unit):
            words += f" ({part.unit})"
        elif isinstance(part, MinLen):
            words += ", not empty"
        elif type(part) in _BOUNDS:
            sign, attribute = _BOUNDS[type(part)]
            words += f"{',' * words[-1].isdigit()} {sign} {dump_yaml_inline(getattr(part, attribute))}"
    return words


def _words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _bounded(_words(arguments[0]), arguments[1:])
    if origin is Literal:
        return " | ".join(dump_yaml_inline(part) for part in arguments)
    if origin in (Union, types.UnionType):
        if len(union_members(annotation)) > 1:
            return f"choice by {discriminator_values(union_members(annotation))[0]}"
        return " or ".join(dict.fromkeys(_words(part) for part in arguments if part is not type(None)))
    if origin in (tuple, list):
        each = [_words(part) for part in arguments if part is not Ellipsis]
        return f"list of {each[0]}" if len(each) == 1 else f"[{', '.join(each)}]"
    if origin is dict:
        return f"mapping of {_words(arguments[0])} to {_words(arguments[1])}"
    return "section" if union_members(annotation) else _SCALARS.get(annotation, "any value")


def _held_models(annotation: Any) -> list[type[BaseModel]]:
    """Returns the models of a section: its own, those of a list's items, or those of a mapping's values."""
    found = union_members(annotation) or union_members(item_annotation(annotation))
    if not found and get_origin(strip_annotated(annotation)) is dict:
        found = union_members(get_args(strip_annotated(annotation))[1])
    return list(dict.fromkeys(found))


def _choices(annotation: Any) -> dict[str, type[BaseModel]]:
    """Returns the variants of a tagged union by their tag; empty for anything else."""
    models = _held_models(annotation)
    return discriminator_values(models)[1] if len(models) > 1 else {}


# What is asked for ---------------------------------------------------------------------------------------


def sections(job: str, address: str = "", *, variants: bool = False) -> list[Section]:
    """Lists the sections of a job's recipe at ``address`` and below, in the order of the recipe.

    What has the keys and defaults of a section that came before is not listed again: its key names that section. A
    choice lists its variants; one that ``address`` names, as in ``algorithm.ppo``, and with ``variants`` all of them,
    their keys too.

    Raises:
        UserError: no such job, or nothing at that address.
    """
    if job not in all_jobs():
        raise unknown_job_error(job)
    asked = ".".join(part for part in address.split(".") if not part.isdecimal())
    above, _, name = asked.rpartition(".")
    for where, as_override, place in _all_places(job):
        if asked in (where, as_override):
            return list(_walk(where, place, variants, []))
        info = None if place.is_choice else place.model.model_fields.get(name)
        if above in (where, as_override) and info is not None and _below(place, name, info) is None:
            return [Section(where, "", (_key(place, name, info),))]
    keys = [(above, key) for _, above, one in _all_places(job) if not one.is_choice for key in _keys_of(one.model)]
    near = suggest_name(asked, dict.fromkeys(_join(*parts) for parts in keys))
    remedy = near or f"quartet config {job} lists its keys"
    raise UserError(f"the recipe of {job} has no such part", found=address, remedy=remedy)


@cache
def _all_places(job: str) -> list[tuple[str, str, _Place]]:
    return list(_places("", "", _Place({job: recipe_classes()[job]}, None, purpose(recipe_classes()[job]))))


def _places(where: str, as_override: str, place: _Place) -> Iterator[tuple[str, str, _Place]]:
    """Yields a place and all below it, with their addresses: with names of variants, and without, as overrides have
    them.
    """
    yield where, as_override, place
    if place.is_choice:
        for name in sorted(place.models, key=lambda one: type(place.default) is not place.models[one]):
            yield from _places(_join(where, name), as_override, place.variant(name))
        return
    for name, info in _keys_of(place.model).items():
        if (inner := _below(place, name, info)) is not None:
            yield from _places(_join(where, name), _join(as_override, name), inner)


def purposes() -> dict[str, str]:
    """Says what each job is for, by its name."""
    return {job: purpose(recipe) for job, recipe in recipe_classes().items()}


def _walk(
    address: str, place: _Place, variants: bool, seen: list[tuple[str, Any, BaseModel | None]]
) -> Iterator[Section]:
    seen.append((address, place.models, place.default))
    if place.is_choice:
        words = {name: purpose(model) for name, model in place.models.items()}
        yield Section(address, place.meaning, variants=words, tag=place.tag)
        for name in place.models if variants else ():
            first, *others = _walk(_join(address, name), place.variant(name), variants, seen)
            yield replace(first, tag=f"{place.tag}: {name}")
            yield from others
        return
    keys: list[Key] = []
    below: list[tuple[str, _Place]] = []
    for name, info in _keys_of(place.model).items():
        key, inner, where = _key(place, name, info), _below(place, name, info), _join(address, name)
        if inner is not None:
            job = next(
                (job for job, recipe in recipe_classes().items() if not inner.is_choice and recipe is inner.model), None
            )
            known = (old for old, models, default in seen if _is_same(inner, models, default))
            listed = f"job {job}" if job is not None else next(known, None)
            key = replace(key, section=listed or where)
            if listed is None:
                seen.append((where, inner.models, inner.default))
                below.append((where, inner))
        keys.append(key)
    yield Section(address, place.meaning, tuple(keys))
    for where, inner in below:
        yield from _walk(where, inner, variants, seen)


def _is_same(place: _Place, models: Mapping[str, type[BaseModel]], default: BaseModel | None) -> bool:
    """Tells whether a place has the keys of one that is listed; choices list none of their defaults."""
    return place.models == models and (place.is_choice or place.default in (None, default))


def _keys_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Returns keys a recipe may set; those with one possible value that nothing is said about are only tags."""
    return {
        name: info
        for name, info in model.model_fields.items()
        if not (get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1) or meaning(model, name)
    }


def _key(place: _Place, name: str, info: FieldInfo) -> Key:
    default = _default(place, name, info)
    if info.is_required() and place.default is None:
        shown = None
    elif isinstance(default, BaseModel):
        shown = ""
        if tagged := _choices(info.annotation):  # its name, and what else it says differently from its own defaults
            tag = discriminator_values(list(tagged.values()))[0]
            changed = {tag: getattr(default, tag), **default.model_dump(mode="json", exclude_defaults=True)}
            shown = dump_yaml_inline(changed)
    elif default is None and info.default_factory is not None:
        shown = ""
    else:
        dumped = place.model.model_construct(**{name: default}).model_dump(mode="json", include={name})
        shown = dump_yaml_inline(dumped[name])
    return Key(name, type_words(info), shown, meaning(place.model, name))


def _below(place: _Place, name: str, info: FieldInfo) -> _Place | None:
    models = _held_models(info.annotation)
    if not models:
        return None
    default = _default(place, name, info)
    by_name = _choices(info.annotation) or {"": models[0]}
    words = meaning(place.model, name) if len(by_name) > 1 else purpose(models[0])
    return _Place(by_name, default if isinstance(default, BaseModel) else None, words)


def _default(place: _Place, name: str, info: FieldInfo) -> Any:
    """Returns the key's default at its place; None too where it follows from other keys."""
    if info.default_factory_takes_validated_data:
        return None
    if place.default is not None:
        return getattr(place.default, name)
    return None if info.is_required() else info.get_default(call_default_factory=True)


def _join(address: str, name: str) -> str:
    return f"{address}.{name}" if address and name else address or name


# Recipes to begin with -------------------------------------------------------------------------------------

REWARDS: Mapping[str, Mapping[str, Any]] = {
    "model": {"path": "runs/reward-model/model"},
    "process_model": {"path": "runs/process-reward/model"},
    "function": {"target": "my_rewards.py:score"},
    "exact_match": {"column": "answer"},
    "numeric": {"column": "answer"},
    "regex": {"pattern": r"answer is (\S+)", "column": "answer"},
    "format": {"tags": ["think", "answer"]},
    "length": {"max": 400, "unit": "characters"},
    "math": {"column": "answer"},
    "code": {"column": "tests", "timeout_s": 5.0},
    "http": {"url": "http://localhost:8000/score"},
    "judge": {"url": "http://localhost:8000/v1", "model": "name-at-the-server"},
}
"""By its type, what a reward must be told or is told first."""
_SUPERVISED: Mapping[str, StarterRecipe] = {
    "sft": StarterRecipe("demonstrations.jsonl", ("prompt", "completion"), {"model.path": "Qwen/Qwen2.5-0.5B"}),
    "reward-model": StarterRecipe("pairs.jsonl", ("prompt", "chosen", "rejected"), {"centring": 0.01}),
    "preference": StarterRecipe("pairs.jsonl", ("prompt", "chosen", "rejected"), {"train.optim.lr": 1e-6}),
}
_EXAMPLE = "# "
"""Before the last name of a key that is commented out."""
_WIDTH, _COLUMN = 100, 40
"""Longest line, and where comments begin."""
Row = Mapping[str, Any]


def starter(
    job: str, *, method: str | None = None, reward: str | None = None, data: str | None = None, row: Row | None = None
) -> str:
    """Writes a commented recipe of ``job`` with the keys that are changed first; it loads as it is.

    Args:
        row: the first row of ``data``, where it is there to be looked at: its columns are mapped where their names say
            what they are.

    Raises:
        UserError: no such job, method or reward, or the job has none to choose.
    """
    _check(job, "method", method, job_methods().get(job, ()))
    _check(job, "reward", reward, REWARDS if job in all_jobs() and is_rewarded(job) else ())
    if all_jobs()[job].is_supervised:
        keys, needs = _supervised(job, method or next(iter(job_methods().get(job, ())), None))
    elif job in _JOBS:
        keys, needs = _JOBS[job](method, reward)
    else:
        keys, needs = _of_plugin(_begun(job), method, reward)
    place = next(key for key in keys if key.endswith("data.path")).removesuffix("path")
    keys[f"{place}path"] = data or keys[f"{place}path"]
    if row is None:
        keys[f"{place}{_EXAMPLE}columns"] = {needs[0]: "question"}
    elif mapped := guess_columns(needs, row):
        keys[f"{place}columns"] = mapped
    keys[f"{place}overlong"] = "skip"
    called = "".join(f" --{name} {value}" for name, value in (("method", method), ("reward", reward)) if value)
    head = [
        f"# quartet {job} recipe.yaml",
        f"# Written by: quartet init {job}{called}. Every key: quartet config {job}",
        "# Lines that begin with # are examples of what else is often set.",
        f"# Columns of the data: {', '.join(needs)}; docs/data.md.",
    ]
    tree: dict[str, Any] = {}
    for address, value in {"job": job, "output_dir": f"runs/{job}", **keys}.items():
        *above, name = address.split(".")
        section = tree
        for part in above:
            section = section.setdefault(part, {})
        section[name] = value
    return "\n".join([*head, *_written(tree, recipe_classes()[job])]) + "\n"


def is_rewarded(job: str) -> bool:
    """Says whether the job scores answers, so that a kind of reward can be chosen."""
    return job in _JOBS or (job not in _SUPERVISED and _begun(job).reward is not None)


def _begun(job: str) -> StarterRecipe:
    if (named := all_jobs()[job].starter) is None:
        remedy = f"write one: quartet config {job} lists its keys"
        raise UserError("there is no recipe to begin with for this job", found=job, remedy=remedy)
    found: StarterRecipe = load_object(named)
    return found


def _check(job: str, what: str, name: str | None, known: Any) -> None:
    if job not in all_jobs():
        raise unknown_job_error(job)
    if name is not None and name not in known:
        remedy = f"use one of {', '.join(known)}" if known else f"leave --{what} out"
        remedy = suggest_name(name, known) or remedy
        raise UserError(f"{job} knows no such {what}", found=f"--{what} {name}", remedy=remedy)


# Keys of jobs by their addresses, in the order of the recipe, and columns that the data need ----------------------


def _supervised(job: str, method: str | None) -> tuple[dict[str, Any], list[str]]:
    begun = _SUPERVISED.get(job) or _begun(job)
    keys = {
        "model.path": "runs/sft/model",
        "data.path": begun.data,
        f"{_EXAMPLE}evaluation_data": {"path": "held_out.jsonl"},
    }
    if method is not None:
        loss = job_methods()[job][method]()
        shown = ("beta", "odds_coef", *(["undesirable_weight"] if isinstance(loss, KTOLoss) else []))
        keys |= {"loss.name": method} | {f"loss.{key}": getattr(loss, key) for key in shown if hasattr(loss, key)}
    size = next(name for name in recipe_classes()[job].model_fields if name.endswith("_per_step"))
    keys |= {"epochs": 1, size: 32} | (_training("train.", 1e-5) if begun.is_tuned else {})
    needs = ["prompt", "completion", "label"] if method == "kto" else list(begun.columns)
    return keys | {"train.optim.warmup_steps": 10, "train.optim.schedule": "cosine", **begun.keys}, needs


def _rl(method: str | None, reward: str | None) -> tuple[dict[str, Any], list[str]]:
    algorithm = job_methods()["rl"][method or "ppo"]()
    keys, needs = {"actor.model.path": "runs/sft/model", **_training("actor.train.", 1e-6)}, ["prompt"]
    if isinstance(algorithm, PPO):
        keys |= {"critic.train.optim.lr": 1e-5, "critic.warmup_steps": 4}
    if isinstance(algorithm, Distillation):
        keys["reference.path"] = "runs/teacher/model"
    if reward or not isinstance(algorithm, Distillation):
        kind = reward or ("model" if isinstance(algorithm, PPO) else "function")
        keys["rewards"], needs = [_reward(kind)], needs + _reward_columns(kind)
    keys["algorithm.name"] = algorithm.name
    if isinstance(algorithm, RewardedAlgorithm):
        keys["algorithm.kl.coef"] = algorithm.kl.coef
    if isinstance(algorithm, BestOfN):
        keys["algorithm.keep"] = algorithm.keep
    responses = getattr(algorithm, "default_responses", 1)
    keys |= {
        "data.path": "prompts.jsonl",
        "rollout.sampling.temperature": 1.0,
        "rollout.sampling.max_new_tokens": 256,
        f"{_EXAMPLE}evaluation": {"data": {"path": "held_out.jsonl"}},
        "steps": 100,
        "prompts_per_step": 16 if responses > 1 else 64,
        "responses_per_prompt": responses,
        "minibatches": 2,
    }
    return keys, needs


def _eval(method: str | None, reward: str | None) -> tuple[dict[str, Any], list[str]]:
    kind = reward or "function"
    keys = {
        "model.path": "runs/rl/model",
        "data.path": "held_out.jsonl",
        "rewards": [_reward(kind)],
        "sampling.temperature": 0.0,
        "sampling.max_new_tokens": 256,
        "samples_per_prompt": 1,
        f"{_EXAMPLE}compare": {"model": "runs/sft/model"},
    }
    return keys, ["prompt", *_reward_columns(kind)]


_JOBS = {"rl": _rl, "eval": _eval}


def _of_plugin(begun: StarterRecipe, method: str | None, reward: str | None) -> tuple[dict[str, Any], list[str]]:
    keys = {key: _reward(reward or "function") if key == begun.reward else value for key, value in begun.keys.items()}
    if begun.rl is None:
        return {**keys, "data.path": begun.data}, list(begun.columns)
    left_out = ("rewards", f"{_EXAMPLE}evaluation")
    rl = {f"{begun.rl}.{key}": value for key, value in _rl(method, None)[0].items() if key not in left_out}
    return keys | rl, list(begun.columns)


def _training(above: str, lr: float) -> dict[str, Any]:
    return {f"{above}{_EXAMPLE}precision": "bf16", f"{above}{_EXAMPLE}lora": {"rank": 16}, f"{above}optim.lr": lr}


def _reward(kind: str) -> dict[str, Any]:
    return {"type": kind, **REWARDS[kind]}


def _reward_columns(kind: str) -> list[str]:
    return [column for key, column in REWARDS[kind].items() if key == "column"]


def _written(section: Mapping[str, Any], model: type[BaseModel], indent: int = 0) -> Iterator[str]:
    """Writes the keys of a section as YAML, with what ``model`` says of each behind it; ``indent`` is added later."""
    for name, value in section.items():
        annotation = model.model_fields[name.removeprefix(_EXAMPLE)].annotation
        is_list = isinstance(value, list) and isinstance(value[0], dict)
        first = value[0] if is_list else value
        of_item = item_annotation(annotation) or annotation
        below = choose_union_member(of_item, first) if isinstance(first, dict) else None
        if below is not None and not name.startswith(_EXAMPLE):
            yield f"{name}:"
            for n, line in enumerate(_written(first, below, indent + 2)):
                yield ("- " if is_list and n == 0 else "  ") + line
            continue
        text = f"{name}: {dump_yaml_inline(value)}"
        comment = meaning(model, name.removeprefix(_EXAMPLE)) or purpose(model)
        column = max(_COLUMN - indent, len(text) + 2)
        words = textwrap.wrap(comment, max(_WIDTH - indent - column - 2, 24))
        yield f"{text:<{column}}# {words[0]}"
        yield from (f"{'':<{column}}# {more}" for more in words[1:])
