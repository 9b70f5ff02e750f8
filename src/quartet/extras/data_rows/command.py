"""`quartet data`: the rows of a recipe as they will be trained on, token by token, and what is left out and why."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quartet.config import UserError
from quartet.config.errors import escape_control

if TYPE_CHECKING:
    from quartet.extras.data_rows.rows import DataRows, ShownRow, Span

_BOUNDARY = "¦"
_TOKENS = 400
"""Most tokens that are shown of a run."""


def data(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML) of any job, which it names under job.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides: key=value, e.g. data.limit=1000, or @fragment.yaml")
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows shown; figures are those of all.", min=0)] = 3,
    start: Annotated[int, typer.Option(help="First row shown, from 1.", min=1)] = 1,
    source: Annotated[str | None, typer.Option(help="Which data: evaluation_data, ptx.data, …")] = None,
) -> None:
    """Rows as they will be trained on, token by token."""
    from quartet.config.load import load_recipe, read_job_name
    from quartet.extras.data_rows.rows import DataRows, sections_of

    job = read_job_name(recipe, overrides or [])
    sections = sections_of(load_recipe(job, recipe, overrides or []))
    if not sections:
        raise UserError("the recipe names no data", found="no section with a path", remedy="set data.path")
    key = source or next(iter(sections))
    if key not in sections:
        raise UserError(
            "the recipe has no such data", found=f"--source {key}", remedy=f"use one of {', '.join(sections)}"
        )
    found = DataRows(sections[key], key)
    for line in lines(found, f"{job}: {key}", rows, start):
        typer.echo(escape_control(line))
    if found.stopping.skipped:
        sys.exit(1)


def lines(found: DataRows, title: str, rows: int, start: int) -> Iterator[str]:
    """Yields rows as they are read, then what there is to say of all."""
    yield title
    yield from (f"  {source.path}" for source, _ in found.parts)
    if stops := found.stops():
        yield f"  {stops}"
    for row in found.rows(start, rows):
        yield from _row_lines(row, found.section.is_scored)
    yield ""
    yield from _figures(found)
    yield from (f"error: {error}" for error in found.errors())
    yield from (f"note: {note}" for note in found.notes())


def _row_lines(row: ShownRow, is_scored: bool) -> Iterator[str]:
    """Yields the lines of a row: its place and lengths, what is said of it, its tokens in runs that are learned or are
    not.
    """
    lengths = [
        f"{span.title} {len(span.ids)}"
        + f" ({sum(span.mask)} {_kind(span, is_scored)})" * any(span.mask)
        + f" (of {span.num_pictures} pictures)" * bool(span.num_pictures)
        for span in row.spans
    ]
    yield ""
    yield f"row {row.number}  {row.place}  {', '.join(lengths)}".rstrip()
    yield from (f"  note: {note}" for note in row.notes)
    if row.skipped is not None:
        yield f"  left out: {row.skipped}"
    if row.error is not None:
        yield from f"  stops the run: {row.error}".replace("\n", "\n  ").split("\n")
    for span in row.spans:
        first = 0
        for is_learned, run in groupby(span.mask):
            stop = first + len(list(run))
            kind = _kind(span, is_scored) if is_learned else "context"
            lead = f"  {span.title if not first else '':<12}{kind:<8}{stop - first:>5}  "
            for text in _token_lines(span, range(first, stop)):
                yield lead + text
                lead = " " * len(lead)
            first = stop


def _kind(span: Span, is_scored: bool) -> str:
    return "score" if is_scored else "label" if span.marks else "loss"


def _token_lines(span: Span, run: range) -> list[str]:
    """Returns the tokens of a run, apart by ``_BOUNDARY``; of a long run both ends."""
    shown = [
        (escape_control(span.texts[n]).replace("\t", "→").replace("\n", "↵\n") or "·")
        + (f"[{span.marks[n]}]" if n in span.marks else "")
        for n in run
        if span.is_shown(n)
    ]
    if len(shown) > _TOKENS:
        end = _TOKENS // 4
        shown[_TOKENS - end : -end] = [f"\n… {len(shown) - _TOKENS} tokens …\n"]
    return [line for line in _BOUNDARY.join(shown).split("\n") if line]


def _figures(found: DataRows) -> Iterator[str]:
    """Tells what becomes of the rows, and how long they are in tokens."""
    used, skipped, stopping = len(found.lengths), found.told.skipped.total(), found.stopping.skipped.total()
    yield f"{found.num_rows:,} rows: {used:,} used, {skipped:,} left out, {stopping:,} that stop the run"
    if not used:
        return
    lengths = sorted(found.lengths)
    at = {f"{q}%": lengths[min(used - 1, used * q // 100)] for q in (50, 95, 99)}
    places = ", ".join(
        f"{name} {value:,}" for name, value in {"shortest": lengths[0], **at, "longest": lengths[-1]}.items()
    )
    yield f"tokens of the longest sequence of a row: {places}; allowed {found.limit.max_tokens:,}"
