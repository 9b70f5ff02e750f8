"""Training on data as they are published: dialogues in one text, rows tokenised already, sources mixed by weight."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quartet.cli.show import show_run
from quartet.config import UserError
from quartet.config.common import CheckpointConfig, DataConfig, OptimConfig, SourceConfig, TrainConfig
from quartet.config.preference import DPOLoss, PreferenceRecipe
from quartet.config.recipe import RewardModelRecipe, SFTRecipe
from quartet.config.run import LogConfig
from quartet.text.tokenizer import TextCodec
from quartet.trainers.preference import PreferenceTrainer
from quartet.trainers.supervised import RewardModelTrainer, SFTTrainer

COMMON: dict[str, Any] = {
    "threads": 1,
    "train": TrainConfig(optim=OptimConfig(lr=5e-3, warmup_steps=2)),
    "checkpoint": CheckpointConfig(every_steps=2),
    "log": LogConfig(tensorboard=False),
}


# HH-RLHF -------------------------------------------------------------------------------------------------


@pytest.fixture
def letters() -> PreTrainedTokenizerFast:
    """One token per byte, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE({letter: n for n, letter in enumerate(["<e>", *alphabet])}, [])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = "{% for m in messages %}{{ m.role[0] }}|{{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}a|{% endif %}"
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", pad_token="<e>")
    found.chat_template = template
    return found


def dialogues(num: int) -> list[dict[str, str]]:
    """Pairs in one text each; the good answer says yes, and every third is the longer one."""
    rows = []
    for n in range(num):
        head = f"\n\nHuman: Is {n} so?\n\nAssistant: Why?\n\nHuman: Just say.\n\nAssistant:"
        rows.append({"chosen": f"{head} yes{'!' * 2 * (n % 3 == 0)}", "rejected": f"{head} nope"})
    return rows


@pytest.fixture
def hh(tmp_path: Path) -> dict[str, Any]:
    """Training and held-out data as the recipe's sections, compressed as on the hub; one row has diverged earlier."""
    rows = dialogues(24)
    rows.insert(5, {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: d"})
    found = {}
    for key, part in (("data", rows[:17]), ("evaluation_data", rows[17:])):
        path = tmp_path / f"{key}.jsonl.gz"
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in part).encode()))
        found[key] = str(path)
    return found


