"""`quartet config`, `init`, `--version` and completion: what they print, and that they are quick."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from quartet.cli import main as cli
from quartet.config.load import load_recipe
from quartet.config.plugins import recipe_classes
from quartet.extras.recipes.commands import pages
from quartet.extras.recipes.reference import sections

ROOT = Path(__file__).parents[3]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["quartet", *argv])
        status = 0
        try:
            cli.main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def in_process(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, which ends when torch or transformers is imported."""
    blocked = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None"
    code = f"{blocked}; sys.argv[0] = 'quartet'; from quartet.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *argv],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", sorted(pages()))
def test_docs_reference_is_what_the_recipes_say(name: str) -> None:
    found = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert found == pages()[name], "run `make reference`"


def test_no_page_is_left_of_a_job_that_is_gone() -> None:
    assert {path.name for path in (ROOT / "docs" / "reference").iterdir()} == set(pages())


@pytest.mark.parametrize("job", recipe_classes())
def test_every_key_is_printed_within_the_width(run: Run, job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = run("config", job)
    assert status == 0 and max(map(len, out.splitlines())) <= 80
    for section in sections(job):
        assert all(key.name in out for key in section.keys), section.address


def test_a_part_a_key_and_a_choice(run: Run) -> None:
    _, out, _ = run("config", "rl", "rollout.sampling")
    assert out.startswith("rollout.sampling") and "top_p               1.0" in out and "critic" not in out
    _, out, _ = run("config", "rl", "actor.train.optim.lr")
    assert "1e-5" in out and "betas" not in out
    _, out, _ = run("config", "rl", "algorithm")
    assert "grpo" in out and "remax" in out


def test_jobs_are_listed(run: Run) -> None:
    status, out, _ = run("config")
    assert status == 0 and all(job in out for job in recipe_classes())


def test_an_unknown_part_is_a_users_error(run: Run) -> None:
    status, out, err = run("config", "rl", "actor.train.optm")
    assert status == 2 and not out and "actor.train.optim" in err


def test_a_recipe_is_written_and_loads(run: Run, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("question,answer\n1+1,2\n", encoding="utf-8")
    status, out, _ = run("init", "rl", "--method", "grpo", "--reward", "math", "--data", str(rows))
    (tmp_path / "recipe.yaml").write_text(out, encoding="utf-8")
    recipe = load_recipe("rl", tmp_path / "recipe.yaml").model_dump(mode="json")
    assert status == 0 and recipe["data"]["columns"] == {"prompt": "question"}
    assert recipe["algorithm"]["name"] == "grpo" and recipe["rewards"][0]["type"] == "math"


def test_versions_are_told_without_torch() -> None:
    found = in_process("--version")
    assert found.returncode == 0
    assert found.stdout.startswith(f"quartet {version('quartet-rl')}\ntorch {version('torch')}, transformers ")


def test_completion() -> None:
    found = in_process(_QUARTET_COMPLETE="complete_bash", COMP_WORDS="quartet pre", COMP_CWORD="1")
    assert (found.returncode, found.stdout.strip(), found.stderr) == (0, "preference", "")


def test_help_names_config_and_init_in_groups(run: Run) -> None:
    _, out, _ = run("--help")
    assert "quartet init rl > recipe.yaml" in out and "quartet config rl" in out
    begin, train = out.index("Begin:"), out.index("Train:")
    assert begin < out.index("  config ") < train < out.index("  reward-model ")
    assert "Other:" not in out and "..." not in out[begin:]


@pytest.mark.parametrize("job", recipe_classes())
def test_help_of_a_job_says_where_its_keys_are(run: Run, job: str) -> None:
    _, out, _ = run(job, "--help")
    assert f"quartet config {job}" in " ".join(out.split()) and f"quartet init {job}" in " ".join(out.split())
