"""What a model directory must hold before transformers loads it, and what was found out by loading.

transformers takes most of this as it comes: it would read whole numbers as weights, draw what is missing at random and
leave out what is too much.

A model directory written tensor by tensor: what ``save_pretrained`` writes, byte for byte, without a whole state.

For models that no process holds as a whole: all of their ranks call, tensors become whole on the first rank one at a
time (``GatherFunctions``), and that rank writes each to its place in a file whose header is already there. Adapters are
added to one layer's weight after the other.

Most families' files have the model's own names. transformers keeps rules for the others (``conversion_mapping``):
names that are changed, and *conversions* of a few tensors into a few others, as the experts of a layer into one tensor.
transformers applies them to whole models; here each is a ``WeightConversion`` that is done when its tensors are needed.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import load_state_dict, remove_tied_weights_from_state_dict

from quartet.config import UserError
from quartet.models.attention import original_attention
from quartet.text.loading import custom_code_error, resolve_model_directory
from quartet.weights.manifest import dtype_name

if TYPE_CHECKING:
    from quartet.models.packed_model import PackedModel


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
        """Reads the part, or all of it."""
        found: Tensor = self.source[part] if part else self.source[...]
        return found


def weight_paths(source: str) -> list[Path]:
    """Finds the files with the weights of a model directory or hub name; safetensors files where there are any.

    Raises:
        OSError: there are none.
    """
    folder = Path(resolve_model_directory(source, "model"))
    for name in ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json"):
        file = folder / name
        if not file.is_file():
            continue
        if not name.endswith(".json"):
            return [file]
        return [folder / n for n in sorted(set(json.loads(file.read_text(encoding="utf-8"))["weight_map"].values()))]
    raise OSError(f"no file named model.safetensors or pytorch_model.bin in {source}")


@contextmanager
def stored_tensors(source: str) -> Iterator[Mapping[str, StoredTensor]]:
    """Opens all tensors of a model directory or hub name, by the names that the files have.

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


_NAMED = 3
"""Tensors named in a message; their number follows."""


@contextlib.contextmanager
def naming_load_errors(path: str, kind: str) -> Iterator[None]:
    """Turns into a user error whatever reading the directory at ``path`` in the ``with`` block runs into."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    # Broken configs and weights come back as almost every kind of exception there is.
    except Exception as error:
        if (refused := custom_code_error(error, path)) is not None:
            raise refused from None
        raise UserError(
            f"{path!r} cannot be loaded as a {kind}",
            found=_line(error),
            remedy="check that the directory holds config.json and safetensors weights of a supported architecture",
        ) from error


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Checks of whole configs name the field in the first line and the fault in the second.
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else lines[0] if lines else "no message"
    return text if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text}"


def read_config(source: str, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Reads the config of a model directory.

    Raises:
        UserError: adapters alone, or quantised weights.
    """
    if Path(source, "adapter_config.json").is_file() and not Path(source, "config.json").exists():
        raise UserError(
            f"{source!r} has adapters of peft, and no model",
            found="adapter_config.json without config.json",
            remedy="add them to their base first (model = model.merge_and_unload()) and save that, or name model/",
        )
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        raise UserError(
            f"the weights of {source!r} are quantised",
            found=f"quantization_config: {quantised}",
            remedy="use the model's weights in fp32, bf16 or fp16",
        )
    return config


def _headers(source: str) -> dict[str, torch.Tensor]:
    """Reads all tensors of a model directory onto the meta device.

    Raises:
        OSError: there are none.
    """
    parts = weight_paths(source)
    return {n: tensor for part in parts for n, tensor in load_state_dict(str(part), map_location="meta").items()}


def format_names(names: Collection[str]) -> str:
    """Tells the first names, and how many there are."""
    first = ", ".join(sorted(names)[:_NAMED])
    return first if len(names) <= _NAMED else f"{first} and {len(names) - _NAMED} more"


