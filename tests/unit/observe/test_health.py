"""Health of a run: every check finds its fault and nothing else, once, and all who look see the same."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quartet.config.recipe import SFTRecipe
from quartet.extras.report.build import TELLING, ReportLimits, collect_run, telling
from quartet.extras.report.watch import Watch
from quartet.observe.callbacks import Callback
from quartet.observe.health import CHECKS, HealthFinding, examine_health
from quartet.observe.metrics import find_metric
from quartet.observe.trackers import read_metrics
from quartet.trainers.run import RunDirectory

ROOT = Path(__file__).parents[3]
Fault = Callable[[int], dict[str, float]]


def healthy(step: int) -> dict[str, float]:
    """A run that learns: rewards rise, entropy falls to a third, an eighth of the answers is cut off."""
    return {
        "groups/zero_variance": 0.9 if step % 7 == 0 else 0.25,
        "reward/score_std": 0.3,
        "reward/score_mean": 0.2 + 0.02 * step,
        "rollout/truncated_frac": 0.6 if step % 5 == 2 else 0.125,
        "policy/entropy": 1.2 * 0.96**step,
        "kl/ref": 0.02 * step,
        "policy/grad_norm": 30.0 if step % 9 == 4 else 0.5,
        "critic/grad_norm": 2.0,
        "policy/ratio_max": 1.2,
        "policy/approx_kl": 1e-3,
        "policy/clip_frac_drift": 0.0,
    }


FAULTS: dict[str, Fault] = {
    "no_variance": lambda step: {"groups/zero_variance": 1.0},
    "constant_reward": lambda step: {"reward/score_std": 0.0, "reward/score_mean": 0.1},
    "never_ends": lambda step: {"rollout/truncated_frac": 1.0},
    "cut_off": lambda step: {"rollout/truncated_frac": 0.7},
    "entropy_collapsed": lambda step: {"policy/entropy": 0.01},
    "kl_exploded": lambda step: {"kl/ref": 3.0},
    "gradient_exploded": lambda step: {"policy/grad_norm": 50.0 if step % 2 else math.nan},
    "critic_gradient_exploded": lambda step: {"critic/grad_norm": 90.0},
    "loss_gradient_exploded": lambda step: {"optim/grad_norm": math.inf},
    "ratio_of_one": lambda step: {"policy/ratio_max": 1.0, "policy/approx_kl": 0.0},
}


def rows(fault: Fault, begins: int, ends: int = 30, total: int = 30) -> list[dict[str, float]]:
    bad = range(begins, ends + 1)
    return [{"step": s, "time_s": 0.0, **healthy(s), **(fault(s) if s in bad else {})} for s in range(1, total + 1)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_each_fault_is_found_by_its_check_alone_after_its_steps(check: Any) -> None:
    health = examine_health(rows(FAULTS[check.name], begins=16))
    assert list(health.findings) == [check.name] == health.present
    found = health.findings[check.name]
    assert (found.since, found.until) == (15 + check.steps, 30)
    assert examine_health(rows(FAULTS[check.name], begins=16, ends=14 + check.steps)).findings == {}, "one step too few"
    assert check.title in found.text and check.meaning in found.text and check.remedy in found.text
    assert all(name in found.text and find_metric(name) for name in check.needs)
    assert find_metric(f"health/{check.name}").name == "health/<check>"


def test_a_healthy_run_has_no_findings_and_logs_nothing() -> None:
    health = examine_health(rows(FAULTS["cut_off"], begins=99))
    assert health.findings == {} and health.metrics() == {}


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lambda step: {"rollout/truncated_frac": max(0.1, 0.95 - step / 20)}, "answers that learn to end"),
        (lambda step: {"policy/entropy": 0.04}, "an entropy that was low from the beginning"),
        (lambda step: {"kl/ref": 5.0 - step / 10}, "distillation: the teacher comes nearer"),
        (lambda step: {"policy/grad_norm": 300.0}, "a loss of large scale"),
        (lambda step: {"policy/ratio_max": 1.0, "policy/approx_kl": 0.0, "policy/grad_norm": 0.0}, "no gradient"),
        (lambda step: {"reward/score_std": 0.0, "reward/score_mean": step / 10}, "one answer a step"),
        (lambda step: {"policy/ratio_max": 1.00002}, "a small step is a step"),
    ],
)
def test_what_looks_alike_is_left_alone(fault: Fault, why: str) -> None:
    assert examine_health(rows(fault, begins=1)).findings == {}, why


# Everywhere ------------------------------------------------------------------------------------------------


class Told(Callback):
    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self.logged: list[int] = []

    def on_health(self, step: int, finding: HealthFinding) -> None:
        self.found.append((step, finding.check.name))

    def on_log(self, step: int, metrics: Any) -> None:
        self.logged += [step] if metrics.get("health/cut_off") == 1 else []


def log(path: Path, steps: range, start: int, **options: Any) -> tuple[Told, list[str]]:
    told, said = Told(), list[str]()
    run = RunDirectory(path, SFTRecipe(output_dir=str(path)), tell=said.append, callbacks=[told], **options)
    with run:
        run.start(start)
        for row in rows(FAULTS["cut_off"], begins=4)[steps.start - 1 : steps.stop - 1]:
            run.log(int(row["step"]), {k: v for k, v in row.items() if k not in ("step", "time_s")})
        run.warnings_said = list(run.warnings)  # type: ignore[attr-defined]
        assert all(text in run.warnings for text in said if "cut off" in text), "kept for the end of the run"
    return told, said


def test_the_run_tells_it_once_to_terminal_callbacks_metrics_watch_and_report(tmp_path: Path) -> None:
    told, said = log(tmp_path / "run", range(1, 10), 0)
    assert told.found == [(8, "cut_off")] and told.logged == [8, 9]
    (line,) = [text for text in said if "cut off" in text]
    assert line.startswith("step 8: most answers are cut off at the limit (rollout/truncated_frac 0.7).")
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "health/cut_off" in row] == [
        8,
        9,
    ]
    watched, screen = Watch(tmp_path / "run"), io.StringIO()
    watched.poll()
    Console(file=screen, width=400).print(watched.screen())
    assert "NOT WELL since step 8: most answers are cut off" in screen.getvalue()
    (stage,) = collect_run(tmp_path / "run", ReportLimits())["stages"]
    (found,) = stage["health"]
    assert (found["since"], found["until"]) == (8, None) and found["values"] == {"rollout/truncated_frac": 0.7}
    assert stage["telling"][0] == "rollout/truncated_frac"


def test_a_resumed_run_knows_what_it_said(tmp_path: Path) -> None:
    log(tmp_path / "run", range(1, 10), 0)
    told, said = log(tmp_path / "run", range(10, 12), 9, resume=True)
    assert told.found == [] and told.logged == [10, 11] and not any("cut off" in text for text in said)


# The curves that are shown first ---------------------------------------------------------------------------


def test_curves_that_never_move_come_last_and_bad_ones_first() -> None:
    health = examine_health(rows(FAULTS["no_variance"], begins=1))
    series = {name: [row[name] for row in rows(FAULTS["no_variance"], begins=1)] for name in healthy(1)}
    series["policy/clip_frac"] = [0.0] * 30
    order = [name for name in telling(series, health) if name in series]
    assert order[0] == "groups/zero_variance" and order[-1] == "policy/clip_frac"
    assert order.index("rollout/truncated_frac") < order.index("policy/approx_kl")
    few = {name: values[:3] for name, values in series.items()}
    assert telling(few, examine_health([])) == list(TELLING), "three rows that are equal say nothing"


# The public table ------------------------------------------------------------------------------------------


def test_the_page_has_the_table_and_no_false_alarm_in_the_recorded_curves() -> None:
    spec = importlib.util.spec_from_file_location("health_counts", ROOT / "benchmarks" / "health.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "how-to" / "not-learning.md").read_text(encoding="utf-8")
    for check in CHECKS:
        row = next(line for line in page.splitlines() if line.startswith(f"| `health/{check.name}` |"))
        assert check.when in row and check.meaning in row and check.remedy in row, check.name
    recorded = script.recorded_curves()
    assert len(recorded) >= 45
    assert script.false_alarms(recorded) == {check.name: [] for check in CHECKS}
