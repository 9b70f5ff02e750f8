"""The option `--resume`, whose value may be left out."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, Literal

import typer

NAME = "--resume"


class ResumeChoice(enum.StrEnum):
    on = "on"
    auto = "auto"


Resume = Annotated[
    ResumeChoice | None,
    typer.Option(
        NAME,
        metavar="[=auto]",
        help="Go on with the run in the output directory; =auto: start it where there is none, report it where done.",
        show_default=False,
    ),
]


def with_value(arguments: Sequence[str]) -> list[str]:
    """The arguments with ``--resume`` as ``--resume=on``: typer knows no value that may be left out."""
    return [f"{NAME}={ResumeChoice.on}" if argument == NAME else argument for argument in arguments]


def without(arguments: Sequence[str]) -> list[str]:
    """The arguments without the option."""
    return [argument for argument in arguments if argument.partition("=")[0] != NAME]


def as_argument(chosen: ResumeChoice | None) -> bool | Literal["auto"]:
    """What the trainers take."""
    return "auto" if chosen is ResumeChoice.auto else chosen is not None
