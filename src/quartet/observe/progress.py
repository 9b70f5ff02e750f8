"""Progress bars in a terminal; elsewhere a plain line every few seconds and one at the end of each stage."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from quartet.config.errors import escape_control

Figure = float | int | str


def format_figure(value: Figure) -> str:
    """Writes four significant digits for floats, thousands separated for whole numbers, text as it is."""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}"


def _format_figures(figures: dict[str, Figure]) -> str:
    return escape_control("  ".join(f"{name} {format_figure(value)}" for name, value in figures.items()))


class ProgressBar:
    """One bar. A context manager: leaving the block ends the bar, as stopped where the block raised."""

    def __init__(self, owner: Progress, title: str, total: int | None, transient: bool) -> None:
        self._owner, self._title, self._total, self._transient = owner, title, total, transient
        self._done = 0
        self._figures: dict[str, Figure] = {}
        self._started_s = owner.clock()
        self._task = owner.bars.add_task(escape_control(title), total=total, figures="") if owner.bars else None

    def advance(self, n: int = 1, **figures: Figure) -> None:
        """Notes that ``n`` more units are done; ``figures`` (``loss=0.31``) replace those of the same name."""
        self._done += n
        if self._total is not None:
            self._total = max(self._total, self._done)  # more was done than was foreseen
        self._figures.update(figures)
        if self._owner.bars is not None and self._task is not None:
            self._owner.bars.update(
                self._task, completed=self._done, total=self._total, figures=_format_figures(self._figures)
            )
        elif not self._transient and self._owner.is_line_due():
            self._owner.print_line(self._line())

    def _line(self, verdict: str = "") -> str:
        """Returns the bar as plain text: title, count, per cent, seconds, figures."""
        count = f"{self._done:,}" if self._total is None else f"{self._done:,}/{self._total:,}"
        share = f" ({100 * self._done // self._total} %)" if self._total else ""
        seconds = f"{self._owner.clock() - self._started_s:.1f} s"
        parts = [f"{self._title}: {count}{share}", verdict, seconds, _format_figures(self._figures)]
        return "  ".join(part for part in parts if part)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._owner.bars is not None and self._task is not None:
            self._owner.bars.stop_task(self._task)
            if self._transient:
                self._owner.bars.remove_task(self._task)
        elif not self._transient or kind is not None:
            self._owner.print_line(self._line("done" if kind is None else "stopped"))


class Progress:
    """All bars of a run.

    ``with Progress() as progress, progress.stage("SFT", 200) as bar: bar.advance(loss=0.3)``

    Args:
        console: where to write; a terminal gets bars, anything else plain lines.
        interval_s: least seconds between two plain lines, over all stages together; last lines always appear.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console if console is not None else Console()
        self.clock = clock
        self._interval_s = interval_s
        self._last_line_s = clock()
        self.bars: RichProgress | None = None
        if self.console.is_terminal:
            self.bars = RichProgress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=28),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[figures]}", style="dim", markup=False),
                console=self.console,
            )

    def __enter__(self) -> Progress:
        if self.bars is not None:
            self.bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self.bars is not None:
            self.bars.stop()

    def stage(self, title: str, total: int | None = None, *, transient: bool = False) -> ProgressBar:
        """Begins a new bar. ``total`` None: unknown. ``transient``: gone when it ends (for a bar per rollout)."""
        return ProgressBar(self, title, total, transient)

    def print(self, text: str) -> None:
        """Prints a line of its own, above the bars. It may hold foreign text."""
        self.console.print(escape_control(text), markup=False, highlight=False, soft_wrap=True)

    def is_line_due(self) -> bool:
        """Tells whether the last plain line of a bar is long enough ago."""
        return self.clock() - self._last_line_s >= self._interval_s

    def print_line(self, text: str) -> None:
        """Prints a plain line in the place of a bar."""
        self._last_line_s = self.clock()
        self.print(text)
