"""The report: what it embeds, what it refuses, and that a browser shows a model's output as mere text."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quartet.config.errors import UserError
from quartet.extras.report.build import SCRIPTS, ReportLimits, build_report, collect_run, compact, evenly
from quartet.observe.rollouts import read_step, rollouts_path
from quartet.observe.spans import SpanRecorder

ASSETS = Path(__file__).parents[3] / "src" / "quartet" / "extras" / "report" / "assets"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MakeRun = Callable[..., Path]


class Page(html.parser.HTMLParser):
    """What a browser would see: tags, and the text of each script and style element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.raw.append("")

    def handle_data(self, data: str) -> None:
        if self.raw and self.tags[-1][0] in ("script", "style"):
            self.raw[-1] += data

    @property
    def data(self) -> dict[str, Any]:
        scripts = [attrs for tag, attrs in self.tags if tag in ("script", "style")]
        index = next(i for i, attrs in enumerate(scripts) if attrs.get("id") == "data")
        return json.loads(self.raw[index])


def load(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_page_is_complete_in_itself(tmp_path: Path, make_run: MakeRun) -> None:
    path = build_report(make_run(tmp_path / "run"))
    assert path == tmp_path / "run" / "report.html"
    page = load(path)
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "base"), f"<{tag}> loads something"
        assert "src" not in attributes
        assert "href" not in attributes
    text = path.read_text(encoding="utf-8")
    assert "connect-src" not in text
    code = text.replace("http://www.w3.org/2000/svg", "")
    assert "http:" not in code
    assert "https:" not in code
    assert "@import" not in code
    assert "url(" not in code
    assert "default-src 'none'" in text


def test_hostile_output_stays_data(tmp_path: Path, make_run: MakeRun) -> None:
    page = load(build_report(make_run(tmp_path / "run")))
    assert [tag for tag, _ in page.tags if tag == "script"] == ["script"] * 2
    samples = [s for stage in page.data["stages"] if stage["rollouts"] for s in stage["rollouts"]["samples"]["4"]]
    hostile = next(s for s in samples if s["tokens"][0].startswith("</script>"))
    record = next(r for r in read_step(tmp_path / "run" / "rl" / "rollouts", 4) if r.sequence_id == hostile["id"])
    assert hostile["tokens"] == record.response_tokens, "exactly as the model wrote it"
    assert "{{ script }} {{ data }}" in hostile["tokens"]


def test_run_name_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"name": "</title><script>alert(1)</script>"}))
    page = load(build_report(tmp_path, tmp_path / "elsewhere" / "page.html"))
    assert [tag for tag, _ in page.tags if tag == "script"] == ["script"] * 2


