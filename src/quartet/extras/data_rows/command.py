"""`quartet data`: the rows of a recipe as they will be trained on, token by token, and what is left out and why."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from quartet.config import UserError
from quartet.config.errors import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quartet.extras.data_rows.rows import DataRows, ShownRow, Span

_CONTEXT, _LEARNED = ("grey85 on grey19", "grey85 on grey30"), ("white on dark_green", "white on green4")
"""Of the tokens of a run, in turn."""
_SPECIAL, _MARK = " bold underline", "bold white on dark_red"
_BOUNDARY = "¦"
_BARS, _BAR = 12, 40


def data(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML) of any job, which it names under job.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides: key=value, e.g. data.limit=1000, or @fragment.yaml")
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows shown; figures are those of all.", min=0)] = 3,
    start: Annotated[int, typer.Option(help="First row shown, from 1.", min=1)] = 1,
    source: Annotated[
        str | None, typer.Option(help="Which data: evaluation_data, ptx.data, …, or the number of a source, from 0.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Most tokens shown of a span; 0: all.", min=0)] = 400,
    plain: Annotated[bool, typer.Option("--plain", help="No colours; so it is where this is no terminal.")] = False,
) -> None:
    """Rows as they will be trained on, token by token."""
    from quartet.config.load import job_named, load_recipe
    from quartet.extras.data_rows.rows import DataRows, sections_of

    job = job_named(recipe, overrides or [])
    sections = sections_of(load_recipe(job, recipe, overrides or []))
    key, number = _chosen(source, list(sections))
    found = DataRows(sections[key], key, number)
    show(found, f"{job}: {key}", rows, start, tokens, Console(highlight=False, no_color=plain or None, soft_wrap=True))
    if found.stopping.skipped:
        sys.exit(1)


def _chosen(source: str | None, keys: Sequence[str]) -> tuple[str, int | None]:
    if not keys:
        raise UserError("the recipe names no data", found="no section with a path", remedy="set data.path")
    if source is None or source.isdecimal():
        return keys[0], None if source is None else int(source)
    key, _, number = source.partition(".sources.")
    if key not in keys or (number and not number.isdecimal()):
        remedy = f"one of {', '.join(keys)}, or the number of a source"
        raise UserError("the recipe has no such data", found=f"--source {source}", remedy=remedy)
    return key, int(number) if number else None


def show(found: DataRows, title: str, rows: int, start: int, tokens: int, console: Console) -> None:
    """Prints rows as they are read, then what there is to say of all."""
    from quartet.extras.data_rows.rows import template_effects

    is_plain = not console.is_terminal or console.no_color

    def line(text: str, style: str = "") -> None:
        console.print(Text(printable(text), style="" if is_plain else style))

    line(title, "bold")
    for source, _ in found.parts:
        line(f"  {source.path}")
    if stops := found.stops():
        line(f"  {stops}")
    for row in found.rows(start, rows):
        for row_line in _row_lines(row, found, tokens, None if is_plain else max(40, console.width)):
            console.print(Text(row_line.plain) if is_plain else row_line)
    line("")
    for figure in _figures(found):
        line(figure)
    if found.codec.tokenizer.chat_template is not None:
        line("chat template (of conversations; plain text is used as it is)", "bold")
        for effect in template_effects(found.codec.tokenizer):
            line(f"  {effect}")
    for error in found.errors():
        line(f"error: {error}", "bold red")
    for note in found.notes():
        line(f"note: {note}", "yellow")


def _row_lines(row: ShownRow, found: DataRows, tokens: int, width: int | None) -> Iterator[Text]:
    """Yields the lines of a row: its place and lengths, what is said of it, its tokens in runs that are learned or are
    not.

    Without a ``width`` nothing is folded, and a character instead of shades stands between tokens.
    """
    is_scored = found.section.is_scored
    lengths = [
        f"{span.title} {len(span.ids)}" + f" ({sum(span.mask)} {_kind(span, is_scored)})" * any(span.mask)
        for span in row.spans
    ]
    yield Text()
    yield Text(printable(f"row {row.number}  {row.place}  {', '.join(lengths)}".rstrip()), style="bold")
    yield from (Text(printable(f"  note: {note}"), style="yellow") for note in row.notes)
    if row.skipped is not None:
        yield Text(printable(f"  left out: {row.skipped}"), style="yellow")
    if row.error is not None:
        yield Text(f"  stops the run: {row.error}".replace("\n", "\n  "), style="bold red")
    special = {*found.codec.tokenizer.all_special_ids, *found.codec.eos_ids}
    for span in row.spans:
        first = 0
        for is_learned, run in groupby(span.mask):
            stop = first + len(list(run))
            kind = _kind(span, is_scored) if is_learned else "context"
            lead = f"  {span.title if not first else '':<12}{kind:<8}{stop - first:>5}  "
            for text in _token_lines(span, range(first, stop), special, tokens, width and width - len(lead)):
                yield Text.assemble((lead, "dim"), text)
                lead = " " * len(lead)
            first = stop


def _kind(span: Span, is_scored: bool) -> str:
    return "score" if is_scored else "label" if span.marks else "loss"


def _token_lines(span: Span, run: range, special: set[int], most: int, width: int | None) -> list[Text]:
    """Returns the tokens of a run, each in another shade than the one before; of a long run both ends."""
    lines, styles = [Text()], _LEARNED if span.mask[run.start] else _CONTEXT
    hidden = range(run.start + most - most // 4, run.stop - most // 4) if 0 < most < len(run) else range(0)
    for n in run:
        if n in hidden:
            if n == hidden.start:
                lines += [Text(f"… {len(hidden)} tokens …", style="dim"), Text()]
            continue
        mark = f"[{span.marks[n]}]" if n in span.marks else ""
        shown = printable(span.texts[n]).replace("\t", "→").replace("\n", "↵\n") or "·"
        for k, piece in enumerate(shown.split("\n")):
            if k or (width is not None and cell_len(lines[-1].plain) + cell_len(piece + mark) > width):
                lines.append(Text())
            lines[-1].append(piece, styles[n % 2] + _SPECIAL * (span.ids[n] in special))
        lines[-1].append(mark, _MARK)
        if width is None and n + 1 < run.stop and lines[-1].plain:
            lines[-1].append(_BOUNDARY)
    return [text for text in lines if text.plain]


def _figures(found: DataRows) -> list[str]:
    """Tells what becomes of the rows, how long they are in tokens, and shows a histogram of lengths."""
    used, skipped, stopping = len(found.lengths), found.told.skipped.total(), found.stopping.skipped.total()
    lines = [f"{found.num_rows:,} rows: {used:,} used, {skipped:,} left out, {stopping:,} that stop the run"]
    if not used:
        return lines
    lengths = sorted(found.lengths)
    at = {f"{q}%": lengths[min(used - 1, used * q // 100)] for q in (50, 95, 99)}
    places = ", ".join(
        f"{name} {value:,}" for name, value in {"shortest": lengths[0], **at, "longest": lengths[-1]}.items()
    )
    lines.append(f"tokens of the longest sequence of a row: {places}; allowed {found.limit.max_tokens:,}")
    low, width = lengths[0], max(1, -(-(lengths[-1] + 1 - lengths[0]) // _BARS))
    counts = [0] * (1 + (lengths[-1] - low) // width)
    for length in lengths:
        counts[(length - low) // width] += 1
    most = max(counts)
    for n, count in enumerate(counts):
        span = f"{low + n * width:,}–{low + (n + 1) * width - 1:,}"
        lines.append(f"{span:>15} {count:>9,} {'█' * -(-_BAR * count // most)}")
    return lines
