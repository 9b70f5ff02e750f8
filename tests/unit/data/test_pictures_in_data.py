"""Pictures in rows: parts of messages, columns beside prompts, files of every kind, and rows that are left out."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from quartet.batch.pictures import keys_in
from quartet.config.common import DataConfig
from quartet.config.errors import UserError
from quartet.data.datasets import JudgedData, PreferenceData, PromptData, SFTData, TokenLimit
from quartet.data.fields import ReadOptions
from quartet.data.formats import demonstrations, judgements, preferences, prompts
from quartet.data.readers import DataRow, iter_rows
from quartet.text.pictures import Picture, PictureCodec, PictureError, PictureProcessor, image_parts
from quartet.text.tokenizer import TextCodec, load_tokenizer
from tiny_vision import picture_bytes, save_processor

ONE, OTHER = picture_bytes(), picture_bytes(16, 50, (1, 2, 3))
URL = "data:image/png;base64," + base64.b64encode(ONE).decode()
SKIP = ReadOptions(skips_pictures=True)
LIMIT = TokenLimit(1000)


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    directory = save_processor("qwen2_vl", tmp_path_factory.mktemp("model"))
    return TextCodec(load_tokenizer(directory), pictures=PictureCodec(PictureProcessor.load(directory)))


def rows(*values: dict[str, Any]) -> Iterator[DataRow]:
    return (DataRow(value, "f.jsonl", number) for number, value in enumerate(values, start=1))


def given(row: dict[str, Any], **how: Any) -> Any:
    """Returns the prompt of a row."""
    return next(iter(prompts(rows(row), **how).items)).prompt


def part(source: Any = None) -> dict[str, Any]:
    return {"type": "image"} if source is None else {"type": "image", "image": source}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


SEEN = [user(part(Picture(ONE)), text("what?"))]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "what?", "image": ONE},
        {"prompt": "what?", "images": [ONE]},
        {"prompt": "what?", "image": {"bytes": ONE, "path": "gone.png"}},
        {"prompt": "what?", "image": URL, "images": None},
        {"prompt": "what?", "image": json.dumps([URL])},
        {"prompt": "<image>\nwhat?", "image": ONE},
        {"prompt": [{"role": "user", "content": "what?"}], "image": ONE},
        {"prompt": [user(part(), text("what?"))], "images": [ONE]},
        {"prompt": [user({"type": "image", "text": None}, {**text("what?"), "image": None})], "images": [ONE]},
        {"prompt": [user(part(ONE), text("what?"))]},
        {"prompt": [user({"type": "image", "url": URL}, text("what?"))], "image": None},
        {"prompt": [user({"type": "image_url", "image_url": {"url": URL}}, text("what?"))], "images": []},
        {"messages": [user({"type": "image_url", "image_url": URL}, text("what?"))]},
        {"messages": [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a"}], "image": ONE},
    ],
)
def test_every_way_to_give_a_picture(row: dict[str, Any]) -> None:
    assert given(row) == SEEN


def test_an_image_of_pillow_stays_encoded() -> None:
    image = Image.open(io.BytesIO(ONE))
    for row in ({"prompt": "what?", "image": image}, {"prompt": [user(part(image), text("what?"))]}):
        (found,) = image_parts(given(row))
        assert isinstance(found["image"].source, bytes)
        assert found["image"].decode().tobytes() == image.tobytes()


def test_pictures_go_to_their_places_in_order() -> None:
    turns = [user(text("a"), part()), {"role": "assistant", "content": "b"}, user(part(), text("c"), part(b"own"))]
    found = given({"prompt": turns, "image": ONE, "images": [OTHER]})
    assert [each["image"].source for each in image_parts(found)] == [ONE, OTHER, b"own"]
    assert found[0]["content"][0] == text("a")
    marked = given({"prompt": "a <image> b <image>", "images": [ONE, OTHER]})
    assert marked == [user(text("a "), part(Picture(ONE)), text(" b "), part(Picture(OTHER)))]
    front = given(
        {"prompt": [{"role": "system", "content": "s"}, *turns[1:2], user(text("c"))], "images": [ONE, OTHER]}
    )
    assert front[2] == user(part(Picture(ONE)), part(Picture(OTHER)), text("c"))


@pytest.mark.parametrize(
    ("row", "counts"),
    [
        ({"prompt": [user(part(), text("a"))]}, "0 in image and images, 1 places"),
        ({"prompt": [user(part(), text("a"))], "images": [ONE, OTHER]}, "2 in image and images, 1 places"),
        ({"prompt": [user(part(ONE), text("a"))], "image": ONE}, "1 in image and images, 0 places"),
        ({"prompt": "<image> <image>", "image": ONE}, "1 in image and images, 2 places"),
        ({"prompt": [{"role": "system", "content": "a"}], "image": ONE}, "1 in image and images, 0 places"),
    ],
)
def test_counts_that_differ_name_the_row(row: dict[str, Any], counts: str) -> None:
    with pytest.raises(PictureError, match="not as many pictures as places") as refused:
        given(row)
    assert f"f.jsonl:1: {counts}" in refused.value.found


def test_pictures_are_of_users(codec: TextCodec) -> None:
    with pytest.raises(UserError, match="neither text nor a picture"):
        given({"messages": [user(text("a")), {"role": "assistant", "content": [part(ONE)]}]})
    with pytest.raises(UserError, match="a row without a prompt has pictures"):
        list(demonstrations(rows({"text": "a", "image": ONE})).items)


def test_relative_paths_begin_at_the_data_file(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    file = tmp_path / "pictures" / "a.png"
    file.write_bytes(ONE)
    data = tmp_path / "rows.jsonl"
    turn = user({"type": "image", "path": "pictures/a.png"}, text("what?"))
    values = [
        {"prompt": "what?", "image": "pictures/a.png"},
        {"prompt": [turn]},
        {"prompt": "what?", "image": str(file)},
    ]
    data.write_text("\n".join(map(json.dumps, values)))
    found = list(prompts(iter_rows(DataConfig(path=str(data)))).items)
    assert [row.prompt for row in found] == [[user(part(Picture(str(file))), text("what?"))]] * 3
    table = tmp_path / "rows.csv"
    table.write_text("prompt,image\nwhat?,pictures/a.png\nwhat?,\n")
    read = list(prompts(iter_rows(DataConfig(path=str(table)))).items)
    assert [row.prompt for row in read] == [found[0].prompt, "what?"]


def test_columns_of_pictures_in_parquet_and_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    image = Image.open(io.BytesIO(ONE))
    made = datasets.Dataset.from_dict(
        {"prompt": ["what?"], "image": [image], "images": [[]]},
        features=datasets.Features(
            prompt=datasets.Value("string"), image=datasets.Image(), images=datasets.List(datasets.Image())
        ),
    ).add_column("nested", [{"a": 1}])
    both = datasets.Dataset.from_dict(
        {"prompt": ["what?"], "images": [[image, image]]},
        features=datasets.Features(prompt=datasets.Value("string"), images=datasets.List(datasets.Image())),
    )
    monkeypatch.setattr(datasets.Image, "decode_example", lambda *_, **__: pytest.fail("decoded"))
    for name, rows_of, num in (("one", made, 1), ("two", both, 2)):
        rows_of.to_parquet(tmp_path / f"{name}.parquet")
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, _rows=rows_of, **__: _rows)
        for path in (str(tmp_path / f"{name}.parquet"), "org/set"):
            (row,) = prompts(iter_rows(DataConfig(path=path))).items
            found = image_parts(row.prompt)
            assert len(found) == num
            assert {each["image"].decode().tobytes() for each in found} == {image.tobytes()}


def test_functions_get_the_prompt_and_no_columns_of_pictures() -> None:
    (row,) = prompts(rows({"prompt": "what?", "image": ONE, "solution": "red"})).items
    assert dict(row.columns) == {"solution": "red"}
    assert row.prompt == SEEN


def test_a_system_prompt_comes_before_pictures() -> None:
    found = given({"prompt": "what?", "image": ONE}, reading=ReadOptions(system_prompt="kind"))
    assert found == [{"role": "system", "content": "kind"}, *SEEN]


def test_all_kinds_of_rows_have_pictures(codec: TextCodec) -> None:
    asked = {"prompt": "what?", "image": ONE}
    prompt = tuple(codec.encode_prompt(SEEN))
    (one,) = SFTData.build(demonstrations(rows({**asked, "completion": "a"})), codec, LIMIT).items
    assert one.input_ids[: len(prompt)] == prompt
    assert one.loss_mask == (False,) * len(prompt) + (True,) * 2
    pair = PreferenceData.build(preferences(rows({**asked, "chosen": "a", "rejected": "b"})), codec, LIMIT)
    turns = {side: [user(text("what?")), {"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
    shared = PreferenceData.build(preferences(rows({**turns, "image": ONE})), codec, LIMIT)
    placed = {side: [user(part(ONE), text("what?")), *both[1:]] for side, both in turns.items()}
    own = PreferenceData.build(preferences(rows(placed)), codec, LIMIT)
    judged = JudgedData.build(judgements(rows({**asked, "completion": "a", "label": True})), codec, LIMIT)
    for data in (pair, shared, own, judged):
        assert data.items[0].prompt_ids == prompt
    batch = pair.select([0])
    assert keys_in(batch.input_ids.tolist()) == keys_in(prompt)


def test_prompts_that_differ_in_their_picture_are_others(codec: TextCodec) -> None:
    same = bytes([*ONE[:-1], ONE[-1] ^ 1])
    asked = [{"prompt": "what?", "image": source} for source in (ONE, same, ONE)]
    data = PromptData.build(prompts(rows(*asked)), codec, LIMIT)
    assert len(set(data.hashes.tolist())) == 2


BAD = [
    {"prompt": "what?", "image": "https://example.com/a.png"},
    {"prompt": "what?", "image": "gone.png"},
    {"prompt": "what?", "image": ONE[:60]},
    {"prompt": "what?", "images": [ONE, b"none"]},
    {"prompt": "what? <image> <image>", "image": ONE},
    {"prompt": "what?", "image": picture_bytes(900, 2)},
]
WHY = ["is on a server", "is not there", "cannot be decoded", "cannot be read", "not as many pictures", "be processed"]


@pytest.mark.parametrize(("row", "why"), list(zip(BAD, WHY, strict=True)))
def test_a_bad_picture_stops_the_run_with_its_row(codec: TextCodec, row: dict[str, Any], why: str) -> None:
    with pytest.raises(PictureError, match=why) as refused:
        PromptData.build(prompts(rows({"prompt": "a"}, row)), codec, LIMIT)
    assert refused.value.found.startswith("f.jsonl:2")


def test_rows_with_bad_pictures_are_left_out_and_counted(codec: TextCodec) -> None:
    good = {"prompt": "what?", "image": ONE}
    data = PromptData.build(prompts(rows(good, *BAD, good), SKIP), codec, LIMIT)
    assert [item.place for item in data] == ["f.jsonl:1", "f.jsonl:8"]
    assert len(data.warnings) == len(BAD)
    for line, why in enumerate(WHY, start=2):
        assert any(why in told and f"f.jsonl:{line}" in told for told in data.warnings)
    answered = [{**row, "completion": "a"} for row in (*BAD, good)]
    sft = SFTData.build(demonstrations(rows(*answered), SKIP), codec, LIMIT)
    assert len(sft) == 1
    assert len(sft.warnings) == len(BAD)


def test_other_errors_are_no_bad_pictures(codec: TextCodec) -> None:
    with pytest.raises(UserError, match="stands for pictures"):
        PromptData.build(prompts(rows({"prompt": "a <|image_pad|>", "image": ONE}), SKIP), codec, LIMIT)
    with pytest.raises(UserError, match="no processor"):
        PromptData.build(prompts(rows({"prompt": "a", "image": ONE}), SKIP), TextCodec(codec.tokenizer), LIMIT)


def test_the_recipe_says_what_bad_pictures_do() -> None:
    assert ReadOptions.of(DataConfig(path="a.jsonl", bad_images="skip"), "data") == SKIP
    assert not ReadOptions.of(DataConfig(path="a.jsonl"), "data").skips_pictures
