"""Vision-language models on packed sequences, against the unmodified model with pixels, one sequence at a time."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from quartet.batch.pictures import picture_ids, picture_key, picture_places
from quartet.batch.ragged import RaggedBatch
from quartet.config import UserError
from quartet.config.common import LoRAConfig
from quartet.models.loading import (
    load_causal_lm,
    load_on_meta,
    load_scalar_model,
    packed_causal_lm,
    packed_scalar_model,
    save_causal_lm,
    save_scalar_model,
    scalar_model_from,
    seen_token_mask,
)
from quartet.models.packed_model import PackedCausalLM, PackedScalarModel
from quartet.models.vision import FeatureStore, ImageFeatures
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
    named: int | None = None

    @property
    def key(self) -> int:
        return picture_key(str(self.number if self.named is None else self.named).encode())


class Drawings:
    """A fake store of a run's pictures."""

    def __init__(self) -> None:
        self.known: dict[int, Drawing] = {d.key: d for d in map(Drawing, range(8))}

    def get(self, key: int) -> Drawing:
        return self.known[key]


class Swapped(Drawings):
    """A store with another picture of the same size in the place of each."""

    def get(self, key: int) -> Drawing:
        return Drawing(self.known[key].number + 3, self.known[key].number)


@dataclass
class Drawer:
    """A fake processor: pictures of different sizes."""

    kind: str

    def save(self, directory: Path) -> None:
        (directory / "processor_config.json").write_text("{}")

    def key(self, drawing: Drawing) -> int:
        return drawing.key

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


class DrawerOfTwo(Drawer):
    """Of pictures of which each stands beside another one in its prompt: none is cut into tiles."""

    def inputs(self, drawing: Drawing) -> dict[str, Tensor]:
        found = super().inputs(drawing)
        return {**found, "pixel_values": found["pixel_values"][:, :1], "batch_num_images": torch.tensor([2])}


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
    if "batch_num_images" in inputs[0]:
        found["batch_num_images"] = inputs[0]["batch_num_images"]
    return found


@dataclass
class Setting:
    """A model over pictures, and its unmodified twin."""

    packed: PackedCausalLM
    plain: Any
    drawer: Drawer
    store: FeatureStore
    directory: Path

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

    def states(self, batch: RaggedBatch, s: int) -> Tensor:
        """Last hidden states ``[L, D]`` of one sequence, by the unmodified model from pixels."""
        ids = torch.tensor(batch.token_ids(s))
        mask = picture_places(ids)
        firsts = {picture_ids(d.key, 1)[0]: d for d in map(Drawing, range(8))}
        drawings = [firsts[i] for i in ids.tolist() if i in firsts]
        inputs = _together([self.drawer.inputs(d) for d in drawings], self.drawer.kind)
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = mask.int().unsqueeze(0)
            self.plain.model.rope_deltas = None
        plain_ids = ids.masked_fill(mask, MARK).unsqueeze(0)
        states: Tensor = self.plain.model(input_ids=plain_ids, use_cache=False, **inputs).last_hidden_state[0]
        return states

    def expected(self, batch: RaggedBatch) -> Tensor:
        """The log-probabilities by a forward pass of the unmodified model per sequence."""
        out = torch.zeros(batch.num_tokens)
        for s in range(len(batch)):
            ids = torch.tensor(batch.token_ids(s))
            logits = self.plain.lm_head(self.states(batch, s)[:-1])
            labels = ids.masked_fill(picture_places(ids), MARK)[1:]
            found = logits.log_softmax(-1).gather(1, labels.unsqueeze(1)).squeeze(1)
            places = torch.arange(*batch.leaf_span(s))[-len(found) :]
            out = out.index_put((places,), found[-len(places) :])
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
    return Setting(packed, plain, Drawer(kind), store, directory)


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


def test_pictures_matter(setting: Setting) -> None:
    """Or the comparison above would show little: under other pictures log-probabilities are other ones."""
    batch = _batch(setting)
    with torch.no_grad():
        found = setting.logprobs(batch)
        other = copy.copy(setting)
        other.packed.tower.connect(FeatureStore(Swapped(), setting.drawer, setting.directory / "o", 1 << 20))  # type: ignore
        swapped = other.logprobs(batch)
    changed = (found - swapped).abs() > 1e-3
    assert changed[batch.segment_offsets[5] :][batch.token["loss_mask"][batch.segment_offsets[5] :]].all()
    assert torch.equal(found[: batch.segment_offsets[5]], swapped[: batch.segment_offsets[5]])


