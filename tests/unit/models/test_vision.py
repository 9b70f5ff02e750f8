"""Vision-language models on packed sequences, against the unmodified model with pixels, one sequence at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from quartet.batch.pictures import picture_ids, picture_key, picture_places
from quartet.batch.ragged import RaggedBatch
from quartet.models.loading import (
    packed_causal_lm,
)
from quartet.models.packed_model import PackedCausalLM
from quartet.models.vision import FeatureStore
from quartet.train.forward import ForwardNeeds, forward_packed

VOCAB, MARK = 61, 60
TEXT = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, tie_word_embeddings=False,
    pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
CLIP = dict(
    model_type="clip_vision_model", hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    image_size=16, patch_size=4, projection_dim=16,
)  # fmt: skip
SIGLIP = {**CLIP, "model_type": "siglip_vision_model"}
del SIGLIP["projection_dim"]
PINPOINTS = [[16, 16], [16, 32], [32, 16]]


def _qwen(kind: Any, **vision: Any) -> Callable[[], Any]:
    sizes = dict(depth=2, num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2, in_channels=3)
    return lambda: kind(
        text_config={**TEXT, "rope_parameters": ROPE},
        vision_config={**sizes, **vision},
        image_token_id=MARK, video_token_id=59, vision_start_token_id=58, vision_end_token_id=57,
        tie_word_embeddings=False,
    )  # fmt: skip


FAMILIES: dict[str, tuple[Callable[[], Any], str]] = {
    "qwen2_vl": (_qwen(hf.Qwen2VLConfig, embed_dim=16, hidden_size=32, mlp_ratio=2), "patches"),
    "qwen2_5_vl": (
        _qwen(
            hf.Qwen2_5_VLConfig, hidden_size=16, intermediate_size=32, out_hidden_size=32, window_size=16,
            fullatt_block_indexes=[1],
        ),
        "patches",
    ),
    "qwen3_vl": (
        _qwen(
            hf.Qwen3VLConfig, hidden_size=16, intermediate_size=32, out_hidden_size=32, num_position_embeddings=64,
            deepstack_visual_indexes=[0, 1],
        ),
        "patches",
    ),
    "llava": (
        lambda: hf.LlavaConfig(
            text_config={**TEXT, "model_type": "llama"}, vision_config=CLIP, image_token_index=MARK,
            vision_feature_layer=-2, vision_feature_select_strategy="default", tie_word_embeddings=False,
        ),
        "picture",
    ),
    "llava_next": (
        lambda: hf.LlavaNextConfig(
            text_config={**TEXT, "model_type": "llama"}, vision_config=CLIP, image_token_index=MARK,
            image_grid_pinpoints=PINPOINTS, vision_feature_layer=-2, tie_word_embeddings=False,
        ),
        "tiles",
    ),
    "llava_onevision": (
        lambda: hf.LlavaOnevisionConfig(
            text_config={**TEXT, "model_type": "qwen2"}, vision_config=SIGLIP, image_token_index=MARK,
            image_grid_pinpoints=PINPOINTS, tie_word_embeddings=False,
        ),
        "tiles",
    ),
    "idefics3": (
        lambda: hf.Idefics3Config(
            text_config={**TEXT, "model_type": "llama"}, image_token_id=MARK, scale_factor=2,
            vision_config={k: v for k, v in SIGLIP.items() if k != "model_type"}, tie_word_embeddings=False,
            pad_token_id=None,
        ),
        "row of tiles",
    ),
    "smolvlm": (
        lambda: hf.SmolVLMConfig(
            text_config={**TEXT, "model_type": "llama"}, image_token_id=MARK, scale_factor=2,
            vision_config={k: v for k, v in SIGLIP.items() if k != "model_type"}, tie_word_embeddings=False,
            pad_token_id=None,
        ),
        "row of tiles",
    ),
    "internvl": (
        lambda: hf.InternVLConfig(
            text_config={**TEXT, "model_type": "qwen2"}, image_token_id=MARK, downsample_ratio=0.5,
            vision_config=dict(
                hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=[16, 16],
                patch_size=[4, 4], norm_type="layer_norm",
            ),
            tie_word_embeddings=False,
        ),
        "picture",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Drawing:
    """A fake picture: what the tower takes is drawn from its number."""

    number: int

    @property
    def key(self) -> int:
        return picture_key(str(self.number).encode())


class Drawings:
    """A fake store of a run's pictures."""

    def __init__(self) -> None:
        self.known: dict[int, Drawing] = {d.key: d for d in map(Drawing, range(8))}

    def get(self, key: int) -> Drawing:
        return self.known[key]


