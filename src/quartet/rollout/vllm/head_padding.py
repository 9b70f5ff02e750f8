"""Heads of a size that vLLM's CPU attention has not, padded with zeros to one that it has.

Element ``i`` of a head goes to place ``i · stride`` of a head ``stride`` times as large, zeros between. Rotary pairs
``(i, i + size / 2)`` stay pairs and turn at their own frequency, ``base ** (-2 i / size)``: queries and keys have the
same products. vLLM divides these by the root of the larger size, so queries are multiplied by ``stride ** 0.5``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_PLAIN = ("llama", "mistral", "qwen2")
"""Families without norms of single heads or rotary embeddings of a part of a head."""


@dataclass(frozen=True)
class HeadPadding:
    """Of weights under a checkpoint's names."""

    size: int
    stride: int

    def __call__(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            module = name.split(".")[-2]
            if module in ("q_proj", "k_proj", "v_proj"):
                tensor = self._spread(tensor * self.stride**0.5 if module == "q_proj" else tensor)
            elif module == "o_proj" and name.endswith(".weight"):
                tensor = self._spread(tensor.T).T
            yield name, tensor.contiguous()

    def _spread(self, tensor: Tensor) -> Tensor:
        """``[heads · size, …]`` → ``[heads · size · stride, …]``."""
        spread = tensor.new_zeros(tensor.shape[0], self.stride, *tensor.shape[1:])
        spread[:, 0] = tensor
        return spread.flatten(0, 1)


def head_padding(config: Mapping[str, Any], sizes: Sequence[int]) -> HeadPadding | None:
    """What makes the model's heads one of ``sizes``; None where they are, or where it cannot be done.

    Args:
        config: the model's ``config.json``.
        sizes: those that attention has; none: any.
    """
    if config.get("model_type") not in _PLAIN or _rope_type(config) != "default":
        return None
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    strides = [padded // size for padded in sizes if padded % size == 0]
    return HeadPadding(size, min(strides)) if strides and size not in sizes else None


def _rope_type(config: Mapping[str, Any]) -> str:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return str(rope.get("rope_type", "default"))
