"""Progress in a terminal and without one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from quartet.observe.progress import Progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain() -> tuple[Progress, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=False, width=200)
    return Progress(console, interval_s=5.0, clock=clock), out, clock


def test_plain_output_is_sparse_and_ends_with_a_line() -> None:
    progress, out, clock = plain()
    with progress, progress.stage("SFT [bold]", total=1000) as bar:
        for step in range(1000):
            clock.now += 0.012
            bar.advance(loss=1.0 / (step + 1))
    lines = out.getvalue().splitlines()
    assert len(lines) == 3, "two in twelve seconds, and the last"
    assert lines[-1].startswith("SFT [bold]: 1,000/1,000 (100 %)  done  12.0 s  loss 0.001")


def test_a_stage_that_raises_is_marked_stopped() -> None:
    progress, out, _ = plain()
    with pytest.raises(RuntimeError, match="boom"), progress, progress.stage("SFT") as bar:
        bar.advance(3)
        raise RuntimeError("boom")
    assert out.getvalue().splitlines() == ["SFT: 3  stopped  0.0 s"]


def test_terminal_shows_bars() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    with Progress(console) as progress:
        with (
            progress.stage("SFT", total=4) as bar,
            progress.stage("rollout", total=2, transient=True) as inner,
        ):
            bar.advance(4, loss=0.5)
            inner.advance(2)
        progress.print("[not markup]")
    text = out.getvalue()
    assert "SFT" in text
    assert "4/4" in text
    assert "[not markup]" in text
    final = text.rsplit("SFT", 1)[1]
    assert "loss 0.5" in final
    assert "rollout" not in final
