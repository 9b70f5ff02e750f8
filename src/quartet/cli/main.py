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
from typing import Annotated, Any

import typer

from quartet.cli.options import (
    GROUPS,
    RESUME,
    GroupedHelp,
    Precision,
    Resume,
    ResumeChoice,
    Revision,
    TrustRemoteCode,
    Version,
    as_argument,
)
from quartet.cli.push import export, push
from quartet.config import Interrupted, UserError
from quartet.config.errors import printable
from quartet.config.plugins import load, plugins
from quartet.observe.openmp import share_cores
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
JOBS = {
    "sft": ("SFTTrainer", "Supervised fine-tuning on demonstrations."),
    "reward-model": ("RewardModelTrainer", "Reward model from preference pairs."),
    "process-reward": ("ProcessRewardTrainer", "Process reward model from step-labelled answers."),
    "preference": ("PreferenceTrainer", "DPO, SimPO, KTO and others on preference data."),
    "medusa": ("MedusaTrainer", "Medusa heads from a model's own answers."),
    "rl": ("RLTrainer", "Reinforcement learning: PPO, GRPO and others."),
    "iterated-reward-model": ("IteratedTrainer", "Rounds of fresh pairs, reward model and RL."),
    "eval": ("Evaluator", "Held-out prompts answered and scored; win rates."),
}
"""Jobs with a recipe: the public class that runs each, and its help."""
SUPERVISED = ("sft", "reward-model", "process-reward", "preference")
ON_THE_CLUSTER = ("cluster.type=ray", "cluster.address=null")
"""Overrides inside an allocation: roles go to the Ray that was started there."""


@app.callback()
def quartet(version: Version = False) -> None:
    """RLHF and LLM reinforcement learning: SFT, reward model, PPO, GRPO, RLOO.

    To begin: quartet init rl > recipe.yaml, then quartet rl recipe.yaml; quartet config rl lists every key.
    """


