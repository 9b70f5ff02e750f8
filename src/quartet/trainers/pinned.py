"""The commits of a recipe's models on the hub: found as a run begins, kept in ``run.json`` and by a resume."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from quartet.config import UserError
from quartet.config.common import HubConfig, Strict
from quartet.config.evaluation import ComparisonConfig
from quartet.config.recipe import Recipe
from quartet.config.speculation import DRAFTERS, Speculation
from quartet.remote.hub import current_commit, pin, split_name
from quartet.text.loading import local_directory

R = TypeVar("R", bound=Recipe)


def pinned(recipe: R, former: object, tell: Callable[[str], object]) -> tuple[R, dict[str, str]]:
    """The recipe with ``owner/name@commit`` in the place of every name of the hub; and these by their keys.

    Args:
        former: the same of the run that goes on, whose commits stay; anything else where none does.
        tell: told of a branch that has moved since, and of a hub that does not answer.

    Raises:
        UserError: a model cannot be fetched; where workers of other machines load it, they say so.
    """
    pins = _Pins(former if isinstance(former, Mapping) else {}, tell)
    workers_load = getattr(getattr(recipe, "cluster", None), "type", None) == "ray"
    with contextlib.suppress(UserError) if workers_load else contextlib.nullcontext():
        recipe = pins.section(recipe, "")
    return recipe, pins.commits


class _Pins:
    def __init__(self, former: Mapping[str, Any], tell: Callable[[str], object]) -> None:
        self.commits: dict[str, str] = {}
        self._former, self._tell = former, tell

    def section(self, value: Any, key: str) -> Any:
        """``value`` with pinned names, at ``key`` of the recipe."""
        dot = f"{key}." if key else ""
        if isinstance(value, tuple):
            return tuple(self.section(each, f"{dot}{number}") for number, each in enumerate(value))
        if not isinstance(value, Strict):
            return value
        changes = {name: self.section(getattr(value, name), f"{dot}{name}") for name in value.model_fields_set}
        if isinstance(value, HubConfig):
            named = "model" if isinstance(value, ComparisonConfig) else "path"
            changes |= {"revision": None, named: self._name(f"{dot}{named}", getattr(value, named), value.revision)}
            if getattr(value, "tokenizer", None) is not None:
                changes["tokenizer"] = self._name(f"{dot}tokenizer", changes["tokenizer"], None, "tokenizer")
        if isinstance(value, Speculation) and hasattr(value, "path"):
            changes["path"] = self._name(f"{dot}path", value.path, None, "drafter", DRAFTERS[value.type].folder)
        changes = {name: new for name, new in changes.items() if new != getattr(value, name)}
        return value.model_copy(update=changes) if changes else value

    def _name(
        self, key: str, name: str | None, revision: str | None, what: str = "model", part: str = "model"
    ) -> str | None:
        if name is None:
            return None
        full = name if revision is None else f"{name}@{revision}"
        try:
            if local_directory(full, what, part) is not None:
                return name
        except UserError:
            if revision is not None:
                raise
            return name  # who loads it says what is wrong
        repo, asked = split_name(full)
        found, then = None, self._former.get(key)
        if isinstance(then, str) and split_name(then)[0] == repo:
            found, now = then, current_commit(full)
            if now is not None and now != split_name(then)[1]:
                self._tell(
                    f"{repo}: {asked or 'main'} is now at {now[:12]}; the run goes on with the commit that it began "
                    f"with, {str(split_name(then)[1])[:12]}"
                )
        if found is None:
            found, remark = pin(full, weights=what != "tokenizer")
            if remark is not None:
                self._tell(remark)
        self.commits[key] = found
        return found
