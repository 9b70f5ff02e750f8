"""Nearest known names, for messages about misspelt ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from quartet.config.errors import UserError
from quartet.config.stages import made_by
from quartet.config.synonyms import CHOICES


def nearest(name: str, known: Iterable[str]) -> str | None:
    """``did you mean …?`` with the nearest of ``known``, or None where nothing is near."""
    names, name = list(known), name.lower()
    meant = CHOICES.get(name)
    close = [meant] if meant in names else difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else None


def missing_file(problem: str, path: str | Path, otherwise: str | None = None) -> UserError:
    """The error for a file that is not there: which command makes it, the nearest names in its folder, or the folder
    that is missing. ``otherwise`` is the remedy where no name is near; without it, where paths start.
    """
    path = Path(path)
    otherwise = otherwise or f"paths start at {Path.cwd()}"
    if path.is_dir():
        return UserError(problem, found=f"{path} is a folder", remedy="name a file in it")
    if (stage := made_by(path)) is not None:
        return UserError(problem, found=str(path), remedy=f"{stage}, or correct the path")
    folder = path.parent
    if not folder.is_dir():
        return UserError(problem, found=f"{path} (the folder {folder} does not exist)", remedy=otherwise)
    names = sorted(entry.name for entry in folder.iterdir())
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    remedy = f"did you mean {', '.join(close)}?" if close else otherwise
    return UserError(problem, found=str(path), remedy=remedy)