@dataclass
class Drawer:
    """A fake processor: pictures of different sizes."""

    kind: str

    def inputs(self, drawing: Drawing) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(drawing.number)
        height, width = [(16, 16), (16, 32), (32, 16)][drawing.number % 3]

        def pixels(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw)

        if self.kind == "patches":
            grid = torch.tensor([[1, height // 4, width // 4]])
            return {"pixel_values": pixels(int(grid.prod()), 3 * 2 * 4 * 4), "image_grid_thw": grid}
        tiles = 1 + height * width // 256
        if self.kind == "tiles":
            return {
                "pixel_values": pixels(1, tiles, 3, 16, 16),
                "image_sizes": torch.tensor([[height, width]]),
                "unknown to the tower": torch.ones(1),
            }
        if self.kind == "row of tiles":
            return {"pixel_values": pixels(1, tiles, 3, 16, 16)}
        return {"pixel_values": pixels(1, 3, 16, 16)}


def _together(inputs: Sequence[dict[str, Tensor]], kind: str) -> dict[str, Tensor]:
    """What the unmodified model takes of several pictures of one sequence."""
    found: dict[str, Tensor] = {}
    if not inputs:
        return found
    for name in ("pixel_values", "image_sizes", "image_grid_thw"):
        if name not in inputs[0]:
            continue
        parts = [each[name] for each in inputs]
        if kind == "tiles" and name == "pixel_values":
            most = max(part.shape[1] for part in parts)
            parts = [torch.nn.functional.pad(p, (0, 0, 0, 0, 0, 0, 0, most - p.shape[1])) for p in parts]
        found[name] = torch.cat(parts, 1 if kind == "row of tiles" else 0)
    return found


@dataclass
class Setting:
    """A model over pictures, and its unmodified twin."""

    packed: PackedCausalLM
    plain: Any
    drawer: Drawer
    store: FeatureStore

    def place(self, drawing: Drawing) -> list[int]:
        """The picture's ids, as many as the unmodified tower gives rows."""
        tower = self.packed.tower
        assert tower is not None
        with torch.no_grad():
            return picture_ids(drawing.key, len(tower.compute(self.drawer.inputs(drawing)).rows))

    def logprobs(self, batch: RaggedBatch, *, share: bool = True) -> Tensor:
        outputs = forward_packed(self.packed, batch, ForwardNeeds(logprobs=True), 1024, share=share)
        assert outputs.logprobs is not None
        return outputs.logprobs

    def expected(self, batch: RaggedBatch) -> Tensor:
        """The same by a forward pass of the unmodified model per sequence, from pixels."""
        out = torch.zeros(batch.num_tokens)
        keys = {d.key: d for d in map(Drawing, range(8))}
        for s in range(len(batch)):
            ids = torch.tensor(batch.token_ids(s))
            mask = picture_places(ids)
            first = [i for i in ids[mask].tolist() if any(picture_ids(key, 1) == [i] for key in keys)]
            drawings = [next(d for k, d in keys.items() if picture_ids(k, 1) == [i]) for i in first]
            inputs = _together([self.drawer.inputs(d) for d in drawings], self.drawer.kind)
            if "image_grid_thw" in inputs:
                inputs["mm_token_type_ids"] = mask.int().unsqueeze(0)
            plain_ids = ids.masked_fill(mask, MARK)
            if hasattr(self.plain.model, "rope_deltas"):
                self.plain.model.rope_deltas = None
            logits = self.plain(input_ids=plain_ids.unsqueeze(0), use_cache=False, **inputs).logits[0, :-1]
            found = logits.log_softmax(-1).gather(1, plain_ids[1:].unsqueeze(1)).squeeze(1)
            start, stop = batch.leaf_span(s)
            count = stop - start
            out = out.index_put((torch.arange(start, stop),), found[-count:])
        return out * batch.token["loss_mask"]


def _build(family: str, directory: Path, seed: int = 0) -> Setting:
    make, kind = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        plain = hf.AutoModelForImageTextToText.from_config(make(), dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in plain.parameters():
                if parameter.ndim <= 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
                elif float(parameter.std()) < 0.1:  # so that pictures matter
                    parameter.normal_(0, 0.25)
    packed = packed_causal_lm(copy.deepcopy(plain))
    store = FeatureStore(Drawings(), Drawer(kind), directory, 1 << 20)  # type: ignore[arg-type]
    assert packed.tower is not None
    packed.tower.connect(store)
    return Setting(packed, plain, Drawer(kind), store)


def _batch(setting: Setting) -> RaggedBatch:
    """Prompts with 0, 1 and 2 pictures, two answers to each, and a picture in a later turn."""
    one, wide, high = (setting.place(Drawing(i)) for i in range(3))
    prompts = [[3, 4, 5], [6, *wide, 7, 8], [*one, 9, *high, 10]]
    answers = [[11, 12], [13, 14, 15], [16, *one, 17], [18], [19, 20], [21, 22, *wide, 23]]
    parents = [-1, -1, -1, 0, 0, 1, 1, 2, 2]
    segments = [*prompts, *answers]
    mask = torch.cat([torch.tensor([k >= 3 and i > 0 for i in segment]) for k, segment in enumerate(segments)])
    return RaggedBatch(
        input_ids=torch.tensor([i for segment in segments for i in segment]),
        segment_lengths=tuple(map(len, segments)),
        parents=tuple(parents),
        leaves=tuple(range(3, 9)),
        ids=tuple(f"s{i}" for i in range(6)),
        token={"loss_mask": mask},
    )


@pytest.fixture(params=list(FAMILIES))
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> Setting:
    return _build(request.param, tmp_path)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "copied"])
def test_logprobs_are_those_of_the_plain_model(setting: Setting, share: bool) -> None:
    batch = _batch(setting)
    with torch.no_grad():
        expected, found = setting.expected(batch), setting.logprobs(batch, share=share)
    assert setting.packed.shares_prefixes
    print(type(setting.plain).__name__, float((found - expected).abs().max()))
    assert float((found - expected).abs().max()) <= 2e-5
