"""What the doctor tells of pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quartet.extras.doctor.checks import check_pictures, check_round_trip, check_template, check_turn_end
from quartet.models.loading import load_causal_lm, packed_causal_lm
from quartet.text.pictures import Picture, PictureCodec, PictureProcessor
from quartet.text.tokenizer import TextCodec
from tiny_vision import picture_bytes
from vision_models import save_vision_model


def asked(text: str, *sizes: tuple[int, int]) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": Picture(picture_bytes(*size))} for size in sizes]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}]


PROMPTS = [asked("hello"), asked("what?", (32, 32)), asked("which?", (32, 32), (64, 16))]


@pytest.fixture
def roles(tmp_path: Path) -> Any:
    path = save_vision_model("qwen2_vl", tmp_path / "model")
    packed = packed_causal_lm(load_causal_lm(str(path)))
    codec = replace(TextCodec.from_pretrained(path), pictures=PictureCodec(PictureProcessor.load(path)))
    return SimpleNamespace(actor=SimpleNamespace(packed=packed), codec=codec)


def test_pictures_are_counted_and_what_they_cost(roles: Any) -> None:
    (found,) = check_pictures(roles, PROMPTS)
    assert found.status == "ok"
    num = sum(p.numel() for p in roles.actor.packed.tower.parameters())
    # 16 and 32 rows of 64 numbers
    start = "2 of 3 prompts have pictures, of 16 to 16 rows; their features take up to 0.00391 MiB each and are kept"
    assert found.found == f"{start}, as the tower is frozen; the tower has {num / 1e6:.1f} M weights"
    roles.actor.packed.tower.freeze("all")
    assert "in every pass, as the tower trains" in check_pictures(roles, PROMPTS)[0].found
    assert check_pictures(roles, PROMPTS[:1])[0].found.startswith("0 of 1 prompts have pictures; the tower")


def test_a_tower_that_cannot_be_used_fails_where_there_are_pictures(roles: Any) -> None:
    roles.actor.packed.tower.unsupported = "it sees pictures from both sides"
    (found,) = check_pictures(roles, PROMPTS)
    assert found.status == "failure" and "from both sides" in found.found and found.remedy
    assert check_pictures(roles, PROMPTS[:1])[0].status == "ok"


def test_without_tower_or_processor(roles: Any) -> None:
    roles.codec = replace(roles.codec, pictures=None)
    assert "no processor" in check_pictures(roles, PROMPTS[:1])[0].found
    roles.actor.packed.tower = None
    assert check_pictures(roles, PROMPTS[:1]) == []


def test_checks_of_texts_read_prompts_with_pictures(roles: Any) -> None:
    for check in (check_template, check_turn_end, check_round_trip):
        assert check(roles.codec, PROMPTS).status == "ok"
