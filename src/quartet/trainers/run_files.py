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
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TextIO

import torch
import yaml
from safetensors import SafetensorError

from quartet.config import UserError
from quartet.config.addresses import is_url
from quartet.config.file_errors import read_error, read_file, write_error
from quartet.config.load import dump_recipe
from quartet.config.plugins import storage
from quartet.config.recipe import Recipe, RLRecipe
from quartet.config.schema import flatten
from quartet.config.speculation import DRAFTERS
from quartet.config.supervised import SupervisedRecipe
from quartet.config.yamls import parse_yaml, yaml_complaint
from quartet.observe.files import FileDigest, changed_file, digest_files, replace_atomically, seal, unseal

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
"""Recipe keys that may differ when a run is resumed, beside ``sharding`` of any role: they change no weight, or
(``device``, ``processes``, ``nodes``, ``sharding``) its last bits only."""

OTHER_LENGTH = "other_length"
"""Beside what a ``run.json`` says: the run was to have more steps, or fewer."""
MARKER, RECIPE, SUMMARY, MODELS = "run.json", "recipe.yaml", "summary.json", "models.json"
Resume = bool | Literal["auto"]


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failure to write ``path`` (disk full, no permission, …) into a UserError with its own remedy."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise write_error(path, error) from error


def job_of(recipe: Recipe) -> str:
    return str(getattr(recipe, "job", "run"))


def default_output_dir(job: str) -> Path:
    return Path("runs") / f"{job}-{datetime.now():%Y%m%d-%H%M%S}"


def output_path(output_dir: str | None, job: str, resume: Resume) -> Path:
    """``output_dir``, or a dated directory where it is not set; of a URL the directory here in which the run works.

    Raises:
        UserError: a run is to be resumed, and nothing says where it is.
    """
    if output_dir:
        return storage(output_dir).work_dir() if is_url(output_dir) else Path(output_dir)
    if resume:
        raise UserError(
            "nothing says which run to go on with",
            found=f"{'--resume=auto' if resume == 'auto' else '--resume'}, and output_dir is not set: every start "
            f"would have a directory of its own ({default_output_dir(job)})",
            remedy="set output_dir, in the recipe or as output_dir=DIR",
        )
    return default_output_dir(job)


def completed_run(recipe: Recipe, resume: Resume) -> tuple[Path, dict[str, Any]] | None:
    """Under ``auto``: the directory and ``summary.json`` of this very run, where it is done. Of a URL it is a copy.

    Raises:
        UserError: the directory holds another run.
    """
    if resume != "auto":
        return None
    if is_url(recipe.output_dir):
        path = storage(str(recipe.output_dir)).records((MARKER, RECIPE, SUMMARY))
    else:
        path = output_path(recipe.output_dir, job_of(recipe), resume)
    marker = inspect(path, recipe, resume=True)
    if marker is None or marker["status"] != "done" or marker[OTHER_LENGTH]:
        return None
    return found_summary(path)


def found_summary(path: Path) -> tuple[Path, dict[str, Any]] | None:
    """The directory and its ``summary.json``; None where that is not there or damaged, and so must be made again."""
    try:
        summary = read_json(path / "summary.json")
    except (UserError, ValueError):
        return None
    return (path, summary) if isinstance(summary, dict) and "stages" in summary else None


