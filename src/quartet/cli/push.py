"""`quartet push` and `quartet export`: the model of a run, to the hub and into a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quartet.cli.options import TrustRemoteCode


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
    from quartet.trainers.checkpoints import exported

    typer.echo(upload(exported(run), repo_id, private=private, revision=revision))


def export(
    run: Annotated[Path, typer.Argument(help="Run directory, or one of its checkpoints.", show_default=False)],
    directory: Annotated[Path, typer.Argument(help="Where to; a new directory.", show_default=False)],
    step: Annotated[
        int | None, typer.Option(help="Of which checkpoint; left out: the exported model, else the newest.", min=0)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model that the run began with, where Python passed it or it has moved.")
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """A run's model as a Hugging Face directory."""
    from quartet.trainers.checkpoints import export as write

    written, warning = write(run, step, directory, model, trust_remote_code=trust_remote_code)
    if warning is not None:
        typer.echo(warning, err=True)
    typer.echo(written)
