"""The report: what it embeds, what it refuses, and that a browser shows a model's output as mere text."""

from __future__ import annotations

import base64
import html.parser
import io
import json
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from quartet.batch.pictures import picture_ids
from quartet.config.errors import UserError
from quartet.extras.report.build import SCRIPTS, ReportLimits, build_report, collect_rollouts, collect_run
from quartet.observe.files import RowAppender, truncate_after
from quartet.observe.rollouts import RolloutRecord, read_rollout_step, rollouts_path, write_rollout_step
from quartet.observe.spans import SpanRecorder
from quartet.text.pictures import Picture, PictureStore

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
    record = next(
        r for r in read_rollout_step(tmp_path / "run" / "rl" / "rollouts", 4) if r.sequence_id == hostile["id"]
    )
    assert hostile["tokens"] == record.response_tokens, "exactly as the model wrote it"
    assert "{{ script }} {{ data }}" in hostile["tokens"]


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


def test_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run"):
        build_report(tmp_path / "missing")
    with pytest.raises(UserError, match="holds no run"):
        build_report(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        build_report(tmp_path / "file")


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
    """Attributes of the root, tags, classes and handlers; the text that is shown, whole and by class or tag."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.root: dict[str, str | None] = {}
        self.tags: list[str] = []
        self.classes: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.texts: dict[str, list[str]] = defaultdict(list)
        self._open: list[str] = []
        self.feed(page)
        assert self.root.get("data-ready") == "1" and "data-error" not in self.root, self.root

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "html":
            self.root = attributes
        self.tags.append(tag)
        classes = (attributes.get("class") or "").split()
        self.classes += classes
        self.handlers += [name for name in attributes if name.startswith("on")]
        self._open = [*classes, tag]
        for name in self._open:
            self.texts[name].append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = []

    def handle_data(self, data: str) -> None:
        for name in self._open:
            self.texts[name][-1] += data
        self.text += data if self.tags and self.tags[-1] not in ("script", "style") else ""


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
    assert "NaN" not in page
    assert {"onload", "offload"} <= set(dom.classes)
    lanes = re.findall(r'class="lane-name">(\w+)<small>(\d+) %', page)
    assert lanes == [("rollout", "60"), ("actor", "40")], "step 0, and not the one that has only begun"


@needs_browser
def test_page_runs_and_shows_hostile_text_inertly(tmp_path: Path, make_run: MakeRun) -> None:
    report = build_report(make_run(tmp_path / "run", steps=6))
    dom = Dom(render(report, tmp_path / "profile", "stage=rl&step=4&sample=0&colour=kl"))
    for name in ("chart", "gantt", "stack", "viewer", "legend", "sibling", "headline"):
        assert name in dom.classes, f"the page shows no {name}"
    assert "</script><img src=x onerror=\"document.title='owned'\">" in dom.texts["token"]
    assert "\\x1b" in "".join(dom.texts["token"]), "control characters are spelt out"
    assert any("⟨U+202E⟩" in token for token in dom.texts["token"]), "text cannot reorder its surroundings"
    assert "img" not in dom.tags
    assert dom.handlers == []
    assert dom.tags.count("script") == 2
    assert {"pos", "neg"} <= set(dom.classes)


@needs_browser
def test_an_address_leads_into_a_replay(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path / "run", steps=2)
    dom_text = render(build_report(run), tmp_path / "profile", "stage=rl&step=2&sample=1&token=3")
    dom = Dom(dom_text)
    record = read_rollout_step(run / "rl" / "rollouts", 2)[1]
    count = len(record.response_tokens)
    assert dom.classes.count("later") == count - 3 and dom.classes.count("now") == 1
    readout = re.search(r'class="chips readout".*?</div>', dom_text, re.DOTALL)
    assert readout is not None and f"token 3 of {count}" in readout[0]
    for name in ("log-prob.", "probability", "reward so far", "advantage", "value"):
        assert name in readout[0], name


@needs_browser
def test_page_of_a_run_that_has_only_begun(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"status": "failed", "name": "</title><script>x</script>"}')
    dom = Dom(render(build_report(tmp_path), tmp_path / "profile"))
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
    assert {"chart", "gantt", "broken"} <= set(dom.classes)


# Reward hacking ---------------------------------------------------------------------------

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">"


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
    stages = {stage["id"]: stage for stage in collect_run(hacked, ReportLimits(example_characters=50))["stages"]}
    assert stages["sft"]["alarms"] is None
    alarms = stages["rl"]["alarms"]
    assert alarms["steps"] == [4, 6] and alarms["text"] == "reward hacking? second"
    (example,) = alarms["examples"]
    assert example["now"] == "x" * 50 and example["training_reward_now"] is None and example["held_out_before"] == 1


def test_alarms_after_the_checkpoint_are_dropped_on_resume(hacked: Path) -> None:
    assert truncate_after(hacked / "rl" / "alarms.jsonl", 5) == 1
    stages = {stage["id"]: stage for stage in collect_run(hacked, ReportLimits())["stages"]}
    assert stages["rl"]["alarms"]["steps"] == [4]


@needs_browser
def test_a_browser_shows_the_banner_before_the_summary(hacked: Path, tmp_path: Path) -> None:
    truncate_after(hacked / "rl" / "alarms.jsonl", 5)
    summary = json.loads((hacked / "summary.json").read_text())
    summary["reward_hacking"] = {"raised": True, "text": "told once only"}
    (hacked / "summary.json").write_text(json.dumps(summary))
    dom = Dom(render(build_report(hacked), tmp_path / "profile"))
    assert dom.text.index("reward hacking? first") < dom.text.index("Summary")
    assert HOSTILE in dom.text and "img" not in dom.tags and "told once only" not in dom.text


# Episodes ---------------------------------------------------------------------------------


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
    write_rollout_step(tmp_path, 1, RECORDS)
    write_rollout_step(tmp_path, 2, [record(0, 0, "ask", "seven", step=2), record(0, 1, "noted", "eight", step=2)])
    warned: list[str] = []
    data = collect_rollouts(tmp_path, ReportLimits(), warned.append)
    assert data is not None and not warned
    texts = {key: prompt["text"] for key, prompt in data["prompts"].items()}
    assert sorted(texts.values()) == ["ask", "noted", "noted otherwise"]
    shown = [(s["id"], s["trajectory"], s["part"], texts[s["prompt"]]) for s in data["samples"]["1"]]
    assert shown == [
        ("1.0", "1.0", 0, "ask"),
        ("1.0.1", "1.0", 1, "noted"),
        ("1.1", "1.1", 0, "ask"),
        ("1.1.1", "1.1", 1, "noted otherwise"),
    ]
    again = [s["prompt"] for s in data["samples"]["2"]]
    assert again == [s["prompt"] for s in data["samples"]["1"][:2]], "the same state at another step"
    assert data["samples"]["1"][0]["columns"]["observation_mask"] == [0, 1, 0]
    assert data["counts"] == {"1": 2, "2": 1}, "responses, not sequences"
    assert data["note"] is None


def test_limits_cut_trajectories_not_sequences(tmp_path: Path) -> None:
    write_rollout_step(tmp_path, 1, RECORDS)
    data = collect_rollouts(tmp_path, ReportLimits(responses_per_group=1), [].append)
    assert data is not None
    assert [s["id"] for s in data["samples"]["1"]] == ["1.0", "1.0.1"]
    assert "1 of the 2 responses" in data["note"]


@needs_browser
def test_the_page_marks_observations_and_lays_the_sequences_side_by_side(tmp_path: Path) -> None:
    write_rollout_step(tmp_path / "rollouts", 1, RECORDS)
    (tmp_path / "run.json").write_text('{"job": "rl", "name": "episodes"}', encoding="utf-8")
    page = render(build_report(tmp_path), tmp_path / "profile", "step=1&sample=1")
    dom = Dom(page)
    assert "[higher]" in dom.texts["observed"] and "abc" in dom.texts["observed"], "in the text and in the legend"
    assert not {"one", "two", "three"} & set(dom.texts["observed"])
    assert {heading.split("  ")[0] for heading in dom.texts["h5"]} >= {"Response", "The trajectory", "The group"}
    assert "sequence 2 of trajectory 1.0" in page


# Pictures ----------------------------------------------------------------------------------


def with_pictures(kept: RolloutRecord, keys: Sequence[int], observed: Sequence[int] = ()) -> RolloutRecord:
    """Puts pictures of 3 rows before the prompt, and others behind the response, where an environment showed them."""
    before, behind = ([token for key in some for token in picture_ids(key, 3)] for some in (keys, observed))
    seen = len(behind)
    return replace(
        kept,
        prompt_ids=[*before, *kept.prompt_ids],
        prompt_tokens=[*["<image>", "", ""] * len(keys), *kept.prompt_tokens],
        response_ids=[*kept.response_ids, *behind],
        response_tokens=[*kept.response_tokens, *["<image>", "", ""] * len(observed)],
        columns={name: [*values, *[float(name == "observation_mask")] * seen] for name, values in kept.columns.items()},
        pictures=[f"{key:012x}" for key in (*keys, *observed)],
    )


@pytest.fixture
def pictured(tmp_path: Path) -> Path:
    """A run whose first picture two prompts share; the third is damaged, the fourth is gone."""
    store = PictureStore(tmp_path / "pictures")
    for key, size in ((1, (400, 20)), (2, (8, 8))):
        Image.new("RGB", size, "red").save(file := io.BytesIO(), "PNG")
        store.put(key, Picture(file.getvalue()))
    (tmp_path / "pictures" / f"{3:012x}").write_bytes(b"\x89PNG no more")
    one = with_pictures(record(0, 0, "ask", "one two"), [1, 2], observed=[3])
    other = with_pictures(record(1, 0, "else", "three"), [1, 4])
    write_rollout_step(tmp_path / "rollouts", 1, [one, with_pictures(record(0, 1, "ask", "four"), [1, 2]), other])
    (tmp_path / "run.json").write_text('{"job": "rl", "name": "pictures"}', encoding="utf-8")
    return tmp_path


def test_pictures_are_embedded_once_and_their_tokens_are_one(pictured: Path) -> None:
    data = collect_rollouts(pictured / "rollouts", ReportLimits(), [].append)
    assert data is not None
    first, second, third, fourth = (f"{key:012x}" for key in (1, 2, 3, 4))
    assert data["pictures"].keys() == {first, second, third, fourth}
    assert data["pictures"][third] is data["pictures"][fourth] is None
    sizes = {}
    for key in (first, second):
        kind, _, encoded = data["pictures"][key].partition(",")
        assert kind == "data:image/jpeg;base64"
        sizes[key] = Image.open(io.BytesIO(base64.b64decode(encoded))).size
    assert sizes == {first: (160, 8), second: (8, 8)}
    sample = data["samples"]["1"][0]
    assert sample["ids"] == [0, 1, third] and sample["tokens"] == ["one", "two", "<image>"] and sample["length"] == 3
    assert sample["columns"]["advantages"] == [0.5, -0.5, 0] and sample["columns"]["observation_mask"] == [0, 0, 1]
    prompt = data["prompts"][sample["prompt"]]
    assert prompt["ids"] == [first, second, *map(ord, "ask")] and prompt["tokens"] == ["<image>", "<image>", *"ask"]
    assert prompt["length"] == 9
    few = collect_rollouts(pictured / "rollouts", ReportLimits(pictures=1), [].append)
    assert few is not None and [url is None for url in few["pictures"].values()] == [False, True, True, True]


@needs_browser
def test_a_browser_shows_pictures_in_place_of_their_tokens(pictured: Path) -> None:
    page = render(build_report(pictured), pictured / "profile", "step=1&sample=0")
    dom = Dom(page)
    assert dom.classes.count("picture") > 4 and dom.tags.count("img") > 2
    assert f"picture {3:012x} is not here" in dom.text and "<image>" not in "".join(dom.texts["token"])
    assert page.count("data:image/jpeg") > 2 and page.count('"data:image/jpeg') == 2 + dom.tags.count("img")
