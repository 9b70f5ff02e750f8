"""The tensors in a model directory's files, read slice by slice; what is not asked for is not read.

Processes of one machine that read the same files share them: the pages of a file are in the kernel's memory once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from quartet.text.loading import local_or_hub

INDEX = "model.safetensors.index.json"
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, or one in memory in its place.

    Args:
        source: a slice of safetensors, or a tensor (of a file that is mapped into memory, say).
    """

    shape: tuple[int, ...]
    source: Any

    @classmethod
    def of(cls, tensor: Tensor) -> StoredTensor:
        return cls(tuple(tensor.shape), tensor)

    def read(self, part: Slices | None = None) -> Tensor:
        """The part, or all of it."""
        found: Tensor = self.source[part] if part else self.source[...]
        return found


def weight_paths(source: str) -> list[Path]:
    """The files with the weights of a model directory or hub name; safetensors files where there are any.

    Raises:
        OSError: there are none.
    """
    folder = Path(local_or_hub(source, "model"))
    for name in ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json"):
        file = folder / name
        if not file.is_file():
            continue
        if not name.endswith(".json"):
            return [file]
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        return [folder / shard for shard in sorted(set(weight_map.values()))]
    raise OSError(f"no file named model.safetensors or pytorch_model.bin in {source}")


@contextmanager
def stored_tensors(source: str) -> Iterator[Mapping[str, StoredTensor]]:
    """Within, all tensors of a model directory or hub name, by the names that the files have.

    Raises:
        OSError: there are none.
    """
    found: dict[str, StoredTensor] = {}
    with contextlib.ExitStack() as opened:
        for path in weight_paths(source):
            if path.suffix == ".safetensors":
                file = opened.enter_context(safe_open(str(path), "pt"))
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                # safetensors keeps a tensor of two names under one of them, and notes the other.
                noted = (file.metadata() or {}).items()
                slices |= {name: slices[kept] for name, kept in noted if kept in slices and name not in slices}
                found |= {name: StoredTensor(tuple(part.get_shape()), part) for name, part in slices.items()}
            else:
                tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                found |= {name: StoredTensor.of(tensor) for name, tensor in tensors.items()}
        yield found


def checkpoint_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Gives the shape of every tensor of the safetensors files in a folder, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes
