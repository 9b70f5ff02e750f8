"""`quartet config`: every key of a job's recipe, on the terminal or as the pages of docs/reference.

This module is imported for every command: the recipes are not, until one of them is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def complete_job(incomplete: str) -> list[str]:
    """Jobs that begin so, for shell completion."""
    from quartet.config.reference import jobs

    return [job for job in jobs() if job.startswith(incomplete)]


def complete_part(ctx: typer.Context, incomplete: str) -> list[str]:
    """Addresses that begin so in the recipe of the job that stands before, for shell completion."""
    from quartet.config import UserError
    from quartet.config.reference import children

    above, dot, _ = incomplete.rpartition(".")
    try:
        names = children(ctx.params.get("job") or "", above)
    except UserError:
        return []
    return [address for name in names if (address := f"{above}{dot}{name}").startswith(incomplete)]


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
        from quartet.cli.reference_pages import pages

        write.mkdir(parents=True, exist_ok=True)
        for name, text in pages().items():
            (write / name).write_text(text, encoding="utf-8")
    else:
        from quartet.cli.show_keys import show_jobs, show_keys

        if job is None:
            show_jobs()
        else:
            show_keys(job, part or "")
