"""Questions on pictures: right answers that text does not give away, splits that are apart, a model that reads them."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from quartet.extras.pictures import task
from quartet.extras.pictures.model import build_tokenizer, save_model


def _answer(scene: task.Scene, question: str) -> str:
    """Finds the answer in the scene."""
    what = question.split()[-1]
    found = [
        thing for cell, thing in scene.items() if what in (thing.shape, thing.colour, task.PLACES[cell])
    ]  # fmt: skip
    if question.startswith("how many"):
        return str(len(found))
    (thing,) = found
    return thing.colour if question.split()[1] == "colour" else thing.shape


@pytest.mark.parametrize("name", task.SIZES)
def test_answers_are_right_and_about_equally_frequent(name: str) -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for scene, question, answer in islice(task.questions(name, 3), 4000):
        assert answer == _answer(scene, question)
        assert task.is_held_out(scene) == (name == "held_out")
        counts[question.split()[1]][answer] += 1
    assert len(counts) == 3
    for answers in counts.values():
        assert len(answers) == 4
        # Of held-out scenes, which are few, some answers have more.
        most = 0.33 if name == "held_out" else 0.29
        assert max(answers.values()) / answers.total() < most


def test_a_picture_shows_the_colours_of_its_scene() -> None:
    for scene, _, _ in islice(task.questions("questions", 0), 50):
        image = task.draw(scene)
        for cell in range(4):
            x, y = cell % 2 * task.CELL, cell // 2 * task.CELL
            part = image.crop((x, y, x + task.CELL, y + task.CELL))
            colours = {colour for _, colour in part.getcolors() or ()} - {(0, 0, 0)}
            assert colours == ({task.COLOURS[scene[cell].colour]} if cell in scene else set())


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_shuffled_pictures_are_those_of_other_questions(tmp_path: Path) -> None:
    plain, again, shuffled = (
        task.write_questions(tmp_path / name, "demonstrations", 200, 5, shuffled=name == "shuffled")
        for name in ("plain", "again", "shuffled")
    )
    assert plain.read_bytes() == again.read_bytes()
    rows, exchanged = _rows(plain), _rows(shuffled)
    assert [row | {"images": 0} for row in rows] == [row | {"images": 0} for row in exchanged]
    assert sorted(map(str, (row["images"] for row in rows))) == sorted(map(str, (row["images"] for row in exchanged)))
    assert sum(a["images"] != b["images"] for a, b in zip(rows, exchanged, strict=True)) > 190
    wrong = [row for row in rows if row["completion"] != row["answer"]]
    assert 0.2 < len(wrong) / len(rows) < 0.45 and all(
        task.MISTAKES[row["answer"]] == row["completion"] for row in wrong
    )


def test_the_model_reads_a_cell_per_row_and_knows_all_words(tmp_path: Path) -> None:
    save_model(tmp_path, 0)
    model, processor = AutoModelForImageTextToText.from_pretrained(tmp_path), AutoProcessor.from_pretrained(tmp_path)
    inputs = processor(text="user <image> what", images=Image.new("RGB", (32, 32)), return_tensors="pt")
    assert (inputs["input_ids"] == model.config.image_token_id).sum() == 4
    assert model(**inputs).logits.shape[-1] == len(processor.tokenizer)
    assert not inputs["pixel_values"].any(), "black is 0"
    tokenizer = build_tokenizer()
    for _, question, answer in islice(task.questions("questions", 0), 500):
        ids = tokenizer(f"{question} {answer}")["input_ids"]
        assert tokenizer.unk_token_id not in ids and tokenizer.decode(ids) == f"{question} {answer}"
