"""`quartet config`: every key of a job's recipe, on the terminal or as the pages of docs/reference. `quartet init`: a
commented recipe to begin with, on standard output.

This module is imported for every command: the recipes are not, until one of them is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def complete_job(incomplete: str) -> list[str]:
    """Jobs that begin so, for shell completion."""
    from quartet.config.jobs import jobs

    return [job for job in jobs() if job.startswith(incomplete)]


def complete_part(ctx: typer.Context, incomplete: str) -> list[str]:
    """Addresses that begin so in the recipe of the job that stands before, for shell completion."""
    from quartet.config import UserError
    from quartet.config.reference import children

    job, (above, dot, _) = ctx.params.get("job") or "", incomplete.rpartition(".")
    try:
        names = [address for name in children(job, above) if (address := f"{above}{dot}{name}").startswith(incomplete)]
        # Two offers: the shell then puts no space behind a section, so that it can be gone into.
        return [*names, f"{names[0]}."] if len(names) == 1 and children(job, names[0]) else names
    except UserError:
        return []


def config(
    job: Annotated[
        str | None, typer.Argument(help="The command whose recipe it is: rl, sft, …", autocompletion=complete_job)
    ] = None,
    part: Annotated[
        str | None,
        typer.Argument(help="A part of it: rollout.sampling, algorithm.grpo.", autocompletion=complete_part),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write the pages of docs/reference into this folder instead.")
    ] = None,
) -> None:
    """Keys of a recipe: type, default, unit, meaning."""
    if write is not None:
        from quartet.cli.reference import pages

        write.mkdir(parents=True, exist_ok=True)
        for name, text in pages().items():
            (write / name).write_text(text, encoding="utf-8")
    else:
        from quartet.cli.reference import show_jobs, show_keys

        if job is None:
            show_jobs()
        else:
            show_keys(job, part or "")


def complete_method(ctx: typer.Context, incomplete: str) -> list[str]:
    """Methods of the job that begin so, for shell completion; of any job while it is not known."""
    from quartet.config.reference import methods

    job = ctx.params.get("job")
    known = methods().get(job, ()) if job else dict.fromkeys(name for names in methods().values() for name in names)
    return [name for name in known if name.startswith(incomplete)]


def complete_reward(incomplete: str) -> list[str]:
    """Kinds of reward that begin so, for shell completion."""
    from quartet.config.starter import REWARDS

    return [name for name in REWARDS if name.startswith(incomplete)]


def init(
    job: Annotated[str, typer.Argument(help="The command to write it for: rl, sft, …", autocompletion=complete_job)],
    method: Annotated[
        str | None, typer.Option(help="ppo, grpo, …; dpo, kto, … for preference.", autocompletion=complete_method)
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="model, math, function, judge, …", autocompletion=complete_reward)
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="File, directory or hub name; columns of what is there are mapped.")
    ] = None,
) -> None:
    """A commented recipe: quartet init rl > recipe.yaml."""
    from quartet.config.starter import starter

    row = None
    if data is not None and Path(data).expanduser().exists():
        from quartet.config.common import DataConfig
        from quartet.data.readers import iter_rows

        row = next(iter_rows(DataConfig(path=data, limit=1))).values
    typer.echo(starter(job, method=method, reward=reward, data=data, row=row), nl=False)
