"""The base of every section of a recipe, and what its numbers count (shown by `quartet config`, checked nowhere).

What a typed recipe says about its own shape: sections, members of tagged unions, dotted keys.

pydantic's complaints about a recipe as one readable error.

Addresses of servers and of objects in recipes.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Self, Union, get_args, get_origin

from annotated_types import Unit
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from quartet.config.errors import UserError
from quartet.config.nearest import suggest_name


def union_members(annotation: Any) -> list[type[BaseModel]]:
    """Returns the models an annotation allows directly: one for a section, several for a tagged union, none for a
    scalar.
    """
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return [model for part in get_args(annotation) for model in union_members(part)]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return []


def item_annotation(annotation: Any) -> Any:
    """Returns what a list-like annotation holds (``tuple[X, ...]``, ``list[X]``), else None."""
    found = strip_annotated(annotation)
    return get_args(found)[0] if get_origin(found) in (tuple, list) and get_args(found) else None


def strip_annotated(annotation: Any) -> Any:
    """Returns an annotation without ``Annotated``."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def discriminator_values(models: list[type[BaseModel]]) -> tuple[str, dict[str, type[BaseModel]]]:
    """Returns the field that tells the members of a tagged union apart, and its values.

    It is called ``type``, or ``name`` where there is no such field: a source of reward has both.
    """
    name = "type" if "type" in models[0].model_fields else "name"
    return name, {tag: model for model in models for tag in get_args(model.model_fields[name].annotation)}


def choose_union_member(annotation: Any, value: dict[str, Any]) -> type[BaseModel] | None:
    """Returns the model that ``value`` is meant for; None where its tag is missing or unknown."""
    models = union_members(annotation)
    if len(models) < 2:
        return models[0] if models else None
    name, by_tag = discriminator_values(models)
    tag = value.get(name)
    return by_tag.get(tag) if isinstance(tag, str) else None


def dotted_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields every key of a recipe, ``actor.train.optim.lr`` for a nested one, with its field; list items stand as
    ``0``.
    """
    for name, field in model.model_fields.items():
        yield prefix + name, field
        inner = item_annotation(field.annotation)
        below = union_members(field.annotation) or union_members(inner)
        for member in below:
            yield from dotted_fields(member, f"{prefix}{name}." + ("0." if inner is not None else ""))


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Writes nested mappings and lists as one mapping with dotted keys."""
    if isinstance(value, Mapping):
        pairs = [(str(k), v) for k, v in value.items()]
    elif isinstance(value, list):
        pairs = [(str(i), v) for i, v in enumerate(value)]
    else:
        return {prefix: value}
    return {k: v for key, child in pairs for k, v in flatten(child, f"{prefix}.{key}" if prefix else key).items()}


def as_user_error(error: ValidationError, model: type[BaseModel], label: str) -> UserError:
    """Makes one ``UserError`` of all of ``error``; paths are written as overrides would be."""
    details = error.errors(include_url=False)
    # A default that follows from a field which has a mistake of its own.
    details = [detail for detail in details if detail["type"] != "default_factory_not_called"]
    mistakes = [_mistake(detail, model) for detail in details]
    if len(mistakes) == 1:
        found, remedy = mistakes[0]
        return UserError(f"{label} is not valid", found=found, remedy=remedy)
    lines = (f"\n    {n}. {found}: {remedy}" for n, (found, remedy) in enumerate(mistakes, 1))
    return UserError(
        f"{label} is not valid in {len(mistakes)} places",
        found="".join(lines),
        remedy="change each as it says there",
    )


def _mistake(detail: Any, root: type[BaseModel]) -> tuple[str, str]:
    """Tells what was found and what to do, for one of pydantic's error dictionaries."""
    path, parent, annotation = _place(detail["loc"], root)
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(path, parent, root)
    if kind == "missing":
        return f"{path} is missing", f"set {path}"
    is_other = kind == "union_tag_not_found" and not isinstance(value, dict)
    if is_other or kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{path}: {_show(value)}", _section_remedy(path, annotation, value)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        field, by_tag = discriminator_values(union_members(annotation))
        choices = str(context.get("expected_tags") or ", ".join(by_tag))
        found = f"{path}.{field} is missing" if kind == "union_tag_not_found" else f"{path}.{field}: {context['tag']}"
        close = suggest_name(str(context.get("tag", "")), choices.replace("'", "").split(", "))
        return found, close or f"set {path}.{field} to one of {choices}"
    if kind == "value_error":
        return (f"{path}: " if path else "") + detail["msg"].removeprefix("Value error, "), "change one of these values"
    needed = detail["msg"].replace("Input should be", f"{path} must be")
    needed = re.sub("valid (array|tuple)", "list", needed).replace("a valid string", "text (put it into quotes)")
    return f"{path}: {_show(value)}", needed


def _show(value: Any) -> str:
    return f"{short_repr(value)} ({type(value).__name__})"


