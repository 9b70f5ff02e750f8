"""The quickstart itself: a short one here, the whole one and its control under the marker slow."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from quartet.extras.quickstart.run import Quickstart
from quartet.observe.spans import read_spans

GOLDEN = Path(__file__).parents[1] / "golden"


def golden_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record_quickstart", GOLDEN / "record_quickstart.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    path = tmp_path_factory.mktemp("quickstart") / "run"
    return path, golden_module().run_short(path)


def test_short_quickstart_repeats_its_golden_curve(short: tuple[Path, dict[str, list[dict[str, Any]]]]) -> None:
    """Bit for bit on the kind of machine that recorded it; elsewhere the first updates within rounding."""
    module, (_, found) = golden_module(), short
    recorded = json.loads(module.PATH.read_text(encoding="utf-8"))
    if recorded["processor"] == module.describe_processor():
        assert found == recorded["curves"]
        return
    for ours, theirs in zip(found["sft"][:5], recorded["curves"]["sft"][:5], strict=True):
        assert ours["loss/sft"] == pytest.approx(theirs["loss/sft"], rel=1e-3)


def test_what_a_quickstart_leaves_behind(short: tuple[Path, dict[str, list[dict[str, Any]]]]) -> None:
    path, _ = short
    summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    assert [stage["name"] for stage in summary["stages"]] == [
        "sft",
        "evaluate_sft",
        "reward_model",
        "rl",
        "evaluate_rl",
    ]
    assert all(stage["seconds"] > 0 for stage in summary["stages"])
    assert summary["seed"] == 7 and summary["versions"]["torch"] == torch.__version__
    assert set(summary["exact_match"]["sft"]) == {"0.0", "0.5", "1.0"}
    assert (path / "report.html").stat().st_size > 50_000
    tokenizer = AutoTokenizer.from_pretrained(path / "rl" / "model")
    model = AutoModelForCausalLM.from_pretrained(path / "rl" / "model")
    assert model(**tokenizer("12+34=", return_tensors="pt")).logits.isfinite().all()
    for directory in (path / "reward_model" / "model", path / "rl" / "critic"):
        scorer = AutoModelForSequenceClassification.from_pretrained(directory)
        assert scorer.config.num_labels == 1
        assert scorer.config.pad_token_id == AutoTokenizer.from_pretrained(directory).pad_token_id


def test_chunks_are_scored_while_later_groups_are_generated(
    short: tuple[Path, dict[str, list[dict[str, Any]]]],
) -> None:
    path, _ = short
    spans = [span for span in read_spans(path / "rl" / "spans.jsonl") if span.step == 0]
    last_generation = max(span.end_s for span in spans if span.name == "generate")
    early = {span.chunk for span in spans if span.chunk is not None and span.end_s < last_generation}
    assert early, "no chunk was scored before generation ended"
    names = {span.name for span in spans}
    assert {"generate", "ref_logprobs", "old_logprobs", "values", "train_actor", "train_critic", "publish"} <= names


def test_a_finished_quickstart_resumes_to_itself(short: tuple[Path, dict[str, list[dict[str, Any]]]]) -> None:
    path, found = short
    assert golden_module().run_short(path, resume=True) == found


def test_the_command_refuses_a_directory_that_holds_a_run(
    short: tuple[Path, dict[str, list[dict[str, Any]]]], quartet: Any
) -> None:
    quartet("quickstart", "--out", short[0]).expect_user_error("already holds a run", "--resume")


@pytest.mark.slow
def test_ppo_gains_and_its_control_does_not(tmp_path: Path) -> None:
    """The whole quickstart gains at least 25 points; with scores shuffled within the batch, less than 5."""
    real = Quickstart(100, tmp_path / "real").run().summary["exact_match"]
    control = Quickstart(100, tmp_path / "control", shuffle_scores=True).run().summary["exact_match"]
    assert 0.3 <= real["best_sft"] <= 0.6
    assert real["gain"] >= 0.25
    assert control["gain"] < 0.05
