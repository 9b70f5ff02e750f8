"""Which command makes what an earlier stage has not made yet: ``runs/sft/model`` before ``quartet sft`` has run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quartet.config.jobs import jobs
from quartet.config.yamls import override_word

_RL_WORDS = (
    *("rl", "ppo", "grpo", "dapo", "gspo", "cispo", "gpg", "rloo", "opo", "reinforce", "remax"),
    *("distillation", "best", "online", "sapo", "gmpo", "gdpo", "pass", "optimal"),
)
_WORDS = {
    **dict.fromkeys(("reward", "rm"), "reward-model"),
    **dict.fromkeys(("preference", "dpo", "ipo", "hinge", "simpo", "orpo", "kto"), "preference"),
    **dict.fromkeys(("exo", "nca", "sppo", "apo", "discopop", "bco", "aot"), "preference"),
    "sft": "sft",
    **dict.fromkeys(("eval", "evaluation"), "eval"),
}
_PARTS = ("model", "critic", "adapter", "answers.jsonl", "against.jsonl", "comparison.jsonl", "journal.jsonl")
"""What a run leaves in its directory for later ones."""

OLDER_MODEL = "older_model"
"""In a ``run.json``: the run goes on to another length, and what it has exported is of the former one."""


def has_older_model(run: Path) -> bool:
    """Whether the run in that directory has gone on since it exported its model."""
    return bool(_info(run).get(OLDER_MODEL))


def made_by(path: Path) -> str | None:
    """What to run so that ``path``, a run's directory or something in it, comes to be; None where nothing is known.

    A run that is there and has not ended is gone on with. Else a recipe with that ``output_dir`` is looked for here and
    in ``recipes/``. Else the directory's name says the job.
    """
    for folder in path.parents:
        if (command := _unfinished(folder)) is not None:
            return f"let its run end first: {command}"
    run = path.parent if path.name in (*_PARTS, *(job.folder for job in jobs().values())) else path
    for recipe, job in _recipes_with(run):
        return f"make it first: quartet {job} {shlex.quote(str(recipe))}"
    words = re.split(r"[^a-z]+", run.name.lower())
    guess = next((job for word, job in _words().items() if word in words), None)
    # Without a part of a run at its end, a path with such a name may be anything.
    if guess is None or (run == path and ("runs" not in path.parts or path.suffix)):
        return None
    return f"make it first with quartet {guess} (output_dir: {run}; quartet init {guess} writes a recipe)"


def _words() -> dict[str, str]:
    """By a word in a run directory's name, the job that is probably meant; the first one wins."""
    others = {word: name for name, job in jobs().items() for word in job.words}
    return dict.fromkeys(_RL_WORDS, "rl") | others | _WORDS


def _info(run: Path) -> dict[str, Any]:
    try:
        info = json.loads((run / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def _unfinished(run: Path) -> str | None:
    """How to go on with the run in that directory; None where there is none, or none that is not done."""
    info = _info(run)
    if not info or info.get("status") == "done":
        return None
    job = info.get("job")
    if job == "quickstart":
        return f"quartet quickstart --out {shlex.quote(str(run))} --resume"
    words = f"{shlex.quote(str(run / 'recipe.yaml'))} {override_word('output_dir', str(run))}"
    return f"quartet {job} {words} --resume" if job in jobs() else None


def _recipes_with(run: Path) -> Iterator[tuple[Path, str]]:
    """Recipes here and in ``recipes/`` that write into ``run``, with their jobs."""
    for path in sorted([*Path().glob("*.yaml"), *Path("recipes").glob("*.yaml")]):
        try:
            text = path.read_text(encoding="utf-8")[:100_000]
        except (OSError, ValueError):
            continue
        found = {key: re.search(rf"^{key}: *(['\"]?)([^\s'\"#]+)\1", text, re.M) for key in ("job", "output_dir")}
        job, where = (match[2] if match else "" for match in found.values())
        if job in jobs() and where and Path(where).absolute() == run.absolute():
            yield path, job
