"""Atomic checkpoints: written beside their place, synced, then renamed; what is half-written is never picked up."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from quartet.config import UserError

_NAME = re.compile(r"^step_(\d{8})$")


def checkpoint_path(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


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
        _remove_drafts(root)
        draft.mkdir()
        for name, part in parts.items():
            with open(draft / f"{name}.pt", "wb") as file:
                torch.save(part, file)
                _sync(file.fileno())
        with open(draft / "info.json", "w", encoding="utf-8") as text:
            json.dump({"step": step, **info}, text)
            text.flush()
            _sync(text.fileno())
        _sync_directory(draft)
        former = _set_aside(final) if final.exists() else None
        os.replace(draft, final)
        _sync_directory(root)
        if former is not None:
            shutil.rmtree(former, ignore_errors=True)
    except (OSError, RuntimeError) as error:
        # torch.save reports a full disk as a RuntimeError of its zip writer.
        shutil.rmtree(draft, ignore_errors=True)
        raise UserError(
            f"checkpoint {final} could not be written",
            found=f"{error}; {_free(root)} free",
            remedy="free some space or choose another output_dir; the run can be resumed from the checkpoint before",
        ) from error
    for old in list_checkpoints(root)[:-keep]:
        shutil.rmtree(_set_aside(checkpoint_path(root, old)), ignore_errors=True)
    return final


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


def list_checkpoints(root: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    if not root.is_dir():
        return []
    found = (_NAME.match(entry.name) for entry in root.iterdir() if (entry / "info.json").is_file())
    return sorted(int(match.group(1)) for match in found if match)


def load_checkpoint(root: Path, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """``(parts, info)`` as saved.

    Raises:
        UserError: a file of it is damaged.
    """
    path = checkpoint_path(root, step)
    try:
        info = json.loads((path / "info.json").read_text(encoding="utf-8"))
        parts = {file.stem: torch.load(file, weights_only=True) for file in sorted(path.glob("*.pt"))}
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(
            f"checkpoint {path} is damaged",
            found=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}",
            remedy="delete that directory; the run then resumes from the checkpoint before it",
        ) from error
    return parts, info


def _set_aside(checkpoint: Path) -> Path:
    """Renames a checkpoint that is to be deleted, since one half deleted would look complete."""
    aside = checkpoint.with_name(f".draft_discarded_{checkpoint.name}_{os.getpid()}")
    os.replace(checkpoint, aside)
    return aside


def _remove_drafts(root: Path) -> None:
    for draft in root.glob(".draft_*"):
        shutil.rmtree(draft, ignore_errors=True)


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free(path: Path) -> str:
    try:
        return f"{shutil.disk_usage(path).free / 2**20:.0f} MiB"
    except OSError:
        return "unknown space"