def test_a_reward_model_learns_from_dialogues_as_published(
    hh: dict[str, str], letters: Any, causal_lm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {key: DataConfig(path=path) for key, path in hh.items()}
    recipe = RewardModelRecipe(
        **COMMON, **sections, output_dir=str(tmp_path / "run"), steps=12, pairs_per_step=8, evaluate_every_steps=99
    )
    model = causal_lm(vocab_size=len(letters), eos_token_id=letters.eos_token_id, max_position_embeddings=256)
    trainer = RewardModelTrainer(recipe, model=model, tokenizer=letters)
    first = trainer.worker.data.items[0]
    assert letters.decode(first.prompt_ids) == dialogues(1)[0]["chosen"][:-6]
    assert letters.decode(first.answers[0][:-1]) == " yes!!"
    result = trainer.train()
    assert any("differ before their last turn" in note for note in result.summary["notes"])
    found = result.summary["stages"][0]["metrics"]
    assert found["eval/accuracy"] == 1.0 and found["eval/longer_answer_accuracy"] == 0.25
    show_run(result.path, result.summary)
    out = capsys.readouterr().out
    assert "eval/accuracy" in out and "eval/longer_answer_accuracy" in out


def test_dpo_learns_from_dialogues_as_published(
    hh: dict[str, str], letters: Any, causal_lm: Any, tmp_path: Path
) -> None:
    sections = {key: DataConfig(path=path) for key, path in hh.items()}
    recipe = PreferenceRecipe(
        **COMMON, **sections, output_dir=str(tmp_path / "run"), steps=10, pairs_per_step=8, loss=DPOLoss(beta=0.5)
    )
    model = causal_lm(vocab_size=len(letters), eos_token_id=letters.eos_token_id, max_position_embeddings=256)
    found = PreferenceTrainer(recipe, model=model, tokenizer=letters).train().summary["stages"][0]["metrics"]
    assert found["eval/accuracy"] == 1.0 and found["eval/loss"] < 0.5


def test_what_was_left_out_of_held_out_rows_is_told(
    causal_lm: Callable[..., Any], tokenizer: Any, demonstrations: list[dict[str, str]], tmp_path: Path
) -> None:
    """And rows from Python are left out as the recipe says, without a path."""
    sections = {key: DataConfig(max_tokens=50, overlong="skip") for key in ("data", "evaluation_data")}
    recipe = SFTRecipe(**COMMON, **sections, output_dir=str(tmp_path / "run"), steps=1)
    rows = [*demonstrations, {"prompt": "1+1=" * 20, "completion": "2"}]
    trainer = SFTTrainer(recipe, model=causal_lm(), tokenizer=tokenizer, rows=rows, evaluation_rows=rows[-3:])
    notes = trainer.train().summary["notes"]
    for name, key in (("data", "data"), ("held-out data", "evaluation_data")):
        (note,) = [note for note in notes if note.startswith(f"{name}: ")]
        assert "rows left out: sequence longer than 50 tokens" in note and f"{key} passed from Python" in note


# SFT -----------------------------------------------------------------------------------------------------


def test_token_ids_train_as_their_text_does(
    causal_lm: Callable[..., Any], tokenizer: Any, demonstrations: list[dict[str, str]], tmp_path: Path
) -> None:
    codec = TextCodec.of(tokenizer)
    ids = []
    for row in demonstrations:
        prompt, answer = codec.encode_completion(row["prompt"], row["completion"])
        ids.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    trained = []
    for name, rows in (("text", demonstrations), ("ids", ids)):
        recipe = SFTRecipe(**COMMON, output_dir=str(tmp_path / name), steps=3, examples_per_step=6)
        trained.append(SFTTrainer(recipe, model=causal_lm(), tokenizer=tokenizer, rows=rows).train().model.state_dict())
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())
    ids[7]["input_ids"][2] = ids[7]["labels"][2] = 5000
    with pytest.raises(UserError, match="data passed from Python:8: id 5000"):
        SFTTrainer(SFTRecipe(**COMMON, steps=1), model=causal_lm(), tokenizer=tokenizer, rows=ids)


def test_a_mixture_goes_on_to_the_bit(
    break_off: Any, causal_lm: Callable[..., Any], tokenizer: Any, demonstrations: list[dict[str, str]], tmp_path: Path
) -> None:
    for name, part in (("a", demonstrations[:5]), ("b", demonstrations[5:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    sources = tuple(SourceConfig(path=str(tmp_path / f"{n}.jsonl"), weight=w) for n, w in (("a", 3.0), ("b", 1.0)))

    def trainer(name: str, seed: int, *, resume: bool = False) -> SFTTrainer:
        recipe = SFTRecipe(
            **COMMON, data=DataConfig(sources=sources), output_dir=str(tmp_path / name), steps=7, examples_per_step=6
        )
        return SFTTrainer(recipe, model=causal_lm(seed=seed), tokenizer=tokenizer, resume=resume)

    whole = trainer("whole", 0).train()
    notes = [note for note in whole.summary["notes"] if "rows of an epoch" in note]
    assert [note.rpartition("/")[2] for note in notes] == [
        "a.jsonl: 18 of the 24 rows of an epoch, from 5",
        "b.jsonl: 6 of the 24 rows of an epoch, from 19",
    ]
    break_off(trainer("broken", 0), 3)
    resumed = trainer("broken", 9, resume=True).train()
    ours, theirs = whole.model.state_dict(), resumed.model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
