"""What a run directory says about itself: ``run.json``, ``recipe.yaml`` and ``.lock``, checked before it is taken.

Where a job's output goes, and whether it goes on with a run that is there:

==================  =====================  ==============================  ==================================
``output_dir``      ``resume=False``       ``resume=True``                 ``resume="auto"``
==================  =====================  ==============================  ==================================
not set             a new dated directory  refused                         refused
holds no run        starts                 starts, and says so             starts
holds one           refused                goes on                         goes on
holds a done one    refused                writes its model once more      the command only reports it
==================  =====================  ==============================  ==================================

One that was to have other steps, done or not, goes on to these where its learning rate does not depend on them.

Also the commits that a recipe's names of the hub mean, which a resume keeps, and the model card (``README.md``) of an
exported model: what it is, how to load it, and what it was made of.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar

import torch
import yaml
from safetensors import SafetensorError

from quartet.config import UserError
from quartet.config.common import HubConfig, ModelConfig, StrictModel
from quartet.config.engines import BaseSpeculationConfig
from quartet.config.errors import read_error, read_file, write_error
from quartet.config.evaluation import ComparisonConfig
from quartet.config.load import dump_recipe
from quartet.config.plugins import plugin_entries, storage_for
from quartet.config.recipe import Recipe, RLRecipe
from quartet.config.run import SupervisedRecipe
from quartet.config.strict import flatten, is_url
from quartet.config.yamls import parse_yaml
from quartet.observe.files import (
    FileDigest,
    digest_files,
    find_changed_file,
    replace_atomically,
    seal_json,
    unseal_json,
)
from quartet.remote.hub import pin_revision, split_name
from quartet.text.loading import expand_local_path

UNTESTED_TORCH = "2.14"
FREE_KEYS = (
    "output_dir",
    "log",
    "callbacks",
    "checkpoint",
    "cluster",
    "processes",
    "nodes",
    "offload",
    "weight_sync",
    "device",
    "ptx.prefetch",
    "algorithm.dynamic_sampling.max_prompts_factor",
)
"""Recipe keys that may differ when a run is resumed, beside ``sharding`` and token budgets of any role: they change no
weight, or (``device``, ``processes``, ``nodes``, ``sharding``, budgets) its last bits only."""

OTHER_LENGTH = "other_length"
"""Beside what a ``run.json`` says: the run was to have more steps, or fewer."""
MARKER, RECIPE, SUMMARY, MODELS = "run.json", "recipe.yaml", "summary.json", "models.json"
Resume = bool | Literal["auto"]


@contextlib.contextmanager
def naming_write_errors(path: Path) -> Iterator[None]:
    """Turns a failure to write ``path`` (disk full, no permission, …) into a UserError with its own remedy."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise write_error(path, error) from error


def recipe_job(recipe: Recipe) -> str:
    return str(getattr(recipe, "job", "run"))


def output_path(output_dir: str | None, job: str, resume: Resume) -> Path:
    """Returns ``output_dir``, or a dated directory where it is not set; of a URL the directory here in which the run
    works.

    Raises:
        UserError: a run is to be resumed, and nothing says where it is.
    """
    if output_dir:
        return storage_for(output_dir).work_dir() if is_url(output_dir) else Path(output_dir)
    default = Path("runs") / f"{job}-{datetime.now():%Y%m%d-%H%M%S}"
    if resume:
        raise UserError(
            "nothing says which run to go on with",
            found=f"{'--resume=auto' if resume == 'auto' else '--resume'}, and output_dir is not set: every start "
            f"would have a directory of its own ({default})",
            remedy="set output_dir, in the recipe or as output_dir=DIR",
        )
    return default


