"""`quartet config`: every key of a job's recipe, on the terminal or as the pages of docs/reference. `quartet init`: a
commented recipe to begin with, on standard output.

This module is imported for every command: the recipes are not, until one of them is asked for.

`quartet init`: a short recipe to begin with. Its comments are the keys' own descriptions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.text import Text

    from quartet.extras.recipes.reference import Key
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from quartet.config.algorithms import PPO, BestOfN, Distillation, RewardedAlgorithm
from quartet.config.errors import UserError
from quartet.config.load import methods, no_such_job
from quartet.config.nearest import nearest, usual_columns
from quartet.config.plugins import Starter, jobs, load, recipes
from quartet.config.preference import KTOLoss
from quartet.config.strict import chosen_member, item_annotation
from quartet.config.yamls import one_line
from quartet.extras.recipes.reference import meaning, purpose


def complete_job(incomplete: str) -> list[str]:
    """Returns jobs that begin so, for shell completion."""
    from quartet.config.plugins import jobs

    return [job for job in jobs() if job.startswith(incomplete)]


def complete_part(ctx: typer.Context, incomplete: str) -> list[str]:
    """Returns addresses that begin so in the recipe of the job that stands before, for shell completion."""
    from quartet.config import UserError
    from quartet.extras.recipes.reference import children

    job, (above, dot, _) = ctx.params.get("job") or "", incomplete.rpartition(".")
    try:
        names = [address for name in children(job, above) if (address := f"{above}{dot}{name}").startswith(incomplete)]
        # Two offers: the shell then puts no space behind a section, so that it can be gone into.
        return [*names, f"{names[0]}."] if len(names) == 1 and children(job, names[0]) else names
    except UserError:
        return []


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
        write.mkdir(parents=True, exist_ok=True)
        for name, text in pages().items():
            (write / name).write_text(text, encoding="utf-8")
    else:
        show(job, part or "")


def complete_method(ctx: typer.Context, incomplete: str) -> list[str]:
    """Returns methods of the job that begin so, for shell completion; of any job while it is not known."""
    from quartet.config.load import methods

    job = ctx.params.get("job")
    known = methods().get(job, ()) if job else dict.fromkeys(name for names in methods().values() for name in names)
    return [name for name in known if name.startswith(incomplete)]


def complete_reward(incomplete: str) -> list[str]:
    """Returns kinds of reward that begin so, for shell completion."""

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
        str | None, typer.Option(help="File, directory or hub name; columns of what is there are mapped.")
    ] = None,
) -> None:
    """A commented recipe: quartet init rl > recipe.yaml."""

    row = None
    if data is not None and Path(data).expanduser().exists():
        from quartet.config.common import DataConfig
        from quartet.data.readers import iter_rows

        row = next(iter_rows(DataConfig(path=data, limit=1))).values
    typer.echo(starter(job, method=method, reward=reward, data=data, row=row), nl=False)


def show(job: str | None, part: str) -> None:
    """Prints the keys at ``part`` of a job's recipe, or the jobs; raises ``UserError`` where there is nothing."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from quartet.extras.recipes.reference import purposes, sections

    console, hint = (
        Console(highlight=False),
        "quartet config rl lists the keys of a job, quartet init rl writes a recipe",
    )

    def lines(rows: list[tuple[Text, Text]]) -> None:
        table = Table.grid(padding=(0, 2, 0, 0), expand=False)
        table.add_column(width=32, overflow="fold")
        table.add_column(overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)

    if job is None:
        lines([(Text(name, "bold"), Text(words)) for name, words in purposes().items()])
    else:
        for section in sections(job, part):
            title = (section.address or f"quartet {job}", "bold underline")
            console.print(Text.assemble(title, "   ", section.meaning.strip()))
            names = section.variants.items()
            rows = [(Text.assemble(f"  {section.tag}: ", (name, "green")), Text(words)) for name, words in names]
            lines(rows or [_line(key, section.address) for key in section.keys])
            console.print()
            if section.variants:
                hint = f"keys of a choice: quartet config {job} {section.address}.{next(iter(section.variants))}"
        if not part:
            hint = f"a part: quartet config {job} log\na recipe to begin with: quartet init {job}"
    console.print(Text(hint, "dim"), soft_wrap=True)


