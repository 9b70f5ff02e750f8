"""Checkpoints: atomic, checked byte for byte before loading; each worker writes and reads its share of one itself.

::

    checkpoints/step_00000050/   actor/, …               a share per role, through ``torch.distributed.checkpoint``
                                 actor/.metadata         which tensors there are, of which shape, where each part lies
                                 actor/__0_0.distcp      what rank 0 has of the tensors, and the rest of the state
                                 actor/__1_0.distcp      what rank 1 has of sharded tensors, and so on
                                 info.json               counters, cursors, the recipe
                                 manifest.json           size and SHA-256 of each file
    checkpoints/damaged_step_…   one that was passed over, until the next is complete

It is written beside its place, synced, then renamed. Every rank writes what it is the first to hold, by itself: no rank
waits for another, and none needs a process group in the background. Until the checkpoint is complete each has metadata
of its own, ``__1.metadata`` say; then they are joined. A share is read in the parts that are needed, by any number of
processes.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import metadata as formats
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from quartet.config import UserError
from quartet.config.errors import read_error, write_error
from quartet.observe.files import FileDigest, digest_file, digested_file, fsync_directory, seal_json, unseal_json
from quartet.observe.memory import copy_fits
from quartet.train.parallel.tensors import local, local_slices
from quartet.train.state import REST, Shape, copy_to_host, naming_state_errors, state_bytes

NAME, METADATA = "manifest.json", ".metadata"
"""Names of the manifest, and of what every share has."""
_STEP = re.compile(r"step_([0-9]{8,})")
_DAMAGED, _DRAFT = "damaged_", ".draft_"

Shares = Mapping[str, Mapping[str, FileDigest]]
"""Of each role the digests of its files, by their names in its directory."""

# The caller passes no_dist=True on purpose. For good, since the filters may not be changed in a thread beside others.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are as they were written.

    Attributes:
        path: each share is in a directory below it, for its workers to read.
        warnings: about other checkpoints that were not used.
    """

    path: Path
    step: int
    info: dict[str, Any]
    warnings: tuple[str, ...] = ()


