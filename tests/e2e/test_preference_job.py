"""Preference training and reward-model margins through the command line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from quartet.extras.quickstart import task


def recipe_of(out: Path, **changes: Any) -> dict[str, Any]:
    return {
        "threads": 1,
        "output_dir": str(out),
        "model": {"path": "model"},
        "data": {"path": "pairs.jsonl"},
        "train": {"optim": {"lr": 3e-3}, "token_budget": 256},
        "steps": 4,
        "pairs_per_step": 6,
        **changes,
    }


def summary_of(run: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return found


def write(world: Any, name: str, rows: list[dict[str, Any]]) -> None:
    (world.path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def pairs() -> list[dict[str, Any]]:
    answers = {prompt: task.work(*task.operands(prompt)) for prompt in task.toy_prompts(0, 8)}
    return [{"prompt": prompt, "chosen": answer, "rejected": answer[::-1]} for prompt, answer in answers.items()]


def test_dpo_from_a_recipe(world: Any, quartet: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = {"evaluation_data": {"path": "pairs.jsonl", "limit": 8}, "reference": {"cache": str(tmp_path / "cache")}}
    recipe = world.recipe("dpo", recipe_of(run, **changes))
    outcome = quartet("preference", recipe)
    assert outcome.status == 0, outcome.err
    assert "preference/accuracy" in outcome.out and "eval/accuracy" in outcome.out
    metrics = summary_of(run)["stages"][0]["metrics"]
    assert all(math.isfinite(value) for value in metrics.values())
    AutoModelForCausalLM.from_pretrained(run / "model")
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 2
    assert quartet("report", run).status == 0
    again = quartet("preference", recipe, f"output_dir={tmp_path / 'again'}")
    assert again.status == 0 and "\nreference: " in outcome.out and "\nreference: " not in again.out
    assert summary_of(tmp_path / "again")["stages"][0]["metrics"]["eval/loss"] == metrics["eval/loss"]


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"prompt": "1+2=", "chosen": "3", "rejected": "4", "margin": "far"}, ["pairs_x.jsonl:3", "margin", "'far'"]),
        ({"prompt": "1" * 120, "chosen": "3" * 9, "rejected": "4"}, ["pairs_x.jsonl:3", "longer than allowed"]),
    ],
)
def test_bad_pairs_are_named_by_file_and_line(
    world: Any, quartet: Any, pairs: Any, tmp_path: Path, row: dict[str, Any], parts: list[str]
) -> None:
    write(world, "pairs_x.jsonl", [*pairs[:2], row, *pairs[2:]])
    run = tmp_path / "run"
    recipe = world.recipe("bad", recipe_of(run, data={"path": "pairs_x.jsonl"}))
    quartet("preference", recipe).expect_user_error(*parts)
    assert not run.exists()


def test_equal_pairs_are_reported_with_their_rows(world: Any, quartet: Any, pairs: Any, tmp_path: Path) -> None:
    write(world, "pairs_y.jsonl", [{**pairs[0], "rejected": pairs[0]["chosen"]}, *pairs])
    run = tmp_path / "run"
    changes = {"data": {"path": "pairs_y.jsonl"}, "steps": None, "epochs": 2}
    outcome = quartet("preference", world.recipe("equal", recipe_of(run, **changes, pairs_per_step=1)))
    assert outcome.status == 0, outcome.err
    assert any("the same (pairs_y.jsonl:1)" in note for note in summary_of(run)["notes"])
    assert summary_of(run)["stages"][0]["metrics"]["data/epoch"] == 2.0
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2 * len(pairs)


def test_kto_from_a_csv_file(world: Any, quartet: Any, pairs: Any, tmp_path: Path) -> None:
    lines = ["prompt,completion,label"]
    for pair in pairs:
        lines += [f"{pair['prompt']},{pair['chosen']},true", f"{pair['prompt']},{pair['rejected']},False"]
    (world.path / "judged.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    recipe = world.recipe("kto", recipe_of(tmp_path / "run", data={"path": "judged.csv"}, loss={"name": "kto"}))
    outcome = quartet("preference", recipe)
    assert outcome.status == 0, outcome.err
    assert summary_of(tmp_path / "run")["stages"][0]["metrics"]["preference/kl"] >= 0
    quartet("preference", recipe, "loss.name=dpo", f"output_dir={tmp_path / 'dpo'}").expect_user_error(
        "loss dpo compares two answers", "loss.name=kto"
    )
