"""A worker's share of a checkpoint: its state, written and read by itself through ``torch.distributed.checkpoint``.

::

    actor/.metadata      which tensors there are, of which shape, and where each part of them lies
    actor/__0_0.distcp   what rank 0 has of the tensors, and the rest of the state
    actor/__1_0.distcp   what rank 1 has of sharded tensors, and so on

Every rank writes what it is the first to hold, by itself: no rank waits for another, and none needs a process group in
the background. Until the checkpoint is complete each has metadata of its own, ``__1.metadata`` say; then they are
joined (``checkpoint_metadata``). A share is read in the parts that are needed, by any number of processes.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as formats
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from quartet.config.file_errors import write_error
from quartet.observe.digests import FileDigest, digested_file, sync_directory
from quartet.observe.memory import copy_fits
from quartet.train.checkpoint import path_of_draft
from quartet.train.checkpoint_metadata import load_metadata
from quartet.train.manifest import METADATA
from quartet.train.parallel.tensors import is_first_holder, local, local_slices
from quartet.train.state import REST, Shape, reading, snapshot, state_bytes

# The caller passes no_dist=True on purpose. For good, since the filters may not be changed in a thread beside others.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


# Writing ---------------------------------------------------------------------------------------------------


class ShareWriter:
    """Writes one share after another: at once, or from a copy in a thread of its own."""

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._written: Future[dict[str, FileDigest]] | None = None

    def begin(self, directory: Path, state: Mapping[str, Any], *, background: bool, rank: int = 0) -> None:
        """Writes ``state`` into the new directory; with ``background`` it may change as soon as this returns.

        Where memory does not allow a copy (``copy_fits``) it is written at once, from where it lies. There is
        never more than one copy: the share before is waited for.

        Args:
            rank: among the workers that have this state, each with its part or its replica.

        Raises:
            UserError: it could not be written. In the background ``finish`` raises that.
        """
        if self._written is not None:
            wait([self._written])
        self._directory, self._written = directory, None
        state = own_part(state, rank)
        # The ranks of one machine make their copies at the same time.
        num_copies = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if not (background and copy_fits(num_copies * state_bytes(state))):
            files = _write(directory, state, rank)
            self._written = Future()
            self._written.set_result(files)
            return
        # An interpreter that ends waits for the file being written. The thread ends with it, so that no idle one keeps
        # its OpenMP threads.
        writer = ThreadPoolExecutor(1, thread_name_prefix="quartet-share")
        self._written = writer.submit(_write, directory, snapshot(state), rank)
        writer.shutdown(wait=False)

    def finish(self, directory: Path) -> dict[str, FileDigest] | None:
        """The files in ``directory`` with their digests once they are written and synced, until then None.

        Empty where this process has not begun that share: it was started after another one's death.

        Raises:
            UserError: they could not be written.
        """
        if directory != self._directory or self._written is None:
            return {}
        return self._written.result() if self._written.done() else None


def own_part(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """What ``rank`` writes: of sharded tensors what it is the first to hold, and rank 0 everything else."""
    return {n: v for n, v in state.items() if (is_first_holder(v) if isinstance(v, DTensor) else rank == 0)}


def _write(directory: Path, state: Mapping[str, Any], rank: int) -> dict[str, FileDigest]:
    try:
        return write_share(directory, state, rank)
    except (OSError, RuntimeError) as error:
        raise write_error(path_of_draft(directory.parent), error, what="checkpoint ") from error


def write_share(directory: Path, state: Mapping[str, Any], rank: int = 0) -> dict[str, FileDigest]:
    """Writes one rank's files of a share, synced; tensors go from where they are to the disk one by one.

    Args:
        state: as ``own_part`` gives it.

    Returns:
        Digests by the files' names in ``directory``, made while they were written.
    """
    writer = _Writer(directory, rank)
    with _cause_raised():
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.save({n: _Part.of(v) for n, v in state.items()}, storage_writer=writer, planner=planner, no_dist=True)
    sync_directory(directory)
    return writer.fs.digests


class _DigestingFiles(FileSystem):
    """Files that are synced when they are closed, with the digests of what was written."""

    def __init__(self) -> None:
        self.digests: dict[str, FileDigest] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with digested_file(Path(path)) as file:
            yield file
        self.digests[Path(path).name] = file.digest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _Writer(dcp.FileSystemWriter):
    fs: _DigestingFiles

    def __init__(self, directory: Path, rank: int) -> None:
        # Files sync themselves; copying ahead would hold more than one tensor at a time.
        super().__init__(directory, sync_files=False, per_thread_copy_ahead=0)
        self.fs = _DigestingFiles()
        self._own_rank = rank

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        # Without collectives the files of a rank, its metadata too, have its number.
        super().set_up_storage_writer(is_coordinator, rank=self._own_rank, use_collectives=self._own_rank == 0)

    def storage_meta(self) -> None:
        """Nothing: it would say where the draft was, and a random number."""


class _Part(Tensor):
    """What is here of a sharded tensor, and where it belongs: torch's own answer is only right where sizes divide."""

    whole: torch.Size
    region: formats.ChunkStorageMetadata

    @classmethod
    def of(cls, value: Any) -> Any:
        """Of a DTensor; anything else as it is."""
        if not isinstance(value, DTensor):
            return value
        part, slices = local(value).as_subclass(cls), local_slices(value)
        part.whole = value.shape
        part.region = formats.ChunkStorageMetadata(
            torch.Size(s.start for s in slices), torch.Size(s.stop - s.start for s in slices)
        )
        return part

    def size(self, *args: Any) -> Any:
        """Of the whole tensor, which is what dcp compares."""
        return self.whole

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = formats.TensorProperties.create_from_tensor(self.__get_tensor_shard__(None))
        data = TensorWriteData(self.region, properties, self.whole)
        return [WriteItem(formats.MetadataIndex(name, self.region.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[formats.ChunkStorageMetadata]:
        return [self.region]

    def __get_tensor_shard__(self, _: object) -> Tensor:
        return self.as_subclass(Tensor)


# Reading ---------------------------------------------------------------------------------------------------


class Share:
    """One share on disk, whose digests were compared already.

    Attributes:
        shapes: of its tensors, by name.

    Raises:
        UserError: it cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with reading(self._directory):
            self._reader = _Reader(directory)
            found = self._reader.read_metadata().state_dict_metadata
        self.shapes: dict[str, Shape] = {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in found.items()
            if isinstance(entry, formats.TensorStorageMetadata)
        }

    def rest(self) -> dict[str, Any]:
        """The part of the state that is no tensor."""
        found: dict[str, Any] = self._load({REST: 0})[REST]
        return found

    def state(self) -> dict[str, Any]:
        """All of it, in memory of its own."""
        tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in self.shapes.items()}
        self.read_into(tensors)
        return {**tensors, REST: self.rest()}

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Every tensor to where it is in ``tensors``, which have this share's names and shapes; one at a time."""
        self._load({name: _Part.of(tensor) for name, tensor in tensors.items()})

    def _load(self, state: dict[str, Any]) -> dict[str, Any]:
        planner = _PlainLoadPlanner()
        with reading(self._directory), _cause_raised():
            dcp.load(state, storage_reader=self._reader, planner=planner, no_dist=True)
        return planner.values


class _Reader(dcp.FileSystemReader):
    """Reads the metadata once."""

    _found: formats.Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> formats.Metadata:
        if self._found is None:
            self._found = load_metadata(Path(self.path) / METADATA)
            self._found.storage_meta = formats.StorageMeta(load_id=self.load_id)
        return self._found


class _PlainLoadPlanner(DefaultLoadPlanner):
    """Takes plain values alone from what is no tensor."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.values: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


@contextmanager
def _cause_raised() -> Iterator[None]:
    """What was raised inside of ``dcp``, in the place of its own exception for it."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
