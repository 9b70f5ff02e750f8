"""Ctrl-C between the stages, and a directory that another run holds."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from quartet.config import Interrupted, UserError
from quartet.extras.quickstart.run import Quickstart
from quartet.trainers.signals import stop_signals


def test_ctrl_c_between_stages_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(self: Quickstart) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Quickstart, "_initial_model", pressed)
    with pytest.raises(Interrupted) as raised:
        Quickstart(0, tmp_path / "q").run()
    assert raised.value.path == tmp_path / "q"
    assert json.loads((tmp_path / "q" / "run.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_comes_when_a_stage_is_complete_stops_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    class Complete:
        def train(self) -> None:
            with stop_signals() as signals, signals.graceful():
                os.kill(os.getpid(), number)
                assert signals.requested

    quickstart = Quickstart(0, tmp_path / "q", resume="auto")
    monkeypatch.setattr(Quickstart, "_initial_model", lambda self: None)
    monkeypatch.setattr(Quickstart, "_sft", lambda self: Complete())
    monkeypatch.setattr(Quickstart, "_measure", lambda *_: pytest.fail("went on with the next stage"))
    with pytest.raises(Interrupted) as raised:
        quickstart.run()
    assert raised.value.exit_status == 128 + number
    assert json.loads((tmp_path / "q" / "run.json").read_text())["status"] == "interrupted"


def test_a_failing_quickstart_does_not_say_that_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quickstart, "_initial_model", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Quickstart(0, tmp_path / "q").run()
    assert json.loads((tmp_path / "q" / "run.json").read_text())["status"] == "failed"


def test_a_quickstart_is_held_by_one_process(tmp_path: Path) -> None:
    first = Quickstart(0, tmp_path / "q")
    first._claim()
    with pytest.raises(UserError, match="is in use"):
        Quickstart(0, tmp_path / "q", resume="auto")._claim()
    with pytest.raises(UserError, match="already holds a run"):
        Quickstart(1, tmp_path / "q", resume="auto")._claim()
