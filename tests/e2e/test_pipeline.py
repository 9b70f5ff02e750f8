"""SFT → reward model → PPO from recipes, through the command line, and what the directories they leave are good for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from quartet.batch.ragged import RaggedBatch
from quartet.models.loading import load_causal_lm, load_scalar_model, packed_causal_lm, packed_scalar_model
from quartet.observe.rollouts import read_rollout_step
from quartet.train.forward import ForwardNeeds, forward_only

JOBS = ("sft", "reward-model", "rl")


@pytest.fixture(scope="module")
def pipeline(world_of_session: Any, processes: Any, recipes: Any) -> Path:
    """The directory of three runs, each of which starts from the one before."""
    sft, reward, rl = (f"runs/pipe/{job}" for job in JOBS)
    rl_recipe = recipes["rl"](output_dir=rl, steps=3, prompts_per_step=12, chunk_size=2, epochs=1)
    rl_recipe["actor"]["model"]["path"] = f"{sft}/model"
    rl_recipe["rewards"][0]["path"] = f"{reward}/model"
    chain = {
        "sft": recipes["sft"](output_dir=sft, steps=30, evaluation_data={"path": "demonstrations.jsonl", "limit": 8}),
        "reward-model": recipes["reward-model"](output_dir=reward, model={"path": f"{sft}/model"}),
        "rl": rl_recipe,
    }
    for job in JOBS:
        log = world_of_session.path / f"pipe-{job}.log"
        recipe = world_of_session.recipe(f"pipe-{job}", chain[job])
        assert processes.run(job, recipe, cwd=world_of_session.path, output=log) == 0, log.read_text()
        assert f"next:  quartet report {chain[job]['output_dir']}" in log.read_text()
    return world_of_session.path / "runs" / "pipe"


def test_every_stage_learned_something(pipeline: Path, metrics_of: Callable[[Path], Any]) -> None:
    sft = metrics_of(pipeline / "sft")
    assert sft[-1]["loss/sft"] < sft[0]["loss/sft"] - 0.3
    assert "eval/loss" in sft[-1]
    reward = metrics_of(pipeline / "reward-model")
    assert reward[-1]["loss/reward_model"] < reward[0]["loss/reward_model"]
    assert reward[-1]["eval/accuracy"] >= 0.5
    rl = metrics_of(pipeline / "rl")
    assert rl[1]["agreement/logprob_diff_max"] < 1e-4
    assert rl[1]["agreement/canary_diff"] < 1e-4


def _padded(tokenizer: Any, texts: list[str]) -> tuple[Any, list[list[int]]]:
    rows = [tokenizer(text)["input_ids"] for text in texts]
    encoded = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    return encoded, rows


def test_a_policy_reloads_with_from_pretrained_and_computes_the_same(pipeline: Path) -> None:
    path = str(pipeline / "rl" / "model")
    tokenizer, plain = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path).eval()
    encoded, rows = _padded(tokenizer, ["12+34=4", "7+8=15;15", "1+1=2"])
    with torch.no_grad():
        logits = plain(**encoded).logits.log_softmax(-1)
    packed = packed_causal_lm(load_causal_lm(path))
    batch = RaggedBatch.from_sequences(rows, ["a", "b", "c"])
    mask = torch.ones(batch.num_tokens, dtype=torch.bool)
    mask[[offset for offset in batch.segment_offsets[:-1]]] = False
    logprobs = forward_only(packed, batch.with_token(loss_mask=mask), ForwardNeeds(logprobs=True), 1000).token[
        "logprobs"
    ]
    for s, row in enumerate(rows):
        start = batch.segment_offsets[s]
        expected = logits[s, : len(row) - 1].gather(1, torch.tensor(row[1:]).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(logprobs[start + 1 : start + len(row)], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("run", "side"), [("reward-model/model", "left"), ("rl/critic", "right")])
def test_a_scalar_model_scores_padded_batches_alike(pipeline: Path, run: str, side: str) -> None:
    path = str(pipeline / run)
    tokenizer = AutoTokenizer.from_pretrained(path)
    plain = AutoModelForSequenceClassification.from_pretrained(path).eval()
    assert plain.config.num_labels == 1
    assert plain.config.pad_token_id == tokenizer.pad_token_id < plain.config.vocab_size
    texts = [f"{text}{end}" for text in ("12+34=4", "7+8=15;15", "1+1=2") for end in ("", tokenizer.eos_token)]
    with torch.no_grad():
        batch = tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
        expected = plain(**batch).logits.squeeze(1)
    rows = RaggedBatch.from_sequences([tokenizer(text)["input_ids"] for text in texts])
    scores = forward_only(packed_scalar_model(load_scalar_model(path)), rows, ForwardNeeds(scores=True), 1000)
    torch.testing.assert_close(scores.sequence["scores"], expected, atol=1e-5, rtol=1e-5)


def test_evaluation_is_not_counted_as_the_steps_generation(pipeline: Path) -> None:
    """An evaluation has spans of its own name; a step's generation spans all lie before its updates."""
    from quartet.observe.spans import read_spans

    spans = read_spans(pipeline / "rl" / "spans.jsonl")
    assert [span.step for span in spans if span.name == "evaluate"] == [0, 2]
    for step in range(3):
        trained = min(s.start_s for s in spans if s.step == step and s.mode == "train")
        assert all(s.end_s <= trained for s in spans if s.step == step and s.name == "generate")


