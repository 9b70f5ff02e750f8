"""Atomic checkpoints: written beside their place, synced, then renamed; checked byte for byte before loading.

::

    checkpoints/step_00000050/   actor.pt, …     one file per part
                                 info.json       counters, cursors, the recipe
                                 manifest.json   size and SHA-256 of each file (train/manifest.py)
    checkpoints/damaged_step_…   one that was passed over, until the next is complete
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quartet.config import UserError
from quartet.config.file_errors import read_error, write_error
from quartet.observe.digests import DigestingFile, FileDigest
from quartet.train import manifest as manifests
from quartet.train.manifest import Damage, Manifest

_NAME = re.compile(r"step_([0-9]{8,})")
_DAMAGED = "damaged_"
_UNCHECKED = "was written by an earlier version, without a manifest: only its archives' own checksums were checked"


@dataclass(frozen=True)
class Checkpoint:
    """What ``save_checkpoint`` was given, and what has to be said about where it came from."""

    step: int
    parts: dict[str, Any]
    info: dict[str, Any]
    remarks: tuple[str, ...] = ()


def checkpoint_path(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


# Writing ---------------------------------------------------------------------------------------------------


def save_checkpoint(root: Path, step: int, parts: Mapping[str, Any], info: Mapping[str, Any], *, keep: int) -> Path:
    """Saves ``parts`` (each anything ``torch.save`` takes) as one checkpoint and deletes all but the newest ``keep``.

    Args:
        info: JSON values: counters, cursors, versions.

    Raises:
        UserError: the disk is full or not writable; older checkpoints are untouched.
    """
    final = checkpoint_path(root, step)
    draft = root / f".draft_{step:08d}_{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove(root, ".draft_*")
        draft.mkdir()
        files = {f"{name}.pt": _write(draft / f"{name}.pt", _saver(part)) for name, part in parts.items()}
        text = json.dumps({"step": step, "manifest": manifests.NAME, **info}).encode("ascii")
        files["info.json"] = _write(draft / "info.json", lambda file: file.write(text))
        Manifest(step=step, parts=list(parts), files=files).write(draft / manifests.NAME)
        _sync_directory(draft)
        former = _set_aside(final) if os.path.lexists(final) else None
        os.replace(draft, final)
        _sync_directory(root)
        if former is not None:
            _delete(former)
    except (OSError, RuntimeError) as error:
        # torch.save reports some failures as a RuntimeError of its zip writer.
        _delete(draft)
        raise write_error(final, error, what="checkpoint ") from error
    prune(root, keep)
    _remove(root, f"{_DAMAGED}*")
    return final


def prune(root: Path, keep: int) -> None:
    """Deletes half-written checkpoints and all that are older than the newest ``keep`` good ones.

    What is damaged counts as none: it goes only when enough good ones are newer.
    """
    if not root.is_dir():
        return
    _remove(root, ".draft_*")
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


def _saver(part: Any) -> Callable[[DigestingFile], object]:
    return lambda file: torch.save(part, file)  # type: ignore[arg-type]


def _write(path: Path, write: Callable[[DigestingFile], object]) -> FileDigest:
    """Writes one file, synced; its digest is made on the way."""
    with open(path, "wb") as file:
        digesting = DigestingFile(file)
        try:
            write(digesting)
            file.flush()
            os.fsync(file.fileno())
        except RuntimeError as error:
            if digesting.error is not None:
                raise digesting.error from error
            raise
    return digesting.digest()


# Copies ----------------------------------------------------------------------------------------------------


def snapshot(value: Any) -> Any:
    """A copy of a state in host memory that later updates do not change: what ``torch.save`` takes, nested.

    Tensors that share a storage (tied weights) share one in the copy, so that it takes its room once, here and on disk.
    """
    storages: dict[tuple[torch.device, int], torch.UntypedStorage] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _host_copy(value.detach(), storages)
        if isinstance(value, dict):
            # Of the same kind, with what a module's state hangs on it (its versions).
            found = copy.copy(value)
            found.update((key, copied(child)) for key, child in value.items())
            return found
        if isinstance(value, (list, tuple)):
            return type(value)(copied(child) for child in value)
        return copy.deepcopy(value)

    return copied(value)


def state_bytes(value: Any) -> int:
    """What ``snapshot`` takes."""
    storages: dict[tuple[torch.device, int], int] = {}

    def count(value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            source = value.untyped_storage()
            storages[source.device, source.data_ptr()] = source.nbytes()
        elif isinstance(value, Mapping):
            for child in value.values():
                count(child)
        elif isinstance(value, (list, tuple)):
            for child in value:
                count(child)

    count(value)
    return sum(storages.values())


def _host_copy(tensor: torch.Tensor, storages: dict[tuple[torch.device, int], torch.UntypedStorage]) -> torch.Tensor:
    """Of ``tensor``; ``storages`` holds the copies made so far, by the place of what they are copies of."""
    if tensor.layout != torch.strided or type(tensor) is not torch.Tensor:
        return tensor.to("cpu", copy=True)
    source = tensor.untyped_storage()
    place = (source.device, source.data_ptr())
    if place not in storages:
        storages[place] = torch.UntypedStorage(source.nbytes()).copy_(source)
    own = torch.empty(0, dtype=tensor.dtype)
    return own.set_(storages[place], tensor.storage_offset(), tensor.size(), tensor.stride())


# Reading ---------------------------------------------------------------------------------------------------


def claimed_steps(root: Path) -> list[int]:
    """Steps of everything that has a checkpoint's name, good or not, ascending."""
    names = os.listdir(root) if root.is_dir() else []
    steps = (int(match[1]) for name in names if (match := _NAME.fullmatch(name)))
    return sorted(step for step in steps if checkpoint_path(root, step).name in names)


