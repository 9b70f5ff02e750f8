"""What `quartet --help` and `quartet --version` say, and the option `--resume`, whose value may be left out."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from quartet.config.plugins import all_jobs

RESUME = "--resume"
GROUPS: dict[str, tuple[str, ...]] = {
    "Begin": (),
    "Train": ("sft", "reward-model", "preference", "rl"),
    "Look at data, a model or a run": ("eval", "export", "push"),
}
"""Commands in the order of the help; each of them is in one group. Those of plug-ins stand below their heading."""


class GroupedHelp(TyperGroup):
    """Lists the commands by what they are for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads ``--resume`` without a value as ``--resume=on``: Typer knows no option whose value may be left out."""
        return super().parse_args(ctx, [f"{RESUME}=on" if arg == RESUME else arg for arg in args])

    def get_command(self, ctx: Any, name: str) -> Any:
        """Returns the command; one that takes a recipe says in its help where the keys are."""
        command = super().get_command(ctx, name)
        if command is not None and name in all_jobs():
            command.epilog = f"Every key: quartet config {name}. A recipe to begin with: quartet init {name}."
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes one list of commands for each group."""
        width = max(len(name) for name in self.commands)
        for title, names in ((title, names) for title, names in GROUPS.items() if names):
            with formatter.section(title):
                shown = {name: self.commands[name].get_short_help_str(formatter.width - width - 6) for name in names}
                formatter.write_dl([(f"{name:<{width}}", text) for name, text in shown.items()])


def _show_versions(is_wanted: bool) -> None:
    if not is_wanted:
        return
    typer.echo(f"quartet {_version('quartet-rl')}")
    libraries = ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers"))
    typer.echo(f"{libraries}, Python {platform.python_version()}")
    raise typer.Exit


def _version(package: str) -> str:
    """Returns the version of an installed package, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


Version = Annotated[
    bool,
    typer.Option(
        "--version", help="Versions of quartet, torch and transformers.", callback=_show_versions, is_eager=True
    ),
]


Precision = Literal["auto", "fp32", "bf16"]
ResumeChoice = Literal["on", "auto"]
Resume = Annotated[
    ResumeChoice | None,
    typer.Option(
        RESUME,
        metavar="[=auto]",
        help="Go on with the run in the output directory; =auto: start it where there is none, report it where done.",
        show_default=False,
    ),
]


def resume_argument(chosen: ResumeChoice | None) -> bool | Literal["auto"]:
    """Returns the option as the trainers' argument ``resume``."""
    return "auto" if chosen == "auto" else chosen is not None


Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the hub.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model, with your rights.")
]
