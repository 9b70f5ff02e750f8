"""Atomic checkpoints: written beside their place, synced, then renamed; checked byte for byte before loading.

::

    checkpoints/step_00000050/   actor/, …       a share per role, written by its workers (train/checkpoint_shares.py)
                                 <part>.pt       the driver's own parts, where it has any
                                 info.json       counters, cursors, the recipe
                                 manifest.json   size and SHA-256 of each file (train/manifest.py)
    checkpoints/damaged_step_…   one that was passed over, until the next is complete
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quartet.config import UserError
from quartet.config.file_errors import read_error, write_error
from quartet.observe.digests import DigestingFile, FileDigest, digested_file, sync_directory
from quartet.train import manifest as manifests
from quartet.train.checkpoint_metadata import join_metadata
from quartet.train.manifest import CheckpointManifest, Damage
from quartet.train.state import reading

_NAME = re.compile(r"step_([0-9]{8,})")
_DAMAGED = "damaged_"
_DRAFT = ".draft_"

Shares = Mapping[str, Mapping[str, FileDigest]]
"""Of each role the digests of its files, by their names in its directory."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are as they were written.

    Attributes:
        path: each share is in a directory below it, for its workers to read.
        parts: the driver's.
        warnings: about other checkpoints that were not used.
    """

    path: Path
    step: int
    parts: dict[str, Any]
    info: dict[str, Any]
    warnings: tuple[str, ...] = ()


def checkpoint_path(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def path_of_draft(draft: Path) -> Path:
    """Where a draft goes when it is complete."""
    return checkpoint_path(draft.parent, int(draft.name.removeprefix(_DRAFT).partition("_")[0]))


# Writing ---------------------------------------------------------------------------------------------------


def begin_checkpoint(root: Path, step: int) -> Path:
    """A new, empty directory for the shares of a checkpoint; it does not count until ``complete_checkpoint``.

    Raises:
        UserError: the disk is full or not writable.
    """
    draft = root / f"{_DRAFT}{step:08d}_{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove(root, f"{_DRAFT}*")
        draft.mkdir()
    except OSError as error:
        raise write_error(checkpoint_path(root, step), error, what="checkpoint ") from error
    return draft


def complete_checkpoint(
    draft: Path,
    parts: Mapping[str, Any],
    info: Mapping[str, Any],
    shares: Shares,
    *,
    keep: int,
) -> Path:
    """Adds the driver's own files and the manifest, and makes it a checkpoint; deletes all but the newest ``keep``.

    Args:
        parts: each anything ``torch.save`` takes, and small.
        info: JSON values: counters, cursors, versions.
        shares: what the workers wrote into the draft.

    Raises:
        UserError: the disk is full or not writable, or a share is not there; older checkpoints are untouched.
    """
    final = path_of_draft(draft)
    root, step = final.parent, int(final.name.removeprefix("step_"))
    try:
        joined = {role: join_metadata(draft / role, share) for role, share in shares.items()}
        files = {f"{role}/{name}": digest for role, share in joined.items() for name, digest in share.items()}
        files |= {f"{name}.pt": _write(draft / f"{name}.pt", partial(torch.save, part)) for name, part in parts.items()}
        text = json.dumps({"step": step, "manifest": manifests.NAME, **info}).encode("ascii")
        files["info.json"] = _write(draft / "info.json", lambda file: file.write(text))
        manifest = CheckpointManifest(step=step, parts=list(parts), shares=list(shares), files=files)
        manifest.check_names(draft)
        manifest.write(draft / manifests.NAME)
        sync_directory(draft)
        former = _set_aside(final) if os.path.lexists(final) else None
        os.replace(draft, final)
        sync_directory(root)
        if former is not None:
            _delete(former)
    except Damage as error:
        discard_draft(draft)
        raise UserError(
            f"checkpoint {final} is not what the workers have written",
            found=str(error),
            remedy="put output_dir on storage that all machines share",
        ) from error
    except (OSError, RuntimeError) as error:
        # torch.save reports some failures as a RuntimeError of its zip writer.
        discard_draft(draft)
        raise write_error(final, error, what="checkpoint ") from error
    prune(root, keep)
    _remove(root, f"{_DAMAGED}*")
    return final


def discard_draft(draft: Path) -> None:
    """Deletes what will not be a checkpoint; what cannot be deleted goes with the next one."""
    _delete(draft)


def prune(root: Path, keep: int) -> None:
    """Deletes half-written checkpoints and all that are older than the newest ``keep`` good ones.

    What is damaged counts as none: it goes only when enough good ones are newer.
    """
    if not root.is_dir():
        return
    _remove(root, f"{_DRAFT}*")
    good = list_checkpoints(root)
    if len(good) >= keep:
        for step in claimed_steps(root):
            if step < good[-keep]:
                with contextlib.suppress(OSError):  # What cannot be deleted stays, and the next save tries again.
                    _delete(_set_aside(checkpoint_path(root, step)))


def set_aside_after(root: Path, step: int) -> None:
    """Renames checkpoints after ``step``, which were passed over: a run that goes on from there writes them anew."""
    for later in claimed_steps(root):
        if later > step:
            path = checkpoint_path(root, later)
            _delete(path.with_name(_DAMAGED + path.name))
            os.replace(path, path.with_name(_DAMAGED + path.name))


def _write(path: Path, write: Callable[[DigestingFile], object]) -> FileDigest:
    """Writes one file, synced; its digest is made on the way."""
    with digested_file(path) as file:
        write(file)
    return file.digest()


# Reading ---------------------------------------------------------------------------------------------------


def claimed_steps(root: Path) -> list[int]:
    """Steps of everything that has a checkpoint's name, good or not, ascending."""
    names = os.listdir(root) if root.is_dir() else []
    steps = (step_of(Path(name)) for name in names)
    return sorted(step for step in steps if step is not None and checkpoint_path(root, step).name in names)


