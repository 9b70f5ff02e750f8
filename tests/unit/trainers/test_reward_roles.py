"""Sources of reward inside a run: failures, and scoring beside generation."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.algorithms import GRPO
from quartet.config.common import DataConfig, SamplingConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.recipe import RolloutConfig
from quartet.config.rewards import (
    ExactMatchReward,
    FormatReward,
    FunctionReward,
    HTTPReward,
    NumericReward,
    RetryConfig,
)
from quartet.data.datasets import PromptItem
from quartet.models.packed_model import PackedScalarModel
from quartet.observe.spans import SpanRecorder
from quartet.observe.trackers import read_metrics
from quartet.schedule.iteration import Chunk
from quartet.schedule.leases import LeaseContext, default_arbiter
from quartet.text.tokenizer import TextCodec
from quartet.train.token_budget import TokenBudget
from quartet.trainers.input_sources import load_prompts
from quartet.trainers.model_loader import (
    RewardModelRole,
    check_reward_columns,
    reward_functions,
)
from quartet.trainers.rl import RLTrainer
from split_workers import SplitWorkers, without_ids

Train = Callable[..., tuple[RLTrainer, list[dict[str, Any]]]]


@pytest.fixture
def train(tiny_rl: Callable[..., RLTrainer], tmp_path: Path) -> Train:
    """Runs two steps of GRPO; returns the trainer and its rows of metrics."""

    def run(rewards: Any = (), functions: Any = (), name: str = "run", **changes: Any) -> Any:
        values: dict[str, Any] = {
            "rollout": RolloutConfig(
                sampling=SamplingConfig(max_new_tokens=12), engine=NativeEngineConfig(max_running=2, steps_per_lease=1)
            ),
            "steps": 2,
            "prompts_per_step": 4,
            "responses_per_prompt": 2,
            "chunk_size": 1,
            **changes,
        }
        trainer = tiny_rl(tmp_path / name, *functions, algorithm=GRPO(), rewards=rewards, **values)
        runs.append(trainer)
        trainer.train()
        return trainer, read_metrics(tmp_path / name / "metrics.jsonl")

    runs: list[RLTrainer] = []
    run.trainers = runs  # type: ignore[attr-defined]
    return run


@pytest.fixture
def target(tmp_path: Path) -> Callable[[str], str]:
    """Names a function of this source as recipes do."""

    def make(source: str) -> str:
        (tmp_path / "user_rewards.py").write_text(source)
        return f"{tmp_path}/user_rewards.py:reward"

    return make


# Rows as verl publishes them --------------------------------------------------------------------------------


@pytest.fixture
def verl(tmp_path: Path) -> str:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{n}+{n}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * n)} if n else None,
            "extra_info": {"split": "train", "index": n, "answer": f"so #### {2 * n}", "question": f"{n}+{n}="},
        }
        for n in (1, 2, 0)
    ]
    path = tmp_path / "train.parquet"
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


@pytest.mark.parametrize(
    ("columns", "reward", "found", "remedy"),
    [
        ({}, NumericReward(), "reward_model.ground_truth", "map it: data.columns.answer=reward_model.ground_truth"),
        (
            {"answer": "reward_model"},
            NumericReward(),
            "'style', 'ground_truth'",
            "name the answer in them: data.columns.answer=COLUMN.KEY",
        ),
        ({}, ExactMatchReward(column="reward_model"), "'ground_truth'", "data.columns.answer=COLUMN.KEY"),
        ({"answer": "reward_model.truth"}, NumericReward(), "'reward_model.ground_truth'", ""),
        ({"answer": "data_source.x"}, NumericReward(), "'data_source'", "did you mean 'data_source'?"),
    ],
)
def test_objects_are_refused_before_any_work(
    verl: str, tokenizer: Any, columns: Any, reward: Any, found: str, remedy: str
) -> None:
    tokenizer.chat_template = "{{ messages[0].content }}{% if add_generation_prompt %} {% endif %}"
    config = DataConfig(path=verl, columns=columns)
    with pytest.raises(UserError) as caught:
        codec = TextCodec(tokenizer)
        check_reward_columns(reward_functions([reward], []), load_prompts(config, None, codec, 64, "data"), codec)
    assert found in caught.value.found and remedy in caught.value.remedy


# Templates that open a tag ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"tags": ("think", "answer")}, {"pattern": "<think>.*</think>.*<answer>.*"}])
@pytest.mark.parametrize(("generation", "opens"), [("A:", False), ("A:<think>", True), ("A:<think>\n", True)])
def test_a_format_knows_what_the_template_has_opened(
    options: Any, generation: str, opens: bool, tokenizer: Any
) -> None:
    tokenizer.chat_template = "{{ messages[0].content }}{% if add_generation_prompt %}" + generation + "{% endif %}"
    codec, prompt = TextCodec(tokenizer), [{"role": "user", "content": "1+1="}]
    roles = reward_functions([FormatReward(**options)], [])
    check_reward_columns(roles, load_prompts(None, [{"prompt": prompt}], codec, 64, "data"), codec)
    texts = ["so\n</think>\n<answer>2</answer>", "<think>so</think><answer>2</answer>", "<answer>2</answer>"]
    for prompts in ([prompt] * 3, [f"1+1={generation}"] * 3):
        outcome = asyncio.run(roles[0].reward.score(prompts, texts, {}))
        assert outcome.scores == [float(opens), 1.0, 0.0]


# Another tokenizer -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [2])
def test_workers_render_what_a_model_with_another_tokenizer_reads(
    scalar_model: Any, tokenizer: Any, num_workers: int
) -> None:
    """Ids reversed, so that reading the policy's would show; the driver has neither these nor those."""
    codec = TextCodec(tokenizer)

    class Reversed(TextCodec):
        def encode_completion(self, prompt: Any, completion: str) -> tuple[list[int], list[int]]:
            prompt_ids, ids = super().encode_completion(prompt, completion)
            return prompt_ids[::-1], ids[::-1]

    model, own = scalar_model(), Reversed(tokenizer)
    texts, ended = ["123", "4", "56"], [True, False, True]
    expected = []
    for text, has_end in zip(texts, ended, strict=True):
        prompt_ids, ids = own.encode_completion("1+1=", text)
        read = torch.tensor([[*prompt_ids, *(ids if has_end or len(ids) == 1 else ids[:-1])]])
        with torch.no_grad():
            expected.append(float(model.score(model.model(read).last_hidden_state)[0, -1]))
    role = RewardModelRole("judge", PackedScalarModel(model), TokenBudget(64, "budget"), own, 1.0)
    prompt_ids = codec.encode_prompt("1+1=")
    items = [PromptItem("p0", "1+1=", {"answer": object()}, "", len(prompt_ids))] * 3
    responses = [[codec.tokenizer(text)["input_ids"] for text in texts]]
    batch = RaggedBatch.from_groups([prompt_ids], responses, "abc")
    batch = batch.with_sequence(ended=torch.tensor(ended)).with_objects(prompt=items, completion=texts)
    workers = [role.worker() for _ in range(num_workers)]
    worker = LeaseContext(default_arbiter({role.name: workers[0].sizes()}, version=0), SpanRecorder())
    scorer = role.scorer(worker, SplitWorkers(workers, batch))
    found = asyncio.run(scorer.score(Chunk(0, 0, without_ids(batch))))
    assert found.ids == ("a", "b", "c")
    assert found.sequence["reward/judge"].tolist() == pytest.approx(expected, abs=1e-5)


