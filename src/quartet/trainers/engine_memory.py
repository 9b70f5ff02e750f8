"""Whether a process can hold what its rollout engine needs, told before a model is loaded."""

from __future__ import annotations

from math import prod

import torch
from transformers import PreTrainedConfig

from quartet.config import UserError
from quartet.config.engines import NativeEngineConfig
from quartet.config.recipe import RLRecipe
from quartet.models.directories import loading, read_config, stored_tensors
from quartet.observe.memory import available_bytes, total_bytes
from quartet.text.loading import local_or_hub
from quartet.trainers.devices import precision_on

_GIB = 2**30
_MASTER_BYTES = 4
"""Weights are loaded as fp32, whatever the engine then computes with."""


def check_engine_fits(recipe: RLRecipe, path: str, device: torch.device, processes: int = 1) -> None:
    """What is counted is the least: the policy, and keys and values of ``cache_tokens``, or of one response (native).

    Args:
        path: of the policy, a directory or hub name.
        device: of the engine.
        processes: with an engine each on this machine.

    Raises:
        UserError: it is more than the device has; with the sizes, and what could hold the model.
    """
    engine = recipe.rollout.engine
    if not isinstance(engine, NativeEngineConfig):
        return
    try:
        with loading(path, "causal LM"), stored_tensors(path) as stored:
            num_weights = sum(prod(tensor.shape) for tensor in stored.values())
            given = recipe.actor.model
            trust = given is not None and given.trust_remote_code
            config = read_config(local_or_hub(path, "model"), trust_remote_code=trust)
    except UserError:
        return  # who loads it says what is wrong with it
    is_half = precision_on(device, recipe.actor.train.precision) == "bf16"
    num_tokens = engine.cache_tokens or recipe.rollout.sampling.max_new_tokens
    cache = num_tokens * (2 if is_half else 4) * numbers_per_token(config)
    weights, room = _MASTER_BYTES * num_weights, _room(device, processes)
    if weights + cache <= room:
        return
    shared = f" for each of {processes} processes" if processes > 1 and device.type == "cpu" else ""
    raise UserError(
        f"no process of the native rollout engine can hold {path!r}",
        found=f"{weights / _GIB:.3g} GiB ({num_weights / 1e9:.3g} billion weights, loaded as fp32) and "
        f"{cache / _GIB:.3g} GiB of keys and values for {num_tokens} tokens; {device} has {room / _GIB:.3g} GiB"
        f"{shared}",
        remedy="the native engine has the whole policy in every process of rollout, whatever actor.sharding is: place "
        "rollout on larger devices, or lower rollout.engine.cache_tokens. An engine that divides a model over devices "
        "can hold it: set rollout.engine.type: vllm, and its tensor_parallel_size",
    )


def numbers_per_token(config: PreTrainedConfig) -> int:
    """Keys and values that a token has in all layers."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", 1)
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(2 * text.num_hidden_layers * (getattr(text, "num_key_value_heads", None) or heads) * size)


def _room(device: torch.device, processes: int) -> float:
    """Bytes of a GPU, or of this machine's memory what is free, and not more than each process's part of it."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    try:
        return min(available_bytes(), total_bytes() / processes)
    except OSError:
        return float("inf")  # not on Linux, which alone tells this
