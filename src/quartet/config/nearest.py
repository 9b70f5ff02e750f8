"""What a user has probably meant: the nearest known name, or the command that makes what is not there yet."""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quartet.config.errors import UserError
from quartet.config.jobs import jobs
from quartet.config.synonyms import CHOICES
from quartet.config.yamls import override_word

_WORDS = {
    "rl": "rl ppo grpo dapo gspo cispo gpg rloo opo reinforce remax distillation best online sapo gmpo gdpo pass "
    "optimal",
    "reward-model": "reward rm",
    "preference": "preference dpo ipo hinge simpo orpo kto exo nca sppo apo discopop bco aot robust",
    "sft": "sft",
    "eval": "eval evaluation",
}
"""By job of Quartet's own, words in the names of its run directories."""
_PARTS = ("model", "critic", "adapter", "answers.jsonl", "against.jsonl", "comparison.jsonl", "journal.jsonl")
"""What a run leaves in its directory for later ones."""
OLDER_MODEL = "older_model"
"""In a ``run.json``: the run goes on to another length, and what it has exported is of the former one."""


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


# Earlier stages ------------------------------------------------------------------------------------------


def has_older_model(run: Path) -> bool:
    """Whether the run in that directory has gone on since it exported its model."""
    return bool(_info(run).get(OLDER_MODEL))


def made_by(path: Path) -> str | None:
    """Says what to run so that ``path``, a run's directory or a part of it, comes to be; None where nothing is known.

    A run that is there and has not ended is gone on with. Else the directory's name says the job.
    """
    for folder in path.parents:
        if (command := _unfinished(folder)) is not None:
            return f"let its run end first: {command}"
    run = path.parent if path.name in (*_PARTS, *(job.folder for job in jobs().values())) else path
    words = set(re.split(r"[^a-z]+", run.name.lower()))
    guess = next((job for job, known in _words().items() if words & set(known)), None)
    # Without a part of a run at its end, a path with such a name may be anything.
    if guess is None or (run == path and ("runs" not in path.parts or path.suffix)):
        return None
    return f"make it first with quartet {guess} (output_dir: {run}; quartet init {guess} writes a recipe)"


def _words() -> dict[str, tuple[str, ...]]:
    """Gives words by job; the first job with one of them is probably meant."""
    added = {name: job.words for name, job in jobs().items() if job.words}
    return added | {name: tuple(words.split()) for name, words in _WORDS.items()}


def _info(run: Path) -> dict[str, Any]:
    try:
        info = json.loads((run / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def _unfinished(run: Path) -> str | None:
    """Says how to go on with the run in that directory; None where there is none, or none that is not done."""
    info = _info(run)
    if not info or info.get("status") == "done":
        return None
    job = info.get("job")
    if job == "quickstart":
        return f"quartet quickstart --out {shlex.quote(str(run))} --resume"
    words = f"{shlex.quote(str(run / 'recipe.yaml'))} {override_word('output_dir', str(run))}"
    return f"quartet {job} {words} --resume" if job in jobs() else None
