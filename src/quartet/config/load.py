"""Recipe files: read, override, fill in defaults, validate, and write again.

Paths inside a recipe (data, models, reward functions) are relative to the current directory, as on a command
line, not to the recipe's folder.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from quartet.config.choices import EngineConfig
from quartet.config.common import StrictModel
from quartet.config.engines import NativeEngineConfig
from quartet.config.errors import UserError, read_error
from quartet.config.nearest import missing_file_error, suggest_name
from quartet.config.plugins import all_jobs, recipe_classes
from quartet.config.run import Recipe
from quartet.config.strict import (
    as_user_error,
    choose_union_member,
    discriminator_values,
    dotted_fields,
    item_annotation,
    short_repr,
    union_members,
)
from quartet.config.yamls import describe_yaml_error, dump_yaml, parse_yaml


@cache
def job_methods() -> Mapping[str, Mapping[str, Any]]:
    """Returns the jobs that have a choice of methods, and the choices."""
    return {
        name: discriminator_values(union_members(dict(dotted_fields(recipe_classes()[name]))[job.methods].annotation))[
            1
        ]
        for name, job in all_jobs().items()
        if job.methods is not None
    }


def unknown_job_error(name: str) -> UserError:
    """Makes the error for a job that there is not."""
    remedy = suggest_name(name, all_jobs()) or f"use one of {', '.join(all_jobs())}"
    return UserError("there is no such job", found=repr(name), remedy=remedy)


def load_recipe(job: str, path: str | Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """Loads the validated recipe of ``job`` from a YAML file and dotted overrides.

    A section that is given in part keeps the defaults of *its place*: ``algorithm: {name: grpo, kl: {coef:
    0.1}}`` keeps GRPO's own estimator. (``evaluation.sampling`` is completed by ``RLRecipe``.)

    Args:
        job: its command.
        path: the YAML file; None starts from an empty recipe.
        overrides: ``actor.train.optim.lr=1e-6``, values in YAML, lists by index (``rewards.0.weight=2``; the
            index after the last appends); ``@fragment.yaml`` sets all keys of that file.

    Raises:
        UserError: anything wrong with file, overrides or values; all mistakes in values are listed at once.
    """
    data = _overridden(job, path, overrides)
    label = "the recipe" if path is None else f"recipe {path}"
    if data.get("job", job) != job:
        found = f"job: {data['job']}, asked for {job}"
        raise UserError(f"{label} is for another job", found=found, remedy="run that job, or change `job:`")
    model = recipe_classes()[job]
    try:
        # Through JSON: strict there still takes a list for a tuple, but no "3" for 3 and no true for 1.
        return model.model_validate_json(json.dumps(_with_defaults(model, data)), strict=True)
    except ValidationError as error:
        raise as_user_error(error, model, label) from None


def read_job_name(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """Returns the job that a recipe says it is for, under ``job``.

    Raises:
        UserError: it says none, or cannot be read.
    """
    job = _overridden("sft", path, overrides).get("job")
    if not isinstance(job, str) or job not in all_jobs():
        raise UserError(
            "the recipe does not say which job it is for",
            found=f"{path}: job: {job}" if job is not None else f"{path} has no `job:`",
            remedy=f"write `job: sft` into it, or add job=sft; one of {', '.join(all_jobs())}",
        )
    return job


class _Served(StrictModel):
    engine: EngineConfig = NativeEngineConfig(process=True)


def load_engine(overrides: Sequence[str]) -> EngineConfig:
    """Makes the engine of a server, of ``key=value`` as under ``rollout.engine`` of a recipe; native in a process by
    itself.

    Raises:
        UserError: anything wrong with keys or values.
    """
    data: dict[str, Any] = {}
    for override in overrides:
        _apply(data, f"engine.{override}")
    try:
        return _Served.model_validate_json(json.dumps(_with_defaults(_Served, data)), strict=True).engine
    except ValidationError as error:
        raise as_user_error(error, _Served, "the engine") from None


def _overridden(job: str, path: str | Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Reads the keys of a recipe with overrides, not checked yet."""
    if job not in all_jobs():
        raise unknown_job_error(job)
    data = {} if path is None else _read(Path(path), f"write one with `quartet init {job} > recipe.yaml`")
    for override in overrides:
        if override.startswith("@"):
            _merge(data, _read(Path(override.removeprefix("@"))))
        else:
            _apply(data, override)
    return data


def asks_for_ray(job: str, path: str | Path, overrides: Sequence[str]) -> bool:
    """Tells whether the recipe says that its processes are those of Ray, whatever else is wrong with it.

    Raises:
        UserError: it cannot be read.
    """
    cluster = _overridden(job, path, overrides).get("cluster")
    return isinstance(cluster, dict) and cluster.get("type") == "ray"


def dump_recipe(recipe: Recipe) -> str:
    """Writes YAML with every value written out, so that loading it gives an equal recipe whatever the
    defaults become.
    """
    return dump_yaml(recipe.model_dump(mode="json"))