def test_scripts_never_make_markup_from_data() -> None:
    assert sorted(SCRIPTS) == sorted(p.name for p in ASSETS.glob("*.js"))
    for name in SCRIPTS:
        source = (ASSETS / name).read_text(encoding="utf-8")
        forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b\(|new Function|</script|\{\{ "
        assert not re.search(forbidden, source), name


def test_stages_come_in_the_order_they_ran(tmp_path: Path, make_run: MakeRun) -> None:
    data = collect_run(make_run(tmp_path / "run"), ReportLimits())
    assert [stage["id"] for stage in data["stages"]] == ["sft", "reward_model", "rl"]
    sft, _, rl = data["stages"]
    assert sft["rollouts"] is None
    assert sft["metrics"]["series"]["loss/sft"][0] > sft["metrics"]["series"]["loss/sft"][-1]
    assert rl["metrics"]["series"]["policy/grad_norm"][6] == "nan"
    assert rl["metrics"]["series"]["eval/exact_match"][:5].count(None) == 3
    assert data["explained"]["kl/ref"]["unit"] == "nats/token"
    assert data["recipe"].startswith("job: rl")
    assert data["notes"] == []


def test_timing_adds_up(tmp_path: Path) -> None:
    now = [50.0]
    recorder = SpanRecorder(tmp_path / "spans.jsonl", clock=lambda: now[0])
    for name, start, end in [("a", 50.0, 52.0), ("b", 51.0, 53.0), ("a", 55.0, 56.0)]:
        now[0] = start
        with recorder.span(name, step=1, tokens=10):
            now[0] = end
    recorder.close()
    timing = collect_run(tmp_path, ReportLimits())["stages"][0]["timing"]
    assert timing["seconds"] == {"a": [3], "b": [2]}
    assert timing["tokens"] == {"a": [20], "b": [10]}
    assert timing["wall_s"] == [6]
    assert timing["busy_s"] == [4]
    assert [(s["name"], s["start"], s["end"]) for s in timing["detail"]["1"]] == [
        ("a", 0, 2),
        ("b", 1, 3),
        ("a", 5, 6),
    ]


def _record(path: Path, rows: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """The timing of spans (name, start, end, step, role, mode)."""
    now = [0.0]
    recorder = SpanRecorder(path / "spans.jsonl", clock=lambda: now[0])
    for name, start, end, step, role, mode in rows:
        now[0] = start
        with recorder.span(name, step=step, role=role, mode=mode):
            now[0] = end
    recorder.close()
    timing: dict[str, Any] = collect_run(path, ReportLimits())["stages"][0]["timing"]
    return timing


def test_parts_that_move_are_shown_in_the_step_they_move_for(tmp_path: Path) -> None:
    """Movements name no step; one between two steps is the beginning of the later one."""
    timing = _record(
        tmp_path,
        [
            ("onload", 0, 1, None, "rollout", None),
            ("generate", 1, 4, 0, "rollout", "generate"),
            ("offload", 4, 5, None, "rollout", None),
            ("train_actor", 5, 9, 0, "actor", "train"),
            ("onload", 10, 11, None, "rollout", None),
            ("generate", 11, 14, 1, "rollout", "generate"),
            ("offload", 15, 16, None, "actor", None),
        ],
    )
    assert timing["steps"] == [0, 1]
    assert [[s["name"] for s in timing["detail"][step]] for step in ("0", "1")] == [
        ["onload", "generate", "offload", "train_actor"],
        ["onload", "generate", "offload"],
    ]
    assert timing["wall_s"] == [9, 6]


def test_spans_of_no_step_and_no_role_stay_outside(tmp_path: Path) -> None:
    timing = _record(tmp_path, [("load", 0, 2, None, None, None), ("update", 3, 4, 0, "sft", "train")])
    assert timing["steps"] == [None, 0] and sorted(timing["detail"]) == ["0", "null"]


def test_what_is_written_in_the_background_does_not_lengthen_its_step(tmp_path: Path) -> None:
    timing = _record(
        tmp_path,
        [
            ("update", 0, 4, 0, "sft", "train"),
            ("checkpoint_snapshot", 4, 5, 0, "writer", None),
            ("checkpoint", 5, 12, 0, "writer", "background"),
            ("update", 5, 9, 1, "sft", "train"),
        ],
    )
    assert timing["wall_s"] == [5, 4] and timing["busy_s"] == [5, 4]
    assert timing["seconds"]["checkpoint"] == [7, 0]


def test_limits_are_kept_and_said(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path / "run", steps=30)
    limits = ReportLimits(steps=4, tokens=4 * 200, tokens_per_response=12, responses_per_group=3)
    rollouts = collect_run(run, limits)["stages"][-1]["rollouts"]
    assert rollouts["steps"] == [1, 11, 20, 30], "first and last always"
    for samples in rollouts["samples"].values():
        assert 0 < sum(len(s["tokens"]) for s in samples) <= 200
        groups = [s["group"] for s in samples]
        assert all(groups.count(group) == 3 for group in groups), "whole groups, as far as the limit goes"
        assert all(len(s["tokens"]) == 12 < s["length"] for s in samples if s["length"] > 12)
    assert "4 of 30 steps" in rollouts["note"]
    assert "cut after 12 tokens" in rollouts["note"]


def test_small_runs_are_embedded_whole(tmp_path: Path, make_run: MakeRun) -> None:
    rollouts = collect_run(make_run(tmp_path / "run", steps=5), ReportLimits())["stages"][-1]["rollouts"]
    assert rollouts["note"] is None
    assert all(len(samples) == 24 for samples in rollouts["samples"].values())
    sample = next(s for s in rollouts["samples"]["1"] if s["tokens"][0] != "[tool")
    assert sample["columns"]["loss_mask"] == 1, "a constant column is one number"
    assert sample["rewards"]["style"] is None


def test_same_prompt_is_found_at_steps_that_are_not_embedded(tmp_path: Path, make_run: MakeRun) -> None:
    rollouts = collect_run(make_run(tmp_path / "run", steps=12), ReportLimits(steps=2))["stages"][-1]["rollouts"]
    assert rollouts["steps"] == [1, 12]
    steps = [echo["step"] for echo in rollouts["echoes"]["p3"]]
    assert steps == [4, 9], "of steps 4, 5, 8 and 9, as many as the limit says"
    assert all(echo["count"] == 4 and echo["text"] for echo in rollouts["echoes"]["p3"])


def test_damaged_parts_are_noted_not_fatal(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path / "run", steps=5)
    (run / "summary.json").write_text("{")
    (run / "sft" / "metrics.jsonl").write_text("nonsense\n{}\n")
    (run / "sft" / "spans.jsonl").write_text('{"other": 1}\n')
    rollout = rollouts_path(run / "rl" / "rollouts", 3)
    rollout.write_bytes(rollout.read_bytes()[:-20])
    with (run / "rl" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":6,"lo')
    data = load(build_report(run)).data
    notes = "\n".join(data["notes"])
    for name in ("summary.json", "sft/metrics.jsonl, line 1", "sft/spans.jsonl", "step_000003.jsonl.gz"):
        assert name in notes
    assert len(data["notes"]) == 4
    stages = {stage["id"]: stage for stage in data["stages"]}
    assert stages["rl"]["rollouts"]["steps"] == [1, 2, 4, 5]
    assert stages["rl"]["metrics"]["steps"] == [1, 2, 3, 4, 5]
    assert stages["sft"]["metrics"] is None


def test_metric_of_another_version_is_shown_unexplained(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"time_s":1.0,"future/metric":2.0}\n')
    data = collect_run(tmp_path, ReportLimits())
    assert data["explained"] == {"future/metric": None}
    assert data["stages"][0]["metrics"]["series"] == {"future/metric": [2]}


def test_not_a_run(tmp_path: Path, make_run: MakeRun) -> None:
    with pytest.raises(UserError, match="no such run"):
        build_report(tmp_path / "missing")
    with pytest.raises(UserError, match="holds no run"):
        build_report(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        build_report(tmp_path / "file")
    make_run(tmp_path / "runs" / "first")
    with pytest.raises(UserError, match=r"holds runs, and is none itself(?s:.)*runs/first"):
        build_report(tmp_path / "runs")
    assert not (tmp_path / "runs" / "report.html").exists()


def test_report_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be written"):
        build_report(tmp_path, tmp_path / "run.json" / "report.html")


@pytest.mark.parametrize("count", [1, 2, 5, 9, 20])
def test_evenly_keeps_the_ends(count: int) -> None:
    taken = evenly(range(10), count)
    assert len(taken) == min(count, 10) == len(set(taken))
    assert taken[-1] == 9
    assert count == 1 or taken[0] == 0
    assert taken == sorted(taken)


def test_compact_numbers() -> None:
    assert compact(0.123456789) == 0.12346
    assert compact(2.0) == 2
    assert compact(float("-inf")) == "-inf"
    assert compact(None) is None


# In a browser --------------------------------------------------------------------------------


def render(page: Path | str, profile: Path, fragment: str = "", budget_ms: int = 2000) -> str:
    """The document of a file or address after the page's own script has run, as the browser writes it out."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={profile}",
        f"--virtual-time-budget={budget_ms}",
        "--dump-dom",
        f"{page.as_uri() if isinstance(page, Path) else page}#{fragment}",
    ]
    return subprocess.run(command, capture_output=True, timeout=120, check=True).stdout.decode("utf-8", "replace")


class Dom(html.parser.HTMLParser):
    """Attributes of the root, tags with their classes, and the text of every token."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root: dict[str, str | None] = {}
        self.tags: list[str] = []
        self.classes: list[str] = []
        self.handlers: list[str] = []
        self.tokens: list[str] = []
        self._in_token = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "html":
            self.root = attributes
        self.tags.append(tag)
        classes = (attributes.get("class") or "").split()
        self.classes += classes
        self.handlers += [name for name in attributes if name.startswith("on")]
        self._in_token = "token" in classes
        if self._in_token:
            self.tokens.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_token = False

    def handle_data(self, data: str) -> None:
        if self._in_token:
            self.tokens[-1] += data


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome found")


@needs_browser
def test_the_timeline_of_a_placement_has_a_lane_per_role_with_its_movements(tmp_path: Path) -> None:
    _record(
        tmp_path,
        [
            ("load", 0, 1, None, None, None),
            ("onload", 1, 2, None, "rollout", None),
            ("generate", 2, 6, 0, "rollout", "generate"),
            ("offload", 6, 7, None, "rollout", None),
            ("train_actor", 7, 11, 0, "actor", "train"),
            ("checkpoint", 11, 90, 0, "writer", "background"),
            ("generate", 11, 12, 1, "rollout", "generate"),
        ],
    )
    written = render(build_report(tmp_path), tmp_path / "profile")
    page, dom = re.sub(r"<script.*?</script>", "", written, flags=re.DOTALL), Dom(written)
    assert "data-error" not in dom.root and "NaN" not in page
    assert {"onload", "offload"} <= set(dom.classes)
    lanes = re.findall(r'class="lane-name">(\w+)<small>(\d+) %', page)
    assert lanes == [("rollout", "60"), ("actor", "40")], "step 0, and not the one that has only begun"


@needs_browser
def test_page_runs_and_shows_hostile_text_inertly(tmp_path: Path, make_run: MakeRun) -> None:
    report = build_report(make_run(tmp_path / "run", steps=6))
    dom = Dom(render(report, tmp_path / "profile", "stage=rl&step=4&sample=0&colour=kl"))
    assert dom.root.get("data-ready") == "1"
    assert "data-error" not in dom.root, dom.root.get("data-error")
    for name in ("chart", "gantt", "stack", "viewer", "legend", "sibling", "headline"):
        assert name in dom.classes, f"the page shows no {name}"
    assert "</script><img src=x onerror=\"document.title='owned'\">" in dom.tokens
    assert "\\x1b" in "".join(dom.tokens), "control characters are spelt out"
    assert any("⟨U+202E⟩" in token for token in dom.tokens), "text cannot reorder its surroundings"
    assert "img" not in dom.tags
    assert dom.handlers == []
    assert dom.tags.count("script") == 2
    assert {"pos", "neg"} <= set(dom.classes)


@needs_browser
def test_an_address_leads_into_a_replay(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path / "run", steps=2)
    dom_text = render(build_report(run), tmp_path / "profile", "stage=rl&step=2&sample=1&token=3")
    dom = Dom(dom_text)
    assert "data-error" not in dom.root, dom.root.get("data-error")
    record = read_step(run / "rl" / "rollouts", 2)[1]
    count = len(record.response_tokens)
    assert dom.classes.count("later") == count - 3 and dom.classes.count("now") == 1
    readout = re.search(r'class="chips readout".*?</div>', dom_text, re.DOTALL)
    assert readout is not None and f"token 3 of {count}" in readout[0]
    for name in ("log-prob.", "probability", "reward so far", "advantage", "value"):
        assert name in readout[0], name


@needs_browser
@pytest.mark.parametrize("content", ["{}", '{"status": "failed", "name": "x", "versions": null}'])
def test_page_of_a_run_that_has_only_begun(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    dom = Dom(render(build_report(tmp_path), tmp_path / "profile"))
    assert dom.root.get("data-ready") == "1"
    assert "data-error" not in dom.root, dom.root.get("data-error")
    assert dom.classes.count("missing") == 3, "summary, recipe and stages are said to be missing"


@needs_browser
def test_page_of_a_stage_with_little_in_it(tmp_path: Path) -> None:
    """One step, one value, no columns: every division by an empty range is met here."""
    (tmp_path / "metrics.jsonl").write_text(
        '{"step":1,"time_s":1.0,"loss/policy":0.0,"kl/ref":null,"nonfinite":{"kl/ref":"nan"}}\n'
    )
    recorder = SpanRecorder(tmp_path / "spans.jsonl", clock=lambda: 1.0)
    with recorder.span("load"):
        pass
    recorder.close()
    dom = Dom(render(build_report(tmp_path), tmp_path / "profile"))
    assert dom.root.get("data-ready") == "1"
    assert "data-error" not in dom.root, dom.root.get("data-error")
    assert {"chart", "gantt", "broken"} <= set(dom.classes)
