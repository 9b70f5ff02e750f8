"""`quartet init`: a commented recipe to begin with, on standard output.

This module is imported for every command: the recipes are not, until one is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from quartet.cli.config_command import complete_job


def complete_method(ctx: typer.Context, incomplete: str) -> list[str]:
    """Methods of the job that begin so, for shell completion; of any job while it is not known."""
    from quartet.config.reference import METHODS

    job = ctx.params.get("job")
    known = METHODS.get(job, ()) if job else dict.fromkeys(name for names in METHODS.values() for name in names)
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
        str | None, typer.Option(help="File or hub name; columns of a file that is there are mapped.")
    ] = None,
) -> None:
    """A commented recipe: quartet init rl > recipe.yaml."""
    from quartet.config.starter import starter

    typer.echo(starter(job, method=method, reward=reward, data=data, row=_first_row(data)), nl=False)


def _first_row(data: str | None) -> Mapping[str, Any] | None:
    """The first row of a file that is there."""
    if data is None or not Path(data).expanduser().is_file():
        return None
    from quartet.config.common import DataConfig
    from quartet.data.readers import iter_rows

    return next(iter_rows(DataConfig(path=data, limit=1))).values
