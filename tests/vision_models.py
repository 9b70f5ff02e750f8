"""Tiny random vision-language models, saved with their processors; heads of 32, which vLLM has on CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from tiny_vision import save_processor

ALIKE = 0
TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.15,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
GRID = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "hidden_size": 64}
WIDER = {**GRID, "intermediate_size": 128, "out_hidden_size": 64}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**GRID, "embed_dim": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {**WIDER, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {**WIDER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
}


def configuration(kind: str, tokenizer: Any) -> Any:
    """A tiny model's, with the ids of the tokenizer."""
    text = {**TEXT, "vocab_size": len(tokenizer)}
    if kind == "llava":
        clip = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
        vision = hf.CLIPVisionConfig(**clip, image_size=16, patch_size=4, projection_dim=64)
        mark = tokenizer.convert_tokens_to_ids("<image>")
        return hf.LlavaConfig(text_config=hf.LlamaConfig(**text), vision_config=vision, image_token_index=mark)
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    names |= {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    made = {"qwen2_vl": hf.Qwen2VLConfig, "qwen2_5_vl": hf.Qwen2_5_VLConfig, "qwen3_vl": hf.Qwen3VLConfig}[kind]
    tied = kind != "qwen3_vl"
    rope = ROPE if tied else {**ROPE, "mrope_interleaved": True}  # which transformers takes for granted
    return made(
        text_config={**text, "rope_parameters": rope, "tie_word_embeddings": tied},
        vision_config=VISION[kind],
        tie_word_embeddings=tied,
        **ids,
    )


def save_vision_model(kind: str, folder: Path) -> Path:
    """Writes a random model with its processor. The placeholder, which is sampled as any token is, is embedded as
    ``ALIKE``, which transformers' model does not take for a picture's place.
    """
    processors = "qwen2_vl" if kind == "qwen2_5_vl" else kind
    save_processor(processors, folder)
    torch.manual_seed(0)
    config = configuration(kind, hf.AutoTokenizer.from_pretrained(folder))
    model = hf.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        rows = model.get_input_embeddings().weight
        rows[config.image_token_id] = rows[ALIKE]
    model.save_pretrained(folder)
    if kind == "llava":  # as published ones name it
        file = folder / "model.safetensors"
        renamed = {n.replace("vision_tower.", "vision_tower.vision_model."): t for n, t in load_file(file).items()}
        save_file(renamed, file, {"format": "pt"})
    return folder
