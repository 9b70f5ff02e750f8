"""Progress bars in a terminal; elsewhere a plain line every few seconds and one at the end of each stage."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from quartet.config.printable import printable

Figure = float | int | str


def format_figure(value: Figure) -> str:
    """Four significant digits for floats, thousands separated for whole numbers, text as it is."""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}"


def _format_figures(figures: dict[str, Figure]) -> str:
    return printable("  ".join(f"{name} {format_figure(value)}" for name, value in figures.items()))


class ProgressBar:
    """One bar. A context manager: leaving the block ends the bar, as stopped where the block raised."""

    def __init__(self, owner: Progress, title: str, total: int | None, transient: bool, task: TaskID | None) -> None:
        self.title = title
        self.total = total
        self.done = 0
        self.figures: dict[str, Figure] = {}
        self.transient = transient
        self.task = task
        self.started_s = owner.clock()
        self.ended = False
        self._owner = owner

    def advance(self, n: int = 1, **figures: Figure) -> None:
        """``n`` more units are done; ``figures`` (``loss=0.31``) replace those of the same name."""
        self.done += n
        self.figures.update(figures)
        self._owner.refresh(self)

    def finish(self, **figures: Figure) -> None:
        """Ends the bar (a transient one disappears); ending it twice does nothing."""
        self._end("done", figures)

    def _end(self, verdict: str, figures: dict[str, Figure]) -> None:
        if self.ended:
            return
        self.figures.update(figures)
        self.ended = True
        self._owner.end(self, verdict)

    def line(self, verdict: str | None = None) -> str:
        """The bar as plain text: title, count, per cent, seconds, figures."""
        count = f"{self.done:,}" if self.total is None else f"{self.done:,}/{self.total:,}"
        share = f" ({100 * self.done // self.total} %)" if self.total else ""
        seconds = f"{self._owner.clock() - self.started_s:.1f} s"
        parts = [f"{self.title}: {count}{share}", verdict or "", seconds, _format_figures(self.figures)]
        return "  ".join(part for part in parts if part)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._end("done" if kind is None else "stopped", {})


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
        self._bars = self._make_bars() if self.console.is_terminal else None

    def _make_bars(self) -> RichProgress:
        return RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}", style="dim", markup=False),
            console=self.console,
        )

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def stage(self, title: str, total: int | None = None, *, transient: bool = False) -> ProgressBar:
        """A new bar. ``total`` None: unknown. ``transient``: gone when it ends (for a bar per rollout)."""
        task = None
        if self._bars is not None:
            task = self._bars.add_task(printable(title), total=total, figures="")
        return ProgressBar(self, title, total, transient, task)

    def print(self, text: str) -> None:
        """A line of its own, above the bars. It may hold foreign text."""
        self.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def refresh(self, stage: ProgressBar) -> None:
        """Shows the stage's present state (called by the stage)."""
        if self._bars is not None and stage.task is not None:
            self._bars.update(stage.task, completed=stage.done, figures=_format_figures(stage.figures))
        elif not stage.transient and self.clock() - self._last_line_s >= self._interval_s:
            self._last_line_s = self.clock()
            self.print(stage.line())

    def end(self, stage: ProgressBar, verdict: str) -> None:
        """Closes the stage's bar (called by the stage)."""
        if self._bars is not None and stage.task is not None:
            self._bars.update(stage.task, completed=stage.done, figures=_format_figures(stage.figures))
            self._bars.stop_task(stage.task)
            if stage.transient:
                self._bars.remove_task(stage.task)
        elif not stage.transient or verdict != "done":
            self._last_line_s = self.clock()
            self.print(stage.line(verdict))
