"""Tiny processors and tokenizers of vision-language models, made without a hub: ``save_processor(kind, directory)``."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for c in m.content -%}"
    "{%- if c.type == 'image' -%}{{ IMAGE }}{%- else -%}{{ c.text }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{ '<|im_end|>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
PARTS_ALONE = (
    "{%- for m in messages -%}{{ m.role | upper }}:{% for c in m.content if c.type == 'image' -%}{{ '<image>\n' }}"
    "{%- endfor -%}{%- for c in m.content if c.type == 'text' -%}{{ c.text }}{%- endfor -%}"
    "{{ '<|im_end|>\n' if m.role == 'assistant' else '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}ASSISTANT:{%- endif -%}"
)
"""As LLaVA's: of content that is text it writes nothing."""
MARKED = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' -%}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{%- elif m.content is string -%}{{ m.content + '<|im_end|>' }}"
    "{%- else -%}{%- for c in m.content -%}{{ IMAGE if c.type == 'image' else c.text }}{%- endfor -%}"
    "{{ '<|im_end|>' }}{%- endif -%}{{ '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
"""Says itself which tokens are the assistant's."""


def make_tokenizer(template: str, extra: list[str], *, bos: bool = False, **named: str) -> PreTrainedTokenizerFast:
    """Makes a byte-level tokenizer with special tokens for pictures; ``named`` are attributes of it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "<|im_start|>", "<|im_end|>", *extra]
    merged = ["ĊĊ", "he", "ll", "hell"]
    vocab = {token: n for n, token in enumerate([*alphabet, *merged, *special])}
    merges = [("Ċ", "Ċ"), ("h", "e"), ("l", "l"), ("he", "ll")]
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        bos_token="<s>" if bos else None,
        extra_special_tokens=named,
    )
    fast.chat_template = template
    return fast


def _template(image: str) -> str:
    return CHATML.replace("IMAGE", repr(image))


def _grid(side: int, patch: int) -> dict[str, Any]:
    return {"image_size": side, "patch_size": patch, "hidden_size": 32, "num_hidden_layers": 1}


_QWEN = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_IDEFICS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
_ROWS = [f"<row_{i}_col_{j}>" for i in range(1, 4) for j in range(1, 4)]
_TILES = {"do_image_splitting": True, "max_image_size": {"longest_edge": 32}, "size": {"longest_edge": 64}}

KINDS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "processor": "Qwen2VLProcessor",
        "images": ("Qwen2VLImageProcessor", {"patch_size": 4, "min_pixels": 64, "max_pixels": 4096}),
        "tokens": _QWEN,
        "template": _template("<|vision_start|><|image_pad|><|vision_end|>"),
        "config": {"model_type": "qwen2_vl"},
        "row": "<|image_pad|>",
    },
    "qwen2_5_vl": {
        "processor": "Qwen2_5_VLProcessor",
        "images": ("Qwen2VLImageProcessor", {"patch_size": 4, "min_pixels": 64, "max_pixels": 4096}),
        "tokens": _QWEN,
        "template": _template("<|vision_start|><|image_pad|><|vision_end|>"),
        "config": {"model_type": "qwen2_5_vl"},
        "row": "<|image_pad|>",
    },
    "qwen3_vl": {
        "processor": "Qwen3VLProcessor",
        "images": (
            "Qwen2VLImageProcessor",
            {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 4096}},
        ),
        "tokens": _QWEN,
        "template": _template("<|vision_start|><|image_pad|><|vision_end|>"),
        "config": {"model_type": "qwen3_vl"},
        "row": "<|image_pad|>",
    },
    "llava": {
        "processor": "LlavaProcessor",
        "images": ("CLIPImageProcessor", {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}),
        "options": {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "tokens": ["<image>"],
        "template": PARTS_ALONE,
        "bos": True,
        "config": {"model_type": "llava"},
        "row": "<image>",
    },
    "llava_next": {
        "processor": "LlavaNextProcessor",
        "images": (
            "LlavaNextImageProcessor",
            {
                "size": {"shortest_edge": 16},
                "crop_size": {"height": 16, "width": 16},
                "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
            },
        ),
        "options": {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "tokens": ["<image>"],
        "template": _template("<image>\n"),
        "config": {"model_type": "llava_next"},
        "row": "<image>",
    },
    "llava_onevision": {
        "processor": "LlavaOnevisionProcessor",
        "images": (
            "LlavaOnevisionImageProcessor",
            {"size": {"height": 16, "width": 16}, "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16], [32, 32]]},
        ),
        "options": {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        "tokens": ["<image>", "<video>"],
        "template": _template("<image>\n"),
        "config": {"model_type": "llava_onevision"},
        "row": "<image>",
    },
    "smolvlm": {
        "processor": "SmolVLMProcessor",
        "images": ("SmolVLMImageProcessor", _TILES),
        "options": {"image_seq_len": 4},
        "tokens": [*_IDEFICS, *_ROWS],
        "template": _template("<image>"),
        "config": {"model_type": "smolvlm"},
        "row": "<image>",
    },
    "idefics3": {
        "processor": "Idefics3Processor",
        "images": ("Idefics3ImageProcessor", _TILES),
        "options": {"image_seq_len": 4},
        "tokens": [*_IDEFICS, *_ROWS],
        "template": _template("<image>"),
        "config": {"model_type": "idefics3"},
        "row": "<image>",
    },
    "gemma3": {
        "processor": "Gemma3Processor",
        "images": ("Gemma3ImageProcessor", {"size": {"height": 16, "width": 16}}),
        "options": {"image_seq_length": 4},
        "tokens": ["<start_of_image>", "<end_of_image>", "<image_soft_token>"],
        "named": {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        "template": "{{ bos_token }}" + _template("<start_of_image>"),
        "bos": True,
        "config": {"model_type": "gemma3"},
        "row": "<image_soft_token>",
    },
    "internvl": {
        "processor": "InternVLProcessor",
        "images": ("GotOcr2ImageProcessor", {"size": {"height": 16, "width": 16}, "max_patches": 4}),
        "options": {"image_seq_length": 4},
        "tokens": ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
        "named": {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "template": _template("<IMG_CONTEXT>\n"),
        "config": {"model_type": "internvl"},
        "row": "<IMG_CONTEXT>",
    },
}


def save_processor(kind: str, directory: Path) -> Path:
    """Writes config, tokenizer and processor of a kind as models have them. Returns the directory."""
    made = KINDS[kind]
    tokenizer = make_tokenizer(made["template"], made["tokens"], bos=made.get("bos", False), **made.get("named", {}))
    tokenizer.save_pretrained(directory)
    name, options = made["images"]
    images = getattr(transformers, f"{name}Pil")(**options)
    images.save_pretrained(directory)
    file = directory / "preprocessor_config.json"
    values = json.loads(file.read_text()) if file.is_file() else {}
    values["image_processor_type"] = name
    file.write_text(json.dumps(values))
    own = {"processor_class": made["processor"], **made.get("options", {})}
    (directory / "processor_config.json").write_text(json.dumps(own))
    config = {**made["config"], "image_token_id": tokenizer.convert_tokens_to_ids(made["row"])}
    if kind.startswith("llava"):
        config["image_token_index"] = config.pop("image_token_id")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def picture_bytes(
    width: int = 40, height: int = 24, colour: Any = (200, 30, 60), form: str = "PNG", **how: Any
) -> bytes:
    """Returns an encoded picture of one colour with a darker corner."""
    image = Image.new("RGB", (width, height), colour)
    image.paste((10, 20, 30), (0, 0, width // 3, height // 2))
    file = BytesIO()
    image.save(file, form, **how)
    return file.getvalue()


def save_model(kind: str, directory: Path, seed: int = 0) -> Path:
    """Writes a tiny random model of a kind with its tokenizer and processor. Returns the directory."""
    save_processor(kind, directory)
    config_file = directory / "config.json"
    made = json.loads(config_file.read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    row = {name: made[name] for name in ("image_token_id", "image_token_index") if name in made}
    text = dict(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.3, tie_word_embeddings=False,
        pad_token_id=None, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    config = _CONFIGS[kind](text, row)
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.generation_config = transformers.GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(directory)
    return directory


_VIT = dict(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4
)  # fmt: skip
_QWEN_VIT = dict(depth=2, num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2, in_channels=3)
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}


def _llava(text: dict[str, Any], row: dict[str, int]) -> Any:
    vision = {**_VIT, "model_type": "clip_vision_model", "projection_dim": 16}
    return transformers.LlavaConfig(
        text_config={**text, "model_type": "llama"}, vision_config=vision, vision_feature_layer=-2,
        vision_feature_select_strategy="default", tie_word_embeddings=False, **row,
    )  # fmt: skip


def _qwen2_vl(text: dict[str, Any], row: dict[str, int]) -> Any:
    vision = {**_QWEN_VIT, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    return transformers.Qwen2VLConfig(
        text_config={**text, "rope_parameters": _ROPE}, vision_config=vision, video_token_id=1, vision_start_token_id=2,
        vision_end_token_id=3, tie_word_embeddings=False, **row,
    )  # fmt: skip


def _qwen2_5_vl(text: dict[str, Any], row: dict[str, int]) -> Any:
    vision = {
        **_QWEN_VIT, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32, "window_size": 16,
        "fullatt_block_indexes": [1],
    }  # fmt: skip
    return transformers.Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": _ROPE}, vision_config=vision, video_token_id=1, vision_start_token_id=2,
        vision_end_token_id=3, tie_word_embeddings=False, **row,
    )  # fmt: skip


def _llava_next(text: dict[str, Any], row: dict[str, int]) -> Any:
    vision = {**_VIT, "model_type": "clip_vision_model", "projection_dim": 16}
    return transformers.LlavaNextConfig(
        text_config={**text, "model_type": "llama"}, vision_config=vision, vision_feature_layer=-2,
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]], tie_word_embeddings=False, **row,
    )  # fmt: skip


def _llava_onevision(text: dict[str, Any], row: dict[str, int]) -> Any:
    return transformers.LlavaOnevisionConfig(
        text_config={**text, "model_type": "qwen2"}, vision_config={**_VIT, "model_type": "siglip_vision_model"},
        image_grid_pinpoints=[[16, 16], [16, 32], [32, 16], [32, 32]], tie_word_embeddings=False, **row,
    )  # fmt: skip


def _qwen3_vl(text: dict[str, Any], row: dict[str, int]) -> Any:
    vision = {
        **_QWEN_VIT, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }  # fmt: skip
    return transformers.Qwen3VLConfig(
        text_config={**text, "rope_parameters": _ROPE}, vision_config=vision, video_token_id=1, vision_start_token_id=2,
        vision_end_token_id=3, tie_word_embeddings=False, **row,
    )  # fmt: skip


def _smolvlm(text: dict[str, Any], row: dict[str, int]) -> Any:
    return transformers.SmolVLMConfig(
        text_config={**text, "model_type": "llama"}, vision_config={**_VIT, "image_size": 32}, scale_factor=4,
        tie_word_embeddings=False, pad_token_id=None, **row,
    )  # fmt: skip


def _internvl(text: dict[str, Any], row: dict[str, int]) -> Any:
    vision = {**_VIT, "image_size": [16, 16], "patch_size": [4, 4], "norm_type": "layer_norm"}
    return transformers.InternVLConfig(
        text_config={**text, "model_type": "qwen2"}, vision_config=vision, downsample_ratio=0.5,
        tie_word_embeddings=False, **row,
    )  # fmt: skip


_CONFIGS: dict[str, Callable[[dict[str, Any], dict[str, int]], Any]] = {
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "smolvlm": _smolvlm,
    "internvl": _internvl,
}
MODELS = list(_CONFIGS)
