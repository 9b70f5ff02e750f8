"""Evaluation of a real model on real questions: pass@k, votes, a comparison; skipped without QUARTET_REALDATA."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.cli.main import add_plugins, app

add_plugins()


ROOT = Path(__file__).parents[2]
LIMIT = 24

needs_data = pytest.mark.skipif("QUARTET_REALDATA" not in os.environ, reason="QUARTET_REALDATA is not set")
pytestmark = pytest.mark.realdata


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(ROOT)
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def evaluate(tmp_path: Path) -> Callable[..., Path]:
    def run(recipe: str, name: str, *overrides: str) -> Path:
        data = Path(os.environ["QUARTET_REALDATA"])
        app(
            [
                "eval",
                f"recipes/{recipe}.yaml",
                f"output_dir={tmp_path / name}",
                f"model.path={data / 'stories260K'}",
                f"data.path={data / 'gsm8k_test.jsonl'}",
                f"data.limit={LIMIT}",
                "sampling.max_new_tokens=24",
                *overrides,
            ],
            standalone_mode=False,
        )
        return tmp_path / name

    return run


def summary_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    return found


@needs_data
def test_pass_at_k_on_gsm8k(evaluate: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A story model solves nothing; what counts is that every figure is there and is what the answers say."""
    path = evaluate("eval-pass", "pass", "sampling.temperature=1")
    rows = [json.loads(line) for line in (path / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    prompts = {row["prompt_id"] for row in rows}
    assert len(rows) == 8 * len(prompts) and rows[0]["prompt"].startswith("Janet")
    metrics = summary_of(path)["stages"][0]["metrics"]
    right = {p: [row["rewards"]["numeric"] for row in rows if row["prompt_id"] == p] for p in prompts}
    assert metrics["eval/numeric/exact_match"] == pytest.approx(sum(map(sum, right.values())) / len(rows))
    assert metrics["eval/numeric/pass@8"] == pytest.approx(sum(any(r) for r in right.values()) / len(prompts))
    assert metrics["eval/numeric/pass@1"] <= metrics["eval/numeric/pass@4"] <= metrics["eval/numeric/pass@8"]
    assert all(math.isfinite(value) for value in metrics.values())
    assert "eval/numeric/maj@8" in capsys.readouterr().out


@needs_data
def test_a_model_against_its_own_stored_answers(evaluate: Callable[..., Path]) -> None:
    """Same seeds, same text, also through a SentencePiece tokenizer; and its hotter self answers otherwise."""
    common = ("data.columns={prompt: question}", "data.overlong=skip", "rewards=[{type: length, target: 60}]")
    cool = evaluate("eval-compare", "cool", *common, "sampling.temperature=0.5", "compare=null")
    again = evaluate(
        "eval-compare", "again", *common, "sampling.temperature=0.5", f"compare={{model: '{cool / 'answers.jsonl'}'}}"
    )
    found = summary_of(again)["comparison"]
    assert found["same"] == found["good"] + found["same"] + found["bad"] > 0 and found["win_rate"] == 0.5
    stored = f"compare={{model: '{cool / 'answers.jsonl'}'}}"
    hot = evaluate("eval-compare", "hot", *common, "sampling.temperature=1.5", stored)
    other = summary_of(hot)["comparison"]
    assert other["low"] <= other["win_rate"] <= other["high"] and other["same"] < found["same"]
