"""`quartet config`: every key of a job's recipe, on the terminal or as the pages of docs/reference. `quartet init`: a
commented recipe to begin with, on standard output.

This module is imported for every command: the recipes are not, until one of them is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from quartet.extras.recipes.reference import Key, Section


def config(
    job: Annotated[str | None, typer.Argument(help="The command whose recipe it is: rl, sft, …")] = None,
    part: Annotated[str, typer.Argument(help="A part of it: rollout.sampling, algorithm.grpo.")] = "",
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
        show(job, part)


def init(
    job: Annotated[str, typer.Argument(help="The command to write it for: rl, sft, …")],
    method: Annotated[str | None, typer.Option(help="ppo, grpo, …; dpo, kto, … for preference.")] = None,
    reward: Annotated[str | None, typer.Option(help="model, math, function, judge, …")] = None,
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

    from quartet.extras.recipes.reference import purposes, sections

    console = Console(highlight=False, markup=False)

    def lines(head: list[str], rows: list[list[str]]) -> None:
        table = Table(*head, box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.columns[0].no_wrap = True
        for cells in rows:
            table.add_row(*(cell.replace("`", "") for cell in cells))
        console.print(table)

    if job is None:
        lines(["job", "what it does"], [[name, words] for name, words in purposes().items()])
    else:
        for section in sections(job, part):
            console.print(f"{section.address or f'quartet {job}'}   {section.meaning}".strip(), style="bold")
            lines(*_content(section))
            console.print()
    console.print(
        "keys of a job: quartet config rl; a part: quartet config rl algorithm.grpo; a recipe: quartet init rl"
    )


def pages() -> dict[str, str]:
    """Returns the text of each page of docs/reference by its file name: one a job, and README.md, which lists them."""
    from quartet.extras.recipes.reference import purposes, sections

    index = (
        "# Keys of every recipe\n\nWritten by `make reference` from the recipes' own classes; `quartet config` prints "
        "the same.\n\n"
        + _table(["job", "what it does"], [[f"[`{job}`]({job}.md)", text] for job, text in purposes().items()])
    )
    found = {"README.md": f"{index}\n"}
    for job, words in purposes().items():
        head = [f"# `quartet {job}`: every key", f"{words} On the command line: `quartet config {job}`."]
        parts = [_section(section) for section in sections(job, variants=True)]
        found[f"{job}.md"] = "\n\n".join([*head, *parts]) + "\n"
    return found


def _section(section: Section) -> str:
    """Writes a section in Markdown: its heading, and a table of its keys or of its variants."""
    is_variant = bool(section.tag and not section.variants)
    heading = [f"{'###' if is_variant else '##'} `{section.address}`", _cell(section.meaning)]
    head, rows = _content(section)
    return "\n\n".join([*heading * bool(section.address), _table(head, rows) if rows else "No keys of its own."])


def _content(section: Section) -> tuple[list[str], list[list[str]]]:
    """Returns the head and rows of the table of a section: its keys, or its variants."""
    if section.variants:
        return [f"`{section.tag}`", "what it is"], [[f"`{name}`", words] for name, words in section.variants.items()]
    return ["key", "default", "type", "meaning"], [
        [f"`{key.name}`", f"`{key.default}`" * bool(key.default), _kind(key, section.address), key.meaning]
        for key in section.keys
    ]


def _kind(key: Key, address: str) -> str:
    """Says type, whether the key must be set, and where the keys of a section are where that is not here."""
    kind = key.type + (", required" if key.default is None else "")
    is_elsewhere = key.section is not None and key.section != f"{address}.{key.name}".strip(".")
    return f"{kind}, keys of `{key.section}`" if is_elsewhere else kind


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_cell(text) for text in cells] for cells in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(text: str) -> str:
    """Writes text that Markdown shows as it is; between backticks only a table's bar needs care."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts).replace("|", "\\|")