def completed_run(recipe: Recipe, resume: Resume) -> tuple[Path, dict[str, Any]] | None:
    """Returns, under ``auto``, the directory and ``summary.json`` of this very run, where it is done. Of a URL it is a
    copy.

    Raises:
        UserError: the directory holds another run.
    """
    if resume != "auto":
        return None
    if is_url(recipe.output_dir):
        path = storage_for(str(recipe.output_dir)).records((MARKER, RECIPE, SUMMARY))
    else:
        path = output_path(recipe.output_dir, recipe_job(recipe), resume)
    marker = inspect_run(path, recipe, resume=True)
    if marker is None or marker["status"] != "done" or marker[OTHER_LENGTH]:
        return None
    return find_summary(path)


def find_summary(path: Path) -> tuple[Path, dict[str, Any]] | None:
    """Returns the directory and its ``summary.json``; None where that is not there or damaged, and so must be made
    again."""
    try:
        summary = read_json(path / SUMMARY)
    except UserError:
        return None
    return (path, summary) if isinstance(summary, dict) and summary.get("stages") else None


def inspect_run(path: Path, recipe: Recipe, *, resume: bool) -> dict[str, Any] | None:
    """Returns the ``run.json`` of the run in ``path``, and whether it was to have another length; None where there is
    no run.

    Raises:
        UserError: what is there must not be touched: another run, other files, a run that is not to be resumed.
    """
    job = recipe_job(recipe)
    try:
        if not path.exists():
            return None
        if not path.is_dir():
            raise UserError(
                f"output_dir {path} is not a directory",
                found="a file",
                remedy="choose another output_dir",
            )
        present = [entry.name for entry in path.iterdir() if not entry.name.startswith(".")]
    except OSError as error:
        raise read_error(path, error) from error
    if MARKER not in present:
        # A run killed in its first instant leaves only its recipe.
        if set(present) <= {RECIPE}:
            return None
        if "checkpoints" in present and RECIPE in present:
            raise _damaged(path / MARKER, "it is missing")
        raise UserError(
            f"output_dir {path} is not empty and holds no run",
            found=", ".join(sorted(present)[:5]),
            remedy="choose another output_dir",
        )
    found = _read_marker(path / MARKER)
    if not resume:
        raise UserError(
            f"output_dir {path} already holds a run",
            found=f"job {found['job']}, status {found['status']}, created {found['created']}",
            remedy="add --resume to go on with it, or choose another output_dir",
        )
    return {**found, OTHER_LENGTH: _check_same_recipe(path, found, recipe, job)}