def inspect(path: Path, recipe: Recipe, *, resume: bool) -> dict[str, Any] | None:
    """The ``run.json`` of the run in ``path``, and whether it was to have another length; None where there is no run.

    Raises:
        UserError: what is there must not be touched: another run, other files, a run that is not to be resumed.
    """
    job = job_of(recipe)
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
            raise _damaged_marker(path / MARKER, job, "it is missing")
        raise UserError(
            f"output_dir {path} is not empty and holds no run",
            found=", ".join(sorted(present)[:5]),
            remedy="choose another output_dir",
        )
    found = _read_marker(path / MARKER, job)
    if not resume:
        raise UserError(
            f"output_dir {path} already holds a run",
            found=f"job {found['job']}, status {found['status']}, created {found['created']}",
            remedy="add --resume to go on with it, or choose another output_dir",
        )
    return {**found, OTHER_LENGTH: _check_same_recipe(path, found, recipe, job)}


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        ValueError: it holds no JSON text.
        UserError: it cannot be read.
    """
    try:
        return json.loads(read_file(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON text ({str(error)[:100]})") from error


def completed(path: Path, tell: Callable[[str], object]) -> dict[str, Any] | None:
    """The one stage in ``summary.json`` of a job that is part of a larger one; None where it has to go on.

    That is also where its summary or its models are not as it left them, which ``tell`` is told: a job that goes on
    from its last checkpoint writes them once more.
    """
    if not os.path.lexists(path / SUMMARY):
        return None
    try:
        summary = read_json(path / SUMMARY)
        stage = summary["stages"][0]
        if not (isinstance(stage["name"], str) and isinstance(stage["metrics"], dict)):
            raise TypeError("no stage")
        float(stage["seconds"])
    except (UserError, ValueError, TypeError, LookupError):
        tell(f"{path / SUMMARY} is damaged: the stage writes it anew")
        return None
    if changed := _changed_model(path):
        tell(f"{path / changed} is not what the stage has written: it writes it anew")
        return None
    return dict(stage)


def write_models(path: Path) -> None:
    """``models.json``: the digests of the files in ``model/``, ``critic/`` and a drafter's folder, sealed.

    Raises:
        OSError: a file cannot be read, or this one not written.
    """
    digests = {
        f"{name}/{file}": asdict(digest)
        for name in ("model", "critic", *sorted({kind.folder for kind in DRAFTERS.values()}))
        for file, digest in digest_files(path / name).items()
    }
    if digests:
        replace_atomically(path / MODELS, seal({"files": digests}))


def write_digests(directory: Path) -> None:
    """``models.json`` in a model directory of its own; raises as ``write_models``."""
    (directory / MODELS).unlink(missing_ok=True)  # a copy's
    if digests := {name: asdict(digest) for name, digest in digest_files(directory).items()}:
        replace_atomically(directory / MODELS, seal({"files": digests}))


def _changed_model(path: Path, prefix: str = "", suffix: str = "") -> str | None:
    """The first file of the models with such a name that has changed; earlier versions did not say what they had
    written."""
    if not os.path.lexists(path / MODELS):
        return None
    try:
        files = unseal(read_file(path / MODELS))["files"]
    except (UserError, ValueError):
        return MODELS
    found = {name: digest for name, digest in files.items() if name.startswith(prefix) and name.endswith(suffix)}
    return changed_file(path, {name: FileDigest(**digest) for name, digest in found.items()})


def check_written(directory: Path) -> None:
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


def _read_marker(marker: Path, job: str) -> dict[str, Any]:
    try:
        found = read_json(marker)
    except ValueError as error:
        raise _damaged_marker(marker, job, str(error)) from error
    if not isinstance(found, dict):
        raise _damaged_marker(marker, job, f"a {type(found).__name__} instead of an object")
    if wrong := [key for key in ("job", "status", "created") if not isinstance(found.get(key), str)]:
        raise _damaged_marker(marker, job, f"it does not say {', '.join(wrong)}")
    return found


def _damaged_marker(marker: Path, job: str, what: str) -> UserError:
    text = json.dumps({"job": job, "status": "interrupted", "created": "unknown"})
    return UserError(
        f"output_dir {marker.parent} holds no run, or one whose {MARKER} is damaged",
        found=f"{marker}: {what}",
        remedy=f"choose another output_dir; where it is this run's, restore the file or write {text} into it",
    )


def _check_same_recipe(path: Path, found: Mapping[str, Any], recipe: Recipe, job: str) -> bool:
    """Whether the run was to have another length, which only constant learning rates allow; all else is refused."""
    if found["job"] != job:
        raise UserError(
            f"{path} cannot be resumed as {job}",
            found=f"job {found['job']}",
            remedy=f"run `quartet {found['job']}`, or choose another output_dir",
        )
    changed = changed_keys(read_recipe(path / RECIPE), parse_yaml(dump_recipe(recipe)))
    if not is_other_length(recipe, changed):
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


def is_other_length(recipe: Recipe, changed: Sequence[str]) -> bool:
    """Whether nothing else of what ``changed_keys`` found would have to stay as it was."""
    keys = ("steps:", "epochs:") if isinstance(recipe, SupervisedRecipe) else ("steps:",)
    has_length = isinstance(recipe, SupervisedRecipe | RLRecipe)
    return not changed or (has_length and all(key.startswith(keys) for key in changed))


def _courses(recipe: Recipe) -> list[str]:
    """Learning rates that fall towards the last step, by their keys."""
    has_critic = isinstance(recipe, RLRecipe) and recipe.algorithm.name == "ppo"
    values = flatten(recipe.model_dump(mode="json"))
    schedules = {key: value for key, value in values.items() if key.endswith("optim.schedule") and value != "constant"}
    return [f"{key}: {value}" for key, value in schedules.items() if has_critic or not key.startswith("critic.")]


def read_recipe(path: Path) -> Any:
    try:
        return parse_yaml(read_file(path).decode("utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        text, line = yaml_complaint(error) if isinstance(error, yaml.YAMLError) else (str(error)[:100], None)
        raise UserError(
            f"{path} is damaged: what the run was started with is not known",
            found=text if line is None else f"line {line}: {text}",
            remedy="restore it from a copy, or choose another output_dir",
        ) from error


def check_resumable(path: Path, found: Mapping[str, Any], resolved: Mapping[str, str]) -> None:
    """Refuses to go on in another compute dtype than a run began with, which ``auto`` may stand for elsewhere, and with
    compiled layers: nothing promises that another process gets the same kernels.

    Args:
        found: the run's ``run.json``.
        resolved: what this process would have in the place of ``auto``.

    Raises:
        UserError: they differ, or layers are compiled.
    """
    if compiled := [key for key, value in resolved.items() if key.endswith("compile") and value == "true"]:
        raise UserError(
            f"{path} cannot be resumed: it has compiled layers",
            found=f"{compiled[0]}: true; torch does not promise that another process gets the same kernels, so the "
            "rest of the run might have other bits than without the stop",
            remedy=f"start it again in another output_dir; with {compiled[0]}: false runs can be resumed",
        )
    then = flatten(read_recipe(path / RECIPE)) | dict(found.get("resolved") or {})
    for key, now in resolved.items():
        if key.rpartition(".")[2] == "precision" and then.get(key) not in (None, "auto", now):
            raise UserError(
                f"{path} was begun in another precision",
                found=f"{key}: {then[key]} then, {now} on {resolved['device']}",
                remedy=f"set {key}: {then[key]}, or choose another output_dir",
            )


def changed_keys(saved: Any, current: Any) -> list[str]:
    """``key: value then, value now`` for every key whose difference changes what is trained, by name.

    A precision of ``auto`` differs from none: ``check_resumable`` compares what it stands for. Two paths
    in one place beside the run's directory do not differ either: a stage may move with the run that it is part of.
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
        and not (key.rpartition(".")[2] == "precision" and "auto" in (then.get(key), now.get(key)))
    ]


