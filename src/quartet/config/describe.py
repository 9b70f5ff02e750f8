"""One key of a recipe in words: type, unit, default and meaning, all read off its pydantic field."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt, MinLen, Unit
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from quartet.config.schema import bare, item_annotation, members, tags
from quartet.config.units import IN_NAMES
from quartet.config.yamls import parse_yaml

_SCALARS = {int: "integer", float: "number", bool: "true or false", str: "text", SecretStr: "text"}
_BOUNDS = {Ge: ("≥", "ge"), Gt: (">", "gt"), Le: ("≤", "le"), Lt: ("<", "lt")}


def meaning(model: type[BaseModel], name: str) -> str:
    """What the key ``name`` of ``model`` is for, in one line; '' where nothing says it.

    A key that a variant only gives another default keeps its parent's words; a section is described by its class.
    """
    for parent in model.__mro__:
        fields = getattr(parent, "__pydantic_fields__", {})
        if name in fields and fields[name].description:
            return _plain(fields[name].description)
    held = held_models(model.model_fields[name].annotation)
    return purpose(held[0]) if len(held) == 1 else ""


def purpose(model: type[BaseModel]) -> str:
    """The first paragraph of a class's docstring, in one line."""
    text = inspect.cleandoc(model.__dict__.get("__doc__") or "")
    return _plain(text.partition("\n\n")[0])


def unit(name: str, field: FieldInfo) -> str | None:
    """What a number counts: said by a ``Unit`` of its type, or by the last word of its name."""
    found = [part for part in (*_metadata(field.annotation), *field.metadata) if isinstance(part, Unit)]
    if found:
        return found[0].unit
    is_number = _words(field.annotation).startswith(("integer", "number"))
    return IN_NAMES.get(name.rpartition("_")[2]) if is_number else None


def type_words(field: FieldInfo) -> str:
    """The type as a reader of YAML would say it: ``integer ≥ 1``, ``fp32 | bf16``, ``list of texts``."""
    words = _bounded(_words(field.annotation), field.metadata)
    is_optional = type(None) in get_args(bare(field.annotation))
    return f"{words}, or null" if is_optional and field.default is not None else words


def inline(value: Any) -> str:
    """``value`` as YAML in one line, which ``parse_yaml`` reads back."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{inline(key)}: {inline(part)}" for key, part in value.items()) + "}"
    if isinstance(value, str):
        return value if _stands_bare(value) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, Sequence):
        return "[" + ", ".join(inline(part) for part in value) + "]"
    return _number(value) if isinstance(value, int | float) else "null"


def held_models(annotation: Any) -> list[type[BaseModel]]:
    """The models of a section: its own, those of a list's items, or those of a mapping's values."""
    found = members(annotation) or members(item_annotation(annotation)) or members(value_annotation(annotation))
    return list(dict.fromkeys(found))


def value_annotation(annotation: Any) -> Any:
    """What a mapping holds (``dict[str, X]``), else None."""
    found = bare(annotation)
    return get_args(found)[1] if get_origin(found) is dict else None


def choices(annotation: Any) -> dict[str, type[BaseModel]]:
    """The variants of a tagged union by their tag; empty for anything else."""
    models = held_models(annotation)
    return tags(models)[1] if len(models) > 1 else {}


def _bounded(words: str, metadata: Iterable[Any]) -> str:
    """``words`` with the bounds among a type's metadata."""
    for part in metadata:
        for kind, (sign, attribute) in _BOUNDS.items():
            if isinstance(part, kind):
                comma = "," if words[-1].isdigit() else ""
                words += f"{comma} {sign} {_number(getattr(part, attribute))}"
        if isinstance(part, MinLen):
            words += ", not empty"
        if isinstance(part, FieldInfo):
            words = _bounded(words, part.metadata)
    return words


def _words(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        return _bounded(_words(inner), metadata)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(inline(part) for part in arguments)
    if origin in (Union, types.UnionType):
        if len(members(annotation)) > 1:
            return f"choice by {tags(members(annotation))[0]}"
        return " or ".join(dict.fromkeys(_words(part) for part in arguments if part is not type(None)))
    if origin in (tuple, list):
        if len(arguments) > 1 and arguments[1] is not Ellipsis:
            each = [_words(part) for part in arguments]
            return f"{len(each)} {_plural(each[0])}" if len(set(each)) == 1 else f"[{', '.join(each)}]"
        return f"list of {_plural(_words(arguments[0]))}"
    if origin is dict:
        return f"mapping of {_words(arguments[0])} to {_words(arguments[1])}"
    if members(annotation):
        return "section"
    return _SCALARS.get(annotation, "any value")


def _plural(words: str) -> str:
    noun, space, rest = words.partition(" ")
    return f"{noun}s{space}{rest}" if noun in ("integer", "number", "section", "text", "choice") else words


def _metadata(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from get_args(annotation)[1:]
    for part in get_args(annotation):
        yield from _metadata(part)


def _number(value: float) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return re.sub(r"e([-+])0+", r"e\1", repr(value))


def _stands_bare(text: str) -> bool:
    if not re.fullmatch(r"[\w./-]([\w ./*-]*[\w./*-])?", text):
        return False
    try:
        return bool(parse_yaml(text) == text)
    except yaml.YAMLError:
        return False


def _plain(text: str) -> str:
    """A docstring's words in one line, with single backticks."""
    return " ".join(text.replace("``", "`").split())