def test_pictures_beside_each_other_in_onevision(tmp_path: Path) -> None:
    setting, drawer = _build("llava_onevision", tmp_path), DrawerOfTwo("tiles")
    setting.packed.tower.connect(FeatureStore(Drawings(), drawer, tmp_path / "two", 1 << 20))  # type: ignore
    two = dataclasses.replace(setting, drawer=drawer)
    places = [two.place(Drawing(i)) for i in (1, 2)]
    assert len(places[0]) < len(setting.place(Drawing(1)))
    ids = [3, *places[0], 4, *places[1], 5, 6]
    mask = {"loss_mask": torch.tensor([False] * (len(ids) - 2) + [True] * 2)}
    batch = RaggedBatch.from_sequences([ids], ["s"], token=mask)
    with torch.no_grad():
        assert float((two.logprobs(batch) - two.expected(batch)).abs().max()) <= 2e-5


# Training ------------------------------------------------------------------------------------------------


def _weighted(values: Tensor) -> Tensor:
    return (torch.randn(values.shape, generator=torch.Generator().manual_seed(11)) * values).sum()


@pytest.mark.parametrize("setting", ["qwen2_5_vl", "qwen3_vl", "llava_next", "idefics3"], indirect=True)
def test_gradients_where_the_tower_trains(setting: Setting) -> None:
    setting.packed.tower.freeze("all")  # type: ignore[union-attr]
    batch = _batch(setting)
    _weighted(setting.expected(batch)).backward()
    _weighted(setting.logprobs(batch)).backward()
    expected = dict(setting.plain.named_parameters())
    with_gradients = 0
    for name, parameter in setting.packed.model.named_parameters():
        reference = expected[name].grad
        if reference is None:  # layers of the tower that features do not come from
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        with_gradients += 1
        assert float((parameter.grad - reference).abs().max()) <= 1e-4 * float(reference.abs().max()) + 1e-5, name
    assert with_gradients > 40 and setting.store.computed == 0


def test_a_tower_that_trains_takes_part_in_passes_over_texts(tmp_path: Path) -> None:
    """With zeros: ranks add up gradients, and another one may have pictures."""
    setting = _build("qwen3_vl", tmp_path)
    mask = {"loss_mask": torch.tensor([False, True, True])}
    batch = RaggedBatch.from_sequences([[3, 4, 5]], ["s"], token=mask)
    frozen = setting.logprobs(batch).detach()
    setting.packed.tower.freeze("all")  # type: ignore[union-attr]
    found = setting.logprobs(batch)
    assert torch.equal(found.detach(), frozen)
    found.sum().backward()
    of_tower = [p.grad for p in setting.packed.model.model.visual.parameters()]
    assert all(grad is not None and not grad.any() for grad in of_tower)


@pytest.mark.parametrize("setting", ["qwen3_vl", "llava"], indirect=True)
def test_what_is_frozen(setting: Setting) -> None:
    tower = setting.packed.tower
    assert tower is not None and not tower.trains
    names = {name: p for name, p in setting.packed.model.named_parameters() if "language_model" not in name}
    del names["lm_head.weight"]
    projector = {name for name in names if "merger" in name or "projector" in name}
    assert projector and projector != set(names)
    tower.freeze("projector")
    assert tower.trains and {name for name, p in names.items() if p.requires_grad} == projector
    _weighted(setting.logprobs(_batch(setting))).backward()
    assert all((p.grad is not None) == (name in projector) for name, p in names.items())
    tower.freeze("all")
    assert all(p.requires_grad for p in names.values())
    tower.freeze("language")
    assert not tower.trains


# Features once -------------------------------------------------------------------------------------------


