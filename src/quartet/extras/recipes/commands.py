"""`quartet config`: every key of a job's recipe, on the terminal or as the pages of docs/reference. `quartet init`: a
commented recipe to begin with, on standard output.

This module is imported for every command: the recipes are not, until one of them is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quartet.config.errors import UserError
from quartet.config.plugins import jobs

if TYPE_CHECKING:
    from rich.text import Text

    from quartet.extras.recipes.reference import Key


def complete_job(incomplete: str) -> list[str]:
    """Returns jobs that begin so, for shell completion."""
    return [job for job in jobs() if job.startswith(incomplete)]


def complete_part(ctx: typer.Context, incomplete: str) -> list[str]:
    """Returns addresses that begin so in the recipe of the job that stands before, for shell completion."""
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
    from quartet.extras.recipes.reference import REWARDS

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
    from quartet.extras.recipes.reference import starter

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