# Huge rewards ----------------------------------------------------------------------------------------------


# Failures --------------------------------------------------------------------------------------------------


def test_what_is_left_out_is_counted_and_the_run_goes_on(train: Train, target: Any) -> None:
    brittle = """
calls = 0
def reward(completions):
    global calls
    calls += 1
    if calls % 4 == 2:
        raise OSError("no connection")
    return [float(len(text)) for text in completions]
"""
    reward = FunctionReward(target=target(brittle), name="brittle", on_error="leave_out")
    trainer, rows = train([reward])
    assert [row["reward/brittle/left_out"] for row in rows[-2:]] == [2.0, 2.0], "one chunk of two in each step"
    assert [row["reward/not_applicable"] for row in rows[-2:]] == [2.0, 2.0]
    assert trainer.roles.actor.num_updates == 2
    (warning,) = [warning for warning in trainer.roles.warnings() if "brittle" in warning]
    assert "4 samples left out" in warning and "no connection" in warning


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ("import os; os._exit(0)", "lost its process: it ended with exit status 0"),
        ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    ],
)
def test_a_function_that_ends_its_program_has_failed_and_so_has_the_run(
    train: Train, target: Any, tmp_path: Path, body: str, part: str
) -> None:
    """It ended with status 0 once, and `running` in its record."""
    with pytest.raises(UserError, match=part):
        train([FunctionReward(target=target(f"def reward(completions): {body}"))])
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


# Beside generation -----------------------------------------------------------------------------------------


def test_a_reward_that_waits_waits_beside_generation(train: Train) -> None:
    grown: list[int] = []

    async def slow(completions: list[str], **_: Any) -> list[float]:
        (trainer,) = train.trainers  # type: ignore[attr-defined]
        before = trainer.workers.engines[0].worker.engine.stats().generated_tokens
        await asyncio.sleep(0.05)
        grown.append(trainer.workers.engines[0].worker.engine.stats().generated_tokens - before)
        return [float(len(text)) for text in completions]

    _, rows = train(functions=[slow])
    assert grown[0] > 0, "tokens were sampled while the first chunk waited for its scores"
    assert rows[-1]["overlap/score_generate_s"] > 0


def test_what_a_passed_function_draws_and_seeds_changes_nothing_in_training(train: Train) -> None:
    def honest(completions: list[str]) -> list[float]:
        return [float(len(text)) for text in completions]

    async def draws(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        random.seed(0)
        torch.manual_seed(0)
        return honest(completions)

    weights = []
    for function in (honest, draws):
        trainer, _ = train(functions=[function], name=function.__name__)
        weights.append(trainer.roles.actor.packed.model.state_dict())
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
    assert any("torch's global generator" in warning for warning in trainer.roles.warnings())


def test_a_server_that_was_never_there_stops_the_run(train: Train) -> None:
    reward = HTTPReward(url="http://127.0.0.1:9", retry=RetryConfig(attempts=1))
    with pytest.raises(UserError, match="has not given a single score") as caught:
        train([reward])
    assert "unreachable" in caught.value.found
    assert train.trainers[0].roles.actor.num_updates == 0  # type: ignore[attr-defined]