def load_weights(
    kind: Any, source: str, config: PreTrainedConfig, *, empty: bool = False, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Loads the model of an auto class in fp32, and what ``from_pretrained`` says about it with
    ``output_loading_info``.

    Args:
        empty: on the meta device: names, shapes and what is said come from the files' headers, contents are not read.

    Raises:
        UserError: tensors of another shape than the config's, which are named.
    """
    options = {"config": config, "dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    if empty:
        options |= {"state_dict": _headers(source), "device_map": "meta"}
        with torch.device("meta"):
            made = kind.from_config(config, trust_remote_code=trust_remote_code) if trust_remote_code else None
        found = kind._model_mapping[type(config)] if made is None else type(made)
        model, info = found.from_pretrained(None, **options)
        model.name_or_path = model.config.name_or_path = source
        _tie_equal(model, source)
    else:
        model, info = kind.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
    if wrong := sorted(info["mismatched_keys"]):
        name, stored, own = wrong[0]
        raise UserError(
            f"the weights of {source!r} do not fit its config.json",
            found=f"{name} is {list(stored)}, by the config {list(own)}",
            remedy="restore the config.json that these weights were saved with",
        )
    return model, info


def _tie_equal(model: PreTrainedModel, source: str) -> None:
    """Ties weights of which the files have both, and the same: transformers does, but not without contents."""
    tied = model.all_tied_weights_keys.items()
    pairs = [(a, b) for a, b in tied if model.get_parameter(a) is not model.get_parameter(b)]
    if pairs:
        with stored_tensors(source) as stored:
            if all({a, b} <= stored.keys() and torch.equal(stored[a].read(), stored[b].read()) for a, b in pairs):
                model.tie_weights()


def copy_to_meta(models: Sequence[PreTrainedModel]) -> list[PreTrainedModel]:
    """Makes copies on the meta device: modules, configs, names and shapes, without contents; what is shared
    still is.
    """
    tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
    memo = {id(t): t.detach().to("meta") for t in tensors if not isinstance(t, nn.Parameter)}
    memo |= {id(t): nn.Parameter(t.detach().to("meta")) for t in tensors if isinstance(t, nn.Parameter)}
    return copy.deepcopy(list(models), memo)


# What loading found ---------------------------------------------------------------------------------------


def check_loaded(model: PreTrainedModel, path: str, info: dict[str, Any]) -> None:
    """Notes tensors that belong nowhere, for ``load_warnings``; of a model without contents these are not looked at.

    Args:
        info: what ``from_pretrained`` says with ``output_loading_info``.

    Raises:
        UserError: weights that are no numbers.
    """
    check_finite(model, path)
    extra = info["unexpected_keys"]
    vars(model)["quartet_load_remarks"] = (
        (f"{path}: tensors that belong nowhere: {format_names(extra)}",) if extra else ()
    )


def check_finite(model: PreTrainedModel, name: str) -> None:
    """
    Args:
        name: of the model, in the message.

    Raises:
        UserError: weights are NaN or infinite; of tensors without contents nothing is known.
    """
    with torch.no_grad():
        weights = [(name, values) for name, values in model.named_parameters() if not values.is_meta]
        # The sum alone could overflow.
        broken = [n for n, v in weights if not bool(v.sum().isfinite()) and not bool(v.isfinite().all())]
    if broken:
        raise UserError(
            f"the weights of {name!r} are not finite",
            found=f"NaN or infinity in {format_names(broken)}",
            remedy="use a checkpoint from before its training diverged, or download it again",
        )


def load_warnings(model: PreTrainedModel) -> tuple[str, ...]:
    """Tells what was left out when the model was loaded, in words."""
    return tuple(vars(model).get("quartet_load_remarks", ()))


# Names and shapes in files -------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightConversion:
    """Tensors that become others together; most often one that only has another name.

    Attributes:
        target: the name of what comes out, the first where it is several.
        sources: names of what goes in, by the pattern of the rule that they fit.
        rule: None where a name is all that changes.
        renamings: of the names of what the rule has made.
    """

    target: str
    rule: WeightConverter | None = None
    sources: dict[str, list[str]] = field(default_factory=dict)
    renamings: Sequence[WeightRenaming] = ()

    @property
    def names(self) -> list[str]:
        """Of all that goes in."""
        return [name for names in self.sources.values() for name in names]

    @property
    def stacks_rows(self) -> bool:
        """Whether row ``i`` of what comes out is made of the ``i``-th source of every pattern alone: then a range of
        rows needs only those."""
        if self.rule is None or len(self.rule.target_patterns) > 1:
            return False
        first, *others = self.rule.operations
        keeps = all(
            (isinstance(op, Concatenate) and op.dim > 0) or (isinstance(op, Transpose) and min(op.dim0, op.dim1) > 0)
            for op in others
        )
        return isinstance(first, MergeModulelist) and first.dim == 0 and keeps

    def convert(
        self, read: Callable[[str], Tensor], model: PreTrainedModel, rows: slice | None = None
    ) -> dict[str, Tensor]:
        """Converts what ``read`` gives, and returns what comes out, by name.

        Args:
            read: gives what goes in.
            model: whose conversion it is; its contents are not looked at.
            rows: only these of what comes out; where ``stacks_rows``.
        """
        if self.rule is None:
            return {self.target: read(self.names[0])}
        rule = copy.deepcopy(self.rule)
        for pattern, names in self.sources.items():
            for name in names[rows] if rows is not None else names:
                # transformers' types know futures alone, its code takes tensors.
                tensor: Any = read(name)
                rule.add_tensor(self.target, name, pattern, tensor)
        found: dict[str, Any] = rule.convert(self.target, model=model, config=model.config)
        return {
            rename_source_key(name, list(self.renamings), [])[0]: tensor[0] if isinstance(tensor, list) else tensor
            for name, tensor in found.items()
        }


def meta_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Makes a model like ``model`` on the meta device as its class makes it: with all modules of its own
    and no others.
    """
    config = copy.deepcopy(model.config)
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return type(model)._from_config(config, dtype=torch.float32, attn_implementation=original_attention(model))


def conversions_to_load(twin: PreTrainedModel, names: Collection[str]) -> tuple[list[WeightConversion], list[str]]:
    """Finds how files' tensors become the model's, and the names of those that belong nowhere.

    Args:
        twin: as ``meta_twin`` makes it.
        names: in the files.
    """
    expected, prefix = twin.state_dict(), twin.base_model_prefix
    renamings, converters = _split_rules(get_model_conversion_mapping(twin))
    found: dict[str, WeightConversion] = {}
    extra = []
    for name in sorted(names, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if renamed not in expected and name in expected:
            renamed, pattern = rename_source_key(name, [], [], prefix, expected)
        if renamed in expected:
            _add(found, renamed, name, pattern, converters)
        else:
            extra.append(name)
    return list(found.values()), extra


def conversions_to_save(model: PreTrainedModel, twin: PreTrainedModel, names: Iterable[str]) -> list[WeightConversion]:
    """Finds how the model's tensors become those of its files, as ``save_pretrained`` does it.

    Args:
        model: which may remember how it was loaded.
        twin: as ``meta_twin`` makes it of ``model``.
        names: in the model.
    """
    forward: list[WeightTransform] | None = getattr(model, "_weight_conversions", None)
    if forward is None:
        # Of a prefix it is not known whether the model's files had it.
        found = get_model_conversion_mapping(twin, add_legacy=False)
        forward = [transform for transform in found if not isinstance(transform, PrefixChange)]
    renamings, converters = _split_rules([transform.reverse_transform() for transform in reversed(forward)])
    made: dict[str, WeightConversion] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, [], converters)
        if pattern is None:
            target, _ = rename_source_key(name, renamings, [])
        _add(made, target, name, pattern, converters)
    return [replace(c, renamings=renamings) if c.rule is not None else c for c in made.values()]


def _split_rules(transforms: Iterable[WeightTransform]) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    found = list(transforms)
    return [t for t in found if isinstance(t, WeightRenaming)], [t for t in found if isinstance(t, WeightConverter)]


def _add(
    found: dict[str, WeightConversion],
    target: str,
    name: str,
    pattern: str | None,
    converters: Sequence[WeightConverter],
) -> None:
    rule = next((c for c in converters if pattern in c.source_patterns), None) if pattern is not None else None
    conversion = found.setdefault(target, WeightConversion(target, rule))
    conversion.sources.setdefault(pattern or name, []).append(name)


MAX_FILE_SIZE = "50GB"
"""As of ``save_pretrained``."""
_ORDER = ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "F16", "BF16", "I32", "F32", "F64", "I64")
"""dtypes in the order of safetensors, which puts the last ones first in a file."""