def test_a_prompt_is_prefilled_once_for_all_its_responses(pipeline: Path, metrics_of: Callable[[Path], Any]) -> None:
    for row in metrics_of(pipeline / "rl")[1:]:
        records = read_rollout_step(pipeline / "rl" / "rollouts", int(row["step"]))
        groups = {record.group: tuple(record.prompt_ids) for record in records}
        assert len(records) == 2 * len(groups)
        # A prompt that occurs twice in a step is read back from the cache, and so is the canary's.
        lengths = [len(prompt) for prompt in set(groups.values())]
        assert sum(lengths) - max(lengths) <= row["rollout/prefill_tokens"] <= sum(lengths)
        assert row["rollout/tokens"] == sum(len(record.response_ids) for record in records)


def test_generate_answers_and_is_reproducible(world: Any, pipeline: Path, quartet: Any) -> None:
    model = pipeline / "sft" / "model"
    command = ["generate", "--model", model, "--prompt", "12+34=", "--prompt", "5+6=", "--max-new-tokens", 8]
    once, again = quartet(*command, "--seed", 3), quartet(*command, "--seed", 3)
    assert once.status == 0 and once.out == again.out
    lines = once.out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("12+34=") and lines[1].startswith("5+6=")
    several = quartet(*command, "--num", 3, "--temperature", 0)
    assert several.out.splitlines()[0] == several.out.splitlines()[2]
    stopped = quartet(*command, "--stop", "+", "--temperature", 0)
    assert all("+" not in line.split("=", 1)[1] for line in stopped.out.splitlines())


def test_a_finished_run_resumed_changes_nothing(world: Any, pipeline: Path, processes: Any, same_run: Any) -> None:
    before = {p: p.read_bytes() for p in (pipeline / "sft").rglob("*") if p.suffix in (".safetensors", ".jsonl")}
    log = world.path / "resumed.log"
    assert processes.run("sft", "pipe-sft.yaml", "--resume", cwd=world.path, output=log) == 0, log.read_text()
    assert {p: p.read_bytes() for p in before} == before
    assert json.loads((pipeline / "sft" / "run.json").read_text())["status"] == "done"


def test_group_methods_learn_from_a_function_and_load_nothing_else(
    world: Any, quartet: Any, recipes: Any, metrics_of: Any
) -> None:
    """No critic, no reference (KL 0), no reward model."""
    recipe = recipes["rl"]("grpo", output_dir="runs/pipe-grpo", steps=2, responses_per_prompt=4)
    recipe["algorithm"]["kl"] = {"coef": 0.0}
    outcome = quartet("rl", world.recipe("grpo", recipe))
    assert outcome.status == 0, outcome.err
    run = world.path / "runs" / "pipe-grpo"
    assert not (run / "critic").exists() and (run / "model").is_dir()
    rows = metrics_of(run)
    assert not any(name.startswith(("critic/", "loss/value", "kl/")) for row in rows for name in row)
    record = read_rollout_step(run / "rollouts", 1)[0]
    assert "values" not in record.columns and "ref_logprobs" not in record.columns
    assert any(row.get("policy/grad_norm", 0) > 0 for row in rows)


def test_bf16_runs_end_to_end(world: Any, quartet: Any, recipes: Any, metrics_of: Any) -> None:
    recipe = recipes["rl"](output_dir="runs/bf16", steps=2)
    recipe["actor"]["train"]["precision"] = "bf16"
    recipe["critic"]["train"]["precision"] = "bf16"
    outcome = quartet("rl", world.recipe("bf16", recipe))
    assert outcome.status == 0, outcome.err
    rows = metrics_of(world.path / "runs/bf16")
    assert rows[1]["agreement/logprob_diff_max"] < 0.1
    assert rows[2]["agreement/canary_diff"] < 0.1
    plain = AutoModelForCausalLM.from_pretrained(world.path / "runs/bf16/model")
    assert plain.dtype == torch.float32, "master weights are saved"


def test_an_engine_that_keeps_its_old_weights_is_found_out(
    world: Any, recipes: Any, monkeypatch: pytest.MonkeyPatch, quartet: Any
) -> None:
    """The engine gets a copy of the weights of its own, which nobody refreshes."""
    import copy

    from quartet.rollout import engine as engine_module
    from quartet.trainers import engines

    class Stale(engine_module.NativeEngine):
        def __init__(self, packed: Any, **options: Any) -> None:
            model = copy.deepcopy(packed.model)
            super().__init__(packed_causal_lm(model), **options)

    monkeypatch.setattr(engines, "NativeEngine", Stale)
    recipe = world.recipe("stale", recipes["rl"]("grpo", output_dir="runs/stale"))
    outcome = quartet("rl", recipe)
    outcome.expect_user_error("after weight update 1", "other weights", "canary")
    assert json.loads((world.path / "runs/stale/run.json").read_text())["status"] == "failed"