def checkpoint_path(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def final_checkpoint_path(draft: Path) -> Path:
    """Returns where a draft goes when it is complete."""
    return checkpoint_path(draft.parent, int(draft.name.removeprefix(_DRAFT).partition("_")[0]))


# Whole checkpoints: writing --------------------------------------------------------------------------------


def begin_checkpoint(root: Path, step: int) -> Path:
    """Makes a new, empty directory for the shares of a checkpoint; it does not count until ``complete_checkpoint``.

    Raises:
        UserError: the disk is full or not writable.
    """
    draft = root / f"{_DRAFT}{step:08d}_{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove(root, f"{_DRAFT}*")
        draft.mkdir()
    except OSError as error:
        raise write_error(checkpoint_path(root, step), error, what="checkpoint ") from error
    return draft


def complete_checkpoint(
    draft: Path,
    info: Mapping[str, Any],
    shares: Shares,
    *,
    keep: int,
) -> Path:
    """Adds ``info.json`` and the manifest, and makes it a checkpoint; deletes all but the newest ``keep``.

    Args:
        info: JSON values: counters, cursors, versions.
        shares: what the workers wrote into the draft.

    Raises:
        UserError: the disk is full or not writable, or a share is not there; older checkpoints are untouched.
    """
    final = final_checkpoint_path(draft)
    root, step = final.parent, int(final.name.removeprefix("step_"))
    try:
        joined = {role: join_metadata(draft / role, share) for role, share in shares.items()}
        files = {f"{role}/{name}": digest for role, share in joined.items() for name, digest in share.items()}
        with digested_file(draft / "info.json") as file:
            file.write(json.dumps({"step": step, **info}).encode("ascii"))
        files["info.json"] = file.digest()
        manifest = CheckpointManifest(step=step, shares=list(shares), files=files)
        manifest.check_names(draft)
        manifest.write(draft / NAME)
        fsync_directory(draft)
        former = _set_aside(final) if os.path.lexists(final) else None
        os.replace(draft, final)
        fsync_directory(root)
        if former is not None:
            delete_path(former)
    except CheckpointDamage as error:
        delete_path(draft)
        raise UserError(
            f"checkpoint {final} is not what the workers have written",
            found=str(error),
            remedy="put output_dir on storage that all machines share",
        ) from error
    except OSError as error:
        delete_path(draft)
        raise write_error(final, error, what="checkpoint ") from error
    prune_checkpoints(root, keep)
    _remove(root, f"{_DAMAGED}*")
    return final


def prune_checkpoints(root: Path, keep: int) -> None:
    """Deletes half-written checkpoints and all that are older than the newest ``keep`` good ones.

    What is damaged counts as none: it goes only when enough good ones are newer.
    """
    if not root.is_dir():
        return
    _remove(root, f"{_DRAFT}*")
    good = list_checkpoints(root)
    if len(good) >= keep:
        for step in claimed_steps(root):
            if step < good[-keep]:
                with contextlib.suppress(OSError):  # What cannot be deleted stays, and the next save tries again.
                    delete_path(_set_aside(checkpoint_path(root, step)))


def set_aside_checkpoints_after(root: Path, step: int) -> None:
    """Renames checkpoints after ``step``, which were passed over: a run that goes on from there writes them anew."""
    for later in claimed_steps(root):
        if later > step:
            path = checkpoint_path(root, later)
            delete_path(path.with_name(_DAMAGED + path.name))
            os.replace(path, path.with_name(_DAMAGED + path.name))


# Whole checkpoints: reading --------------------------------------------------------------------------------


def claimed_steps(root: Path) -> list[int]:
    """Returns the steps of everything that has a checkpoint's name, good or not, ascending."""
    names = os.listdir(root) if root.is_dir() else []
    steps = (checkpoint_step(Path(name)) for name in names)
    return sorted(step for step in steps if step is not None and checkpoint_path(root, step).name in names)


def list_checkpoints(root: Path) -> list[int]:
    """Returns the steps of the checkpoints that have all their files in the right sizes, ascending; contents are not
    read.
    """
    found = []
    for step in claimed_steps(root):
        with contextlib.suppress(CheckpointDamage, OSError):
            _check_names(root, step)
            found.append(step)
    return found


def newest_checkpoint(
    root: Path,
    accept: Callable[[Collection[str], Mapping[str, Any]], str | None] = lambda names, info: None,
) -> Checkpoint | None:
    """Finds the newest good checkpoint, with a warning for everything newer that is not; None where none was ever
    written.

    Args:
        accept: given the names of shares and the info, what is wrong with them for the run, or None.

    Raises:
        UserError: there are checkpoints, but no good one, or they cannot be read.
    """
    damaged: list[str] = []
    try:
        for step in reversed(claimed_steps(root)):
            try:
                found = _load(root, step, accept)
            except PermissionError:
                raise  # is no damage: who may read it gets on without losing a step
            except (CheckpointDamage, OSError) as error:
                damaged.append(f"{checkpoint_path(root, step).name}: {_said(error)}")
            else:
                used = checkpoint_path(root, step).name
                told = [f"damaged checkpoint: {text}; the run goes on from {used}" for text in damaged]
                return replace(found, warnings=(*told, *found.warnings))
    except OSError as error:
        raise read_error(Path(error.filename or root), error) from error
    if damaged:
        raise UserError(
            f"no checkpoint in {root} can be used",
            found="; ".join(damaged),
            remedy="restore one of them from a copy, or choose another output_dir to begin anew",
        )
    return None


def find_checkpoint(root: Path, step: int | None) -> Checkpoint:
    """Finds the checkpoint of ``step``, or the newest good one.

    Raises:
        UserError: there is none, it is damaged, or it cannot be read.
    """
    damage = "there is none"
    try:
        found = newest_checkpoint(root) if step is None else _load(root, step, lambda names, info: None)
    except (CheckpointDamage, OSError) as error:
        found, damage = None, _said(error)
    if found is None:
        raise UserError(
            f"there is no checkpoint in {root}" if step is None else f"{checkpoint_path(root, step)} cannot be used",
            found=damage,
            remedy=f"name one of the steps {', '.join(map(str, list_checkpoints(root)))}, or a run that has saved one",
        )
    return found


def checkpoint_step(path: Path) -> int | None:
    """Returns the step of a path that is named as a checkpoint is, None of others."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def _load(root: Path, step: int, accept: Callable[[Collection[str], Mapping[str, Any]], str | None]) -> Checkpoint:
    """Raises ``CheckpointDamage`` and OSError; nothing is unpickled before everything is checked."""
    path = checkpoint_path(root, step)
    manifest = _check_names(root, step)
    manifest.check_content(path)
    info = _read_info(path, step)
    if reason := accept(manifest.shares, info):
        raise CheckpointDamage(reason)
    return Checkpoint(path, step, info)


def _check_names(root: Path, step: int) -> CheckpointManifest:
    """Reads the manifest, and checks that it agrees with the names and sizes that are there."""
    path = checkpoint_path(root, step)
    if not (path / NAME).is_file():
        raise CheckpointDamage(f"{NAME} is missing")
    manifest = CheckpointManifest.read(path / NAME)
    manifest.check_names(path)
    if manifest.step != step:
        raise CheckpointDamage(f"{NAME} says step {manifest.step}")
    return manifest


def _read_info(path: Path, step: int) -> dict[str, Any]:
    try:
        info: Any = json.loads((path / "info.json").read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointDamage(f"info.json is no JSON text ({str(error)[:100]})") from error
    if not isinstance(info, dict) or info.get("step") != step:
        raise CheckpointDamage(f"info.json does not say step {step}")
    return info


def _said(error: CheckpointDamage | OSError) -> str:
    if isinstance(error, OSError):
        return f"{Path(error.filename or '').name} cannot be read ({error.strerror or error})"
    return str(error)


# Files -----------------------------------------------------------------------------------------------------


def _set_aside(checkpoint: Path) -> Path:
    """Renames a checkpoint that is to be deleted, since one half deleted would look damaged."""
    aside = checkpoint.with_name(f".draft_discarded_{checkpoint.name}_{os.getpid()}")
    os.replace(checkpoint, aside)
    return aside


def _remove(root: Path, pattern: str) -> None:
    for path in root.glob(pattern):
        delete_path(path)


def delete_path(path: Path) -> None:
    """Deletes whatever it is; what cannot be deleted stays, and the next save tries again."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


# The manifest ----------------------------------------------------------------------------------------------


class CheckpointDamage(Exception):
    """A checkpoint is not as it was written; the text says in what, and names the file."""


class CheckpointManifest(BaseModel):
    """The files of one checkpoint, by their path inside it: ``manifest.json``, sealed with its own digest.

    It knows files, not what is in them. It tells damage, not malice: who can write the files can write a manifest, too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["quartet-checkpoint-3"] = "quartet-checkpoint-3"
    step: Annotated[int, Field(ge=0)]
    shares: list[str]
    files: dict[str, FileDigest]

    def write(self, path: Path) -> None:
        """Writes the manifest into the file ``path``, synced."""
        with digested_file(path) as file:
            file.write(seal_json(self.model_dump()))

    @classmethod
    def read(cls, path: Path) -> CheckpointManifest:
        """Raises ``CheckpointDamage`` for anything but what ``write`` has written, OSError where it cannot be read."""
        try:
            return cls.model_validate_json(json.dumps(unseal_json(path.read_bytes())))
        except ValueError as error:  # pydantic's, too
            raise CheckpointDamage(f"{NAME} is damaged, or not one of this version ({str(error)[:200]})") from error

    def check_names(self, directory: Path) -> None:
        """Compares names and sizes; opens no file.

        Raises:
            Damage: a file is missing, was added, or is of another size.
        """
        found, named = file_sizes(directory), {name: digest.bytes for name, digest in self.files.items()}
        found.pop(NAME, None)
        if differing := sorted(name for name in found.keys() | named.keys() if found.get(name) != named.get(name)):
            name = differing[0]
            there, wanted = (f"{of[name]:,} bytes" if name in of else "nothing" for of in (found, named))
            raise CheckpointDamage(f"{name} has {there} instead of {wanted}")

    def check_content(self, directory: Path) -> None:
        """Reads every file once and compares the digests; call ``check_names`` before.

        Raises:
            Damage: a file's content has changed.
        """
        for name, digest in self.files.items():
            if digest_file(directory / name) != digest:
                raise CheckpointDamage(f"the content of {name} is not what was written (SHA-256)")


def file_sizes(directory: Path) -> dict[str, int]:
    """Returns the size in bytes of every file in ``directory`` by its path inside.

    Raises:
        OSError: a folder cannot be read, which is no damage.
    """
    found: dict[str, int] = {}
    for folder, _, files in os.walk(directory, onerror=_raised):
        for path in (Path(folder, name) for name in files):
            found[str(path.relative_to(directory))] = path.stat().st_size if path.is_file() else -1
    return found


def _raised(error: OSError) -> None:
    raise error


# Shares: writing -------------------------------------------------------------------------------------------


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
        self._written = writer.submit(_write, directory, copy_to_host(state), rank)
        writer.shutdown(wait=False)

    def finish(self, directory: Path) -> dict[str, FileDigest] | None:
        """Returns the files in ``directory`` with their digests once they are written and synced, until then None.

        Empty where this process has not begun that share: it was started after another one's death.

        Raises:
            UserError: they could not be written.
        """
        if directory != self._directory or self._written is None:
            return {}
        return self._written.result() if self._written.done() else None


def _write(directory: Path, state: Mapping[str, Any], rank: int) -> dict[str, FileDigest]:
    try:
        return write_share(directory, state, rank)
    except (OSError, RuntimeError) as error:
        raise write_error(final_checkpoint_path(directory.parent), error, what="checkpoint ") from error


def write_share(directory: Path, state: Mapping[str, Any], rank: int = 0) -> dict[str, FileDigest]:
    """Writes one rank's files of a share, synced; tensors go from where they are to the disk one by one.

    Args:
        state: what this rank writes.

    Returns:
        Digests by the files' names in ``directory``, made while they were written.
    """
    writer = _Writer(directory, rank)
    with _cause_raised():
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.save({n: _Part.of(v) for n, v in state.items()}, storage_writer=writer, planner=planner, no_dist=True)
    fsync_directory(directory)
    return writer.fs.digests


class _DigestingFiles(FileSystem):
    """Files that are synced when they are closed, with the digests of what was written."""

    def __init__(self) -> None:
        self.digests: dict[str, FileDigest] = {}

    @contextlib.contextmanager
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
        """Returns nothing: it would say where the draft was, and a random number."""


class _Part(Tensor):
    """What is here of a sharded tensor, and where it belongs: torch's own answer is only right where sizes divide."""

    whole: torch.Size
    region: formats.ChunkStorageMetadata

    @classmethod
    def of(cls, value: Any) -> Any:
        """Makes the part of a DTensor that is here; returns anything else as it is."""
        if not isinstance(value, DTensor):
            return value
        part, slices = local(value).as_subclass(cls), local_slices(value)
        part.whole = value.shape
        part.region = formats.ChunkStorageMetadata(
            torch.Size(s.start for s in slices), torch.Size(s.stop - s.start for s in slices)
        )
        return part

    def size(self, *args: Any) -> Any:
        """Returns the size of the whole tensor, which is what dcp compares."""
        return self.whole

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = formats.TensorProperties.create_from_tensor(self.__get_tensor_shard__(None))
        data = TensorWriteData(self.region, properties, self.whole)
        return [WriteItem(formats.MetadataIndex(name, self.region.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[formats.ChunkStorageMetadata]:
        return [self.region]

    def __get_tensor_shard__(self, _: object) -> Tensor:
        return self.as_subclass(Tensor)


# Shares: reading -------------------------------------------------------------------------------------------


class CheckpointShare:
    """One share on disk, whose digests were compared already.

    Attributes:
        shapes: of its tensors, by name.

    Raises:
        UserError: it cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with naming_state_errors(self._directory):
            self._reader = _Reader(directory)
            found = self._reader.read_metadata().state_dict_metadata
        self.shapes: dict[str, Shape] = {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in found.items()
            if isinstance(entry, formats.TensorStorageMetadata)
        }

    def rest(self) -> dict[str, Any]:
        """Returns the part of the state that is no tensor."""
        found: dict[str, Any] = self._load({REST: 0})[REST]
        return found

    def state(self) -> dict[str, Any]:
        """Reads the whole state into memory of its own."""
        tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in self.shapes.items()}
        self.read_into(tensors)
        return {**tensors, REST: self.rest()}

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Reads every tensor to where it is in ``tensors``, which have this share's names and shapes; one at a time."""
        self._load({name: _Part.of(tensor) for name, tensor in tensors.items()})

    def _load(self, state: dict[str, Any]) -> dict[str, Any]:
        planner = _PlainLoadPlanner()
        with naming_state_errors(self._directory), _cause_raised():
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


@contextlib.contextmanager
def _cause_raised() -> Iterator[None]:
    """Raises what was raised inside of ``dcp``, in the place of its own exception for it."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


# Metadata of a share ---------------------------------------------------------------------------------------


def load_metadata(path: Path) -> formats.Metadata:
    """Reads the metadata that a file holds, whose digest was compared before.

    Raises:
        OSError, pickle.UnpicklingError: it cannot be read.
    """
    found: formats.Metadata = pickle.loads(path.read_bytes())
    return found


def join_metadata(directory: Path, files: Mapping[str, FileDigest]) -> dict[str, FileDigest]:
    """Makes one ``.metadata`` of those that the ranks of a share have written; returns the files that are left.

    Args:
        files: of all ranks, in ``directory``.

    Raises:
        Damage: one is not as it was written, or together they do not have all parts of a tensor.
        OSError: they cannot be read or written.
    """
    of_ranks = [name for name in files if name.endswith(METADATA) and name != METADATA]
    if not of_ranks or METADATA not in files:
        return dict(files)
    for name in (METADATA, *of_ranks):  # another machine has written it: unpickled as it was written, or not at all
        if digest_file(directory / name) != files[name]:
            raise CheckpointDamage(f"{directory.name}/{name} is not what its rank has written")
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
                raise CheckpointDamage(
                    f"of {directory.name}'s {tensor} {there:,} numbers are there, of {math.prod(entry.size):,}"
                )
    (directory / METADATA).unlink()
    with digested_file(directory / METADATA) as file:
        pickle.dump(whole, file)
    for name in of_ranks:
        (directory / name).unlink()
    kept = {name: digest for name, digest in files.items() if name not in of_ranks}
    return {**kept, METADATA: file.digest()}
