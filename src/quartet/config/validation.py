"""pydantic's complaints about a recipe as one readable error."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError

from quartet.config.errors import UserError
from quartet.config.nearest import nearest
from quartet.config.schema import dotted_fields, flatten, item_annotation, members, tags
from quartet.config.synonyms import answer, likeliest, synonyms

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text (put it into quotes)",
    "tuple_type": "a list",
    "list_type": "a list",
    "finite_number": "a finite number",
}

_MOST = 100
"""Mistakes that are told; a request to a server may have any number."""


def explain(error: ValidationError, model: type[BaseModel], label: str) -> UserError:
    """All of ``error`` as one ``UserError``; paths are written as overrides would be."""
    details = error.errors(include_url=False)[:_MOST]
    # A default that follows from a field which has a mistake of its own.
    details = [detail for detail in details if detail["type"] != "default_factory_not_called"]
    mistakes = [mistake for detail in details for mistake in _mistakes(detail, model)]
    if len(mistakes) == 1:
        found, remedy = mistakes[0]
        return UserError(f"{label} is not valid", found=found, remedy=remedy)
    lines = (f"\n    {n}. {found}: {remedy}" for n, (found, remedy) in enumerate(mistakes, 1))
    return UserError(
        f"{label} is not valid in {'at least ' * (error.error_count() > _MOST)}{len(mistakes)} places",
        found="".join(lines),
        remedy="change each as it says there",
    )


def _mistakes(detail: Any, root: type[BaseModel]) -> list[tuple[str, str]]:
    """What was found and what to do: one for each of pydantic's error dictionaries, but one for every key of an unknown
    section.
    """
    if detail["type"] != "extra_forbidden":
        return [_mistake(detail, root)]
    path, parent, _ = _place(detail["loc"], root)
    return _unknown_keys(path, parent, root, detail["input"])


def _mistake(detail: Any, root: type[BaseModel]) -> tuple[str, str]:
    """What was found and what to do, for one of pydantic's error dictionaries."""
    path, _, annotation = _place(detail["loc"], root)
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "missing":
        return f"{path} is missing", f"set {path}"
    is_other = kind == "union_tag_not_found" and not isinstance(value, dict)
    if is_other or kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{path}: {_show(value)}", _section_remedy(path, annotation, value)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        field, by_tag = tags(members(annotation))
        choices = str(context.get("expected_tags") or ", ".join(by_tag))
        found = f"{path}.{field} is missing" if kind == "union_tag_not_found" else f"{path}.{field}: {context['tag']}"
        close = nearest(str(context.get("tag", "")), choices.replace("'", "").split(", "))
        return found, close or f"set {path}.{field} to one of {choices}"
    if kind == "literal_error":
        return f"{path}: {_show(value)}", f"use one of {context['expected']}"
    if kind == "value_error":
        return (f"{path}: " if path else "") + detail["msg"].removeprefix("Value error, "), "change one of these values"
    expected = _EXPECTED.get(kind)
    if expected is not None:
        return f"{path}: {_show(value)}", f"{path} takes {expected}"
    return f"{path}: {_show(value)}", detail["msg"].replace("Input should be", f"{path} must be")


def _show(value: Any) -> str:
    return f"{shortened(value)} ({type(value).__name__})"