def list_checkpoints(root: Path) -> list[int]:
    """Steps of the checkpoints that have all their files in the right sizes, ascending; contents are not read."""
    return [step for step in claimed_steps(root) if _is_whole(root, step)]


def load_checkpoint(root: Path, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """``(parts, info)`` as saved.

    Raises:
        UserError: a file of it is damaged.
    """
    try:
        found = _load(root, step)
    except (Damage, OSError) as error:
        raise UserError(
            f"checkpoint {checkpoint_path(root, step)} is damaged",
            found=_said(error),
            remedy="restore it from a copy, or delete that directory: the run then resumes from the one before it",
        ) from error
    return found.parts, found.info


def newest_checkpoint(
    root: Path, accept: Callable[[Mapping[str, Any], Mapping[str, Any]], str | None] = lambda parts, info: None
) -> Checkpoint | None:
    """The newest good checkpoint, with a remark for everything newer that is not; None where none was ever written.

    Args:
        accept: given parts and info, what is wrong with them for the run that reads them, or None.

    Raises:
        UserError: there are checkpoints, but no good one, or they cannot be read.
    """
    try:
        damaged = [f"{name} is not the name of a checkpoint" for name in _misnamed(root)]
        for step in reversed(claimed_steps(root)):
            try:
                found = _load(root, step)
                if reason := accept(found.parts, found.info):
                    raise Damage(reason)
            except PermissionError:
                raise  # is no damage: who may read it gets on without losing a step
            except (Damage, OSError) as error:
                damaged.append(f"{checkpoint_path(root, step).name}: {_said(error)}")
            else:
                used = checkpoint_path(root, step).name
                told = [f"damaged checkpoint: {text}; the run goes on from {used}" for text in damaged]
                return replace(found, remarks=(*told, *found.remarks))
    except OSError as error:
        raise read_error(Path(error.filename or root), error) from error
    if damaged:
        raise UserError(
            f"no checkpoint in {root} can be used",
            found="; ".join(damaged),
            remedy="restore one of them from a copy, or choose another output_dir to begin anew",
        )
    return None


def _load(root: Path, step: int) -> Checkpoint:
    """Raises ``Damage`` and OSError; nothing is unpickled before everything is checked."""
    path = checkpoint_path(root, step)
    manifest = _check_names(root, step)
    if manifest is not None:
        manifest.check_content(path)
        names = manifest.parts
    else:
        names = sorted(file.stem for file in path.glob("*.pt"))
        for name in names:
            _check_archive(path / f"{name}.pt")
    info = _read_info(path, step)
    info.pop("manifest", None)
    try:
        parts = {name: torch.load(path / f"{name}.pt", map_location="cpu", weights_only=True) for name in names}
    except MemoryError:
        raise
    except Exception as error:  # The content decides what an unpickler raises.
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if manifest is None:
            raise Damage(text) from error
        raise UserError(
            f"checkpoint {path} is as it was written, but cannot be loaded",
            found=text,
            remedy="free memory if that is what is missing, or use the version of torch that the run was started with",
        ) from error
    remarks = () if manifest is not None else (f"checkpoint {path.name} {_UNCHECKED}",)
    return Checkpoint(step, parts, info, remarks)


def _check_names(root: Path, step: int) -> Manifest | None:
    """The manifest, which agrees with the names and sizes that are there; None for an earlier version's checkpoint."""
    path = checkpoint_path(root, step)
    if path.is_symlink() or not path.is_dir():
        raise Damage("is a symbolic link" if path.is_symlink() else "is no directory")
    found = manifests.sizes(path)
    if not found:
        raise Damage("is empty")
    if manifests.NAME in found:
        manifest = Manifest.read(path / manifests.NAME)
        manifest.check_names(path)
        if manifest.step != step:
            raise Damage(f"{manifests.NAME} says step {manifest.step}")
        if lacking := {f"{name}.pt" for name in manifest.parts} - manifest.files.keys():
            raise Damage(f"{manifests.NAME} has no file for {min(lacking)}")
        return manifest
    if "info.json" not in found:
        raise Damage(f"{manifests.NAME} and info.json are missing")
    if "manifest" in _read_info(path, step):
        raise Damage(f"{manifests.NAME} is missing")
    return None


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


def _check_archive(path: Path) -> None:
    """Compares the checksums that ``torch.save`` puts into its archive, where there is no manifest."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except OSError:
        raise
    except Exception as error:  # The content decides what the reader raises.
        raise Damage(f"{path.name} is no whole archive ({error})") from error
    if bad is not None:
        raise Damage(f"the content of {path.name} is not what was written (CRC-32 of {bad})")


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


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
