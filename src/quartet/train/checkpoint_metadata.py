"""``.metadata`` of a share: its tensors and where their parts lie, joined from what each rank has written."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as formats

from quartet.observe.digests import FileDigest, digested_file
from quartet.train.manifest import METADATA, Damage


def load_metadata(path: Path) -> formats.Metadata:
    """What the file says; takes nothing but metadata from its pickle.

    Raises:
        OSError, pickle.UnpicklingError: it cannot be read.
    """
    with open(path, "rb") as file:
        found: formats.Metadata = _MetadataUnpickler(file).load()
    return found


def join_metadata(directory: Path, files: Mapping[str, FileDigest]) -> dict[str, FileDigest]:
    """Makes one ``.metadata`` of those that the ranks of a share have written; returns the files that are left.

    Args:
        files: of all ranks, in ``directory``.

    Raises:
        Damage: together they do not have all parts of a tensor.
        OSError: they cannot be read or written.
    """
    of_ranks = [name for name in files if name.endswith(METADATA) and name != METADATA]
    if not of_ranks or METADATA not in files:
        return dict(files)
    whole = load_metadata(directory / METADATA)
    entries: dict[str, Any] = whole.state_dict_metadata
    for name in of_ranks:
        part = load_metadata(directory / name)
        for tensor, entry in part.state_dict_metadata.items():
            if tensor in entries:
                entries[tensor].chunks.extend(entry.chunks)  # type: ignore[union-attr]
            else:
                entries[tensor] = entry
        whole.storage_data |= part.storage_data
    for tensor, entry in entries.items():
        if isinstance(entry, formats.TensorStorageMetadata):
            there = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if there != math.prod(entry.size):
                raise Damage(
                    f"of {directory.name}'s {tensor} {there:,} numbers are there, of {math.prod(entry.size):,}"
                )
    (directory / METADATA).unlink()
    with digested_file(directory / METADATA) as file:
        pickle.dump(whole, file)
    for name in of_ranks:
        (directory / name).unlink()
    kept = {name: digest for name, digest in files.items() if name not in of_ranks}
    return {**kept, METADATA: file.digest()}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch":
            found = getattr(torch, name, None)
            if name == "Size" or isinstance(found, torch.dtype):
                return found
        elif (module, name) in (
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ) or (module == formats.__name__ and isinstance(getattr(formats, name, None), type)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into metadata")