def _counted(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lists how many pictures each call of the tower's own code takes."""
    calls: list[int] = []
    base = setting.packed.tower.base  # type: ignore[union-attr]
    former = base.get_image_features

    @functools.wraps(former)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return former(*args, **kwargs)

    monkeypatch.setattr(base, "get_image_features", counted)
    return calls


@pytest.mark.parametrize("setting", ["qwen2_5_vl", "llava"], indirect=True)
def test_each_picture_goes_through_the_tower_once(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = _batch(setting)
    calls = _counted(setting, monkeypatch)
    first = setting.logprobs(batch).detach()
    again = setting.logprobs(batch, share=False).detach()
    assert len(calls) == 3 == setting.store.computed
    torch.testing.assert_close(first, again, rtol=0, atol=2e-5)
    # A reference with the same tower, and a process of its own.
    reference = copy.deepcopy(setting.packed)
    with torch.no_grad():
        reference.model.get_input_embeddings().weight.add_(1)
    reference.model.requires_grad_(False)
    dataclasses.replace(setting, packed=reference).logprobs(batch)
    assert len(calls) == 3
    elsewhere = FeatureStore(Drawings(), setting.drawer, setting.directory, 1 << 20)  # type: ignore[arg-type]
    setting.packed.tower.connect(elsewhere)  # type: ignore[union-attr]
    assert torch.equal(setting.logprobs(batch).detach(), first)
    assert len(calls) == 3 and elsewhere.loaded == 3 and elsewhere.computed == 0


def test_features_follow_the_tower(tmp_path: Path) -> None:
    setting = _build("qwen3_vl", tmp_path)
    tower = setting.packed.tower
    assert tower is not None
    batch, former = _batch(setting), tower.digest
    before = setting.logprobs(batch).detach()
    with torch.no_grad():
        setting.packed.model.lm_head.weight.mul_(1)
        setting.packed.body.norm.weight.mul_(1)
    assert tower.digest == former
    for model in (setting.packed.model, setting.plain):
        with torch.no_grad():
            model.model.visual.merger.linear_fc2.weight.add_(0.5)
    assert tower.digest != former
    with torch.no_grad():
        expected, found = setting.expected(batch), setting.logprobs(batch)
    assert float((found - expected).abs().max()) <= 2e-5 < float((found - before).abs().max())


def test_a_frozen_reference_has_the_actors_features_in_bf16(tmp_path: Path) -> None:
    plain = _build("qwen2_5_vl", tmp_path).plain
    actor, reference = (packed_causal_lm(copy.deepcopy(plain), "bf16") for _ in range(2))
    reference.freeze()
    exact = packed_causal_lm(plain)
    assert actor.tower and reference.tower and exact.tower
    assert reference.model.model.visual.blocks[0].attn.qkv.weight.dtype == torch.bfloat16
    assert actor.tower.digest == reference.tower.digest != exact.tower.digest
    inputs = Drawer("patches").inputs(Drawing(1))
    with torch.no_grad():
        assert torch.equal(actor.tower.compute(inputs).rows, reference.tower.compute(inputs).rows)


def test_memory_and_files_are_bounded(tmp_path: Path) -> None:
    size = 64 * 4
    store = FeatureStore(Drawings(), Drawer("picture"), tmp_path, 2 * size, max_disk_bytes=4 * 400)  # type: ignore[arg-type]
    keys = [Drawing(i).key for i in range(8)]

    def compute(_: dict[str, Tensor]) -> ImageFeatures:
        return ImageFeatures(torch.ones(8, 8))

    for key in keys:
        store.get("d", key, compute)
    assert 2 <= len(list(tmp_path.glob("d/*.safetensors"))) <= 5
    for key in (keys[-1], keys[-2], keys[0]):
        store.get("d", key, compute)
    assert (store.computed, store.loaded, store.reused) == (9, 0, 2)


# Wrong input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["qwen2_5_vl", "llava"], indirect=True)
@pytest.mark.parametrize("wrong", [-1, 1])
def test_places_that_do_not_match_the_features(setting: Setting, wrong: int) -> None:
    places = setting.place(Drawing(1))
    ids = picture_ids(Drawing(1).key, len(places) + wrong)
    mask = {"loss_mask": torch.tensor([False] * (len(ids) + 1) + [True])}
    batch = RaggedBatch.from_sequences([[3, *ids, 4]], ["s"], token=mask)
    with pytest.raises(UserError, match="do not match its features") as raised:
        setting.logprobs(batch)
    assert f"{len(ids)} places, {len(places)} rows" in str(raised.value.found)


def test_two_threads_may_look_at_a_time(tmp_path: Path) -> None:
    """As one that looks ahead and one that generates do."""
    setting = _build("llava", tmp_path)
    tower = setting.packed.tower
    assert tower is not None
    inputs = [Drawer("picture").inputs(Drawing(n)) for n in range(8)]
    alone = [tower.compute(each).rows for each in inputs]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda each: tower.compute(each).rows, inputs * 8))
    assert all(torch.equal(rows, alone[n % 8]) for n, rows in enumerate(found))


def test_pictures_without_a_store(tmp_path: Path) -> None:
    setting = _build("llava", tmp_path)
    batch = _batch(setting)
    packed = packed_causal_lm(setting.packed.release())
    with pytest.raises(UserError, match="the model was given none"):
        dataclasses.replace(setting, packed=packed).logprobs(batch)


def test_gemma3_sees_whole_pictures(tmp_path: Path) -> None:
    """Every row of a picture attends to all of them, which is not built: texts alone can be trained."""
    config = hf.Gemma3Config(
        text_config={**TEXT, "head_dim": 8}, vision_config=SIGLIP, mm_tokens_per_image=4, image_token_index=MARK
    )
    packed = packed_causal_lm(hf.Gemma3ForConditionalGeneration(config).eval())
    store = FeatureStore(Drawings(), Drawer("picture"), tmp_path, 1)  # type: ignore[arg-type]
    assert packed.tower is not None
    packed.tower.connect(store)
    with pytest.raises(UserError, match="Gemma3ForConditionalGeneration cannot take pictures") as raised:
        packed.tower.features([1])
    assert "with a picture its hidden states differ" in str(raised.value.found)


