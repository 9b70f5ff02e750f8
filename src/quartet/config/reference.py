"""Every key of every job: its address, type, unit, default and meaning, read off the recipes themselves.

`quartet config` prints what is collected here, docs/reference holds it, and shell completion offers the names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from quartet.config.describe import choices, held_models, inline, meaning, purpose, type_words, unit, value_annotation
from quartet.config.errors import UserError
from quartet.config.jobs import jobs, recipes
from quartet.config.nearest import nearest
from quartet.config.schema import dotted_fields, item_annotation, tags
from quartet.config.synonyms import synonyms


@cache
def methods() -> Mapping[str, Mapping[str, Any]]:
    """Jobs that have a choice of methods, and the choices."""
    return {
        name: choices(dict(dotted_fields(recipes()[name]))[job.methods].annotation)
        for name, job in jobs().items()
        if job.methods is not None
    }


@dataclass(frozen=True)
class Key:
    """One key of a section.

    Args:
        default: as YAML in one line; None where it must be set.
        section: address at which the keys below it are listed, or ``job <name>``; None for a value.
    """

    name: str
    type: str
    unit: str | None
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
    def tag(self) -> str:
        return tags(list(self.models.values()))[0]

    def variant(self, name: str) -> _Place:
        model = self.models[name]
        return _Place({name: model}, self.default if type(self.default) is model else None, purpose(model))

    @property
    def variants(self) -> Iterator[str]:
        """Names of the choices, that of the default first."""
        chosen = None if self.default is None else getattr(self.default, self.tag)
        yield from sorted(self.models, key=lambda name: name != chosen)

    @property
    def model(self) -> type[BaseModel]:
        (model,) = self.models.values()
        return model


# What is asked for ---------------------------------------------------------------------------------------


def sections(job: str, address: str = "", *, variants: bool = False) -> list[Section]:
    """The sections of a job's recipe at ``address`` and below, in the order of the recipe.

    What has the keys of a section that came before is not listed again: its key names that section. A choice lists its
    variants; one that ``address`` names, as in ``algorithm.ppo``, and with ``variants`` all of them, their keys too.

    Raises:
        UserError: no such job, or nothing at that address; the nearest names are given.
    """
    name, place, key = _find(job, address)
    if key is not None:
        return [Section(name.rpartition(".")[0], "", (key,))]
    return list(_walk(name, place, variants, {}))


def purposes() -> dict[str, str]:
    """What each job is for, by its name."""
    return {job: purpose(recipe) for job, recipe in recipes().items()}


def meaning_at(job: str, address: str) -> str:
    """What the key, section or variant at ``address`` is for, in one line.

    Raises:
        UserError: nothing is there.
    """
    name, place, key = _find(job, address)
    above, _, last = name.rpartition(".")
    parent = _find(job, above)[1]
    if key is not None or parent.is_choice or last not in parent.model.model_fields:
        return place.meaning if key is None else key.meaning
    return meaning(parent.model, last)


def children(job: str, address: str = "") -> list[str]:
    """Names that may follow ``address`` after a dot, for completion; none at a value."""
    _, place, key = _find(job, address)
    if key is not None:
        return []
    return list(place.variants) if place.is_choice else [name for name, _ in _keys_of(place.model)]


# Walking -------------------------------------------------------------------------------------------------


Seen = dict[tuple[type[BaseModel], ...], tuple[str, BaseModel | None]]
"""The sections listed so far, each with its address and its defaults."""


def _walk(address: str, place: _Place, variants: bool, seen: Seen) -> Iterator[Section]:
    seen.setdefault(tuple(place.models.values()), (address, place.default))
    if place.is_choice:
        words = {name: purpose(model) for name, model in place.models.items()}
        yield Section(address, place.meaning, variants=words, tag=place.tag)
        if variants:
            for name in place.models:
                first, *others = _walk(_join(address, name), place.variant(name), variants, seen)
                yield replace(first, tag=f"{place.tag}: {name}")
                yield from others
        return
    keys: list[Key] = []
    open_places: list[tuple[str, _Place]] = []
    for name, info in _keys_of(place.model):
        key, below = _key(place, name, info), _below(place, name, info)
        if below is not None:
            key, is_open = _with_section(key, _join(address, name), below, seen)
            open_places += [(str(key.section), below)] if is_open else []
        keys.append(key)
    yield Section(address, place.meaning, tuple(keys))
    for where, below in open_places:
        yield from _walk(where, below, variants, seen)


def _with_section(key: Key, address: str, place: _Place, seen: Seen) -> tuple[Key, bool]:
    """The key with the address of its keys, and whether they are still to be listed there."""
    job = next((job for job, recipe in recipes().items() if not place.is_choice and recipe is place.model), None)
    if job is not None:
        return replace(key, section=f"job {job}", default=None if key.default is None else "{}"), False
    models = tuple(place.models.values())
    if models not in seen:
        seen[models] = (address, place.default)
        return replace(key, section=address, default=key.default if _is_plain(key) else ""), True
    where, default = seen[models]
    if not _is_plain(key) and not place.is_choice:
        key = replace(key, default=inline(_difference(_dump(place), _dump(replace(place, default=default)))))
    return replace(key, section=where), False


def _keys_of(model: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Keys a recipe may set; those with one possible value that nothing is said about are only tags."""
    for name, info in model.model_fields.items():
        is_tag = get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1
        if not (is_tag and not meaning(model, name)):
            yield name, info


