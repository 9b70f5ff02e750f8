"""The tower of a vision-language model: features of pictures, computed once and put where sequences have pictures.

Shapes: P packed tokens, n rows of one picture's features, D hidden, L layers that take features of their own.

A vision-language model is a language model, a *tower* that encodes pictures and a *projector* between the two; here
"tower" is both of them. A picture's features are a matter of the picture and of these weights alone, so they are kept
(``FeatureStore``) and serve every pass of every role whose tower has the same weights, for as long as it does not
train. Where it trains, a pass runs it for its own pictures, with gradients.

The language model alone is what runs packed: a hook at its embedding puts the rows of features where the ids are those
of pictures (``batch/pictures.py``).
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import PreTrainedModel

from quartet.batch.pictures import key_of, picture_ids, picture_places, split_picture_ids
from quartet.config import UserError
from quartet.models.attention import language_model
from quartet.models.memory import to_device
from quartet.models.work import WorkCounter
from quartet.observe.files import replace_atomically
from quartet.weights.digest import tensor_digest

if TYPE_CHECKING:
    from quartet.text.pictures import PictureCodec, PictureProcessor, PictureStore

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class ImageFeatures:
    """Features of one picture.

    Attributes:
        rows: ``[n, D]`` stand in the place of the placeholders' embeddings.
        deep: ``[L, n, D]`` are added behind each of the first L layers (Qwen3-VL).
        grid: the rows' ``(time, height, width)``, where positions have several axes (Qwen-VL).
    """

    rows: Tensor
    deep: Tensor | None = None
    grid: Grid | None = None

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + (0 if self.deep is None else self.deep.nbytes)


class FeatureStore:
    """The features of a run's pictures: in memory, else in files that all of its processes share, else computed.

    Both are bounded, and what was used or written longest ago goes first. Two threads or processes that need the same
    features at a time compute them once.

    Args:
        pictures: of the run.
        processor: makes what a tower takes of a picture.
        directory: of the files, one folder for every tower's digest.
        max_bytes: kept in the memory of this process.
        max_disk_bytes: of files.

    Attributes:
        computed, loaded, reused: features that a tower computed here, that came from a file, and from memory.
    """

    def __init__(
        self,
        pictures: PictureStore,
        processor: PictureProcessor,
        directory: Path,
        max_bytes: int,
        *,
        max_disk_bytes: int = 64 << 30,
    ) -> None:
        self._pictures, self.processor, self._directory = pictures, processor, directory
        self._max_bytes, self._max_disk_bytes = max_bytes, max_disk_bytes
        self._memory: OrderedDict[tuple[str, int], ImageFeatures] = OrderedDict()
        self._used_bytes = self._written_bytes = 0
        self._lock = threading.Lock()
        self.computed = self.loaded = self.reused = 0

    @classmethod
    def of(cls, pictures: PictureCodec) -> FeatureStore:
        """Makes the store beside the pictures that a codec reads."""
        directory, sizes = pictures.store.directory / "features", pictures.store.sizes
        return cls(pictures.store, pictures.processor, directory, sizes.memory_bytes, max_disk_bytes=sizes.disk_bytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> FeatureStore:
        return self  # a copy of a model has the same pictures

    def inputs(self, key: int) -> dict[str, Tensor]:
        """Returns what a tower takes of the picture, a batch of one."""
        picture = self._pictures.get(key)
        if self.processor.key(picture) != key:
            raise UserError(
                "a picture is not the one that the prompt was made with",
                found=f"picture {key:012x}: {picture}",
                remedy="keep pictures as they are while a run uses them, and one processor for all of its processes",
            )
        return self.processor.inputs(picture)

    def get(self, digest: str, key: int, compute: Callable[[dict[str, Tensor]], ImageFeatures]) -> ImageFeatures:
        """Returns the features of a picture, on the host.

        Args:
            digest: of the tower's weights.
            compute: the tower.
        """
        with self._lock:
            if (found := self._memory.get((digest, key))) is not None:
                self._memory.move_to_end((digest, key))
                self.reused += 1
                return found
        folder = self._directory / digest
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{key:012x}.safetensors"
        # A few locks for all pictures.
        with (folder / f"lock{key % 64}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = _read(file)
            if found is not None:
                self.loaded += 1
            else:
                found = compute(self.inputs(key))
                self.computed += 1
                self._write(file, found)
        self._keep((digest, key), found)
        return found

    def _keep(self, place: tuple[str, int], features: ImageFeatures) -> None:
        with self._lock:
            if place not in self._memory:
                self._used_bytes += features.num_bytes
            self._memory[place] = features
            while self._used_bytes > self._max_bytes and len(self._memory) > 1:
                _, gone = self._memory.popitem(last=False)
                self._used_bytes -= gone.num_bytes

    def _write(self, file: Path, features: ImageFeatures) -> None:
        tensors = {"rows": features.rows.contiguous()}
        if features.deep is not None:
            tensors["deep"] = features.deep.contiguous()
        if features.grid is not None:
            tensors["grid"] = torch.tensor(features.grid)
        replace_atomically(file, save(tensors))
        self._written_bytes += features.num_bytes
        if self._written_bytes > self._max_disk_bytes // 16:
            self._written_bytes = 0
            self._trim()

    def _trim(self) -> None:
        """Removes the oldest files beyond the bound; other processes may do so too."""
        found = []
        for path in self._directory.glob("*/*.safetensors"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        excess = sum(size for _, size, _ in found) - self._max_disk_bytes
        for _, size, path in sorted(found):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size


def _read(file: Path) -> ImageFeatures | None:
    try:
        tensors = load_file(file)
    except FileNotFoundError:
        return None
    grid = tensors.get("grid")
    return ImageFeatures(tensors["rows"], tensors.get("deep"), None if grid is None else _triple(grid))


def _triple(numbers: Tensor) -> Grid:
    first, second, third = numbers.tolist()
    return first, second, third


class ImageTower:
    """What a vision-language model has beside its language model.

    Attributes:
        base: the model without its head.
        placeholder_id: the id that stands for one row of a picture in the model's own inputs.
        autocast: in which features are computed.
        rounded: the parameters that it rounds to bf16 before every use, whether or not they are held so.
        own_rows: which of P embedded rows this rank has, where tensor ranks have them between them.
        work: counts the pictures that it computed.
        passes: its weights are sent anew with every update, so that features are not worth keeping.
        unsupported: why pictures cannot be used, as far as the probe found a reason; texts alone can.
    """

    unsupported: str | None = None
    passes = False

    def __init__(self, model: PreTrainedModel, base: PreTrainedModel, placeholder_id: int) -> None:
        self.work = WorkCounter()
        self._model, self.base = model, base
        self.placeholder_id = placeholder_id
        self.autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        self.rounded: Callable[[], set[nn.Parameter]] = set
        self.own_rows: Callable[[int], slice] = slice
        self._store: FeatureStore | None = None
        self._grids: dict[int, Grid] = {}
        self._num_rows: dict[int, int] = {}
        self._of_probe: Mapping[int, ImageFeatures] = {}
        self._digest: tuple[object, str] | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> ImageTower | None:
        """Returns the tower of ``model``, None where it is a text model.

        Raises:
            UserError: features of pictures do not go into its sequences in the place of embeddings.
        """
        if getattr(model.config, "vision_config", None) is None:
            return None
        base = getattr(model, model.base_model_prefix, model)
        placeholder_id = getattr(model.config, "image_token_id", None)
        language = language_model(model)
        lacks = [
            name
            for name, there in (
                ("get_image_features", hasattr(base, "get_image_features")),
                ("a language model beside its tower", language not in (model, base)),
                ("an image_token_id in its config", isinstance(placeholder_id, int)),
            )
            if not there
        ]
        if lacks or not isinstance(placeholder_id, int):
            raise UserError(
                f"{type(model).__name__} is no vision-language model that can be trained here",
                found=f"it lacks {' and '.join(lacks)}",
                remedy="use a model that puts features of pictures in the place of embeddings (Qwen-VL, LLaVA, "
                "SmolVLM, InternVL; docs/models.md)",
            )
        return cls(model, base, placeholder_id)

    @cached_property
    def has_axes(self) -> bool:
        """Whether positions are of time, height and width."""
        return hasattr(self.base, "get_rope_index")

    # Weights -----------------------------------------------------------------------------------------------

    def _parts(self) -> dict[str, nn.Module]:
        language = language_model(self._model)
        return {name: child for name, child in self.base.named_children() if child is not language}

    def modules(self) -> Iterator[nn.Module]:
        """Yields those of tower and projector."""
        for part in self._parts().values():
            yield from part.modules()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields the weights of tower and projector."""
        for part in self._parts().values():
            yield from part.parameters()
        yield from self.base.parameters(recurse=False)

    @property
    def trains(self) -> bool:
        """Whether any of its weights takes gradients, so that features hold for one pass only."""
        return any(p.requires_grad for p in self.parameters())

    def freeze(self, train: Literal["language", "projector", "all"]) -> None:
        """Decides what of tower and projector trains beside the language model: nothing, the projector, or both."""
        for parameter in self.parameters():
            parameter.requires_grad_(train != "language")
        if train == "projector":
            for part in self._parts().values():
                for name, parameter in part.named_parameters():
                    # Encoders are models of their own; those of Qwen-VL have the projector, mergers, in them.
                    parameter.requires_grad_(not isinstance(part, PreTrainedModel) or "merger" in name)

    @property
    def digest(self) -> str:
        """Of the weights, as products take them; computed again once one has changed. Within a pass only where ranks
        have them between them.
        """
        weights: dict[str, Tensor] = dict(self.base.named_parameters(recurse=False))
        for name, part in self._parts().items():
            # No state dict: making one would give weights back that ranks have gathered for a pass.
            weights |= {f"{name}.{k}": t for k, t in (*part.named_parameters(), *part.named_buffers())}
        state = [(id(weight), _here(weight.detach())._version) for weight in weights.values()]
        if self._digest is None or self._digest[0] != state:
            found, rounded = blake2b(digest_size=16), {id(p) for p in self.rounded()}
            for name, weight in weights.items():
                # A copy: memory that numpy has seen cannot be given back, as that gathered for a pass is.
                plain = _here(weight.detach()).to(torch.bfloat16 if id(weight) in rounded else weight.dtype, copy=True)
                found.update(f"{name} {tuple(plain.shape)} {plain.dtype} {tensor_digest(plain)}".encode())
            self._digest = state, found.hexdigest()
        return self._digest[1]

    # Features ----------------------------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        """Whether it has pictures to look at."""
        return self._store is not None

    def connect(self, features: FeatureStore) -> None:
        """Gives it the pictures of a run, and what is known of their features."""
        self._store = features

    def save_processor(self, directory: Path) -> None:
        """Writes the files of the run's processor beside a model; nothing where there is none."""
        if self._store is not None:
            self._store.processor.save(directory)

    def features(self, keys: Sequence[int]) -> list[ImageFeatures]:
        """Returns the features of pictures: of this pass alone where the tower trains, else kept ones, on the host.

        Raises:
            UserError: the run has no such picture, or no pictures at all, or the model cannot take any packed.
        """
        if self._of_probe:
            return [self._of_probe[key] for key in keys]
        store = self._connected()
        if self.trains or self.passes:
            found = [self.compute(store.inputs(key)) for key in keys]
        else:
            # What is kept serves passes with gradients too.
            with torch.inference_mode(False), torch.no_grad():
                digest, start = self.digest, os.getpid() % max(1, len(keys))
                # Of several processes each begins elsewhere, and finds what the others have computed meanwhile.
                order = [*keys[start:], *keys[:start]]
                held = {key: store.get(digest, key, self._computed_on_host) for key in order}
                found = [held[key] for key in keys]
        for key, features in zip(keys, found, strict=True):
            self._num_rows[key] = len(features.rows)
            if features.grid is not None:
                self._grids[key] = features.grid
        return found

    @contextlib.contextmanager
    def with_features(self, features: Mapping[int, ImageFeatures]) -> Iterator[None]:
        """Takes these features of pictures in the ``with`` block, whatever the tower would make of them."""
        self._of_probe, former = features, self._grids
        self._grids = {key: each.grid for key, each in features.items() if each.grid is not None}
        try:
            yield
        finally:
            self._of_probe, self._grids = {}, former

    def _computed_on_host(self, inputs: dict[str, Tensor]) -> ImageFeatures:
        found = self.compute(inputs)
        return ImageFeatures(found.rows.cpu(), None if found.deep is None else found.deep.cpu(), found.grid)

    def _connected(self) -> FeatureStore:
        if self.unsupported is not None:
            raise UserError(
                f"{type(self._model).__name__} cannot take pictures here",
                found=self.unsupported,
                remedy="use another family (docs/models.md lists those that the tests prove), or texts alone",
            )
        if self._store is None:
            raise UserError(
                "a sequence has pictures, and the model was given none",
                found=f"{type(self._model).__name__} without a store of features",
                remedy="connect one first (ImageTower.connect)",
            )
        return self._store

    def compute(self, inputs: dict[str, Tensor]) -> ImageFeatures:
        """Runs the tower for one picture.

        Args:
            inputs: as the processor makes them for a batch of this picture alone; what the tower does not know is left
                out.
        """
        device = next(self.parameters()).device
        known = inspect.signature(self.base.get_image_features).parameters
        given = {name: value.to(device) for name, value in inputs.items() if name in known}
        self.work.pictures += 1
        with self.autocast(), contextlib.ExitStack() as plain:
            for module in (self.base, *self.modules()):
                for name, parameter in module.named_parameters(recurse=False):
                    if hasattr(parameter, "full_tensor"):  # an attribute goes before the parameter of its name
                        vars(module)[name] = _here(parameter)
                        plain.callback(vars(module).pop, name)
            output: Any = self.base.get_image_features(**given, return_dict=True)
        deep = getattr(output, "deepstack_features", None)
        layers = None if not deep else torch.stack([_rows(layer) for layer in deep])
        return ImageFeatures(_rows(output.pooler_output), layers, self._grid_of(inputs) if self.has_axes else None)

    # Places ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def placing(self, ids: Tensor) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Has the embedding put features where ``ids [P]`` are those of pictures, in the ``with`` block.

        Pictures are looked for on the host, so that nothing waits for a GPU: ids that lie on one have none.

        Yields:
            ids that the embedding takes, and further arguments of the language model.

        Raises:
            UserError: a picture has fewer rows of features than places, or is not there.
        """
        learns = torch.is_grad_enabled() and self.trains
        mask = picture_places(ids) if ids.device.type == "cpu" else torch.zeros(0, dtype=torch.bool)
        if not learns and not bool(mask.any()):
            yield ids, {}
            return
        embedded_ids, own = ids.masked_fill(mask, 0), self.own_rows(len(ids))
        ids, mask = ids[own], mask[own]
        embedding, extra = self._model.get_input_embeddings(), {}
        device = embedding.weight.device
        places = to_device(mask.nonzero().squeeze(1), device)
        rows, deep = self._selected(ids[mask], device) if len(places) else (None, None)
        if deep is not None:
            extra = {"visual_pos_masks": to_device(mask.unsqueeze(0), device), "deepstack_visual_embeds": list(deep)}

        def put(module: nn.Module, args: Any, embedded: Tensor) -> Tensor:
            found = embedded.squeeze(0)
            if rows is not None:
                found = found.index_put((places,), rows.to(embedded.dtype))
            if learns:  # of all weights in every pass, with pictures or not: ranks add up what each other has
                found = found + 0 * torch.stack([_here(p).sum() for p in self.parameters() if p.requires_grad]).sum()
            return found.unsqueeze(0)

        hook = embedding.register_forward_hook(put)
        try:
            yield embedded_ids, extra
        finally:
            hook.remove()

    def _selected(self, ids: Tensor, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Returns the rows of features of picture ids ``[M]``: ``[M, D]``, and ``[L, M, D]`` where layers take more."""
        keys, rows = split_picture_ids(ids)
        distinct, which = keys.unique(return_inverse=True)
        features = self.features(distinct.tolist())
        sizes = torch.tensor([len(f.rows) for f in features])
        if bool((wrong := rows >= sizes[which]).any()):
            at = int(wrong.nonzero()[0])
            raise _mismatch(int(keys[at]), _num_places(ids, int(keys[at])), int(sizes[which[at]]))
        index = (sizes.cumsum(0) - sizes)[which] + rows

        def selected(parts: list[Tensor], dim: int) -> Tensor:
            table = torch.cat(parts, dim)
            picked = table.index_select(dim, index.to(table.device))
            return picked if picked.device == device else to_device(picked, device)

        deep = [f.deep for f in features if f.deep is not None]
        return selected([f.rows for f in features], 0), selected(deep, 1) if deep else None

    def check_counts(self, ids: Tensor) -> None:
        """Checks that pictures have as many places as rows of features, as far as these were needed until now.

        Args:
            ids: of sequences that have each picture as a whole.

        Raises:
            UserError: one has not.
        """
        for key in split_picture_ids(ids[picture_places(ids)])[0].unique().tolist():
            places = _num_places(ids, key)
            if places != self._num_rows.get(key, places):
                raise _mismatch(key, places, self._num_rows[key])

    def positions(self, ids: Sequence[int], start: int) -> tuple[Tensor, int]:
        """Computes positions of a sequence, or of a piece of one in which no picture begins or ends half.

        Returns:
            ``[3, L]`` of time, height and width, or ``[L]`` where there are no such axes, of the first from ``start``
            on; and the position of what follows.

        Raises:
            UserError: a picture's places are not as many as its features have rows.
        """
        if not self.has_axes:
            return torch.arange(start, start + len(ids)), start + len(ids)
        whole = torch.tensor(ids, dtype=torch.int64)
        places = picture_places(whole).nonzero().squeeze(1).tolist()
        pieces: list[Tensor] = []
        done = upcoming = 0
        while upcoming < len(places):
            first = places[upcoming]
            pieces.append(torch.arange(start, start + first - done).expand(3, -1))
            start += first - done
            key = key_of(ids[first])
            time, height, width = self._grid(key)
            size = time * height * width
            if list(ids[first : first + size]) != picture_ids(key, size):
                raise _mismatch(key, _num_places(whole, key), size)
            number = torch.arange(size)
            axes = (number // (height * width), number // width % height, number % width)
            pieces.append(start + torch.stack(axes))
            start += max(height, width)
            done, upcoming = first + size, upcoming + size
        pieces.append(torch.arange(start, start + len(ids) - done).expand(3, -1))
        return torch.cat(pieces, 1), start + len(ids) - done

    def _grid(self, key: int) -> Grid:
        if key not in self._grids:
            # Outside of a pass ranks may have the weights between them.
            if not self.trains and all(p.is_replicate() for p in getattr(next(self.parameters()), "placements", ())):
                self.features([key])
            else:
                self._grids[key] = self._grid_of(self._connected().inputs(key))
        return self._grids[key]

    def _grid_of(self, inputs: dict[str, Tensor]) -> Grid:
        time, height, width = _triple(inputs["image_grid_thw"][0])
        merged = int(self._model.config.vision_config.spatial_merge_size)
        return time, height // merged, width // merged


def _rows(found: Tensor | Sequence[Tensor]) -> Tensor:
    """Joins what a tower gives of one picture, whether by tiles or not, to ``[n, D]``."""
    return torch.cat([part.flatten(0, -2) for part in found])


def _here(weight: Any) -> Any:
    """Returns what this rank has of it."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def _num_places(ids: Tensor, key: int) -> int:
    """Returns how many places of the picture the ids know of."""
    keys, rows = split_picture_ids(ids[picture_places(ids)])
    return int(rows[keys == key].max()) + 1


def _mismatch(key: int, places: int, rows: int) -> UserError:
    return UserError(
        "the places of a picture in a sequence do not match its features",
        found=f"picture {key:012x}: {places} places, {rows} rows of features",
        remedy="use the processor that belongs to the model (the files beside its config.json)",
    )
