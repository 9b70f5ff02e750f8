"""A small random model of another one's architecture: what the probe runs where the model itself is not loaded.

It has every kind of layer that the model has, in the model's order, with the real ratio of query to key/value heads and
the real factors and caps; widths, vocabulary and windows are small, and all weights are drawn at random.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from quartet.config import UserError
from quartet.models.attention import own_attention

MAX_PARAMETERS = 4_000_000
_HEAD_DIMS = (8, 16, 32, 64)
_WINDOW = 4
"""Tokens: shorter than the probe's sequences, so that windows cut something off."""
_INITIALIZER_RANGE = 0.2
"""Of widths around 32: attention and soft caps then do something, which fresh models' do not."""

_MOST = {
    "vocab_size": 128, "vocab_size_per_layer_input": 128, "sliding_window": _WINDOW, "attention_chunk_size": _WINDOW,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "n_group", "n_shared_experts"), 2),
    **dict.fromkeys(("topk_group", "moe_num_shared_experts"), 1),
    # Keys and values through a narrow latent.
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    # Layers with a state instead of attention.
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
    # What sees images.
    "image_size": 32, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16,
}  # fmt: skip
"""Sizes that may be this small whatever the others are; smaller ones stay."""


def tiny_random_model(model: PreTrainedModel, *, seed: int = 0) -> PreTrainedModel | None:
    """A model of ``model``'s class of at most ``MAX_PARAMETERS``; None where none can be made that has the same kinds
    of layers.

    Args:
        model: its weights are not read, so it may be on the meta device.
        seed: of all weights.
    """
    own = own_attention(model)
    with contextlib.suppress(UserError, _NoTinyModelError):
        layers = _layers(model)
        kinds = [_kind(layer) for layer in layers]
        num_layers = max(kinds.index(kind) for kind in set(kinds)) + 1
        num_layers = min(len(kinds), max(num_layers, 2))
        for head_dim in _HEAD_DIMS:
            config = copy.deepcopy(model.config)
            with _unbuildable():
                _shrink(config, num_layers, head_dim)
                tiny = _built(type(model), config, own, seed)
                if [_kind(layer) for layer in _layers(tiny)] == kinds[:num_layers]:
                    return tiny
    return None


class _NoTinyModelError(Exception):
    """No small model of this architecture can be made."""


@contextlib.contextmanager
def _unbuildable() -> Iterator[None]:
    """Within, what a model of sizes that do not go together fails with is passed over: other sizes may do."""
    try:
        yield
    except (MemoryError, _NoTinyModelError):
        raise
    except Exception:  # families check their sizes each in its own way
        return


def _built(kind: Any, config: PreTrainedConfig, attention: str, seed: int) -> PreTrainedModel:
    with torch.device("meta"):
        outline = kind._from_config(copy.deepcopy(config), dtype=torch.float32, attn_implementation=attention)
    if sum(parameter.numel() for parameter in outline.parameters()) > MAX_PARAMETERS:
        raise _NoTinyModelError
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        tiny: PreTrainedModel = kind._from_config(config, dtype=torch.float32, attn_implementation=attention)
        for parameter in tiny.parameters():
            # Norms start as ones and biases as zeros, where a mix-up would not show.
            if parameter.ndim <= 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        # Sizes that do not go together may show only now.
        tiny.eval()(input_ids=torch.arange(2 * _WINDOW).unsqueeze(0), use_cache=False)
    return tiny