def shortened(value: Any) -> str:
    """``repr(value)`` in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _place(loc: tuple[Any, ...], root: type[BaseModel]) -> tuple[str, type[BaseModel] | None, Any]:
    """The dotted path of an error, the model that holds its last key, and what that key takes.

    pydantic's location of a value inside a tagged union also names the member; a user's path does not.
    """
    shown: list[str] = []
    annotation: Any = root
    parent: type[BaseModel] | None = None
    for part in loc:
        models = members(annotation)
        if len(models) > 1:
            by_tag = tags(models)[1]
            if part in by_tag:
                annotation = by_tag[part]
                continue
        shown.append(str(part))
        parent = models[0] if len(models) == 1 else None
        if isinstance(part, int):
            annotation = item_annotation(annotation)
        elif parent is not None and part in parent.model_fields:
            annotation = parent.model_fields[part].annotation
        else:
            annotation = None
    return ".".join(shown), parent, annotation


def _section_remedy(path: str, annotation: Any, value: Any) -> str:
    """What to write where a section is given as one value."""
    models = members(annotation)
    if callable(value) and path.startswith("rewards"):
        return "pass functions to the trainer: rewards=[…]"
    if len(models) > 1:
        tag, known = tags(models)
        close = value.lower() if isinstance(value, str) and value.lower() in known else None
        return f"write {path}.{tag}={close}" if close else f"set {path}.{tag} to one of {', '.join(known)}"
    keys = list(models[0].model_fields) if models else []
    if "path" in keys and isinstance(value, str):
        return f"write {path}.path={value}"
    return f"{path} takes a mapping" + (f" of {', '.join(keys)}" if keys else "")


def _unknown_keys(
    path: str, parent: type[BaseModel] | None, root: type[BaseModel], value: Any
) -> list[tuple[str, str]]:
    """Offers what another system's key is called here, then the nearest key of the same section, then the same key
    elsewhere, then what is known of the sections around it, then all keys of the section. A section is taken apart
    where something is known of its keys.
    """
    section, _, name = path.rpartition(".")
    known = list(parent.model_fields) if parent is not None else []
    fields = _fields(root)
    inner = flatten(value, path) if isinstance(value, dict) else {}
    keys = list(dict.fromkeys(re.sub(r"(\.\d+)+$", "", key) for key in inner)) or [path]
    if _of_a_choice(path, fields):
        meant = [name for name in synonyms(path, fields) if name.rpartition(".")[2] in known]
        remedy = f"did you mean {meant[0]}?" if meant else f"use one of {', '.join(known)}"
        return [(_unknown(path), f"that key belongs to another choice of {section}; {remedy}")]
    near = nearest(name, known)
    told = {key: _foreign(key, fields) for key in keys}
    above = {key: _of_sections(key, path, fields) for key in keys}
    if near is None or any(told.values()) or any(above.values()):
        told = {key: told[key] or _elsewhere(key, fields) or above[key] for key in keys}
    if any(told.values()):
        return [(_unknown(key), remedy or f"use one of {', '.join(known)}") for key, remedy in told.items()]
    return [(_unknown(path), near or f"use one of {', '.join(known)}")]


def _unknown(path: str) -> str:
    section, _, key = path.rpartition(".")
    return f"unknown key {key!r} {f'in {section}' if section else 'at the top'}"


@cache
def _fields(root: type[BaseModel]) -> dict[str, str | None]:
    """Every key of a recipe with its description; of a name that several choices have, the first's."""
    found: dict[str, str | None] = {}
    for name, field in dotted_fields(root):
        found.setdefault(name, field.description)
    return found


def _of_a_choice(path: str, fields: Iterable[str]) -> bool:
    """Whether a choice has the key at ``path``."""
    return ".".join("0" if part.isdecimal() else part for part in path.split(".")) in fields


def _foreign(path: str, fields: Mapping[str, str | None]) -> str | None:
    """What to do about another system's key."""
    return _did_you_mean(synonyms(path, fields), fields) or answer(path, fields)


def _elsewhere(path: str, fields: Mapping[str, str | None]) -> str | None:
    """What to do about a key that other sections have."""
    key = path.rpartition(".")[2]
    return _did_you_mean(likeliest([name for name in fields if name.rpartition(".")[2] == key], path), fields)


def _of_sections(key: str, path: str, fields: Mapping[str, str | None]) -> str | None:
    """What is known of the sections of another system that hold ``key``, from the innermost out to ``path``."""
    section = key.rpartition(".")[0]
    while section and len(section) >= len(path):
        if (found := _foreign(section, fields)) is not None:
            return found
        section = section.rpartition(".")[0]
    return None


def _did_you_mean(names: list[str], fields: Mapping[str, str | None]) -> str | None:
    if len(names) == 1 and fields[names[0]]:
        return f"did you mean {names[0]}? ({fields[names[0]]})"
    return f"did you mean {', '.join(names[:3])}?" if names else None
