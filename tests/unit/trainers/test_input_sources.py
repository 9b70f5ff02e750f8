"""Rows and models from paths or from objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

from quartet.config import UserError
from quartet.config.common import DataConfig, SourceConfig
from quartet.config.recipe import SFTRecipe
from quartet.data.datasets import Mixture
from quartet.extras.process_rewards.data import step_reader
from quartet.extras.quickstart.tokenizer import build_tokenizer
from quartet.text.tokenizer import TextCodec
from quartet.trainers.input_sources import (
    demonstration_reader,
    load_prompts,
    pair_or_judgement_reader,
    pair_reader,
    read_data,
)
from quartet.trainers.supervised import SFTTrainer


def sft_data(*given: Any) -> Any:
    return read_data(*given, demonstration_reader)


def preference_data(*given: Any) -> Any:
    return read_data(*given, pair_reader)


def pairs_or_judgements(*given: Any) -> Any:
    return read_data(*given, pair_or_judgement_reader)


def process_data(config: Any, rows: Any, codec: Any, context: int, separator: str, key: str) -> Any:
    return read_data(config, rows, codec, context, key, step_reader(separator))


def test_a_prompt_leaves_room_for_one_token(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "1+2="}\n')
    config, codec = DataConfig(path=str(path)), TextCodec(build_tokenizer())
    assert len(load_prompts(config, None, codec, 5, "data")) == 1
    with pytest.raises(UserError, match="allowed 3"):
        load_prompts(config, None, codec, 4, "data")
    with pytest.raises(UserError, match="allowed 3"):
        load_prompts(config.model_copy(update={"max_tokens": 3}), None, codec, 5, "data")


def test_rows_from_python_may_be_strings_messages_or_mappings() -> None:
    codec = TextCodec(build_tokenizer())
    data = load_prompts(None, ["1+2=", {"prompt": "3+4=", "answer": 7}], codec, 16, "data")
    assert [item.prompt for item in data.items] == ["1+2=", "3+4="]
    assert dict(data.items[1].columns) == {"answer": 7}
    with pytest.raises(UserError, match="no data"):
        load_prompts(None, None, codec, 16, "data")


def test_evaluating_without_data_says_what_to_pass(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, **heads)
    recipe = SFTRecipe(output_dir=str(tmp_path / "run"), steps=1)
    rows = [{"prompt": "1+2=", "completion": "3"}]
    trainer = SFTTrainer(recipe, model=Qwen2ForCausalLM(config), tokenizer=tokenizer, rows=rows)
    with pytest.raises(UserError, match="no evaluation data"):
        trainer.evaluate()


# Several sources -----------------------------------------------------------------------------------------


def two_files(folder: Path) -> dict[str, Any]:
    (folder / "a.jsonl").write_text("".join(f'{{"prompt": "{n}+1=", "completion": "2"}}\n' for n in range(6)))
    (folder / "b.jsonl").write_text("".join(f'{{"q": "{n}+2=", "completion": "3"}}\n' for n in range(4)))
    second = {"path": str(folder / "b.jsonl"), "columns": {"prompt": "q"}}
    return {"sources": [{"path": str(folder / "a.jsonl")}, second]}


def weighted(config: dict[str, Any], *weights: float) -> dict[str, Any]:
    return {"sources": [{**part, "weight": weight} for part, weight in zip(config["sources"], weights, strict=True)]}


def test_sources_are_joined_or_mixed(tmp_path: Path) -> None:
    codec, config = TextCodec(build_tokenizer()), two_files(tmp_path)
    data = load_prompts(DataConfig(**config), None, codec, 99, "data")
    assert [item.prompt for item in data] == [f"{n}+1=" for n in range(6)] + [f"{n}+2=" for n in range(4)]
    assert data.order == 10 and len({item.prompt_id for item in data}) == 10
    mixed = load_prompts(DataConfig(**weighted(config, 1, 3)), None, codec, 99, "data")
    assert data.seen == mixed.seen == {i for item in data for i in codec.encode_prompt(item.prompt)}
    assert list(mixed) == list(data) and mixed.order == Mixture((6, 4), (1.0, 3.0))
    assert mixed.warnings == tuple(
        f"{tmp_path / name}: {count} of the 10 rows of an epoch, from {rows}"
        for name, count, rows in (("a.jsonl", 3, 6), ("b.jsonl", 7, 4))
    )
    batch = sft_data(DataConfig(**weighted(config, 1, 3)), None, codec, 99, "data").batch(0, 10, seed=1)
    rows = [int(name.removeprefix("row").partition("@")[0]) for name in batch.ids]
    assert sum(row >= 6 for row in rows) == 7


def test_sources_that_do_not_go_together(tmp_path: Path) -> None:
    codec, config = TextCodec(build_tokenizer()), two_files(tmp_path)
    for sources in (config, weighted(config, 1, 3)):
        assert len(load_prompts(DataConfig(**sources), None, codec, 99, "evaluation.data")) == 10
    config["sources"][1]["columns"] = {"prompt": "x"}
    with pytest.raises(UserError, match=r"data\.sources\.1\.columns\.prompt points"):
        load_prompts(DataConfig(**config), None, codec, 99, "data")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1", "chosen": "2", "rejected": "3"}\n')
    (tmp_path / "judged.jsonl").write_text('{"prompt": "1", "completion": "2", "label": 1}\n')
    both = DataConfig(sources=[SourceConfig(path=str(tmp_path / f"{name}.jsonl")) for name in ("pairs", "judged")])
    with pytest.raises(UserError, match="sources of one kind"):
        pairs_or_judgements(both, None, codec, 99, "data")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"path": "a", "sources": [{"path": "b"}]}, "path belongs to each of them"),
        ({"split": "x", "limit": 3, "sources": [{"path": "b"}]}, "split, limit belong to each"),
        ({"sources": [{"path": "a", "weight": 1}, {"path": "b"}]}, "every source a weight, or none"),
        ({"sources": [{"path": "a", "weight": 0}]}, "greater than 0"),
        ({"sources": [{"limit": 3}]}, "needs a path"),
    ],
)
def test_sources_that_contradict_themselves(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        DataConfig(**values)


# Rows from Python ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["data", "evaluation_data", "evaluation.data"])
def test_overlong_rows_from_python_and_remedies_that_name_their_section(key: str) -> None:
    codec, rows = TextCodec(build_tokenizer()), ["1+2=", "1+2=3+4=5+6="]
    with pytest.raises(UserError) as caught:
        load_prompts(None, rows, codec, 8, key)
    assert f"set {key}.overlong=skip" in caught.value.remedy and f"{key}.max_tokens" in caught.value.remedy
    data = load_prompts(DataConfig(overlong="skip"), rows, codec, 8, key)
    assert len(data) == 1 and "1 rows left out" in data.warnings[0]
    with pytest.raises(UserError) as caught:
        load_prompts(None, [{"question": "1"}], codec, 8, key)
    assert f"map them: {key}.columns.prompt=question" in caught.value.remedy
    with pytest.raises(UserError, match=f"{key}.path is missing"):
        load_prompts(DataConfig(overlong="skip"), None, codec, 8, key)


# Very long texts ------------------------------------------------------------------------------------------


def long_texts(tokenizer: Any) -> dict[str, Callable[[DataConfig | None], Any]]:
    """Every kind of row, with one text of a megabyte."""
    codec, long = TextCodec(tokenizer), "1+2=3" * 200_000
    short, user = {"prompt": "1", "completion": "2", "chosen": "3", "rejected": "4"}, {"role": "user", "content": long}
    answer, key = {"role": "assistant", "content": "1"}, "data"
    pairs = [short, {**short, "chosen": f"{long}1", "rejected": f"{long}2"}]
    steps = [{"prompt": "1", "steps": ["1"], "labels": [1]}, {"prompt": "1", "steps": [long, "1"], "labels": [1, 0]}]
    return {
        "prompts": lambda c: load_prompts(c, ["1", long], codec, 99, key),
        "completions": lambda c: sft_data(c, [short, {**short, "completion": long}], codec, 99, key),
        "messages": lambda c: sft_data(c, [short, {"messages": [user, answer]}], codec, 99, key),
        "texts": lambda c: sft_data(c, [{"text": "1"}, {"text": long}], codec, 99, key),
        "pairs": lambda c: preference_data(c, pairs, codec, 99, key),
        "judgements": lambda c: pairs_or_judgements(
            c, [{**row, "chosen": None, "label": 1} for row in (short, {**short, "completion": long})], codec, 99, key
        ),
        "steps": lambda c: process_data(c, steps, codec, 99, "|", key),
    }


@pytest.mark.parametrize("kind", list(long_texts(None)))
def test_very_long_texts_are_left_out_before_they_are_tokenised(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}={% endfor %}"
    call, longest = type(tokenizer).__call__, 0

    def counted(self: Any, text: str, **options: Any) -> Any:
        nonlocal longest
        longest = max(longest, len(text))
        return call(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    build = long_texts(tokenizer)[kind]
    data = build(DataConfig(overlong="skip"))
    assert len(data) == 1 and any(
        "1 rows left out" in warning and "longer than" in warning for warning in data.warnings
    )
    with pytest.raises(UserError, match="longer than allowed"):
        build(None)
    assert longest < 70_000
