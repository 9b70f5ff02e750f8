"""Everything in the folder named by QUARTET_REALDATA goes through the commands; skipped without it."""

from __future__ import annotations

import gzip
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from quartet.cli.main import add_plugins, app
from quartet.text.tokenizer import TextCodec

add_plugins()


ROOT = Path(__file__).parents[2]

needs_data = pytest.mark.skipif("QUARTET_REALDATA" not in os.environ, reason="QUARTET_REALDATA is not set")
pytestmark = pytest.mark.realdata


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Recipes name reward functions relative to the repository; two threads at most on a shared machine."""
    monkeypatch.chdir(ROOT)
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def data() -> Path:
    return Path(os.environ["QUARTET_REALDATA"])


@pytest.fixture
def quartet(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs a recipe of the repository and returns its summary."""

    def run(job: str, recipe: str, *overrides: str) -> dict[str, Any]:
        out = tmp_path / f"{recipe}-{len(list(tmp_path.iterdir()))}"
        app([job, f"recipes/{recipe}.yaml", f"output_dir={out}", *overrides], standalone_mode=False)
        found: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        return {**found, "path": out}

    return run


def finite(metrics: dict[str, float]) -> bool:
    return bool(metrics) and all(math.isfinite(value) for value in metrics.values())


@needs_data
def test_generate_stops_at_either_end_of_text(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model's end of text is a list that holds the token every prompt begins with; greedy text is a story."""
    model = str(data / "stories260K")
    arguments = ["generate", "--model", model, "--prompt", "Once upon a time", "--temperature", "0"]
    app([*arguments, "--max-new-tokens", "400"], standalone_mode=False)
    story = capsys.readouterr().out
    assert story.startswith("Once upon a time, there was a little girl named Lily.")
    assert story.rstrip()[-1] in '.!?"' and "<" not in story


@needs_data
def test_pandalm_pairs(data: Path, quartet: Callable[..., dict[str, Any]]) -> None:
    found = quartet(
        "reward-model",
        "pandalm-reward-model",
        f"model.path={data / 'stories260K'}",
        f"data.path={data / 'pandalm_human_pairs.jsonl'}",
        "steps=2",
        "pairs_per_step=4",
    )
    assert finite(found["stages"][0]["metrics"])
    assert any("left out" in note and "512 tokens" in note for note in found["notes"]), found["notes"]
    config = AutoConfig.from_pretrained(found["path"] / "model")
    codec = TextCodec.from_pretrained(data / "stories260K")
    rows = [json.loads(line) for line in (data / "pandalm_human_pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    ids = {token for row in rows for token in codec.encode_prompt(f"{row['prompt']} {row['chosen']} {row['rejected']}")}
    assert config.num_labels == 1 and config.pad_token_id not in ids
    assert AutoTokenizer.from_pretrained(found["path"] / "model").pad_token_id == config.pad_token_id


@needs_data
@pytest.mark.parametrize(("job", "recipe"), [("reward-model", "pandalm-reward-model"), ("preference", "dpo")])
def test_real_pairs_in_the_shape_of_hh_rlhf(
    job: str, recipe: str, data: Path, quartet: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """One text per side, compressed, from two sources mixed by weight."""
    lines = (data / "pandalm_human_pairs.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["chosen"] and row["rejected"]][:80]
    heads = [f"\n\nHuman: {row['prompt']}\n\nAssistant:" for row in rows]
    whole = [
        {side: f"{head} {row[side]}" for side in ("chosen", "rejected")} for head, row in zip(heads, rows, strict=True)
    ]
    paths = []
    for number, part in enumerate((whole[:30], whole[30:60], whole[60:])):
        paths.append(tmp_path / f"{number}.jsonl.gz")
        paths[-1].write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in part).encode()))
    found = quartet(
        job,
        recipe,
        f"model.path={data / 'stories260K'}",
        f"data={{sources: [{{path: {paths[0]}, weight: 0.7}}, {{path: {paths[1]}, weight: 0.3}}], overlong: skip}}",
        f"evaluation_data={{path: {paths[2]}, overlong: skip}}",
        "steps=2",
        "pairs_per_step=4",
    )
    metrics = found["stages"][0]["metrics"]
    assert finite(metrics)
    assert sum("rows of an epoch" in note for note in found["notes"]) == 2
    if job == "reward-model":
        assert 0 < metrics["eval/longer_answer_accuracy"] < 1


@needs_data
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("dpo", "pandalm_human_pairs.jsonl"),
        ("simpo", "dpo_en_demo_pairs.jsonl"),
        ("kto", "pandalm_human_pairs.jsonl"),
    ],
)
def test_dpo_on_real_pairs(data: Path, quartet: Callable[..., dict[str, Any]], name: str, file: str) -> None:
    """Text pairs and conversations; 512 positions are too few for some, and empty answers are reported by row."""
    found = quartet(
        "preference",
        "dpo",
        f"model.path={data / 'stories260K'}",
        f"data.path={data / file}",
        "data.limit=150",
        f"loss.name={name}",
        "train.optim.lr=1e-4",
        "train.optim.warmup_steps=0",
        "steps=6",
        "pairs_per_step=4",
    )
    metrics = found["stages"][0]["metrics"]
    assert finite(metrics) and metrics["optim/skipped_steps"] == 0
    assert any("left out" in note and "512 tokens" in note for note in found["notes"]), found["notes"]


@needs_data
def test_gsm8k_by_its_own_column_names(data: Path, quartet: Callable[..., dict[str, Any]]) -> None:
    model = f"model.path={data / 'stories260K'}"
    trained = quartet(
        "sft", "gsm8k-sft", model, f"data.path={data / 'gsm8k_train.jsonl'}", "steps=3", "train.optim.lr=1e-3"
    )
    assert finite(trained["stages"][0]["metrics"])
    assert any("left out" in note for note in trained["notes"]), trained["notes"]
    scored = quartet(
        "eval",
        "gsm8k-eval",
        f"model.path={trained['path'] / 'model'}",
        f"data.path={data / 'gsm8k_test.jsonl'}",
        "data.limit=8",
        "sampling.max_new_tokens=8",
    )
    assert 0 <= scored["stages"][0]["metrics"]["eval/final_number"] <= 1
    rows = [json.loads(line) for line in (scored["path"] / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 8 and rows[0]["prompt"].startswith("Janet")


@needs_data
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_stories(algorithm: str, data: Path, quartet: Callable[..., dict[str, Any]]) -> None:
    """A few updates on the story task: finite, and the report can be built from real tokens."""
    prompts = 8 if algorithm == "ppo" else 4
    found = quartet(
        "rl",
        f"story-{algorithm}",
        f"actor.model.path={data / 'stories260K'}",
        "steps=3",
        f"prompts_per_step={prompts}",
        "rollout.sampling.max_new_tokens=48",
        "evaluation=null",
        "critic.warmup_steps=1",
        "log.rollouts_every=1",
    )
    metrics = found["stages"][0]["metrics"]
    assert finite(metrics) and metrics["optim/skipped_steps"] == 0
    assert 0 <= metrics["reward/score_mean"] <= 1
    assert metrics["agreement/logprob_diff_max"] < 1e-3
    assert metrics["kl/ref"] != 0
    app(["report", str(found["path"])], standalone_mode=False)
    page = (found["path"] / "report.html").read_text(encoding="utf-8")
    assert "Once upon a time" in page
    shutil.rmtree(found["path"])
