"""Recipes load and run, the Python example runs and stays short, example rewards do what they say."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
EXAMPLE = ROOT / "examples" / "python_api.py"
MAX_EXAMPLE_LINES = 30


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None, name
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Recipes -------------------------------------------------------------------------------------------------


def test_recipes_name_functions_that_exist() -> None:
    targets = {t for path in RECIPES for t in re.findall(r'target: "?([\w/.]+:\w+)', path.read_text(encoding="utf-8"))}
    assert len(targets) >= 5
    for target in targets:
        file, _, name = target.partition(":")
        assert callable(getattr(load_example(Path(file).stem), name)), target


# The Python example --------------------------------------------------------------------------------------


def code_lines(path: Path) -> int:
    """Lines that hold code: no blank lines, no comments, no docstrings."""
    source = path.read_text(encoding="utf-8")
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:
            text = node.body[0]
            documented.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in documented
        for number, line in enumerate(source.splitlines(), start=1)
    )


def test_the_python_example_is_short() -> None:
    assert code_lines(EXAMPLE) <= MAX_EXAMPLE_LINES


def rows_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def runs_in(path: Path) -> dict[str, Path]:
    """By kind; where the reward model and the policy learned what the example wants."""
    runs = {run.name.rsplit("-", 2)[0]: run for run in (path / "runs").iterdir()}
    assert set(runs) == {"sft", "reward-model", "rl"}
    shares = [row["reward/reversed_digits"] for row in rows_of(runs["rl"]) if "reward/reversed_digits" in row]
    assert len(shares) == 15
    # Two thirds of the demonstrations are right, and a tenth of the wrong ones' digits are right by chance.
    assert sum(shares[:2]) / 2 < 0.8, shares
    # By how much they learn depends on what is sampled, and so on the processor: 0.87 on one, 0.9 on others.
    assert sum(shares[-5:]) / 5 > 0.85, shares
    return runs


@pytest.mark.parametrize("numbers", ["2", pytest.param("12", marks=pytest.mark.slow)])
def test_the_python_example_runs_with_as_many_threads(tmp_path: Path, numbers: str) -> None:
    """As a user runs it. All begin with the same model and demonstrations, which are seeded."""
    losses = []
    for threads in numbers:
        (tmp_path / threads).mkdir()
        # Threads that wait sleep: on a busy machine others need the processor.
        env = {**os.environ, "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive"}
        done = subprocess.run(
            [sys.executable, str(EXAMPLE)],
            cwd=tmp_path / threads, env=env, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        runs = runs_in(tmp_path / threads)
        losses.append(next(row["loss/sft"] for row in rows_of(runs["sft"]) if "loss/sft" in row))
    assert losses == pytest.approx([losses[0]] * len(numbers), rel=1e-5)
    AutoModelForCausalLM.from_pretrained(runs["rl"] / "model")


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
@pytest.mark.slow
def test_the_python_example_learns_with_other_seeds(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(seed)])
    with torch.random.fork_rng(devices=[]):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    runs_in(tmp_path)


# Example rewards -----------------------------------------------------------------------------------------


def test_final_number() -> None:
    final_number: Callable[..., list[float | None]] = load_example("reward_functions").final_number
    completions = ["It is 1,234.", "#### 1234.0", "12 34", "none at all", "5"]
    answers = ["<<1+1=2>>\n#### 1234", "1234", "1234", "#### 5", "no number"]
    assert final_number(completions=completions, answer=answers) == [1.0, 1.0, 0.0, 0.0, None]


def test_brevity() -> None:
    assert load_example("reward_functions").brevity(completions=["", "x" * 500]) == [0.0, -0.5]


def test_story_reward_parts() -> None:
    story = load_example("story_reward")
    assert story.complete_ending(['They ran. "Bye!"', "They ran.", "They ra", 'He said, "I am.', ""]) == [1, 1, 0, 0, 0]
    thirds = "Lily ran. " + "x" * 20, "x" * 20 + " Lily ran.", "Lily Lily Lily.", "Lilyan is here", ""
    shares = story.hero_stays(list(thirds), ["Lily"] * 5)
    assert shares == pytest.approx([1 / 3, 1 / 3, 1, 0, 0])
    speech = ['"Come here!" he said.', '"Hi!"', "He said come here.", '"Come here he said.']
    assert story.somebody_speaks(speech) == [1, 0, 0, 0]


def test_held_out_stories_share_no_hero_and_no_opening() -> None:
    def rows(name: str) -> list[dict[str, str]]:
        text = (ROOT / "examples" / f"{name}.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    train, held_out = rows("story_prompts"), rows("story_prompts_held_out")
    assert len(train) >= 64 and len(held_out) >= 32

    def openings(found: list[dict[str, str]]) -> set[str]:
        return {re.sub(r"\b(girl|boy)\b", "child", row["prompt"].replace(row["hero"], "…")) for row in found}

    assert not openings(train) & openings(held_out)
    assert not {row["hero"] for row in train} & {row["hero"] for row in held_out}
