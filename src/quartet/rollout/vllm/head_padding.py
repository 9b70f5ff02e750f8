"""Heads of a size that vLLM's CPU attention has not, padded with zeros to one that it has.

Element ``i`` of a head goes to place ``i · stride`` of a head ``stride`` times as large, zeros between. Rotary pairs
``(i, i + size / 2)`` stay pairs and turn at their own frequency, ``base ** (-2 i / size)``: queries and keys have the
same products. vLLM divides these by the root of the larger size, so queries are multiplied by ``stride ** 0.5``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from quartet.config import UserError

_PLAIN = ("llama",)
"""Families without norms of single heads, whose heads vLLM gives the size that the configuration names."""


@dataclass(frozen=True)
class HeadPadding:
    """
    Attributes:
        size: of a head as it is.
        stride: times which it is larger then.
    """

    size: int
    stride: int

    def __call__(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Of weights, and of adapters' factors, by the names that the model has for them."""
        for name, tensor in named:
            parts = set(name.split("."))
            if parts & {"q_proj", "k_proj", "v_proj"} and "lora_A" not in parts:
                tensor = self._spread(tensor * self.stride**0.5 if "q_proj" in parts else tensor)
            elif "o_proj" in parts and not parts & {"bias", "lora_B"}:
                tensor = self._spread(tensor.T).T
            yield name, tensor.contiguous()

    def save(self, path: Path, folder: Path) -> None:
        """Writes the model in ``path`` with heads of the larger size."""
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        config["head_dim"] = self.size * self.stride
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for file in path.glob("*.safetensors"):
            save_file(dict(self(load_file(file).items())), folder / file.name)

    def _spread(self, tensor: Tensor) -> Tensor:
        """``[heads · size, …]`` → ``[heads · size · stride, …]``."""
        spread = tensor.new_zeros(tensor.shape[0], self.stride, *tensor.shape[1:])
        spread[:, 0] = tensor
        return spread.flatten(0, 1)


def head_padding(config: Mapping[str, Any], sizes: Sequence[int]) -> HeadPadding | None:
    """What makes the model's heads one of ``sizes``; None where they are, or the configuration does not say.

    Args:
        config: the model's ``config.json``.

    Raises:
        UserError: there is no way. vLLM itself would fail at the first request.
    """
    size = config.get("head_dim") or config.get("hidden_size", 0) // config.get("num_attention_heads", 1)
    if not size or size in sizes or "kv_lora_rank" in config:
        return None
    strides = [padded // size for padded in sizes if padded % size == 0]
    if strides and config.get("model_type") in _PLAIN and _rope_type(config) == "default":
        return HeadPadding(size, min(strides))
    raise UserError(
        "vLLM's attention on CPUs does not have heads of this size",
        found=f"heads of {size} in a model of type {config.get('model_type')!r}; it has {', '.join(map(str, sizes))}",
        remedy="use the native engine, a GPU, or a Llama, whose heads are padded",
    )


def _rope_type(config: Mapping[str, Any]) -> str:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return str(rope.get("rope_type", "default"))
