"""What a recipe names may change under it; a resumed run tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quartet.config.common import DataConfig, ModelConfig
from quartet.config.recipe import LogConfig, SFTRecipe
from quartet.trainers.run import RunDirectory
from quartet.trainers.run_files import input_digests


@pytest.fixture
def recipe(tmp_path: Path) -> SFTRecipe:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(bytes(1 << 23))
    return SFTRecipe(
        model=ModelConfig(
            path=str(tmp_path / "model"), tokenizer="owner/name", chat_template=str(tmp_path / "chat.jinja")
        ),
        data=DataConfig(path=str(tmp_path / "rows.jsonl")),
        log=LogConfig(tensorboard=False),
        steps=4,
    )


def warnings(recipe: SFTRecipe, path: Path) -> list[str]:
    with RunDirectory(path, recipe, resume="auto") as run:
        found = list(run.warnings)
    assert all(text in json.loads((path / "run.json").read_text(encoding="utf-8")).get("remarks", []) for text in found)
    return found


def test_a_resumed_run_tells_what_has_changed_once(recipe: SFTRecipe, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert warnings(recipe, run) == warnings(recipe, run) == []
    (tmp_path / "rows.jsonl").write_text('{"text": "b"}\n')
    (told,) = warnings(recipe, run)
    assert told.startswith(f"data.path ({tmp_path}/rows.jsonl) has changed since the run began")
    assert warnings(recipe, run) == []
    with open(tmp_path / "model" / "weights", "r+b") as file:
        for place in range(0, 1 << 23, 4096):
            file.seek(place)
            file.write(b"1")
    assert [text.partition(" ")[0] for text in warnings(recipe, run)] == ["model.path"]
    (tmp_path / "chat.jinja").write_text("{{ messages }} ")
    assert [text.partition(" ")[0] for text in warnings(recipe, run)] == ["model.chat_template"]
    (tmp_path / "model" / "more").write_text("")
    assert [text.partition(" ")[0] for text in warnings(recipe, run)] == ["model.path"]


def test_runs_of_earlier_versions_and_damaged_notes_are_gone_on_with(recipe: SFTRecipe, tmp_path: Path) -> None:
    run = tmp_path / "run"
    warnings(recipe, run)
    for inputs in (None, [], {}, {"data.path": 3}):
        noted = json.loads((run / "run.json").read_text(encoding="utf-8"))
        (run / "run.json").write_text(json.dumps({**noted, "inputs": inputs}))
        assert len(warnings(recipe, run)) == (1 if inputs else 0)


def test_functions_count_and_what_is_not_here_does_not(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text("def f(): ...")
    rewards = [{"target": f"{tmp_path}/score.py:f"}, {"target": "os.path:join"}, {"path": str(tmp_path / "none")}]
    recipe = {
        "rewards": rewards,
        "data": {"path": "owner/rows", "columns": {"path": None}},
        "output_dir": str(tmp_path),
    }
    assert [*input_digests(recipe)] == ["rewards.0.target"]