@app.command()
def generate(
    model: Annotated[str, typer.Option(help="Model directory, run, checkpoint, URL or hub name.")],
    prompt: Annotated[list[str], typer.Option(help="Prompt; may be given several times.")],
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus; 1 keeps every token.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 keeps every token.", min=0)] = 0,
    min_p: Annotated[float, typer.Option(help="Least share of the likeliest token's probability.")] = 0.0,
    num: Annotated[int, typer.Option(help="Answers per prompt.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Same seed, same answer.", min=0)] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the chat template as a user turn.")] = False,
    chat_template: Annotated[str | None, typer.Option(help="Jinja file; the tokenizer's own by itself.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[Precision, typer.Option(help="auto: bf16 on a GPU that has it, fp32 on the CPU.")] = "auto",
    engine: Annotated[
        list[str] | None, typer.Option(help="A key of rollout.engine, e.g. type=vllm; may be given several times.")
    ] = None,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Answers of a model to prompts on the command line."""
    from quartet.config.common import ModelConfig
    from quartet.config.engines import NativeEngineConfig
    from quartet.config.load import load_engine
    from quartet.models.loading import load_causal_lm
    from quartet.rollout.protocol import SamplingParams
    from quartet.text.loading import check_vocabulary, local_or_hub
    from quartet.text.tokenizer import TextCodec
    from quartet.trainers.devices import FrozenModels, find_device, precision_on
    from quartet.trainers.engines import step_engine
    from quartet.trainers.evaluation import generate as run
    from quartet.trainers.input_sources import context_length, cut_short
    from quartet.trainers.results import model_directory

    sampling = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_new_tokens=max_new_tokens,
        stop_strings=tuple(stop or ()),
    )
    where = find_device(device)
    frozen = FrozenModels(where, precision_on(where, precision))
    model = local_or_hub(model_directory(model, revision, trust_remote_code=trust_remote_code), "model")
    given = ModelConfig(path=model, trust_remote_code=trust_remote_code)
    codec = TextCodec.from_pretrained(model, chat_template=chat_template, trust_remote_code=trust_remote_code)
    packed = frozen.causal(load_causal_lm(model, trust_remote_code=trust_remote_code))
    check_vocabulary(codec.tokenizer, packed.vocab_size)
    prompts: list[Any] = [[{"role": "user", "content": text}] for text in prompt] if chat else list(prompt)
    lengths = [len(codec.encode_prompt(each)) for each in prompts]
    short = cut_short(lengths, max_new_tokens, context_length(packed.model), "max_new_tokens")
    for warning in (*packed.warnings, *short):
        typer.echo(printable(warning), err=True)
    chosen = load_engine(engine) if engine else NativeEngineConfig()
    with step_engine(chosen, packed, codec, given, packed.device) as generator:
        found = run(packed, codec, prompts, sampling, num_responses=num, seed=seed, engine=generator)
    for text, answers in zip(prompt, found, strict=True):
        for answer in answers:
            whole = answer.text if chat else text + answer.text
            # Programs that read the output get the answer as it is; a terminal must not obey it.
            typer.echo(printable(whole) if sys.stdout.isatty() else whole)


@app.command()
def upload(
    run: Annotated[Path, typer.Argument(help="Run directory.", show_default=False)],
    url: Annotated[str | None, typer.Argument(help="Where to; the run's output_dir when left out.")] = None,
) -> None:
    """Upload a run to object storage."""
    from quartet.trainers.remote_run import upload_run

    typer.echo(upload_run(run, url, typer.echo))


for _command in (export, push):
    app.command()(_command)


@cache
def add_plugins() -> None:
    """Adds the commands of plug-ins, and their lines to the help.

    Raises:
        UserError: a plug-in that cannot be used, or a command that is there already.
    """
    for plugin in plugins():
        for group, commands in plugin.commands.items():
            for name, target in commands.items():
                if any(command.name == name for command in app.registered_commands):
                    raise UserError(
                        "a plug-in adds a command that is Quartet's own", found=name, remedy="uninstall the plug-in"
                    )
                app.command(name)(load(target))
                GROUPS[group] = (*GROUPS.get(group, ()), name)


def _add_job(job: str, kind: str, meaning: str) -> None:
    """The sub-command of a job with a recipe, which the public class ``kind`` runs."""

    def command(recipe: RecipePath, overrides: Overrides = None, resume: Resume = None) -> None:
        changes = overrides or []
        if _is_in_allocation():
            changes = [*changes, *_in_allocation(job, recipe, changes)]
        _run(job, kind, recipe, changes, resume)

    app.command(name=job, help=meaning)(command)


for _job, (_kind, _meaning) in JOBS.items():
    _add_job(_job, _kind, _meaning)


def _in_allocation(job: str, recipe: Path, overrides: list[str]) -> list[str]:
    """Overrides that make the processes of torchrun those of the run. With Ray the process ends here, with the run.

    Raises:
        UserError: the job runs in one process.
    """
    from quartet.cluster.torchrun import LauncherRank, run_under_torchrun
    from quartet.config.load import asks_for_ray

    launcher = LauncherRank.found(os.environ)
    if job == "rl" or (job in SUPERVISED and asks_for_ray(job, recipe, overrides)):
        # The same command once more, in a process of its own with a Ray cluster of all nodes.
        words = [sys.executable, "-m", "quartet", *sys.argv[1:], *ON_THE_CLUSTER]
        sys.exit(run_under_torchrun(words, launcher))
    if job in SUPERVISED:
        return ["cluster={type: torchrun}", f"processes={launcher.local_world_size}", f"nodes={launcher.num_nodes}"]
    if launcher.world_size > 1:
        raise UserError(
            f"quartet {job} runs in one process",
            found=f"{launcher.world_size} processes of torchrun",
            remedy="start it without torchrun",
        )
    return []


def _run(job: str, kind: str, recipe_path: Path, overrides: list[str], resume: ResumeChoice | None) -> None:
    import quartet
    from quartet.cli.show import show_evaluation, show_finished, show_run
    from quartet.config.load import load_recipe
    from quartet.observe.progress import Progress
    from quartet.trainers.run_files import completed_run

    recipe = load_recipe(job, recipe_path, overrides)
    # Of several processes of torchrun the first one alone speaks.
    is_silent = _is_in_allocation() and os.environ["RANK"] != "0"
    if done := completed_run(recipe, as_argument(resume)):
        if not is_silent:
            show_finished(*done)
        return
    gc.disable()  # nothing of what is imported is garbage
    try:
        job_class = getattr(quartet, kind)
    finally:
        gc.enable()
    with Progress() as progress:
        made = job_class(recipe, resume=as_argument(resume), progress=progress)
        result = made.run() if job == "eval" else made.train()
    if is_silent:
        return
    if job == "eval":
        show_evaluation(result)
    else:
        show_run(result.path, result.summary)


def _is_in_allocation() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def main() -> None:
    """Entry point: turns user errors and signals into messages and exit statuses."""
    share_cores()
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
    """The same command with ``--resume``, and the directory where it was not given."""
    from quartet.cli.show import command_name
    from quartet.config.yamls import override_word

    words = [shlex.quote(word) for word in arguments if word.partition("=")[0] != RESUME]
    if arguments[0] == "quickstart":
        named = any(word.startswith("--out") for word in arguments)
        where = [] if named else ["--out", shlex.quote(str(path))]
    else:
        from quartet.trainers.remote_run import is_draft

        named = is_draft(path) or any(str(path) in word for word in arguments)
        where = [] if named else [override_word("output_dir", str(path))]
    resume = "--resume=auto" if "--resume=auto" in arguments else "--resume"
    return " ".join([command_name(), *words, *where, resume])


if __name__ == "__main__":
    main()