def test_features_that_are_attended_to_from_within_layers_are_refused() -> None:
    text = {name: value for name, value in TEXT.items() if not name.endswith("token_id")}
    config = hf.MllamaConfig(
        text_config={**text, "cross_attention_layers": [1], "pad_token_id": 1},
        vision_config=dict(
            hidden_size=16, num_hidden_layers=2, num_global_layers=1, attention_heads=2, intermediate_size=32,
            vision_output_dim=32, image_size=16, patch_size=4, intermediate_layers_indices=[1],
            supported_aspect_ratios=[[1, 1]],
        ),
    )  # fmt: skip
    with pytest.raises(UserError, match="MllamaForConditionalGeneration") as raised:
        packed_causal_lm(hf.MllamaForConditionalGeneration(config).eval())
    assert "get_image_features" in str(raised.value.found)


# What else a model is ------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["qwen3_vl", "smolvlm"], indirect=True)
def test_exact_numerics(setting: Setting) -> None:
    """A sequence has the same bits alone and in the pack."""
    packed = packed_causal_lm(copy.deepcopy(setting.plain), numerics="exact")
    packed.tower.connect(setting.store)  # type: ignore[union-attr]
    exact = dataclasses.replace(setting, packed=packed)
    batch = _batch(setting)
    with torch.no_grad():
        whole, expected = exact.logprobs(batch), setting.expected(batch)
        assert float((whole - expected).abs().max()) <= 2e-5
        for s in range(len(batch)):
            part = batch.select([s])
            start, stop = batch.leaf_span(s)
            assert torch.equal(exact.logprobs(part)[slice(*part.leaf_span(0))], whole[start:stop])


def test_adapters_are_in_the_language_model(setting: Setting) -> None:
    packed = packed_causal_lm(copy.deepcopy(setting.plain), lora=LoRAConfig(rank=2), activation_checkpointing=True)
    packed.tower.connect(setting.store)  # type: ignore[union-attr]
    batch = _batch(setting)
    found = dataclasses.replace(setting, packed=packed).logprobs(batch)
    with torch.no_grad():
        assert float((found - setting.expected(batch)).abs().max()) <= 2e-5
    _weighted(found).backward()
    trained = {name for name, p in packed.model.named_parameters() if p.grad is not None}
    assert trained and all("lora" in name and ("language_model" in name or "text_model" in name) for name in trained)


def test_saved_and_loaded(setting: Setting, tmp_path: Path, make_tokenizer: Any) -> None:
    save_causal_lm(setting.packed, make_tokenizer(), tmp_path / "model")
    batch = _batch(setting)
    loaded = packed_causal_lm(load_causal_lm(str(tmp_path / "model")))
    empty = packed_causal_lm(load_on_meta(str(tmp_path / "model")))
    assert type(loaded.model) is type(empty.model) is type(setting.plain)
    assert loaded.tower and empty.tower and empty.tower.unsupported is None
    loaded.tower.connect(setting.store)
    with torch.no_grad():
        again = dataclasses.replace(setting, packed=loaded).logprobs(batch)
        assert torch.equal(again, setting.logprobs(batch))
    assert setting.store.computed == 3


def test_scalar_models(setting: Setting, tmp_path: Path, make_tokenizer: Any) -> None:
    """A critic over the same body: values of the plain body's states, before and after it was saved."""
    critic = packed_scalar_model(scalar_model_from(setting.plain, seed=1))
    batch = _batch(setting)

    def values(packed: PackedScalarModel) -> Tensor:
        packed.tower.connect(setting.store)  # type: ignore[union-attr]
        found = forward_packed(packed, batch, ForwardNeeds(scores=True), 1024)
        assert found.scores is not None
        return found.scores

    with torch.no_grad():
        weight = torch.randn(critic.head.weight.shape, generator=torch.Generator().manual_seed(2))
        critic.head.weight.copy_(weight)
        before = values(critic)
        expected = [setting.states(batch, s)[-1] @ weight[0] for s in range(len(batch))]
        torch.testing.assert_close(before, torch.stack(expected), rtol=2e-5, atol=2e-5)
        save_scalar_model(
            critic, make_tokenizer(), tmp_path / "critic", seen=seen_token_mask(VOCAB, iter([batch.input_ids]))
        )
        again = values(packed_scalar_model(load_scalar_model(str(tmp_path / "critic"))))
    assert torch.equal(again, before)
    assert setting.store.computed == 3
