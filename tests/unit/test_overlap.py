"""The overlap benchmark: the published study's figures, and the page that shows them."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from quartet.config.placement import PlacementConfig
from quartet.observe.spans import Span

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
GUIDE = ROOT / "docs" / "placements.md"


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("overlap")


def test_the_studys_figures_fall_out(overlap: Any) -> None:
    for case in overlap.CASES:
        found = overlap.study(case, real_runs=0)
        assert overlap.off_by(case, found["virtual_s"]) is None
        if case.published_s is not None:
            assert found["samples_per_gpu_s"] == pytest.approx(256 / 16 / case.published_s, rel=0.05)


def test_the_path_goes_from_cause_to_cause_and_names_the_waits(overlap: Any) -> None:
    spans = [Span("a", 0, 2), Span("b", 0, 3), Span("c", 3, 4), Span("d", 4.5, 6), Span("e", 2, 5), Span("f", 3, 3)]
    causes = {("a", "d"), ("c", "d"), ("b", "c"), ("f", "c"), ("b", "f")}
    path = overlap.critical_path(spans, lambda earlier, later: (earlier.name, later.name) in causes)
    assert [(link.span.name, link.wait_s) for link in path] == [("b", 0.0), ("f", 0.0), ("c", 0.0), ("d", 0.5)]
    assert overlap.seconds_on_path(path) == {"b": 3, "c": 1, "d": 1.5, "wait": 0.5}


def test_the_whole_step_as_one_chunk_is_slower(overlap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The overlap is real: without chunks the rewards stand behind generation, 335 s instead of 295."""
    case = overlap.CASES[3]
    chunked = overlap.study(case, real_runs=0)["virtual_s"]
    monkeypatch.setattr(overlap, "CHUNK", overlap.SAMPLES)
    whole = overlap.study(case, real_runs=0)["virtual_s"]
    assert whole - chunked == pytest.approx(45.0 * 7 / 8)


def test_the_page_shows_what_the_benchmark_finds(overlap: Any) -> None:
    """Virtual seconds are the same on every machine, so the page's tables must be, too."""
    page = PAGE.read_text(encoding="utf-8")
    table = overlap.placements_table({name: overlap.side_by_side(name) for name in overlap.PLACEMENTS})
    added = {name: [overlap.added_by_heads(name, critic=of) for of in overlap.CRITICS] for name in overlap.PLACEMENTS}
    for one in (table, overlap.heads_table(added)):
        assert one in page, "run `python benchmarks/overlap.py` and put its tables into docs/benchmarks.md"
    for case in overlap.CASES:
        assert f"| {case.name} |" in page and f"| {overlap.study(case, real_runs=0)['virtual_s']:.1f} |" in page


def test_the_guides_fragments_are_the_benchmarks(overlap: Any) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    placements = [yaml.safe_load(block).get("placement") for block in blocks]
    fragments = {placement["type"]: placement for placement in placements if placement is not None}
    assert fragments.keys() == overlap.PLACEMENTS.keys()
    adapter: TypeAdapter[Any] = TypeAdapter(PlacementConfig)
    for name, fragment in fragments.items():
        assert adapter.validate_json(json.dumps(fragment), strict=True) == adapter.validate_python(
            overlap.PLACEMENTS[name]
        )