# Kinds of layers -----------------------------------------------------------------------------------------


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers.

    Raises:
        _NoTinyModelError: they are not to be found.
    """
    num_layers = model.config.get_text_config().num_hidden_layers
    body = getattr(model, model.base_model_prefix, model)
    for module in getattr(body, "language_model", body).modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    raise _NoTinyModelError


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """What tells a layer from layers of another kind: its modules, their parameters, switches and what is left out.

    Sizes do not; whether there is one (a window) does.
    """
    return tuple(
        (name, type(module).__name__, tuple(sorted(module._parameters)), tuple(sorted(_switches(module))))
        for name, module in layer.named_modules()
        # Of experts there may be more or fewer.
        if not any(part.isdigit() and int(part) > 0 for part in name.split("."))
    )


def _switches(module: nn.Module) -> Iterator[tuple[str, object]]:
    for name, value in vars(module).items():
        if name == "training" or name.startswith("_"):
            continue
        if isinstance(value, bool | str):
            yield name, str(value)
        elif value is None or isinstance(value, int):
            yield name, type(value).__name__


# Sizes ---------------------------------------------------------------------------------------------------


def _shrink(config: PreTrainedConfig, num_layers: int, head_dim: int) -> None:
    text = config.get_text_config()
    depth = text.num_hidden_layers
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == depth:
            setattr(text, name, value[:num_layers])
    text.num_hidden_layers = num_layers
    _shrink_heads(text, head_dim)
    _shrink_sizes(text)
    for part in (config, text):
        _forget_tokens(part, int(text.vocab_size))
    if (vision := getattr(config, "vision_config", None)) is not None and vision is not text:
        vision.num_hidden_layers = 1
        _shrink_heads(vision, 8)
        _shrink_sizes(vision)
        _shrink_sizes(config)


def _shrink_sizes(part: PreTrainedConfig) -> None:
    for name, most in _MOST.items():
        value = getattr(part, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > most:
            setattr(part, name, most)
        elif isinstance(value, list | tuple) and all(isinstance(size, int) for size in value):
            setattr(part, name, type(value)(min(size, most) for size in value))
    if isinstance(getattr(part, "qk_head_dim", None), int):
        part.qk_head_dim = part.qk_nope_head_dim + part.qk_rope_head_dim
    if hasattr(part, "initializer_range"):
        part.initializer_range = _INITIALIZER_RANGE


def _shrink_heads(part: PreTrainedConfig, head_dim: int) -> None:
    """As many query heads for a key/value head as before, of at most ``head_dim``; the width in proportion."""
    heads, width = int(part.num_attention_heads), int(part.hidden_size)
    groups = int(getattr(part, "num_key_value_heads", None) or heads)
    rotated = getattr(part, "qk_rope_head_dim", None)
    # With a latent for keys and values the rotated part is what is called the head's size.
    former = width // heads if rotated else int(getattr(part, "head_dim", None) or width // heads)
    share = heads // groups if heads % groups == 0 else 1
    if (size := min(former, head_dim)) == former and heads * former <= 64:
        return  # small already
    few = min(groups, 4 if share <= 2 else 2)
    new_heads = few * share
    part.num_attention_heads = new_heads
    if getattr(part, "num_key_value_heads", None) is not None:
        part.num_key_value_heads = few
    if isinstance(getattr(part, "head_dim", None), int):
        part.head_dim = min(rotated, _MOST["qk_rope_head_dim"]) if rotated else size
    # Where heads together are wider or narrower than the model, the tiny model's are too.
    ratio = 1 if heads * former == width else 2 if width > heads * former else 0.5
    new_width = int(new_heads * size * ratio)
    for name in ("word_embed_proj_dim", "hidden_size_per_layer_input"):
        if isinstance(found := getattr(part, name, None), int):
            setattr(part, name, new_width if found == width else new_width // 2)
    part.hidden_size = new_width
    if isinstance(rotary := getattr(part, "rotary_dim", None), int):
        part.rotary_dim = max(2, rotary * size // former)
    for rope in (getattr(part, "rope_parameters", None), getattr(part, "rope_scaling", None)):
        if isinstance(rope, dict):
            _shrink_rope(rope, size, former)


def _shrink_rope(rope: dict[str, Any], size: int, former: int) -> None:
    """Lists of one number for each rotated pair get as many as there are pairs."""
    for name, value in rope.items():
        if isinstance(value, dict):
            _shrink_rope(value, size, former)
        elif isinstance(value, list) and name.endswith("_factor"):
            rope[name] = value[: max(1, len(value) * size // former)]
        elif isinstance(value, list) and name.endswith("_section"):
            parts = [number * size // former for number in value]
            rope[name] = [parts[0] + size // 2 - sum(parts), *parts[1:]] if sum(value) * 2 == former else parts


def _forget_tokens(part: PreTrainedConfig, vocab_size: int) -> None:
    """Ids beyond the small vocabulary stand for nothing."""
    for name, value in list(vars(part).items()):
        if not name.endswith(("_token_id", "_token_index")):
            continue
        ids = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(token, int) and token >= vocab_size for token in ids):
            setattr(part, name, None if name.endswith("_token_id") else vocab_size - 1)
