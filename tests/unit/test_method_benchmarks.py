"""The benchmarks of methods run, and their arithmetic is right."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_every_method_is_timed_in_every_layout(bench: Callable[[str], Any]) -> None:
    advantages = bench("advantages")
    found = advantages.measure(1000, repeats=1)
    assert found.keys() == advantages.METHODS.keys() and len(found) >= 13
    assert all(figures["seconds"] > 0 and figures["per_million"] > 0 for figures in found.values())
    assert advantages.table({1000: found, 2000: found}).count("| 1.00 |") == len(found)


def test_states_of_rloo_are_counted_as_seven_tenths_of_ppos(bench: Callable[[str], Any]) -> None:
    counted = bench("rloo_against_ppo").counted_bytes
    ppo, rloo = (sum(counted(name, 1000).values()) for name in ("PPO", "RLOO"))
    # Per parameter: 4 models, the engine's copy, 2 pairs of moments, one gradient; one model and one pair less.
    assert (ppo, rloo) == (40_000, 28_000)


def test_living_bytes_see_tensors_and_gradients_once() -> None:
    """In a process of its own, because tensors of other tests come and go."""
    code = """
import torch
from rloo_against_ppo import living_bytes
before = living_bytes()
weights = torch.zeros(100_000, requires_grad=True)
view = weights.view(100, 1000)
once = living_bytes() - before
view.sum().backward()
print(once, living_bytes() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["400000", "800000"]


def test_a_how_to_page_is_followed_and_timed(bench: Callable[[str], Any], tmp_path: Path) -> None:
    shell = "# a comment\ngrep \\\n  -c small a.txt\nfalse\nsleep 60\npip install x\n"
    page = f'```text title="a.txt"\na big file\n```\n```sh\n{shell}```\n'
    found = bench("how_to_pages").follow(page, tmp_path, {"big": "small"}, limit_s=3.0)
    assert (tmp_path / "a.txt").read_text() == "a small file\n"
    assert list(found.seconds) == ["grep    -c small a.txt"] and 0 < found.seconds["grep    -c small a.txt"] < 3.0
    assert found.failed == {"false": "exit status 1", "sleep 60": "exit status -9"}
    assert found.left_out == {"pip install x": "the clone is installed"}


def test_every_how_to_page_is_timed_or_needs_what_is_not_here(bench: Callable[[str], Any]) -> None:
    pages = {path.stem for path in (BENCHMARKS.parent / "docs" / "how-to").glob("*.md")} - {"index"}
    module = bench("how_to_pages")
    assert {*module.ORDER, *module.ELSEWHERE} == pages
    text = "".join((BENCHMARKS.parent / "docs/how-to" / f"{name}.md").read_text("utf-8") for name in module.ORDER)
    assert [old for old in module.INSTEAD if old not in text] == []
