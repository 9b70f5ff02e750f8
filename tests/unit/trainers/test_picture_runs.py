"""Jobs on pictures, from files to files: each distinct one goes through the tower once, whatever roles read it."""

from __future__ import annotations

import json
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

from quartet import GRPO, PPO, RLRecipe, RLTrainer, SFTRecipe, SFTTrainer
from quartet.batch.pictures import keys_in
from quartet.config import UserError
from quartet.config.common import DataConfig, LoRAConfig, ModelConfig, OptimConfig, SamplingConfig, TrainConfig
from quartet.config.engines import NativeEngineConfig
from quartet.config.evaluation import EvaluationConfig
from quartet.config.preference import PreferenceRecipe
from quartet.config.recipe import ActorConfig, CriticConfig, EnvironmentConfig, RewardModelRecipe, RolloutConfig
from quartet.config.rewards import ModelReward
from quartet.envs.protocol import Item, StepResult
from quartet.observe.rollouts import read_rollout_step
from quartet.observe.spans import read_spans
from quartet.observe.trackers import read_metrics
from quartet.text.pictures import PictureProcessor, PictureStore
from quartet.trainers.preference import PreferenceTrainer
from quartet.trainers.supervised import RewardModelTrainer
from tiny_vision import picture_bytes, save_model

COLOURS = [(200, 30, 60), (20, 130, 60), (10, 30, 200)]
OPTIM = OptimConfig(lr=1e-3)


def rows(folder: Path) -> Path:
    """Writes rows with three distinct pictures between them: one each, two of them beside each other, none."""
    for n, colour in enumerate(COLOURS):
        (folder / f"{n}.png").write_bytes(picture_bytes(colour=colour, width=24 + 8 * n))
    written = []
    for names in ([0], [1], [2], [0, 1], []):
        parts = [*({"type": "image"} for _ in names), {"type": "text", "text": "what?"}]
        prompt = [{"role": "user", "content": parts}]
        answers = {"completion": "hell", "chosen": "hell", "rejected": "he"}
        written.append({"prompt": prompt, "images": [f"{n}.png" for n in names], **answers})
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in written))
    return path


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [sum(map(ord, turns[-1]["content"])) % 7 / 7 for turns in completions]


def rl(folder: Path, model: Path, **options: Any) -> RLRecipe:
    train = options.pop("train", TrainConfig(optim=OPTIM))
    settings: dict[str, Any] = {
        "actor": ActorConfig(model=ModelConfig(path=str(model)), train=train),
        "data": DataConfig(path=str(rows(folder))),
        "algorithm": GRPO(),
        "steps": 4,
        "prompts_per_step": 3,
        "responses_per_prompt": 3,
        "rollout": RolloutConfig(sampling=SamplingConfig(max_new_tokens=5)),
        "output_dir": str(folder / "run"),
    }
    return RLRecipe(**settings | options)


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [row for row in read_metrics(folder / "run" / "metrics.jsonl") if row["step"] > 0]


def weights(path: Path) -> dict[str, torch.Tensor]:
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    return dict(model.state_dict())


def changed(folder: Path) -> set[str]:
    """Returns which parts of the model a run has changed."""
    before, after = weights(folder / "model"), weights(folder / "run" / "model")
    names = [name for name in before if not torch.equal(before[name], after[name])]
    kinds = {"vision_tower": "tower", "multi_modal_projector": "projector"}
    return {next((kinds[kind] for kind in kinds if kind in name), "language") for name in names}


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl", "qwen3_vl", "smolvlm"])
def test_grpo(kind: str, tmp_path: Path) -> None:
    RLTrainer(rl(tmp_path, save_model(kind, tmp_path / "model")), rewards=reward).train()
    metrics = metrics_of(tmp_path)
    assert [row["pictures/computed"] for row in metrics] == [3.0, 0.0, 0.0, 0.0], "what was looked at ahead counts"
    assert all(row["agreement/logprob_diff_max"] < 1e-4 for row in metrics)
    assert all(row["agreement/canary_diff"] < 1e-4 for row in metrics)
    assert any(row["policy/grad_norm"] > 0 for row in metrics)
    assert any(span.name == "look_ahead" for span in read_spans(tmp_path / "run" / "spans.jsonl"))
    exported = tmp_path / "run" / "model"
    assert (exported / "preprocessor_config.json").read_bytes() == (
        tmp_path / "model" / "preprocessor_config.json"
    ).read_bytes()
    records = [record for step in range(1, 5) for record in read_rollout_step(tmp_path / "run" / "rollouts", step)]
    assert {len(keys_in(record.prompt_ids)) for record in records} == {0, 1, 2}
    kept = PictureStore(tmp_path / "run" / "pictures")
    shown = {int(key, 16) for record in records for key in record.pictures}
    assert {kept.get(key).source for key in shown} == {str(tmp_path / f"{n}.png") for n in range(3)}
    # What was trained is a model like the first: it can be trained on.
    again = tmp_path / "again"
    again.mkdir()
    RLTrainer(rl(again, exported, steps=1), rewards=reward).train()