def read_json(path: Path) -> Any:
    """Returns the value in a JSON file.

    Raises:
        UserError: it cannot be read, or holds no JSON text.
    """
    try:
        return json.loads(read_file(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"no JSON text ({str(error)[:100]})") from error


def completed_stage(path: Path, tell: Callable[[str], object]) -> dict[str, Any] | None:
    """Returns the one stage in ``summary.json`` of a job that is part of a larger one; None where it has to go on.

    That is also where its models are not as it left them, which ``tell`` is told: a job that goes on from its last
    checkpoint writes them once more.
    """
    if (found := find_summary(path)) is None:
        return None
    if changed := _changed_model(path):
        tell(f"{path / changed} is not what the stage has written: it writes it anew")
        return None
    return dict(found[1]["stages"][0])


def write_models(path: Path) -> None:
    """Writes ``models.json``: the digests of the files in ``model/``, ``critic/`` and a drafter's folder, sealed.

    Raises:
        OSError: a file cannot be read, or this one not written.
    """
    digests = {
        f"{name}/{file}": asdict(digest)
        for name in ("model", "critic", *sorted({kind.folder for kind in plugin_entries("drafters").values()}))
        for file, digest in digest_files(path / name).items()
    }
    if digests:
        replace_atomically(path / MODELS, seal_json({"files": digests}))


def write_digests(directory: Path) -> None:
    """Writes ``models.json`` in a model directory of its own; raises as ``write_models``."""
    (directory / MODELS).unlink(missing_ok=True)  # a copy's
    if digests := {name: asdict(digest) for name, digest in digest_files(directory).items()}:
        replace_atomically(directory / MODELS, seal_json({"files": digests}))


def _changed_model(path: Path, prefix: str = "", suffix: str = "") -> str | None:
    """Returns the first file of the models with such a name that has changed; earlier versions did not say what they
    had written."""
    if not os.path.lexists(path / MODELS):
        return None
    try:
        files = unseal_json(read_file(path / MODELS))["files"]
    except (UserError, ValueError):
        return MODELS
    found = {name: digest for name, digest in files.items() if name.startswith(prefix) and name.endswith(suffix)}
    return find_changed_file(path, {name: FileDigest(**digest) for name, digest in found.items()})


def verify_model_digests(directory: Path) -> None:
    """Compares the weights in a model directory with the digests that were written with them, in it or in its run.

    Users may edit what is beside the weights; and what no run has written has no digests.

    Raises:
        UserError: they have changed.
    """
    for place, prefix in ((directory, ""), (directory.parent, f"{directory.name}/")):
        if (changed := _changed_model(place, prefix, ".safetensors")) is not None:
            raise UserError(
                f"the weights in {directory} are not those that were written there",
                found=f"{place / changed} has another content (SHA-256) than {place / MODELS} says",
                remedy=f"write them anew from a checkpoint (quartet export RUN --step N DIR) or a copy; where you have "
                f"changed them on purpose, delete {place / MODELS}",
            )


def _read_marker(marker: Path) -> dict[str, Any]:
    found = read_json(marker)
    keys = ("job", "status", "created")
    if not isinstance(found, dict) or not all(isinstance(found.get(key), str) for key in keys):
        raise _damaged(marker, f"it does not say {', '.join(keys)}")
    return found


def _damaged(path: Path, found: str) -> UserError:
    remedy = "restore it from a copy, or choose another output_dir"
    return UserError(f"{path} is damaged: what this run is cannot be known", found=found, remedy=remedy)


def _check_same_recipe(path: Path, found: Mapping[str, Any], recipe: Recipe, job: str) -> bool:
    """Tells whether the run was to have another length, which only constant learning rates allow; all else is
    refused."""
    if found["job"] != job:
        raise UserError(
            f"{path} cannot be resumed as {job}",
            found=f"job {found['job']}",
            remedy=f"run `quartet {found['job']}`, or choose another output_dir",
        )
    changed = changed_keys(read_recipe(path / RECIPE), parse_yaml(dump_recipe(recipe)))
    if not differs_only_in_length(recipe, changed):
        raise UserError(
            f"{path} was started with another recipe",
            found="; ".join(changed[:5]),
            remedy=f"resume with the recipe saved beside it ({RECIPE}), or choose another output_dir",
        )
    if changed and (courses := _courses(recipe)):
        raise UserError(
            f"{path} cannot have another length: its learning rate depends on it",
            found="; ".join([*changed, *courses]),
            remedy=f"train on in a run of its own, from {path / 'model'}; with schedule: constant runs can go on",
        )
    return bool(changed)


def differs_only_in_length(recipe: Recipe, changed: Sequence[str]) -> bool:
    """Tells whether nothing else of what ``changed_keys`` found would have to stay as it was."""
    keys = ("steps:", "epochs:") if isinstance(recipe, SupervisedRecipe) else ("steps:",)
    has_length = isinstance(recipe, SupervisedRecipe | RLRecipe)
    return not changed or (has_length and all(key.startswith(keys) for key in changed))


def _courses(recipe: Recipe) -> list[str]:
    """Returns the learning rates that fall towards the last step, by their keys."""
    has_critic = isinstance(recipe, RLRecipe) and recipe.algorithm.name == "ppo"
    values = flatten(recipe.model_dump(mode="json"))
    schedules = {key: value for key, value in values.items() if key.endswith("optim.schedule") and value != "constant"}
    return [f"{key}: {value}" for key, value in schedules.items() if has_critic or not key.startswith("critic.")]


def read_recipe(path: Path) -> Any:
    try:
        return parse_yaml(read_file(path).decode("utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _damaged(path, f"no YAML text ({str(error)[:100]})") from error


def check_resumable(path: Path, found: Mapping[str, Any], resolved: Mapping[str, str]) -> None:
    """Refuses to go on in another compute dtype than a run began with, which ``auto`` may stand for elsewhere.

    Args:
        found: the run's ``run.json``.
        resolved: what this process would have in the place of ``auto``.

    Raises:
        UserError: they differ.
    """
    then = flatten(read_recipe(path / RECIPE)) | dict(found.get("resolved") or {})
    for key, now in resolved.items():
        if key.rpartition(".")[2] == "precision" and then.get(key) not in (None, "auto", now):
            raise UserError(
                f"{path} was begun in another precision",
                found=f"{key}: {then[key]} then, {now} on {resolved['device']}",
                remedy=f"set {key}: {then[key]}, or choose another output_dir",
            )


def changed_keys(saved: Any, current: Any) -> list[str]:
    """Returns ``key: value then, value now`` for every key whose difference changes what is trained, by name.

    A precision of ``auto`` differs from none: ``check_resumable`` compares what it stands for. Two paths in one place
    beside the run's directory do not differ either: a stage may move with the run that it is part of.
    """
    then, now = flatten(saved), flatten(current)
    free_keys: tuple[str, ...] = FREE_KEYS
    if "asynchronous" not in (then.get("placement.type"), now.get("placement.type")):
        free_keys += ("placement",)  # where roles work changes no weight; how far generation is ahead does
    return [
        f"{key}: {then.get(key)} then, {now.get(key)} now"
        for key in sorted(set(then) | set(now))
        if then.get(key) != now.get(key)
        and _from_run(then, key) != _from_run(now, key)
        and not any(f"{key}.".startswith(f"{free}.") for free in free_keys)
        and ".sharding." not in f".{key}."
        and not key.endswith("token_budget")
        and not (key.rpartition(".")[2] == "precision" and "auto" in (then.get(key), now.get(key)))
    ]


def _from_run(recipe: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a flat recipe; of a path beside its ``output_dir`` what follows, which is equal to no
    value."""
    value, beside = recipe.get(key), os.path.dirname(str(recipe.get("output_dir") or "").rstrip("/"))
    if beside and isinstance(value, str) and value.startswith(f"{beside}/"):
        return (value.removeprefix(beside),)
    return value


def lock_run(path: Path) -> TextIO:
    """Takes the lock file of a run, open and locked; closing it gives the run back.

    Raises:
        UserError: another process has it.
        OSError: the file cannot be made, or the file system knows no locks.
    """
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise UserError(
            f"{path.parent} is in use",
            found="another process is running this job now",
            remedy="wait for it, or choose another output_dir",
        ) from error
    return file


def software_versions() -> dict[str, str]:
    """Returns the versions of the software that runs, of torch with its build (``2.13.0+cpu``), which the installed
    package does not always name."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return found | {package: version(package) for package in ("quartet-rl", "transformers")}


def untested_torch() -> str | None:
    """Returns the remark on a torch that is newer than those with which the tests were run."""
    if torch.__version__ < UNTESTED_TORCH:
        return None
    return (
        f"torch {torch.__version__} is newer than the versions that quartet-rl was tested with (below {UNTESTED_TORCH})"
    )


def write_json(path: Path, value: object) -> None:
    """Writes atomically: a reader sees the old file or the new one."""
    with naming_write_errors(path):
        replace_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


R = TypeVar("R", bound=Recipe)
_SAID = ("eval/", "loss/", "reward/", "kl/", "sft/", "reward_model/", "preference/", "process_reward/")
"""Figures of the last step that say how well it learned; seconds, memory and such are left out."""


def pin_hub_names(recipe: R, former: object, tell: Callable[[str], object]) -> tuple[R, dict[str, str]]:
    """Returns the recipe with ``owner/name@commit`` in the place of every name of the hub; and these by their keys.

    Args:
        former: the same of the run that goes on, whose commits stay; anything else where none does.
        tell: told of a hub that does not answer.

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
        """Returns ``value`` with pinned names, at ``key`` of the recipe."""
        dot = f"{key}." if key else ""
        if isinstance(value, tuple):
            return tuple(self.section(each, f"{dot}{number}") for number, each in enumerate(value))
        if not isinstance(value, StrictModel):
            return value
        changes = {name: self.section(getattr(value, name), f"{dot}{name}") for name in value.model_fields_set}
        if isinstance(value, HubConfig):
            named = "model" if isinstance(value, ComparisonConfig) else "path"
            changes |= {"revision": None, named: self._name(f"{dot}{named}", getattr(value, named), value.revision)}
            if getattr(value, "tokenizer", None) is not None:
                changes["tokenizer"] = self._name(f"{dot}tokenizer", changes["tokenizer"], None, "tokenizer")
        if isinstance(value, BaseSpeculationConfig) and hasattr(value, "path"):
            changes["path"] = self._name(
                f"{dot}path", value.path, None, "drafter", plugin_entries("drafters")[value.type].folder
            )
        changes = {name: new for name, new in changes.items() if new != getattr(value, name)}
        return value.model_copy(update=changes) if changes else value

    def _name(
        self, key: str, name: str | None, revision: str | None, what: str = "model", part: str = "model"
    ) -> str | None:
        if name is None:
            return None
        full = name if revision is None else f"{name}@{revision}"
        try:
            if expand_local_path(full, what, part) is not None:
                return name
        except UserError:
            if revision is not None:
                raise
            return name  # who loads it says what is wrong
        then = self._former.get(key)
        if isinstance(then, str) and split_name(then)[0] == split_name(full)[0]:
            found = then
        else:
            found, remark = pin_revision(full, weights=what != "tokenizer")
            if remark is not None:
                self._tell(remark)
        self.commits[key] = found
        return found


# The model card -------------------------------------------------------------------------------------------


def write_cards(path: Path, recipe: Recipe, pinned: Recipe, summary: Mapping[str, Any]) -> None:
    """Writes a card into the model and the adapters that the run in ``path`` has exported; a link to another run's
    keeps its own.

    Args:
        pinned: the recipe with the commits of its models.
        summary: of the run, as ``summary.json`` has it.

    Raises:
        OSError: it cannot be written.
    """
    for folder in (path / "model", path / "adapter"):
        if folder.is_dir() and not folder.is_symlink():
            (folder / "README.md").write_text(model_card(folder, recipe, pinned, summary), encoding="utf-8")


def model_card(folder: Path, recipe: Recipe, pinned: Recipe, summary: Mapping[str, Any]) -> str:
    """Makes the card of the model in ``folder``: metadata as the hub has it, then text."""
    start: ModelConfig | None = getattr(pinned.actor if isinstance(pinned, RLRecipe) else pinned, "model", None)
    is_adapter = (folder / "adapter_config.json").is_file()
    method = [str(part.name) for key in ("algorithm", "loss") if (part := getattr(recipe, key, None)) is not None]
    metadata = {
        "library_name": "peft" if is_adapter else "transformers",
        **({"base_model": split_name(start.path)[0]} if start is not None and split_name(start.path)[1] else {}),
        "tags": ["quartet", str(summary["job"]), *method],
    }
    begun = "a model passed from Python" if start is None else f"`{start.path}`"
    last: Mapping[str, float] = summary["stages"][-1]["metrics"]
    figures = [f"- `{name}` {value:.4g}" for name, value in last.items() if name.startswith(_SAID)]
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---\n\n# {folder.parent.name}",
        f"Trained by `quartet {' '.join([str(summary['job']), *method])}` from {begun}, seed {summary['seed']}.",
        "## Last figures\n\n" + "\n".join(figures),
        f"## Recipe\n\n````yaml\n{dump_recipe(recipe.model_copy(update={'output_dir': None}))}````",
        "## Versions\n\n" + ", ".join(f"{name} {version}" for name, version in summary["versions"].items()),
    ]
    return "\n\n".join(parts) + "\n"
