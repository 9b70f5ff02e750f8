"""`quartet pictures`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def pictures(
    directory: Annotated[Path, typer.Argument(help="Where model, questions and pictures go.", show_default=False)],
    seed: Annotated[int, typer.Option(help="Decides pictures, questions and weights.", min=0, max=2**32 - 1)] = 0,
    shuffled: Annotated[
        bool, typer.Option("--shuffled", help="The control: each question has another question's picture.")
    ] = False,
) -> None:
    """Questions on pictures, and a tiny model."""
    from quartet.extras.pictures.model import save_model
    from quartet.extras.pictures.task import SIZES, write_questions

    save_model(directory / "model", seed)
    for name, size in SIZES.items():
        path = write_questions(directory, name, size, seed, shuffled=shuffled)
        typer.echo(f"{path}: {size:,} questions, a picture each")