def test_ppo_with_a_reward_model_on_one_tower(tmp_path: Path) -> None:
    """Actor, critic, reference and reward model have one tower between them, which computes a picture once."""
    model = save_model("llava", tmp_path / "model")
    pairs = DataConfig(path=str(rows(tmp_path)))
    trained = RewardModelRecipe(
        model=ModelConfig(path=str(model)), data=pairs, output_dir=str(tmp_path / "rm"), steps=2, pairs_per_step=2
    )
    RewardModelTrainer(trained).train()
    recipe = rl(
        tmp_path,
        model,
        algorithm=PPO(),
        critic=CriticConfig(train=TrainConfig(optim=OPTIM)),
        rewards=(ModelReward(type="model", path=str(tmp_path / "rm" / "model")),),
        evaluation=EvaluationConfig(data=pairs, every_steps=2),
        responses_per_prompt=2,
    )
    RLTrainer(recipe).train()
    metrics = metrics_of(tmp_path)
    assert sum(row["pictures/computed"] for row in metrics) == 3
    assert all(row["critic/grad_norm"] > 0 for row in metrics)
    assert "eval/score_mean" in metrics[-1]


@pytest.mark.parametrize(
    ("train", "parts"),
    [
        ({}, {"language"}),
        ({"lora": LoRAConfig(rank=2)}, {"language"}),
        ({"freeze_projector": False}, {"language", "projector"}),
        ({"freeze_projector": False, "freeze_language_model": True}, {"projector"}),
        ({"freeze_projector": False, "freeze_vision_tower": False}, {"language", "projector", "tower"}),
    ],
)
def test_what_trains(train: dict[str, Any], parts: set[str], tmp_path: Path) -> None:
    recipe = rl(tmp_path, save_model("llava", tmp_path / "model"), train=TrainConfig(optim=OPTIM, **train))
    RLTrainer(recipe, rewards=reward).train()
    assert changed(tmp_path) == parts
    metrics = metrics_of(tmp_path)
    assert all(row["agreement/logprob_diff_max"] < 1e-4 for row in metrics), "the engine has the weights of the step"
    if "projector" not in parts:
        assert sum(row["pictures/computed"] for row in metrics) == 3


def test_sft_and_preferences(tmp_path: Path) -> None:
    model, data = (
        ModelConfig(path=str(save_model("qwen2_vl", tmp_path / "model"))),
        DataConfig(path=str(rows(tmp_path))),
    )
    common: dict[str, Any] = {"model": model, "data": data, "train": TrainConfig(optim=OPTIM), "steps": 6}
    for name, trainer in (
        ("sft", SFTTrainer(SFTRecipe(**common, output_dir=str(tmp_path / "sft"), examples_per_step=3))),
        ("dpo", PreferenceTrainer(PreferenceRecipe(**common, output_dir=str(tmp_path / "dpo"), pairs_per_step=3))),
    ):
        trainer.train()
        losses = [row[key] for row in read_metrics(tmp_path / name / "metrics.jsonl") for key in row if "loss/" in key]
        assert losses[-1] < losses[0]
        assert trainer.worker.packed.work.pictures <= 3


def test_an_engine_in_a_process_of_its_own(tmp_path: Path) -> None:
    """It finds the pictures, and the features that others have computed, where the run keeps them."""
    rollout = RolloutConfig(engine=NativeEngineConfig(process=True), sampling=SamplingConfig(max_new_tokens=5))
    model = save_model("qwen2_vl", tmp_path / "model")
    RLTrainer(rl(tmp_path, model, rollout=rollout, steps=2), rewards=reward).train()
    metrics = metrics_of(tmp_path)
    assert all(row["agreement/logprob_diff_max"] < 1e-4 for row in metrics)
    assert len(list((tmp_path / "run" / "pictures" / "features").rglob("*.safetensors"))) == 3


class Gallery:
    """Shows a picture, then another one beside a question."""

    async def reset(self, item: Item) -> Any:
        return item.prompt

    async def step(self, action: str) -> StepResult:
        self.turns = getattr(self, "turns", 0) + 1
        shown = {"type": "image", "image": picture_bytes(colour=COLOURS[self.turns], width=40)}
        content = [shown, {"type": "text", "text": "and this?"}]
        score = sum(map(ord, action)) % 5 / 5
        return StepResult([{"role": "user", "content": content}], reward=score, done=self.turns == 2)


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
def test_pictures_in_later_turns(kind: str, tmp_path: Path) -> None:
    model = save_model(kind, tmp_path / "model")
    recipe = rl(tmp_path, model, environment=EnvironmentConfig(max_turns=3), steps=2)
    RLTrainer(recipe, environment=Gallery).train()
    metrics = metrics_of(tmp_path)
    assert all(row["agreement/logprob_diff_max"] < 1e-4 for row in metrics)
    assert all(row["episode/turns_mean"] == 2 for row in metrics)
    records = read_rollout_step(tmp_path / "run" / "rollouts", 1)
    assert any(len(keys_in([*record.prompt_ids, *record.response_ids])) == 2 for record in records)