def _line(key: Key, address: str) -> tuple[Text, Text]:
    from rich.text import Text

    shown = Text.assemble("  ", (f"{key.name}:", "bold"), " " if key.default else "", (key.default or "", "green"))
    return shown, Text.assemble((f"{_kind(key, address)}. ", "cyan"), key.meaning)


def _kind(key: Key, address: str, mark: str = "") -> str:
    """Says type, whether the key must be set, and where the keys of a section are where that is not here."""
    kind = key.type + (", required" if key.default is None else "")
    is_elsewhere = key.section is not None and key.section != f"{address}.{key.name}".strip(".")
    return f"{kind}, keys of {mark}{key.section}{mark}" if is_elsewhere else kind


def pages() -> dict[str, str]:
    """Returns the text of each page of docs/reference by its file name: one a job, and README.md, which lists them."""
    from quartet.extras.recipes.reference import purposes

    index = (
        "# Keys of every recipe\n\nWritten by `make reference` from the recipes' own classes; `quartet config` prints "
        "the same.\n\n"
        + _table(["job", "what it does"], [[f"[`{job}`]({job}.md)", text] for job, text in purposes().items()])
    )
    return {"README.md": f"{index}\n", **{f"{job}.md": _page(job, words) for job, words in purposes().items()}}


def _page(job: str, words: str) -> str:
    from quartet.extras.recipes.reference import sections

    parts = [f"# `quartet {job}`: every key", f"{words} On the command line: `quartet config {job}`."]
    for section in sections(job, variants=True):
        is_variant = bool(section.tag and not section.variants)
        if section.address:
            parts += [f"{'###' if is_variant else '##'} `{section.address}`", _cell(section.meaning)]
        if section.variants:
            rows = [[f"`{name}`", words] for name, words in section.variants.items()]
            parts.append(_table([f"`{section.tag}`", "what it is"], rows))
            continue
        rows = [
            [f"`{key.name}`", f"`{key.default}`" * bool(key.default), _kind(key, section.address, "`"), key.meaning]
            for key in section.keys
        ]
        parts.append(_table(["key", "default", "type", "meaning"], rows) if rows else "No keys of its own.")
    return "\n\n".join(parts) + "\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_cell(text) for text in cells] for cells in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(text: str) -> str:
    """Writes text that Markdown shows as it is; between backticks only a table's bar needs care."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")


REWARDS: Mapping[str, Mapping[str, Any]] = {
    "model": {"path": "runs/reward-model/model"},
    "process_model": {"path": "runs/process-reward/model"},
    "function": {"target": "my_rewards.py:score"},
    "exact_match": {"column": "answer"},
    "numeric": {"column": "answer"},
    "regex": {"pattern": r"answer is (\S+)", "column": "answer"},
    "format": {"tags": ["think", "answer"]},
    "length": {"max": 400, "unit": "characters"},
    "math": {"column": "answer"},
    "code": {"column": "tests", "timeout_s": 5.0},
    "http": {"url": "http://localhost:8000/score"},
    "judge": {"url": "http://localhost:8000/v1", "model": "name-at-the-server"},
}
"""By its type, what a reward must be told or is told first."""
_SUPERVISED: Mapping[str, Starter] = {
    "sft": Starter("demonstrations.jsonl", ("prompt", "completion"), {"model.path": "Qwen/Qwen2.5-0.5B"}),
    "reward-model": Starter("pairs.jsonl", ("prompt", "chosen", "rejected"), {"centring": 0.01}),
    "preference": Starter("pairs.jsonl", ("prompt", "chosen", "rejected"), {"train.optim.lr": 1e-6}),
}
_EXAMPLE = "# "
"""Before the last name of a key that is commented out."""
_WIDTH, _COLUMN = 100, 40
"""Longest line, and where comments begin."""
Row = Mapping[str, Any]


def starter(
    job: str, *, method: str | None = None, reward: str | None = None, data: str | None = None, row: Row | None = None
) -> str:
    """Writes a commented recipe of ``job`` with the keys that are changed first; it loads as it is.

    Args:
        row: the first row of ``data``, where it is there to be looked at: its columns are mapped where their names say
            what they are.

    Raises:
        UserError: no such job, method or reward, or the job has none to choose.
    """
    _check(job, "method", method, methods().get(job, ()))
    _check(job, "reward", reward, REWARDS if job in jobs() and is_rewarded(job) else ())
    if jobs()[job].is_supervised:
        keys, needs = _supervised(job, method or next(iter(methods().get(job, ())), None))
    elif job in _JOBS:
        keys, needs = _JOBS[job](method, reward)
    else:
        keys, needs = _of_plugin(_begun(job), method, reward)
    place = next(key for key in keys if key.endswith("data.path")).removesuffix("path")
    keys[f"{place}path"] = data or keys[f"{place}path"]
    if row is None:
        keys[f"{place}{_EXAMPLE}columns"] = {needs[0]: "question"}
    elif mapped := usual_columns(needs, row):
        keys[f"{place}columns"] = mapped
    if row is not None and any("\n\nHuman:" in text for text in row.values() if isinstance(text, str)):
        keys[f"{place}{_EXAMPLE}turns"] = "messages"
    keys[f"{place}overlong"] = "skip"
    called = "".join(f" --{name} {value}" for name, value in (("method", method), ("reward", reward)) if value)
    head = [
        f"# quartet {job} recipe.yaml",
        f"# Written by: quartet init {job}{called}. Every key: quartet config {job}",
        "# Lines that begin with # are examples of what else is often set.",
        f"# Columns of the data: {', '.join(needs)}; docs/data.md.",
    ]
    if reward == "math":
        head.append("# The reward needs math-verify: pip install 'quartet-rl[math]'")
    tree: dict[str, Any] = {}
    for address, value in {"job": job, "output_dir": f"runs/{job}", **keys}.items():
        *above, name = address.split(".")
        section = tree
        for part in above:
            section = section.setdefault(part, {})
        section[name] = value
    return "\n".join([*head, *_written(tree, recipes()[job])]) + "\n"


def is_rewarded(job: str) -> bool:
    """Says whether the job scores answers, so that a kind of reward can be chosen."""
    return job in _JOBS or (job not in _SUPERVISED and _begun(job).reward is not None)


def _begun(job: str) -> Starter:
    if (named := jobs()[job].starter) is None:
        remedy = f"write one: quartet config {job} lists its keys"
        raise UserError("there is no recipe to begin with for this job", found=job, remedy=remedy)
    found: Starter = load(named)
    return found


def _check(job: str, what: str, name: str | None, known: Any) -> None:
    if job not in jobs():
        raise no_such_job(job)
    if name is None or name in known:
        return
    if not known:
        raise UserError(f"{job} has no {what} to choose", found=f"--{what} {name}", remedy=f"leave --{what} out")
    remedy = " Else ".join(filter(None, (nearest(name, known), f"use one of {', '.join(known)}")))
    raise UserError(f"{job} knows no such {what}", found=f"--{what} {name}", remedy=remedy)


# Keys of jobs by their addresses, in the order of the recipe, and columns that the data need ----------------------


def _supervised(job: str, method: str | None) -> tuple[dict[str, Any], list[str]]:
    begun = _SUPERVISED.get(job) or _begun(job)
    keys = {
        "model.path": "runs/sft/model",
        "data.path": begun.data,
        f"{_EXAMPLE}evaluation_data": {"path": "held_out.jsonl"},
    }
    if method is not None:
        loss = methods()[job][method]()
        shown = ("beta", "odds_coef", *(["undesirable_weight"] if isinstance(loss, KTOLoss) else []))
        keys |= {"loss.name": method} | {f"loss.{key}": getattr(loss, key) for key in shown if hasattr(loss, key)}
    size = next(name for name in recipes()[job].model_fields if name.endswith("_per_step"))
    keys |= {"epochs": 1, size: 32} | (_training("train.", 1e-5) if begun.is_tuned else {})
    needs = ["prompt", "completion", "label"] if method == "kto" else list(begun.columns)
    return keys | {"train.optim.warmup_steps": 10, "train.optim.schedule": "cosine", **begun.keys}, needs


def _rl(method: str | None, reward: str | None) -> tuple[dict[str, Any], list[str]]:
    algorithm = methods()["rl"][method or "ppo"]()
    keys, needs = {"actor.model.path": "runs/sft/model", **_training("actor.train.", 1e-6)}, ["prompt"]
    if isinstance(algorithm, PPO):
        keys |= {"critic.train.optim.lr": 1e-5, "critic.warmup_steps": 4}
    if isinstance(algorithm, Distillation):
        keys["reference.path"] = "runs/teacher/model"
    if reward or not isinstance(algorithm, Distillation):
        kind = reward or ("model" if isinstance(algorithm, PPO) else "function")
        keys["rewards"], needs = [_reward(kind)], needs + _reward_columns(kind)
    keys["algorithm.name"] = algorithm.name
    if isinstance(algorithm, RewardedAlgorithm):
        keys["algorithm.kl.coef"] = algorithm.kl.coef
    if isinstance(algorithm, BestOfN):
        keys["algorithm.keep"] = algorithm.keep
    responses = getattr(algorithm, "default_responses", 1)
    keys |= {
        "data.path": "prompts.jsonl",
        "rollout.sampling.temperature": 1.0,
        "rollout.sampling.max_new_tokens": 256,
        f"{_EXAMPLE}evaluation": {"data": {"path": "held_out.jsonl"}},
        "steps": 100,
        "prompts_per_step": 16 if responses > 1 else 64,
        "responses_per_prompt": responses,
        "minibatches": 2,
    }
    return keys, needs


def _eval(method: str | None, reward: str | None) -> tuple[dict[str, Any], list[str]]:
    kind = reward or "function"
    keys = {
        "model.path": "runs/rl/model",
        "data.path": "held_out.jsonl",
        "rewards": [_reward(kind)],
        "sampling.temperature": 0.0,
        "sampling.max_new_tokens": 256,
        "samples_per_prompt": 1,
        f"{_EXAMPLE}compare": {"model": "runs/sft/model"},
    }
    return keys, ["prompt", *_reward_columns(kind)]


_JOBS = {"rl": _rl, "eval": _eval}


def _of_plugin(begun: Starter, method: str | None, reward: str | None) -> tuple[dict[str, Any], list[str]]:
    keys = {key: _reward(reward or "function") if key == begun.reward else value for key, value in begun.keys.items()}
    if begun.rl is None:
        return {**keys, "data.path": begun.data}, list(begun.columns)
    left_out = ("rewards", f"{_EXAMPLE}evaluation")
    rl = {f"{begun.rl}.{key}": value for key, value in _rl(method, None)[0].items() if key not in left_out}
    return keys | rl, list(begun.columns)


def _training(above: str, lr: float) -> dict[str, Any]:
    return {f"{above}{_EXAMPLE}precision": "bf16", f"{above}{_EXAMPLE}lora": {"rank": 16}, f"{above}optim.lr": lr}


def _reward(kind: str) -> dict[str, Any]:
    return {"type": kind, **REWARDS[kind]}


def _reward_columns(kind: str) -> list[str]:
    return [column for key, column in REWARDS[kind].items() if key == "column"]


def _written(section: Mapping[str, Any], model: type[BaseModel], indent: int = 0) -> Iterator[str]:
    """Writes the keys of a section as YAML, with what ``model`` says of each behind it; ``indent`` is added later."""
    for name, value in section.items():
        annotation = model.model_fields[name.removeprefix(_EXAMPLE)].annotation
        is_list = isinstance(value, list) and isinstance(value[0], dict)
        first = value[0] if is_list else value
        below = chosen_member(item_annotation(annotation) or annotation, first) if isinstance(first, dict) else None
        if below is not None and not name.startswith(_EXAMPLE):
            yield f"{name}:"
            for n, line in enumerate(_written(first, below, indent + 2)):
                yield ("- " if is_list and n == 0 else "  ") + line
            continue
        text = f"{name}: {one_line(value)}"
        comment = meaning(model, name.removeprefix(_EXAMPLE)) or purpose(model)
        column = max(_COLUMN - indent, len(text) + 2)
        words = textwrap.wrap(comment, max(_WIDTH - indent - column - 2, 24))
        yield f"{text:<{column}}# {words[0]}"
        yield from (f"{'':<{column}}# {more}" for more in words[1:])
