"""pydantic's complaints about a recipe as one readable error."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ValidationError

from quartet.config.errors import UserError
from quartet.config.nearest import nearest
from quartet.config.schema import dotted_fields, item_annotation, members, tags
from quartet.config.synonyms import synonyms

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
"""Mistakes that are explained; a hostile request has hundreds of thousands."""


def explain(error: ValidationError, model: type[BaseModel], label: str) -> UserError:
    """All of ``error`` as one ``UserError``; paths are written as overrides would be."""
    details = error.errors(include_url=False)[:_MOST]
    # A default that follows from a field which has a mistake of its own.
    mistakes = [_mistake(detail, model) for detail in details if detail["type"] != "default_factory_not_called"]
    if len(mistakes) == 1:
        found, remedy = mistakes[0]
        return UserError(f"{label} is not valid", found=found, remedy=remedy)
    numbered = list(enumerate(mistakes, start=1))
    return UserError(
        f"{label} is not valid in {'at least ' * (error.error_count() > _MOST)}{len(mistakes)} places",
        found="".join(f"\n    {n}. {found}" for n, (found, _) in numbered),
        remedy="".join(f"\n    {n}. {remedy}" for n, (_, remedy) in numbered),
    )


def _mistake(detail: Any, root: type[BaseModel]) -> tuple[str, str]:
    """What was found and what to do, for one of pydantic's error dictionaries."""
    path, parent, annotation = _place(detail["loc"], root)
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(path, parent, root, value)
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


def _unknown_key(path: str, parent: type[BaseModel] | None, root: type[BaseModel], value: Any) -> tuple[str, str]:
    """Offers what another system's key is called here, then the nearest key of the same section, then the same key
    elsewhere, then all keys of the section. Of an unknown section, what its only key is called here.
    """
    section, _, key = path.rpartition(".")
    known = list(parent.model_fields) if parent is not None else []
    where = f"in {section}" if section else "at the top"
    fields = dict(dotted_fields(root))
    names = list(fields)
    inner, last = path, key
    while isinstance(value, dict) and len(value) == 1:
        ((last, value),) = value.items()
        inner += f".{last}"
    elsewhere = _likeliest(inner, [name for name in names if name.rpartition(".")[2] == last])
    meant = synonyms(last, section, names)
    if inner != path and nearest(key, known) is None:
        meant = _likeliest(inner, meant) or elsewhere
    remedy = f"did you mean {', '.join(meant[:3])}?" if meant else nearest(key, known)
    if len(meant) == 1 and fields[meant[0]].description:
        remedy = f"did you mean {meant[0]}? ({fields[meant[0]].description})"
    if any(name.split(".") == ["0" if part.isdecimal() else part for part in path.split(".")] for name in elsewhere):
        remedy = f"that key belongs to another choice of {section}; use one of {', '.join(known)}"
    elif remedy is None and elsewhere:
        remedy = f"did you mean {', '.join(elsewhere[:3])}?"
    return f"unknown key {key!r} {where}", remedy or f"use one of {', '.join(known)}"


def _likeliest(path: str, names: list[str]) -> list[str]:
    """Those of ``names`` that have most words of ``path``, and of these those with the fewest others; keys of rewards
    last, of which any may be meant.
    """

    def words(name: str) -> set[str]:
        return set(re.split(r"[._]", name))

    def shared(name: str) -> tuple[int, int]:
        return len(words(path) & words(name)), -len(words(name) - words(path))

    most = max(map(shared, names), default=(0, 0))
    found = [name for name in names if shared(name) == most]
    return sorted(found, key=lambda name: ("rewards" in name, name.count(".")))
