"""Transport ``disk``: a directory per version, for engines that know nothing else.

``version_00000012/`` holds ``model.safetensors``, ``manifest.json`` and, where a template is given, its configuration
and tokenizer, so that it loads as any Hugging Face model does. It takes its name when all of it is on the disk; half a
version is never seen. ``publish`` needs no receivers: ``load_published`` brings a version to an engine later.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError, safe_open
from torch import Tensor

from quartet.observe.digests import sync_directory
from quartet.weights.digest import bytes_of, tensor_digest
from quartet.weights.errors import WeightSyncError
from quartet.weights.manifest import TensorSpec, WeightManifest
from quartet.weights.sink import TensorSink
from quartet.weights.source import NamedSource
from quartet.weights.transport import Announcement, Offer, ReceiveTransport, SendTransport

WEIGHTS = "model.safetensors"
MANIFEST = "manifest.json"
_PREFIX = "version_"
_DRAFT = ".draft_"
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


class DiskSend(SendTransport):
    """
    Args:
        folder: made where it is missing; nothing else writes into it.
        template: a model directory whose files other than weights go beside every version.
        keep: versions that stay; older ones are deleted.
    """

    kind = "disk"
    _version: int

    def __init__(self, folder: Path, *, template: Path | None = None, keep: int = 2) -> None:
        super().__init__()
        if keep < 1:
            raise ValueError(f"keep = {keep}; at least the newest version stays")
        self._folder = folder.resolve()
        self._template = template
        self._keep = keep

    def open(self, specs: Sequence[TensorSpec], version: int) -> Offer:
        self._version = version
        return {"path": str(self._folder / f"{_PREFIX}{version:08d}")}

    def send(self, specs: Sequence[TensorSpec], tensors: Iterator[Tensor]) -> list[str]:
        self._folder.mkdir(parents=True, exist_ok=True)
        for draft in self._folder.glob(_DRAFT + "*"):
            shutil.rmtree(draft)  # of a process that was killed
        draft = self._folder / f"{_DRAFT}{self._version:08d}"
        draft.mkdir()
        try:
            digests = self._write(draft, specs, tensors)
            self._publish(draft)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return digests

    def _write(self, draft: Path, specs: Sequence[TensorSpec], tensors: Iterator[Tensor]) -> list[str]:
        header, offsets = _safetensors_header(specs)
        digests = []
        with _synced(draft / WEIGHTS) as file:
            file.write(header)
            for spec, tensor in zip(specs, tensors, strict=True):
                here = tensor.cpu()
                file.seek(offsets[spec.name])
                file.write(bytes_of(here).numpy().data)
                digests.append(tensor_digest(here))
        manifest = WeightManifest(self._version, tuple(specs), tuple(digests))
        with _synced(draft / MANIFEST) as file:
            file.write(json.dumps(manifest.to_json(), indent=1).encode())
        for path in self._template.iterdir() if self._template is not None else ():
            if path.is_file() and not path.name.endswith(_NOT_COPIED):
                shutil.copy2(path, draft / path.name)
        return digests

    def _publish(self, draft: Path) -> None:
        """The version gets its name, and old ones go."""
        target, replaced = self._folder / f"{_PREFIX}{self._version:08d}", self._folder / f"{_DRAFT}replaced"
        if target.exists():  # the same version once more
            os.rename(target, replaced)
        os.rename(draft, target)
        sync_directory(self._folder)  # the rename itself must survive a crash of the machine
        shutil.rmtree(replaced, ignore_errors=True)
        for old in published(self._folder)[: -self._keep]:
            shutil.rmtree(old)


class DiskReceive(ReceiveTransport):
    kind = "disk"

    def open(self, announcement: Announcement, sink: TensorSink) -> None:
        pass  # the files have no name yet

    def receive(self, announcement: Announcement, sink: TensorSink) -> None:
        _bring(Path(announcement.offer["path"]), announcement.tensors, sink)


def publish(
    source: NamedSource, version: int, folder: Path, *, template: Path | None = None, keep: int = 2
) -> WeightManifest:
    """Writes a version for engines that ``load_published`` brings it to, without a driver."""
    transport, specs = DiskSend(folder, template=template, keep=keep), source.specs()
    try:
        transport.open(specs, version)
        return WeightManifest(version, specs, tuple(transport.send(specs, source.tensors())))
    finally:
        transport.close()


def published(folder: Path) -> list[Path]:
    """Whole versions, oldest first."""
    return sorted(path for path in folder.glob(_PREFIX + "*") if path.is_dir())


def load_published(path: Path, sink: TensorSink) -> WeightManifest:
    """Brings a published version to ``sink``, as a sync does: for an engine that starts later, or again.

    Raises:
        WeightSyncError: it cannot be read, does not fit or is damaged.
    """
    try:
        manifest = WeightManifest.from_json(json.loads((path / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    sink.begin(manifest.tensors, manifest.version)
    try:
        _bring(path, manifest.tensors, sink)
        sink.verify(manifest)
        sink.commit()
    except BaseException as error:
        sink.abort(f"{type(error).__name__}: {error}")
        raise
    return manifest


def checkpoint_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Of every tensor of the safetensors files in ``path``."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


def _bring(path: Path, specs: Sequence[TensorSpec], sink: TensorSink) -> None:
    try:
        with safe_open(path / WEIGHTS, framework="pt") as file:
            for spec in specs:
                sink.write(spec.name, 0, file.get_tensor(spec.name).reshape(-1))
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> WeightSyncError:
    return WeightSyncError(
        "published weights cannot be read",
        found=f"{path}: {error}",
        remedy="let both ends see one file system, or publish the version again",
    )


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
