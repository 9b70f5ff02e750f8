"""A model directory written tensor by tensor: what ``save_pretrained`` writes, byte for byte, without a whole state.

For models that no process holds as a whole: all of their ranks call, tensors become whole on the first rank one at a
time (``Gather``), and that rank writes each to its place in a file whose header is already there. Adapters are added to
one layer's weight after the other.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from quartet.models.conversions import Conversion, conversions_to_save, meta_twin
from quartet.models.weight_files import INDEX
from quartet.weights.manifest import dtype_name

if TYPE_CHECKING:
    from quartet.models.packed_model import PackedModel

MAX_FILE_SIZE = "50GB"
"""As of ``save_pretrained``."""
_ORDER = ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "F16", "BF16", "I32", "F32", "F64", "I64")
"""dtypes in the order of safetensors, which puts the last ones first in a file."""


@dataclass(frozen=True)
class Gather:
    """How a sharded model's tensors become whole.

    Args:
        is_first: this rank is the one that gets them.
        whole: the whole tensor on that rank, None on all others, which have to call it as well, in the same order.
    """

    is_first: bool
    whole: Callable[[Tensor], Tensor | None]


WHOLE = Gather(is_first=True, whole=lambda tensor: tensor)
"""Of a model that this process has as a whole."""


class SafetensorsWriter:
    """A safetensors file with a header for these tensors, to which they are written in any order.

    Args:
        tensors: of which names, dtypes and shapes are read; as on the meta device.

    Raises:
        OSError: it could not be written.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        kinds = {name: dtype_name(tensor.dtype) for name, tensor in tensors.items()}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, int] = {}
        used = 0
        for name in sorted(tensors, key=lambda name: (-_ORDER.index(kinds[name]), name)):
            size, shape = tensors[name].nbytes, list(tensors[name].shape)
            header[name] = {"dtype": kinds[name], "shape": shape, "data_offsets": [used, used + size]}
            self._places[name] = used
            used += size
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._begin = 8 + len(text)
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115 (closed by close)
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._begin + used)

    def write(self, name: str, tensor: Tensor) -> None:
        self._file.seek(self._begin + self._places[name])
        self._file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        self._file.close()


def save_gathered(packed: PackedModel, path: Path, gather: Gather, *, num_new_rows: int = 0) -> None:
    """Writes what ``packed.model.save_pretrained(path)`` writes, with merged adapters. All ranks call it.

    Args:
        num_new_rows: rows that the input embedding gets, the mean of its others.

    Raises:
        OSError: it could not be written; on the first rank, once all tensors were gathered.
    """
    model, twin = packed.model, meta_twin(packed.model)
    with packed.without_adapters():
        state = model.state_dict(keep_vars=True)
        embedding = model.get_input_embeddings().weight
        new_rows = {name: num_new_rows if tensor is embedding else 0 for name, tensor in state.items()}
        outline = {
            n: _meta(t, (len(t) + new_rows[n], *t.shape[1:]) if new_rows[n] else t.shape) for n, t in state.items()
        }
        outline = remove_tied_weights_from_state_dict(outline, model)
        outline = {
            name: tensor for name, tensor in outline.items() if name not in (model._keys_to_ignore_on_save or ())
        }
        conversions = conversions_to_save(model, twin, outline)
        merged = {} if packed.adapters is None else {id(layer.base.weight): layer for layer in packed.adapters.layers}

        def read(name: str) -> Tensor | None:
            tensor = state[name]
            if (layer := merged.get(id(tensor))) is not None:
                parts = [part for part in map(gather.whole, layer.sources) if part is not None]
                return layer.merge(*parts) if parts else None
            whole = gather.whole(tensor)
            if whole is None or not new_rows[name]:
                return whole
            return torch.cat([whole, whole.mean(0, keepdim=True).expand(new_rows[name], -1)])

        parts = ({name: read(name) for name in conversion.names} for conversion in conversions)
        with _draining(parts):
            if gather.is_first:
                _write(model, twin, path, outline, conversions, parts)


def _write(
    model: PreTrainedModel,
    twin: PreTrainedModel,
    path: Path,
    outline: Mapping[str, Tensor],
    conversions: Sequence[Conversion],
    parts: Iterable[dict[str, Any]],
) -> None:
    """
    Args:
        parts: what goes into each conversion.
    """
    model.save_pretrained(path, state_dict={})  # the configs, and what belongs to a model of own code
    made = {n: t for conversion in conversions for n, t in conversion.convert(outline.__getitem__, twin).items()}
    files, index = _split(path, made, model.num_parameters())
    with _opened(files) as writers:
        for conversion, sources in zip(conversions, parts, strict=True):
            _convert_and_write(conversion, sources, twin, writers)
    if index is not None:
        (path / INDEX).write_text(index, encoding="utf-8")


def _convert_and_write(
    conversion: Conversion, sources: dict[str, Tensor], twin: PreTrainedModel, writers: Mapping[str, SafetensorsWriter]
) -> None:
    """A function of its own, so that nothing of one conversion lives on in the next."""
    for name, tensor in conversion.convert(sources.pop, twin).items():
        writers[name].write(name, tensor)


def save_tensors(path: Path, named: Mapping[str, Tensor], gather: Gather) -> None:
    """Writes the named tensors into one safetensors file. All ranks call it; raises as ``save_gathered``."""
    tensors = ((name, gather.whole(tensor)) for name, tensor in named.items())
    with _draining(tensors):
        if not gather.is_first:
            return
        with _opened({path: {name: _meta(tensor, tensor.shape) for name, tensor in named.items()}}) as writers:
            for name, tensor in tensors:
                assert tensor is not None
                writers[name].write(name, tensor)


def _meta(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _split(
    directory: Path, outline: Mapping[str, Tensor], num_parameters: int
) -> tuple[dict[Path, dict[str, Tensor]], str | None]:
    """What goes into which file: one, or where that would be too large several, with the text of their index."""
    split = split_torch_state_dict_into_shards(
        dict(outline), filename_pattern="model{suffix}.safetensors", max_shard_size=MAX_FILE_SIZE
    )
    files = {directory / file: {n: outline[n] for n in names} for file, names in split.filename_to_tensors.items()}
    if not split.is_sharded:
        return files, None
    metadata = {"total_parameters": num_parameters, **split.metadata}
    text = json.dumps({"metadata": metadata, "weight_map": split.tensor_to_filename}, indent=2, sort_keys=True)
    return files, text + "\n"


@contextmanager
def _opened(files: Mapping[Path, Mapping[str, Tensor]]) -> Iterator[dict[str, SafetensorsWriter]]:
    """Within, the writer of each tensor."""
    with ExitStack() as opened:
        writers: dict[str, SafetensorsWriter] = {}
        for path, outline in files.items():
            writer = SafetensorsWriter(path, outline)
            opened.callback(writer.close)
            writers |= dict.fromkeys(outline, writer)
        yield writers


@contextmanager
def _draining(gathers: Iterator[object]) -> Iterator[None]:
    """Behind it all of ``gathers`` were made: the other ranks wait in theirs for this one, to the last tensor."""
    try:
        yield
    finally:
        deque(gathers, maxlen=0)
