"""Weights as model directories, one per version, for servers that load files.

``version_00000012/`` holds ``model.safetensors``, ``manifest.json`` and, where a template is given, its configuration
and tokenizer, so that it loads as any Hugging Face model does. It takes its name when all of it is on the disk; half a
version is never seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from quartet.observe.digests import sync_directory
from quartet.rollout.owned_folders import OwnedFolder
from quartet.rollout.staging import Load, StagedWeights
from quartet.weights.digest import bytes_of, tensor_digest
from quartet.weights.manifest import TensorSpec, WeightManifest

WEIGHTS = "model.safetensors"
MANIFEST = "manifest.json"
_PREFIX = "version_"
_DRAFT = ".draft_"
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
_KEPT = 2


class PublishedWeights:
    """Staged weights as model directories, one per version, that servers load; shared by all engines of a staging.

    Args:
        folder: on a file system that the servers see under the same path; a folder in it is this one's own.
        template: the model's directory; its other files go beside the weights.
    """

    def __init__(self, staging: StagedWeights, folder: Path, template: Path | None = None) -> None:
        self.staging = staging
        self._folder = OwnedFolder(folder, "weights_")
        self._template = template
        self._written: tuple[int, str] | None = None
        self._lock = threading.Lock()
        self._users: set[Load] = set()

    def path(self, version: int) -> str:
        """Of the directory with the version that is staged."""
        with self._lock:
            if self._written is None or self._written[0] != version:
                handle = self.staging.handle
                tensors = (tensor for _, tensor in handle)
                written = publish(self._folder.path, version, handle.specs, tensors, self._template)
                self._written = version, str(written)
            return self._written[1]

    def attach(self, load: Load) -> None:
        """As ``StagedWeights.attach``."""
        self._users.add(load)
        self.staging.attach(load)

    def detach(self, load: Load) -> None:
        """The last one deletes what was written."""
        self.staging.detach(load)
        self._users.discard(load)
        if not self._users:
            self._folder.remove()


def publish(
    folder: Path, version: int, specs: Sequence[TensorSpec], tensors: Iterable[Tensor], template: Path | None = None
) -> Path:
    """Writes a version into ``folder``, into which nothing else writes, and leaves of all versions the two newest.

    Args:
        tensors: those of ``specs``, in their order.
        template: a model directory whose files other than weights go beside them.

    Returns:
        The version's own directory.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(_DRAFT + "*"):
        shutil.rmtree(left)  # of a process that was killed
    draft, target = folder / f"{_DRAFT}{version:08d}", folder / f"{_PREFIX}{version:08d}"
    draft.mkdir()
    try:
        _write(draft, version, specs, tensors)
        for path in template.iterdir() if template is not None else ():
            if path.is_file() and not path.name.endswith(_NOT_COPIED):
                shutil.copy2(path, draft / path.name)
        replaced = folder / f"{_DRAFT}replaced"
        if target.exists():  # the same version once more
            os.rename(target, replaced)
        os.rename(draft, target)
        sync_directory(folder)  # the rename itself must survive a crash of the machine
        shutil.rmtree(replaced, ignore_errors=True)
        for old in sorted(path for path in folder.glob(_PREFIX + "*") if path.is_dir())[:-_KEPT]:
            shutil.rmtree(old)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return target


def _write(draft: Path, version: int, specs: Sequence[TensorSpec], tensors: Iterable[Tensor]) -> None:
    header, offsets = _safetensors_header(specs)
    digests = []
    with _synced(draft / WEIGHTS) as file:
        file.write(header)
        for spec, tensor in zip(specs, tensors, strict=True):
            here = tensor.cpu()
            file.seek(offsets[spec.name])
            file.write(bytes_of(here).numpy().data)
            digests.append(tensor_digest(here))
    manifest = WeightManifest(version, tuple(specs), tuple(digests))
    with _synced(draft / MANIFEST) as file:
        file.write(json.dumps(manifest.to_json(), indent=1).encode())


def _safetensors_header(specs: Sequence[TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """The file's beginning, and where in the file each tensor goes: wide dtypes first, so that all are aligned."""
    ordered = sorted(specs, key=lambda spec: (-spec.torch_dtype.itemsize, spec.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, used = {}, 0
    for spec in ordered:
        end = used + spec.num_bytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [used, end]}
        offsets[spec.name], used = used, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + offset for name, offset in offsets.items()}


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
