"""The live page and the comparison: what they are given, over HTTP, and what a browser makes of it."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_report import Dom, load, needs_browser, render

from quartet.config.errors import UserError
from quartet.config.load import dump_recipe, load_recipe
from quartet.extras.report import watch
from quartet.extras.report.build import ReportLimits, collect_run, collect_stage
from quartet.extras.report.compare import build_comparison, collect_comparison
from quartet.extras.report.watch import LiveRun, LiveServer
from quartet.observe.files import truncate_after
from quartet.observe.rollouts import read_rollout_step, write_rollout_step
from quartet.observe.spans import SpanRecorder
from quartet.observe.trackers import JsonlTracker

MakeRun = Callable[..., Path]


@pytest.fixture(autouse=True)
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL_S", -1.0)


@pytest.fixture
def run(tmp_path: Path, make_run: MakeRun) -> Path:
    path = make_run(tmp_path / "run", steps=4)
    (path / "summary.json").unlink()
    set_status(path, "running")
    return path


def set_status(path: Path, status: str) -> None:
    info = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**info, "status": status}))


def go_on(path: Path, step: int) -> None:
    """The run's next step, as a run writes it: rollouts, metrics, spans."""
    stage = path / "rl"
    write_rollout_step(stage / "rollouts", step, read_rollout_step(stage / "rollouts", 1))
    tracker, recorder = JsonlTracker(stage / "metrics.jsonl"), SpanRecorder(stage / "spans.jsonl")
    tracker.log(step, {"reward/score_mean": float(step), "rollout/repetition_frac": 0.5})
    with recorder.span("generate", step=step, role="rollout") as span:
        span.worker_s = {"rollout 0": 1.0, "rollout 1": 3.0}
    tracker.close()
    recorder.close()


def parts(news: dict[str, Any]) -> dict[str, Any]:
    """What is new, by its kind: of the run and of its stage ``rl``."""
    return {kind: part for piece in news["news"] if piece.get("stage", "rl") == "rl" for kind, part in piece.items()}


def test_news_are_what_has_changed(run: Path) -> None:
    served = LiveRun(run)
    seen = served.news(0)["next"]
    assert served.news(seen) == {"next": seen, "news": []}
    go_on(run, 5)
    found = served.news(seen)
    new = parts(found)
    assert set(new) == {"stage", "metrics", "explained", "timing", "rollouts"}
    whole = collect_run(run, ReportLimits())["stages"][-1]
    assert {piece["stage"] for piece in found["news"]} == {"rl"}
    assert (new["timing"], new["metrics"]) == (whole["timing"], whole["metrics"])
    assert new["explained"]["rollout/repetition_frac"]["unit"] == "fraction"
    assert new["rollouts"]["steps"] == [5], "those alone that are new"
    assert served.news(found["next"])["news"] == [], "nothing twice"


def test_news_of_status_alarms_and_another_stage(run: Path) -> None:
    served = LiveRun(run)
    seen = served.news(0)["next"]
    (run / "rl" / "alarms.jsonl").write_text('{"step":3,"text":"beware","examples":[]}\n')
    go_on(run, 5)
    (run / "eval").mkdir()
    JsonlTracker(run / "eval" / "metrics.jsonl").log(1, {"eval/score_mean": 1.0})
    set_status(run, "done")
    found = served.news(seen)
    assert parts(found)["alarms"]["text"] == "beware" and parts(found)["run"]["status"] == "done"
    assert [p["metrics"]["steps"] for p in found["news"] if p.get("stage") == "eval" and p.get("metrics")] == [[1]]