def list_checkpoints(root: Path) -> list[int]:
    """Steps of the checkpoints that have all their files in the right sizes, ascending; contents are not read."""
    return [step for step in claimed_steps(root) if _is_whole(root, step)]


def newest_checkpoint(
    root: Path,
    accept: Callable[[Collection[str], Mapping[str, Any]], str | None] = lambda names, info: None,
) -> Checkpoint | None:
    """The newest good checkpoint, with a warning for everything newer that is not; None where none was ever written.

    Args:
        accept: given the names of parts and shares and the info, what is wrong with them for the run, or None.

    Raises:
        UserError: there are checkpoints, but no good one, or they cannot be read.
    """
    try:
        damaged = [f"{name} is not the name of a checkpoint" for name in _misnamed(root)]
        for step in reversed(claimed_steps(root)):
            try:
                found = _load(root, step, accept)
            except PermissionError:
                raise  # is no damage: who may read it gets on without losing a step
            except (Damage, OSError) as error:
                damaged.append(f"{checkpoint_path(root, step).name}: {_said(error)}")
            else:
                used = checkpoint_path(root, step).name
                told = [f"damaged checkpoint: {text}; the run goes on from {used}" for text in damaged]
                return replace(found, warnings=(*told, *found.warnings))
    except OSError as error:
        raise read_error(Path(error.filename or root), error) from error
    if damaged:
        raise UserError(
            f"no checkpoint in {root} can be used",
            found="; ".join(damaged),
            remedy="restore one of them from a copy, or choose another output_dir to begin anew",
        )
    return None


def find_checkpoint(root: Path, step: int | None) -> Checkpoint:
    """The checkpoint of ``step``, or the newest good one.

    Raises:
        UserError: there is none, it is damaged, or it cannot be read.
    """
    if step is None:
        found, damage = newest_checkpoint(root), "there is none"
    else:
        try:
            found, damage = _load(root, step, lambda names, info: None), ""
        except (Damage, OSError) as error:
            found, damage = None, _said(error)
    if found is None:
        there = ", ".join(map(str, list_checkpoints(root)))
        raise UserError(
            f"there is no checkpoint in {root}" if step is None else f"{checkpoint_path(root, step)} cannot be used",
            found=damage,
            remedy=f"name one of the steps {there}" if there else "name a run that has saved one",
        )
    return found


