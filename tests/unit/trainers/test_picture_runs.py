"""Jobs on pictures, from files to files: every distinct one goes through the tower once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor

from quartet import GRPO, RLRecipe, RLTrainer
from quartet.config.common import DataConfig, ModelConfig, OptimConfig, SamplingConfig, TrainConfig
from quartet.config.recipe import ActorConfig, RolloutConfig
from quartet.observe.rollouts import read_rollout_step
from quartet.observe.spans import read_spans
from quartet.observe.trackers import read_metrics
from tiny_vision import picture_bytes, save_model

KINDS = ["llava", "qwen2_vl", "qwen3_vl", "internvl", "smolvlm"]
COLOURS = [(200, 30, 60), (20, 130, 60), (10, 30, 200), (90, 90, 90)]


def rows(folder: Path, *, num: int = 4) -> Path:
    """Writes rows, each with a picture of its own but the last, which has the first one's twice."""
    for n, colour in enumerate(COLOURS):
        (folder / f"{n}.png").write_bytes(picture_bytes(colour=colour, width=24 + 8 * n))
    written = []
    for n in range(num):
        names = [f"{n}.png"] if n < num - 1 else ["0.png", "0.png"]
        prompt = [{"role": "user", "content": [*({"type": "image"} for _ in names), {"type": "text", "text": "what?"}]}]
        answers = {"completion": "hell", "chosen": "hell", "rejected": "he", "answer": "hell"}
        written.append({"prompt": prompt, "images": names, **answers})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in written))
    return path


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 3) for text in completions]


def rl(model: Path, data: Path, output: Path, **options: Any) -> RLRecipe:
    train = options.pop("train", TrainConfig(optim=OptimConfig(lr=1e-3)))
    settings: dict[str, Any] = {
        "actor": ActorConfig(model=ModelConfig(path=str(model)), train=train),
        "data": DataConfig(path=str(data)),
        "algorithm": GRPO(),
        "steps": 4,
        "prompts_per_step": 2,
        "responses_per_prompt": 3,
        "rollout": RolloutConfig(sampling=SamplingConfig(max_new_tokens=5)),
        "output_dir": str(output),
    }
    return RLRecipe(**settings | options)


@pytest.mark.parametrize("kind", KINDS)
def test_grpo(kind: str, tmp_path: Path) -> None:
    model = save_model(kind, tmp_path / "model")
    recipe = rl(model, rows(tmp_path), tmp_path / "run")
    RLTrainer(recipe, rewards=reward).train()
    metrics = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert sum(row["pictures/computed"] for row in metrics) <= 3, "three distinct ones; what was looked at ahead counts"
    assert max(row["agreement/logprob_diff_max"] for row in metrics if "agreement/logprob_diff_max" in row) < 1e-4
    assert all(row["agreement/canary_diff"] < 1e-4 for row in metrics if "agreement/canary_diff" in row)
    assert any(span.name == "look_ahead" for span in read_spans(tmp_path / "run" / "spans.jsonl"))
    exported = tmp_path / "run" / "model"
    assert AutoModelForImageTextToText.from_pretrained(exported) is not None
    assert (exported / "preprocessor_config.json").is_file()
    assert AutoProcessor is not None
    record = next(iter(read_rollout_step(tmp_path / "run" / "rollouts", 1)))
    assert min(record.prompt_ids) < -1
