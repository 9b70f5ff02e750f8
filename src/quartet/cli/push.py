"""`quartet push`: the exported model of a run to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def push(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    repo_id: Annotated[str, typer.Argument(help="Repository on the hub, owner/name.", show_default=False)],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a new repository; the account's default if left out.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, made where there is none; main if left out.")] = None,
) -> None:
    """A run's exported model to the hub.

    Log in before by `hf auth login`, or set HF_TOKEN. The card, README.md beside the model, names files and the whole
    recipe: read it first.
    """
    from quartet.remote.hub import push as upload
    from quartet.trainers.results import exported

    typer.echo(upload(exported(run), repo_id, private=private, revision=revision))