def step_of(path: Path) -> int | None:
    """The step of a path that is named as a checkpoint is, None of others."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def _load(root: Path, step: int, accept: Callable[[Collection[str], Mapping[str, Any]], str | None]) -> Checkpoint:
    """Raises ``Damage`` and OSError; nothing is unpickled before everything is checked."""
    path = checkpoint_path(root, step)
    manifest = _check_names(root, step)
    manifest.check_content(path)
    info = _read_info(path, step)
    info.pop("manifest", None)
    if reason := accept([*manifest.parts, *manifest.shares], info):
        raise Damage(reason)
    parts = {}
    for name in manifest.parts:
        with reading(path / f"{name}.pt"):
            parts[name] = torch.load(path / f"{name}.pt", map_location="cpu", weights_only=True)
    return Checkpoint(path, step, parts, info)


def _check_names(root: Path, step: int) -> CheckpointManifest:
    """The manifest, which agrees with the names and sizes that are there."""
    path = checkpoint_path(root, step)
    if path.is_symlink() or not path.is_dir():
        raise Damage("is a symbolic link" if path.is_symlink() else "is no directory")
    found = manifests.sizes(path)
    if not found:
        raise Damage("is empty")
    if manifests.NAME not in found:
        raise Damage(f"{manifests.NAME} is missing")
    manifest = CheckpointManifest.read(path / manifests.NAME)
    manifest.check_names(path)
    if manifest.step != step:
        raise Damage(f"{manifests.NAME} says step {manifest.step}")
    needed = {f"{name}.pt" for name in manifest.parts} | {f"{name}/{manifests.METADATA}" for name in manifest.shares}
    if lacking := needed - manifest.files.keys():
        raise Damage(f"{manifests.NAME} has no file for {min(lacking)}")
    return manifest


def _read_info(path: Path, step: int) -> dict[str, Any]:
    try:
        info: Any = json.loads((path / "info.json").read_bytes())
    except (ValueError, RecursionError) as error:
        raise Damage(f"info.json is no JSON text ({str(error)[:100]})") from error
    if not isinstance(info, dict) or type(info.get("step")) is not int:
        raise Damage("info.json does not say the step")
    if info["step"] != step:
        raise Damage(f"info.json says step {info['step']}")
    return info


def _misnamed(root: Path) -> list[str]:
    """What looks like a checkpoint under another name, as a rename leaves it."""
    if not root.is_dir():
        if os.path.lexists(root):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(root))
        return []
    claimed = {checkpoint_path(root, step).name for step in claimed_steps(root)}
    return sorted(
        entry.name
        for entry in root.iterdir()
        if entry.name not in claimed
        and not entry.name.startswith((".", _DAMAGED))
        and (entry.name.startswith("step") or (entry / "info.json").exists() or (entry / manifests.NAME).exists())
    )


def _is_whole(root: Path, step: int) -> bool:
    try:
        _check_names(root, step)
    except (Damage, OSError):
        return False
    return True


def _said(error: Damage | OSError) -> str:
    if isinstance(error, OSError):
        return f"{Path(error.filename or '').name} cannot be read ({error.strerror or error})"
    return str(error)


# Files -----------------------------------------------------------------------------------------------------


def _set_aside(checkpoint: Path) -> Path:
    """Renames a checkpoint that is to be deleted, since one half deleted would look damaged."""
    aside = checkpoint.with_name(f".draft_discarded_{checkpoint.name}_{os.getpid()}")
    os.replace(checkpoint, aside)
    return aside


def _remove(root: Path, pattern: str) -> None:
    for path in root.glob(pattern):
        _delete(path)


def _delete(path: Path) -> None:
    """Whatever it is; what cannot be deleted stays, and the next save tries again."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
