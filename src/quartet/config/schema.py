"""What a typed recipe says about its own shape: sections, members of tagged unions, dotted keys."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def members(annotation: Any) -> list[type[BaseModel]]:
    """The models an annotation allows directly: one for a section, several for a tagged union, none for a
    scalar.
    """
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return [model for part in get_args(annotation) for model in members(part)]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return []


def item_annotation(annotation: Any) -> Any:
    """What a list-like annotation holds (``tuple[X, ...]``, ``list[X]``), else None."""
    found = bare(annotation)
    return get_args(found)[0] if get_origin(found) in (tuple, list) and get_args(found) else None


def bare(annotation: Any) -> Any:
    """Without ``Annotated``."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def tags(models: list[type[BaseModel]]) -> tuple[str, dict[str, type[BaseModel]]]:
    """The field that tells the members of a tagged union apart, and its values.

    It is called ``type``, or ``name`` where there is no such field: a source of reward has both.
    """
    name = "type" if "type" in models[0].model_fields else "name"
    return name, {tag: model for model in models for tag in get_args(model.model_fields[name].annotation)}


def chosen_member(annotation: Any, value: dict[str, Any]) -> type[BaseModel] | None:
    """The model that ``value`` is meant for; None where its tag is missing or unknown."""
    models = members(annotation)
    if len(models) < 2:
        return models[0] if models else None
    name, by_tag = tags(models)
    tag = value.get(name)
    return by_tag.get(tag) if isinstance(tag, str) else None


def dotted_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of a recipe, ``actor.train.optim.lr`` for a nested one, with its field; list items stand as ``0``."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        inner = item_annotation(field.annotation)
        below = members(field.annotation) or members(inner)
        for member in below:
            yield from dotted_fields(member, f"{prefix}{name}." + ("0." if inner is not None else ""))


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings and lists as one mapping with dotted keys."""
    if isinstance(value, Mapping):
        pairs = [(str(k), v) for k, v in value.items()]
    elif isinstance(value, list):
        pairs = [(str(i), v) for i, v in enumerate(value)]
    else:
        return {prefix: value}
    return {k: v for key, child in pairs for k, v in flatten(child, f"{prefix}.{key}" if prefix else key).items()}
