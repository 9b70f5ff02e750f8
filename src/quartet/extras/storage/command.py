"""`quartet upload`: a run from this machine to a URL."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def upload(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    url: Annotated[str | None, typer.Argument(help="Where to; the run's output_dir when left out.")] = None,
) -> None:
    """Upload a run to object storage."""
    from quartet.extras.storage.remote_run import upload_run

    typer.echo(upload_run(run, url, typer.echo))