def test_a_step_that_is_logged_while_its_stage_is_met_is_in_the_news(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.move(run / "rl", tmp_path / "rl")
    served = LiveRun(run)
    seen = served.news(0)["next"]
    shutil.move(tmp_path / "rl", run / "rl")

    def collect(*args: Any) -> dict[str, Any]:
        found = collect_stage(*args)
        go_on(run, 5)
        monkeypatch.undo()
        return found

    monkeypatch.setattr(watch, "collect_stage", collect)
    assert parts(served.news(seen))["metrics"]["steps"] == [1, 2, 3, 4]
    monkeypatch.setattr(watch, "POLL_S", -1.0)
    found = parts(served.news(seen))
    assert found["metrics"]["steps"] == [1, 2, 3, 4, 5] and found["rollouts"]["steps"] == [5]


@pytest.mark.parametrize(
    ("file", "line"), [("metrics.jsonl", "nonsense"), ("spans.jsonl", '{"other":1}'), ("alarms.jsonl", "{")]
)
def test_what_is_damaged_is_told_with_the_next_step_and_as_by_a_page(run: Path, file: str, line: str) -> None:
    served = LiveRun(run)
    seen = served.news(0)["next"]
    with (run / "rl" / file).open("a") as opened:
        opened.write(f"{line}\n")
    go_on(run, 5)
    found = served.news(seen)
    notes = parts(found)["notes"]
    assert len(notes) == 1 and notes == collect_run(run, ReportLimits())["notes"] and file in notes[0]
    set_status(run, "done")
    assert parts(served.news(found["next"]))["notes"] == notes, "they stay"


def test_what_was_cut_back_is_replaced_and_what_is_gone_stays(run: Path) -> None:
    served = LiveRun(run)
    seen = served.news(0)["next"]
    truncate_after(run / "rl" / "metrics.jsonl", 2)
    assert parts(served.news(seen))["metrics"]["steps"] == [1, 2]
    for step in range(5, 20):
        go_on(run, step)
        now = served.news(seen)["next"]
    tokens = [piece["rollouts"]["steps"] for piece in served.news(0)["news"] if "rollouts" in piece]
    assert tokens == [[step] for step in range(8, 20)], "the newest are kept"
    assert served.news(10_000)["news"] == [{"reload": True}], "of a server that was there before"
    shutil.move(run, run.with_name("moved"))
    assert served.news(now)["news"] == [], "the page keeps what it has"
    with pytest.raises(UserError, match="no such run"):
        served.page()


@pytest.fixture
def server(run: Path) -> Iterator[LiveServer]:
    with LiveServer(run) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.05,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def get(server: LiveServer, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_server_answers_this_machine_alone(server: LiveServer, run: Path) -> None:
    assert server.server_address[0] == "127.0.0.1" and server.url == f"http://127.0.0.1:{server.server_port}/"
    status, page = get(server, "/")
    assert status == 200 and "connect-src 'self'" in page and page.count("<script") == 2
    assert {"metrics", "timing", "run"} <= parts(json.loads(get(server, "/news?after=x")[1])).keys()
    assert json.loads(get(server, f"/news?after={'9' * 40}")[1])["news"] == [{"reload": True}]
    assert get(server, "/", Host="elsewhere.example")[0] == 403 and get(server, "/../run.json")[0] == 404
    shutil.rmtree(run)
    assert get(server, "/")[0] == 503 and get(server, "/news?after=3")[0] == 200
    with pytest.raises(UserError, match=f"port {server.server_port} cannot be used"):
        run.mkdir()
        (run / "run.json").write_text("{}")
        LiveServer(run, server.server_port)


@needs_browser
def test_the_page_takes_in_what_comes(server: LiveServer, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with every question of the page; later the run ends. Nothing is loaded a second time."""
    asked, news = [0, 0], server.run.news

    def next_step(after: int) -> dict[str, Any]:
        asked[1] += 1
        if asked[1] <= 4:
            go_on(run, 4 + asked[1])
        elif asked[1] == 5:
            set_status(run, "done")
        return news(after)

    monkeypatch.setattr(server.run, "news", next_step)
    page = render(server.url, run.parent / "profile", budget_ms=20_000)
    assert int(Dom(page).root["data-polls"] or 0) >= 5
    body = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert 'aria-label="reward/score_mean, 8 steps' in body, "all steps are in the curve"
    assert '<span class="status done">done</span>' in body and "live · the run has ended" in body
    assert '<option value="8">8</option>' in body and "policy version" in body
    assert "rollout 1" in body and "4 of 4 steps" in body, "the straggler"


def test_comparison_tells_recipes_apart(tmp_path: Path, make_run: MakeRun) -> None:
    runs = [make_run(tmp_path / name / "run", steps=3) for name in "ab"]
    (runs[1] / "recipe.yaml").write_text(
        "job: rl\noutput_dir: b\nactor: {optim: {lr: 0.1}, lora: null, seed: 1}\nalgorithm: {type: ppo}\n"
    )
    data = collect_comparison(runs, ReportLimits())
    assert [run["name"] for run in data["runs"]] == [str(path) for path in runs]
    assert data["differences"] == [("actor.optim.lr", ["3e-05", "0.1"]), ("actor.seed", [None, "1"])], (
        "no key is as null"
    )
    assert [[stage["id"] for stage in run["stages"]] for run in data["runs"]] == [["sft", "reward_model", "rl"]] * 2
    (runs[0] / "recipe.yaml").write_text("]")
    (runs[0] / "rl" / "metrics.jsonl").write_text("nonsense\n")
    data = collect_comparison(runs, ReportLimits())
    assert data["differences"] is None and data["notes"][0].startswith(f"{runs[0]}: ")
    for wrong in ([runs[0]], [runs[0], runs[0]], [runs[0], tmp_path / "a" / ".." / "a" / "run"], runs * 6):
        with pytest.raises(UserError, match="2 to 10 different runs"):
            collect_comparison(wrong, ReportLimits())
    with pytest.raises(UserError, match="no such run"):
        collect_comparison([runs[0], tmp_path / "c"], ReportLimits())


BASE = ("actor.model.path=m", "data.path=d", "rewards.0.type=exact_match", "rollout.sampling.max_new_tokens=24")


def directories(path: Path, names: str) -> list[Path]:
    runs = [path / name for name in names]
    for run in runs:
        run.mkdir()
    return runs


def test_seeds_of_a_recipe_are_told_together(tmp_path: Path) -> None:
    runs = directories(tmp_path, "abcde")
    for run, lr, seed in zip(runs, ("1e-6", "1e-6", "3e-6", "3e-6", "1e-5"), (0, 1, 0, 1, 0), strict=True):
        changes = [f"actor.train.optim.lr={lr}", f"seed={seed}", f"output_dir={run}"]
        (run / "recipe.yaml").write_text(dump_recipe(load_recipe("rl", None, [*BASE, *changes])))
    assert collect_comparison(runs, ReportLimits())["seeds"] == [
        {"runs": [0, 1], "name": "actor.train.optim.lr=1e-06"},
        {"runs": [2, 3], "name": "actor.train.optim.lr=3e-06"},
    ]
    assert collect_comparison(runs[:2], ReportLimits())["seeds"] == [{"runs": [0, 1], "name": ""}]
    assert collect_comparison(runs[1:3], ReportLimits())["seeds"] == []


@needs_browser
def test_comparison_in_a_browser(tmp_path: Path, make_run: MakeRun) -> None:
    runs = [make_run(tmp_path / "one", steps=3), make_run(tmp_path / "other", steps=5)]
    (runs[1] / "recipe.yaml").write_text("job: rl\nseed: <b>\n")
    written = build_comparison(runs, tmp_path / "page.html")
    assert "connect-src" not in written.read_text() and len(load(written).data["runs"]) == 2
    page = render(written, tmp_path / "profile")
    dom = Dom(page)
    assert {"run0", "run1", "chart", "columns", "legend", "compared"} <= set(dom.classes)
    body = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "&lt;b&gt;" in body and dom.tags.count("b") == body.count("<b>") and "step 3" in body
