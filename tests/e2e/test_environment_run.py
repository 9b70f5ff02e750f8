"""The example environments through the command line, with the recipe that ships."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from quartet.observe.rollouts import read_rollout_step
from quartet.observe.trackers import read_metrics

ROOT = Path(__file__).parents[2]
SHORT = (
    "threads=1",
    "critic.warmup_steps=1",
    "rollout.sampling.max_new_tokens=3",
    "environment.max_tokens=96",
    "environment.max_turns=3",
    "steps=2",
    "prompts_per_step=2",
    "responses_per_prompt=2",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 that reads bytes, so that it knows every character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: n for n, token in enumerate([*alphabet, "<|endoftext|>"])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    path = tmp_path_factory.mktemp("bytes") / "model"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize(("name", "options"), [("Guess", "{most: 4}"), ("Note", "{}")])
def test_the_examples_train_and_are_reported(
    model: Path, quartet: Callable[..., Any], name: str, options: str, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{n}+", "number": n} for n in range(10, 16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run = tmp_path / "run"
    done = quartet(
        "rl",
        ROOT / "recipes" / "environment.yaml",
        *SHORT,
        f"actor.model.path={model}",
        f"data.path={tmp_path / 'rows.jsonl'}",
        f"environment.target={ROOT / 'examples' / 'environments.py'}:{name}",
        f"environment.options={options}",
        f"output_dir={run}",
    )
    assert done.status == 0, done.err
    metrics = [row for row in read_metrics(run / "metrics.jsonl") if "episode/turns_mean" in row]
    assert len(metrics) == 2
    records = read_rollout_step(run / "rollouts", 2)
    if name == "Note":
        assert all(row["episode/sequences_mean"] == row["episode/turns_mean"] == 2.0 for row in metrics)
        assert {record.part for record in records} == {0, 1}
        assert all(("Your note: " in record.prompt_text) == (record.part == 1) for record in records)
    else:
        assert all(row["episode/sequences_mean"] == 1.0 for row in metrics)
        assert all(len(record.columns["observation_mask"]) == len(record.response_ids) for record in records)
    assert quartet("report", run).status == 0
    assert "observation_mask" in (run / "report.html").read_text(encoding="utf-8")


def test_a_failing_environment_is_a_user_error(model: Path, quartet: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+"}\n', encoding="utf-8")
    (tmp_path / "broken.py").write_text(
        "class Broken:\n"
        "    async def reset(self, item):\n        return '1+'\n"
        "    async def step(self, action):\n        return 1 / 0\n",
        encoding="utf-8",
    )
    done = quartet(
        "rl",
        ROOT / "recipes" / "environment.yaml",
        *SHORT,
        f"actor.model.path={model}",
        f"data.path={tmp_path / 'rows.jsonl'}",
        f"environment.target={tmp_path / 'broken.py'}:Broken",
        "environment.options={}",
        f"output_dir={tmp_path / 'run'}",
    )
    done.expect_user_error("`step` raised ZeroDivisionError", "turn 1", "resume")
