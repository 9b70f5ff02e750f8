"""Ragged batches on disk: one safetensors file, its structure as JSON in the file's metadata.

Tensors are named ``input_ids``, ``token/NAME``, ``sequence/NAME`` and ``attachments/NAME``. Objects and meta
must be JSON values, so that a file can be read without running anything and gives back exactly what was
saved.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from quartet.batch.ragged import Attachment, RaggedBatch

FORMAT = "quartet-ragged-batch-1"
_KEY = "quartet"


def save_batch(batch: RaggedBatch, path: str | os.PathLike[str]) -> None:
    """Writes ``batch`` to ``path``: whole or not at all, replacing what was there.

    Raises:
        TypeError: an object or a meta value is not a JSON value (None, bool, int, finite float, str, list,
            dict with str keys; a tuple would come back as a list, so it is none).
        ValueError: the batch is an outline.
        OSError: the file cannot be written; what was at ``path`` before is still there.
    """
    if not batch.has_ids:
        raise ValueError("an outline cannot be saved: its token ids are elsewhere; fill it before")
    for name, column in batch.objects.items():
        for s, value in enumerate(column):
            _check_json(value, f"objects[{name!r}][{s}]")
    _check_json(dict(batch.meta), "meta")
    header = {
        "format": FORMAT,
        "segment_lengths": batch.segment_lengths,
        "parents": batch.parents,
        "leaves": batch.leaves,
        "ids": batch.ids,
        "objects": dict(batch.objects),
        "attachments": {name: attachment.offsets for name, attachment in batch.attachments.items()},
        "meta": dict(batch.meta),
    }
    tensors = {"input_ids": batch.input_ids}
    tensors |= {f"token/{name}": values for name, values in batch.token.items()}
    tensors |= {f"sequence/{name}": values for name, values in batch.sequence.items()}
    tensors |= {f"attachments/{name}": attachment.values for name, attachment in batch.attachments.items()}
    # safetensors takes neither views nor two tensors over one storage.
    own = {name: values.detach().cpu().contiguous().clone() for name, values in tensors.items()}
    write_atomically(Path(path), save(own, metadata={_KEY: json.dumps(header, allow_nan=False)}))


def load_batch(path: str | os.PathLike[str]) -> RaggedBatch:
    """Reads what ``save_batch`` wrote, onto the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged or is no saved batch.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header_text = (file.metadata() or {}).get(_KEY)
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{os.fspath(path)} is damaged or no saved batch: {error}") from error
    header: dict[str, Any] = json.loads(header_text) if header_text is not None else {}
    if header.get("format") != FORMAT:
        raise ValueError(f"{os.fspath(path)} is no saved batch: format {header.get('format')!r}, not {FORMAT!r}")
    families: dict[str, dict[str, Tensor]] = {"token": {}, "sequence": {}, "attachments": {}}
    for key, values in tensors.items():
        family, slash, name = key.partition("/")
        if slash:
            families[family][name] = values
    return RaggedBatch(
        input_ids=tensors["input_ids"],
        segment_lengths=tuple(header["segment_lengths"]),
        parents=tuple(header["parents"]),
        leaves=tuple(header["leaves"]),
        ids=tuple(header["ids"]),
        token=families["token"],
        sequence=families["sequence"],
        objects={name: tuple(column) for name, column in header["objects"].items()},
        attachments={
            name: Attachment(values, tuple(header["attachments"][name]))
            for name, values in families["attachments"].items()
        },
        meta=header["meta"],
    )


def _check_json(value: Any, where: str) -> None:
    """Exact types only: a subclass (an enum, a NumPy float) would come back as something else."""
    if value is None or type(value) in (bool, int, str):
        return
    if type(value) is float and math.isfinite(value):
        return
    if type(value) is list:
        for i, item in enumerate(value):
            _check_json(item, f"{where}[{i}]")
        return
    if type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"{where} has the key {key!r} of type {type(key).__name__}: JSON keys are str")
            _check_json(item, f"{where}[{key!r}]")
        return
    raise TypeError(f"{where} is not a JSON value and cannot be saved: {type(value).__name__} {value!r:.80}")


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, synced before it takes its name.

    Raises:
        OSError: it cannot be written; what was at ``path`` before is still there.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