def _from_run(recipe: Mapping[str, Any], key: str) -> Any:
    """The value of a flat recipe; of a path beside its ``output_dir`` what follows, which is equal to no value."""
    value, beside = recipe.get(key), os.path.dirname(str(recipe.get("output_dir") or "").rstrip("/"))
    if beside and isinstance(value, str) and value.startswith(f"{beside}/"):
        return (value.removeprefix(beside),)
    return value


def take_lock(path: Path) -> TextIO:
    """The lock file of a run, open and locked; closing it gives the run back.

    Raises:
        UserError: another process has it, or the file system knows no locks.
        OSError: the file cannot be made.
    """
    # Neither followed nor emptied, and not waited for: a link or a pipe in its place must do no harm.
    file = open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666))  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise UserError(
            f"{path.parent} is in use",
            found="another process is running this job now",
            remedy="wait for it, or choose another output_dir",
        ) from error
    except OSError as error:
        file.close()
        raise UserError(
            f"{path.parent} cannot be locked, so that another process could write there at the same time",
            found=f"{path}: {error.strerror or error}",
            remedy="choose an output_dir on a file system with locks (mount Lustre with -o flock)",
        ) from error
    return file


# What a recipe reads: data, models, functions ------------------------------------------------------------------

# The recipe names them, and stays the same when their content changes; the rest of the run would then be another one.
_INPUT_KEYS = ("path", "tokenizer", "chat_template", "target")
_BLOCK, _NUM_BLOCKS = 1 << 16, 64
"""Of a file larger than all of them so many bytes are read at so many places: weights that were trained differ
everywhere."""


def input_digests(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Key → digest, of every file or directory that the recipe names as data, model, tokenizer, chat template or
    function; of a URL what the store says of its content.

    What cannot be read, or is on the hub, is left out.
    """
    found = {}
    for key, value in flatten(recipe).items():
        if key.rpartition(".")[2] not in _INPUT_KEYS or not isinstance(value, str):
            continue
        if is_url(value):
            with contextlib.suppress(UserError):  # what reads it says what is wrong
                found[key] = storage(value).fingerprint()
            continue
        # A function is file.py:name.
        name = value.rpartition(":")[0] if key.endswith("target") else value
        try:
            path = Path(name).expanduser()
            path = path / "model" if (path / MARKER).is_file() and (path / "model").is_dir() else path
            files = [path] if path.is_file() else sorted(path.iterdir()) if name and path.is_dir() else []
            if files := [file for file in files if file.is_file()]:
                found[key] = _digest_inputs(files)
        except (OSError, ValueError):
            continue  # what reads it says what is wrong
    return found


def changed_inputs(then: object, now: Mapping[str, str], recipe: Mapping[str, Any]) -> list[str]:
    """What is to be said about them.

    Args:
        then: ``inputs`` in the run's ``run.json``; earlier versions have none.
    """
    if not isinstance(then, Mapping):
        return []
    values = flatten(recipe)
    return [
        f"{key} ({values[key]}) has changed since the run began: the steps from here on use what is there now"
        for key, digest in now.items()
        if then.get(key, digest) != digest
    ]


def _digest_inputs(files: list[Path]) -> str:
    state = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        state.update(f"{path.name} {size}\n".encode(errors="surrogateescape"))
        with open(path, "rb") as file:
            whole = size <= _BLOCK * _NUM_BLOCKS
            for n in range(-(-size // _BLOCK) if whole else _NUM_BLOCKS):
                file.seek(n * _BLOCK if whole else n * (size - _BLOCK) // (_NUM_BLOCKS - 1))
                state.update(file.read(_BLOCK))
    return state.hexdigest()


def software_versions() -> dict[str, str]:
    """Of torch with its build (``2.13.0+cpu``), which the installed package does not always name."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("quartet-rl", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def write_json(path: Path, value: object) -> None:
    """Writes atomically: a reader sees the old file or the new one."""
    with writing(path):
        replace_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())