@dataclass(frozen=True)
class GatherFunctions:
    """How a sharded model's tensors become whole.

    Args:
        is_first: this rank is the one that gets them.
        whole: ``(*parts, join=…, everywhere=False)`` gives what ``join`` makes of the whole parts on that rank, or on
            every one, and None on all others, which have to call it as well, in the same order.
    """

    is_first: bool
    whole: Callable[..., Tensor | None]


Join = Callable[..., Tensor]


def first_of(tensor: Tensor, *_: Tensor) -> Tensor:
    return tensor


WHOLE = GatherFunctions(is_first=True, whole=lambda *parts, join=first_of, everywhere=False: join(*parts))
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


def save_gathered(packed: PackedModel, path: Path, gather: GatherFunctions, *, num_new_rows: int = 0) -> None:
    """Writes what ``packed.model.save_pretrained(path)`` writes, with merged adapters. All ranks call it.

    Args:
        num_new_rows: rows that the input embedding gets, the mean of its others.

    Raises:
        OSError: it could not be written; on the first rank, once all tensors were gathered.
    """
    model, twin = packed.model, meta_twin(packed.model)
    with packed.without_adapters():
        state = packed.complete_state(model.state_dict(keep_vars=True))
        embedding = model.get_input_embeddings().weight
        new_rows = {name: num_new_rows if tensor is embedding else 0 for name, tensor in state.items()}
        outline = {
            n: _meta(t, (len(t) + new_rows[n], *t.shape[1:]) if new_rows[n] else t.shape) for n, t in state.items()
        }
        # What is on the meta device here has no memory by which its ties are known; of a stage not even modules.
        kept = remove_tied_weights_from_state_dict(dict(outline), model if packed.stage is None else twin)
        of_kept = {id(state[name]) for name in kept}
        outline = {n: t for n, t in outline.items() if n in kept or id(state[n]) not in of_kept}
        outline = {
            name: tensor for name, tensor in outline.items() if name not in (model._keys_to_ignore_on_save or ())
        }
        conversions = conversions_to_save(model, twin, outline)
        merged = {} if packed.adapters is None else {id(layer.base.weight): layer for layer in packed.adapters.layers}

        def read(name: str) -> Tensor | None:
            tensor = state[name]
            if (layer := merged.get(id(tensor))) is not None:
                return gather.whole(*layer.sources, join=layer.merge)
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
    conversions: Sequence[WeightConversion],
    parts: Iterable[dict[str, Any]],
) -> None:
    """
    Args:
        parts: what goes into each conversion.
    """
    model.save_pretrained(path, state_dict={})  # the configs, and what belongs to a model of own code
    made = {n: t for conversion in conversions for n, t in conversion.convert(outline.__getitem__, twin).items()}
    files, index = _split(path, made, twin.num_parameters())
    with _opened(files) as writers:
        for conversion, sources in zip(conversions, parts, strict=True):
            _convert_and_write(conversion, sources, twin, writers)
    if index is not None:
        (path / INDEX).write_text(index, encoding="utf-8")


def _convert_and_write(
    conversion: WeightConversion,
    sources: dict[str, Tensor],
    twin: PreTrainedModel,
    writers: Mapping[str, SafetensorsWriter],
) -> None:
    """Converts and writes what one conversion makes; apart, so that nothing of it lives on in the next."""
    for name, tensor in conversion.convert(sources.pop, twin).items():
        writers[name].write(name, tensor)


def save_tensors(path: Path, named: Mapping[str, Tensor], gather: GatherFunctions) -> None:
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
    """Decides what goes into which file: one, or where that would be too large several, with their index's text."""
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
    """Opens the files, and gives the writer of each tensor."""
    with ExitStack() as opened:
        writers: dict[str, SafetensorsWriter] = {}
        for path, outline in files.items():
            writer = SafetensorsWriter(path, outline)
            opened.callback(writer.close)
            writers |= dict.fromkeys(outline, writer)
        yield writers


@contextmanager
def _draining(gathers: Iterator[object]) -> Iterator[None]:
    """Makes the rest of ``gathers`` at the end: the other ranks wait in theirs for this one, to the last tensor."""
    try:
        yield
    finally:
        deque(gathers, maxlen=0)