def _read(path: Path, otherwise: str | None = None) -> dict[str, Any]:
    """Reads the keys of a recipe or fragment; ``otherwise``: what to do where there is none and none with a similar
    name.
    """
    try:
        if not path.is_file():
            raise missing_file_error("there is no such recipe", path, otherwise)
        value = parse_yaml(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise read_error(path, error) from None
    except yaml.YAMLError as error:
        complaint, line = describe_yaml_error(error)
        place = f"{path}" if line is None else f"{path}, line {line}"
        raise UserError(
            "the recipe is not valid YAML", found=f"{place}: {complaint}", remedy="mend that line"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError("the recipe is not UTF-8 text", found=f"{path}: {error}", remedy="save it as UTF-8") from None
    if isinstance(value, dict | None):
        return value or {}
    found = f"{path}: {short_repr(value)} ({type(value).__name__})"
    raise UserError("a recipe is a mapping of keys to values", found=found, remedy="write lines like `steps: 100`")


def _merge(data: dict[str, Any], fragment: dict[str, Any]) -> None:
    """Sets the fragment's keys, section by section; a section of another kind is replaced, and so is a list."""
    for key, value in fragment.items():
        former: Any = data.get(key)
        are_sections = isinstance(former, dict) and isinstance(value, dict)
        if are_sections and all(value[tag] == former.get(tag) for tag in ("type", "name") if tag in value):
            _merge(former, value)
        else:
            data[key] = value


def _apply(data: dict[str, Any], override: str) -> None:
    """Writes one ``a.b.0.c=value`` into ``data``, making the sections on the way."""
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise UserError(
            "an override is written key=value, or @fragment.yaml",
            found=short_repr(override),
            remedy="for example actor.train.optim.lr=1e-6",
        )
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        raise UserError(
            f"the value of override {dotted} is not valid YAML",
            found=f"{short_repr(text)}: {describe_yaml_error(error)[0]}",
            remedy=f"quote it twice, for the shell and for YAML: {dotted}='\"…\"'",
        ) from None
    if isinstance(value, str) and text.lstrip()[:1] not in ("'", '"', "|", ">", "!", "&"):
        value = text.lstrip()  # the shell's quotes are enough: YAML drops line breaks, comments and spaces at the end
    here: Any = data
    for depth, key in enumerate(keys):
        is_last = depth == len(keys) - 1
        following = value if is_last else [] if keys[depth + 1].isdecimal() else {}
        here = _child(here, key, following, override, ".".join(keys[:depth]), replace=is_last)


def _child(here: Any, key: str, value: Any, override: str, place: str, *, replace: bool = False) -> Any:
    """Returns ``here[key]``, set to ``value`` where it is missing, null, or to be replaced."""
    if isinstance(here, list):
        if not key.isdecimal() or int(key) > len(here):
            raise UserError(
                f"override {override!r} does not fit the list {place}",
                found=f"{key!r} for a list of {len(here)}",
                remedy=f"use an index from 0 to {len(here)} (the last one appends)",
            )
        if int(key) == len(here):
            here.append(copy.deepcopy(value))
        elif replace:
            here[int(key)] = value
        return here[int(key)]
    if not isinstance(here, dict):
        raise UserError(
            f"override {override!r} goes through a value that has no parts",
            found=f"{place} is {here!r}",
            remedy=f"override {place} itself, or correct the path",
        )
    if replace or here.get(key) is None:
        here[key] = value
    return here[key]


def _with_defaults(model: type[BaseModel], data: dict[str, Any], place: BaseModel | None = None) -> dict[str, Any]:
    """Fills partly given sections of ``data`` from the defaults of their place.

    Needed because pydantic takes a partly given section's missing keys from the section's class, not from the
    default of the field that holds it. ``place`` is that default, where there is one.
    """
    # Values that follow from other fields, which may be about to change.
    derived = {name for name, field in model.model_fields.items() if field.default_factory_takes_validated_data}
    filled = {} if place is None else place.model_dump(mode="json", exclude=derived - place.model_fields_set)
    filled.update(data)
    for name, field in model.model_fields.items():
        if name not in data:
            continue
        if place is not None:
            default = getattr(place, name)
        else:
            is_plain = not field.is_required() and name not in derived
            default = field.get_default(call_default_factory=True) if is_plain else None
        filled[name] = _fill(field.annotation, data[name], default)
    return filled


def _fill(annotation: Any, value: Any, default: Any) -> Any:
    if isinstance(value, list):
        inner = item_annotation(annotation)
        return [_fill(inner, item, None) for item in value]
    if not isinstance(value, dict) or not union_members(annotation):
        return value
    if isinstance(default, BaseModel) and choose_union_member(annotation, {**default.model_dump(), **value}) is type(
        default
    ):
        return _with_defaults(type(default), value, default)
    member = choose_union_member(annotation, value)
    return value if member is None else _with_defaults(member, value)
