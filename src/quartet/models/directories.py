"""What a model directory must hold before transformers loads it, and what was found out by loading.

transformers takes most of this as it comes: it would read whole numbers as weights, draw what is missing at random and
leave out what is too much.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import load_state_dict

from quartet.config import UserError
from quartet.text.loading import local_or_hub, needs_own_code

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


_FLOATING = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
_NAMED = 3
"""Tensors named in a message; their number follows."""


@contextlib.contextmanager
def loading(path: str, kind: str) -> Iterator[None]:
    """Within, whatever reading the directory at ``path`` runs into becomes a user error."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    # Broken configs and weights come back as almost every kind of exception there is.
    except Exception as error:
        if (refused := needs_own_code(error, path)) is not None:
            raise refused from None
        only_pickled = any(Path(path).glob("*.bin")) and not any(Path(path).glob("*.safetensors"))
        if isinstance(error, UnpicklingError | EOFError) or only_pickled:
            code = re.search(r"GLOBAL ([\w.]+)", str(error))
            raise UserError(
                f"{path!r} cannot be loaded as a {kind}",
                found=f"its pickled weights would run {code[1]}" if code else "its pickled weights are damaged",
                remedy="get safetensors weights; pickled ones are read as plain tensors and nothing else",
            ) from error
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
    """Reads the config of a model directory, once the directory's weights have been looked at.

    Raises:
        UserError: quantised weights, or an index that leads nowhere.
    """
    if Path(source, "adapter_config.json").is_file() and not Path(source, "config.json").exists():
        raise UserError(
            f"{source!r} has adapters of peft, and no model",
            found="adapter_config.json without config.json",
            remedy="add them to their base first (model = model.merge_and_unload()) and save that, or name model/",
        )
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        raise _quantised(source, f"quantization_config: {quantised}")
    tensors = _tensors(Path(source))
    other = sorted(n for n, (dtype, _) in tensors.items() if n.endswith("weight") and dtype not in _FLOATING)
    if other:
        raise _quantised(source, f"{tensors[other[0]][0]} numbers in {named(other)}")
    return config


def _quantised(source: str, found: str) -> UserError:
    return UserError(
        f"the weights of {source!r} are quantised, or no floating-point numbers",
        found=found,
        remedy="use the model's weights in fp32, bf16 or fp16",
    )


def _tensors(directory: Path) -> dict[str, tuple[str, list[int]]]:
    """Dtype, as headers call it, and shape of every tensor in the directory's safetensors files; none of other files.

    Raises:
        UserError: an index that names files which are not there, or lie elsewhere.
    """
    files = [directory / "model.safetensors"]
    if not files[0].is_file() and (directory / INDEX).is_file():
        weight_map = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
        lost = [name for name in names if Path(name).name != name or not (directory / name).is_file()]
        if lost:
            raise UserError(
                f"shards of {str(directory)!r} are missing",
                found=f"{INDEX} names {named(lost)}, not in the directory",
                remedy="download the directory again, with all of its files",
            )
        files = [directory / name for name in names]
    found: dict[str, tuple[str, list[int]]] = {}
    for file in files:
        if file.is_file():  # opening a pipe would wait for ever
            with safe_open(str(file), "pt") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                found.update({name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()})
    return found


def _headers(source: str) -> dict[str, torch.Tensor]:
    """All tensors of a model directory, on the meta device.

    Raises:
        OSError: there are none.
    """
    parts = weight_paths(source)
    return {n: tensor for part in parts for n, tensor in load_state_dict(str(part), map_location="meta").items()}


def named(names: Collection[str]) -> str:
    """The first names, and how many there are."""
    first = ", ".join(sorted(names)[:_NAMED])
    return first if len(names) <= _NAMED else f"{first} and {len(names) - _NAMED} more"


def load_weights(
    kind: Any, source: str, config: PreTrainedConfig, *, empty: bool = False, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model of an auto class in fp32, and what ``from_pretrained`` says about it with ``output_loading_info``.

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
    if wrong := sorted((name, _shape(stored), _shape(own)) for name, stored, own in info["mismatched_keys"]):
        more = f"; {len(wrong) - 1} more" if wrong[1:] else ""
        raise UserError(
            f"the weights of {source!r} do not fit its config.json",
            found=f"{wrong[0][0]} is {wrong[0][1]}, by the config {wrong[0][2]}{more}",
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


def has_one_label(source: str) -> bool:
    """Whether the config of a model directory says nothing of labels, and the weights have a head of one row."""
    values, _ = PreTrainedConfig.get_config_dict(source)
    if {"num_labels", "id2label"} & values.keys():
        return False
    with stored_tensors(source) as stored:
        heads = [tensor.shape for name, tensor in stored.items() if name == "score.weight"]
    return [shape[0] for shape in heads] == [1]


def _shape(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes)) or "one number"


def on_meta(models: Sequence[PreTrainedModel]) -> list[PreTrainedModel]:
    """Copies on the meta device: modules, configs, names and shapes, without contents; what is shared still is."""
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
    vars(model)["quartet_load_remarks"] = (f"{path}: tensors that belong nowhere: {named(extra)}",) if extra else ()


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
            found=f"NaN or infinity in {named(broken)}",
            remedy="use a checkpoint from before its training diverged, or download it again",
        )


def load_warnings(model: PreTrainedModel) -> tuple[str, ...]:
    """What was left out when the model was loaded, in words."""
    return tuple(vars(model).get("quartet_load_remarks", ()))
