"""The tiny vision-language model of the pictures: LLaVA with random weights, its tokenizer and its processor."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from quartet.extras.pictures.task import CELL, COLOURS, COUNTS, PLACES, SHAPES

PAD, EOS, UNK, IMAGE = SPECIAL = ("<pad>", "<eos>", "<unk>", "<image>")
WORDS = ("user", "assistant", "what", "colour", "shape", "is", "how", "many", "are")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content "
    "%}{{ '<image> ' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{{ '<eos>' if m.role == 'assistant' else ' ' }}{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
SIDE = 2 * CELL


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Makes one token per word of the questions and answers; words are apart by spaces."""
    words = [*SPECIAL, *WORDS, *COLOURS, *SHAPES, *PLACES, *COUNTS]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, unk_token=UNK,
        extra_special_tokens={"image_token": IMAGE},
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Makes the processor: pictures as they are, black as 0, one row of features per cell."""
    images = CLIPImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, do_center_crop=False, image_mean=[0.0] * 3, image_std=[0.5] * 3
    )
    return LlavaProcessor(
        images, tokenizer, patch_size=CELL, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlavaForConditionalGeneration:
    """Makes the model, 0.4 M weights, from random ones."""
    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, image_size=SIDE,
        patch_size=CELL, projection_dim=64,
    )  # fmt: skip
    text = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.06,
        bos_token_id=None, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    image = tokenizer.convert_tokens_to_ids(IMAGE)
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=image, vision_feature_layer=-1,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlavaForConditionalGeneration(config).eval()
        # Where a cell is counts as much as what is in it.
        model.model.vision_tower.embeddings.position_embedding.weight.mul_(10)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def save_model(directory: Path, seed: int) -> None:
    """Writes model, tokenizer and processor as a Hugging Face directory."""
    tokenizer = build_tokenizer()
    build_model(tokenizer, seed).save_pretrained(directory)
    build_processor(tokenizer).save_pretrained(directory)