def short_repr(value: Any) -> str:
    """Returns ``repr(value)`` in at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _place(loc: tuple[Any, ...], root: type[BaseModel]) -> tuple[str, type[BaseModel] | None, Any]:
    """Returns the dotted path of an error, the model that holds its last key, and what that key takes.

    pydantic's location of a value inside a tagged union also names the member; a user's path does not.
    """
    shown: list[str] = []
    annotation: Any = root
    parent: type[BaseModel] | None = None
    for part in loc:
        models = union_members(annotation)
        if len(models) > 1:
            by_tag = discriminator_values(models)[1]
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
    """Tells what to write where a section is given as one value."""
    models = union_members(annotation)
    if len(models) > 1:
        tag, known = discriminator_values(models)
        return f"set {path}.{tag} to one of {', '.join(known)}"
    keys = list(models[0].model_fields) if models else []
    if "path" in keys and isinstance(value, str):
        return f"write {path}.path={value}"
    return f"{path} takes a mapping" + (f" of {', '.join(keys)}" if keys else "")


def _unknown_key(path: str, parent: type[BaseModel] | None, root: type[BaseModel]) -> tuple[str, str]:
    """Offers the nearest key of the same section, then the same key elsewhere, then all keys of the section."""
    section, _, name = path.rpartition(".")
    known = list(parent.model_fields) if parent is not None else []
    names = list(dict.fromkeys(full for full, _ in dotted_fields(root)))
    elsewhere = [full for full in names if full.rpartition(".")[2] == name]
    belongs_to_another_choice = re.sub(r"\.\d+\.", ".0.", path) in names
    remedy = suggest_name(name, known)
    if remedy is None and elsewhere and not belongs_to_another_choice:
        remedy = f"did you mean {', '.join(elsewhere[:3])}?"
    found = f"unknown key {name!r} {f'in {section}' if section else 'at the top'}"
    return found, remedy or f"use one of {', '.join(known)}"


_ADDRESS = re.compile(r"https?://(\[[0-9a-fA-F:]+\]|[^/\s?#@:\[\]]+)(:[1-9][0-9]{0,4})?(/[^\s?#]*)?")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SECRET = re.compile(r"(^|&)(sig|[^=&#]*(signature|credential|token|key|password|secret)[^=&#]*)=", re.I)
"""Parameters of signed addresses and of services that want a key in them."""


def is_url(name: object) -> bool:
    """Tells whether a path is the URL of an object or of a directory of objects, as s3://bucket/name."""
    return isinstance(name, str) and _URL.match(name) is not None


def _holds_secret(url: str) -> bool:
    """Tells whether a URL has a user, or a parameter by whose name it is a secret."""
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    user, at, _ = place.partition("/")[0].rpartition("@")
    has_user = bool(at) and (":" in user or scheme.lower() in ("http", "https"))  # the user alone may be a token
    return has_user or _SECRET.search(query) is not None


def _http_address(url: str) -> str:
    if not _ADDRESS.fullmatch(url):
        raise ValueError(f"url is written http://host:port/path or https://…, without a query; found {url!r}")
    return url


HTTPAddress = Annotated[str, AfterValidator(_http_address)]


Tokens = Annotated[int, Unit("tokens")]
Rows = Annotated[int, Unit("rows")]
Steps = Annotated[int, Unit("steps")]
Pairs = Annotated[int, Unit("pairs")]
Batches = Annotated[int, Unit("batches")]
Prompts = Annotated[int, Unit("prompts")]
Groups = Annotated[int, Unit("groups")]
Responses = Annotated[int, Unit("responses")]
Samples = Annotated[int, Unit("samples")]
Sequences = Annotated[int, Unit("sequences")]
Processes = Annotated[int, Unit("processes")]
Devices = Annotated[int, Unit("devices")]
Nats = Annotated[float, Unit("nats")]


class StrictModel(BaseModel):
    """Frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    if not TYPE_CHECKING:  # the type checker keeps each model's own signature

        def __init__(self, /, **values: Any) -> None:
            """Raises ``UserError`` for mistakes in ``values``, with the command line's suggestions."""
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise as_user_error(error, type(self), type(self).__name__) from None

        # Tells pydantic to build nested sections without this method, so that all mistakes are listed together.
        __init__.__pydantic_base_init__ = True

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Makes a copy with other values, which are checked as those of a new recipe are.

        Raises:
            UserError: a mistake in them.
        """
        if not update:
            return super().model_copy(deep=deep)
        return type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | dict(update))

    @field_validator("path", "output_dir", "tokenizer", "chat_template", mode="before", check_fields=False)
    @classmethod
    def _path_as_text(cls, value: object) -> object:
        return str(value) if isinstance(value, PurePath) else value

    def _misfits(self) -> Iterator[str]:
        """Yields reasons why the values do not fit together, of which the first is told; after those of the parents."""
        yield from ()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if is_url(value) and _holds_secret(value):
                raise ValueError(
                    f"{name} is a URL with a password or token, which would be saved with the run: give it in the "
                    "environment or in fsspec's configuration (docs/storage.md), or bring the file to this machine"
                )
        for reason in self._misfits():
            raise ValueError(reason)
        return self
