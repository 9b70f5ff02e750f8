"""The native engine on prompts with pictures, against transformers' ``generate`` from pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quartet.batch.pictures import is_picture
from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.models.attention import PackedAttention
from quartet.models.loading import load_causal_lm, packed_causal_lm
from quartet.models.packed_model import PackedCausalLM
from quartet.models.vision import FeatureStore
from quartet.rollout import scheduler
from quartet.rollout.engine import NativeEngine, copy_packed_model
from quartet.rollout.protocol import Completion, Request, SamplingParams
from quartet.text.pictures import Picture, PictureCodec, PictureProcessor, PictureStore, image_parts, to_picture
from quartet.text.tokenizer import TextCodec
from quartet.train.forward import ForwardNeeds, forward_packed
from tiny_vision import MODELS, picture_bytes, save_model

RED = Picture(picture_bytes(colour=(200, 30, 60), width=40))
GREEN = Picture(picture_bytes(colour=(20, 130, 60), width=24))
NUM_NEW = 8


def asked(*pictures: Picture, text: str = "what is it?") -> list[dict[str, Any]]:
    parts = [*({"type": "image", "image": picture} for picture in pictures), {"type": "text", "text": text}]
    return [{"role": "user", "content": parts if pictures else text}]


PROMPTS = [asked(RED), asked(GREEN), asked(RED, GREEN), asked(text="hello")]


class Setting:
    """A model of a kind, packed, with its codec."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.folder = save_model(kind, folder / kind)
        self.packed: PackedCausalLM = packed_causal_lm(load_causal_lm(str(self.folder)))
        pictures = PictureCodec(PictureProcessor.load(self.folder), PictureStore(folder / "pictures"))
        self.codec = replace(TextCodec.from_pretrained(self.folder), pictures=pictures)
        self.processor = pictures.processor
        assert self.packed.tower is not None
        self.packed.tower.connect(FeatureStore.of(pictures))

    def requests(self, num: int = 3) -> list[Request]:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=NUM_NEW)
        encoded = [tuple(self.codec.encode_prompt(prompt)) for prompt in PROMPTS]
        return [Request(f"{i}.{r}", str(i), ids, sampling) for i, ids in enumerate(encoded) for r in range(num)]

    def generated(self, prompt: list[dict[str, Any]]) -> list[int]:
        """Returns the tokens of plain ``generate``, which stops at the end of text."""
        ids, mark = self.codec.encode_prompt(prompt), self.processor.placeholder_id
        x = torch.tensor([[mark if is_picture(token) else token for token in ids]])
        pixels = self._pixels([to_picture(part) for part in image_parts(prompt)])
        if self.packed.tower is not None and self.packed.tower.has_axes:
            pixels["mm_token_type_ids"] = (x == mark).int()
        model = load_causal_lm(str(self.folder))
        made = model.generate(
            input_ids=x, attention_mask=torch.ones_like(x), max_new_tokens=NUM_NEW, do_sample=False, **pixels
        )
        found: list[int] = made[0, len(ids) :].tolist()
        return found

    def _pixels(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        if not pictures:
            return {}
        processor: Any = self.processor._processor
        text = [self.processor.placeholder * len(pictures)]
        found = processor(text=text, images=[[picture.decode() for picture in pictures]], return_tensors="pt")
        names = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "batch_num_images")
        return {name: found[name] for name in names if name in found}


def completed(engine: NativeEngine) -> dict[str, Completion]:
    found = {}
    while engine.has_work:
        found |= {completion.request_id: completion for completion in engine.step()}
    return found


def check_tokens(setting: Setting, found: dict[str, Completion]) -> None:
    for i, prompt in enumerate(PROMPTS):
        expected = setting.generated(prompt)
        for r in range(3):
            assert list(found[f"{i}.{r}"].token_ids[: len(expected)]) == expected, (i, r)


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_those_of_generate(kind: str, tmp_path: Path) -> None:
    setting = Setting(kind, tmp_path)
    engine = NativeEngine(setting.packed)
    requests = setting.requests()
    engine.submit(requests)
    found = completed(engine)
    check_tokens(setting, found)
    # Each once, though three prompts have it; beside another, OneVision sees a picture otherwise.
    assert setting.packed.work.pictures == (4 if kind == "llava_onevision" else 2)
    # The trainer's log-probabilities of these tokens.
    ids = {request.request_id: request.prompt_ids for request in requests}
    batch = RaggedBatch.from_groups(
        [ids[f"{i}.0"] for i in range(len(PROMPTS))],
        [[found[f"{i}.{r}"].token_ids for r in range(3)] for i in range(len(PROMPTS))],
        list(found),
    )
    batch = batch.with_token(mask=batch.sequence_index() >= 0)
    logprobs = forward_packed(setting.packed, batch, ForwardNeeds(logprobs=True, mask="mask"), 64).logprobs
    sampled = [p for i in range(len(PROMPTS)) for r in range(3) for p in found[f"{i}.{r}"].logprobs]
    assert logprobs is not None
    torch.testing.assert_close(logprobs[batch.token["mask"]].detach(), torch.tensor(sampled), atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
def test_prompts_in_pieces_new_weights_and_prompts_read_in_place(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(kind, tmp_path)
    for shared in (1, 1 << 20):
        monkeypatch.setattr(scheduler, "MIN_SHARED_TOKENS", shared)
        engine = NativeEngine(setting.packed, max_prefill_tokens=7)
        engine.submit(setting.requests())
        made: list[Completion] = []
        while not any(response.token_ids for response in engine.running):
            made += engine.step()
        made += engine.step()
        engine.update_weights(None, 1)  # the same ones: what was begun goes on
        check_tokens(setting, {**{one.request_id: one for one in made}, **completed(engine)})


def test_two_pictures_in_equal_places_are_two_prompts(tmp_path: Path) -> None:
    setting = Setting("llava", tmp_path)
    first, second = (setting.codec.encode_prompt(asked(picture)) for picture in (RED, GREEN))
    assert len(first) == len(second)
    engine = NativeEngine(setting.packed)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NUM_NEW)
    for n, ids in enumerate((first, second, first)):  # one after the other: the cache has what was computed before
        engine.submit([Request(str(n), str(n), tuple(ids), sampling)])
        made = completed(engine)[str(n)]
        assert list(made.token_ids)[:3] == setting.generated(asked((RED, GREEN, RED)[n]))[:3]


def test_an_engine_of_its_own_finds_what_the_trainer_computed(tmp_path: Path) -> None:
    setting = Setting("qwen2_vl", tmp_path)
    tower = setting.packed.tower
    assert tower is not None
    ids = setting.codec.encode_prompt(asked(RED, GREEN))
    setting.packed.hidden(torch.tensor(ids), tower.positions(ids, 0)[0], PackedAttention([len(ids)]))
    engine = NativeEngine(copy_packed_model(setting.packed), owns_weights=True, version=0)
    engine.submit(setting.requests())
    check_tokens(setting, completed(engine))
    assert engine.stats().num_pictures == 0


def test_pictures_for_an_engine_that_reads_none(tmp_path: Path) -> None:
    setting = Setting("llava", tmp_path)
    engine = NativeEngine(setting.packed)
    engine._tower = None
    with pytest.raises(UserError, match="has pictures, and the engine reads none"):
        engine.submit(setting.requests())
