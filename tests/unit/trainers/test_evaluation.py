"""Held-out evaluation, plain generation and the records kept of rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from quartet.batch.ragged import ColumnSet
from quartet.config.common import SamplingConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.evaluation import EvalRecipe
from quartet.data.datasets import PromptData, TokenLimit
from quartet.data.formats import prompts as as_prompts
from quartet.data.readers import DataRow
from quartet.models.loading import packed_causal_lm
from quartet.observe.progress import Progress
from quartet.observe.spans import SpanRecorder
from quartet.rollout.protocol import SamplingParams
from quartet.schedule.groups import drop_texts, make_chunk
from quartet.schedule.model_worker import record_columns, rollout_records
from quartet.text.tokenizer import TextCodec
from quartet.trainers import evaluation
from quartet.trainers.devices import FrozenModels
from quartet.trainers.evaluation import EvaluationModel, completions_as_group, generate
from quartet.trainers.evaluation_metrics import ScoredAnswer
from quartet.trainers.experience import ExperienceAssembler


@pytest.fixture
def codec(tokenizer: Any) -> TextCodec:
    return TextCodec.of(tokenizer)


@pytest.fixture
def data(codec: TextCodec, prompts: list[str]) -> PromptData:
    rows = [DataRow({"prompt": p, "length": len(p)}, "here", n) for n, p in enumerate(prompts, start=1)]
    return PromptData.build(as_prompts(rows), codec, TokenLimit(64))


@pytest.fixture
def answered(causal_lm: Any, tokenizer: Any, prompts: list[str], tmp_path: Path) -> Callable[..., list[ScoredAnswer]]:
    """Answers of a model alone, scored by a function."""

    def run(reward: Any, *, samples: int = 1, **sampling: Any) -> list[ScoredAnswer]:
        objects = {"model": causal_lm(), "tokenizer": tokenizer, "rewards": [reward], "prompts": prompts}
        limits = SamplingConfig(**sampling)
        recipe = EvalRecipe(sampling=limits, samples_per_prompt=samples, engine=NativeEngineConfig(max_running=5))
        model = EvaluationModel(None, None, (), frozen=FrozenModels(), engine=recipe.engine, **objects)
        recorder = SpanRecorder(tmp_path / "spans.jsonl")
        with closing(recorder), closing(model), Progress().stage("answers", None) as bar:
            return model.answers(recipe.sampling, recipe.samples_per_prompt, recorder, bar, seed=0)

    return run


def test_every_prompt_is_answered_and_scored(
    answered: Any, causal_lm: Any, codec: TextCodec, prompts: list[str]
) -> None:
    def characters(completions: list[str], **_: Any) -> list[float | None]:
        """Of every second one."""
        return [float(len(text)) if k % 2 == 0 else None for k, text in enumerate(completions)]

    answers = answered(characters, temperature=0.0, max_new_tokens=6)
    assert [answer.prompt for answer in answers] == prompts
    greedy = SamplingParams(temperature=0.0, max_new_tokens=6)
    expected = generate(packed_causal_lm(causal_lm()), codec, prompts, greedy)
    assert [answer.completion for answer in answers] == [group[0].text for group in expected]
    assert [answer.length for answer in answers] == [len(group[0].completion.token_ids) for group in expected]
    for n, answer in enumerate(answers):
        scored = answer.rewards["characters"]
        assert scored == len(answer.completion) if n % 2 == 0 else math.isnan(scored)


def test_chunks_do_not_show(answered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers and scores are the same however many are scored together; a prompt's samples stay together."""
    sizes: list[int] = []

    def n(completions: list[str], **_: Any) -> list[float]:
        sizes.append(len(completions))
        return [float(len(text)) for text in completions]

    whole = answered(n, samples=3, max_new_tokens=4)
    assert sizes == [36] and {tuple(answer.rewards) for answer in whole} == {("n",)}
    monkeypatch.setattr(evaluation, "CHUNK", 7)
    assert answered(n, samples=3, max_new_tokens=4) == whole and sizes[1:] == [6] * 6
    assert [(a.prompt_id, a.sample) for a in whole] == [(f"p{p}", r) for p in range(12) for r in range(3)]
    assert all(answer.rewards["n"] == len(answer.completion) for answer in whole)


def test_generation_depends_on_the_seed_alone_and_reports_its_progress(causal_lm: Any, codec: TextCodec) -> None:
    packed = packed_causal_lm(causal_lm())
    done: list[int] = []
    sampling, prompts = SamplingParams(max_new_tokens=5), ["1+2=", "3+4=", "12+34="]

    def texts(**options: Any) -> list[list[str]]:
        found = generate(packed, codec, prompts, sampling, num_responses=3, **options)
        return [[answer.text for answer in group] for group in found]

    once = texts(on_done=done.append)
    assert sum(done) == 9
    assert texts(max_running=2) == once
    assert texts(seed=1) != once
    assert len({tuple(group) for group in once}) == 3


def test_records_keep_every_token_with_its_columns(causal_lm: Any, codec: TextCodec, data: PromptData) -> None:
    from quartet.config.algorithms import RLOO, KLConfig

    packed = packed_causal_lm(causal_lm())
    sampling = SamplingParams(max_new_tokens=4, stop_token_ids=tuple(codec.eos_ids))
    prompts = [item.prompt for item in data][:2]
    found = generate(packed, codec, prompts, sampling, num_responses=2)
    groups = [
        completions_as_group(codec, 7 + k, data.items[k], [answer.completion for answer in group])
        for k, group in enumerate(found)
    ]
    chunk = make_chunk(3, 0, groups)
    scores = ColumnSet(chunk.data.ids, sequence={"reward/a": torch.tensor([1.0, 2.0, math.nan, 4.0])})
    assembler = ExperienceAssembler(RLOO(kl=KLConfig(coef=0.0)), {"a": 1.0}, lambda: 0.0)
    batch = drop_texts(assembler([(chunk, [scores])]).batch)
    records = rollout_records(batch, record_columns(batch), codec)
    assert [record.sequence_id for record in records] == ["7.0", "7.1", "8.0", "8.1"]
    answers = [answer for group in found for answer in group]
    for record, answer in zip(records, answers, strict=True):
        assert record.response_ids == list(answer.completion.token_ids)
        assert record.response_text == answer.text
        assert record.columns["rollout_logprobs"] == pytest.approx(answer.completion.logprobs, rel=1e-5)
    assert [record.rewards["a"] for record in records] == [1.0, 2.0, None, 4.0]
    assert [record.score for record in records] == [1.0, 2.0, None, 4.0]
    assert records[0].columns["advantages"] == [-1.0] * len(records[0].response_ids)
    assert not any(records[3].columns["loss_mask"]), "alone in its group"
