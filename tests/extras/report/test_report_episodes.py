"""The viewer of episodes: which tokens were observations, and the several sequences of a trajectory."""

from __future__ import annotations

import html.parser
import shutil
import subprocess
from pathlib import Path

import pytest

from quartet.extras.report.build import ReportLimits, build_report, collect_rollouts
from quartet.observe.rollouts import RolloutRecord, write_step

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def record(
    trajectory: int, part: int, prompt: str, tokens: str, *, prompt_id: str = "p0", step: int = 1
) -> RolloutRecord:
    """``tokens`` apart by spaces; those in brackets are observations."""
    pieces = tokens.split()
    observed = [float(piece.startswith("[")) for piece in pieces]
    return RolloutRecord(
        sequence_id=f"{step}.{trajectory}" + (f".{part}" if part else ""),
        prompt_id=prompt_id,
        response_index=trajectory,
        policy_version=step,
        prompt_ids=[ord(c) for c in prompt],
        response_ids=list(range(len(pieces))),
        prompt_tokens=list(prompt),
        response_tokens=pieces,
        prompt_text=prompt,
        response_text="".join(pieces),
        finish_reason="stop",
        rewards={"environment": 1.0},
        score=float(trajectory),
        group=str(step),
        columns={
            "advantages": [0.5 - n for n in range(len(pieces))],
            "loss_mask": [1.0 - o for o in observed],
            "observation_mask": observed,
        },
        trajectory_id=f"{step}.{trajectory}",
        part=part,
    )


RECORDS = [
    record(0, 0, "ask", "one [higher] two"),
    record(0, 1, "noted", "three"),
    record(1, 0, "ask", "four"),
    record(1, 1, "noted otherwise", "five six"),
]


def test_states_and_sequences_reach_the_page(tmp_path: Path) -> None:
    write_step(tmp_path, 1, RECORDS)
    write_step(tmp_path, 2, [record(0, 0, "ask", "seven", step=2), record(0, 1, "noted", "eight", step=2)])
    warned: list[str] = []
    data = collect_rollouts(tmp_path, ReportLimits(), warned.append)
    assert data is not None and not warned
    assert {key: prompt["text"] for key, prompt in data["prompts"].items()} == {
        "p0": "ask",
        "p0#1": "noted",
        "p0#2": "noted otherwise",
    }
    shown = [(s["id"], s["trajectory"], s["part"], s["prompt"]) for s in data["samples"]["1"]]
    assert shown == [
        ("1.0", "1.0", 0, "p0"),
        ("1.0.1", "1.0", 1, "p0#1"),
        ("1.1", "1.1", 0, "p0"),
        ("1.1.1", "1.1", 1, "p0#2"),
    ]
    assert [s["prompt"] for s in data["samples"]["2"]] == ["p0", "p0#1"], "the same state at another step"
    assert data["samples"]["1"][0]["columns"]["observation_mask"] == [0, 1, 0]
    assert data["counts"] == {"1": 2, "2": 1}, "responses, not sequences"
    assert data["note"] is None


def test_limits_cut_trajectories_not_sequences(tmp_path: Path) -> None:
    write_step(tmp_path, 1, RECORDS)
    data = collect_rollouts(tmp_path, ReportLimits(responses_per_group=1), [].append)
    assert data is not None
    assert [s["id"] for s in data["samples"]["1"]] == ["1.0", "1.0.1"]
    assert "1 of the 2 responses" in data["note"]


def test_echoes_are_of_first_states(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_step(tmp_path, step, [record(0, 0, "ask", "a", step=step), record(0, 1, "noted", "b", step=step)])
    data = collect_rollouts(tmp_path, ReportLimits(steps=2), [].append)
    assert data is not None
    assert [(e["step"], e["text"], e["count"]) for e in data["echoes"]["p0"]] == [(2, "a", 1)]


class Texts(html.parser.HTMLParser):
    """The text of every element of a class, and of every heading."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.observed: list[str] = []
        self.headings: list[str] = []
        self._into: list[str] | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = (dict(attrs).get("class") or "").split()
        self._into = self.observed if "observed" in classes else self.headings if tag == "h5" else None
        if self._into is not None:
            self._into.append("")

    def handle_endtag(self, tag: str) -> None:
        self._into = None

    def handle_data(self, data: str) -> None:
        if self._into is not None:
            self._into[-1] += data


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome found")
def test_the_page_marks_observations_and_lays_the_sequences_side_by_side(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    write_step(tmp_path / "rollouts", 1, RECORDS)
    (tmp_path / "run.json").write_text('{"job": "rl", "name": "episodes"}', encoding="utf-8")
    page = build_report(tmp_path)
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [
        CHROMIUM,
        *flags,
        profile,
        "--virtual-time-budget=2000",
        "--dump-dom",
        f"{page.as_uri()}#step=1&sample=1",
    ]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True).stdout.decode("utf-8", "replace")
    assert 'data-ready="1"' in done and "data-error" not in done
    texts = Texts(done)
    assert "[higher]" in texts.observed and "abc" in texts.observed, "in the text and in the legend"
    assert not {"one", "two", "three"} & set(texts.observed)
    assert {heading.split("  ")[0] for heading in texts.headings} >= {"Response", "The trajectory", "The group"}
    assert "sequence 2 of trajectory 1.0" in done
