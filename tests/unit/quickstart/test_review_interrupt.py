"""Ctrl-C between the stages, and a directory of a run that was killed in its first instant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quartet.config import Interrupted, UserError
from quartet.quickstart.run import Quickstart


def test_ctrl_c_between_stages_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(self: Quickstart) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Quickstart, "_initial_model", pressed)
    with pytest.raises(Interrupted) as raised:
        Quickstart(0, tmp_path / "q").run()
    assert raised.value.path == tmp_path / "q"
    assert json.loads((tmp_path / "q" / "run.json").read_text())["status"] == "interrupted"


def test_a_hidden_draft_is_no_obstacle_and_other_files_are(tmp_path: Path) -> None:
    (tmp_path / ".run.json.tmp").write_text("{")
    Quickstart(0, tmp_path, resume=True)._claim()
    assert json.loads((tmp_path / "run.json").read_text())["job"] == "quickstart"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        Quickstart(0, tmp_path / "other")._claim()
