"""A package that adds a type of reward, installed with pip and used in a run; packages that cannot be used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"
SETUP = {"data": {"path": "prompts.jsonl"}, "actor": {"model": {"path": "model"}}, "algorithm": {"name": "rloo"}}


def quartet(folder: Path, *argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command with the packages in ``folder`` beside those that are installed."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "quartet", *argv]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def package(folder: Path, source: str) -> None:
    """Installs a module ``broken`` whose ``PLUGIN`` is a plug-in."""
    (folder / "broken.py").write_text(source, encoding="utf-8")
    (folder / "broken-1.dist-info").mkdir()
    (folder / "broken-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (folder / "broken-1.dist-info" / "entry_points.txt").write_text("[quartet.plugins]\nbroken = broken:PLUGIN\n")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source") / "plugin"
    shutil.copytree(EXAMPLE, source)  # where pip may write
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(folder), str(source)], check=True)
    return folder


def test_a_reward_of_a_package_is_a_type_like_any_other(world: Any, installed: Path) -> None:
    shown = quartet(installed, "config", "rl", "rewards.keywords", cwd=world.path)
    assert "words" in shown.stdout and "The share of the given words" in shown.stdout, shown.stderr or shown.stdout
    rewards = [{"type": "keywords", "words": ["1", "="], "weight": 2.0}]
    small = {"steps": 2, "prompts_per_step": 2, "responses_per_prompt": 2, "output_dir": "runs/plugin"}
    recipe = world.recipe("plugin", {**SETUP, **small, "rewards": rewards})
    done = quartet(installed, "rl", str(recipe), cwd=world.path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (world.path / "runs/plugin/metrics.jsonl").read_text().splitlines()]
    assert any("keywords" in name for name in rows[-1]), sorted(rows[-1])
    wrong = quartet(installed, "rl", str(recipe), "rewards=[{type: keywords}]", cwd=world.path)
    assert wrong.returncode == 2 and "words" in wrong.stderr and "Traceback" not in wrong.stderr


JOB = """
from quartet import Job, Plugin

SHORT = Job("broken_recipe:ShortRecipe", "broken_job:ShortTrainer", "Short SFT.", is_supervised=True,
    reader="broken_job:reader", starter="broken_recipe:STARTER")
PLUGIN = Plugin(jobs={"short": SHORT})
"""
RECIPE = """
from typing import Literal
from quartet.config.recipe import SFTRecipe
from quartet.config.plugins import StarterRecipe

class ShortRecipe(SFTRecipe):
    \"\"\"SFT that is short.\"\"\"
    job: Literal["short"] = "short"

STARTER = StarterRecipe("rows.jsonl", ("prompt", "completion"))
"""
TRAINER = """
from broken_recipe import ShortRecipe
from quartet.trainers.input_sources import demonstration_reader
from quartet.trainers.supervised import SFTTrainer

class ShortTrainer(SFTTrainer):
    recipe_class = ShortRecipe

def reader(recipe):
    return demonstration_reader
"""


def test_a_job_of_a_package_is_a_command_like_any_other(world: Any, tmp_path: Path) -> None:
    package(tmp_path, JOB)
    (tmp_path / "broken_recipe.py").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "broken_job.py").write_text(TRAINER, encoding="utf-8")
    assert "Short SFT." in quartet(tmp_path, "--help", cwd=tmp_path).stdout
    assert "SFT that is short" in quartet(tmp_path, "config", cwd=tmp_path).stdout
    begun = quartet(tmp_path, "init", "short", cwd=tmp_path).stdout
    assert "job: short" in begun and "examples_per_step: 32" in begun
    small = {"examples_per_step": 2, "steps": 1, "output_dir": "runs/short"}
    setup = {"model": {"path": "model"}, "data": {"path": "rows.jsonl"}}
    recipe = world.recipe("short", {**setup, **small})
    rows = "".join(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n" for _ in range(4))
    (world.path / "rows.jsonl").write_text(rows, encoding="utf-8")
    done = quartet(tmp_path, "short", str(recipe), cwd=world.path)
    assert done.returncode == 0, done.stderr
    assert json.loads((world.path / "runs/short/run.json").read_text())["job"] == "short"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import no_such_module", "ModuleNotFoundError"),
        ("PLUGIN = 3", "a int, no quartet.Plugin"),
        ('from quartet import Plugin\nPLUGIN = Plugin(commands={"Train": {"rl": "os:getcwd"}})', "rl"),
        ('from quartet import Plugin\nPLUGIN = Plugin(commands={"Train": {"doctor": "os:getcwd"}})', "doctor"),
        ('from quartet import Plugin\nPLUGIN = Plugin(commands={"Train": {"new": "broken:new"}})', "broken:new"),
        ('from quartet import Job, Plugin\nPLUGIN = Plugin(jobs={"sft": Job("os:path", "os:path", "")})', "sft"),
        ('from quartet import Job, Plugin\nPLUGIN = Plugin(jobs={"doctor": Job("os:path", "os:path", "")})', "doctor"),
        ('from quartet import Job, Plugin\nPLUGIN = Plugin(jobs={"new": Job("os:path", "os:path", "")})', "os:path"),
        (
            'from quartet import Plugin, RewardType as T\nPLUGIN = Plugin(rewards={"math": T("os:path", "os:path")})',
            "math",
        ),
        (
            'from quartet import Plugin, EngineType as T\nPLUGIN = Plugin(engines={"vllm": T("os:path", "os:path")})',
            "vllm",
        ),
        (
            'from quartet import Plugin, RewardType as T\nPLUGIN = Plugin(rewards={"new": T("os:path", "os:path")})',
            "os:path",
        ),
        (
            'from quartet import DrafterType as T, Plugin\nPLUGIN = Plugin(drafters={"history": T("os:path", "")})',
            "history",
        ),
        (
            "from quartet import Plugin, RewardType as T\n"
            'PLUGIN = Plugin(rewards={"new": T("quartet.config.rewards:MathReward", model="os:path")})',
            "a subclass of BaseModelReward",
        ),
    ],
    ids=[
        "no import",
        "no plug-in",
        "a command of Quartet",
        "a command of a plug-in",
        "no function",
        "a job of Quartet",
        "a job that a plug-in has as a command",
        "no recipe",
        "a reward of Quartet",
        "an engine of Quartet",
        "no section",
        "a drafter of a plug-in",
        "no section of a model",
    ],
)
def test_a_package_that_cannot_be_used_is_named(source: str, found: str, tmp_path: Path) -> None:
    package(tmp_path, source)
    done = quartet(tmp_path, "config", "rl", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "plug-in" in done.stderr and found in done.stderr and "uninstall" in done.stderr
