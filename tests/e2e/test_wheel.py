"""What is installed without a checkout: the wheel has everything, and its commands work elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed, built from a copy of the sources."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src" / "quartet", source / "src" / "quartet", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(source), str(source)]
    subprocess.run(build, check=True, timeout=120)
    (wheel,) = source.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    return site


def test_the_wheel_has_every_file_of_the_package(site: Path) -> None:
    package = ROOT / "src" / "quartet"
    files = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    wanted = {name for name in files if "__pycache__" not in name}
    assert {
        str(path.relative_to(site / "quartet")) for path in (site / "quartet").rglob("*") if path.is_file()
    } == wanted


def test_commands_work_outside_the_checkout(site: Path, tmp_path: Path) -> None:
    where = {**os.environ, "PYTHONPATH": str(site), "COLUMNS": "80"}

    def quartet(*argv: str) -> str:
        command = [sys.executable, "-m", "quartet", *argv]
        found = subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True, timeout=60, check=True)
        return found.stdout

    code = "import quartet; print(quartet.__file__)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=where, capture_output=True, text=True)
    assert loaded.stdout.startswith(str(site))
    assert quartet("--version").startswith("quartet 0")
    assert "temperature" in quartet("config", "rl", "rollout.sampling")
    assert quartet("init", "rl", "--method", "grpo", "--reward", "math").startswith("# quartet rl")
