"""The benchmarks of methods run, and their arithmetic is right."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

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


def test_a_step_of_the_benchmark_has_groups_prompts_and_masked_tokens(bench: Callable[[str], Any]) -> None:
    advantages = bench("advantages")
    trajectory_T, action_mask_T, group_N = advantages.layout(2000, 100, True)
    assert int((trajectory_T == 0).sum()) == 100, "two sequences of 50 tokens"
    assert 0 < int(((trajectory_T >= 0) & ~action_mask_T).sum()) < 300
    assert torch.bincount(group_N).tolist() == [4] * (len(group_N) // 4)
    assert torch.equal(advantages.step(2000, 100, True).action_mask_T, action_mask_T)


def test_states_of_rloo_are_counted_as_seven_tenths_of_ppos(bench: Callable[[str], Any]) -> None:
    counted = bench("rloo_against_ppo").counted_bytes
    ppo, rloo = (sum(counted(name, 1000).values()) for name in ("PPO", "RLOO"))
    # Per parameter: 4 models, the engine's copy, 2 pairs of moments, one gradient; one model and one pair less.
    assert (ppo, rloo) == (40_000, 28_000)


def test_runs_that_write_in_the_background_are_timed_beside_those_that_wait(
    bench: Callable[[str], Any], tmp_path: Path
) -> None:
    background = bench("background")
    args = argparse.Namespace(smoke=True, repeats=1, threads=1, steps=2, folder=tmp_path)
    found = background.measure("tiny/sft", args)
    for side, spans in (("at once", {"checkpoint"}), ("background", {"checkpoint", "checkpoint_snapshot"})):
        assert found["sides"][side]["seconds"] > 0 and spans <= found["sides"][side]["spans"].keys()
        assert found["sides"][side]["held_up_s"] > 0
        assert found["sides"][side]["bytes"] > 3 * 4 * 1_700_000, "weights and two moments in fp32"
    assert background.table([found]).count("| tiny/sft |") == 2


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


@pytest.mark.parametrize("kind", ["fp32", "bf16 (`precision: bf16`, fp32 weights)"])
def test_precision_is_measured_and_training_clips_nothing(bench: Callable[[str], Any], kind: str) -> None:
    found = bench("precision").measure(kind, argparse.Namespace(model="tiny", smoke=True, threads=1))
    assert (found["tokens"], found["answers"]) == (64, 8)
    assert found["clipped_ppo"] == found["clipped_rloo"] == 0.0
    assert 0 < found["std"] < 0.2 and (found["std"] < 1e-4) == (kind == "fp32")


def test_steps_are_right_where_careful_work_has_them(bench: Callable[[str], Any]) -> None:
    right_steps = bench("process_rewards").right_steps
    assert right_steps("47+85=", "7+5=12;4+8+1=13;132") == [True, True, True]
    assert right_steps("47+85=", "7+5=12;4+8+0=12;122") == [True, False, False]
    assert right_steps("47+85=", "7+5=12;132;132;1") == [True, False, True, False], "compared place by place"


def test_labels_are_exchanged_at_the_given_rate(bench: Callable[[str], Any]) -> None:
    prompts = ["47+85="] * 400
    answers = [["7+5=12;4+8+1=13;132", ""]] * 400
    rows = bench("process_rewards").labelled(prompts, answers, 0, 0.1)
    labels = [label for row in rows for label in row["labels"]]
    assert len(rows) == 400 and len(labels) == 1200, "an empty answer has no steps"
    assert 0.07 < labels.count(False) / len(labels) < 0.13


def test_ranks_count_ties_as_half(bench: Callable[[str], Any]) -> None:
    ranked = bench("process_rewards").ranked
    assert ranked(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.5])) == pytest.approx((1 + 1 + 0.5 + 0) / 4)


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
