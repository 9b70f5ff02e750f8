"""The `quartet` command: one sub-command per job. Each parses, builds and runs; heavy imports wait until then.

Mistakes a user can mend end with exit status 2 and a three-part message; what a signal stopped ends with
128 + its number (Ctrl-C: 130) and how to go on.
"""

from __future__ import annotations

import gc
import os
import shlex
import sys
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from quartet.cli.options import (
    GROUPS,
    RESUME,
    GroupedHelp,
    Resume,
    ResumeChoice,
    TrustRemoteCode,
    Version,
    resume_argument,
)
from quartet.config import Interrupted, UserError
from quartet.config.plugins import OWN, Job, all_jobs, installed_plugins, load_object
from quartet.observe.process import yield_cores_while_waiting
from quartet.trainers.signals import stop_signals

app = typer.Typer(
    name="quartet",
    cls=GroupedHelp,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RecipePath = Annotated[Path, typer.Argument(help="Recipe (YAML).", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides: key=value, e.g. steps=10, or @fragment.yaml")]
ON_THE_CLUSTER = ("cluster.type=ray", "cluster.address=null")
"""Overrides inside an allocation: roles go to the Ray that was started there."""


@app.callback()
def quartet(version: Version = False) -> None:
    """RLHF and LLM reinforcement learning: SFT, reward model, PPO, GRPO, RLOO.

    To begin: quartet init rl > recipe.yaml, then quartet rl recipe.yaml; quartet config rl lists every key.
    """


@app.command()
def push(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    repo_id: Annotated[str, typer.Argument(help="Repository on the hub, owner/name.", show_default=False)],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a new repository; the account's default if left out.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="A branch, made where there is none; main if left out.")] = None,
) -> None:
    """Uploads a run's exported model to the hub.

    Log in before by `hf auth login`, or set HF_TOKEN. The card, README.md beside the model, names files and the whole
    recipe: read it first.
    """
    from quartet.remote.hub import upload_folder as upload
    from quartet.trainers.checkpoints import exported_directory

    typer.echo(upload(exported_directory(run), repo_id, private=private, revision=revision))


@app.command()
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
    """Writes a run's model as a Hugging Face directory."""
    from quartet.trainers.checkpoints import export_model as write

    written, warning = write(run, step, directory, model, trust_remote_code=trust_remote_code)
    if warning is not None:
        typer.echo(warning, err=True)
    typer.echo(written)


@cache
def add_plugins() -> None:
    """Adds the jobs and the commands of plug-ins, and their lines to the help.

    Raises:
        UserError: a plug-in that cannot be used, or a command that is there already.
    """
    for plugin in installed_plugins():
        for name, job in plugin.jobs.items():
            _add_to_help("Train", name)
            _add_job(name, job)
        for group, commands in plugin.commands.items():
            for name, target in commands.items():
                _add_to_help(group, name)
                app.command(name)(load_object(target))


def _add_to_help(group: str, name: str) -> None:
    if any(name in names for names in GROUPS.values()):
        raise UserError("a plug-in adds a command that is Quartet's own", found=name, remedy="uninstall the plug-in")
    GROUPS[group] = (*GROUPS.get(group, ()), name)


def _add_job(name: str, job: Job) -> None:
    """Adds the sub-command of a job."""

    def command(recipe: RecipePath, overrides: Overrides = None, resume: Resume = None) -> None:
        changes = overrides or []
        if _is_in_allocation():
            changes = [*changes, *_in_allocation(name, job.is_supervised, recipe, changes)]
        _run(name, job, recipe, changes, resume)

    app.command(name=name, help=job.help)(command)


for _name, _job in OWN.items():
    _add_job(_name, _job)


def _in_allocation(job: str, is_supervised: bool, recipe: Path, overrides: list[str]) -> list[str]:
    """Overrides that make the processes of torchrun those of the run. With Ray the process ends here, with the run.

    Raises:
        UserError: the job runs in one process.
    """
    from quartet.cluster.torchrun import TorchrunRank, run_under_torchrun
    from quartet.config.load import asks_for_ray

    launcher = TorchrunRank.found(os.environ)
    if job == "rl" or (is_supervised and asks_for_ray(job, recipe, overrides)):
        # The same command once more, in a process of its own with a Ray cluster of all nodes.
        words = [sys.executable, "-m", "quartet", *sys.argv[1:], *ON_THE_CLUSTER]
        sys.exit(run_under_torchrun(words, launcher))
    if is_supervised:
        return ["cluster={type: torchrun}", f"processes={launcher.local_world_size}", f"nodes={launcher.num_nodes}"]
    if launcher.world_size > 1:
        raise UserError(
            f"quartet {job} runs in one process",
            found=f"{launcher.world_size} processes of torchrun",
            remedy="start it without torchrun",
        )
    return []


def _run(name: str, job: Job, recipe_path: Path, overrides: list[str], resume: ResumeChoice | None) -> None:
    from quartet.cli.show import show_evaluation, show_finished, show_run
    from quartet.config.load import load_recipe
    from quartet.observe.progress import Progress
    from quartet.trainers.run_files import completed_run

    recipe = load_recipe(name, recipe_path, overrides)
    # Of several processes of torchrun the first one alone speaks.
    is_silent = _is_in_allocation() and os.environ["RANK"] != "0"
    if done := completed_run(recipe, resume_argument(resume)):
        if not is_silent:
            show_finished(*done)
        return
    gc.disable()  # nothing of what is imported is garbage
    try:
        trainer = load_object(job.trainer)
    finally:
        gc.enable()
    with Progress() as progress:
        made = trainer(recipe, resume=resume_argument(resume), progress=progress)
        result = made.run() if name == "eval" else made.train()
    if is_silent:
        return
    if name == "eval":
        show_evaluation(result)
    else:
        show_run(result.path, result.summary)


def _is_in_allocation() -> bool:
    """Tells whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def main() -> None:
    """Runs the command line: turns user errors and signals into messages and exit statuses."""
    yield_cores_while_waiting()
    with stop_signals(ends_process=True) as signals:
        try:
            add_plugins()
            app()
        except UserError as error:
            typer.echo(f"error: {error}", err=True)
            sys.exit(2)
        except (SystemExit, KeyboardInterrupt) as stop:
            # typer turns a KeyboardInterrupt inside a command into status 130, without a word
            if isinstance(stop, SystemExit) and stop.code != 130:
                raise
            if not _is_in_allocation():
                typer.echo("stopped at once; --resume goes on from the last checkpoint", err=True)
            sys.exit(signals.exit_status)
        except Interrupted as error:
            typer.echo(f"{error}\ngo on with: {_resume_command(sys.argv[1:], error.path)}", err=True)
            sys.exit(error.exit_status)


def _resume_command(arguments: list[str], path: Path) -> str:
    """Returns the command of these arguments with ``--resume``, and the directory where it was not given."""
    from quartet.config.strict import is_url
    from quartet.config.yamls import shell_override
    from quartet.trainers.run_files import RECIPE, read_recipe

    words = [shlex.quote(word) for word in arguments if word.partition("=")[0] != RESUME]
    if arguments[0] in all_jobs():
        recipe = path / RECIPE
        at_url = recipe.is_file() and is_url(read_recipe(recipe).get("output_dir"))
        named = at_url or any(str(path) in word for word in arguments[1:])
        where = [] if named else [shell_override("output_dir", str(path))]
    else:
        where = [] if "--out" in arguments else ["--out", shlex.quote(str(path))]
    return " ".join(["quartet", *words, *where, RESUME])


if __name__ == "__main__":
    main()