def _key(place: _Place, name: str, info: FieldInfo) -> Key:
    default = _default(place, name, info)
    if info.is_required() and place.default is None:
        shown = None
    elif isinstance(default, BaseModel):
        shown = inline(default)
        if tagged := choices(info.annotation):
            # The name of the choice, and what else its default says differently from the choice's own defaults.
            tag = tags(list(tagged.values()))[0]
            own = type(default).model_construct().model_dump(mode="json")
            shown = inline({tag: getattr(default, tag), **_difference(default.model_dump(mode="json"), own)})
    elif default is None and info.default_factory is not None:
        shown = ""
    else:
        shown = inline(default)
    return Key(name, type_words(info), unit(name, info), shown, meaning(place.model, name))


def _below(place: _Place, name: str, info: FieldInfo) -> _Place | None:
    models = held_models(info.annotation)
    if not models:
        return None
    default = _default(place, name, info)
    by_name = choices(info.annotation) or {"": models[0]}
    words = meaning(place.model, name) if len(by_name) > 1 else purpose(models[0])
    return _Place(by_name, default if isinstance(default, BaseModel) else None, words)


def _default(place: _Place, name: str, info: FieldInfo) -> Any:
    """The key's default at its place; None too where it follows from other keys."""
    if place.default is not None:
        return None if info.default_factory_takes_validated_data else getattr(place.default, name)
    if info.is_required() or info.default_factory_takes_validated_data:
        return None
    return info.get_default(call_default_factory=True)


def _is_plain(key: Key) -> bool:
    """Whether the default is said in a word, and not by the section's own keys."""
    return key.default in (None, "null", "[]", "{}") or key.type.startswith("choice")


def _dump(place: _Place) -> dict[str, Any]:
    """Defaults of a section's keys as plain data; without those that must be set."""
    return (place.default or place.model.model_construct()).model_dump(mode="json")


def _difference(mine: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Values of ``mine`` that ``other`` has not, section by section."""
    found = {}
    for name, value in mine.items():
        if isinstance(value, dict) and isinstance(other.get(name), dict):
            value = _difference(value, other[name])
            if value:
                found[name] = value
        elif name not in other or other[name] != value:
            found[name] = value
    return found


# Addresses -----------------------------------------------------------------------------------------------


def _find(job: str, address: str) -> tuple[str, _Place, Key | None]:
    """What is at an address, under the name it has there; a key where it is a value.

    List indices may be given or left out. A key of a choice is looked for in its default first, then in the others.
    """
    if job not in jobs():
        raise no_such_job(job)
    place, name = _Place({job: recipes()[job]}, None, purpose(recipes()[job])), ""
    parts = [part for part in address.split(".") if part]
    while parts:
        part = parts.pop(0)
        if place.is_choice:
            if part.isdecimal():
                continue
            if part in place.models:
                name, place = _join(name, part), place.variant(part)
                continue
            holder = next((v for v in place.variants if part in place.models[v].model_fields), None)
            if holder is None:
                raise _unknown(job, address, part, name, place)
            name, place = _join(name, holder), place.variant(holder)
        info = place.model.model_fields.get(part)
        if info is None:
            raise _unknown(job, address, part, name, place)
        below = _below(place, part, info)
        if below is None:
            if parts:
                raise UserError(
                    f"{_join(name, part)} has no parts",
                    found=address,
                    remedy=f"quartet config {job} {_join(name, part)}",
                )
            return _join(name, part), place, _key(place, part, info)
        name, place = _join(name, part), below
        is_mapping, is_list = value_annotation(info.annotation) is not None, item_annotation(info.annotation)
        if parts and (is_mapping or (is_list is not None and parts[0].isdecimal())):
            # The name or number of one of several; a key of theirs may also follow at once.
            is_key = not parts[0].isdecimal() and any(parts[0] in model.model_fields for model in place.models.values())
            parts = parts if is_key else parts[1:]
    return name, place, None


def no_such_job(name: str) -> UserError:
    """The error for a job that there is not; ``name`` may be a method of one."""
    method = next((job for job, names in methods().items() if name in names), None)
    if method is not None:
        remedy = f"it is a method of {method}: quartet init {method} --method {name} > recipe.yaml"
    else:
        remedy = nearest(name, jobs()) or f"use one of {', '.join(jobs())}"
    return UserError("there is no such job", found=repr(name), remedy=remedy)


def _unknown(job: str, address: str, part: str, name: str, place: _Place) -> UserError:
    known = list(place.models) if place.is_choice else [key for key, _ in _keys_of(place.model)]
    names = list(dict(dotted_fields(recipes()[job])))
    elsewhere = synonyms(_join(name, part), names) or [full for full in names if full.rpartition(".")[2] == part]
    meant = nearest(part, known) or (f"did you mean {', '.join(elsewhere[:3])}?" if elsewhere else None)
    return UserError(
        f"the recipe of {job} has no {address}",
        found=f"{part!r} {f'in {name}' if name else 'at the top'}",
        remedy=meant or f"use one of {', '.join(known)}",
    )


def _join(address: str, name: str) -> str:
    return f"{address}.{name}" if address and name else address or name
