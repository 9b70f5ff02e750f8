"""What vLLM drafts with: its n-grams for ``history``, its Medusa for heads of ours.

vLLM's Medusa wants an LM head in the heads' files and keeps it as it was. Heads that share the trunk's are given that
of the model that serves instead (``WorkerMethods.quartet_replace_sampler``): the file has zeros of a byte each for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quartet.extras.speculation.config import FOLDER, PREFIX
from quartet.rollout.vllm.start import Drafts
from quartet.text.loading import local_or_hub

_LONGEST_MATCH = 16
"""Newest tokens that are looked up at most; of the places that have them the one that has most is taken."""


def ngrams(section: Mapping[str, Any], folder: Path) -> Drafts:
    shortest = section["min_match"]
    lookup = {"prompt_lookup_min": shortest, "prompt_lookup_max": max(shortest, _LONGEST_MATCH)}
    return Drafts({"method": "ngram", "num_speculative_tokens": section["max_draft"], **lookup})


def medusa(section: Mapping[str, Any], folder: Path) -> Drafts:
    depth, shapes = _write_heads(Path(local_or_hub(section["path"], "heads", FOLDER)), section["depth"], folder)
    learn = section["train"] is not None
    config = {"method": "medusa", "model": str(folder), "num_speculative_tokens": depth}
    return Drafts(config, shapes if learn else {}, not learn)


def _write_heads(path: Path, depth: int | None, folder: Path) -> tuple[int, dict[str, tuple[int, ...]]]:
    """The first ``depth`` heads, or all, of those that ``MedusaHeads.save`` wrote: their number and tensors' shapes."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    depth = config["num_heads"] = depth or config["num_heads"]
    with safe_open(path / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if name.split(".")[1] in map(str, range(depth))]  # noqa: SIM118
        tensors = {name: file.get_tensor(name) for name in names}
    shapes = {PREFIX + name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if config["original_lm_head"]:
        tensors["lm_head.weight"] = torch.zeros(config["vocab_size"], config["hidden_size"], dtype=torch.uint8)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return depth, shapes
