"""The report's banner for reward hacking: what it embeds, and that a browser shows it first and as mere text."""

from __future__ import annotations

import html.parser
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quartet.extras.report.build import ReportLimits, build_report, collect_run
from quartet.observe.files import RowAppender, truncate_after

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">"
MakeRun = Callable[..., Path]


def row(step: int, text: str, **example: Any) -> dict[str, Any]:
    shown = {"prompt": "47+38=", "before": "85", "now": HOSTILE, "held_out_before": 1.0, "held_out_now": 0.0}
    return {"step": step, "best_step": 1, "text": text, "examples": [{**shown, "verdict": "bad", **example}]}


@pytest.fixture
def hacked(tmp_path: Path, make_run: MakeRun) -> Path:
    run = make_run(tmp_path / "run", steps=6)
    rows = RowAppender(run / "rl" / "alarms.jsonl")
    rows.append(row(4, "reward hacking? first"))
    rows.append(row(6, "reward hacking? second", training_reward_now=None, now="x" * 2000))
    rows.close()
    return run


def test_the_last_alarm_is_shown_and_all_are_named(hacked: Path) -> None:
    stages = {stage["id"]: stage for stage in collect_run(hacked, ReportLimits(echo_characters=50))["stages"]}
    assert stages["sft"]["alarms"] is None
    alarms = stages["rl"]["alarms"]
    assert alarms["steps"] == [4, 6] and alarms["text"] == "reward hacking? second"
    (example,) = alarms["examples"]
    assert example["now"] == "x" * 50 and example["training_reward_now"] is None and example["held_out_before"] == 1


def test_alarms_after_the_checkpoint_are_dropped_on_resume(hacked: Path) -> None:
    assert truncate_after(hacked / "rl" / "alarms.jsonl", 5) == 1
    stages = {stage["id"]: stage for stage in collect_run(hacked, ReportLimits())["stages"]}
    assert stages["rl"]["alarms"]["steps"] == [4]


def test_a_damaged_file_is_named_and_costs_only_itself(hacked: Path) -> None:
    (hacked / "rl" / "alarms.jsonl").write_bytes(b"{\n")
    data = collect_run(hacked, ReportLimits())
    assert all(stage["alarms"] is None for stage in data["stages"])
    assert any("alarms.jsonl" in note for note in data["notes"])


class Words(html.parser.HTMLParser):
    """Tags, classes, and all text that is no script, style or attribute, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.root: dict[str, str | None] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "html":
            self.root = dict(attrs)
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] not in ("script", "style"):
            self.text += data


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome found")
def test_a_browser_shows_the_banner_before_the_summary(hacked: Path, tmp_path: Path) -> None:
    truncate_after(hacked / "rl" / "alarms.jsonl", 5)
    summary = json.loads((hacked / "summary.json").read_text())
    summary["reward_hacking"] = {"raised": True, "text": "told once only"}
    (hacked / "summary.json").write_text(json.dumps(summary))
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=2000",
        "--dump-dom",
        build_report(hacked).as_uri(),
    ]
    page = subprocess.run(command, capture_output=True, timeout=120, check=True).stdout.decode("utf-8", "replace")
    words = Words(page)
    assert words.root.get("data-ready") == "1" and "data-error" not in words.root, words.root.get("data-error")
    assert words.text.index("reward hacking? first") < words.text.index("Summary")
    assert HOSTILE in words.text and "img" not in words.tags
    assert "told once only" not in words.text