def test_a_run_is_resumed_to_the_bit(tmp_path: Path) -> None:
    """Also where the features that it left are gone."""
    model = save_model("qwen3_vl", tmp_path / "model")
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    RLTrainer(rl(tmp_path / "whole", model), rewards=reward).train()
    RLTrainer(rl(tmp_path / "halves", model, steps=2), rewards=reward).train()
    shutil.copytree(tmp_path / "halves", tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "run" / "pictures" / "features")
    for name in ("halves", "bare"):
        RLTrainer(rl(tmp_path / name, model), rewards=reward, resume=True).train()
    whole, halves, bare = (weights(tmp_path / name / "run" / "model") for name in ("whole", "halves", "bare"))
    assert all(torch.equal(whole[name], halves[name]) and torch.equal(whole[name], bare[name]) for name in whole)
    assert [metrics_of(tmp_path / name)[2]["pictures/computed"] > 0 for name in ("halves", "bare")] == [False, True]


def test_another_picture_gives_another_answer(tmp_path: Path) -> None:
    """What a run learns from is the pictures: with others it learns something else."""
    model = save_model("llava", tmp_path / "model")
    found = []
    for n in range(2):
        folder = tmp_path / str(n)
        folder.mkdir()
        recipe = rl(folder, model)
        if n:
            (folder / "0.png").write_bytes(picture_bytes(colour=(250, 250, 0)))
        RLTrainer(recipe, rewards=reward).train()
        found.append(weights(folder / "run" / "model"))
    assert any(not torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_picture_that_changes_while_a_run_uses_it(tmp_path: Path) -> None:
    recipe = rl(tmp_path, save_model("llava", tmp_path / "model"))

    def overwriting(completions: list[Any]) -> list[float]:
        for n in range(3):
            (tmp_path / f"{n}.png").write_bytes(picture_bytes(colour=(1, 2, 3)))
        shutil.rmtree(tmp_path / "run" / "pictures" / "features")
        return reward(completions)

    trainer = RLTrainer(recipe, rewards=overwriting)
    trainer.roles.actor.packed.tower._store._max_bytes = 0  # type: ignore[union-attr]
    with pytest.raises(UserError, match="not the one that the prompt was made with"):
        trainer.train()


def test_a_role_that_reads_text_alone(tmp_path: Path) -> None:
    """A critic of a text model with the policy's tokens."""
    folder = save_model("llava", tmp_path / "model")
    text = LlavaForConditionalGeneration.from_pretrained(folder).model.language_model.config
    critic = LlamaForSequenceClassification(LlamaConfig(**{**text.to_dict(), "num_labels": 1}))
    recipe = rl(tmp_path, folder, algorithm=PPO())
    with pytest.raises(UserError, match="has pictures, and the model reads text alone"):
        RLTrainer(recipe, rewards=reward, critic=critic).train()


def test_pictures_for_a_model_without_a_processor(tmp_path: Path) -> None:
    model = save_model("llava", tmp_path / "model")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (model / name).unlink()
    with pytest.raises(UserError, match="the model has no processor for pictures"):
        RLTrainer(rl(tmp_path, model), rewards=reward)
    assert not (tmp_path / "run").exists()
    texts = [{"prompt": [{"role": "user", "content": "hello"}]}]
    recipe = rl(tmp_path, model, data=None, prompts_per_step=1, steps=1)
    RLTrainer(recipe, rewards=reward, prompts=texts).train()


def test_model_and_processor_from_python(tmp_path: Path) -> None:
    folder = save_model("llava", tmp_path / "model")
    model, processor = LlavaForConditionalGeneration.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    picture = Image.open(BytesIO(picture_bytes()))
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "what?"}]
    prompts = [{"prompt": [{"role": "user", "content": content}]}]
    recipe = rl(tmp_path, folder, steps=1, prompts_per_step=1)
    recipe = recipe.model_copy(update={"data": None, "actor": recipe.actor.model_copy(update={"model": None})})
    RLTrainer(recipe, model=model, tokenizer=processor, rewards=reward, prompts=prompts).train()
    assert PictureProcessor.load(tmp_path / "run" / "model").mark == "<image>"
    recipe = recipe.model_copy(update={"output_dir": str(tmp_path / "other")})
    with pytest.raises(UserError, match="no processor for pictures") as raised:
        RLTrainer(recipe, model=model, tokenizer=processor.tokenizer, rewards=reward, prompts=prompts)
    assert "pass the processor" in raised.value.remedy


def test_rows_with_bad_pictures_are_left_out_and_counted(tmp_path: Path) -> None:
    model = save_model("llava", tmp_path / "model")
    recipe = rl(tmp_path, model)
    whole = (tmp_path / "1.png").read_bytes()
    (tmp_path / "1.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="a picture cannot be decoded") as raised:
        RLTrainer(recipe, rewards=reward)
    assert "rows.jsonl:2" in str(raised.value.found)
    assert recipe.data is not None
    skipping = recipe.model_copy(update={"data": recipe.data.model_copy(update={"bad_images": "skip"})})
    trainer = RLTrainer(skipping, rewards=reward)
    assert len(trainer.roles.prompts) == 3
    assert any("2 rows left out" in warning for warning in trainer.roles.warnings())
    trainer.train()
